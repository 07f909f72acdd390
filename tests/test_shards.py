"""recovery.shards and recovery.sharded: owners that take over, stall and answer late, against a log of what happened.

Owns: that a merged cut holds, for every shard, what its owner of that moment said in that cut, and nothing else.
Does not know: processes.
"""

from __future__ import annotations

import base64
import json
import threading
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recovery.errors import InputError, SnapshotAbandoned
from recovery.sharded import Sharded
from recovery.shards import Missing, Receipt, Refused, Shards

NAMES = ("a", "b", "c")
PATIENCE_S = 120.0


class Owners(RuleBasedStateMachine):
    """The model is the history: claims, releases and receipts in order; what counts is read off it each time."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = Shards(NAMES, {"b": 5})
        self.history: list[tuple[str, ...] | Receipt] = []
        self.n_cuts = 0
        self.sent = 0

    def owner(self, name: str) -> tuple[int, bool]:
        """Highest epoch, and whether somebody has it now."""
        epoch, owned = {"b": 5}.get(name, 0), False
        for event in self.history:
            if event == ("claim", name):
                epoch, owned = epoch + 1, True
            elif event == ("release", name):
                owned = False
        return epoch, owned

    def counting(self) -> dict[str, Receipt]:
        """Receipts of the cut under way that count."""
        found: dict[str, Receipt] = {}
        for event in self.history:
            if isinstance(event, Receipt):
                found.setdefault(event.shard, event)
            elif event[0] in ("begin", "end"):
                found = {}
            else:
                found.pop(event[1], None)
        return found

    def under_way(self) -> bool:
        marks = [event[0] for event in self.history if not isinstance(event, Receipt) and event[0] in ("begin", "end")]
        return bool(marks) and marks[-1] == "begin"

    @rule(name=st.sampled_from(NAMES))
    def claims(self, name: str) -> None:
        self.history.append(("claim", name))
        assert self.shards.claim(name) == self.owner(name)[0]

    @rule(name=st.sampled_from(NAMES), late=st.integers(0, 2))
    def releases(self, name: str, late: int) -> None:
        epoch, owned = self.owner(name)
        done = self.shards.release(name, epoch - late)
        assert done == (owned and late == 0)
        if done:
            self.history.append(("release", name))

    @rule()
    def begins(self) -> None:
        self.n_cuts += 1
        self.history.append(("begin",))
        assert self.shards.begin() == self.n_cuts

    @rule(name=st.sampled_from((*NAMES, "nobody")), behind=st.integers(0, 2), cut_behind=st.integers(0, 1))
    def answers(self, name: str, behind: int, cut_behind: int) -> None:
        epoch, owned = self.owner(name)
        self.sent += 1
        receipt = Receipt(name, epoch - behind, self.n_cuts - cut_behind, str(self.sent).encode())
        counts = (
            name in NAMES and owned and behind == 0 and cut_behind == 0 and self.under_way()
            and name not in self.counting()
        )  # fmt: skip
        refused = self.shards.receive(receipt)
        assert (refused is None) == counts
        assert refused is None or (isinstance(refused, Refused) and refused.reason)
        if counts:
            self.history.append(receipt)

    @precondition(lambda self: self.under_way())
    @rule()
    def merges(self) -> None:
        counting = self.counting()
        merged = self.shards.merge()
        if set(counting) == set(NAMES):
            assert merged == counting
            self.history.append(("end",))
        else:
            assert isinstance(merged, Missing)
            assert merged.shards == {name: self.owner(name)[0] for name in NAMES if name not in counting}

    @rule()
    def abandons(self) -> None:
        assert self.shards.abandon() == self.counting()
        self.history.append(("end",))

    @invariant()
    def epochs_are_known(self) -> None:
        assert self.shards.epochs == {name: self.owner(name)[0] for name in NAMES}
        assert (self.shards.cut is not None) == self.under_way()


TestOwners = Owners.TestCase


def test_a_shard_that_there_is_not() -> None:
    with pytest.raises(KeyError):
        Shards(["a"]).claim("b")


# ---- recovery.sharded: real threads ------------------------------------------------------------------------------


class Part:
    """An owner that gives its state when it is let go."""

    def __init__(self, state: bytes = b"s", *, hangs: bool = False, raises: BaseException | None = None) -> None:
        self.state, self.raises = state, raises
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.told: list[bool] = []
        self.restored: list[tuple[bytes, bool]] = []
        if not hangs:
            self.go_on.set()

    def prepare(self, cut: int) -> bytes:
        self.inside.set()
        assert self.go_on.wait(PATIENCE_S), "nobody let it go"
        if self.raises is not None:
            raise self.raises
        return self.state + str(cut).encode()

    def commit(self, published: bool) -> None:
        self.told.append(published)

    def restore(self, state: bytes, rewound: bool) -> None:
        self.restored.append((state, rewound))


def states(prepared: bytes) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in json.loads(prepared)["states"].items()}


def test_all_shards_of_one_cut_and_back() -> None:
    one = Sharded("env", ["a", "b"])
    a, b = Part(b"A"), Part(b"B")
    one.take("a", a), one.take("b", b)
    prepared = one.prepare()
    assert states(prepared) == {"a": b"A1", "b": b"B1"}
    one.commit(True)
    assert a.told == b.told == [True]
    again = Sharded("env", ["a", "b"])
    again.restore(prepared, False)
    new = Part(b"N")
    assert again.take("a", new) == 2 and new.restored == [(b"A1", False)], "above every owner that there was"
    with pytest.raises(SnapshotAbandoned, match="shard 'b' of 'env' has no owner"):
        again.prepare()
    with pytest.raises(InputError, match="has the shards"):
        Sharded("env", ["a"]).restore(prepared, False)


def test_an_owner_that_hangs_is_replaced_in_mid_cut_and_its_late_word_does_not_count() -> None:
    one = Sharded("env", ["a", "b"])
    stalled, b, fresh = Part(b"old", hangs=True), Part(b"B"), Part(b"new")
    one.take("a", stalled), one.take("b", b)
    prepared: list[bytes] = []
    thread = threading.Thread(target=lambda: prepared.append(one.prepare()))
    thread.start()
    assert stalled.inside.wait(PATIENCE_S) and b.inside.wait(PATIENCE_S)
    one.take("a", fresh)
    thread.join(PATIENCE_S)
    assert states(prepared[0]) == {"a": b"new1", "b": b"B1"}
    stalled.go_on.set()
    one.commit(True)
    due = time.monotonic() + PATIENCE_S
    while not stalled.told:
        assert time.monotonic() < due, "waited for the late owner to be told"
        time.sleep(0.001)
    assert stalled.told == [False] and fresh.told == b.told == [True]


def test_an_owner_that_raises_fails_the_cut_and_its_successor_takes_part_in_the_next() -> None:
    one = Sharded("env", ["a"])
    one.take("a", Part(raises=ValueError("broken")))
    with pytest.raises(SnapshotAbandoned, match="owner 1 of shard 'a' of 'env' could not prepare: ValueError"):
        one.prepare()
    one.take("a", Part(b"A"))
    assert states(one.prepare()) == {"a": b"A2"}


def test_owners_that_gave_a_state_are_told_when_another_did_not() -> None:
    one = Sharded("env", ["a", "b"])
    a, b = Part(b"A"), Part(hangs=True, raises=ValueError("broken"))
    one.take("a", a), one.take("b", b)
    raised: list[BaseException] = []

    def prepare() -> None:
        try:
            one.prepare()
        except SnapshotAbandoned as error:
            raised.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    due = time.monotonic() + PATIENCE_S
    while "a" not in one._shards._receipts:
        assert time.monotonic() < due, "waited for the receipt of a"
        time.sleep(0.001)
    b.go_on.set()
    thread.join(PATIENCE_S)
    assert "owner 1 of shard 'b'" in str(raised[0]) and a.told == [False] and b.told == []
