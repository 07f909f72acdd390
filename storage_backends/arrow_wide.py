"""The wide columns of a segment batch: to Arrow columns and back, without a Python object per value.

Owns: docs/format.md, section 9, as far as `wide` and `wide_<type>` are concerned.
Does not know: the other columns, files; which digest the content has to have.

Invariants:
1. All values of one type in a batch are one flat array, whatever chunks and names they belong to: so the columns of a
   segment do not depend on which names its chunks use, and what a chunk is given are read-only views.
2. Every size follows from `wide` and the number of tokens, and is compared with what is there for the whole batch at
   once; after that a view cannot lie outside of its array.
3. A text `wide` is parsed once per batch, however many chunks have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.model import COLUMN_BYTES_PER_CHUNK_MAX, WIDE_TYPES, Array, WideColumn, check_wide
from recovery.records import Records, no_columns
from storage_backends import arrow_columns as columns
from storage_backends import strict_json

FEATURE = "wide-columns"
"""What a segment requires of its reader if it has such columns."""

_TEXT_LENGTH_MAX = 64 << 10
_ARROW_TYPES = {name: pa.from_numpy_dtype(np.dtype(name)) for name in WIDE_TYPES}


def fields(types: Sequence[str]) -> list[pa.Field]:
    """The fields that follow the others in a segment that has wide columns of these types."""
    if not types:
        return []
    return [pa.field("wide", pa.utf8()), *(pa.field(f"wide_{t}", pa.list_(_ARROW_TYPES[t]), False) for t in types)]


def types_of(records: Records) -> tuple[str, ...]:
    """The types of all wide columns, in the order of the format."""
    found = {column.type for at in records.with_columns() for column in records.wide(at)}
    return tuple(name for name in WIDE_TYPES if name in found)


def types_in(schema: pa.Schema) -> tuple[str, ...]:
    """The types of the wide columns that a schema has fields for; whether it has others is not looked at."""
    return tuple(name for name in WIDE_TYPES if schema.get_field_index(f"wide_{name}") >= 0)


def check_types(types: Sequence[str], what: str) -> None:
    """Raises FormatNotUnderstood unless a description names known types, in the order of the format."""
    if tuple(types) != tuple(name for name in WIDE_TYPES if name in types):
        raise FormatNotUnderstood(
            f"{what} is described with wide columns of the types {', '.join(types):.100}, which are not known here",
            hint="read it with the version of prefix-recovery that wrote it, or a newer one",
        )


# ---- chunks to columns ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _text(wide: tuple[WideColumn, ...]) -> str:
    return strict_json.dump([list(column) for column in wide])


def to_arrays(records: Records, part: slice, types: Sequence[str]) -> list[pa.Array]:
    """The columns of fields(types) for these records."""
    if not types:
        return []
    indices = range(*part.indices(len(records)))
    wide = [records.wide(at) for at in indices]
    made = [pa.array([_text(one) if one else None for one in wide], pa.utf8())]
    for type_ in types:
        parts = [np.empty(0, type_)]
        lengths = []
        for at, one in zip(indices, wide, strict=True):
            own = [np.ravel(records.columns(at)[c.name]) for c in one if c.type == type_]
            parts += own
            lengths.append(sum(map(len, own)))
        made.append(columns.lists(pa.array(np.concatenate(parts)), columns.offsets(lengths)))
    return made


# ---- columns to chunks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """What one text `wide` says. `places`: each column, and how many values of its type a token has before it."""

    places: tuple[tuple[WideColumn, int], ...] = ()
    per_token: Counter[str] | None = None
    row_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class WideColumns:
    """The wide columns of a batch: by type the values, and where in them those of each record begin."""

    values: dict[str, Array]
    positions: dict[str, list[int]]
    shapes: list[_Shape]
    sizes: list[int]

    def of(self, index: int) -> dict[str, Array]:
        """Those of one record, as views."""
        n_tokens, found = self.sizes[index], {}
        for column, before in self.shapes[index].places:
            first = self.positions[column.type][index] + n_tokens * before
            values = self.values[column.type][first : first + n_tokens * column.per_token]
            found[column.name] = values.reshape(column.shape(n_tokens))
        return found


def take_apart(
    arrays: Sequence[pa.Array], schema: pa.Schema, is_chunk: Array, sizes: Array, what: str
) -> Callable[[int], Mapping[str, Array]]:
    """What gives the columns of a record of a validated batch, `sizes` being the tokens of each. Raises Damaged."""
    types = types_in(schema)
    if not types:
        return no_columns
    texts = arrays[0].to_pylist()
    parsed: dict[str | None, _Shape] = {None: _Shape()}
    for text in texts:
        if text not in parsed:
            parsed[text] = _parse(text, types, f"{what}: wide")
    shapes = [parsed[text] for text in texts]
    row_nbytes = np.array([shape.row_nbytes for shape in shapes], np.int64)
    if row_nbytes[~is_chunk].any() or (row_nbytes * sizes > COLUMN_BYTES_PER_CHUNK_MAX).any():
        raise Damaged(f"{what} has wide columns where there may be none, or larger ones than a chunk may have")
    values, positions = {}, {}
    for type_, array in zip(types, arrays[1:], strict=True):
        name = f"wide_{type_}"
        flat, at = columns.list_values(columns.no_nulls(array, name, what), name, what)
        per_token = np.array([0 if s.per_token is None else s.per_token[type_] for s in shapes], np.int64)
        if (np.diff(at) != per_token * sizes).any():
            raise Damaged(f"{what}: {name} does not have the values that wide says")
        values[type_] = _bools(flat) if type_ == "bool" else columns.numbers(flat, name, what)
        positions[type_] = at.tolist()
    return WideColumns(values, positions, shapes, sizes.tolist()).of


def _bools(flat: pa.Array) -> Array:
    values: Array = flat.to_numpy(zero_copy_only=False)
    values.flags.writeable = False
    return values


def _parse(text: str, types: Sequence[str], what: str) -> _Shape:
    if len(text) > _TEXT_LENGTH_MAX:
        raise Damaged(f"{what} has {len(text)} characters; at most {_TEXT_LENGTH_MAX} are allowed")
    wide = tuple(_column(item, what) for item in strict_json.parse_list(text, what))
    try:
        check_wide(wide, 1)
    except ValueError as error:
        raise Damaged(f"{what}: {error}") from error
    per_token = Counter[str]()
    for column in wide:
        per_token[column.type] += column.per_token
    if not wide or not per_token.keys() <= set(types):
        raise Damaged(f"{what} lists no column, or one of a type that the segment does not have")
    return _Shape(tuple(_places(wide)), per_token, sum(column.row_nbytes for column in wide))


def _column(item: Any, what: str) -> WideColumn:
    if not isinstance(item, list) or list(map(type, item)) != [str, str, int]:
        raise Damaged(f"{what}: {item!r:.100} is not [name, type, width]")
    return WideColumn(*item)


def _places(wide: tuple[WideColumn, ...]) -> Iterator[tuple[WideColumn, int]]:
    before = Counter[str]()
    for column in wide:
        yield column, before[column.type]
        before[column.type] += column.per_token
