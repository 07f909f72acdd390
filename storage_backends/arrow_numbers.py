"""What a ledger object says by number instead of in full (docs/format.md, section 8): its calls, and policy versions.

Owns: the column `call`, the versions in the header, when an object has them, and checking both.
Does not know: the other columns, who gives out numbers (recovery.call_numbers).

Invariants:
1. An object in which no call has a number is, byte for byte, what it was before there were any.
2. A call without its id has a number; a whole row has an id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from recovery.ledger_columns import NO_ID, LedgerRows, Names
from recovery.model import PolicyVersion
from storage_backends import arrow_columns as columns
from storage_backends.arrow_columns import Array

FEATURE = "call-numbers"
"""What such an object requires of its reader."""

FIELD = pa.field("call", pa.uint32(), nullable=False)


def is_needed(rows: LedgerRows) -> bool:
    return any(rows.numbers)


# ---- calls ----------------------------------------------------------------------------------------------------------


def array_of(numbers: Sequence[int]) -> pa.Array:
    """Of one batch: differences, modulo 2^32. Rows come in about the order in which calls were numbered."""
    return pa.array(np.diff(np.array(numbers, np.uint32), prepend=np.uint32(0)))


def read(column: pa.Array, lengths: Sequence[int], what: str) -> list[int]:
    """The numbers of batches that were joined; `lengths` are their rows. Each batch begins anew."""
    differences = columns.numbers(column, "call", what)
    batches = np.split(differences, np.cumsum(lengths[:-1], dtype=np.int64))
    return [number for batch in batches for number in np.cumsum(batch, dtype=np.uint32).tolist()]


def check(rows: LedgerRows, what: str) -> None:
    """Invariant 2 of rows that were read, and no call twice. Binds the numbers. Raises Damaged."""
    told = [number for number in rows.numbers if number]
    if len(set(told)) != len(told):
        raise Damaged(f"{what} has two rows for one call")
    for call_id, number, is_whole in zip(rows.call_ids, rows.numbers, rows.whole(), strict=True):
        if call_id == NO_ID:
            rows.by_number = True
            if is_whole or not number:
                raise Damaged(f"{what} has a row that does not say of which call it is (number {number})")
    try:
        rows.bind()
    except ValueError as error:
        raise Damaged(f"{what}: {error}") from error


# ---- versions -------------------------------------------------------------------------------------------------------


def said_versions(rows: LedgerRows) -> tuple[list[list[Any]], Array]:
    """Those that the chunks have, for the header, and where each version of `rows.names` is among them."""
    used = np.unique(rows.chunks["version"])
    at = np.zeros(len(rows.names.versions), np.uint64)
    at[used] = np.arange(len(used), dtype=np.uint64)
    versions = [rows.names.versions[number] for number in used.tolist()]
    return [[version.lineage, version.number] for version in versions], at


def no_lineages(n: int) -> pa.Array:
    return pa.StringArray.from_buffers(n, pa.py_buffer(np.zeros(n + 1, np.int32)), pa.py_buffer(b""))


def read_versions(header: Mapping[str, Any], names: Names, what: str) -> Array:
    """The numbers that the versions of a header have in `names`."""
    told = header.get("versions", [])
    if not isinstance(told, list) or not all(map(_is_version, told)):
        raise Damaged(f"{what}: versions are no list of [lineage, number]")
    return np.array([names.version_number(PolicyVersion(*version)) for version in told], np.uint32)


def _is_version(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    lineage, number = value
    return isinstance(lineage, str) and lineage != "" and type(number) is int and 0 <= number < 1 << 64


def version_numbers(lineage: pa.Array, number: pa.Array, versions: Array, what: str) -> Array:
    """The numbers in `names` of the versions that chunks have, by their places in the header."""
    at = columns.numbers(number, "number", what)
    if (columns.no_nulls(lineage, "lineage", what).to_numpy(zero_copy_only=False) != "").any():
        raise Damaged(f"{what} has a chunk that names its lineage beside a number")
    if (at >= len(versions)).any():
        raise Damaged(f"{what} lists a chunk of version {int(at.max())} of {len(versions)}")
    return versions[at]
