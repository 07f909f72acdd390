"""One participant between two snapshots, as a state machine: events in, effects out.

Owns: when a participant may be asked for its state, and what it is told afterwards.
Does not know: threads, time, what a state is. participants.py does the effects.

Invariants:
1. At any moment at most one method of a participant is under way.
2. Whoever gave a state is told, exactly once, what became of the snapshot it was for: also who gave it too late. Only
   who leaves is told nothing more.
3. A state that came too late, or from one who left, is part of no snapshot.
4. Who is still busy with something overdue is not asked again: that is known at once and costs no wait.
5. An illegal event raises and changes nothing.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    RESTORING = "restoring"
    IDLE = "idle"
    PREPARING = "preparing"
    LATE = "late"
    PREPARED = "prepared"
    TELLING = "being told"
    OUT = "out"


class Event(Enum):
    """What was wanted (ASK, PUBLISHED, ABANDONED, LEAVE), and how the method under way went."""

    ASK = "ask"
    RETURNED = "returned"
    RAISED = "raised"
    OVERDUE = "overdue"
    PUBLISHED = "published"
    ABANDONED = "abandoned"
    LEAVE = "leave"


class Effect(Enum):
    """Which method is called next."""

    PREPARE = "prepare"
    COMMIT = "commit(True)"
    ABANDON = "commit(False)"


Target = tuple[State, Effect | None]

TRANSITIONS: dict[tuple[State, Event], Target] = {
    (State.RESTORING, Event.RETURNED): (State.IDLE, None),
    # Who did not take its state up is none of those who are asked; the state stays in the snapshots.
    **{(State.RESTORING, e): (State.OUT, None) for e in (Event.RAISED, Event.OVERDUE)},
    (State.IDLE, Event.ASK): (State.PREPARING, Effect.PREPARE),
    (State.PREPARING, Event.RETURNED): (State.PREPARED, None),
    (State.PREPARING, Event.RAISED): (State.IDLE, None),
    # Overdue, or another one has failed meanwhile: what it returns is thrown away, and it is told then.
    **{(State.PREPARING, e): (State.LATE, None) for e in (Event.OVERDUE, Event.ABANDONED)},
    (State.LATE, Event.RETURNED): (State.TELLING, Effect.ABANDON),
    (State.LATE, Event.RAISED): (State.IDLE, None),
    (State.PREPARED, Event.PUBLISHED): (State.TELLING, Effect.COMMIT),
    (State.PREPARED, Event.ABANDONED): (State.TELLING, Effect.ABANDON),
    # What it made of being told changes nothing any more: it is counted, and it is asked again.
    **{(State.TELLING, e): (State.IDLE, None) for e in (Event.RETURNED, Event.RAISED)},
    **{(state, Event.LEAVE): (State.OUT, None) for state in State if state is not State.OUT},
    # A method that was under way when it left.
    **{(State.OUT, e): (State.OUT, None) for e in (Event.RETURNED, Event.RAISED)},
}
"""(state, event) -> (state, effect)."""

BUSY = frozenset((State.RESTORING, State.PREPARING, State.LATE, State.TELLING))
"""A method is under way. (OUT does not say whether one is.)"""


class IllegalEvent(Exception):
    """A program error: the event is not in the table for the present state."""


class Membership:
    """See TRANSITIONS. Begins with the restore of what a snapshot has of it, or idle if there is nothing."""

    def __init__(self, *, restores: bool) -> None:
        self.state = State.RESTORING if restores else State.IDLE

    def on(self, event: Event) -> Effect | None:
        """Advance. Raises IllegalEvent, with nothing changed, for an event that the table does not have."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent(f"{event.value!r} while {self.state.value}")
        self.state, effect = target
        return effect
