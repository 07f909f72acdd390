"""`verify` finds every fault in what snapshots need, names the object, and says whom it hurts (C3, W13).

Owns: faults in each kind of object, one at a time, and what is said of each.
Does not know: the log, garbage collection and what else lies in a store (test_inspect_around.py), how findings are
printed (test_inspect_screens.py).

Invariants:
1. Stores are damaged by their bytes alone, never through the core.
2. Where every byte can be tried, every byte is tried.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.ledger_columns import LedgerRows, Names
from recovery.model import Record, SegmentInfo
from recovery.ports import ObjectStore
from recovery.snapshots import check_root
from snapshot_inspect.findings import Problem
from snapshot_inspect.places import Place, ledger_codec, segment_codec
from snapshot_inspect.verify import Verification, verify
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore, Wrapped
from tests import inspect_stores as stores
from tests.inspect_stores import keys, made


class Segments(MixedSegmentCodec):
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
        self._known: dict[bytes, tuple[dict[str, Any], LedgerRows]] = {}
        self._names = Names()

    def decode(self, data: bytes, names: Names) -> tuple[dict[str, Any], LedgerRows]:
        if data not in self._known:
            own = Names(self._names)
            own.calls = {}  # stores have versions in common, not calls
            self._known[data] = super().decode(data, own)
        header, rows = self._known[data]
        names.versions, names._version_numbers = self._names.versions, self._names._version_numbers
        rows = replace(rows, names=names)
        rows.bind()
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


@pytest.fixture
def several() -> MemoryStore:
    return made(stores.several)


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


def small(codec: CodecName = "arrow") -> MemoryStore:
    """A base, a delta with the only call, and a second life's adoption of them: every slot but one has a successor."""
    store = MemoryStore()
    stores.one_snapshot(store, codec).close()
    stores.Job(store, 2, codec=codec).close()
    return store


class OneFromDisk(Wrapped):
    """A store in memory of which one object is read from disk: opening all of them for every byte takes minutes."""

    def __init__(self, memory: MemoryStore, disk: LocalStore, key: str) -> None:
        super().__init__(memory)
        self._disk, self._key = disk, key

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return (self._disk if key == self._key else self.inner).get(key, start, end)


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_a_flipped_bit_in_any_byte_of_any_referenced_object_is_found_and_named(
    codec: CodecName, quick_path: Path
) -> None:
    """On disk; of a segment also which call and which of its tokens it hurts."""
    memory = small(codec)
    objects = stores.objects_of(memory)
    disk = stores.on_disk(quick_path / "store", objects)
    tail = keys(memory, "log/")[-1]
    swept = 0
    for key, data in objects.items():
        segment = key.startswith("seg/")
        if key in ("format.json", "hint", tail) or (codec == "zarr" and not segment):
            continue  # all but segments is swept once
        store = OneFromDisk(memory, disk, key)
        with open(Path(disk.root, key), "r+b", buffering=0) as file:
            for at in range(len(data)):
                os.pwrite(file.fileno(), stores.flip(data, at)[at : at + 1], at)
                found = verified(store)
                assert key in named(found) and found.exit_code != 0, f"byte {at} of {key}: {problems(found)}"
                assert not segment or hurt(found) == [("p-1", None, None), ("p-1", 0, 3)], f"byte {at} of {key}"
                os.pwrite(file.fileno(), data[at : at + 1], at)
        swept += len(data)
    assert swept > 5_000
    assert problems(verified(disk)) == []


def hurt(found: Verification) -> list[tuple[str, int | None, int | None]]:
    """Rollouts and token ranges that the findings name."""
    return [(a.rollout, a.start, a.stop) for problem in problems(found) for a in problem.affected]


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_every_truncated_and_missing_segment_names_call_and_tokens(codec: CodecName, quick_path: Path) -> None:
    """C3: at every length, on disk."""
    store = stores.on_disk(quick_path / "store", stores.objects_of(small(codec)))
    (key,) = keys(store, "seg/")
    path, data = Path(store.root, key), store.get(key)
    for nbytes in (None, *range(0, len(data), 17), len(data) - 1):
        path.unlink()
        if nbytes is not None:
            path.write_bytes(data[:nbytes])
        found = verified(store)
        assert named(found) == {key} and hurt(found) == [("p-1", None, None), ("p-1", 0, 3)], nbytes
        path.write_bytes(data)


def test_a_batch_that_is_not_the_one_the_ledger_states_names_call_and_tokens(several: MemoryStore) -> None:
    """The sums of the object are right, that of one batch in the ledger is not: a ranged read would fail."""
    entry = json.loads(several.get("log/000000000005.json"))
    head = entry["body"]["ledger"]
    codec = ArrowLedgerCodec()
    header, rows = codec.decode(several.get(head["key"]), Names())
    header["segments"][0]["batches"][0][2] ^= 1
    data = codec.encode(header, rows)
    entry["body"]["ledger"] = {"key": head["key"], "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stores.replace(several, head["key"], data)
    stores.replace(several, "log/000000000005.json", json.dumps(entry).encode())
    found = verified(several)
    assert named(found) == {keys(several, "seg/")[2]}
    assert hurt(found) == [("p-1", 6, 7), ("p-10", None, None)]


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
    names = {"body.states", "body.flushed"}  # a state's name is the participant's own; `flushed` may be absent
    assert silent <= texts | names


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


def test_a_damaged_ledger_object_hurts_exactly_the_snapshots_that_count_it() -> None:
    store = made(stores.chained)
    assert set(statuses(verified(store, read_data=False)).values()) == {"sound"}
    entries = {id_: json.loads(store.get(f"log/{id_:012d}.json"))["body"] for id_ in range(3, 15)}
    assert max(body["depth"] for body in entries.values()) > 4
    for damaged, body in entries.items():
        copy, key = stores.copy_of(store), body["ledger"]["key"]
        stores.replace(copy, key, stores.flip(copy.get(key), 1000))
        found = verified(copy, read_data=False)
        hit = [id_ for id_, other in entries.items() if 0 <= id_ - damaged <= other["depth"]]
        assert [id_ for id_, status in statuses(found).items() if status == "damaged"] == hit
        (finding,) = found.findings
        assert finding.problem.object == key and finding.snapshots == hit


def test_a_ledger_object_that_counts_too_few_before_it_is_named() -> None:
    """Merging would succeed without the call that is said nowhere else any more: only a longer replay shows it."""
    store = made(stores.chained)
    tail = keys(store, "log/")[-1]
    entry = json.loads(store.get(tail))
    header, rows = ArrowLedgerCodec().decode(store.get(entry["body"]["ledger"]["key"]), Names())
    header["depth"] = entry["body"]["depth"] = header["depth"] - 1
    data = ArrowLedgerCodec().encode(header, rows)
    entry["body"]["ledger"] |= {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stores.replace(store, entry["body"]["ledger"]["key"], data)
    stores.replace(store, tail, json.dumps(entry).encode())
    found = verified(store, read_data=False)
    assert statuses(found)[14] == "damaged"
    assert any("needs" in problem.message for problem in problems(found))


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
    header, rows = codec.decode(several.get(head["key"]), Names())
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
