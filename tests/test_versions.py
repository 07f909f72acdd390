"""recovery.admission.versions: lag over a tree of lineages against a walk over explicit histories, and publication."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from recovery.admission.versions import (
    TRANSITIONS,
    Ahead,
    Event,
    Ghost,
    Lag,
    PolicyVersions,
    State,
    Unknown,
    VersionRefused,
)
from recovery.model import PolicyVersion

V0 = PolicyVersion("a", 0)


class History:
    """The model: every version that leads to the current one, in order; those of dead branches in a bag."""

    def __init__(self) -> None:
        self.line = [("a", 0)]
        self.dead: set[tuple[str, int]] = set()

    def update(self) -> None:
        lineage, number = self.line[-1]
        self.line.append((lineage, number + 1))

    def fork(self, name: str, at: int) -> None:
        kept = [one for one in self.line if one[1] <= at]
        self.dead |= set(self.line) - set(kept)
        self.line = [*kept, (name, at)]

    def expected(self, version: tuple[str, int]) -> object:
        if version in self.dead:
            return Ghost()
        if version in self.line:
            return Lag(self.line[-1][1] - version[1])
        return None


class VersionsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.versions, self.history, self.n = PolicyVersions(V0), History(), 0

    @rule()
    def update(self) -> None:
        self.versions.begin(self.versions.next)
        self.versions.succeed()
        self.history.update()

    @rule()
    def again(self) -> None:
        self.versions.begin(self.versions.current)
        self.versions.fail()
        assert self.versions.torn
        self.versions.begin(self.versions.current)
        self.versions.succeed()

    @rule(back=st.integers(0, 5))
    def fork(self, back: int) -> None:
        at = max(0, self.versions.current.number - back)
        self.n += 1
        self.versions.fork(f"l{self.n}", at)
        self.history.fork(f"l{self.n}", at)

    @rule()
    def through_json(self) -> None:
        self.versions = PolicyVersions.from_json(self.versions.to_json())

    @invariant()
    def distances(self) -> None:
        if not hasattr(self, "versions"):
            return
        lineage, number = self.history.line[-1]
        assert self.versions.current == PolicyVersion(lineage, number) and self.versions.state is State.STEADY
        for version in [*self.history.line, *self.history.dead]:
            assert self.versions.distance(PolicyVersion(*version)) == self.history.expected(version)
        assert self.versions.distance(PolicyVersion(lineage, number + 2)) == Ahead(2)
        assert self.versions.distance(PolicyVersion("never", 0)) == Unknown() == self.versions.distance(None)


TestVersionsMachine = VersionsMachine.TestCase
TestVersionsMachine.settings = settings(max_examples=60, stateful_step_count=20)


@given(st.lists(st.sampled_from(Event), max_size=8))
def test_a59_a63_an_event_that_the_table_does_not_have_changes_nothing(events: list[Event]) -> None:
    versions = PolicyVersions(V0)
    for event in events:
        before = (versions.state, versions.current, versions.target)
        calls = {
            Event.BEGIN: lambda v=versions: v.begin(v.next),
            Event.SUCCEEDED: versions.succeed,
            Event.FAILED: versions.fail,
        }
        if (versions.state, event) in TRANSITIONS:
            calls[event]()
            grew = versions.current.number - before[1].number
            assert grew == (event is Event.SUCCEEDED), "A59: only a success counts"
        else:
            with pytest.raises(VersionRefused):
                calls[event]()
            assert (versions.state, versions.current, versions.target) == before


def test_a61_publication_is_monotone() -> None:
    versions = PolicyVersions(V0)
    assert versions.publish(PolicyVersion("a", 3)) and not versions.publish(PolicyVersion("a", 3))
    for wrong in (PolicyVersion("a", 2), PolicyVersion("b", 9)):
        with pytest.raises(VersionRefused):
            versions.publish(wrong)
    for wrong in (PolicyVersion("a", 2), PolicyVersion("a", 5)):
        with pytest.raises(VersionRefused):
            versions.begin(wrong)
    assert versions.current.number == 3 and versions.state is State.STEADY
    versions.begin(versions.next)
    with pytest.raises(VersionRefused, match="under way"):
        versions.publish(PolicyVersion("a", 9))
    versions.fail()
    assert versions.publish(PolicyVersion("a", 3)) and not versions.torn, "A63: broadcast again by somebody else"


def test_v9_a_lineage_is_never_used_twice() -> None:
    versions = PolicyVersions(PolicyVersion("a", 12))
    versions.fork("b", 10)
    for name, at in (("a", 3), ("b", 3), ("", 3), ("c", 11), ("c", -1)):
        with pytest.raises(VersionRefused):
            versions.fork(name, at)
    assert versions.current == PolicyVersion("b", 10)


@pytest.mark.parametrize("value", [{}, {"forks": {}}, {"lineage": "", "number": 0, "forks": {}}, {"forks": {"b": 1}}])
def test_what_is_no_state_is_refused(value: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        PolicyVersions.from_json(value)
