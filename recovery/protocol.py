"""The snapshot as a state machine: events in, effects out.

Owns: the order ask, hold, fence, prepare, cut, stage, record, validate, publish, release, and what is undone when a
step fails (docs/protocol.md draws this table).
Does not know: how an effect is done, time, the store, threads. coordinator.py does the effects.

Invariants:
1. Nothing is published unless every earlier step succeeded.
2. Every path that may have acquired the hold ends with releasing it; every path that may have raised the fence lowers
   it first; every path on which participants were asked tells them how it ended.
3. An illegal event raises and changes nothing. There is none for a working state: whatever an effect did, the machine
   goes on.
4. After `Fenced` there is no way back: the machine refuses to begin again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    IDLE = "idle"
    ASKING = "asking"
    HOLDING = "holding"
    FENCING = "fencing"
    PREPARING = "preparing"
    CUTTING = "cutting"
    STAGING = "staging"
    RECORDING = "recording"
    VALIDATING = "validating"
    PUBLISHING = "publishing"
    LOWERING = "lowering"
    RESUMING = "resuming"
    RELEASING = "releasing"
    STOPPED = "stopped"


class Effect(Enum):
    """What the coordinator does next; exactly one is outstanding at any time."""

    ASK = "ask participants"
    ACQUIRE_HOLD = "acquire hold"
    RAISE_FENCE = "raise fence"
    PREPARE = "prepare participants"
    CUT = "cut"
    STAGE = "stage"
    RECORD = "write ledger and states"
    VALIDATE = "validate"
    PUBLISH = "publish"
    LOWER_FENCE = "lower fence"
    RESUME = "resume participants"
    RELEASE_HOLD = "release hold"


class Event(Enum):
    """How the outstanding effect went (BEGIN: that a snapshot is wanted)."""

    BEGIN = "begin"
    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"


class Verdict(Enum):
    """How a snapshot ended."""

    PUBLISHED = "published"
    ABANDONED = "abandoned"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Step:
    """What follows an event: the next effect, or the verdict when there is none."""

    state: State
    effect: Effect | None


EFFECTS = {
    State.ASKING: Effect.ASK,
    State.HOLDING: Effect.ACQUIRE_HOLD,
    State.FENCING: Effect.RAISE_FENCE,
    State.PREPARING: Effect.PREPARE,
    State.CUTTING: Effect.CUT,
    State.STAGING: Effect.STAGE,
    State.RECORDING: Effect.RECORD,
    State.VALIDATING: Effect.VALIDATE,
    State.PUBLISHING: Effect.PUBLISH,
    State.LOWERING: Effect.LOWER_FENCE,
    State.RESUMING: Effect.RESUME,
    State.RELEASING: Effect.RELEASE_HOLD,
}
"""Each working state has one outstanding effect."""

_WORK = (
    State.ASKING,
    State.HOLDING,
    State.FENCING,
    State.PREPARING,
    State.CUTTING,
    State.STAGING,
    State.RECORDING,
    State.VALIDATING,
    State.PUBLISHING,
)
_UNDO = (State.LOWERING, State.RESUMING, State.RELEASING)

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.BEGIN): State.ASKING,
    # Success: one step further, and from the commit into the release.
    **{(a, Event.DONE): b for a, b in zip(_WORK, (*_WORK[1:], State.LOWERING), strict=True)},
    # Failure: undo exactly what may have been done. A failed hold or fence may be half acquired: both are
    # released by name, which is harmless if they never came up. That a newer coordinator exists may be learnt from the
    # log, but also from anything that refuses commands of an old epoch: every effect may answer FENCED.
    # Before the fence there is none to lower; who was asked is told all the same.
    **{(a, e): State.RESUMING for a in _WORK[:2] for e in (Event.FAILED, Event.FENCED)},
    **{(a, e): State.LOWERING for a in _WORK[2:] for e in (Event.FAILED, Event.FENCED)},
    # The undo steps cannot fail to advance: the release must be reached.
    **{
        (a, e): b
        for a, b in zip(_UNDO, (*_UNDO[1:], State.IDLE), strict=True)
        for e in (Event.DONE, Event.FAILED, Event.FENCED)
    },
}
"""(state, event) -> state. Not in it: after FENCED the last step leads to STOPPED instead of IDLE."""


class IllegalEvent(Exception):
    """A program error: the event is not in the table for the present state."""


class SnapshotMachine:
    """One snapshot after another; see TRANSITIONS."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self.verdict: Verdict | None = None

    def on(self, event: Event) -> Step:
        """Advance. Raises IllegalEvent, with nothing changed, for an event that the table does not have."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalEvent(f"{event.value!r} while {self.state.value}")
        if event is Event.BEGIN:
            self.verdict = None
        elif event is Event.FENCED:
            self.verdict = Verdict.FENCED
        elif event is Event.FAILED and self.verdict is None:
            self.verdict = Verdict.ABANDONED
        elif self.state is State.PUBLISHING:
            self.verdict = Verdict.PUBLISHED
        if target is State.IDLE and self.verdict is Verdict.FENCED:
            target = State.STOPPED
        self.state = target
        return Step(target, EFFECTS.get(target))
