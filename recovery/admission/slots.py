"""The P permits that bound what a rollout owns: one per group, from its reservation to its settlement.

Owns: which reservation holds a slot.
Does not know: what a group is doing meanwhile.

Invariants (numbers are those of docs/admission.md):
1. (A8) At most P groups hold a slot, whatever phase they are in; so executing and completed ones together never
   exceed P.
2. (A9) A slot comes back exactly once.
3. (A13, M12) A slot is taken without a wait at submission, so that a terminal result never waits for one.
"""

from __future__ import annotations


class SlotError(Exception):
    """A program error: a slot taken twice, or given back by who holds none."""


class Slots:
    """P slots; `take` answers at once."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("there is at least one slot")
        self.total = total
        self._holders: set[str] = set()

    @property
    def used(self) -> int:
        return len(self._holders)

    def take(self, holder: str) -> bool:
        """Whether there was one. Raises SlotError for who has one already."""
        if holder in self._holders:
            raise SlotError(f"{holder!r} holds a slot already")
        if len(self._holders) == self.total:
            return False
        self._holders.add(holder)
        return True

    def give_back(self, holder: str) -> None:
        if holder not in self._holders:
            raise SlotError(f"{holder!r} holds no slot")
        self._holders.remove(holder)
