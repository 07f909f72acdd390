"""recovery.admission.holds: open if and only if nobody holds it, and a hold is its own only key."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from recovery.admission.holds import AdmissionClosed, AdmissionGate, Hold, HoldKind, NotHeld


def acquire(gate: AdmissionGate, owner: str = "coordinator", kind: HoldKind = HoldKind.CUT) -> Hold:
    return gate.acquire(kind, owner, "snapshot (interval)", 1.5)


class HoldMachine(RuleBasedStateMachine):
    """A15, A21, A22, M7 against a plain set."""

    holds = Bundle("holds")

    @initialize()
    def begin(self) -> None:
        self.gate = AdmissionGate()
        self.active: list[Hold] = []
        self.closed = False
        self.epoch = 0

    @rule(target=holds, owner=st.sampled_from("abc"), kind=st.sampled_from(HoldKind))
    def acquire(self, owner: str, kind: HoldKind) -> Hold | None:
        if self.closed:
            with pytest.raises(AdmissionClosed):
                acquire(self.gate, owner, kind)
            return None
        hold = acquire(self.gate, owner, kind)
        assert hold.number not in [other.number for other in self.active]
        self.active.append(hold)
        self.epoch += 1
        return hold

    @rule(hold=holds)
    def release(self, hold: Hold | None) -> None:
        if hold is None:
            return
        if self.closed:
            assert self.gate.release(hold) is False
        elif hold in self.active:
            self.active.remove(hold)
            assert self.gate.release(hold) is (not self.active)
            self.epoch += not self.active
        else:
            with pytest.raises(NotHeld):
                self.gate.release(hold)

    @rule(really=st.sampled_from([False, False, False, True]))
    def close(self, really: bool) -> None:
        if really:
            self.gate.close()
            self.closed, self.active = True, []

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "gate"):
            assert self.gate.open is (not self.active and not self.closed)
            assert self.gate.active == tuple(self.active)
            assert self.gate.epoch == self.epoch


TestHoldMachine = HoldMachine.TestCase
TestHoldMachine.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a21_it_opens_with_the_last_release_whatever_the_order(order: tuple[int, ...]) -> None:
    gate = AdmissionGate()
    holds = [acquire(gate, owner) for owner in ("coordinator", "weights", "evaluation")]
    assert gate.epoch == 3
    for n, index in enumerate(order):
        assert not gate.open
        assert gate.release(holds[index]) is (n == 2)
    assert gate.open and gate.epoch == 4


def test_a15_every_acquisition_and_every_reopening_is_an_epoch() -> None:
    gate = AdmissionGate()
    for n in range(3):
        hold = acquire(gate)
        assert gate.epoch == 2 * n + 1
        gate.release(hold)
        assert gate.epoch == 2 * n + 2


def test_a22_releasing_twice_is_an_error_that_changes_nothing() -> None:
    gate = AdmissionGate()
    mine, theirs = acquire(gate, "me"), acquire(gate, "them")
    gate.release(mine)
    with pytest.raises(NotHeld, match="hold 1 of me"):
        gate.release(mine)
    assert gate.active == (theirs,) and gate.epoch == 2


def test_an_equal_hold_of_another_gate_releases_nothing() -> None:
    gate, other = AdmissionGate(), AdmissionGate()
    mine, theirs = acquire(gate), acquire(other)
    assert mine == theirs
    with pytest.raises(NotHeld):
        gate.release(theirs)
    assert not gate.open and gate.release(mine)


def test_m7_after_close_a_release_is_silent_and_masks_nothing() -> None:
    gate = AdmissionGate()
    hold = acquire(gate)
    gate.close()
    gate.close()
    assert not gate.open and gate.active == ()
    assert gate.release(hold) is False and gate.release(hold) is False
    with pytest.raises(AdmissionClosed, match="evaluation asked"):
        acquire(gate, "evaluation", HoldKind.DRAIN)
