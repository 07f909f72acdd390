"""recovery.slots: one winner per slot, dense numbers, zombies fenced, under every order of the store's calls."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from recovery import log
from recovery.errors import (
    CredentialsRefused,
    Damaged,
    Fenced,
    FormatNotUnderstood,
    OutcomeUnknown,
    RecoveryError,
    StoreUnavailable,
)
from recovery.log import Slot
from recovery.log_reading import Read, walk_back
from recovery.ports import ObjectStore, Put
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseAfter, RaiseBefore, Wrapped
from tests.fakes import ManualClock, SeededEntropy
from tests.interleavings import EVERY_VERB, Actor, Choices, Fate, every_walk
from tests.log_stores import all_slots, claimed, damaged_store, writer

CREATES = frozenset({"put_new"})


# ---- the plain path --------------------------------------------------------------------------------------------


def test_claim_append_claim() -> None:
    store = MemoryStore()
    one = claimed(store, "one")
    assert (one.epoch, one.tail) == (1, 1)
    assert one.append("snapshot", {"x": 1}).seq == 2
    two = claimed(store, "two")
    assert (two.epoch, two.tail) == (2, 3)
    assert [(s.seq, s.epoch, s.kind, s.owner) for s in all_slots(store)] == [
        (1, 1, "epoch", "one"),
        (2, 1, "snapshot", "one"),
        (3, 2, "epoch", "two"),
    ]


def test_c8_a_zombie_that_wakes_is_fenced_for_good() -> None:
    store = MemoryStore()
    zombie, heir = claimed(store, "zombie"), claimed(store, "heir")
    for _ in range(2):
        with pytest.raises(Fenced, match=r"slot 2 was written by heir at epoch 2.*holds epoch 1") as caught:
            zombie.append("snapshot", {})
    assert caught.value.exit_code == 11
    heir.append("snapshot", {})
    counting = CountingStore(store)
    zombie._store = counting
    for call in (
        lambda: zombie.append("gc", {}),
        zombie.check_not_fenced,
        zombie.settle,
        zombie.leave_hint,
    ):
        with pytest.raises(Fenced):
            call()
    assert counting.log == []  # it does not even ask
    assert [s.owner for s in all_slots(store)] == ["zombie", "heir", "heir"]


def test_f7_in_single_writer_mode_a_second_writer_is_noticed() -> None:
    """F7: a place that lets one writer overwrite the other's slot. That is not prevented, but nobody goes on as if
    nothing had happened, and the log says in which mode it was written."""

    class Overwriting(Wrapped):
        def put_new(self, key: str, data: bytes) -> Put:
            self.inner.put(key, data)
            return Put.CREATED

    store = MemoryStore()
    alone = SlotLog(store, ManualClock(), SeededEntropy("alone"), "alone", single_writer=True)
    alone.claim()
    alone.append("snapshot", {"n": 1})
    assert alone.append("snapshot", {"n": 2}).seq == 3 and all(slot.single_writer for slot in all_slots(store))
    twin = SlotLog(Overwriting(store), ManualClock(), SeededEntropy("twin"), "twin")
    twin.epoch, twin._tail, twin._prev = 1, 2, alone._prev
    twin.append("snapshot", {"by": "twin"})
    with pytest.raises(Damaged, match=r"log slot 3 is not as this coordinator left it.*something else writes"):
        alone.append("snapshot", {"n": 3})
    twin.epoch, twin._tail = 2, 2
    twin.append("snapshot", {"by": "an heir"})
    with pytest.raises(Fenced, match="slot 3 was written by twin at epoch 2"):
        alone.append("snapshot", {"n": 3})
    store.delete(log.slot_key(3))
    other = claimed(MemoryStore())
    assert not other._slot("snapshot", 1, {}).single_writer


def test_check_not_fenced_looks_past_its_own_late_slots() -> None:
    store = MemoryStore()
    one = claimed(store, "one")
    one.check_not_fenced()
    elder = claimed(MemoryStore(), "one")
    assert elder.epoch == 1
    late = one._slot("snapshot", 1, {})  # a create that was given up on and lands late
    store.put_new(log.slot_key(late.seq), log.encode(late))
    one.check_not_fenced()
    claimed(store, "heir")
    with pytest.raises(Fenced, match="heir"):
        one.check_not_fenced()


# ---- lost answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [RaiseAfter, RaiseBefore])
@pytest.mark.parametrize("error", [OutcomeUnknown("?"), StoreUnavailable("?")])
def test_s2_every_call_of_claim_and_append_may_lose_its_answer(step: Any, error: RecoveryError) -> None:
    """Landed but raised, or not landed and raised: each slot is there once, and acknowledged once."""

    def scenario(store: ObjectStore) -> list[Slot]:
        one = claimed(store)
        return [one.append("snapshot", {"n": n}) for n in range(2)]

    counting = CountingStore(MemoryStore())
    scenario(counting)
    for k in range(len(counting.log)):
        inner = MemoryStore()
        calls = counting.log[:k]
        store = FaultyStore(inner, [*(PASS for _ in calls), step(error)])
        verb = counting.log[k].verb
        if verb in ("get", "list"):  # nothing was being written: the claim may fail, and then wrote nothing
            try:
                scenario(store)
            except RecoveryError:
                assert all_slots(inner) == []
            continue
        slots = scenario(store)
        assert slots == [s for s in all_slots(inner) if s.kind == "snapshot"]
        assert len(all_slots(inner)) == 3, "a lost answer never makes a second slot"


def test_s2_a_412_for_the_own_slot_is_a_success() -> None:
    """A client that repeats a create by itself reports EXISTS for what it wrote."""

    class Repeating(FaultyStore):
        def put_new(self, key: str, data: bytes) -> Put:
            self.inner.put_new(key, data)
            return self.inner.put_new(key, data)

    store = Repeating(MemoryStore(), [])
    one = claimed(store)
    assert (one.epoch, one.append("snapshot", {}).seq) == (1, 2)
    assert len(all_slots(store.inner)) == 2


def deaf_append(one: SlotLog, inner: ObjectStore, lands: bool) -> Slot:
    """An append whose create and every read-back get no answer. Returns the slot that was tried."""
    plan = [(RaiseAfter if lands and n == 0 else RaiseBefore)(StoreUnavailable("down")) for n in range(20)]
    one._store = FaultyStore(inner, plan)
    with pytest.raises(OutcomeUnknown, match="could not learn whether log slot"):
        one.append("snapshot", {"who": "deaf"})
    one._store = inner
    assert one._unsettled is not None
    return one._unsettled


@pytest.mark.parametrize("lands", [True, False])
def test_s7_a_lost_answer_after_which_credentials_run_out_stays_unknown(lands: bool) -> None:
    """S7: what was sent before they ran out may be there: not acknowledged, settled when they are renewed."""
    store = MemoryStore()
    one = claimed(store)
    first = (RaiseAfter if lands else RaiseBefore)(StoreUnavailable("reset"))
    one._store = FaultyStore(store, [first, *[RaiseBefore(CredentialsRefused("expired"))] * 20])
    with pytest.raises(OutcomeUnknown, match="could not learn whether log slot 2 was written: expired"):
        one.append("snapshot", {"n": 1})
    with pytest.raises(CredentialsRefused):
        one.settle()
    one._store = store
    settled = one.settle()
    assert (settled is not None) == lands
    assert one.append("snapshot", {"n": 2}).seq == (3 if lands else 2)
    refusing = FaultyStore(store, [RaiseBefore(CredentialsRefused("no"))])
    one._store = refusing
    with pytest.raises(CredentialsRefused, match="no"):
        one.append("snapshot", {"n": 3})
    one._store = store
    assert one.settle() is None, "what was refused at once is known not to be there"


def test_an_unknown_outcome_that_landed_is_settled_before_anything_else() -> None:
    store = MemoryStore()
    one = claimed(store)
    tried = deaf_append(one, store, lands=True)
    with pytest.raises(OutcomeUnknown, match="turned out to be published"):
        one.append("snapshot", {"who": "next"})
    assert one.tail == 2
    assert one.append("snapshot", {"who": "next"}).seq == 3
    assert [s.nonce for s in all_slots(store)][1] == tried.nonce


def test_an_unknown_outcome_that_did_not_land_is_forgotten() -> None:
    store = MemoryStore()
    one = claimed(store)
    deaf_append(one, store, lands=False)
    assert one.settle() is None
    assert one.append("snapshot", {"who": "next"}).seq == 2
    assert [s.body for s in all_slots(store)] == [{}, {"who": "next"}]


def test_an_own_create_that_lands_late_is_followed_not_taken_for_a_fence() -> None:
    """The request was on its way when its writer gave up: the slot is of the own epoch, and a good slot."""
    store = MemoryStore()
    one = claimed(store)
    late = deaf_append(one, store, lands=False)
    assert one.settle() is None
    store.put_new(log.slot_key(late.seq), log.encode(late))
    assert one.append("snapshot", {"who": "next"}).seq == 3
    assert [s.body for s in all_slots(store)] == [{}, {"who": "deaf"}, {"who": "next"}]


def test_an_unknown_outcome_is_kept_while_the_store_is_down() -> None:
    store = MemoryStore()
    one = claimed(store)
    deaf_append(one, store, lands=True)
    one._store = FaultyStore(store, [RaiseBefore(StoreUnavailable("still down"))])
    with pytest.raises(StoreUnavailable):
        one.settle()
    one._store = store
    settled = one.settle()
    assert settled is not None and settled.seq == 2 == one.tail
    assert one.settle() is None


def test_an_unknown_outcome_that_lost_is_a_fence() -> None:
    store = MemoryStore()
    one = claimed(store, "one")
    deaf_append(one, store, lands=False)
    claimed(store, "heir")
    with pytest.raises(Fenced, match="heir"):
        one.settle()


def test_a_slot_that_cannot_follow_ours_is_damage() -> None:
    store = MemoryStore()
    one = claimed(store)
    stray = Slot(seq=2, epoch=1, kind="snapshot", nonce="x", prev="f" * 64, owner="?", utc=0.0)
    store.put_new(log.slot_key(2), log.encode(stray))
    with pytest.raises(Damaged, match="cannot follow"):
        one.append("snapshot", {})


def test_a_refusal_is_not_an_unknown_outcome() -> None:
    store = FaultyStore(MemoryStore(), [])
    one = claimed(store)
    store._ask = lambda verb, key: RaiseBefore(CredentialsRefused("no"))
    with pytest.raises(CredentialsRefused):
        one.append("snapshot", {})
    store._ask = lambda verb, key: PASS
    assert one.append("snapshot", {}).seq == 2


# ---- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"garbage", b"x" * (log.MAX_SLOT_BYTES + 9)])
@pytest.mark.parametrize("n_damaged", [1, 2, 6])
def test_w13_a_damaged_tail_does_not_keep_a_job_from_going_on(data: bytes, n_damaged: int) -> None:
    """The epoch of a slot that cannot be read is bounded by its distance from one that can."""
    store = damaged_store(6, data)
    for seq in range(7 - n_damaged, 7):
        store.put(log.slot_key(seq), data)
    zombie = writer(store, "zombie")
    zombie._tail, zombie._prev, zombie.epoch = 6, hashlib.sha256(data).hexdigest(), n_damaged  # the worst case
    heir = claimed(store, "heir")
    assert heir.tail == 7 and heir.epoch > n_damaged
    with pytest.raises(Fenced):
        zombie.append("snapshot", {})
    assert heir.append("snapshot", {}).seq == 8
    good = [read.slot.seq for read in walk_back(store, 8) if isinstance(read, Read)]
    assert good == [8, 7, *range(6 - n_damaged, 0, -1)]


def test_f4_a_tail_of_a_later_version_refuses_the_claim_and_writes_nothing() -> None:
    store = damaged_store(6, None)
    later = json.loads(store.get(log.slot_key(5)))
    later.update(seq=6, requires=["sharding"])
    store.put_new(log.slot_key(6), json.dumps(later).encode())
    counting = CountingStore(store)
    with pytest.raises(FormatNotUnderstood, match="log slot 6 requires sharding"):
        claimed(counting)
    assert counting.count("put_new", "put", "delete") == 0


# ---- races: every order of the store's calls -------------------------------------------------------------------


def claim_only(name: str) -> Callable[[ObjectStore], list[int]]:
    return lambda store: [claimed(store, name).tail]


def claim_and_append(name: str) -> Callable[[ObjectStore], list[int]]:
    """Acknowledged slots, until fenced."""

    def work(store: ObjectStore) -> list[int]:
        one = claimed(store, name)
        acknowledged = [one.tail]
        try:
            acknowledged.append(one.append("snapshot", {"who": name}).seq)
        except Fenced as error:
            assert one._fenced is error
        return acknowledged

    return work


def check_race(inner: MemoryStore, actors: list[Actor]) -> None:
    """One winner per slot; a slot is acknowledged by the writer whose name is in it, and by nobody else."""
    slots = all_slots(inner)
    told: dict[int, str] = {}
    for actor in actors:
        assert actor.error is None, actor.error
        for seq in actor.result:
            assert seq not in told, "two writers were told that they own one slot"
            told[seq] = actor.name
    assert told == {slot.seq: slot.owner for slot in slots}, "what is written and what is acknowledged differ"
    assert sum(slot.kind == "epoch" for slot in slots) == len(actors)


def race(choices: Choices, inner: MemoryStore, works: list, everything: bool) -> list[Actor]:
    """Run the writers in the order that `choices` says, deciding at each store call (or at each create only)."""
    verbs = EVERY_VERB if everything else CREATES
    actors = [Actor(f"w{i}", inner, work(f"w{i}"), verbs) for i, work in enumerate(works)]
    while running := [actor for actor in actors if not actor.done]:
        running[choices.choose(len(running))].step()
    return actors


def test_c8_two_coordinators_in_every_order_of_their_calls() -> None:
    n_orders = n_fenced = 0
    for choices in every_walk():
        inner = MemoryStore()
        check_race(inner, race(choices, inner, [claim_and_append] * 2, everything=True))
        n_orders += 1
        n_fenced += len(all_slots(inner)) == 3
    assert n_orders > 400 and 0 < n_fenced < n_orders


def test_c8_three_coordinators_in_every_order_of_their_creates() -> None:
    """Reads of slots that never change commute; what a writer reads is decided where creates take place."""
    n_orders = 0
    outcomes = set()
    for choices in every_walk():
        inner = MemoryStore()
        check_race(inner, race(choices, inner, [claim_and_append, claim_and_append, claim_only], everything=False))
        n_orders += 1
        outcomes.add(len(all_slots(inner)))
    assert n_orders > 1000 and outcomes == {3, 4, 5}, n_orders


def test_a_claim_races_an_append_whose_answer_may_be_lost_anywhere() -> None:
    """Two writers, every order, and one lost answer of the first at each of its creates: still one owner per slot."""
    n = 0
    for lost in range(2):
        for choices in every_walk():
            inner = MemoryStore()
            actors = [Actor(f"w{i}", inner, claim_and_append(f"w{i}"), CREATES) for i in range(2)]
            creates = 0
            while running := [actor for actor in actors if not actor.done]:
                actor = running[choices.choose(len(running))]
                is_create = actor is actors[0] and actor.at is not None and actor.at[0] == "put_new"
                actor.step(Fate.LOSE if is_create and creates == lost else Fate.GO)
                creates += is_create
            check_race(inner, actors)
            n += 1
    assert n > 40, n


def test_real_threads_on_one_store_have_one_winner_per_slot() -> None:
    store = MemoryStore()
    told: list[tuple[int, str]] = []
    lock = threading.Lock()
    barrier = threading.Barrier(6)

    def work(name: str) -> None:
        barrier.wait()
        for round_ in range(5):
            one = claimed(store, f"{name}.{round_}")
            got = [(one.tail, f"{name}.{round_}")]
            with contextlib.suppress(Fenced):
                for _ in range(3):
                    got.append((one.append("snapshot", {}).seq, f"{name}.{round_}"))
            with lock:
                told.extend(got)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots = all_slots(store)
    assert sorted(told) == [(slot.seq, slot.owner) for slot in slots]
