"""One batch of a Zarr segment: which chunks it has, in which order, and what they hold together.

Owns: dividing columns into chunks and putting them together again, with every index, range and size checked.
Does not know: what the columns mean (zarr_columns.py), how a chunk is encoded, where a batch lies in the file.

Invariants:
1. A batch's chunks lie together, array by array in the order of names, index by index: its bytes alone are enough.
2. The values of a batch begin with a chunk of their own. So `token_ids[begin:end]` of the flat array is right for who
   reads the array, and `begin` minus the position of the batch's first chunk for who reads the batch.
3. Which chunks there must be follows from the batch's number and its ranges. One that is missing, which plain zarr
   would read as zeros, is Damaged, and so is one too many.
4. Before any chunk of a batch is decompressed, what all of them claim is at most BATCH_BYTES_MAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recovery.errors import Damaged
from storage_backends.zarr_arrays import (
    ARRAYS,
    CHUNK_VALUES_MAX,
    NO_RECORD,
    Array,
    Layout,
    array_names,
    chunk_name,
    claimed_length,
    pack_chunk,
    unpack_chunk,
)
from storage_backends.zarr_zip import Entry

BATCH_BYTES_MAX = 1 << 30
"""Largest decompressed size of one batch; writers stay far below."""

PADDING_ALWAYS = 1 << 20
"""Values that may be padding in an array, whatever its length; beyond that never more than it has values."""

Columns = Mapping[str, Array]
"""A batch, by the names of its arrays; ranges count from the batch's first value."""

_FIRST = array_names(())[0]


# ---- writing -------------------------------------------------------------------------------------------------


