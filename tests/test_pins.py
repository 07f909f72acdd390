"""recovery.pins: a pin beside a running job comes in time or is refused; then nothing of it is ever collected."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

from recovery import garbage, layout, log, pins
from recovery.errors import ConfigError, Damaged, NothingPublished, OutcomeUnknown, StoreUnavailable
from recovery.forgetting import forget
from recovery.log_reading import read_slot
from recovery.ports import ObjectStore
from recovery.restore import compatibility_record
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore, RaiseAfter, RaiseBefore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests.fake_engine import MUST, Life, Prompt, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.interleavings import Actor, every_walk
from tests.lives import damage_flip, damage_missing, ids, objects_of
from tests.plain_codecs import PlainLedgers


def reached(store: ObjectStore, seq: int) -> set[str]:
    read = read_slot(store, seq)
    assert read is not None
    return garbage.reached_by(store, PlainLedgers(), Snapshot.from_slot(read.slot))


def pin(store: ObjectStore, seq: int, seed: object = 0, keys: Collection[str] = ()) -> int:
    """Pin it, as the command does, after it has read what the snapshot reaches. Returns the number of the slot."""
    wanted = keys or reached(store, seq)
    return pins.pin(store, ManualClock(), SeededEntropy(("pin", seed)), "me", seq, wanted)[1].seq


def changing(life: Life, state: int) -> None:
    """The next snapshot has a state that no other has."""
    life.fleet._states = {"job": compatibility_record(MUST, {"state": state})}


def named(store: MemoryStore) -> set[str]:
    """What every gc slot ever named, as far as its list is still there."""
    found: set[str] = set()
    for item in store.list("log/"):
        slot = json.loads(store.get(item.key))
        if slot["kind"] == "gc" and slot["body"]["victims"]["key"] in store._objects:
            found |= set(json.loads(store.get(slot["body"]["victims"]["key"])))
    return found


def test_c7_a_pinned_snapshot_is_restored_by_its_id_after_hundreds_of_others() -> None:
    """With processes that come and go in between, each with its own garbage collection; unpinned, it is collected."""
    prompts = (Prompt("long", (4, 1, 3, 3), 900), Prompt("short", (9, 9), 3))
    store = MemoryStore()
    life = Life(store, 1, prompts=prompts, keep_latest_k=1)
    life.dispatch()
    life.decode(4)
    life.snapshot()
    pinned = ids(life)[-1]
    content = life.published[pinned]
    pin(store, pinned)
    for number in range(2, 8):
        for step in range(50):
            life.decode(1)
            changing(life, step)
            life.snapshot()
        life = Life(store, number, prompts=prompts, keep_latest_k=1)
        life.dispatch()
    assert len(store.list("log/")) > 500 and not named(store) & reached(store, pinned)
    copy = MemoryStore()
    copy._objects.update(store._objects)
    back = Life(copy, 100, prompts=prompts, choice=pinned)
    assert back.chosen_content == content and back.restored.snapshot == pinned
    assert back.run_to_end(50) == reference_answers(prompts)
    assert pins.unpin(store, pinned) and pins.unpin(store, pinned) == [] and pins.listed(store) == {}
    last = Life(store, 8, prompts=prompts, keep_latest_k=1)
    last.dispatch()
    last.decode(1)
    last.snapshot()
    with pytest.raises(Damaged):
        Life(store, 9, prompts=prompts, choice=pinned)


def test_every_order_of_a_pin_and_two_collections_is_in_time_or_too_late() -> None:
    """The first snapshot is pinned while the second, which is published, condemns it and the third deletes it."""
    outcomes: dict[str, int] = {"pinned": 0, "too late": 0}
    for choices in every_walk():
        store = MemoryStore()
        life = Life(store, 1, keep_latest_k=1)
        life.dispatch()
        life.decode(3)
        changing(life, 1)
        life.snapshot()
        first = ids(life)[-1]
        wanted = reached(store, first)
        changing(life, 2)
        collect, life.publication.collect = life.publication.collect, lambda go_on: 0  # type: ignore[method-assign]
        life.snapshot()
        life.publication.collect = collect  # type: ignore[method-assign]

        def collects(stepping: ObjectStore, life: Life = life) -> None:
            life.publication._store = life.log._store = life.publication._pinned._store = stepping
            life.publication.collect()
            changing(life, 3)
            life.snapshot()

        pins_it = partial(pin, seq=first, keys=wanted)
        actors = [
            Actor("collector", store, collects, frozenset({"put_new"})),
            Actor("pinner", store, pins_it, frozenset({"put_new", "list"})),
        ]
        while running := [actor for actor in actors if not actor.done]:
            running[choices.choose(len(running))].step()
        if isinstance(actors[1].error, NothingPublished):
            assert "it is too late to pin" in str(actors[1].error) and pins.listed(store) == {}
            outcomes["too late"] += 1
            continue
        assert actors[1].error is None and actors[0].error is None
        assert wanted <= set(store._objects) and not wanted & named(store)
        assert not [attempt for attempt in life.attempts if attempt.error]
        outcomes["pinned"] += 1
    print(outcomes)
    assert min(outcomes.values()) > 30


def test_a_slot_of_a_guest_is_followed_by_a_job_and_by_a_restore_in_the_middle() -> None:
    """What a restore did is noted under the number that it then publishes, also if a pin takes the one it expected."""
    store = MemoryStore()
    life = Life(store, 1)
    life.dispatch()
    life.decode(3)
    life.snapshot()
    seq = ids(life)[-1]
    assert pin(store, seq) == seq + 1
    life.decode(1)
    assert life.snapshot().snapshot == seq + 2
    done = []

    def meddle(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("ledger/") and not done:
            done.append(pin(store, seq + 2, "second"))
        return PASS

    again = Life(FaultyStore(store, meddle), 2)
    assert done and again.restored.published == done[0] + 1
    notes = {event.snapshot for entry in again.publication.ledger for event in entry.history}
    assert notes == {again.restored.published}
    third = Life(store, 3)
    notes = {entry.history[-1].snapshot for entry in third.publication.ledger if entry.history}
    assert notes == {third.restored.published}
    assert third.run_to_end() == reference_answers()


def test_c8_a_guest_is_not_fenced_and_fences_nobody() -> None:
    store = MemoryStore()
    life = Life(store, 1)
    life.dispatch()
    life.decode(3)
    life.snapshot()
    seq = ids(life)[-1]
    taken: list[Life] = []

    def take_over(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("log/") and not taken:
            taken.append(Life(store, 2))
        return PASS

    slot = pin(FaultyStore(store, take_over), seq)
    read = read_slot(store, slot)
    assert read is not None and read.slot.epoch == taken[0].log.epoch
    assert taken[0].snapshot().snapshot == slot + 1


def test_what_was_forgotten_is_not_pinned_and_what_is_pinned_is_not_forgotten() -> None:
    store = MemoryStore()
    life = Life(store, 1)
    life.dispatch()
    life.snapshot()
    life.decode(1)
    life.snapshot()
    first, second = ids(life)[-2:]
    forget(store, PlainLedgers(), SlotLog(store, ManualClock(), SeededEntropy(9), "me"), [second])
    with pytest.raises(NothingPublished, match=f"snapshot {second} was forgotten by slot"):
        pin(store, second)
    assert pins.listed(store) == {}
    pin(store, first)
    with pytest.raises(Exception, match=f"snapshot {first} is pinned"):
        forget(store, PlainLedgers(), SlotLog(store, ManualClock(), SeededEntropy(10), "me"), [first])


@pytest.mark.parametrize("damage", [damage_flip, damage_missing])
def test_a_pinned_snapshot_that_cannot_be_read_stops_collection_and_nothing_else(damage: Any) -> None:
    store = MemoryStore()
    life = Life(store, 1, keep_latest_k=1)
    life.dispatch()
    life.decode(2)
    life.publication.writer.head = None
    life.snapshot()
    seq = ids(life)[-1]
    pin(store, seq)
    alone = objects_of(store, seq)[0]
    life.publication.writer.head = None
    life.decode(1)
    life.snapshot()
    again = Life(store, 2, keep_latest_k=1)
    damage(store, alone)
    again.dispatch()
    again.publication._pinned._reached.clear()
    before = named(store)
    for state in (5, 6, 7):
        changing(again, state)
        attempt = again.snapshot()
        assert attempt.snapshot is not None
        assert attempt.step == "collect garbage" and f"pin --remove STORE {seq}" in str(attempt.error)
    assert named(store) == before
    pins.unpin(store, seq)
    changing(again, 8)
    assert again.snapshot().error is None and named(store) > before


def test_a_pin_of_what_is_no_snapshot_pins_nothing() -> None:
    store = MemoryStore()
    life = Life(store, 1, keep_latest_k=1)
    life.dispatch()
    for number in (1, 999):
        store.put_new(layout.pin_key(number, "0" * 16), b"{}")
    store.put_new("pin/notes.json", b"mine")
    for state in range(4):
        changing(life, state)
        assert life.snapshot().error is None
    assert named(store) and not {key for key in named(store) if key.startswith("pin/")}


def test_an_old_list_that_cannot_be_read_refuses_the_pin() -> None:
    store = MemoryStore()
    life = Life(store, 1, keep_latest_k=1)
    life.dispatch()
    for state in range(4):
        changing(life, state)
        life.snapshot()
    first, newest = ids(life)[1], store.list("gc/")[-1].key
    pins.pin(store, ManualClock(), SeededEntropy(0), "me", first, {"seg/none"})
    for key, value in ((newest, b"?"), (log.slot_key(first + 1), b"?")):
        before = store.get(key)
        store.put(key, value)
        with pytest.raises(Damaged) as raised:
            pins.pin(store, ManualClock(), SeededEntropy(1), "me", first, {"seg/none"})
        assert "it cannot be told whether" in str(raised.value) or newest in str(raised.value)
        assert len(pins.listed(store)[first]) == 1
        store.put(key, before)


@pytest.mark.parametrize("error", [StoreUnavailable("down"), OutcomeUnknown("?")])
@pytest.mark.parametrize("step", [RaiseBefore, RaiseAfter])
def test_a_pin_that_fails_anywhere_can_be_made_again(error: Exception, step: Callable[..., Any]) -> None:
    for k in range(12):
        store = MemoryStore()
        life = Life(store, 1, keep_latest_k=1)
        life.dispatch()
        life.snapshot()
        seq = ids(life)[-1]
        plan = iter([PASS] * k + [step(error)])
        try:
            pins.pin(
                FaultyStore(store, lambda verb, key, plan=plan: next(plan, PASS)),
                ManualClock(),
                SeededEntropy(k),
                "me",
                seq,
                reached(store, seq),
            )
        except type(error):
            pin(store, seq, "again")
        wanted = reached(store, seq)
        for state in range(3):
            changing(life, state)
            assert life.snapshot().snapshot is not None
        assert wanted <= set(store._objects)


def test_a_kill_at_every_store_call_of_a_pin() -> None:
    """Killed or not: what was acknowledged stays, what was not is at worst kept too long; the job goes on."""
    n = 0
    at = 0
    while True:
        at += 1
        for how in WAYS:
            store = MemoryStore()
            life = Life(store, 1, keep_latest_k=1)
            life.dispatch()
            life.decode(2)
            changing(life, 0)
            life.snapshot()
            seq = ids(life)[-1]
            killing, wanted = KillingStore(store, at, how), reached(store, seq)
            pinned = False
            try:
                pins.pin(killing, ManualClock(), SeededEntropy(at), "me", seq, wanted)
                pinned = True
            except (Killed, StoreUnavailable, OutcomeUnknown):
                n += 1
            if killing.n_calls < at:
                print(f"{n} kills over {at - 1} store calls of a pin")
                assert at > 7
                return
            for state in (1, 2, 3):
                changing(life, state)
                life.decode(1)
                assert life.snapshot().error is None
            if pinned or pins.listed(store):
                assert wanted <= set(store._objects)
            else:
                assert not wanted <= set(store._objects)
            again = Life(store, 2, keep_latest_k=1)
            assert again.run_to_end() == reference_answers()


def test_f7_beside_a_writer_that_relies_on_being_alone_nothing_is_written() -> None:
    store = MemoryStore()
    alone = SlotLog(store, ManualClock(), SeededEntropy(1), "alone", single_writer=True)
    alone.claim()
    with pytest.raises(ConfigError, match="single-writer mode"):
        pins.pin(store, ManualClock(), SeededEntropy(1), "me", 1, set())
    assert pins.listed(store) == {} and len(store.list("log/")) == 1


def test_f5_a_pin_is_known_from_the_log_where_a_listing_does_not_show_it() -> None:
    """Its slot was followed, or read back after a claim, or a garbage list says it; the last two by another process."""

    class Blind(FaultyStore):
        """Lists no pins."""

        def list(self, prefix: str, after: str = "") -> Any:
            return [item for item in self.inner.list(prefix, after) if not item.key.startswith("pin/")]

    store = MemoryStore()
    life = Life(Blind(store, []), 1, keep_latest_k=1)
    life.dispatch()
    changing(life, 0)
    life.snapshot()
    seq = ids(life)[-1]
    wanted = reached(store, seq)
    pin(store, seq)
    for number in range(2, 6):
        for state in range(3):
            changing(life, 10 * number + state)
            assert life.snapshot().error is None
        assert wanted <= set(store._objects) and not wanted & named(store)
        life = Life(Blind(store, []), number, keep_latest_k=1)
    kinds = [json.loads(store.get(item.key)) for item in store.list("log/")]
    assert [len(slot["body"]["pins"]) for slot in kinds if slot["kind"] == "gc"][1:] == [1] * (
        sum(slot["kind"] == "gc" for slot in kinds) - 1
    )
    pins.unpin(store, seq)
    for state in range(3):
        changing(life, state)
        assert life.snapshot().error is None
    assert not wanted <= set(store._objects)


def test_a_pin_that_was_removed_while_it_was_made_is_not_acknowledged() -> None:
    store = MemoryStore()
    life = Life(store, 1)
    life.dispatch()
    life.snapshot()
    seq = ids(life)[-1]

    def let_go(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("log/"):
            assert pins.unpin(store, seq)
        return PASS

    with pytest.raises(NothingPublished, match="its pins were removed while this one was made"):
        pin(FaultyStore(store, let_go), seq)
