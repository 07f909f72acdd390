"""The segments that a ledger mentions: where they are, and how often each is referred to.

Owns: coordinates and numbers of segments, and the count of references.
Does not know: calls, chunks, why a segment is referred to, which ledger object describes it (ledger_writer.py).

Invariants:
1. A segment that is referred to has a number, and coordinates from when it was described.
2. What nothing refers to any more is forgotten at the next publication, and its number is not used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from recovery.errors import Damaged
from recovery.ledger_columns import Names, PackedChunks
from recovery.model import SegmentInfo


class SegmentTable:
    """Segments by key, or by their number in `names`."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._infos: dict[int, SegmentInfo] = {}
        self._references: Counter[int] = Counter()
        self._idle: set[int] = set()

    def __getitem__(self, key: str) -> SegmentInfo:
        return self._infos[self.names.number(key)]

    def info(self, number: int) -> SegmentInfo:
        return self._infos[number]

    def describe(self, info: SegmentInfo) -> None:
        """Make a segment known before anything refers to it. Raises Damaged if it is known as another."""
        number = self.names.number(info.key)
        if self._infos.setdefault(number, info) != info:
            raise Damaged(f"segment {info.key} is described in two ways")
        if number not in self._references:
            self._idle.add(number)

    def in_use(self) -> set[str]:
        return {self.names.keys[number] for number in self._references}

    def is_in_use(self, key: str) -> bool:
        return self.names.known(key) in self._references

    def numbers_in_use(self) -> list[int]:
        return list(self._references)

    def is_used(self, number: int) -> bool:
        return number in self._references

    def __len__(self) -> int:
        """Those in use."""
        return len(self._references)

    def references(self) -> list[tuple[str, int]]:
        """Each segment in use, and how many of its records are."""
        return [(self.names.keys[number], times) for number, times in self._references.items()]

    def nbytes_in_use(self) -> int:
        return sum(self._infos[number].nbytes for number in self._references)

    def refer(self, number: int, times: int = 1) -> None:
        self._references[number] += times
        self._idle.discard(number)

    def refer_some(self, number: int, times: int) -> None:
        """The same, of none too."""
        if times:
            self.refer(number, times)

    def unrefer(self, number: int, times: int = 1) -> None:
        self._references[number] -= times
        if self._references[number] == 0:
            del self._references[number]
            self._idle.add(number)

    def unrefer_all(self, chunks: PackedChunks) -> None:
        for number, times in _counted(chunks):
            self.unrefer(number, times)

    def recount(self, chunks: PackedChunks, opened_in: Iterable[int]) -> None:
        """These references and no others."""
        self._references = Counter(dict(_counted(chunks)))
        self._references.update(opened_in)
        self._idle = self._infos.keys() - self._references.keys()

    def undescribed(self) -> set[int]:
        """What is in use and was not described: none, unless objects were read that do not fit each other."""
        return self._references.keys() - self._infos.keys()

    def published(self) -> None:
        """Invariant 2."""
        for number in self._idle:
            del self._infos[number]
            self.names.forget(number)
        self._idle = set()


def _counted(chunks: PackedChunks) -> list[tuple[int, int]]:
    numbers, times = np.unique(chunks["segment"], return_counts=True)
    return list(zip(numbers.tolist(), times.tolist(), strict=True))
