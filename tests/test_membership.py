"""recovery.membership: every pair of state and event, and random lives of a participant against an oracle of its own.

Owns: that one method is under way at a time, and that who gave a state is told once.
Does not know: threads.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recovery.membership import BUSY, TRANSITIONS, Effect, Event, IllegalEvent, Membership, State


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=lambda value: value.name)
def test_every_pair(state: State, event: Event) -> None:
    one = Membership(restores=False)
    one.state = state
    if (state, event) not in TRANSITIONS:
        with pytest.raises(IllegalEvent, match=f"'{event.value}' while {state.value}"):
            one.on(event)
        assert one.state is state, "an illegal event changes nothing"
        return
    effect = one.on(event)
    assert (one.state, effect) == TRANSITIONS[state, event]
    assert effect is None or one.state in BUSY, "a method that is called is under way"


class Lives(RuleBasedStateMachine):
    """A participant as whoever calls it sees it: a list of calls, of which the last may not have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Membership(restores=False)
        self.calls: list[str] = []
        self.under_way = ""
        self.given = self.told = 0
        self.attempt = False
        self.left = False

    def do(self, effect: Effect | None) -> None:
        if effect is not None:
            assert not self.under_way, "one method at a time"
            self.under_way = "prepare" if effect is Effect.PREPARE else "commit"
            self.told += self.under_way == "commit"

    @precondition(lambda self: self.one.state is State.IDLE and not self.attempt)
    @rule()
    def ask(self) -> None:
        self.do(self.one.on(Event.ASK))
        self.attempt = True

    @precondition(lambda self: self.under_way)
    @rule(raises=st.booleans())
    def ends(self, raises: bool) -> None:
        method, self.under_way = self.under_way, ""
        self.given += method == "prepare" and not raises and not self.left
        self.do(self.one.on(Event.RAISED if raises else Event.RETURNED))

    @precondition(lambda self: self.attempt and self.one.state is State.PREPARING)
    @rule(event=st.sampled_from([Event.OVERDUE, Event.ABANDONED]))
    def is_given_up(self, event: Event) -> None:
        self.do(self.one.on(event))
        self.attempt = False

    @precondition(lambda self: self.attempt and self.one.state is not State.PREPARING)
    @rule(published=st.booleans())
    def attempt_ends(self, published: bool) -> None:
        if self.one.state is State.PREPARED:
            self.do(self.one.on(Event.PUBLISHED if published else Event.ABANDONED))
        self.attempt = False

    @precondition(lambda self: not self.left)
    @rule()
    def leaves(self) -> None:
        if self.one.state is State.PREPARED:
            self.given -= 1  # of its own accord: it is told nothing more
        self.do(self.one.on(Event.LEAVE))
        self.left = True

    @precondition(lambda self: self.left and not self.under_way)
    @rule()
    def another_joins(self) -> None:
        self.one, self.left, self.attempt = Membership(restores=False), False, False
        self.given = self.told = 0

    @invariant()
    def told_once(self) -> None:
        waiting = self.one.state is State.PREPARED
        assert self.told == self.given - waiting

    @invariant()
    def busy_is_busy(self) -> None:
        assert self.left or (self.one.state in BUSY) == bool(self.under_way)


TestLives = Lives.TestCase


def test_agents_md_is_up_to_date() -> None:
    """docs/agents.md is what docs/make_diagrams.py makes of the table now."""
    docs = Path(__file__).parents[1] / "docs"
    spec = importlib.util.spec_from_file_location("make_diagrams", docs / "make_diagrams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (docs / "agents.md").read_text(encoding="utf-8")
    assert module.redrawn_agents(page) == page, "run: python docs/make_diagrams.py"
