"""recovery.trajectories: random agents that go on, come again and go another way, against a list of what happened.

Owns: that a divergence drops what followed from the call that was displaced, and nothing else.
Does not know: sessions, tokens.
"""

from __future__ import annotations

import hashlib

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from recovery.lineage import NO_PARENT
from recovery.model import CallId
from recovery.trajectories import Place, Placed, Trajectories


def call(rollout: str, place: Place, parent: CallId, prompt: int) -> Placed:
    """Its id is made of all that a call is, as the real one."""
    text = f"{rollout} {place} {parent.hex()} {prompt}"
    return Placed(rollout, place, CallId(hashlib.sha256(text.encode()).digest()[:16]), parent)


PLACES = st.builds(Place, st.integers(0, 3), st.integers(0, 1))


class Agents(RuleBasedStateMachine):
    """The model is a list: whoever takes a place removes its holder, and on and on who follows from the removed."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.machine = Trajectories()
        self.held: list[Placed] = []

    @rule(target=calls, rollout=st.sampled_from("ab"), prompt=st.integers(0, 1))
    def begins(self, rollout: str, prompt: int) -> Placed:
        return self.takes(call(rollout, Place(0, 0), NO_PARENT, prompt))

    @rule(target=calls, parent=calls, place=PLACES, prompt=st.integers(0, 1))
    def follows(self, parent: Placed, place: Place, prompt: int) -> Placed:
        return self.takes(call(parent.rollout, place, parent.call_id, prompt))

    @rule(one=calls)
    def comes_again(self, one: Placed) -> None:
        self.takes(one)

    def takes(self, one: Placed) -> Placed:
        gone = [held for held in self.held if (held.rollout, held.place) == (one.rollout, one.place) and held != one]
        for removed in gone:
            gone += [held for held in self.held if held.parent == removed.call_id and held not in gone]
        expected = sorted(gone, key=lambda held: held.place)
        assert self.machine.displaced_by(one) == [held.call_id for held in expected]
        assert self.machine.take(one) == [held.call_id for held in expected]
        self.held = [held for held in self.held if held not in gone and held != one] + [one]
        return one

    @rule(rollout=st.sampled_from("ab"))
    def ends(self, rollout: str) -> None:
        expected = {held.call_id for held in self.held if held.rollout == rollout}
        assert set(self.machine.leave(rollout)) == expected
        self.held = [held for held in self.held if held.rollout != rollout]

    @invariant()
    def holds_what_the_list_has(self) -> None:
        for rollout in "ab":
            expected = sorted((held for held in self.held if held.rollout == rollout), key=lambda held: held.place)
            assert self.machine.at(rollout) == expected
            assert Trajectories(expected).at(rollout) == expected, "what a restore finds is the same"


TestAgents = Agents.TestCase
