"""Who keeps new admissions closed.

Owns: the set of active holds and the admission epoch.
Does not know: what is admitted, when it is terminal, the event loop.

Invariants (numbers are those of the admission contract):
1. (A21) Admission is open if and only if no hold is active and the gate is not closed for good.
2. (A15) The epoch grows with every acquisition and with every reopening.
3. (A22, M7) Releasing is a set removal: twice before close is an error that changes nothing, after close a no-op.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HoldKind(Enum):
    """What an owner waits for: members terminal (DRAIN), or terminal or frozen (CUT)."""

    DRAIN = "drain"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class Hold:
    """One owner's claim. `acquired_utc` (seconds) and `reason` are for people."""

    number: int
    kind: HoldKind
    owner: str
    reason: str
    acquired_utc: float


class AdmissionClosed(Exception):
    """The gate was closed for good; no hold can be acquired any more."""


class NotHeld(Exception):
    """The hold is not active here: released already, or another gate's."""


class AdmissionGate:
    """Open unless somebody holds it."""

    def __init__(self) -> None:
        self._active: dict[int, Hold] = {}
        self._next = 1
        self._closed = False
        self.epoch = 0

    @property
    def open(self) -> bool:
        return not self._active and not self._closed

    @property
    def active(self) -> tuple[Hold, ...]:
        return tuple(self._active.values())

    def acquire(self, kind: HoldKind, owner: str, reason: str, utc: float) -> Hold:
        """Close admission for one more owner. Raises AdmissionClosed after `close`."""
        if self._closed:
            raise AdmissionClosed(f"{owner} asked for a hold after admission was closed for good")
        hold = Hold(self._next, kind, owner, reason, utc)
        self._next += 1
        self._active[hold.number] = hold
        self.epoch += 1
        return hold

    def release(self, hold: Hold) -> bool:
        """Give one claim back. Returns whether admission reopened by it."""
        if self._closed:
            return False
        if self._active.get(hold.number) is not hold:  # another gate may have given out an equal one
            raise NotHeld(f"hold {hold.number} of {hold.owner} is not active here")
        del self._active[hold.number]
        if self._active:
            return False
        self.epoch += 1
        return True

    def close(self) -> None:
        """Closed for good: every hold is dropped and none is acquired again."""
        self._closed = True
        self._active.clear()
