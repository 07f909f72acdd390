"""ArrowLedgerCodec: ledger rows to one Arrow IPC file and back (docs/format.md, section 8).

Owns: the columns of a ledger object, and the checks of one object by itself.
Does not know: how objects become a ledger, whether a call is contiguous (recovery.ledger_rows), which segment has which
number, tokens.

Invariants:
1. No call has two rows, one without a parent keeps nothing of it, `ended` is there if and only if the state is ENDED.
2. No segment and no number is described twice in one object.
3. Columns are built and taken apart whole; no Python object is made per chunk.
4. Mangled bytes give Damaged or FormatNotUnderstood, and nothing else; the header comes back as it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from recovery.ledger_columns import PACKED, LedgerRows, Names, PackedChunks
from recovery.model import DROPPED, ENDED, CallId, PolicyVersion
from storage_backends import arrow_columns as columns
from storage_backends import arrow_file, ledger_texts, strict_json
from storage_backends.arrow_columns import Array

T = TypeVar("T")

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

    def encode(self, header: Mapping[str, Any], rows: LedgerRows) -> bytes:
        if header.get("format") != FORMAT or header.get("version") != arrow_file.VERSION:
            raise ValueError(f"the header is not that of a {FORMAT} version {arrow_file.VERSION}")
        text = strict_json.dump(dict(header)).encode()
        schema = SCHEMA.with_metadata({arrow_file.METADATA_KEY: text})
        chunks, bounds = rows.chunks, rows.bounds
        batches = (
            pa.RecordBatch.from_arrays(_to_arrays(rows, part, chunks, bounds), schema=schema) for part in _split(bounds)
        )
        return arrow_file.write(schema, batches)[0]

    def decode(self, data: bytes, names: Names) -> tuple[dict[str, Any], LedgerRows]:
        what = "a ledger object"
        parts = arrow_file.split(data, what)
        schema, header = arrow_file.read_schema(data, parts.schema, FORMAT, what)
        arrow_file.check_columns(schema, SCHEMA, what)
        ledger_texts.check_header(header, what)
        rows = LedgerRows(names)
        nbytes_max = NBYTES_ALWAYS + RATIO_MAX * len(data)
        batches = arrow_file.read_batches(data, parts, ROWS_PER_BATCH, what, nbytes_max)
        packed = [_read_batch(batch, rows, what) for batch in batches]
        rows.packed = b"".join(packed)
        if len(set(rows.call_ids)) != len(rows):
            raise Damaged(f"{what} has two rows for one call")
        if header.get("parent") is None and any(rows.kept):
            raise Damaged(f"{what} has no parent and keeps chunks of it")
        return header, rows


def _split(bounds: Array) -> Iterator[slice]:
    """The rows of each batch; row i has the chunks from bounds[i] to bounds[i + 1]."""
    first, n_rows = 0, len(bounds) - 1
    while first < n_rows:
        enough = int(np.searchsorted(bounds, bounds[first] + CHUNKS_PER_BATCH, "right")) - 1
        last = min(n_rows, first + ROWS_PER_BATCH, max(first + 1, enough))
        yield slice(first, last)
        first = last


def _to_arrays(rows: LedgerRows, part: slice, chunks: PackedChunks, bounds: Array) -> list[pa.Array]:
    """The columns of one batch. Raises ValueError for a row that cannot be stored."""
    first, last = bounds[part.start], bounds[part.stop]
    return [
        columns.digests(rows.call_ids[part], "a call id"),
        columns.uint32(rows.attempts[part], "an attempt"),
        pa.array(np.array(rows.states[part], np.uint8)),
        columns.uint32(rows.n_tokens[part], "a number of tokens"),
        columns.uint32(rows.kept[part], "a number of chunks"),
        columns.lists(_chunk_array(chunks[first:last], rows.names), columns.offsets(rows.n_chunks[part])),
        pa.array(map(ledger_texts.identity_text, rows.identities[part]), pa.utf8()),
        pa.array(map(ledger_texts.ended_text, rows.ended[part]), pa.utf8()),
        pa.array(map(ledger_texts.history_text, rows.histories[part]), pa.utf8()),
    ]


def _chunk_array(chunks: PackedChunks, names: Names) -> pa.StructArray:
    versions = pa.array(chunks["version"])
    lineages = pa.array([version.lineage for version in names.versions], pa.utf8())
    numbers = pa.array([version.number for version in names.versions], pa.uint64())
    digests = pa.py_buffer(chunks["digest"].tobytes())
    return pa.StructArray.from_arrays(
        [
            *(pa.array(np.ascontiguousarray(chunks[name])) for name in ("segment", "index", "start", "n_tokens")),
            pa.Array.from_buffers(columns.DIGEST, len(chunks), [None, digests]),
            lineages.take(versions),
            numbers.take(versions),
        ],
        fields=_CHUNK_FIELDS,
    )


def _read_batch(batch: pa.RecordBatch, rows: LedgerRows, what: str) -> bytes:
    """Append the rows of a validated batch; their chunks are returned."""
    call_id, attempt, state, n_tokens, kept, chunks, identity, ended, history = batch.columns
    states = columns.numbers(state, "state", what)
    if (states > DROPPED).any():
        raise Damaged(f"{what} has a row of unknown state {int(states.max())}")
    if ((states == ENDED) != columns.present(ended)).any():
        raise Damaged(f"{what} has a row whose state and end do not fit each other")
    packed, bounds = _read_chunks(chunks, rows.names, what)
    call_ids = columns.digest_values(columns.no_nulls(call_id, "call_id", what))
    rows.call_ids += map(CallId, call_ids)
    rows.attempts += columns.numbers(attempt, "attempt", what).tolist()
    rows.states += states.tolist()
    rows.n_tokens += columns.numbers(n_tokens, "n_tokens", what).tolist()
    rows.kept += columns.numbers(kept, "kept", what).tolist()
    rows.n_chunks += np.diff(bounds).tolist()
    where = [f"{what}: call {row_id.hex()}" for row_id in call_ids]
    keys: dict[str, str] = {}
    rows.identities += _texts(identity, where, lambda text, at: ledger_texts.read_identity(text, keys, at))
    rows.ended += _texts(ended, where, ledger_texts.read_ended)
    rows.histories += _texts(history, where, ledger_texts.read_history)
    return packed.tobytes()


def _texts(column: pa.Array, where: list[str], read: Callable[[str, str], T]) -> list[T | None]:
    """What each text of a column says."""
    if column.null_count == len(column):
        return [None] * len(column)
    return [None if text is None else read(text, at) for text, at in zip(column.to_pylist(), where, strict=True)]


def _read_chunks(column: pa.Array, names: Names, what: str) -> tuple[PackedChunks, Array]:
    """The chunks of all rows, and where those of each row begin and end."""
    values, bounds = columns.list_values(columns.no_nulls(column, "chunks", what), "chunks", what)
    segment, index, start, n_tokens, digest, lineage, number = values.flatten()
    packed = np.empty(len(values), PACKED)
    packed["segment"] = columns.numbers(segment, "segment", what)
    packed["index"] = columns.numbers(index, "index", what)
    packed["start"] = columns.numbers(start, "start", what)
    packed["n_tokens"] = columns.numbers(n_tokens, "n_tokens", what)
    packed["digest"] = columns.sixteens(columns.no_nulls(digest, "digest", what))
    packed["version"] = _read_versions(lineage, number, names, what)
    if (packed["n_tokens"] < 1).any():
        raise Damaged(f"{what} lists a chunk without tokens")
    return packed, bounds


def _read_versions(lineage: pa.Array, number: pa.Array, names: Names, what: str) -> Array:
    """Each chunk's version as its number in `names`: a ledger has many chunks and few versions."""
    lineages = columns.no_nulls(lineage, "lineage", what).dictionary_encode()
    texts = lineages.dictionary.to_pylist()
    if "" in texts:
        raise Damaged(f"{what} lists a chunk without a policy lineage")
    distinct, which = np.unique(columns.numbers(number, "number", what), return_inverse=True)
    pairs = which * len(texts) + lineages.indices.to_numpy()
    distinct_pairs, which = np.unique(pairs, return_inverse=True)
    versions = [
        names.version_number(PolicyVersion(texts[pair % len(texts)], int(distinct[pair // len(texts)])))
        for pair in distinct_pairs.tolist()
    ]
    return np.array(versions, np.uint32)[which]