def layout_of(batches: Sequence[Columns], per_batch: int, types: tuple[str, ...]) -> Layout:
    """The shapes that hold these batches, all of which but the last have `per_batch` records."""
    chunk_values, n_chunks = {}, {}
    for name in array_names(types):
        if ARRAYS[name].ranges:
            lengths = [len(columns[name]) for columns in batches]
            chunk = max(1, min(max(lengths, default=1), CHUNK_VALUES_MAX))
            while chunk > 1 and sum(-length % chunk for length in lengths) > PADDING_ALWAYS + sum(lengths):
                chunk //= 2  # batches differ much in length
            chunk_values[name] = chunk
            n_chunks[name] = sum(-(-length // chunk) for length in lengths)
    return Layout(
        types=types,
        n_records=sum(len(columns["kind"]) for columns in batches),
        per_batch=per_batch,
        chunk_values=chunk_values,
        n_chunks=n_chunks,
    )


def write_batches(batches: Sequence[Columns], layout: Layout) -> Iterator[list[tuple[str, bytes]]]:
    """The chunks of each batch, in order. Raises ValueError for a batch that could not be read again."""
    seen = dict.fromkeys(layout.chunk_values, 0)
    for number, columns in enumerate(batches):
        nbytes = sum(values.nbytes for values in columns.values())
        if nbytes > BATCH_BYTES_MAX // 2:
            raise ValueError(f"a batch of {nbytes} bytes could not be read again")
        begin = {ARRAYS[name].ranges: seen[name] * chunk for name, chunk in layout.chunk_values.items()}
        chunks: list[tuple[str, bytes]] = []
        for name in array_names(layout.types):
            values = columns[name]
            if not ARRAYS[name].ranges:
                if name in begin:
                    values = values + np.uint64(begin[name])
                chunks.append((chunk_name(name, number), pack_chunk(name, values, layout.per_batch)))
                continue
            length = layout.chunk_values[name]
            for first in range(0, len(values), length):
                part = values[first : first + length]
                chunks.append((chunk_name(name, seen[name]), pack_chunk(name, part, length)))
                seen[name] += 1
        yield chunks


# ---- reading -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """The chunks of one array in one batch. `first`: the index of the first; 0 if there is none."""

    first: int
    chunks: tuple[memoryview, ...]


def split(entries: Sequence[Entry], layout: Layout, what: str) -> list[Sequence[Entry]]:
    """The entries of each batch, from those of all."""
    begins = [at for at, entry in enumerate(entries) if entry.name.startswith(f"{_FIRST}/")]
    if len(begins) != layout.n_batches or (begins and begins[0] != 0) or (entries and not begins):
        raise Damaged(f"{what} has other batches than its {layout.n_records} records make")
    return [entries[at:to] for at, to in zip(begins, [*begins[1:], len(entries)], strict=False)]


def runs_of(entries: Sequence[Entry], number: int, types: Sequence[str], what: str) -> dict[str, Run]:
    """The chunks of batch `number` by array; every entry is one, and no array of records is without."""
    runs = {}
    at = 0
    for name in array_names(types):
        kind = ARRAYS[name]
        first = _index(name, entries[at].name) if kind.ranges and at < len(entries) else number
        chunks: list[memoryview] = []
        while first >= 0 and at < len(entries) and entries[at].name == chunk_name(name, first + len(chunks)):
            chunks.append(memoryview(entries[at].data))
            at += 1
        if not kind.ranges and len(chunks) != 1:
            raise Damaged(f"{what}: {chunk_name(name, number)} is missing")
        runs[name] = Run(first if chunks else 0, tuple(chunks))
    if at != len(entries):
        raise Damaged(f"{what} has an entry {entries[at].name!r:.100} where it may have none")
    return runs


def check_all(batches: Sequence[Mapping[str, Run]], layout: Layout, what: str) -> None:
    """Raises Damaged unless the chunks of all batches are exactly those of the arrays' shapes."""
    seen = dict.fromkeys(layout.chunk_values, 0)
    for runs in batches:
        for name in seen:
            run = runs[name]
            if run.chunks and run.first != seen[name]:
                raise Damaged(f"{what}: {chunk_name(name, seen[name])} is missing or out of order")
            seen[name] += len(run.chunks)
    for name, count in seen.items():
        if count != layout.n_chunks[name]:
            raise Damaged(f"{what} has {count} chunks of {name}; its shape makes {layout.n_chunks[name]}")


def read_columns(runs: Mapping[str, Run], n_records: int, layout: Layout | None, what: str) -> dict[str, Array]:
    """The columns of a batch with so many records; with `layout`, chunks have the lengths that it says."""
    lengths = _lengths(runs, what)
    if layout is not None and any(lengths[n] != chunk for n, chunk in layout.chunk_values.items() if runs[n].chunks):
        raise Damaged(f"{what} has a chunk of another length than its array's")
    per_record = [name for name in runs if not ARRAYS[name].ranges]
    if any(lengths[name] != lengths["kind"] for name in per_record):
        raise Damaged(f"{what} has arrays of records of different lengths")
    if layout is not None and lengths["kind"] != layout.per_batch:
        raise Damaged(f"{what} has {lengths['kind']} records in a chunk; its shape says {layout.per_batch}")
    flat = {name: _joined(name, run, lengths[name], what) for name, run in runs.items()}
    found = lengths["kind"] - int(np.count_nonzero(flat["kind"] == NO_RECORD))
    if found != n_records or (flat["kind"][n_records:] != NO_RECORD).any():
        raise Damaged(f"{what} has {found} records where {n_records} were written")
    columns = {name: flat[name][:n_records] for name in per_record}
    ranges = {name: _relative(name, columns[name], what) for name in columns if name.endswith("_range")}
    for name, run in runs.items():
        kind = ARRAYS[name]
        if not kind.ranges:
            continue
        begin, stop = int(columns[kind.ranges][0, 0]), int(ranges[kind.ranges][-1, 1])
        if len(run.chunks) != -(-stop // lengths[name]) or (run.chunks and begin != run.first * lengths[name]):
            raise Damaged(f"{what}: {kind.ranges} asks for other chunks of {name} than there are")
        columns[name] = flat[name][:stop]
    return columns | ranges


def _index(name: str, entry: str) -> int:
    """The index of a chunk of `name`; -1 (no chunk's index) if that is not what the entry is."""
    text = entry.removeprefix(f"{name}/c/")
    return int(text) if len(text) < 16 and text.isascii() and text.isdigit() else -1


def _lengths(runs: Mapping[str, Run], what: str) -> dict[str, int]:
    """The length of each array's chunks, 1 if there are none; bounded one by one and together."""
    lengths, nbytes = {}, 0
    for name, run in runs.items():
        where = f"{what}: a chunk of {name}"
        claims = [claimed_length(name, chunk, where) for chunk in run.chunks]
        lengths[name] = claims[0] if claims else 1
        nbytes += ARRAYS[name].element_nbytes * sum(claims)
        if any(claim != lengths[name] for claim in claims):
            raise Damaged(f"{where} is not as long as the others")
    if nbytes > BATCH_BYTES_MAX:
        raise Damaged(f"{what} claims {nbytes} bytes; at most {BATCH_BYTES_MAX} are allowed")
    return lengths


def _joined(name: str, run: Run, length: int, what: str) -> Array:
    parts = [
        unpack_chunk(name, chunk, length, f"{what}: {chunk_name(name, run.first + number)}")
        for number, chunk in enumerate(run.chunks)
    ]
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate([np.empty((0, *ARRAYS[name].element), ARRAYS[name].dtype), *parts])
    joined.flags.writeable = False
    return joined


def _relative(name: str, ranges: Array, what: str) -> Array:
    """Ranges of one batch, one behind the other, counted from the first; signed."""
    begins, ends = ranges[:, 0], ranges[:, 1]
    if (ends < begins).any() or (begins[1:] != ends[:-1]).any() or ends[-1] - begins[0] > BATCH_BYTES_MAX:
        raise Damaged(f"{what}: the ranges of {name} do not lie one behind the other")
    return (ranges - begins[0]).astype(np.int64)
