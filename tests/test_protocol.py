"""recovery.protocol: every pair of state and event, every path, and docs/protocol.md drawn from the same table."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.protocol import (
    EFFECTS,
    TRANSITIONS,
    Effect,
    Event,
    IllegalEvent,
    SnapshotMachine,
    State,
    Verdict,
)

ROOT = Path(__file__).resolve().parent.parent

ORDER = [
    (State.ASKING, Effect.ASK),
    (State.HOLDING, Effect.ACQUIRE_HOLD),
    (State.FENCING, Effect.RAISE_FENCE),
    (State.PREPARING, Effect.PREPARE),
    (State.CUTTING, Effect.CUT),
    (State.STAGING, Effect.STAGE),
    (State.RECORDING, Effect.RECORD),
    (State.VALIDATING, Effect.VALIDATE),
    (State.PUBLISHING, Effect.PUBLISH),
    (State.LOWERING, Effect.LOWER_FENCE),
    (State.RESUMING, Effect.RESUME),
    (State.RELEASING, Effect.RELEASE_HOLD),
]
"""The steps of a snapshot, as prose has them: ask, hold, fence, prepare, cut, stage, write, validate, publish, undo."""

ANSWERS = (Event.DONE, Event.FAILED, Event.FENCED)


def at(state: State) -> SnapshotMachine:
    machine = SnapshotMachine()
    machine.state = state
    return machine


def expected(state: State, event: Event) -> State | None:
    """The table again, from the prose: where an event leads, None if it is illegal."""
    states = [one for one, _ in ORDER]
    if state is State.STOPPED:
        return None
    if state is State.IDLE:
        return State.ASKING if event is Event.BEGIN else None
    if event is Event.BEGIN:
        return None
    following = [*states, State.IDLE][states.index(state) + 1]
    if event is Event.DONE or state in (State.LOWERING, State.RESUMING, State.RELEASING):
        return following
    return State.RESUMING if state in (State.ASKING, State.HOLDING) else State.LOWERING


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=lambda value: value.name)
def test_every_pair(state: State, event: Event) -> None:
    machine, target = at(state), expected(state, event)
    before = machine.verdict
    if target is None:
        with pytest.raises(IllegalEvent, match=f"'{event.value}' while {state.value}"):
            machine.on(event)
        assert (machine.state, machine.verdict) == (state, before), "an illegal event changes nothing"
        return
    if target is State.IDLE and event is Event.FENCED:
        target = State.STOPPED
    step = machine.on(event)
    assert (step.state, machine.state) == (target, target)
    assert step.effect is dict(ORDER).get(target)


def paths() -> Iterator[tuple[list[Event], list[Effect], SnapshotMachine]]:
    """Every sequence of answers from BEGIN to the end, with the effects that were asked for."""

    def walk(answers: list[Event]) -> Iterator[tuple[list[Event], list[Effect], SnapshotMachine]]:
        machine = SnapshotMachine()
        step = machine.on(Event.BEGIN)
        effects = []
        for answer in answers:
            assert step.effect is not None
            effects.append(step.effect)
            step = machine.on(answer)
        if step.effect is None:
            yield answers, effects, machine
            return
        for answer in ANSWERS:
            yield from walk([*answers, answer])

    yield from walk([])


def test_every_path() -> None:
    """Hold and fence are given back on every path on which they may have come up; nothing is published early."""
    n = 0
    for answers, effects, machine in paths():
        n += 1
        assert effects[-1] is Effect.RELEASE_HOLD and effects.count(Effect.RELEASE_HOLD) == 1
        raised = Effect.RAISE_FENCE in effects
        assert effects.count(Effect.LOWER_FENCE) == raised
        if raised:
            assert effects.index(Effect.LOWER_FENCE) < effects.index(Effect.RELEASE_HOLD)
        assert effects.count(Effect.RESUME) == 1, "who was asked is told how it ended"
        work = [effect for _, effect in ORDER[:9]]
        done = [effect for effect, answer in zip(effects, answers, strict=True) if answer is Event.DONE]
        if Effect.PUBLISH in effects:
            assert effects[:9] == work and done[:8] == work[:8], "every earlier step succeeded"
        published = Effect.PUBLISH in done
        fenced = Event.FENCED in answers
        verdict = Verdict.FENCED if fenced else Verdict.PUBLISHED if published else Verdict.ABANDONED
        assert machine.verdict is verdict
        assert machine.state is (State.STOPPED if fenced else State.IDLE)
        if fenced:
            with pytest.raises(IllegalEvent):
                machine.on(Event.BEGIN)
        else:
            assert machine.on(Event.BEGIN).effect is Effect.ASK
            assert machine.verdict is None
    # 27 ways through the three undo steps (9 where no fence can be up), after each failure and after success.
    assert n == 2 * 2 * 9 + 7 * 2 * 27 + 27


def test_each_working_state_has_one_effect_and_every_answer() -> None:
    assert list(EFFECTS.items()) == ORDER
    assert set(TRANSITIONS) == {(State.IDLE, Event.BEGIN)} | {(s, e) for s, _ in ORDER for e in ANSWERS}


def test_protocol_md_is_up_to_date() -> None:
    """docs/protocol.md is what docs/make_diagrams.py makes of the table now."""
    spec = importlib.util.spec_from_file_location("make_diagrams", ROOT / "docs" / "make_diagrams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert module.redrawn(written) == written, "run: python docs/make_diagrams.py"
    for state in State:
        assert f"    {state.value}" in written or f"--> {state.value}" in written
