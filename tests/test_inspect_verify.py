"""`verify` finds every fault, names the object, and takes nothing else for one (C3, C10, C11, W13, N1, F4).

Owns: faults in each kind of object, one at a time, and what is said of each.
Does not know: how findings are printed (test_inspect_screens.py).

Invariants:
1. Stores are damaged by their bytes alone, never through the core.
2. Where every byte can be tried, every byte is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.model import LedgerRow, Record, SegmentInfo
from recovery.ports import ObjectStore
from recovery.snapshots import check_root
from snapshot_inspect.findings import Problem
from snapshot_inspect.places import Place, ledger_codec, open_place, segment_codec
from snapshot_inspect.verify import Verification, verify
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.arrow_segments import ArrowSegmentCodec
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore, Wrapped
from tests import inspect_stores as stores


class Segments(ArrowSegmentCodec):
    """Remembers what it decoded: a sweep decodes the same sound bytes thousands of times."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[bytes, SegmentInfo | None], list[Record]] = {}

    def decode(self, data: bytes, info: SegmentInfo | None) -> list[Record]:
        if (data, info) not in self._known:
            self._known[data, info] = super().decode(data, info)
        return self._known[data, info]


class Ledgers(ArrowLedgerCodec):
    """The same for ledger objects."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, tuple[dict[str, Any], list[LedgerRow]]] = {}

    def decode(self, data: bytes) -> tuple[dict[str, Any], list[LedgerRow]]:
        if data not in self._known:
            self._known[data] = super().decode(data)
        header, rows = self._known[data]
        return dict(header), rows


SEGMENTS, LEDGERS = Segments(), Ledgers()


def verified(store: ObjectStore, *, read_data: bool = True, only: int | None = None) -> Verification:
    place = Place("store", store, check_root(store))
    return verify(place, SEGMENTS, LEDGERS, only=only, read_data=read_data)


def problems(found: Verification) -> list[Problem]:
    return [finding.problem for finding in found.findings]


def named(found: Verification) -> set[str]:
    return {problem.object for problem in problems(found)}


def statuses(found: Verification) -> dict[int, str]:
    return {status.id: status.status for status in found.snapshots}


def made(make: Callable[[ObjectStore], Any]) -> MemoryStore:
    store = MemoryStore()
    job = make(store)
    if job is not None:
        job.close()
    return store


@pytest.fixture
def several() -> MemoryStore:
    return made(stores.several)


def keys(store: ObjectStore, prefix: str) -> list[str]:
    return [item.key for item in store.list(prefix)]


# ---- nothing is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [stores.empty, stores.one_snapshot, stores.several, stores.crashed, stores.carried_on, stores.collected]
)
def test_what_the_core_writes_is_sound(make: Callable[[ObjectStore], Any]) -> None:
    store = made(make)
    for read_data in (False, True):
        found = verified(store, read_data=read_data)
        assert problems(found) == [] and found.exit_code == 0
        assert found.leftovers.foreign == []


def test_what_was_checked_is_counted(several: MemoryStore) -> None:
    tally = verified(several).tally
    assert (tally.slots, tally.snapshots, tally.ledger_objects, tally.states, tally.segments) == (5, 4, 4, 1, 3)
    assert (tally.requests, tally.chunks, tally.tokens) == (3, 6, 11)
    assert tally.nbytes == sum(item.nbytes for item in several.list("seg/"))
    structure = verified(several, read_data=False).tally
    assert (structure.segments, structure.chunks, structure.nbytes) == (3, 0, 0)


def test_each_object_is_read_once_and_structure_reads_no_segment(several: MemoryStore) -> None:
    counting = CountingStore(several)
    verified(counting, read_data=False)
    read = [call.key for call in counting.log if call.verb == "get" and call.key.startswith(("ledger/", "state/"))]
    assert len(read) == len(set(read)) == 5
    assert not any(call.verb == "get" and call.key.startswith("seg/") for call in counting.log)
    assert counting.count("put", "put_new", "delete") == 0


# ---- every byte ----------------------------------------------------------------------------------------------------


def small() -> MemoryStore:
    """A base, a delta with the only call, and a second life's adoption of them: every slot but one has a successor."""
    store = made(stores.one_snapshot)
    stores.Job(store, 2).close()
    return store


