"""The segments that a ledger mentions: where they are, and how often each is referred to.

Owns: coordinates by key, the count of references, and which segments the published ledger objects describe.
Does not know: calls, chunks, why a segment is referred to.

Invariants:
1. A segment that is referred to has coordinates here.
2. A delta describes exactly the segments it mentions that none of its ancestors described (docs/format.md, section 8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from recovery.model import SegmentInfo


class SegmentTable:
    """Segments by key."""

    def __init__(self) -> None:
        self._infos: dict[str, SegmentInfo] = {}
        self._references: Counter[str] = Counter()
        self._described: set[str] = set()

    def __getitem__(self, key: str) -> SegmentInfo:
        return self._infos[key]

    def describe(self, info: SegmentInfo) -> None:
        """Make a segment known before anything refers to it; forgotten at a base if nothing does by then."""
        self._infos[info.key] = info

    def is_known(self, key: str) -> bool:
        return key in self._infos

    def in_use(self) -> set[str]:
        return set(self._references)

    def is_in_use(self, key: str) -> bool:
        return key in self._references

    def nbytes_in_use(self) -> int:
        return sum(self._infos[key].nbytes for key in self._references)

    def refer(self, key: str) -> None:
        self._references[key] += 1

    def unrefer(self, key: str) -> None:
        self._references[key] -= 1
        if self._references[key] == 0:
            del self._references[key]

    def split(self, mentioned: Iterable[str], *, base: bool) -> tuple[list[SegmentInfo], list[str]]:
        """Of the mentioned segments: those to describe, and the keys of those that ancestors described."""
        keys = dict.fromkeys(mentioned)
        new = [key for key in keys if base or key not in self._described]
        old = [key for key in keys if not base and key in self._described]
        return [self._infos[key] for key in new], old

    def published(self, described: Iterable[SegmentInfo], *, base: bool) -> None:
        """Published objects describe these now; a base describes everything that is in use, and nothing else counts."""
        if base:
            self._described = set()
            self._infos = {key: self._infos[key] for key in self._references}
        self._described.update(info.key for info in described)
