"""recovery.snapshots: what is referenced is checked before it is parsed, and what is written stays bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood, NoStore, ObjectMissing
from recovery.log import Slot
from recovery.snapshots import (
    LedgerObject,
    ObjectRef,
    Snapshot,
    check_root,
    get_object,
    load,
    make_root,
    put_object,
    read_ledger_objects,
)
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore, ReadOnlyStore
from tests.fakes import SeededEntropy
from tests.growing_ledger import CODEC, Job, flat, many_objects

KEY = "ledger/e000001/0123456789abcdef.json"

# ---- format.json -----------------------------------------------------------------------------------------------


def test_a_root_is_made_once_and_then_checked() -> None:
    store = MemoryStore()
    with pytest.raises(NoStore) as caught:
        check_root(store)
    assert caught.value.exit_code == 10
    make_root(store, SeededEntropy("a"))
    mark = json.loads(store.get("format.json"))
    assert mark.keys() == {"format", "version", "requires", "writer", "store_id"} and len(mark["store_id"]) == 32
    make_root(store, SeededEntropy("b"))
    assert check_root(ReadOnlyStore(store))["store_id"] == mark["store_id"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": 2}, "format 'prefix-recovery' version 2; this program reads 'prefix-recovery' version 1"),
        ({"format": "something-else"}, "'something-else'"),
        ({"version": "1"}, "version '1'"),
        ({"requires": ["shards"]}, "requires shards"),
    ],
)
def test_f4_a_later_version_or_an_unknown_requirement_refuses(fields: dict, said: str) -> None:
    store = MemoryStore()
    make_root(store, SeededEntropy())
    store.put("format.json", json.dumps({**json.loads(store.get("format.json")), **fields}).encode())
    for call in (lambda: check_root(store), lambda: make_root(store, SeededEntropy())):
        with pytest.raises(FormatNotUnderstood, match=said) as caught:
            call()
        assert caught.value.exit_code == 13


def test_f4_an_unknown_optional_field_is_ignored() -> None:
    store = MemoryStore()
    make_root(store, SeededEntropy())
    store.put("format.json", json.dumps({**json.loads(store.get("format.json")), "colour": "red"}).encode())
    assert check_root(store)["version"] == 1


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{"])
def test_a_mangled_mark_is_damage(data: bytes) -> None:
    store = MemoryStore()
    store.put_new("format.json", data)
    with pytest.raises(Damaged, match=r"format\.json"):
        check_root(store)


# ---- references ------------------------------------------------------------------------------------------------


def test_an_object_is_what_its_reference_says_or_an_error_that_names_it() -> None:
    store = MemoryStore()
    ref = put_object(store, KEY, b"twelve bytes")
    assert get_object(store, ref) == b"twelve bytes"
    assert ObjectRef.from_json(json.loads(json.dumps(ref.as_json())), "x") == ref
    for data, said in (
        (b"twelve byteZ", "sha256"),
        (b"twelve byte", "has 11 bytes, not 12"),
        (b"twelve bytes!", "more"),
    ):
        store.put(KEY, data)
        with pytest.raises(DigestMismatch, match=said) as caught:
            get_object(store, ref)
        assert KEY in str(caught.value)
    store.delete(KEY)
    with pytest.raises(ObjectMissing, match=KEY):
        get_object(store, ref)


def test_a_huge_object_is_refused_before_it_is_read() -> None:
    counting = CountingStore(MemoryStore())
    with pytest.raises(Damaged, match="at most"):
        get_object(counting, ObjectRef(KEY, 1 << 40, "0" * 64))
    with pytest.raises(Damaged, match="at most 10"):
        get_object(counting, ObjectRef(KEY, 11, "0" * 64), 10)
    assert counting.log == []


GOOD_REF: dict[str, Any] = {"key": KEY, "nbytes": 3, "sha256": "a" * 64}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "ledger",
        {},
        {**GOOD_REF, "key": "../../etc/passwd"},
        {**GOOD_REF, "key": "/etc/passwd"},
        {**GOOD_REF, "key": "ledger/e000001/0123456789ABCDEF.json"},
        {**GOOD_REF, "key": "ledger/e000001/lost+found"},
        {**GOOD_REF, "key": 7},
        {**GOOD_REF, "nbytes": -5},
        {**GOOD_REF, "nbytes": "3"},
        {**GOOD_REF, "nbytes": 3.0},
        {**GOOD_REF, "nbytes": True},
        {**GOOD_REF, "nbytes": None},
        {**GOOD_REF, "sha256": "a" * 63},
        {**GOOD_REF, "sha256": "A" * 64},
        {**GOOD_REF, "sha256": None},
    ],
)
def test_a_mangled_reference_never_reaches_a_store(value: Any) -> None:
    with pytest.raises(Damaged, match="snapshot 7"):
        ObjectRef.from_json(value, "snapshot 7")


def test_a_snapshot_slot_is_read_strictly_and_ignores_what_it_does_not_know() -> None:
    body = {"ledger": GOOD_REF, "states": {"job": {**GOOD_REF, "key": "state/e000001/job-0123456789abcdef.json"}}}
    slot = Slot(seq=7, epoch=1, kind="snapshot", nonce="", prev="", owner="", utc=0.0, body={**body, "new": 1})
    snapshot = Snapshot.from_slot(slot)
    assert (snapshot.id, snapshot.ledger.key, list(snapshot.states)) == (7, KEY, ["job"])
    for wrong in ({"ledger": None}, {"states": None}, {"states": []}, {"states": {"job": {}}}):
        with pytest.raises(Damaged, match="snapshot 7"):
            Snapshot.from_slot(replace(slot, body={**body, **wrong}))


# ---- ledger objects --------------------------------------------------------------------------------------------


def test_damaged_ancestors_are_named() -> None:
    job = many_objects(MemoryStore())
    for ref in job.refs[-1 - job.depths[-1] :]:
        data = job.store.get(ref.key)
        for change in (
            lambda ref=ref, data=data: job.store.put(ref.key, data[:-1] + b"x"),
            lambda ref=ref: job.store.delete(ref.key),
        ):
            change()
            with pytest.raises((DigestMismatch, ObjectMissing), match=ref.key):
                read_ledger_objects(job.store, CODEC, job.head)
            job.store.put(ref.key, data)
    assert len(read_ledger_objects(job.store, CODEC, job.head)) == job.depths[-1] + 1 > 5


def test_what_lies_before_the_ledger_is_not_read() -> None:
    job = many_objects(MemoryStore())
    for ref in job.refs[: -1 - job.depths[-1]]:
        job.store.delete(ref.key)
    assert flat(job.read()) == flat(job.ledger)


def rewritten(job: Job, **header: Any) -> ObjectRef:
    """The same ledger object with another header, under a sum that fits it."""
    document = json.loads(job.store.get(job.head.key))
    document["header"].update(header)
    return put_object(job.store, "ledger/e000009/ffffffffffffffff.json", json.dumps(document).encode())


def test_f4_an_unknown_version_or_requirement_of_a_ledger_object_is_refused_by_name() -> None:
    for fields, said in (({"version": 2}, "version 2"), ({"requires": ["tiers"]}, "tiers")):
        job = Job(MemoryStore(), n_calls=2)
        job.snapshot()
        ref = rewritten(job, **fields)
        with pytest.raises(FormatNotUnderstood, match=f"{ref.key}: .*{said}"):
            read_ledger_objects(job.store, CODEC, ref)


def test_f4_an_unknown_field_of_a_ledger_object_is_ignored() -> None:
    job = Job(MemoryStore(), n_calls=2)
    job.snapshot()
    (item,) = read_ledger_objects(job.store, CODEC, rewritten(job, colour="red"))
    assert isinstance(item, LedgerObject) and len(item.rows) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "seg/../x"},
        {"key": None},
        {"nbytes": -1},
        {"nbytes": 1 << 50},
        {"crc32c": "x"},
        {"batches": None},
        {"batches": [[1, 2, 3]]},
        {"batches": [[1, 2, 3, -4]]},
        {"batches": [[1, 2, 3, 1e9]]},
        {"number": None},
        {"number": "0"},
    ],
)
def test_a_badly_described_segment_is_damage(fields: dict) -> None:
    job = Job(MemoryStore(), n_calls=2)
    job.snapshot()
    (segment,) = json.loads(job.store.get(job.refs[0].key))["header"]["segments"]
    with pytest.raises(Damaged, match="segment"):
        read_ledger_objects(job.store, CODEC, rewritten(job, segments=[{**segment, **fields}]))


@pytest.mark.parametrize("depth", [None, -1, "1", 1.0, True, 257, 1])
def test_a_depth_that_cannot_be_is_damage(depth: Any) -> None:
    job = Job(MemoryStore(), n_calls=2)
    job.snapshot()
    with pytest.raises(Damaged, match=r"depth|objects"):
        read_ledger_objects(job.store, CODEC, rewritten(job, depth=depth))


def test_load_reads_ledger_and_states_and_checks_both() -> None:
    job = Job(MemoryStore(), n_calls=2)
    job.snapshot()
    state = put_object(job.store, "state/e000001/job-0123456789abcdef.json", b"{}")
    body = {"ledger": job.head.as_json(), "states": {"job": state.as_json()}}
    slot = Slot(seq=3, epoch=1, kind="snapshot", nonce="", prev="", owner="", utc=0.0, body=body)
    snapshot = Snapshot.from_slot(slot)
    loaded = load(job.store, CODEC, snapshot)
    assert loaded.states == {"job": b"{}"} and flat(loaded.ledger) == flat(job.ledger)
    assert loaded.flushed == {"w0.00000000": 1}
    job.store.put(state.key, b"[]")
    with pytest.raises(DigestMismatch, match=state.key):
        load(job.store, CODEC, snapshot)
