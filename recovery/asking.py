"""A participant that may be slow, hang or die, called in threads of its own, each method under a deadline.

Owns: the thread of the method under way, its deadline, what it returned or raised.
Does not know: other participants, what a state is for, the event loop.

Invariants:
1. Nobody but who asked waits for a method, and nobody waits beyond its deadline, which counts from its start.
2. A thread cannot be killed: what is overdue stays in its thread, and until it returns nothing else is called.
3. What the participant raises, be it SystemExit, is its answer; it never ends anybody else's thread. Nor does what it
   says of itself: its words are kept short, and an exception that cannot be put in words is named by its type.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from recovery.errors import RecoveryError, SnapshotAbandoned
from recovery.membership import BUSY, Effect, Event, Membership, State
from recovery.ports import Clock, Participant

BLOB_BYTES_MAX = 16 << 20
"""Of one participant's state: it is written with every snapshot in which it changed."""


WORDS_MAX = 500
"""Letters of what a participant raised."""


def words_of(raised: BaseException) -> str:
    """What it says, shortened; its type if it cannot say it."""
    try:
        ours = isinstance(raised, RecoveryError)  # says what to do as well
        said = f"{type(raised).__name__}: {raised}" if ours else str(repr(raised))
    except BaseException as error:
        return f"{type(raised).__name__} (its text cannot be made: {type(error).__name__})"
    return said if len(said) <= WORDS_MAX else f"{said[:WORDS_MAX]}… ({len(said)} letters)"


@dataclass(slots=True)
class Faults:
    """What went wrong with one participant, by kind, since it joined; `error` is the latest, None after a success."""

    prepares_raised: int = 0
    prepares_overdue: int = 0
    commits_raised: int = 0
    too_large: int = 0
    refused_busy: int = 0
    in_a_row: int = 0
    error: SnapshotAbandoned | None = None


class Asked:
    """One participant with its deadline."""

    def __init__(
        self,
        participant: Participant,
        timeout_s: float,
        clock: Clock,
        changed: threading.Condition,
        *,
        restores: bool,
    ) -> None:
        """`changed` is notified whenever a method has ended; one for all, so that one wait is for whoever is first."""
        self._participant = participant
        self._timeout_s = timeout_s
        self._clock = clock
        self._changed = changed
        self._membership = Membership(restores=restores)
        self._method = ""
        self._answer: object = None
        self._raised: BaseException | None = None
        self._under_way = False
        self._not_restored: BaseException | None = None
        self.due = 0.0
        """When what is under way is overdue, on the clock."""
        self.name = participant.name
        self.faults = Faults()

    @property
    def state(self) -> State:
        return self._membership.state

    @property
    def under_way(self) -> str:
        """The method that one of its threads is in, also after it has left; empty if there is none."""
        return self._method if self._under_way else ""

    def is_of(self, participant: Participant) -> bool:
        return self._participant is participant

    def restore(self, state: bytes, rewound: bool) -> None:
        """Have it take up its state; returns at once."""
        with self._changed:
            self._call("restore", lambda: self._participant.restore(state, rewound))

    def restored(self) -> BaseException | None:
        """Blocks until it has taken its state up. Returns what it raised, a TimeoutError at the deadline, or None.

        Several may wait, and all are told the same.
        """
        with self._changed:
            if not self._wait(lambda: self.state is not State.RESTORING):
                self._not_restored = TimeoutError(f"it did not return within {self._timeout_s:g} s")
                self._membership.on(Event.OVERDUE)
                self._changed.notify_all()
            return self._not_restored

    def ask(self, deadline: float) -> SnapshotAbandoned | None:
        """Begin to prepare; returns at once, unless it is still being told of the snapshot before (until that is due).

        Returns why not, if not. `deadline`: of the whole attempt, on the clock.
        """
        with self._changed:
            self._wait(lambda: self.state not in BUSY, deadline)
            if self.state in BUSY:
                self.faults.refused_busy += 1
                return self._fault(f"is still in {self._method}, called for an earlier snapshot")
            if self.state is State.IDLE:
                self._do(self._membership.on(Event.ASK))
            return None

    def answer(self, deadline: float) -> bytes | SnapshotAbandoned | None:
        """Its state, or why it gives none; None if it has left or has time left. Never waits."""
        with self._changed:
            if self.state is State.PREPARING:
                if self._clock.monotonic() < min(self.due, deadline):
                    return None
                self._membership.on(Event.OVERDUE)
                self.faults.prepares_overdue += 1
                return self._fault(f"did not prepare within {self._timeout_s:g} s")
            if self.state is State.OUT:
                return None
            if self.state is not State.PREPARED or type(self._answer) is not bytes:
                self.faults.prepares_raised += 1
                gave = f"gave {type(self._answer).__name__} for its state, not bytes"
                return self._fault(gave if self._raised is None else f"could not prepare: {words_of(self._raised)}")
            if len(self._answer) > BLOB_BYTES_MAX:
                self.faults.too_large += 1
                return self._fault(f"has a state of {len(self._answer)} bytes; at most {BLOB_BYTES_MAX} are allowed")
            self.faults.in_a_row, self.faults.error = 0, None
            return self._answer

    def tell(self, published: bool) -> None:
        """How it ended; returns at once. Nothing is told to who gave no state, or gives it later (membership.py)."""
        with self._changed:
            if self.state is State.PREPARED:
                self._do(self._membership.on(Event.PUBLISHED if published else Event.ABANDONED))
            elif self.state is State.PREPARING:
                self._membership.on(Event.ABANDONED)

    def leave(self) -> None:
        with self._changed:
            if self.state is not State.OUT:
                self._membership.on(Event.LEAVE)
                self._changed.notify_all()

    # ---- its thread ------------------------------------------------------------------------------------------------

    def _do(self, effect: Effect | None) -> None:
        match effect:
            case Effect.PREPARE:
                self._call("prepare", self._participant.prepare)
            case Effect.COMMIT:
                self._call("commit", lambda: self._participant.commit(True))
            case Effect.ABANDON:
                self._call("commit", lambda: self._participant.commit(False))

    def _call(self, method: str, work: Callable[[], object]) -> None:
        self._method, self.due, self._under_way = method, self._clock.monotonic() + self._timeout_s, True
        threading.Thread(target=self._run, args=(work,), name=f"{self.name} {method}", daemon=True).start()

    def _run(self, work: Callable[[], object]) -> None:
        answer: object = None
        raised: BaseException | None = None
        try:
            answer = work()
        except BaseException as error:
            raised = error
        with self._changed:
            self._answer, self._raised, self._under_way = answer, raised, False
            if raised is not None and self.state is State.TELLING:
                self.faults.commits_raised += 1
                self._fault(f"raised when it was told how a snapshot ended: {words_of(raised)}")
            if self.state is State.RESTORING:
                self._not_restored = raised
            effect = self._membership.on(Event.RETURNED if raised is None else Event.RAISED)
            self._changed.notify_all()
            self._do(effect)

    def _wait(self, until: Callable[[], bool], deadline: float | None = None) -> bool:
        """Until that is so, or what is under way is due."""
        due = self.due if deadline is None else min(self.due, deadline)
        return self._changed.wait_for(until, max(0.0, due - self._clock.monotonic()))

    def _fault(self, what: str) -> SnapshotAbandoned:
        error = SnapshotAbandoned(
            f"participant {self.name!r} {what}",
            hint="decoding goes on and tokens are stored; mend the participant, or let it leave",
        )
        self.faults.in_a_row, self.faults.error = self.faults.in_a_row + 1, error
        return error
