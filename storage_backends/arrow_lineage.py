"""The column `lineage` of a ledger object (docs/format.md, section 8): there only where a call has one.

Owns: the column, when an object has it, and checking it.
Does not know: the other columns, what a lineage means (recovery.lineage).

Invariant:
1. An object without a call that has a lineage is, byte for byte, what it was before there were any.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from recovery.model import CallId, Identity
from storage_backends import arrow_columns as columns

FEATURE = "call-lineage"
"""What such an object requires of its reader."""

_FIELDS = [pa.field("model_call", pa.uint32()), pa.field("parent", pa.binary(16))]
FIELD = pa.field("lineage", pa.struct(_FIELDS))

_NONE = bytes(16)


def is_needed(identities: Iterable[Identity | None]) -> bool:
    return any(one is not None and (one.model_call or one.parent != _NONE) for one in identities)


def array_of(identities: list[Identity | None]) -> pa.Array:
    """Null where the identity is."""
    there = [one for one in identities if one is not None]
    cells = ([one.model_call for one in there], [one.parent for one in there])
    arrays = [pa.array(values, field.type) for values, field in zip(cells, _FIELDS, strict=True)]
    dense = pa.StructArray.from_arrays(arrays, fields=_FIELDS)
    present = np.array([one is not None for one in identities], np.bool_)
    return dense if present.all() else dense.take(pa.array(np.cumsum(present) - 1, mask=~present))


def read(column: pa.Array, identities: list[Identity | None], what: str) -> list[Identity | None]:
    """The identities with what the column says of them. Raises Damaged."""
    if columns.present(column).tolist() != [one is not None for one in identities]:
        raise Damaged(f"{what} has a lineage without an identity, or an identity without one")
    rows = [at for at, one in enumerate(identities) if one is not None]
    dense = column if len(rows) == len(column) else column.filter(column.is_valid())
    calls, parents = dense.flatten()
    if calls.null_count or parents.null_count:
        raise Damaged(f"{what} has a lineage with a hole")
    found = list(identities)
    cells = zip(rows, columns.numbers(calls, "model_call", what).tolist(), columns.digest_values(parents), strict=True)
    for row, model_call, parent in cells:
        before = found[row]
        if before is not None and (model_call or parent != _NONE):
            found[row] = before._replace(model_call=model_call, parent=CallId(parent))
    return found
