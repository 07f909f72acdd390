"""The numbers by which ledger objects mean calls, so that a row about a known call does not repeat its 16-byte id.

Owns: which numbers were given out, and those of calls that were dropped since the last publication.
Does not know: which call has which number (Entry.number, ledger_columns.Names), how rows are written.

Invariants:
1. A number means one call for as long as the ledger lives. 0 is none: the call is named by its id alone.
2. A call that was dropped and opened again before anyone was told keeps its number: no row says that it was dropped.
"""

from __future__ import annotations

from recovery.model import CallId

LIMIT = 1 << 32


class CallNumbers:
    """Of one ledger."""

    def __init__(self) -> None:
        self.numbered = 1
        """All numbers that were given out are below this one."""
        self.dropped: dict[CallId, int] = {}

    def reserve(self, numbered: int) -> None:
        """Numbers below this one were given out."""
        self.numbered = max(self.numbered, numbered)

    def take(self, call_id: CallId) -> int:
        """A number for a new call; 0 when there are no more."""
        before = self.dropped.pop(call_id, 0)
        if before or self.numbered >= LIMIT:
            return before
        self.numbered += 1
        return self.numbered - 1

    def drop(self, call_id: CallId, number: int) -> None:
        self.dropped[call_id] = number

    def published(self) -> None:
        """It was said who was dropped."""
        self.dropped.clear()
