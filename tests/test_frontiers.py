"""recovery.admission.holds, its frontiers: fixed, shrinking, done when every member is settled, or frozen for a cut."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recovery.admission.holds import AdmissionGate, CannotRecord, Hold, HoldKind, Lifecycle, NotHeld

DRAIN, CUT = HoldKind.DRAIN, HoldKind.CUT


class FrontierMachine(RuleBasedStateMachine):
    """A15, A17, A18, A19, A25 with a history of events per hold, replayed at each look."""

    @initialize()
    def begin(self) -> None:
        self.gate = AdmissionGate()
        self.running: set[int] = set()
        self.next = 0
        self.histories: dict[int, tuple[Hold, list[tuple[str, int]]]] = {}
        self.recorded: set[int] = set()
        self.seen: set[int] = set()

    @rule()
    def start(self) -> None:
        self.running.add(self.next)
        self.next += 1

    @rule(kind=st.sampled_from(HoldKind))
    def acquire(self, kind: HoldKind) -> None:
        hold = self.gate.acquire(kind, "me", "", 0.0, self.running)
        self.histories[hold.number] = (hold, [("member", one) for one in self.running])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(one)
        self.gate.settled(one)
        for _, events in self.histories.values():
            events.append(("settled", one))

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        hold, events = self.histories[data.draw(st.sampled_from(sorted(self.histories)))]
        if hold.kind is CUT:
            self.gate.freeze(hold)
            events.append(("frozen", -1))
        else:
            with pytest.raises(NotHeld, match="drains"):
                self.gate.freeze(hold)

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        hold, _ = self.histories.pop(data.draw(st.sampled_from(sorted(self.histories))))
        self.gate.release(hold)
        for verb in (self.gate.done, self.gate.left, self.gate.record_update, self.gate.release):
            with pytest.raises(NotHeld):
                verb(hold)

    @precondition(lambda self: self.histories)
    @rule(data=st.data())
    def look_and_record(self, data: st.DataObject) -> None:
        hold, events = self.histories[data.draw(st.sampled_from(sorted(self.histories)))]
        may = hold.kind is DRAIN and hold.number in self.seen and hold.number not in self.recorded
        try:
            self.gate.record_update(hold)
            assert may
            self.recorded.add(hold.number)
        except CannotRecord:
            assert not may
        if self.left(events) == 0:
            self.seen.add(hold.number)
        assert self.gate.done(hold) is (hold.number in self.seen)

    def left(self, events: list[tuple[str, int]]) -> int:
        waiting: set[int] = set()
        for name, one in events:
            if name == "member":
                waiting.add(one)
            elif name == "settled":
                waiting.discard(one)
            else:
                waiting.clear()
        return len(waiting)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "gate"):
            for hold, events in self.histories.values():
                assert self.gate.left(hold) == self.left(events)


TestFrontierMachine = FrontierMachine.TestCase
TestFrontierMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_a20_a_members_failure_is_told_to_the_holds_that_wait_for_it_and_releases_none() -> None:
    gate = AdmissionGate()
    mine = gate.acquire(DRAIN, "me", "", 0.0, ["x"])
    other = gate.acquire(DRAIN, "other", "", 0.0, ["y"])
    gate.failed("x", RuntimeError("first"))
    gate.failed("x", RuntimeError("second"))
    gate.settled("x")
    with pytest.raises(RuntimeError, match="first"):
        gate.done(mine)
    assert not gate.done(other) and gate.active == (mine, other)


def test_closing_is_sticky_and_comes_before_closed() -> None:
    gate = AdmissionGate()
    with pytest.raises(Exception, match="before"):
        gate.closed()
    gate.close()
    assert gate.lifecycle is Lifecycle.CLOSING and not gate.open
    gate.closed()
    gate.close()
    assert gate.lifecycle is Lifecycle.CLOSED
