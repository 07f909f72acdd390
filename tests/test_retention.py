"""recovery.retention against an oracle that knows, for every snapshot, what it reaches."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from recovery.retention import Retention, Work


class RetentionWorld:
    """Snapshots with sets of keys; `alive` is what was not deleted. Publications may be unknown to the coordinator."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.retention = Retention(keep)
        self.reached: list[set[str]] = []
        self.intents: list[tuple[int, tuple[str, ...]]] = []
        self.alive: set[str] = set()
        self.deleted: list[str] = []
        self.current: set[str] = set()
        self.known: set[str] = set()
        self.n = 0

    def new_key(self) -> None:
        self.n += 1
        self.current.add(f"k{self.n:04d}")

    def lose_key(self, chance: random.Random) -> None:
        if self.current:
            self.current.discard(chance.choice(sorted(self.current)))

    def publish(self, *, collected: bool, intent_lands: bool) -> None:
        """One publication: what it does not reach any more is dropped; then what is due is deleted and intended."""
        dropped = self.known - self.current
        self.known = set(self.current)
        self.alive |= self.current
        self.reached.append(set(self.current))
        self.retention.drop(sorted(dropped))
        if not collected:
            return  # the coordinator was interrupted after the publication
        work = self.retention.published()
        for key in work.delete:
            self.check_deletion(key)
            self.alive.discard(key)
            self.deleted.append(key)
        for key in work.intend:
            assert not any(key in reached for reached in self.reached[-self.keep :]), "a kept snapshot reaches it"
        if work.intend and intent_lands:
            self.intents.append((len(self.reached), work.intend))
            self.retention.intended(work.intend)

    def check_deletion(self, key: str) -> None:
        n = len(self.reached)
        assert not any(key in reached for reached in self.reached[-self.keep :]), "a kept snapshot reaches it"
        assert any(at < n and key in keys for at, keys in self.intents), "its intent precedes this snapshot"
        assert key not in self.deleted, "deleted twice"

    def check(self) -> None:
        for reached in self.reached[-self.keep :]:
            assert reached <= self.alive, "a kept snapshot lost an object"

    def drain(self) -> None:
        """With nothing new, all garbage goes within a bounded number of snapshots."""
        for _ in range(self.keep + 2):
            self.publish(collected=True, intent_lands=True)
        assert self.alive == self.current


class RetentionMachine(RuleBasedStateMachine):
    @initialize(keep=st.integers(1, 4))
    def begin(self, keep: int) -> None:
        self.world = RetentionWorld(keep)

    @rule()
    def new_key(self) -> None:
        self.world.new_key()

    @rule(chance=st.randoms(use_true_random=False))
    def lose_key(self, chance: random.Random) -> None:
        self.world.lose_key(chance)

    @rule(collected=st.booleans(), intent_lands=st.booleans())
    def publish(self, collected: bool, intent_lands: bool) -> None:
        self.world.publish(collected=collected, intent_lands=intent_lands)
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestRetentionMachine = RetentionMachine.TestCase
TestRetentionMachine.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("seed", range(60))
def test_seeded_walks(seed: int) -> None:
    chance = random.Random(seed)
    world = RetentionWorld(keep=1 + seed % 4)
    for _ in range(200):
        what = chance.choice(["new", "new", "lose", "publish"])
        if what == "new":
            world.new_key()
        elif what == "lose":
            world.lose_key(chance)
        else:
            world.publish(collected=chance.random() < 0.8, intent_lands=chance.random() < 0.7)
        world.check()
    world.drain()


def works(keep: int, *dropped: list[str]) -> list[Work]:
    retention = Retention(keep)
    out = []
    for keys in dropped:
        retention.drop(keys)
        out.append(retention.published())
        retention.intended(out[-1].intend)
    return out


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_c7_a_key_is_intended_after_k_snapshots_and_deleted_one_later(keep: int) -> None:
    out = works(keep, ["x"], *([] for _ in range(keep + 1)))
    assert [work.intend for work in out] == [("x",) if i == keep - 1 else () for i in range(keep + 2)]
    assert [work.delete for work in out] == [("x",) if i == keep else () for i in range(keep + 2)]


def test_an_intent_that_did_not_land_is_offered_again_and_deletes_nothing() -> None:
    retention = Retention(1)
    retention.drop(["x"])
    for _ in range(3):
        assert retention.published() == Work((), ("x",))
    retention.intended(["x"])
    assert retention.published() == Work(("x",), ())


def test_what_is_spared_for_now_is_offered_until_it_is_not() -> None:
    retention = Retention(1)
    retention.drop(["pinned", "other"])
    assert retention.published() == Work((), ("pinned", "other"))
    retention.intended(["other"])
    assert retention.published() == Work(("other",), ("pinned",))
    assert retention.published() == Work((), ("pinned",))
    retention.intended(["pinned"])
    assert retention.published() == Work(("pinned",), ())


def test_what_a_restore_takes_over_is_deleted_or_intended_at_once() -> None:
    retention = Retention(3)
    retention.take_over(["named"], ["named", "found"])
    assert retention.published() == Work(("named",), ("found",))
    retention.intended(["found"])
    assert retention.published() == Work(("found",), ())


def test_a_key_that_is_dropped_and_found_is_intended_once() -> None:
    retention = Retention(1)
    retention.drop(["x", "y"])
    retention.take_over([], ["x"])
    assert retention.published() == Work((), ("x", "y"))


def test_at_least_one_snapshot_is_kept() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Retention(0)
