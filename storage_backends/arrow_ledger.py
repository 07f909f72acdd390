"""ArrowLedgerCodec: ledger rows to one Arrow IPC file and back (docs/format.md, section 8).

Owns: the columns of a ledger object, the numbering of segment keys in it, and the checks of one object by itself.
Does not know: how base and deltas become a ledger, whether a call is contiguous (recovery.ledger), tokens.

Invariants:
1. `segment` of a chunk counts through `header["segments"]` first and `header["ancestors"]` after it.
2. No call has two rows, a base keeps nothing of a parent, `ended` is there if and only if the state is ENDED.
3. Columns are built and taken apart whole; a Python object is made per chunk only as the ChunkRef that is handed out.
4. Mangled bytes give Damaged or FormatNotUnderstood, and nothing else; the header comes back as it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from recovery.model import DROPPED, ENDED, CallId, ChunkRef, LedgerRow, PolicyVersion, RecordRef
from storage_backends import arrow_columns as columns
from storage_backends import arrow_file, ledger_texts, strict_json

FORMAT = "prefix-recovery/ledger"
ROWS_PER_BATCH = 1 << 14
CHUNKS_PER_BATCH = 1 << 20
"""A batch is closed when it lists this many chunks; one row is never divided."""

NBYTES_ALWAYS, RATIO_MAX = 64 << 20, 64
"""A ledger object may decompress to NBYTES_ALWAYS, and to more only in this proportion to its own length: what it holds
most of are digests, which nothing compresses."""

_CHUNK_FIELDS = [
    pa.field("segment", pa.uint32(), nullable=False),
    pa.field("index", pa.uint32(), nullable=False),
    pa.field("start", pa.uint32(), nullable=False),
    pa.field("n_tokens", pa.uint32(), nullable=False),
    pa.field("digest", pa.binary(16), nullable=False),
    pa.field("lineage", pa.utf8(), nullable=False),
    pa.field("number", pa.uint64(), nullable=False),
]
SCHEMA = pa.schema(
    [
        pa.field("call_id", pa.binary(16), nullable=False),
        pa.field("attempt", pa.uint32(), nullable=False),
        pa.field("state", pa.uint8(), nullable=False),
        pa.field("n_tokens", pa.uint32(), nullable=False),
        pa.field("kept", pa.uint32(), nullable=False),
        pa.field("chunks", pa.list_(pa.struct(_CHUNK_FIELDS)), nullable=False),
        pa.field("identity", pa.utf8()),
        pa.field("ended", pa.utf8()),
        pa.field("history", pa.utf8()),
    ]
)


class ArrowLedgerCodec:
    """A LedgerCodec."""

    suffix = "arrow"

    def encode(self, header: Mapping[str, Any], rows: Sequence[LedgerRow]) -> bytes:
        if header.get("format") != FORMAT or header.get("version") != arrow_file.VERSION:
            raise ValueError(f"the header is not that of a {FORMAT} version {arrow_file.VERSION}")
        numbering = {key: number for number, key in enumerate(_segment_keys(header, "the header"))}
        text = strict_json.dump(dict(header)).encode()
        schema = SCHEMA.with_metadata({arrow_file.METADATA_KEY: text})
        batches = (pa.RecordBatch.from_arrays(_to_arrays(part, numbering), schema=schema) for part in _split(rows))
        return arrow_file.write(schema, batches)[0]

    def decode(self, data: bytes) -> tuple[dict[str, Any], list[LedgerRow]]:
        what = "a ledger object"
        parts = arrow_file.split(data, what)
        schema, header = arrow_file.read_schema(data, parts.schema, FORMAT, what)
        arrow_file.check_columns(schema, SCHEMA, what)
        keys = _segment_keys(header, what)
        ledger_texts.check_header(header, what)
        rows: list[LedgerRow] = []
        nbytes_max = NBYTES_ALWAYS + RATIO_MAX * len(data)
        for batch in arrow_file.read_batches(data, parts, ROWS_PER_BATCH, what, nbytes_max):
            rows += _from_batch(batch, keys, what)
        if len({row.call_id for row in rows}) != len(rows):
            raise Damaged(f"{what} has two rows for one call")
        if header.get("parent") is None and any(row.kept for row in rows):
            raise Damaged(f"{what} has no parent and keeps chunks of it")
        return header, rows


def _segment_keys(header: Mapping[str, Any], what: str) -> list[str]:
    """Invariant 1: the key of each segment number."""
    segments, ancestors = header.get("segments", []), header.get("ancestors", [])
    if not isinstance(segments, list | tuple) or not isinstance(ancestors, list | tuple):
        raise Damaged(f"{what}: segments or ancestors are no list")
    keys: list[Any] = [segment.get("key") if isinstance(segment, Mapping) else None for segment in segments]
    keys += ancestors
    if not all(map(ledger_texts.is_segment_key, keys)):
        raise Damaged(f"{what}: segments or ancestors name something that is no key")
    if len(set(keys)) != len(keys):
        raise Damaged(f"{what}: a segment is described twice")
    return keys


def _split(rows: Sequence[LedgerRow]) -> Iterator[Sequence[LedgerRow]]:
    first = n_chunks = 0
    for index, row in enumerate(rows):
        size = len(row.chunks)
        if index > first and (index - first == ROWS_PER_BATCH or n_chunks + size > CHUNKS_PER_BATCH):
            yield rows[first:index]
            first, n_chunks = index, 0
        n_chunks += size
    if first < len(rows):
        yield rows[first:]


def _to_arrays(rows: Sequence[LedgerRow], numbering: Mapping[str, int]) -> list[pa.Array]:
    """The columns of one batch. Raises ValueError for a row that cannot be stored."""
    refs = [ref for row in rows for ref in row.chunks]
    try:
        segments = [numbering[ref.at.segment] for ref in refs]
    except KeyError as error:
        raise ValueError(f"the header does not number segment {error.args[0]}") from None
    chunks = pa.StructArray.from_arrays(
        [
            columns.uint32(segments, "a segment's number"),
            columns.uint32([ref.at.index for ref in refs], "a record's index"),
            columns.uint32([ref.start for ref in refs], "a position"),
            columns.uint32([ref.n_tokens for ref in refs], "a number of tokens"),
            columns.digests([ref.digest for ref in refs], "a digest"),
            pa.array([ref.version.lineage for ref in refs], pa.utf8()),
            pa.array([ref.version.number for ref in refs], pa.uint64()),
        ],
        fields=_CHUNK_FIELDS,
    )
    return [
        columns.digests([row.call_id for row in rows], "a call id"),
        columns.uint32([row.attempt for row in rows], "an attempt"),
        pa.array(np.array([row.state for row in rows], np.uint8)),
        columns.uint32([row.n_tokens for row in rows], "a number of tokens"),
        columns.uint32([row.kept for row in rows], "a number of chunks"),
        columns.lists(chunks, columns.offsets(len(row.chunks) for row in rows)),
        pa.array([ledger_texts.identity_text(row.identity) for row in rows], pa.utf8()),
        pa.array([ledger_texts.ended_text(row.ended) for row in rows], pa.utf8()),
        pa.array([ledger_texts.history_text(row.history) for row in rows], pa.utf8()),
    ]


def _from_batch(batch: pa.RecordBatch, keys: Sequence[str], what: str) -> list[LedgerRow]:
    call_id, attempt, state, n_tokens, kept, chunks, identity, ended, history = batch.columns
    states = columns.numbers(state, "state", what)
    if (states > DROPPED).any():
        raise Damaged(f"{what} has a row of unknown state {int(states.max())}")
    if ((states == ENDED) != columns.present(ended)).any():
        raise Damaged(f"{what} has a row whose state and end do not fit each other")
    refs, bounds = _read_chunks(chunks, keys, what)
    cells = zip(
        columns.digest_values(columns.no_nulls(call_id, "call_id", what)),
        columns.numbers(attempt, "attempt", what).tolist(),
        states.tolist(),
        columns.numbers(n_tokens, "n_tokens", what).tolist(),
        columns.numbers(kept, "kept", what).tolist(),
        bounds[:-1],
        bounds[1:],
        identity.to_pylist(),
        ended.to_pylist(),
        history.to_pylist(),
        strict=True,
    )
    rows = []
    known = dict(zip(keys, keys, strict=True))
    for row_id, row_attempt, row_state, total, n_kept, first, last, who, end, events in cells:
        where = f"{what}: call {row_id.hex()}"
        rows.append(
            LedgerRow(
                call_id=CallId(row_id),
                attempt=row_attempt,
                state=row_state,
                n_tokens=total,
                kept=n_kept,
                chunks=tuple(refs[first:last]),
                identity=None if who is None else ledger_texts.read_identity(who, known, where),
                ended=None if end is None else ledger_texts.read_ended(end, where),
                history=None if events is None else ledger_texts.read_history(events, where),
            )
        )
    return rows


def _read_chunks(column: pa.Array, keys: Sequence[str], what: str) -> tuple[list[ChunkRef], list[int]]:
    """The chunks of all rows, and where those of each row begin and end."""
    values, bounds = columns.list_values(columns.no_nulls(column, "chunks", what), "chunks", what)
    segment, index, start, n_tokens, digest, lineage, number = values.flatten()
    segments = columns.numbers(segment, "segment", what)
    lengths = columns.numbers(n_tokens, "n_tokens", what)
    if segments.size and int(segments.max()) >= len(keys):
        raise Damaged(f"{what} lists a chunk in segment number {int(segments.max())}; it knows {len(keys)} segments")
    if (lengths < 1).any():
        raise Damaged(f"{what} lists a chunk without tokens")
    columns.no_nulls(lineage, "lineage", what)
    versions = _Versions(what)
    cells = zip(
        segments.tolist(),
        columns.numbers(index, "index", what).tolist(),
        columns.numbers(start, "start", what).tolist(),
        lengths.tolist(),
        columns.digest_values(columns.no_nulls(digest, "digest", what)),
        zip(lineage.to_pylist(), columns.numbers(number, "number", what).tolist(), strict=True),
        strict=True,
    )
    refs = [
        ChunkRef(RecordRef(keys[key], at), first, n, content, versions[version])
        for key, at, first, n, content, version in cells
    ]
    return refs, bounds.tolist()


class _Versions(dict[tuple[str, int], PolicyVersion]):
    """One PolicyVersion object per version: a ledger has many chunks and few versions."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __missing__(self, key: tuple[str, int]) -> PolicyVersion:
        if not key[0]:
            raise Damaged(f"{self._what} lists a chunk without a policy lineage")
        self[key] = version = PolicyVersion(*key)
        return version
