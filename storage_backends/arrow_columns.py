"""Arrow columns out of numpy and back, without a Python object per element.

Owns: building and taking apart the few kinds of columns that segments and ledgers have.
Does not know: which columns those are.

Invariants:
1. What comes back are views of Arrow's memory, read-only; a view keeps the batch that it is part of alive.
2. Taking apart is for validated batches (arrow_file.read_group); what the format forbids on top is Damaged.
3. Numbers that do not fit a column are ValueError when written, never wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recovery.errors import Damaged

Array = npt.NDArray[Any]
DIGEST = pa.binary(16)


# ---- building ------------------------------------------------------------------------------------------------


def uint32(values: Sequence[int] | Array, name: str) -> pa.Array:
    try:
        wide = np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(f"{name} does not fit 32 bits") from error
    if wide.size and (wide.min() < 0 or wide.max() > 0xFFFFFFFF):
        raise ValueError(f"{name} does not fit 32 bits")
    return pa.array(wide.astype(np.uint32))


def digests(values: Array, present: Array | None = None) -> pa.Array:
    """A column of 16-byte strings (dtype V16), some of which may be null."""
    bitmap = None if present is None or present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(DIGEST, len(values), [bitmap, pa.py_buffer(np.ascontiguousarray(values))])


def offsets(lengths: Iterable[int]) -> Array:
    """Where each list begins, and where the last ends. Raises ValueError if a column cannot hold them."""
    ends = np.fromiter(lengths, np.int64)
    positions = np.zeros(ends.size + 1, np.int64)
    np.cumsum(ends, out=positions[1:])
    if positions[-1] > 0x7FFFFFFF:
        raise ValueError("the lists of one batch are too long together")
    return positions.astype(np.int32)


def lists(values: pa.Array, positions: Array, present: Array | None = None) -> pa.Array:
    """A column of lists: `positions` as from offsets(); `present` tells lists from nulls."""
    mask = None if present is None or present.all() else pa.array(~present)
    return pa.ListArray.from_arrays(pa.array(positions), values, mask=mask)


# ---- taking apart ----------------------------------------------------------------------------------------------


def no_nulls(column: pa.Array, name: str, what: str) -> pa.Array:
    if column.null_count:
        raise Damaged(f"{what}: {name} is null where it may not be")
    return column


def numbers(column: pa.Array, name: str, what: str) -> Array:
    """A view of a column of numbers, none of which is null."""
    return no_nulls(column, name, what).to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]


def present(column: pa.Array) -> Array:
    """Which elements are not null."""
    bitmap = column.buffers()[0]
    if bitmap is None or column.null_count == 0:
        return np.ones(len(column), np.bool_)
    first = column.offset
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=first + len(column), bitorder="little")
    return bits[first:].view(np.bool_)


def sixteens(column: pa.Array) -> Array:
    """The 16 bytes of each element, as a view of dtype V16; of a null, any."""
    buffer = column.buffers()[1]
    if buffer is None or len(column) == 0:
        return np.empty(0, "V16")
    return np.frombuffer(buffer, "V16", len(column), 16 * column.offset)


def digest_values(column: pa.Array) -> list[bytes]:
    """The 16 bytes of each element; of a null, any."""
    return sixteens(column).tolist()


def versions(lineage: pa.Array, number: pa.Array, wanted: Array) -> tuple[list[tuple[str, int]], Array, Array]:
    """The distinct versions of two columns, which of them each row has (-1: none), and the rows that are wrong.

    A version has both parts, and its lineage is not empty; exactly the `wanted` rows have one.
    """
    texts = lineage.dictionary_encode()
    names = texts.dictionary.to_pylist()
    text_at = texts.indices.fill_null(0).to_numpy()
    empty = np.array([name == "" for name in names] or [False])
    has = present(lineage)
    wrong = (has != wanted) | (present(number) != wanted) | (has & empty[text_at])
    numbers = number.dictionary_encode()
    number_at = numbers.indices.fill_null(0).to_numpy().astype(np.int64)
    rows = wanted & ~wrong
    pairs = pa.array((number_at * max(1, len(names)) + text_at)[rows]).dictionary_encode()
    at = np.full(len(wanted), -1, np.int64)
    at[rows] = pairs.indices.to_numpy()
    values = numbers.dictionary.to_pylist()
    found = [(names[pair % len(names)], values[pair // len(names)]) for pair in pairs.dictionary.to_pylist()]
    return found, at, wrong


def list_values(column: pa.Array, name: str, what: str) -> tuple[pa.Array, Array]:
    """All elements of a column of lists, and offsets() into them; for one that is null, any stretch."""
    if len(column) == 0:
        return column.values[:0], np.zeros(1, np.int64)
    positions = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    first, last = int(positions[0]), int(positions[-1])
    values = column.values.slice(first, last - first)
    return no_nulls(values, name, what), positions - first
