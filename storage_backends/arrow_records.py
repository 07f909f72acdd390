"""Records to the columns of one segment batch, and back with every check.

Owns: docs/format.md, section 9, column by column, but for wide columns (arrow_wide.py).
Does not know: files, batches' coordinates, sums over bytes.

Invariants:
1. `from_batch(to_arrays(records)) == records`, bit for bit in tokens, logprobs, masks and wide columns.
2. Records are handed out only if every row keeps every rule of its kind and its digest is that of its content.
3. A message names the record by its call and, for a chunk, its tokens.
4. Columns are checked whole; what is done record by record is the digest of a chunk, and the text of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from recovery.codec import asked_content, request_digest_of
from recovery.errors import Damaged, DigestMismatch
from recovery.model import FINISH_REASONS, MAX_TOKENS_PER_CHUNK, PolicyVersion, Request
from recovery.records import CHUNK, ENDED, OPENED, Records, digests
from storage_backends import arrow_columns as columns
from storage_backends import arrow_wide, strict_json
from storage_backends.arrow_columns import Array
from storage_backends.runs import Runs, pack, problem, unpack

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


# ---- records to columns ---------------------------------------------------------------------------------------


def to_arrays(records: Records, part: slice, types: Sequence[str]) -> list[pa.Array]:
    """The columns of one batch, in the order of schema_fields(types). Raises ValueError for what cannot be stored.

    `types` has at least those of the wide columns of these records.
    """
    kinds = records.kinds[part]
    is_chunk = kinds == CHUNK
    token_at, logprob_at = _within(records.token_at, part), _within(records.logprob_at, part)
    mask_starts, mask_values, mask_at = _masks(records, part, is_chunk)
    versions = pa.array(records.version_at[part], mask=~is_chunk)
    return [
        pa.array(kinds),
        columns.digests(records.call_ids[part]),
        columns.uint32(records.attempts[part], "an attempt"),
        columns.uint32(records.starts[part], "a position"),
        columns.lists(pa.array(_values(records.token_ids, records.token_at, part, "<i4")), token_at),
        columns.lists(
            pa.array(_values(records.logprobs, records.logprob_at, part, "<f4")), logprob_at, np.diff(logprob_at) > 0
        ),
        columns.lists(mask_starts, mask_at),
        columns.lists(mask_values, mask_at),
        pa.array([version.lineage for version in records.versions], pa.utf8()).take(versions),
        pa.array([version.number for version in records.versions], pa.uint64()).take(versions),
        columns.digests(records.digests[part], kinds != ENDED),
        pa.array([_text(records, at) for at in range(*part.indices(len(records)))], pa.utf8()),
        *arrow_wide.to_arrays(records, part, types),
    ]


def _within(positions: Array, part: slice) -> Array:
    """Where the lists of these records begin, counted from the first."""
    bounds = positions[part.start : part.stop + 1]
    return columns.offsets(np.diff(bounds))


def _values(values: Array, positions: Array, part: slice, dtype: str) -> Array:
    return values[positions[part.start] : positions[part.stop]].astype(dtype, copy=False)


def _masks(records: Records, part: slice, is_chunk: Array) -> tuple[pa.Array, pa.Array, Array]:
    first, last = records.mask_at[part.start], records.mask_at[part.stop]
    bounds = np.append(records.mask_at[part][is_chunk], last) - first
    runs = pack(records.mask[first:last], bounds)
    lengths = np.zeros(len(is_chunk), np.int64)
    lengths[is_chunk] = np.diff(runs.positions)
    return pa.array(runs.starts.astype(np.uint32)), pa.array(runs.values), columns.offsets(lengths)


def _text(records: Records, at: int) -> str | None:
    """The body of a record that is no chunk."""
    if (request := records.requests.get(at)) is not None:
        body = {
            "rollout": request.rollout,
            "turn": request.turn,
            "sampling": dict(request.sampling),
            "extra": dict(request.extra),
            "restart_only": request.restart_only,
            "source_digest": request.source_digest,
        }
    elif (end := records.ends.get(at)) is not None:
        body = {"finish_reason": end[0], "stop_reason": end[1]}
    else:
        return None
    return strict_json.dump(body)


# ---- columns to records ---------------------------------------------------------------------------------------


def from_batch(batch: pa.RecordBatch, what: str, wanted: Array | None = None) -> Records:
    """The records of a validated batch. `wanted`: numbers of those of which the digest is computed, if not of all."""
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
    mask, mask_at = _read_masks(mask_starts, mask_values, is_chunk, sizes, what)
    call_ids = columns.sixteens(columns.no_nulls(call_id, "call_id", what))
    starts = columns.numbers(start, "start", what)
    where = _Where(what, kinds, call_ids, starts, sizes)
    if (wrong := columns.present(digest) != (kinds != ENDED)).any():
        raise where.damaged(wrong, "the record has no digest, or one that it may not have")
    if (wrong := ((kinds == OPENED) & (starts != 0)) | ((kinds == ENDED) & (sizes > 0))).any():
        raise where.damaged(wrong, "a record that opens a call has a position, or one that ends it has tokens")
    if (wrong := columns.present(body) == is_chunk).any():
        raise where.damaged(wrong, "the record has no body, or one that a chunk may not have")
    has_logprobs = columns.present(logprobs)
    if (wrong := has_logprobs & (~is_chunk | (np.diff(logprob_at) != sizes))).any():
        raise where.damaged(wrong, "it has logprobs, and not one for each token of a chunk")
    if (wrong := (np.diff(logprob_at) > 0) & ~has_logprobs).any():
        values, logprob_at = _without(values, logprob_at, wrong)
    versions, version_at, wrong = columns.versions(lineage, number, is_chunk)
    if wrong.any():
        raise where.damaged(wrong, "the record has no version, or one that it may not have")
    attempts = columns.numbers(attempt, "attempt", what)
    taken: dict[str, Any] = {
        "call_ids": call_ids,
        "starts": starts,
        "token_ids": columns.numbers(tokens, "token_ids", what),
        "token_at": token_at,
        "logprobs": columns.numbers(values, "logprobs", what),
        "logprob_at": logprob_at,
        "mask": mask,
        "mask_at": mask_at,
        "versions": [PolicyVersion(*version) for version in versions],
        "version_at": version_at,
        "columns": arrow_wide.take_apart(wide, batch.schema, is_chunk, sizes, what),
    }
    bodies = _Bodies(where, taken["token_ids"], token_at)
    texts = body.to_pylist()
    requests = bodies.requests(np.flatnonzero(kinds == OPENED).tolist(), texts)
    ends = {at: bodies.end(at, texts[at]) for at in np.flatnonzero(kinds == ENDED).tolist()}
    computed = digests(request_digests=bodies.digests, **taken, wanted=wanted)
    looked_at = kinds == OPENED
    looked_at[slice(None) if wanted is None else wanted] = True
    if (wrong := (computed != columns.sixteens(digest)) & (kinds != ENDED) & looked_at).any():
        raise where.mismatch(wrong, "the content does not have the recorded digest")
    return Records(kinds=kinds, attempts=attempts, requests=requests, ends=ends, digests=computed, **taken)


def _without(values: pa.Array, positions: Array, null: Array) -> tuple[pa.Array, Array]:
    """The lists without what lies behind those that are null."""
    lengths = np.diff(positions)
    kept = values.filter(pa.array(np.repeat(~null, lengths)))
    return kept, np.concatenate([[0], np.cumsum(np.where(null, 0, lengths))])


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


@dataclass(slots=True)
class _Where:
    """Names a record in a message: `at`, or the first that is wrong."""

    what: str
    kinds: Array
    call_ids: Array
    starts: Array
    sizes: Array
    at: int = 0

    def __str__(self) -> str:
        call, kind = f"{self.what}: call {self.call_ids[self.at].tobytes().hex()}", self.kinds[self.at]
        if kind != CHUNK:
            return f"{call}, {'opened' if kind == OPENED else 'ended'}"
        start = int(self.starts[self.at])
        return f"{call} tokens [{start}, {start + int(self.sizes[self.at])})"

    def damaged(self, wrong: Array, message: str) -> Damaged:
        self.at = int(np.argmax(wrong))
        return Damaged(f"{self}: {message}")

    def mismatch(self, wrong: Array, message: str) -> DigestMismatch:
        self.at = int(np.argmax(wrong))
        hint = "its bytes have the sum they were written with: if another build wrote it, read it with that one"
        return DigestMismatch(f"{self}: {message}", hint=hint)


class _RequestBody(msgspec.Struct):
    """The text of a record that opens a call; unknown fields are ignored."""

    rollout: str
    turn: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    sampling: msgspec.Raw
    extra: msgspec.Raw
    restart_only: str
    source_digest: str


_REQUEST_BODY = msgspec.json.Decoder(_RequestBody)


class _Bodies:
    """Reads the texts of one batch; `digests` are those of the requests, computed from what was read."""

    def __init__(self, where: _Where, tokens: Array, token_at: Array) -> None:
        self._where = where
        self._tokens = tokens
        self._token_bytes = np.ascontiguousarray(tokens, "<i4").view(np.uint8).data
        self._token_at = token_at.tolist()
        self._known: dict[tuple[bytes, bytes], tuple[dict[str, Any], dict[str, Any], bytes]] = {}
        self.digests: dict[int, bytes] = {}

    def requests(self, rows: Sequence[int], texts: Sequence[str]) -> dict[int, Request]:
        tokens, token_bytes, token_at, known = self._tokens, self._token_bytes, self._token_at, self._known
        decode, found, digests = _REQUEST_BODY.decode, {}, self.digests
        for at in rows:
            first, last = token_at[at], token_at[at + 1]
            try:
                body = decode(texts[at])
                asked = bytes(body.sampling), bytes(body.extra)
                sampling, extra, content = known.get(asked) or self._read(*asked)
            except (ValueError, RecursionError, Damaged) as error:
                self._where.at = at
                raise Damaged(f"{self._where}: its request cannot be read: {error}") from error
            digests[at] = request_digest_of(token_bytes[4 * first : 4 * last], content)
            found[at] = Request(
                rollout=body.rollout,
                turn=body.turn,
                prompt_token_ids=tokens[first:last],
                sampling=sampling,
                restart_only=body.restart_only,
                source_digest=body.source_digest,
                extra=extra,
            )
        return found

    def _read(self, sampling: bytes, extra: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
        """Two JSON objects and their asked_content(). The requests of a job are alike: each is parsed once a batch."""
        first, second = (strict_json.parse(text.decode(), "a field") for text in (sampling, extra))
        self._known[sampling, extra] = known = first, second, asked_content(first, second)
        return known

    def end(self, at: int, text: str) -> tuple[str, int | str | None]:
        """Finish and stop reason."""
        self._where.at = at
        body = strict_json.parse(text, self._where)
        reason = strict_json.take(body, "finish_reason", str, self._where)
        if reason not in FINISH_REASONS:
            raise Damaged(f"{self._where}: {reason!r:.60} does not end a call")
        return reason, strict_json.take_stop_reason(body, self._where)
