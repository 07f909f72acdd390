"""ArrowLedgerCodec: ledger rows to one Arrow IPC file and back (docs/format.md, section 8).

Owns: the columns of a ledger object, and the checks of one object by itself.
Does not know: how objects become a ledger, whether a call is contiguous (recovery.ledger_rows), which segment has which
number, tokens.

Invariants:
1. No call has two rows, one without a parent keeps nothing of it, `ended` is there if and only if the state is ENDED.
2. No segment and no number is described twice in one object.
3. Columns are built and taken apart whole; no Python object is made per chunk.
4. Mangled bytes give Damaged or FormatNotUnderstood, and nothing else; the header comes back as it was given.
5. Rows that compress better than a reader believes (histories that are the same for all calls) make a longer object,
   not one that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, starmap
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from recovery.ledger_columns import NO_ID, PACKED, LedgerRows, Names, PackedChunks
from recovery.model import DROPPED, ENDED, CallId, Identity, PolicyVersion, RecordRef
from storage_backends import arrow_columns as columns
from storage_backends import arrow_file, arrow_lineage, arrow_numbers, ledger_texts, strict_json
from storage_backends.arrow_columns import Array
from storage_backends.keys import is_key
from storage_backends.strict_json import Where

T = TypeVar("T")

FORMAT = "prefix-recovery/ledger"
FEATURES, FIELDS = (arrow_numbers.FEATURE, arrow_lineage.FEATURE), (arrow_numbers.FIELD, arrow_lineage.FIELD)
"""What an object may require, in the order in which it says so, and the column that comes with each."""

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
_IDENTITY_FIELDS = [
    pa.field("rollout", pa.utf8()),
    pa.field("turn", pa.uint64()),
    pa.field("request_digest", pa.binary(16)),
    pa.field("source_digest", pa.utf8()),
    pa.field("restart_only", pa.utf8()),
    pa.field("segment", pa.utf8()),
    pa.field("index", pa.uint32()),
]
SCHEMA = pa.schema(
    [
        pa.field("call_id", pa.binary(16), nullable=False),
        pa.field("attempt", pa.uint32(), nullable=False),
        pa.field("state", pa.uint8(), nullable=False),
        pa.field("n_tokens", pa.uint32(), nullable=False),
        pa.field("kept", pa.uint32(), nullable=False),
        pa.field("chunks", pa.list_(pa.struct(_CHUNK_FIELDS)), nullable=False),
        pa.field("identity", pa.struct(_IDENTITY_FIELDS)),
        pa.field("ended", pa.utf8()),
        pa.field("history", pa.utf8()),
    ]
)


class ArrowLedgerCodec:
    """A LedgerCodec. `rows_per_batch`: that it writes at most; it reads any number that the format allows."""

    suffix = "arrow"

    def __init__(self, rows_per_batch: int = ROWS_PER_BATCH) -> None:
        self._rows_per_batch = rows_per_batch

    def encode(self, header: Mapping[str, Any], rows: LedgerRows) -> bytes:
        if header.get("format") != FORMAT or header.get("version") != arrow_file.VERSION:
            raise ValueError(f"the header is not that of a {FORMAT} version {arrow_file.VERSION}")
        needed = (arrow_numbers.is_needed(rows), arrow_lineage.is_needed(rows.identities))
        asked = {**header, "requires": list(compress(FEATURES, needed))}
        version_at = None
        if needed[0]:
            asked["versions"], version_at = arrow_numbers.said_versions(rows)
            rows = replace(rows, call_ids=rows.shortest_ids())
        text, chunks, bounds = strict_json.dump(asked).encode(), rows.chunks, rows.bounds
        while True:
            schema = _schema(asked["requires"]).with_metadata({arrow_file.METADATA_KEY: text})
            batches = (
                pa.RecordBatch.from_arrays(_to_arrays(rows, part, chunks, bounds, needed, version_at), schema=schema)
                for part in _split(bounds, self._rows_per_batch)
            )
            data, parts = arrow_file.write(schema, batches)
            if (beyond := arrow_file.claimed_nbytes(data, parts) - _nbytes_max(data)) <= 0:
                return data
            text += b" " * -(-beyond // RATIO_MAX)

    def decode(self, data: bytes, names: Names) -> tuple[dict[str, Any], LedgerRows]:
        what = "a ledger object"
        parts = arrow_file.split(data, what)
        schema, header = arrow_file.read_schema(data, parts.schema, FORMAT, what, FEATURES)
        requires = header.get("requires", [])
        arrow_file.check_columns(schema, _schema(requires), what)
        ledger_texts.check_header(header, what)
        numbered = arrow_numbers.FEATURE in requires
        versions = arrow_numbers.read_versions(header, names, what) if numbered else None
        rows = LedgerRows(names)
        groups = arrow_file.groups(data, parts, ROWS_PER_BATCH, what, _nbytes_max(data))
        read = ((arrow_file.read_group(data, parts.schema, group, what), group.lengths) for group in groups)
        rows.packed = b"".join([_read_batches(*batches, rows, requires, versions, what) for batches in read])
        named = [call_id for call_id in rows.call_ids if call_id != NO_ID] if numbered else rows.call_ids
        if len(set(named)) != len(named):
            raise Damaged(f"{what} has two rows for one call")
        if numbered:
            arrow_numbers.check(rows, what)
        if header.get("parent") is None and any(rows.kept):
            raise Damaged(f"{what} has no parent and keeps chunks of it")
        return header, rows


def _nbytes_max(data: bytes) -> int:
    return NBYTES_ALWAYS + RATIO_MAX * len(data)


def _schema(requires: Sequence[str]) -> pa.Schema:
    more = [field for feature, field in zip(FEATURES, FIELDS, strict=True) if feature in requires]
    return pa.schema([*SCHEMA, *more])


def _split(bounds: Array, rows_max: int) -> Iterator[slice]:
    """The rows of each batch; row i has the chunks from bounds[i] to bounds[i + 1]."""
    first, n_rows = 0, len(bounds) - 1
    while first < n_rows:
        enough = int(np.searchsorted(bounds, bounds[first] + CHUNKS_PER_BATCH, "right")) - 1
        last = min(n_rows, first + rows_max, max(first + 1, enough))
        yield slice(first, last)
        first = last


def _to_arrays(
    rows: LedgerRows,
    part: slice,
    chunks: PackedChunks,
    bounds: Array,
    needed: tuple[bool, bool],
    version_at: Array | None,
) -> list[pa.Array]:
    """The columns of one batch. Raises ValueError for a row that cannot be stored."""
    first, last = bounds[part.start], bounds[part.stop]
    listed = _chunk_array(chunks[first:last], rows.names, version_at)
    return [
        columns.digests(_call_ids(rows.call_ids[part])),
        columns.uint32(rows.attempts[part], "an attempt"),
        pa.array(np.array(rows.states[part], np.uint8)),
        columns.uint32(rows.n_tokens[part], "a number of tokens"),
        columns.uint32(rows.kept[part], "a number of chunks"),
        columns.lists(listed, columns.offsets(rows.n_chunks[part])),
        _identity_array(rows.identities[part]),
        pa.array(map(ledger_texts.ended_text, rows.ended[part]), pa.utf8()),
        pa.array(map(ledger_texts.history_text, rows.histories[part]), pa.utf8()),
        *([arrow_numbers.array_of(rows.numbers[part])] if needed[0] else []),
        *([arrow_lineage.array_of(rows.identities[part])] if needed[1] else []),
    ]


def _call_ids(values: list[CallId]) -> Array:
    if not all(len(value) == 16 for value in values):
        raise ValueError("a call id has to have 16 bytes")
    return np.frombuffer(b"".join(values), "V16")


def _identity_array(identities: list[Identity | None]) -> pa.Array:
    there = [identity for identity in identities if identity is not None]
    cells = (
        [identity.rollout for identity in there],
        [identity.turn for identity in there],
        [identity.request_digest for identity in there],
        [identity.source_digest for identity in there],
        [identity.restart_only for identity in there],
        [identity.opened.segment for identity in there],
        [identity.opened.index for identity in there],
    )
    arrays = [pa.array(values, field.type) for values, field in zip(cells, _IDENTITY_FIELDS, strict=True)]
    dense = pa.StructArray.from_arrays(arrays, fields=_IDENTITY_FIELDS)
    present = np.array([identity is not None for identity in identities], np.bool_)
    return dense if present.all() else dense.take(pa.array(np.cumsum(present) - 1, mask=~present))


def _chunk_array(chunks: PackedChunks, names: Names, version_at: Array | None) -> pa.StructArray:
    """`version_at`: where in the header each version is; None: a chunk says its own."""
    if version_at is None:
        versions = pa.array(chunks["version"])
        lineages = pa.array([version.lineage for version in names.versions], pa.utf8()).take(versions)
        numbers = pa.array([version.number for version in names.versions], pa.uint64()).take(versions)
    else:
        lineages, numbers = arrow_numbers.no_lineages(len(chunks)), pa.array(version_at[chunks["version"]])
    return pa.StructArray.from_arrays(
        [
            *(pa.array(np.ascontiguousarray(chunks[name])) for name in ("segment", "index", "start", "n_tokens")),
            columns.digests(chunks["digest"]),
            lineages,
            numbers,
        ],
        fields=_CHUNK_FIELDS,
    )


def _read_batches(
    joined: pa.RecordBatch,
    lengths: Sequence[int],
    rows: LedgerRows,
    requires: Sequence[str],
    versions: Array | None,
    what: str,
) -> bytes:
    """Append the rows of validated batches that were joined (`lengths`: the rows of each); their chunks are returned.

    `versions`: those of the header, by place.
    """
    call_id, attempt, state, n_tokens, kept, chunks, identity, ended, history, *others = joined.columns
    states = columns.numbers(state, "state", what)
    if (states > DROPPED).any():
        raise Damaged(f"{what} has a row of unknown state {int(states.max())}")
    if ((states == ENDED) != columns.present(ended)).any():
        raise Damaged(f"{what} has a row whose state and end do not fit each other")
    packed, bounds = _read_chunks(chunks, rows.names, versions, what)
    call_ids = columns.digest_values(columns.no_nulls(call_id, "call_id", what))
    rows.call_ids += map(CallId, call_ids)
    rows.attempts += columns.numbers(attempt, "attempt", what).tolist()
    rows.states += states.tolist()
    rows.n_tokens += columns.numbers(n_tokens, "n_tokens", what).tolist()
    rows.kept += columns.numbers(kept, "kept", what).tolist()
    rows.n_chunks += np.diff(bounds).tolist()
    rows.numbers += [0] * len(call_ids) if versions is None else arrow_numbers.read(others[0], lengths, what)
    identities = _read_identities(identity, call_ids, what)
    with_lineage = arrow_lineage.FEATURE in requires
    rows.identities += arrow_lineage.read(others[-1], identities, what) if with_lineage else identities
    rows.ended += _read_texts(ended, call_ids, what, ledger_texts.read_ended)
    rows.histories += _read_texts(history, call_ids, what, ledger_texts.read_history)
    return packed.tobytes()


def _read_texts(column: pa.Array, call_ids: list[bytes], what: str, read: Callable[[str, Where], T]) -> list[T | None]:
    """What each text of a column says; most say the same."""
    if column.null_count == len(column):
        return [None] * len(column)
    texts: list[str | None] = column.to_pylist()
    known: dict[str | None, T | None] = {None: None}
    for text, call_id in zip(texts, call_ids, strict=True):
        if text is not None and text not in known:
            known[text] = read(text, _Call(what, call_id))
    return [known[text] for text in texts]


@dataclass(frozen=True, slots=True)
class _Call:
    """Names a call in a message."""

    what: str
    call_id: bytes

    def __str__(self) -> str:
        return f"{self.what}: call {self.call_id.hex()}"


def _read_identities(column: pa.Array, call_ids: list[bytes], what: str) -> list[Identity | None]:
    found: list[Identity | None] = [None] * len(column)
    rows = np.flatnonzero(columns.present(column)).tolist()
    if not rows:
        return found
    dense = column if len(rows) == len(column) else column.filter(column.is_valid())
    parts = dense.flatten()
    for part, field in zip(parts, _IDENTITY_FIELDS, strict=True):
        if part.null_count:
            at = int(np.argmin(columns.present(part)))
            raise Damaged(f"{_Call(what, call_ids[rows[at]])}: its identity has no {field.name}")
    rollout, turn, digest, source, restart_only, segment, index = parts
    turns, keys = columns.numbers(turn, "turn", what), segment.dictionary_encode()
    if (beyond := turns >= 1 << 63).any():
        raise Damaged(f"{_Call(what, call_ids[rows[int(np.argmax(beyond))]])}: its turn is out of range")
    names: list[str] = keys.dictionary.to_pylist()
    name_at = keys.indices.to_numpy()
    for number, key in enumerate(names):
        if not is_key(key):
            row = rows[int(np.argmax(name_at == number))]
            raise Damaged(f"{_Call(what, call_ids[row])}: {key!r:.200} is no key of a segment")
    places = map(RecordRef, map(names.__getitem__, name_at.tolist()), columns.numbers(index, "index", what).tolist())
    cells = zip(
        rollout.to_pylist(), turns.tolist(), columns.digest_values(digest), source.to_pylist(),
        restart_only.to_pylist(), places,
        strict=True,
    )  # fmt: skip
    for row, identity in zip(rows, starmap(Identity, cells), strict=True):
        found[row] = identity
    return found


def _read_chunks(column: pa.Array, names: Names, said: Array | None, what: str) -> tuple[PackedChunks, Array]:
    """The chunks of all rows, and where those of each row begin and end."""
    values, bounds = columns.list_values(columns.no_nulls(column, "chunks", what), "chunks", what)
    segment, index, start, n_tokens, digest, lineage, number = values.flatten()
    packed = np.empty(len(values), PACKED)
    packed["segment"] = columns.numbers(segment, "segment", what)
    packed["index"] = columns.numbers(index, "index", what)
    packed["start"] = columns.numbers(start, "start", what)
    packed["n_tokens"] = columns.numbers(n_tokens, "n_tokens", what)
    packed["digest"] = columns.sixteens(columns.no_nulls(digest, "digest", what))
    packed["version"] = (
        _read_versions(lineage, number, names, what)
        if said is None
        else arrow_numbers.version_numbers(lineage, number, said, what)
    )
    if (packed["n_tokens"] < 1).any():
        raise Damaged(f"{what} lists a chunk without tokens")
    return packed, bounds


def _read_versions(lineage: pa.Array, number: pa.Array, names: Names, what: str) -> Array:
    columns.no_nulls(lineage, "lineage", what)
    columns.no_nulls(number, "number", what)
    versions, version_at, wrong = columns.versions(lineage, number, np.ones(len(lineage), np.bool_))
    if wrong.any():
        raise Damaged(f"{what} lists a chunk without a policy lineage")
    numbers = [names.version_number(PolicyVersion(*version)) for version in versions]
    return np.array(numbers, np.uint32)[version_at]
