"""Who keeps new admissions closed, and until when.

Owns: the set of active holds with their frontiers, the admission epoch, and the lifecycle OPEN, CLOSING, CLOSED.
Does not know: what a frontier member is (any hashable object), the event loop.

Invariants (numbers are those of docs/admission.md):
1. (A21) Admission is open if and only if no hold is active and the lifecycle is OPEN.
2. (A15) The epoch grows with every acquisition and with every reopening.
3. (A22, M7) Releasing is a set removal: twice before close is an error that changes nothing, after close a no-op.
4. (A17) A frontier is fixed at acquisition: it only ever shrinks, and other holds do not touch it.
5. (A19) A drain hold's frontier is done when every member is settled; a cut hold's when every member is settled or
   frozen.
6. (A25) An update is recorded once, by an active drain hold whose frontier was seen to be done.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum


class HoldKind(Enum):
    """What an owner waits for: members terminal (DRAIN), or terminal or frozen (CUT)."""

    DRAIN = "drain"
    CUT = "cut"


class Lifecycle(Enum):
    """CLOSING is sticky: a close that failed stays in it until a later one gets through."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


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


class CannotRecord(Exception):
    """A weight update cannot be recorded with this hold as it is."""


@dataclass(slots=True)
class _Claim:
    hold: Hold
    frontier: set[Hashable]
    frozen: set[Hashable] = field(default_factory=set)
    errors: list[BaseException] = field(default_factory=list)
    observed: bool = False
    recorded: bool = False


class AdmissionGate:
    """Open unless somebody holds it."""

    def __init__(self) -> None:
        self._claims: dict[int, _Claim] = {}
        self._next = 1
        self.lifecycle = Lifecycle.OPEN
        self.epoch = 0

    @property
    def open(self) -> bool:
        return not self._claims and self.lifecycle is Lifecycle.OPEN

    @property
    def active(self) -> tuple[Hold, ...]:
        return tuple(claim.hold for claim in self._claims.values())

    def acquire(self, kind: HoldKind, owner: str, reason: str, utc: float, frontier: Iterable[Hashable] = ()) -> Hold:
        """Close admission for one more owner. Raises AdmissionClosed after `close`."""
        if self.lifecycle is not Lifecycle.OPEN:
            raise AdmissionClosed(f"{owner} asked for a hold after admission was closed for good")
        hold = Hold(self._next, kind, owner, reason, utc)
        self._next += 1
        self._claims[hold.number] = _Claim(hold, set(frontier))
        self.epoch += 1
        return hold

    def release(self, hold: Hold) -> bool:
        """Give one claim back. Returns whether admission reopened by it."""
        if self.lifecycle is not Lifecycle.OPEN:
            return False
        self._claim(hold)
        del self._claims[hold.number]
        if self._claims:
            return False
        self.epoch += 1
        return True

    # ---- frontiers ---------------------------------------------------------------------------------------------

    def settled(self, member: Hashable) -> None:
        """A member's result is published, or its receipt rolled back."""
        for claim in self._claims.values():
            claim.frontier.discard(member)
            claim.frozen.discard(member)

    def failed(self, member: Hashable, error: BaseException) -> None:
        """A member failed: every hold that waits for it is told, and stays."""
        for claim in self._claims.values():
            if member in claim.frontier:
                claim.errors.append(error)

    def freeze(self, hold: Hold) -> None:
        """What is left of a cut hold's frontier was frozen in its buffers, still executing."""
        claim = self._claim(hold)
        if hold.kind is not HoldKind.CUT:
            raise NotHeld(f"hold {hold.number} of {hold.owner} drains: its frontier cannot be frozen")
        claim.frozen = set(claim.frontier)

    def left(self, hold: Hold) -> int:
        """How many members are waited for."""
        claim = self._claim(hold)
        return len(claim.frontier - claim.frozen)

    def done(self, hold: Hold) -> bool:
        """Whether the frontier is; seeing it is remembered. Raises the first error that a member left."""
        claim = self._claim(hold)
        if claim.errors:
            raise claim.errors[0]
        claim.observed = claim.observed or not claim.frontier - claim.frozen
        return claim.observed

    def check_may_record(self, hold: Hold) -> None:
        """Raise CannotRecord unless a weight update could be recorded with this hold now."""
        claim = self._claim(hold)
        if hold.kind is not HoldKind.DRAIN:
            raise CannotRecord(f"hold {hold.number} of {hold.owner} is no drain hold")
        if not claim.observed:
            raise CannotRecord(f"hold {hold.number} of {hold.owner} has not seen its frontier end")
        if claim.recorded:
            raise CannotRecord(f"hold {hold.number} of {hold.owner} has recorded an update already")

    def record_update(self, hold: Hold) -> None:
        """The weights were updated under this hold."""
        self.check_may_record(hold)
        self._claims[hold.number].recorded = True

    # ---- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closed for good: every hold is dropped and none is acquired again."""
        if self.lifecycle is Lifecycle.OPEN:
            self.lifecycle = Lifecycle.CLOSING
        self._claims.clear()

    def closed(self) -> None:
        """Nothing is owned any more."""
        if self.lifecycle is Lifecycle.OPEN:
            raise AdmissionClosed("closing comes before closed")
        self.lifecycle = Lifecycle.CLOSED

    def _claim(self, hold: Hold) -> _Claim:
        claim = self._claims.get(hold.number)
        if claim is None or claim.hold is not hold:  # another gate may have given out an equal one
            raise NotHeld(f"hold {hold.number} of {hold.owner} is not active here")
        return claim
