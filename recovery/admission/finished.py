"""Finished groups, in the order they finished, until a batch takes them.

Owns: the queue and, with an explicit cap, which group it gives up for a newcomer.
Does not know: slots, receipts' phases, who waits.

Invariants (numbers are those of docs/admission.md):
1. (A10) Without a cap the queue has room for every slot owner: putting never waits and nothing is given up.
2. (A11) Over a cap M everything beyond the limit goes; if that was not enough, the group of the oldest version, then
   of the lowest sum of versions, then of the lowest draw. A group that consumption waits for is never evicted.
3. (A56) What a batch does not take stays, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from recovery.admission.attempts import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A finished group. `kept`: consumption waits for it. `draw` breaks ties and comes from outside."""

    record: Record
    kept: bool
    draw: int


Ages = Callable[[Record], tuple[bool, Sequence[int]]]
"""Whether a group is beyond the limit now, and the lags of its trainable tokens (a large one where none is defined)."""


class FinishedGroups:
    """At most `cap` groups, evicting; or any number, which the slots bound."""

    def __init__(self, cap: int | None, ages: Ages) -> None:
        if cap is not None and cap < 1:
            raise ValueError("a cap of finished groups is at least 1")
        self._cap = cap
        self._ages = ages
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def put(self, entry: Entry) -> list[tuple[Entry, bool]]:
        """Queue a group at the end. Returns those that had to go for it, and whether each was beyond the limit."""
        self._entries.append(entry)
        victims: list[tuple[Entry, bool]] = []
        if self._cap is not None and len(self._entries) > self._cap:
            victims = [(one, True) for one in self._entries if not one.kept and self._ages(one.record)[0]]
            self._entries = [one for one in self._entries if one not in [victim for victim, _ in victims]]
            candidates = [one for one in self._entries if not one.kept]
            if len(self._entries) > self._cap and candidates:
                victim = min(candidates, key=self._eviction_order)
                self._entries.remove(victim)
                victims.append((victim, False))
        return victims

    def _eviction_order(self, entry: Entry) -> tuple[int, int, int]:
        _, lags = self._ages(entry.record)
        return (-max(lags, default=0), -sum(lags), entry.draw)

    def remove(self, record: Record) -> None:
        self._entries = [entry for entry in self._entries if entry.record is not record]
