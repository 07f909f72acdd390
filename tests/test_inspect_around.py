"""What `verify` says about the log, newer formats, garbage collection and what else lies in a store.

Owns: what is damage there and what is not (C10, C11, N1, F4).
Does not know: faults in what snapshots need (test_inspect_verify.py).

Invariants:
1. Stores are damaged by their bytes alone, never through the core.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.ports import ObjectStore
from snapshot_inspect.places import open_place
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import Wrapped
from tests import inspect_stores as stores
from tests.inspect_stores import keys, made
from tests.test_inspect_verify import named, problems, statuses, verified


@pytest.fixture
def several() -> MemoryStore:
    return made(stores.several)


# ---- the log -------------------------------------------------------------------------------------------------------


def test_a_gap_in_the_log_names_the_slot_and_the_remedy(several: MemoryStore) -> None:
    """C11."""
    for hint in (None, 2, 5):
        store = stores.copy_of(several)
        store.delete("hint")
        if hint is not None:
            store.put("hint", json.dumps({"tail": hint}).encode())
        store.delete("log/000000000003.json")
        (problem,) = problems(verified(store))
        assert problem.object == "log/000000000003.json" and problem.kind == "missing"
        assert "log slot 3 (log/000000000003.json) is missing" in problem.message
        assert "put it back from a copy of the store" in problem.hint


def test_a_wide_gap_is_one_finding_and_costs_no_walk(several: MemoryStore) -> None:
    several.put_new("log/900000000000.json", several.get("log/000000000005.json"))
    found = verified(several)
    messages = [problem.message for problem in problems(found)]
    assert "log slots 6 to 899999999999 are missing" in messages[0]
    assert len(messages) == 2 and "says that it is slot 5" in messages[1]


@pytest.mark.parametrize(
    ("hint", "state", "says"),
    [
        (None, "absent", ""),
        (b'{"tail": 5}', "current", ""),
        (b'{"tail": 2}', "behind", ""),
        (b'{"tail": 99}', "dangling", "hint points to slot 99, which does not exist"),
        (b'{"tail": 123456789012345678901234567890}', "dangling", "which does not exist"),
        (b'{"tail": 1e999}', "garbage", "hint is not what a coordinator writes"),
        (b'{"tail": true}', "garbage", "hint is not what a coordinator writes"),
        (b"\xff\xfe", "garbage", "hint is not what a coordinator writes"),
        (b"[" * 4096, "garbage", "hint is not what a coordinator writes"),
        (b"", "garbage", "hint is not what a coordinator writes"),
        (b"[5]", "garbage", "hint is not what a coordinator writes"),
    ],
)
def test_the_hint_is_advice(several: MemoryStore, hint: bytes | None, state: str, says: str) -> None:
    """C11: whatever it says, the answer is the same and nothing is wrong."""
    several.delete("hint")
    if hint is not None:
        several.put("hint", hint)
    found = verified(several)
    assert found.exit_code == 0 and found.restore_from == 5
    assert found.position.hint.state == state and says in found.position.hint.note
    assert bool(says) == ("the next snapshot writes it anew" in found.position.hint.note)


# ---- newer formats -------------------------------------------------------------------------------------------------


def test_a_ledger_of_a_newer_format_is_not_damage(several: MemoryStore) -> None:
    """F4."""
    store = stores.with_newer_ledger(several)
    found = verified(store)
    assert statuses(found)[5] == "not_understood" and statuses(found)[4] == "sound"
    assert found.exit_code == 13
    (problem,) = problems(found)
    assert "version 2" in problem.message and "version 1" in problem.message


def test_a_slot_that_requires_something_unknown_is_not_damage(several: MemoryStore) -> None:
    """F4: refused by name; unknown optional fields are ignored."""
    tail = "log/000000000005.json"
    entry = json.loads(several.get(tail))
    stores.replace(several, tail, json.dumps({**entry, "colour": "red"}).encode())
    assert problems(verified(several)) == []
    stores.replace(several, tail, json.dumps({**entry, "requires": ["sharded-log"]}).encode())
    found = verified(several)
    assert found.exit_code == 13 and "sharded-log" in problems(found)[0].message


# ---- garbage collection --------------------------------------------------------------------------------------------


def test_what_garbage_collection_took_is_no_damage_and_what_others_took_is() -> None:
    store = made(stores.collected)
    found = verified(store)
    gone = [status.id for status in found.snapshots if status.status == "collected"]
    reasons = " ".join(status.reason for status in found.snapshots)
    listed = {key.partition("/")[0] for item in keys(store, "gc/") for key in json.loads(store.get(item))}
    assert "took ledger/" in reasons and {"ledger", "seg"} <= listed, "the store holds both kinds"
    assert gone == [id_ for id_ in statuses(found) if id_ <= 28] and found.restore_from == 30
    for kind in ("ledger/", "seg/"):
        copy = stores.copy_of(store)
        key = _needed_by_the_newest(copy, kind)
        copy.delete(key)
        found = verified(copy)
        assert named(found) == {key} and statuses(found)[30] == "damaged"
        assert [id_ for id_, status in statuses(found).items() if status == "collected"] == gone


def _needed_by_the_newest(store: ObjectStore, kind: str) -> str:
    if kind == "seg/":
        return keys(store, kind)[-1]
    return str(json.loads(store.get("log/000000000030.json"))["body"]["ledger"]["key"])


def test_a_list_that_names_what_the_newest_snapshot_needs_is_a_fault() -> None:
    """A job that collects too much: nothing is missing yet, and it is said."""
    store = made(stores.collected)
    slot = json.loads(store.get("log/000000000031.json"))
    victims = slot["body"]["victims"]
    key = _needed_by_the_newest(store, "seg/")
    data = json.dumps([*json.loads(store.get(victims["key"])), key]).encode()
    slot["body"]["victims"] = {
        "key": victims["key"],
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    stores.replace(store, victims["key"], data)
    stores.replace(store, "log/000000000031.json", json.dumps(slot).encode())
    found = verified(store)
    assert named(found) == {key} and statuses(found)[30] == "damaged"
    assert "named for deletion although snapshot 30 was not replaced" in problems(found)[0].message


def test_a_list_of_garbage_that_is_missing_without_right_is_named() -> None:
    store = made(stores.collected)
    lists = {key: set(json.loads(store.get(key))) for key in keys(store, "gc/")}
    assert lists
    for key in lists:
        copy = stores.copy_of(store)
        copy.delete(key)
        garbage = set().union(*(names for other, names in lists.items() if other != key))
        assert named(verified(copy)) == (set() if key in garbage else {key})


class DeletesOnFirstRead(Wrapped):
    """While the inspector reads, a job publishes on and collects garbage."""

    def __init__(self, inner: ObjectStore, prefix: str, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self._meanwhile: Callable[[], None] | None = meanwhile

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        meanwhile = self._meanwhile
        if meanwhile is not None and key.startswith(self._prefix):
            self._meanwhile = None
            meanwhile()
        return self.inner.get(key, start, end)


@pytest.mark.parametrize("prefix", ["ledger/", "seg/"])
def test_a_job_that_goes_on_meanwhile_is_no_damage(prefix: str) -> None:
    store = MemoryStore()
    job = stores.collected(store)
    call = job.calls["p-5"]
    sound = [id_ for id_, status in statuses(verified(store)).items() if status == "sound"]

    def meanwhile() -> None:
        nonlocal call
        for turn in range(40):
            stores.say(call, 3)
            job.snapshot()
            if turn == 9:
                job.publication.ledger.drop(call.call_id)
                call = job.open("p-9")

    found = verified(DeletesOnFirstRead(store, prefix, meanwhile))
    job.close()
    assert problems(found) == []
    assert {statuses(found)[id_] for id_ in sound} == {"collected"}, "all of it was collected meanwhile"


# ---- what else lies there ------------------------------------------------------------------------------------------


def test_what_a_restore_would_adopt_is_listed_and_is_what_a_restore_adopts() -> None:
    store = made(stores.crashed)
    adoption = verified(store).leftovers.adoption
    assert adoption.segments == keys(store, "seg/")[3:] and adoption.tokens == 3
    restored = stores.Job(store, 2, keep=8)
    restored.close()
    assert restored.restored.adopted_segments == len(adoption.segments)
    assert restored.restored.adopted_tokens == adoption.tokens


def test_an_adoptable_segment_that_is_damaged_is_said_but_is_no_problem() -> None:
    store = made(stores.crashed)
    key = keys(store, "seg/")[3]
    stores.replace(store, key, stores.flip(store.get(key), 99))
    found = verified(store)
    assert found.exit_code == 0
    assert [key_ for key_, _ in found.leftovers.adoption.unreadable] == [key]
    assert [item.key for item in found.leftovers.unreferenced if "cannot adopt" in item.why] == [key]


FOREIGN = (
    "notes.txt",
    "snap-3.backup",
    "seg/e000001/w0.8637aaa6/00000001-9ea358a4.arrow.tmp",
    "log/latest",
    "seg/readme",
)


def test_foreign_files_are_listed_and_change_nothing(several: MemoryStore, tmp_path: Path) -> None:
    """C10, N1: on disk also names that no key can have, links, and what crashed writers left."""
    for key in FOREIGN:
        several.put_new(key, b"?")
    assert sorted(verified(several).leftovers.foreign) == sorted(FOREIGN)
    root = tmp_path / "store"
    disk = stores.on_disk(root, stores.objects_of(several))
    (root / "log" / "snap-x (copy)").write_bytes(b"?")
    (root / ".DS_Store").write_bytes(b"?")
    (root / "lost+found").mkdir()
    (root / "lost+found" / "#17").write_bytes(b"?")
    os.symlink("nowhere", root / "step_latest")
    (root / ".tmp").mkdir(exist_ok=True)
    (root / ".tmp" / "00000003-9ea358a4").write_bytes(b"half")
    found = verified(disk)
    more = ("log/snap-x (copy)", ".DS_Store", "lost+found/#17", "step_latest")
    assert sorted(found.leftovers.foreign) == sorted((*FOREIGN, *more))
    assert found.leftovers.unfinished == 1
    assert found.exit_code == 0 and statuses(found) == {2: "sound", 3: "sound", 4: "sound", 5: "sound"}


def test_an_object_that_no_snapshot_needs_is_listed(several: MemoryStore) -> None:
    several.put_new("ledger/e000001/00000000000000aa.arrow", b"?")
    (item,) = verified(several).leftovers.unreferenced
    assert item.key == "ledger/e000001/00000000000000aa.arrow" and "a later run collects it" in item.why


def test_a_folder_in_the_place_of_a_segment_is_a_finding(several: MemoryStore, tmp_path: Path) -> None:
    disk = stores.on_disk(tmp_path / "store", stores.objects_of(several))
    key = keys(several, "seg/")[1]
    (tmp_path / "store" / key).unlink()
    (tmp_path / "store" / key).mkdir()
    assert named(verified(disk)) == {key}
    state = keys(several, "state/")[0]
    (tmp_path / "store" / state).unlink()
    os.symlink("/dev/zero", tmp_path / "store" / state)
    assert state in named(verified(open_place(str(tmp_path / "store")).store))