def test_a_flipped_bit_in_any_byte_of_any_referenced_object_is_found_and_named() -> None:
    store = small()
    objects = stores.objects_of(store)
    tail = keys(store, "log/")[-1]
    swept = 0
    for key, data in objects.items():
        if key in ("format.json", "hint", tail):
            continue
        for at in range(len(data)):
            store.delete(key)
            store.put_new(key, stores.flip(data, at))
            found = verified(store)
            assert key in named(found), f"byte {at} of {key}: {problems(found)}"
            assert found.exit_code != 0
        stores.replace(store, key, data)
        swept += len(data)
    assert swept > 10_000
    assert problems(verified(store)) == []


def test_flips_in_the_last_slot_never_confuse_and_only_text_for_people_goes_unnoticed() -> None:
    """No later slot names the last one: its owner, time, nonce and cause are known to nobody else."""
    store = made(stores.one_snapshot)
    tail = keys(store, "log/")[-1]
    data = store.get(tail)
    silent: set[str] = set()
    for at in range(len(data)):
        stores.replace(store, tail, stores.flip(data, at))
        found = verified(store)
        if not named(found):
            silent |= _changed_fields(data, store.get(tail))
    texts = {"owner", "utc", "nonce", "requires", "body.cause", "body.bytes_written", "body.restored_from"}
    assert silent <= texts | {"body.states"}, "a state's name is the participant's own"


def _changed_fields(before: bytes, after: bytes) -> set[str]:
    old, new = (_flat(json.loads(data)) for data in (before, after))
    return {name for name, value in old.items() if new.get(name) != value}


def _flat(entry: dict[str, Any]) -> dict[str, Any]:
    body = entry.pop("body")
    return {**entry, **{f"body.{name}": value for name, value in body.items()}}


def test_a_flipped_bit_in_a_list_of_garbage_is_found_and_named() -> None:
    store = made(stores.collected)
    (key, *_) = keys(store, "gc/")
    data = store.get(key)
    for at in range(len(data)):
        stores.replace(store, key, stores.flip(data, at))
        assert key in named(verified(store, read_data=False)), f"byte {at} of {key}"


def _referenced(store: ObjectStore) -> list[str]:
    return [key for key in keys(store, "") if key not in ("format.json", "hint")]


def test_every_missing_object_is_named(several: MemoryStore) -> None:
    """C3: one object is gone; also without reading data."""
    for key in _referenced(several)[:-1]:
        store = stores.copy_of(several)
        store.delete(key)
        if key == keys(several, "log/")[-1]:
            continue  # the log is shorter, and what it says is whole
        found = verified(store, read_data=False)
        assert key in named(found), key
        assert found.exit_code == 1


@pytest.mark.parametrize("keep", [0, 1, 50, -1])
def test_every_truncated_object_is_named(several: MemoryStore, keep: int) -> None:
    for key in _referenced(several):
        store = stores.copy_of(several)
        stores.replace(store, key, several.get(key)[:keep])
        found = verified(store, read_data=False)
        assert key in named(found), key


def test_a_longer_object_is_named(several: MemoryStore) -> None:
    for key in _referenced(several):
        if key.startswith("log/"):
            continue
        store = stores.copy_of(several)
        stores.replace(store, key, several.get(key) + b"\0")
        assert named(verified(store, read_data=False)) == {key}


# ---- whom it hurts -------------------------------------------------------------------------------------------------


