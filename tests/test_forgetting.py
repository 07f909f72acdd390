"""recovery.forgetting: what is forgotten is not restored, not built upon, not kept; nor what was flushed on top."""

from __future__ import annotations

import json

import pytest

from recovery import log
from recovery.errors import ConfigError, Damaged, Fenced, NothingPublished, RecoveryError
from recovery.forgetting import forget
from recovery.protocol import Verdict
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests.fake_engine import Life, content_of, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.lives import ids, objects_of, own_objects, worked
from tests.plain_codecs import PlainLedgers
from tests.test_pins import changing


def forgotten(store: object, *snapshots: int, seed: object = 0, leave_none: bool = False) -> int | None:
    slots = SlotLog(store, ManualClock(), SeededEntropy(("forget", seed)), "me")  # type: ignore[arg-type]
    slot = forget(store, PlainLedgers(), slots, snapshots, leave_none=leave_none)  # type: ignore[arg-type]
    return None if slot is None else slot.seq


def test_w10_an_older_snapshot_is_restored_and_newer_fragments_are_fenced_off() -> None:
    """Tokens of the forgotten snapshots are in no later one, though their segments are of the epoch that is adopted."""
    store = MemoryStore()
    life = worked(store, n_snapshots=4, keep=4)
    first, second, *rest = ids(life)[-4:]
    older = life.published[second]
    slot = forgotten(store, *rest)
    assert slot is not None
    again = Life(store, 2, choice="strict")
    assert again.restored.snapshot == second and again.chosen_content == older
    assert again.restored.adopted_segments == 0 and again.restored.passed_over == []
    assert content_of(again.publication.ledger) == older
    assert life.snapshot().verdict is Verdict.FENCED, "who built on what was forgotten publishes nothing more"
    assert again.run_to_end() == reference_answers()
    third = Life(store, 3)
    assert third.restored.snapshot == ids(again)[-1], "what came after the forgetting is considered as ever"
    for seq in rest:
        with pytest.raises(NothingPublished, match=f"snapshot {seq} was forgotten"):
            Life(store, 4, choice=seq)
    assert first < second


def test_what_is_forgotten_is_collected_and_what_is_kept_counts_without_it() -> None:
    store = MemoryStore()
    life = worked(store, n_snapshots=3, keep=3)
    kept, _, bad = ids(life)[-3:]
    mine = own_objects(store, life)
    older = set(objects_of(store, kept))
    forgotten(store, bad)
    for number in range(2, 5):
        again = Life(store, number, keep_latest_k=2)
        assert again.snapshot().error is None
    assert not set(mine) & set(store._objects)
    assert older <= set(store._objects) or again.restored.snapshot != kept
    assert again.run_to_end() == reference_answers()


def test_forgetting_again_writes_no_second_slot_and_what_cannot_be_forgotten_is_said() -> None:
    store = MemoryStore()
    life = worked(store, n_snapshots=3)
    one, two = ids(life)[-2:]
    assert forgotten(store, two) is not None
    assert forgotten(store, two) is None
    read = json.loads(store.get(log.slot_key(forgotten(store, one, two, leave_none=True) or 0)))
    assert read["kind"] == "forget" and read["body"] == {"snapshots": [one]}
    for number in (1, 999):
        with pytest.raises(ConfigError, match=f"there is no snapshot {number}"):
            forgotten(store, one, number)


def test_every_snapshot_forgotten_is_no_new_beginning_unasked() -> None:
    store = MemoryStore()
    life = worked(store, n_snapshots=2)
    before = dict(store._objects)
    with pytest.raises(ConfigError, match="no snapshot would be left"):
        forgotten(store, *ids(life))
    assert [key for key in store._objects if key not in before] == [log.slot_key(len(store.list("log/")))], "a claim"
    forgotten(store, *ids(life), leave_none=True)
    with pytest.raises(NothingPublished, match="every snapshot of this store was forgotten") as raised:
        Life(store, 2)
    assert "restore: never" in raised.value.hint
    assert Life(store, 3, choice="never").run_to_end() == reference_answers()


def test_what_garbage_collection_has_condemned_is_nothing_that_is_left() -> None:
    """Between the look and the claim the job goes on: the only other snapshot was condemned meanwhile."""
    store = MemoryStore()
    life = Life(store, 1, keep_latest_k=1)
    life.dispatch()
    for state in range(3):
        life.decode(1)
        changing(life, state)
        life.snapshot()
    with pytest.raises(ConfigError, match="no snapshot would be left"):
        forgotten(store, ids(life)[-1])
    again = Life(store, 2)
    assert again.restored.snapshot == ids(life)[-1] and again.run_to_end() == reference_answers()


def test_an_entry_that_cannot_be_read_is_named() -> None:
    store = MemoryStore()
    life = worked(store, n_snapshots=3)
    slot = forgotten(store, ids(life)[-1])
    assert slot is not None
    store.put(log.slot_key(slot), b"?")
    with pytest.raises(Damaged):
        Life(store, 2, choice="strict")
    again = Life(store, 3)
    assert [item.what for item in again.restored.passed_over][-1:] == [f"log slot {slot}"]


@pytest.mark.parametrize("snapshots", [[], [0], [True], [99], ["3"], None])
def test_a_malformed_entry_is_damage(snapshots: object) -> None:
    slot = log.Slot(seq=4, epoch=1, kind="forget", nonce="", prev="", owner="", utc=0.0, body={"snapshots": snapshots})
    if snapshots == []:
        assert log.forgotten_by(slot) == frozenset()
    else:
        with pytest.raises(Damaged, match="log slot 4"):
            log.forgotten_by(slot)


def test_c8_who_is_overtaken_forgets_nothing() -> None:
    store = MemoryStore()
    life = worked(store, n_snapshots=2)
    taken: list[Life] = []

    def take_over(verb: str, key: str) -> object:
        if verb == "put_new" and key.startswith("log/"):
            taken.append(Life(store, 2)) if taken == [1] else taken.append(1)  # type: ignore[arg-type]
        return PASS

    with pytest.raises(Fenced):
        forgotten(FaultyStore(store, take_over), ids(life)[-1])  # type: ignore[arg-type]
    assert Life(store, 3).run_to_end() == reference_answers()


def test_a_kill_at_every_store_call_of_a_forget() -> None:
    n = at = 0
    while True:
        at += 1
        for how in WAYS:
            store = MemoryStore()
            life = worked(store, n_snapshots=3, keep=3)
            before, bad = ids(life)[-2:]
            killing, done = KillingStore(store, at, how), False
            try:
                forgotten(killing, bad)
                done = True
            except (Killed, RecoveryError):
                n += 1
            if killing.n_calls < at:
                print(f"{n} kills over {at - 1} store calls of a forget")
                assert at > 5
                return
            again = Life(store, 2)
            kinds = [json.loads(store.get(item.key))["kind"] for item in store.list("log/")]
            assert again.restored.snapshot == (before if "forget" in kinds else bad)
            assert "forget" in kinds or not done
            if "forget" not in kinds:
                again.keeps(life.flushed)
            assert again.run_to_end() == reference_answers()
