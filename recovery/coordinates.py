"""What the ledger needs to know of one stored record: where it lies, and what it is, without its tokens.

Owns: the values that go from who stores a segment to the ledger.
Does not know: how they come about (staging.py), what they do to a call (ledger.py).

Invariants:
1. No token is in them: whoever stores a segment hands on where a record lies, its length, version and digest.
2. As a sequence, StoredAt equals the coordinates of its records, one by one; those of a chunk are made when asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from recovery.ledger_columns import PACKED, Names
from recovery.model import Array, CallId, ChunkRef, Identity, PolicyVersion, RecordRef


@dataclass(frozen=True, slots=True)
class OpenedAt:
    """Coordinates of an `Opened` record."""

    call_id: CallId
    attempt: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class ChunkAt:
    """Coordinates of a chunk."""

    call_id: CallId
    attempt: int
    chunk: ChunkRef


@dataclass(frozen=True, slots=True)
class EndedAt:
    """An `Ended` record; it is small enough to be its own coordinates."""

    call_id: CallId
    attempt: int
    n_tokens: int
    finish_reason: str
    stop_reason: int | str | None


Coordinates = OpenedAt | ChunkAt | EndedAt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredAt(Sequence[Coordinates]):
    """The coordinates of all records of one segment, column by column. `others`: of records that are no chunk."""

    segment: str
    call_ids: list[CallId]
    attempts: Array
    starts: Array
    n_tokens: Array
    digests: Array
    versions: Sequence[PolicyVersion]
    version_at: Array
    others: Mapping[int, OpenedAt | EndedAt]

    def __len__(self) -> int:
        return len(self.call_ids)

    @overload
    def __getitem__(self, index: int) -> Coordinates: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Coordinates]: ...

    def __getitem__(self, index: int | slice) -> Coordinates | Sequence[Coordinates]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if (other := self.others.get(at)) is not None:
            return other
        ref = ChunkRef(
            RecordRef(self.segment, at),
            int(self.starts[at]),
            int(self.n_tokens[at]),
            self.digests[at].tobytes(),
            self.versions[self.version_at[at]],
        )
        return ChunkAt(self.call_ids[at], int(self.attempts[at]), ref)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredAt) or list(self.versions) != list(other.versions):
            return isinstance(other, Sequence) and list(self) == list(other)
        names = ("attempts", "starts", "n_tokens", "digests", "version_at")
        return (self.segment, self.call_ids, self.others) == (other.segment, other.call_ids, other.others) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )

    __hash__ = None  # type: ignore[assignment]

    def packed(self, names: Names) -> bytes:
        """The chunks as a ledger holds them, PACKED.itemsize bytes for each record; those of `others` mean nothing."""
        packed = np.zeros(len(self), PACKED)
        packed["segment"] = names.number(self.segment)
        packed["index"] = np.arange(len(self))
        packed["start"], packed["n_tokens"], packed["digest"] = self.starts, self.n_tokens, self.digests
        numbers = np.array([*map(names.version_number, self.versions), 0], np.uint32)
        packed["version"] = numbers[self.version_at]
        return packed.tobytes()