def test_a_missing_segment_names_calls_token_ranges_and_snapshots(several: MemoryStore) -> None:
    """C3, W13: the segment of snapshot 4 is gone; what came before is sound."""
    key = keys(several, "seg/")[1]
    several.delete(key)
    found = verified(several)
    (finding,) = found.findings
    assert finding.problem.object == key and finding.problem.kind == "missing"
    assert [(a.rollout, a.start, a.stop) for a in finding.problem.affected] == [("p-1", 3, 6), ("p-2", 2, 4)]
    assert finding.snapshots == [4, 5]
    assert statuses(found) == {2: "sound", 3: "sound", 4: "damaged", 5: "damaged"}
    assert found.restore_from == 3


def test_a_segment_with_requests_names_them(several: MemoryStore) -> None:
    several.delete(keys(several, "seg/")[2])
    (finding,) = verified(several).findings
    assert [(a.rollout, a.start) for a in finding.problem.affected] == [("p-1", 6), ("p-10", None)]
    assert finding.snapshots == [5]


def test_a_damaged_delta_leaves_the_snapshots_below_it_sound(several: MemoryStore) -> None:
    body = json.loads(several.get("log/000000000004.json"))["body"]
    key = body["ledger"]["key"]
    stores.replace(several, key, stores.flip(several.get(key), 1000))
    found = verified(several)
    assert statuses(found) == {2: "sound", 3: "sound", 4: "damaged", 5: "damaged"}
    (finding,) = found.findings
    assert finding.problem.object == key and finding.snapshots == [4, 5]


def test_one_snapshot_alone(several: MemoryStore) -> None:
    several.delete(keys(several, "seg/")[2])
    assert problems(verified(several, only=4)) == []
    assert statuses(verified(several, only=4)) == {4: "sound"}
    assert statuses(verified(several, only=5)) == {5: "damaged"}


