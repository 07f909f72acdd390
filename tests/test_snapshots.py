"""recovery.snapshots: what is referenced is checked before it is parsed, and what is written stays bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from recovery import layout
from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood, NoStore, ObjectMissing
from recovery.ledger import Ledger
from recovery.log import Slot
from recovery.model import LedgerRow, Record
from recovery.ports import ObjectStore
from recovery.snapshots import (
    MAX_DEPTH,
    LedgerObject,
    LedgerWriter,
    ObjectRef,
    Snapshot,
    check_root,
    get_object,
    load,
    make_root,
    put_object,
    read_ledger_objects,
)
from recovery.staging import coordinates_of
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore, ReadOnlyStore
from tests.fakes import SeededEntropy, chunk, name, opened
from tests.plain_codecs import PlainLedgers, PlainSegments

KEY = "ledger/e000001/0123456789abcdef.json"
CODEC = PlainLedgers()

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


# ---- ledger objects and their ancestors ------------------------------------------------------------------------


class Job:
    """A ledger that grows and is written again and again; `refs` are the heads of its snapshots."""

    def __init__(self, store: ObjectStore, n_calls: int = 0) -> None:
        self.store = store
        self.ledger = Ledger()
        self.writer = LedgerWriter(store, CODEC, SeededEntropy("ledger"), epoch=1)
        self.n_flush = 0
        self.refs: list[ObjectRef] = []
        self.bases: list[bool] = []
        self.flush([opened(f"c{i:05d}") for i in range(n_calls)])

    def flush(self, records: list[Record]) -> None:
        self.n_flush += 1
        stem = layout.segment_stem(1, "w0.00000000", self.n_flush, "00000000")
        info = PlainSegments().encode(records, stem).info
        self.ledger.describe(info)
        for at in coordinates_of(records, info.key):
            assert self.ledger.apply(at) == ""

    def snapshot(self) -> int:
        """Write and acknowledge; returns how many bytes the ledger object has."""
        pending = self.writer.write(self.ledger, {"w0.00000000": self.n_flush})
        self.ledger.published(pending.described, base=pending.base)
        self.writer.published(pending)
        self.refs.append(pending.ref)
        self.bases.append(pending.base)
        assert self.writer.depth == pending.depth <= MAX_DEPTH
        return pending.ref.nbytes

    def decode(self, rollouts: list[str]) -> None:
        """One more token for each of these calls."""
        entries = [self.ledger.get(name(rollout)) for rollout in rollouts]
        self.flush([chunk(e.identity.rollout, e.n_tokens, [7]) for e in entries if e is not None])


def flat(ledger: Ledger) -> dict[str, Any]:
    return {e.identity.rollout: (e.attempt, e.n_tokens, e.state, list(e.chunks), e.history) for e in ledger}


def test_every_snapshot_of_a_job_can_be_read_back() -> None:
    store = MemoryStore()
    job = Job(store, n_calls=5)
    expected = []
    for i in range(150):
        job.decode([f"c{i % 5:05d}"])
        job.snapshot()
        expected.append(flat(job.ledger))
    for ref, content in list(zip(job.refs, expected, strict=True))[::7]:
        objects = read_ledger_objects(store, CODEC, ref)
        assert [item.header["parent"] for item in objects] == [None, *(item.ref.as_json() for item in objects[:-1])]
        loaded = Ledger.from_objects((item.header, item.rows) for item in objects)
        assert flat(loaded) == content
    assert sum(job.bases) > 1


def test_a_restored_chain_is_continued() -> None:
    store = MemoryStore()
    job = Job(store, n_calls=3)
    for _ in range(5):
        job.decode(["c00001"])
        job.snapshot()
    objects = read_ledger_objects(store, CODEC, job.refs[-1])
    again = Job(store)
    again.ledger = Ledger.from_objects((item.header, item.rows) for item in objects)
    again.writer = LedgerWriter(store, CODEC, SeededEntropy("again"), epoch=2)
    again.writer.adopt(objects)
    again.n_flush = job.n_flush
    assert (again.writer.head, again.writer.depth) == (job.refs[-1], 4)
    again.decode(["c00002"])
    again.snapshot()
    assert again.bases == [False]
    objects = read_ledger_objects(store, CODEC, again.refs[-1])
    assert len(objects) == 6 and objects[-1].ref.key.startswith("ledger/e000002/")
    assert flat(Ledger.from_objects((item.header, item.rows) for item in objects)) == flat(again.ledger)
    again.writer.adopt([])
    assert (again.writer.head, again.writer.depth) == (None, 0)


def test_a_failed_publication_is_contained_in_the_next() -> None:
    store = MemoryStore()
    job = Job(store, n_calls=3)
    job.snapshot()
    job.decode(["c00000"])
    job.writer.write(job.ledger, {})  # written, never acknowledged
    job.decode(["c00001"])
    job.snapshot()
    objects = read_ledger_objects(store, CODEC, job.refs[-1])
    assert flat(Ledger.from_objects((i.header, i.rows) for i in objects)) == flat(job.ledger)
    assert objects[-1].header["flushed"] == {"w0.00000000": 3}


@pytest.mark.parametrize("n_calls", [100, 2000])
def test_the_bytes_of_a_snapshot_follow_what_changed_not_what_there_is(n_calls: int) -> None:
    """200 snapshots that change 8 calls each: the deltas do not grow with the job, bases are rare."""
    job = Job(MemoryStore(), n_calls)
    sizes = [job.snapshot()]
    for i in range(200):
        job.decode([f"c{(8 * i + j) % n_calls:05d}" for j in range(8)])
        sizes.append(job.snapshot())
    deltas = [size for size, base in zip(sizes, job.bases, strict=True) if not base]
    assert max(deltas) < 2 * min(deltas) < 8000
    assert sum(job.bases) <= 1 + max(200 // (MAX_DEPTH - 8), 200 * 8 * 4 // n_calls + 2)


def test_the_bytes_do_not_grow_with_the_length_of_the_live_calls() -> None:
    """4 calls of 2000 chunks each: a base lists all chunks, so it must become rarer as they grow."""
    job = Job(MemoryStore(), 4)
    total = changed = 0
    for _ in range(2000):
        job.decode([f"c{i:05d}" for i in range(4)])
        total += job.snapshot()
        changed += 8
    first, last = job.bases[:200], job.bases[-400:]
    assert sum(last) / 400 < sum(first) / 200
    per_snapshot_kib = total / 2000 / 1024
    assert per_snapshot_kib < 16, f"{per_snapshot_kib:.1f} KiB for 4 chunks of 4 calls"


def test_damaged_ancestors_are_named() -> None:
    store = MemoryStore()
    job = Job(store, n_calls=2)
    for _ in range(4):
        job.decode(["c00000"])
        job.snapshot()
    for ref in job.refs:
        data = store.get(ref.key)
        for change in (
            lambda ref=ref, data=data: store.put(ref.key, data[:-1] + b"x"),
            lambda ref=ref: store.delete(ref.key),
        ):
            change()
            with pytest.raises((DigestMismatch, ObjectMissing), match=ref.key):
                read_ledger_objects(store, CODEC, job.refs[-1])
            store.put(ref.key, data)
    assert len(read_ledger_objects(store, CODEC, job.refs[-1])) == 4


def rewritten(store: ObjectStore, ref: ObjectRef, **header: Any) -> ObjectRef:
    """The same ledger object with another header, under a sum that fits it."""
    document = json.loads(store.get(ref.key))
    document["header"].update(header)
    return put_object(store, "ledger/e000009/ffffffffffffffff.json", json.dumps(document).encode())


def test_f4_an_unknown_version_or_requirement_of_a_ledger_object_is_refused_by_name() -> None:
    for fields, said in (({"version": 2}, "version 2"), ({"requires": ["tiers"]}, "tiers")):
        store = MemoryStore()
        job = Job(store, n_calls=2)
        job.snapshot()
        ref = rewritten(store, job.refs[0], **fields)
        with pytest.raises(FormatNotUnderstood, match=f"{ref.key}: .*{said}"):
            read_ledger_objects(store, CODEC, ref)


def test_f4_an_unknown_field_of_a_ledger_object_is_ignored() -> None:
    store = MemoryStore()
    job = Job(store, n_calls=2)
    job.snapshot()
    (item,) = read_ledger_objects(store, CODEC, rewritten(store, job.refs[0], colour="red"))
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
    ],
)
def test_a_badly_described_segment_is_damage(fields: dict) -> None:
    store = MemoryStore()
    job = Job(store, n_calls=2)
    job.snapshot()
    (segment,) = json.loads(store.get(job.refs[0].key))["header"]["segments"]

    class Lax(PlainLedgers):
        """Gives the header as it is; what a row says does not matter here."""

        def decode(self, data: bytes) -> tuple[dict[str, Any], list[LedgerRow]]:
            return json.loads(data)["header"], []

    ref = rewritten(store, job.refs[0], segments=[{**segment, **fields}])
    with pytest.raises(Damaged, match="segment"):
        read_ledger_objects(store, Lax(), ref)


def test_ancestors_that_never_end_are_refused() -> None:
    """A chain longer than any that is written, as a loop would be if sums could be forged."""

    class Endless(PlainLedgers):
        def decode(self, data: bytes) -> tuple[dict[str, Any], list[LedgerRow]]:
            return {"segments": [], "parent": ref.as_json()}, []

    store = MemoryStore()
    ref = put_object(store, KEY, b"x")
    with pytest.raises(Damaged, match="more than 256 ancestors"):
        read_ledger_objects(store, Endless(), ref)


def test_load_reads_ledger_and_states_and_checks_both() -> None:
    store = MemoryStore()
    job = Job(store, n_calls=2)
    job.snapshot()
    state = put_object(store, "state/e000001/job-0123456789abcdef.json", b"{}")
    body = {"ledger": job.refs[0].as_json(), "states": {"job": state.as_json()}}
    slot = Slot(seq=3, epoch=1, kind="snapshot", nonce="", prev="", owner="", utc=0.0, body=body)
    loaded = load(store, CODEC, Snapshot.from_slot(slot))
    assert loaded.states == {"job": b"{}"} and flat(loaded.ledger) == flat(job.ledger)
    assert loaded.flushed == {"w0.00000000": 1}
    store.put(state.key, b"[]")
    with pytest.raises(DigestMismatch, match=state.key):
        load(store, CODEC, Snapshot.from_slot(slot))
