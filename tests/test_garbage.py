"""recovery.garbage: what a restore finds to delete, and what it must leave alone."""

from __future__ import annotations

import json

import pytest

from recovery import garbage, layout, log
from recovery.errors import (
    CredentialsRefused,
    Damaged,
    DigestMismatch,
)
from recovery.protocol import Verdict
from recovery.restore import compatibility_record
from recovery.snapshots import put_object
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore, RaiseBefore
from tests.fake_engine import MUST, Life, Prompt, reference_answers
from tests.fakes import SeededEntropy
from tests.lives import damage_flip, ids, objects_of, own_objects, worked


def test_n1_foreign_and_unfinished_names_are_neither_adopted_nor_deleted() -> None:
    """C10: what a crashed writer left under another name is not taken for a segment."""
    store = MemoryStore()
    life = worked(store)
    (item, *_) = store.list("seg/")
    foreign = [
        f"{item.key}.backup",
        "seg/e000001/lost-found/readme",
        "seg/e000001/w0.00000000/00000099-0000.tmp",
        "ledger/e000001/copy-of-ledger.arrow",
        "state/e000001/.ds_store",
        "gc/notes.txt",
        "readme.txt",
    ]
    for key in foreign:
        store.put_new(key, b"mine")
    for number in range(2, 8):
        again = Life(store, number, keep_latest_k=1)
        again.keeps(life.flushed)
        again.snapshot()
    assert [store.get(key) for key in foreign] == [b"mine"] * len(foreign)
    assert again.run_to_end() == reference_answers()


def test_an_id_whose_objects_are_about_to_be_deleted_is_refused() -> None:
    """Their deletion is decided; whoever decided it may be asleep, and delete them under us."""
    store = MemoryStore()
    life = Life(store, 1, keep_latest_k=1)
    life.dispatch()
    life.decode(3)
    life.snapshot()
    first = ids(life)[-1]
    life.fleet._states = {"job": compatibility_record(MUST, {"changed": 1})}
    life.snapshot()
    named = {key for item in store.list("gc/") for key in json.loads(store.get(item.key))}
    doomed = named & set(objects_of(store, first))
    assert doomed and all(store.get(key) for key in doomed), "named, and still there"
    with pytest.raises(Damaged, match="were about to be deleted by a later garbage collection"):
        Life(store, 2, choice=first)


def test_garbage_that_may_not_be_deleted_does_not_stop_a_restore() -> None:
    store = MemoryStore()
    worked(store)
    refused = RaiseBefore(CredentialsRefused("no deleting"))
    forbidding = FaultyStore(store, lambda verb, key: refused if verb in ("delete", "put") else PASS)
    again = Life(forbidding, 2)
    assert isinstance(again.restored.uncollected, CredentialsRefused)
    assert again.run_to_end() == reference_answers()


def named(store: MemoryStore) -> set[str]:
    """Keys on the lists of garbage that are there."""
    return {key for item in store.list("gc/") for key in json.loads(store.get(item.key))}


@pytest.mark.parametrize("what", ["ledger", "slot"])
def test_while_a_kept_snapshot_cannot_be_read_nothing_is_named(what: str) -> None:
    """What it reaches is not known. The restore itself does not need it, and says nothing."""
    store = MemoryStore()
    life = worked(store, keep=3)
    life.snapshot()
    older = ids(life)[-2]
    alone = set(objects_of(store, older)) - set(objects_of(store, ids(life)[-1]))
    assert alone and not named(store)
    if what == "ledger":
        damage_flip(store, objects_of(store, older)[0])
    else:
        store.put(log.slot_key(older), b"?")
    again = Life(store, 2, keep_latest_k=3)
    assert again.restored.passed_over == [] and again.restored.uncollected is None
    assert not named(store)
    assert again.run_to_end() == reference_answers()


def test_after_a_fall_back_what_was_passed_over_is_left_alone() -> None:
    """Somebody may still want to look at it; a later restore that finds all in order clears it away."""
    store = MemoryStore()
    life = worked(store, keep=2)
    mine = own_objects(store, life)
    damage_flip(store, next(key for key in mine if key.startswith("seg/")))
    again = Life(store, 2, keep_latest_k=1)
    assert again.restored.passed_over and not named(store) & set(mine)
    third = Life(store, 3, keep_latest_k=1)
    assert third.restored.passed_over == [] and named(store) & set(mine)
    assert third.run_to_end() == reference_answers()


def test_an_unreadable_list_of_garbage_is_named_and_then_nothing_is_adopted() -> None:
    store = MemoryStore()
    life = worked(store, keep=1)
    life.fleet._states = {"job": compatibility_record(MUST, {"x": 1})}
    life.snapshot()  # the older state is garbage now
    life.decode(1)
    life.flush()
    newest = ids(life)[-1]
    lists = store.list("gc/")
    assert lists and store.list("log/")[-1].key == log.slot_key(newest + 1)
    store.put(lists[-1].key, b"[" + b" " * (lists[-1].nbytes - 1))
    with pytest.raises(DigestMismatch, match=lists[-1].key):
        Life(store, 9, choice="strict")
    again = Life(store, 2, keep_latest_k=1)
    assert [item.what for item in again.restored.passed_over] == [f"gc {newest + 1}"]
    assert again.restored.snapshot == newest and again.restored.adopted_segments == 0
    assert again.run_to_end() == reference_answers()


def test_a_list_of_garbage_must_name_objects_of_ours() -> None:
    store = MemoryStore()
    for data in (b"{}", b'["format.json"]', b'["seg/../x"]', b"[7]", b"[", b"\xff"):
        key = layout.garbage_key(1, SeededEntropy(data).hex(8))
        store.put_new(key, data)
        ref = put_object(store, layout.garbage_key(2, SeededEntropy(data).hex(8)), data)
        slot = log.Slot(
            seq=4, epoch=1, kind="gc", nonce="", prev="", owner="", utc=0.0, body={"victims": ref.as_json()}
        )
        with pytest.raises(Damaged, match="gc slot 4"):
            garbage.intended(store, slot)
        store.delete(ref.key)
        assert garbage.intended(store, slot) == set()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("progress", ["none", "flush", "snapshot"])
def test_c10_a_hundred_crashes_leave_bounded_objects(keep: int, progress: str) -> None:
    """A crash loop must not fill the disk, wherever in its life each process dies."""
    prompts = (Prompt("long", (4, 1, 3, 3), 400), Prompt("short", (9, 9), 3))
    store = MemoryStore()
    most = 0
    for number in range(1, 101):
        life = Life(store, number, prompts=prompts, keep_latest_k=keep)
        life.dispatch()
        if progress != "none":
            life.decode(1)
            life.flush()
        if progress == "snapshot":
            assert life.snapshot().verdict is Verdict.PUBLISHED
        life.close()
        others = [item for item in store.list("") if not item.key.startswith(("log/", "seg/"))]
        most = max(most, len(others))
    # A ledger has at most 65 objects, some more are not yet worth an intent; the log alone grows.
    assert most <= 66 + 16 + 12, most
    assert len(store.list("log/")) <= 5 * 100
    segments = len(store.list("seg/"))
    assert segments <= (0 if progress == "none" else 60), segments
