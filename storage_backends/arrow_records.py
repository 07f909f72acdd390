"""Records to the columns of one segment batch, and back with every check.

Owns: docs/format.md, section 9, column by column, but for wide columns (arrow_wide.py).
Does not know: files, batches' coordinates, sums over bytes.

Invariants:
1. `from_batch(to_arrays(records)) == records`, bit for bit in tokens, logprobs, masks and wide columns.
2. A record is handed out only if its row keeps every rule of its kind and its digest is that of its content.
3. A message names the record by its call and, for a chunk, its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from recovery.codec import chunk_digest, request_digest
from recovery.errors import Damaged, DigestMismatch
from recovery.model import MAX_TOKENS_PER_CHUNK, CallId, Chunk, Ended, Opened, PolicyVersion, Record, Request
from storage_backends import arrow_columns as columns
from storage_backends import arrow_wide, strict_json
from storage_backends.arrow_columns import Array
from storage_backends.runs import Runs, pack, problem, unpack

OPENED, CHUNK, ENDED = 0, 1, 2

_FIELDS = [
    pa.field("kind", pa.uint8(), nullable=False),
    pa.field("call_id", pa.binary(16), nullable=False),
    pa.field("attempt", pa.uint32(), nullable=False),
    pa.field("start", pa.uint32(), nullable=False),
    pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    pa.field("logprobs", pa.list_(pa.float32())),
    pa.field("mask_starts", pa.list_(pa.uint32()), nullable=False),
    pa.field("mask_values", pa.list_(pa.bool_()), nullable=False),
    pa.field("lineage", pa.utf8()),
    pa.field("number", pa.uint64()),
    pa.field("digest", pa.binary(16)),
    pa.field("body", pa.utf8()),
]


def schema_fields(types: Sequence[str]) -> list[pa.Field]:
    """All fields of a segment that has wide columns of these types."""
    return [*_FIELDS, *arrow_wide.fields(types)]


_NO_TOKENS = np.empty(0, "<i4")
_NO_LOGPROBS = np.empty(0, "<f4")


# ---- records to columns ---------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """One record as what its columns hold."""

    kind: int
    start: int
    tokens: Array
    chunk: Chunk | None = None
    digest: bytes | None = None
    body: str | None = None


def _row(record: Record) -> _Row:
    match record:
        case Chunk():
            return _Row(CHUNK, record.start, record.token_ids, record, chunk_digest(record))
        case Opened():
            request = record.request
            body = {
                "rollout": request.rollout,
                "turn": request.turn,
                "sampling": dict(request.sampling),
                "extra": dict(request.extra),
                "restart_only": request.restart_only,
                "source_digest": request.source_digest,
            }
            digest = request_digest(request)
            return _Row(OPENED, 0, request.prompt_token_ids, None, digest, strict_json.dump(body))
        case Ended():
            body = {"finish_reason": record.finish_reason, "stop_reason": record.stop_reason}
            return _Row(ENDED, record.n_tokens, _NO_TOKENS, body=strict_json.dump(body))


def to_arrays(records: Sequence[Record], types: Sequence[str]) -> list[pa.Array]:
    """The columns of one batch, in the order of schema_fields(types). Raises ValueError or TypeError for a bad record.

    `types` has at least those of the wide columns of `records`.
    """
    rows = [_row(record) for record in records]
    chunks = [row.chunk for row in rows]
    with_logprobs = [None if chunk is None else chunk.logprobs for chunk in chunks]
    has_logprobs = np.array([values is not None for values in with_logprobs], np.bool_)
    sizes = [0 if values is None else values.shape[0] for values in with_logprobs]
    mask_starts, mask_values, mask_positions = _masks(chunks)
    return [
        pa.array(np.array([row.kind for row in rows], np.uint8)),
        columns.digests([record.call_id for record in records], "a call id"),
        columns.uint32([record.attempt for record in records], "an attempt"),
        columns.uint32([row.start for row in rows], "a position"),
        columns.lists(
            pa.array(_joined([_NO_TOKENS, *(row.tokens for row in rows)], "<i4")),
            columns.offsets(row.tokens.shape[0] for row in rows),
        ),
        columns.lists(
            pa.array(_joined([_NO_LOGPROBS, *(v for v in with_logprobs if v is not None)], "<f4")),
            columns.offsets(sizes),
            has_logprobs,
        ),
        columns.lists(mask_starts, mask_positions),
        columns.lists(mask_values, mask_positions),
        pa.array([None if chunk is None else chunk.version.lineage for chunk in chunks], pa.utf8()),
        pa.array([None if chunk is None else chunk.version.number for chunk in chunks], pa.uint64()),
        columns.digests([row.digest for row in rows], "a digest"),
        pa.array([row.body for row in rows], pa.utf8()),
        *arrow_wide.to_arrays(chunks, types),
    ]


def _joined(arrays: list[Array], dtype: str) -> Array:
    """One array; TypeError if an element could change on the way (int64 token ids, float64 logprobs)."""
    return np.concatenate(arrays, dtype=np.dtype(dtype), casting="safe")


def _masks(chunks: Sequence[Chunk | None]) -> tuple[pa.Array, pa.Array, Array]:
    masks = [chunk.mask for chunk in chunks if chunk is not None]
    is_chunk = np.array([chunk is not None for chunk in chunks], np.bool_)
    bounds = np.cumsum([0, *(mask.shape[0] for mask in masks)])
    runs = pack(np.concatenate([np.empty(0, np.bool_), *masks]).astype(np.bool_, casting="safe"), bounds)
    lengths = np.zeros(len(chunks), np.int64)
    lengths[is_chunk] = np.diff(runs.positions)
    return pa.array(runs.starts.astype(np.uint32)), pa.array(runs.values), columns.offsets(lengths)


# ---- columns to records ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Columns:
    """One batch, taken apart; lists are indexed by record."""

    what: str
    kind: list[int]
    call_id: list[bytes]
    attempt: list[int]
    start: list[int]
    tokens: Array
    token_at: list[int]
    logprobs: Array
    logprob_at: list[int]
    has_logprobs: list[bool]
    masks: Array
    mask_at: list[int]
    lineage: list[str | None]
    number: list[int | None]
    digest: list[bytes]
    has_digest: list[bool]
    body: list[str | None]
    wide: arrow_wide.WideColumns


def from_batch(batch: pa.RecordBatch, what: str) -> list[Record]:
    """The records of a validated batch."""
    taken = _take_apart(batch, what)
    return [_READ[kind](taken, index) for index, kind in enumerate(taken.kind)]


def _take_apart(batch: pa.RecordBatch, what: str) -> _Columns:
    kind, call_id, attempt, start, token_ids, logprobs, mask_starts, mask_values, *rest = batch.columns
    lineage, number, digest, body, *wide = rest
    kinds = columns.numbers(kind, "kind", what)
    if (kinds > ENDED).any():
        raise Damaged(f"{what} has a record of unknown kind {int(kinds.max())}")
    for column, name in ((token_ids, "token_ids"), (mask_starts, "mask_starts"), (mask_values, "mask_values")):
        columns.no_nulls(column, name, what)
    tokens, token_at = columns.list_values(token_ids, "token_ids", what)
    values, logprob_at = columns.list_values(logprobs, "logprobs", what)
    is_chunk, sizes = kinds == CHUNK, np.diff(token_at)
    masks, mask_at = _read_masks(mask_starts, mask_values, is_chunk, sizes, what)
    return _Columns(
        what=what,
        kind=kinds.tolist(),
        call_id=columns.digest_values(columns.no_nulls(call_id, "call_id", what)),
        attempt=columns.numbers(attempt, "attempt", what).tolist(),
        start=columns.numbers(start, "start", what).tolist(),
        tokens=columns.numbers(tokens, "token_ids", what),
        token_at=token_at.tolist(),
        logprobs=columns.numbers(values, "logprobs", what),
        logprob_at=logprob_at.tolist(),
        has_logprobs=columns.present(logprobs).tolist(),
        masks=masks,
        mask_at=mask_at.tolist(),
        lineage=lineage.to_pylist(),
        number=number.to_pylist(),
        digest=columns.digest_values(digest),
        has_digest=columns.present(digest).tolist(),
        body=body.to_pylist(),
        wide=arrow_wide.take_apart(wide, batch.schema, is_chunk, sizes, what),
    )


def _read_masks(starts: pa.Array, values: pa.Array, is_chunk: Array, sizes: Array, what: str) -> tuple[Array, Array]:
    """The masks of all chunks, and where that of each record begins and ends in them."""
    start_values, start_at = columns.list_values(starts, "mask_starts", what)
    bool_values, value_at = columns.list_values(values, "mask_values", what)
    lengths = np.diff(start_at)
    if (start_at != value_at).any() or lengths[~is_chunk].any():
        raise Damaged(f"{what}: mask_starts and mask_values do not fit each other or their record")
    if ((sizes < 1) | (sizes > MAX_TOKENS_PER_CHUNK))[is_chunk].any():
        raise Damaged(f"{what} has a chunk that is empty or longer than {MAX_TOKENS_PER_CHUNK} tokens")
    runs = Runs(
        starts=columns.numbers(start_values, "mask_starts", what).astype(np.int64),
        values=bool_values.to_numpy(zero_copy_only=False),
        positions=np.concatenate([[0], np.cumsum(lengths[is_chunk])]),
    )
    bounds = np.concatenate([[0], np.cumsum(sizes[is_chunk])])
    if text := problem(runs, bounds):
        raise Damaged(f"{what}: {text}")
    mask = unpack(runs, bounds)
    mask.flags.writeable = False
    return mask, np.concatenate([[0], np.cumsum(np.where(is_chunk, sizes, 0))])


def _tokens(at: _Columns, index: int) -> str:
    """Which chunk it is, for a message."""
    start, n_tokens = at.start[index], at.token_at[index + 1] - at.token_at[index]
    return f"{at.what}: call {at.call_id[index].hex()} tokens [{start}, {start + n_tokens})"


def _read_chunk(at: _Columns, index: int) -> Chunk:
    first, last = at.token_at[index], at.token_at[index + 1]
    lineage, number = at.lineage[index], at.number[index]
    if not lineage or number is None or not at.has_digest[index] or at.body[index] is not None:
        raise Damaged(f"{_tokens(at, index)}: the chunk has no version or digest, or a body")
    logprobs = None
    if at.has_logprobs[index]:
        logprobs = at.logprobs[at.logprob_at[index] : at.logprob_at[index + 1]]
        if logprobs.shape[0] != last - first:
            raise Damaged(f"{_tokens(at, index)}: it has {logprobs.shape[0]} logprobs")
    chunk = Chunk(
        call_id=CallId(at.call_id[index]),
        attempt=at.attempt[index],
        start=at.start[index],
        token_ids=at.tokens[first:last],
        logprobs=logprobs,
        mask=at.masks[at.mask_at[index] : at.mask_at[index + 1]],
        version=PolicyVersion(lineage, number),
        columns=at.wide.of(index, last - first),
    )
    if chunk_digest(chunk) != at.digest[index]:
        raise DigestMismatch(f"{_tokens(at, index)}: the content does not have the recorded digest")
    return chunk


def _body(at: _Columns, index: int, what: str) -> dict[str, Any]:
    """The JSON of a record that is no chunk, after the checks that both kinds share."""
    body = at.body[index]
    bare = not at.has_logprobs[index] and at.lineage[index] is None and at.number[index] is None
    if not bare or body is None:
        raise Damaged(f"{what}: the record has no body, or parts of a chunk")
    return strict_json.parse(body, what)


def _read_opened(at: _Columns, index: int) -> Opened:
    call_id = at.call_id[index]
    where = f"{at.what}: call {call_id.hex()}, opened"
    body = _body(at, index, where)
    if at.start[index] != 0 or not at.has_digest[index]:
        raise Damaged(f"{where}: it has a position or no digest")
    request = Request(
        rollout=strict_json.take(body, "rollout", str, where),
        turn=strict_json.take_number(body, "turn", where),
        prompt_token_ids=at.tokens[at.token_at[index] : at.token_at[index + 1]],
        sampling=strict_json.take(body, "sampling", dict, where),
        restart_only=strict_json.take(body, "restart_only", str, where),
        source_digest=strict_json.take(body, "source_digest", str, where),
        extra=strict_json.take(body, "extra", dict, where),
    )
    try:
        digest = request_digest(request)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: its request cannot be digested: {error}") from error
    if digest != at.digest[index]:
        raise DigestMismatch(f"{where}: the request does not have the recorded digest")
    return Opened(call_id=CallId(call_id), attempt=at.attempt[index], request=request)


def _read_ended(at: _Columns, index: int) -> Ended:
    call_id = at.call_id[index]
    where = f"{at.what}: call {call_id.hex()}, ended"
    body = _body(at, index, where)
    if at.token_at[index] != at.token_at[index + 1] or at.has_digest[index]:
        raise Damaged(f"{where}: it has tokens or a digest")
    try:
        return Ended(
            call_id=CallId(call_id),
            attempt=at.attempt[index],
            n_tokens=at.start[index],
            finish_reason=strict_json.take(body, "finish_reason", str, where),
            stop_reason=strict_json.take_stop_reason(body, where),
        )
    except ValueError as error:
        raise Damaged(f"{where}: {error}") from error


_READ: dict[int, Callable[[_Columns, int], Record]] = {OPENED: _read_opened, CHUNK: _read_chunk, ENDED: _read_ended}