class Swapped(Wrapped):
    """A store that gives other bytes for one key: sound ones, that belong somewhere else."""

    def __init__(self, inner: ObjectStore, key: str, data: bytes) -> None:
        super().__init__(inner)
        self._swap = (key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._swap[1][start:end] if key == self._swap[0] else self.inner.get(key, start, end)


def test_records_that_are_sound_but_not_the_right_ones_are_found(several: MemoryStore) -> None:
    """A ledger whose references were mixed up has right sums everywhere; only reading the data shows it."""
    one, other = keys(several, "seg/")[:2]
    entry = json.loads(several.get("log/000000000003.json"))
    head = entry["body"]["ledger"]
    codec = ArrowLedgerCodec()
    header, rows = codec.decode(several.get(head["key"]))
    described = header["segments"][0]
    told = segment_codec().describe(other, several.get(other))
    described |= {"nbytes": told.nbytes, "crc32c": told.crc32c}
    described["batches"] = [[b.offset, b.length, b.crc32c, b.n_records] for b in told.batches]
    data = codec.encode(header, rows)
    entry["body"]["ledger"] = {"key": head["key"], "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    nbytes = told.nbytes
    entry["body"]["counts"]["nbytes"] = nbytes
    store = stores.copy_of(several)
    for key in [k for k in keys(store, "log/") if k > "log/000000000003.json"]:
        store.delete(key)
    store.delete("hint")
    stores.replace(store, head["key"], data)
    stores.replace(store, "log/000000000003.json", json.dumps(entry).encode())
    stores.replace(store, one, several.get(other))
    assert problems(verified(store, read_data=False)) == []
    found = verified(store)
    assert named(found) == {one}
    messages = " ".join(problem.message for problem in problems(found))
    assert "is not the request of call" in messages and "is not tokens 0 to 3 of call" in messages


def test_a_log_entry_that_contradicts_its_ledger_is_named(several: MemoryStore) -> None:
    tail = "log/000000000005.json"
    entry = json.loads(several.get(tail))
    entry["body"]["counts"]["calls"] = 4
    entry["body"]["depth"] = 1
    stores.replace(several, tail, json.dumps(entry).encode())
    found = verified(several)
    assert {problem.kind for problem in problems(found)} == {"inconsistent"} and named(found) == {tail}
    assert len(found.findings) == 2 and all(finding.snapshots == [5] for finding in found.findings)


def test_a_fingerprint_that_is_not_that_of_the_job_is_named(several: MemoryStore) -> None:
    tail = "log/000000000005.json"
    entry = json.loads(several.get(tail))
    entry["body"]["fingerprint"] = "0" * 32
    stores.replace(several, tail, json.dumps(entry).encode())
    assert named(verified(several)) == {tail}


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
    assert "took ledger/" in reasons and "took seg/" in reasons, "the store holds both kinds"
    assert gone == [id_ for id_ in statuses(found) if id_ <= 31] and found.restore_from == 43
    for kind in ("ledger/", "seg/"):
        copy = stores.copy_of(store)
        key = _needed_by_the_newest(copy, kind)
        copy.delete(key)
        found = verified(copy)
        assert named(found) == {key} and statuses(found)[43] == "damaged"
        assert [id_ for id_, status in statuses(found).items() if status == "collected"] == gone


def _needed_by_the_newest(store: ObjectStore, kind: str) -> str:
    if kind == "seg/":
        return keys(store, kind)[-1]
    return str(json.loads(store.get("log/000000000043.json"))["body"]["ledger"]["key"])


def test_a_list_that_names_what_the_newest_snapshot_needs_is_a_fault() -> None:
    """A job that collects too much: nothing is missing yet, and it is said."""
    store = made(stores.collected)
    slot = json.loads(store.get("log/000000000044.json"))
    victims = slot["body"]["victims"]
    key = _needed_by_the_newest(store, "seg/")
    data = json.dumps([*json.loads(store.get(victims["key"])), key]).encode()
    slot["body"]["victims"] = {
        "key": victims["key"],
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    stores.replace(store, victims["key"], data)
    stores.replace(store, "log/000000000044.json", json.dumps(slot).encode())
    found = verified(store)
    assert named(found) == {key} and statuses(found)[43] == "damaged"
    assert "named for deletion although snapshot 43 was not replaced" in problems(found)[0].message


def test_a_list_of_garbage_that_is_missing_without_right_is_named() -> None:
    store = made(stores.collected)
    lists = {key: set(json.loads(store.get(key))) for key in keys(store, "gc/")}
    assert len(lists) == 3
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
    call = job.calls["p-2"]
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


def _mangled(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The newest snapshot's entry with each reference mangled in every way that JSON has."""
    body = entry["body"]
    values: tuple[Any, ...] = (None, [], {}, "", "..", "A/../b", -1, 1e999, True, 1 << 70, "x" * 2000)
    for value in values:
        yield {**entry, "body": {**body, "ledger": value}}
        yield {**entry, "body": {**body, "states": {"job": value}}}
        for name in ("key", "nbytes", "sha256"):
            yield {**entry, "body": {**body, "ledger": {**body["ledger"], name: value}}}
        yield {**entry, "body": {**body, "states": value}} if value != {} else {**entry, "body": {}}


def test_mangled_references_are_findings_whatever_they_are(several: MemoryStore) -> None:
    tail = "log/000000000005.json"
    entry = json.loads(several.get(tail))
    for mangled in _mangled(entry):
        stores.replace(several, tail, json.dumps(mangled).encode())
        found = verified(several)
        assert found.exit_code == 1, mangled["body"]
        assert found.restore_from == 4


def test_the_real_codecs_find_the_same(several: MemoryStore) -> None:
    """The sweep uses codecs that remember; these do not."""
    key = keys(several, "seg/")[0]
    stores.replace(several, key, stores.flip(several.get(key), 700))
    place = Place("store", several, check_root(several))
    found = verify(place, segment_codec(), ledger_codec(), read_data=True)
    assert named(found) == {key} == named(verified(several))
