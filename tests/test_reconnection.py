"""recovery/reconnection.py: against a model that knows only who came, who left, and in which order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recovery.reconnection import Begin, Claim, Effect, End, Forget, OtherOwner, OtherRequest, Reconnection

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
NAMES = st.sampled_from("abcd")


def claim(attempt: str, key: str = "", **body: Any) -> Claim:
    return Claim.of(attempt, key, "/v1/completions", {**BODY, **body})


class Connections(RuleBasedStateMachine):
    """The model: per attempt its first claim, and its connections in order, each with what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = 2
        self.machine = Reconnection(self.keep)
        self.first: dict[str, tuple[str, int]] = {}
        self.present: dict[str, list[int]] = {}
        self.begun: set[int] = set()
        self.told: set[int] = set()
        self.kept: set[str] = set()
        self.idle: list[str] = []
        self.of: dict[int, str] = {}
        self.n = 0

    @initialize(names=st.lists(NAMES, unique=True))
    def restore(self, names: list[str]) -> None:
        effects = self.machine.restore([claim(name) for name in names])
        for name in names:
            self.first[name] = ("", 0)
            self.kept.add(name)
            self.idle.append(name)
        self.take(effects)

    @rule(name=NAMES, key=st.sampled_from(["", "k", "l"]), max_tokens=st.integers(0, 1))
    def arrive(self, name: str, key: str, max_tokens: int) -> None:
        body = {"max_tokens": max_tokens} if max_tokens else {}
        self.n += 1
        found = self.machine.arrive(claim(name, key, **body), self.n)
        first = self.first.get(name)
        if first is not None and first != (key, max_tokens):
            if first[0] != key:
                assert found == OtherOwner()
            else:
                assert found == OtherRequest(("max_tokens",))
            return
        assert isinstance(found, list)
        self.first[name] = (key, max_tokens)
        earlier = self.present.setdefault(name, [])
        assert {e.connection for e in found if isinstance(e, End)} == set(earlier) - self.told  # invariant 2
        earlier.append(self.n)
        self.of[self.n] = name
        if name in self.idle:
            self.idle.remove(name)
        self.take(found)

    @precondition(lambda self: self.of)
    @rule(data=st.data())
    def captured(self, data: Any) -> None:
        name = self.of[data.draw(st.sampled_from(sorted(self.of)))]
        self.machine.kept(name)
        self.kept.add(name)

    @precondition(lambda self: self.of)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.of)))
        name = self.of.pop(number)
        self.present[name].remove(number)
        if not self.present[name]:
            if name in self.kept:
                self.idle.append(name)
            else:
                del self.first[name]  # invariant 4
        self.take(self.machine.left(number))

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        effects = self.machine.forget(name)
        assert bool(effects) == (name in self.idle)
        self.take(effects)

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Begin(connection=number):
                    assert self.present[self.of[number]] == [number]  # invariants 2 and 3
                    assert number not in self.begun
                    self.begun.add(number)
                case End(connection=number):
                    assert number not in self.told
                    self.told.add(number)
                case Forget(attempt=name):
                    self.idle.remove(name)
                    self.kept.discard(name)
                    del self.first[name]

    @invariant()
    def the_newest_is_served_as_soon_as_it_is_alone(self) -> None:
        for name, present in self.present.items():
            assert not present or len(present) > 1 or present[0] in self.begun | self.told
            assert set(present[:-1]) <= self.told
            assert self.machine.is_live(name) == bool(present)

    @invariant()
    def the_idle_ones_are_the_newest(self) -> None:
        assert len(self.idle) <= self.keep
        live = sum(bool(present) for present in self.present.values())
        assert self.machine.counts() == (live, len(self.idle))
        assert {name for name in "abcd" if self.machine.is_known(name)} == set(self.first)


TestConnections = Connections.TestCase
TestConnections.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(key=st.text(max_size=20), other=st.text(max_size=20), name=st.text(min_size=1, max_size=9))
def test_a_claim_is_kept_without_its_key(key: str, other: str, name: str) -> None:
    """What is stored says whose the attempt is to who knows the key, and names no two attempts of one key alike."""
    made = claim(name, key)
    again = Claim.from_record(name, made.record)
    assert again == made
    assert (again.owner == Claim.owner_of(name, other)) == (key == other)
    assert not key or made.owner != Claim.owner_of(name + "x", key)
    assert len(key) < 8 or key not in made.record


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(body=st.dictionaries(st.text(), JSON, max_size=6), data=st.data())
def test_a_request_is_itself_in_any_order_and_no_other(body: dict[str, Any], data: Any) -> None:
    names = data.draw(st.permutations(sorted(body)))
    one = Claim.of("a", "", "/r", body)
    assert Claim.of("a", "", "/r", {name: body[name] for name in names}) == one
    assert Claim.of("a", "", "/other", body).body != one.body
    if body:
        name = data.draw(st.sampled_from(sorted(body)))
        other = {**body, name: [body[name]]}
        assert Claim.of("a", "", "/r", other).differing(one) == [name]
        assert Claim.of("a", "", "/r", other).body != one.body


@pytest.mark.parametrize("record", ["", "{}", "[]", "null", json.dumps({"owner": "", "body": "", "fields": 3})])
def test_a_record_of_somebody_else_is_refused_by_name(record: str) -> None:
    with pytest.raises(ValueError, match="attempt 'a' has no claim"):
        Claim.from_record("a", record)


def test_a_request_with_many_members_is_told_apart_though_not_all_are_named() -> None:
    many = {f"f{i:03d}": i for i in range(200)}
    one, other = Claim.of("a", "", "/r", many), Claim.of("a", "", "/r", {**many, "f199": 0})
    machine = Reconnection(1)
    assert machine.arrive(one, 0) == [Begin(0)]
    assert machine.arrive(other, 1) == OtherRequest(())
