"""recovery.publication: the slot is created last, after everything was read back, and a failure keeps what was."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from recovery import layout
from recovery.codec import sha256_hex
from recovery.errors import (
    Damaged,
    DigestMismatch,
    Fenced,
    ObjectMissing,
    OutcomeUnknown,
    SnapshotAbandoned,
    StoreFull,
    StoreUnavailable,
)
from recovery.ledger import Ledger
from recovery.log_reading import read_slot
from recovery.model import Record
from recovery.ports import ObjectStore
from recovery.publication import WORTH_A_SLOT, Publication
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot, load
from recovery.staging import Staged, checked_sum, coordinates_of
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseAfter, RaiseBefore
from tests.fakes import ManualClock, SeededEntropy, chunk, name, opened
from tests.plain_codecs import PlainLedgers, PlainSegments

STATES = {"job": b'{"must":{},"recorded":{}}'}


class World:
    """One coordinator on a store, and records that were flushed."""

    def __init__(self, store: ObjectStore | None = None, keep: int = 2) -> None:
        self.inner = store if store is not None else MemoryStore()
        self.store = FaultyStore(self.inner, [])
        self.entropy = SeededEntropy("p")
        log = SlotLog(self.store, ManualClock(), self.entropy, "me")
        log.claim()
        self.publication = Publication(
            self.store, PlainSegments(), PlainLedgers(), self.entropy, log, Ledger(), keep_latest_k=keep
        )
        self.n_flush = 0

    def flush(self, *records: Record) -> Staged:
        self.n_flush += 1
        stem = layout.segment_stem(self.publication.log.epoch, "w0.00000000", self.n_flush, "00000000")
        segment = PlainSegments().encode(records, stem)
        self.inner.put_new(segment.info.key, segment.data)
        coordinates = coordinates_of(records, segment.info.key)
        checked = checked_sum(PlainSegments(), segment, coordinates)
        staged = Staged(segment.info, coordinates, "w0.00000000", self.n_flush, checked)
        self.publication.ledger.describe(staged.info)
        for at in staged.coordinates:
            assert self.publication.ledger.apply(at) == ""
        self.publication.flushed[staged.writer] = staged.flush
        return staged

    def publish(self, *fresh: Staged, states: dict[str, bytes] = STATES) -> int:
        draft = self.publication.record(states)
        assert self.publication.validate(draft, fresh) == []
        slot = self.publication.publish(draft, cause="interval", fingerprint="f" * 32, restored_from=None)
        return slot.seq

    def fail(self, plan: Callable[[str, str], Any]) -> None:
        self.store._ask = plan  # type: ignore[assignment]

    def loaded(self, seq: int) -> dict[str, int]:
        read = read_slot(self.inner, seq)
        assert read is not None
        found = load(self.inner, PlainLedgers(), Snapshot.from_slot(read.slot))
        return {entry.identity.rollout: entry.n_tokens for entry in found.ledger}


def test_a_slot_says_what_the_document_says() -> None:
    world = World()
    fresh = world.flush(opened("a"), chunk("a", 0, [1, 2]))
    seq = world.publish(fresh)
    read = read_slot(world.inner, seq)
    assert read is not None and (seq, read.slot.kind, read.slot.epoch) == (2, "snapshot", 1)
    body = read.slot.body
    assert {*body} == {
        "cause",
        "restored_from",
        "fingerprint",
        "ledger",
        "depth",
        "states",
        "counts",
        "bytes_written",
        "flushed",
    }
    assert body["counts"] == {
        "calls": 1,
        "open": 1,
        "ended": 0,
        "tokens": 2,
        "chunks": 1,
        "segments": 1,
        "nbytes": fresh.info.nbytes,
    }
    for ref in (body["ledger"], body["states"]["job"]):
        data = world.inner.get(ref["key"])
        assert (len(data), sha256_hex(data)) == (ref["nbytes"], ref["sha256"])
    assert body["bytes_written"] == body["ledger"]["nbytes"] + len(STATES["job"])
    assert (body["cause"], body["restored_from"], body["fingerprint"], body["depth"]) == ("interval", None, "f" * 32, 0)


def test_data_first_then_ledger_then_slot_and_everything_read_back_before() -> None:
    world = World()
    counting = CountingStore(world.inner)
    fresh = world.flush(opened("a"), chunk("a", 0, [1, 2]))
    world.fail(lambda verb, key: PASS)
    world.store.inner = counting
    world.publish(fresh)
    calls = [(call.verb, call.key.split("/")[0]) for call in counting.log]
    assert calls == [
        ("put_new", "ledger"),
        ("put_new", "state"),
        ("get", "seg"),
        ("get", "ledger"),
        ("get", "state"),
        ("put_new", "log"),
    ]


def test_a_state_that_did_not_change_is_not_written_again() -> None:
    world = World()
    world.publish(world.flush(opened("a")))
    counting = CountingStore(world.inner)
    world.store.inner = counting
    world.publish(states={**STATES, "tools": b"1"})
    assert [call.key.split("/")[0] for call in counting.log if call.verb == "put_new"] == ["ledger", "state", "log"]
    seq = world.publish(states={"tools": b"2"})
    read = read_slot(world.inner, seq)
    assert read is not None and list(read.slot.body["states"]) == ["tools"]


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("down"), OutcomeUnknown("?")])
@pytest.mark.parametrize("step", [RaiseBefore, RaiseAfter])
def test_a_failure_at_any_call_loses_nothing(error: Exception, step: Any) -> None:
    """The previous snapshot stands, the next attempt contains the change; enumerated over the calls."""
    for k in itertools.count():
        world = World()
        first = world.publish(world.flush(opened("a"), chunk("a", 0, [1, 2])))
        fresh = world.flush(opened("b"), chunk("a", 2, [3]))
        plan = iter([PASS] * k + [step(error)])
        world.fail(lambda verb, key, plan=plan: next(plan, PASS))
        try:
            seq = world.publish(fresh)
        except type(error):
            assert world.loaded(first) == {"a": 2}
            world.publication.log.settle()
            seq = world.publish(fresh)
        was_reached = next(plan, None) is None
        world.fail(lambda verb, key: PASS)
        assert world.loaded(seq) == {"a": 3, "b": 0}
        assert world.loaded(first) == {"a": 2}
        world.flush(chunk("b", 0, [7]))
        assert world.loaded(world.publish()) == {"a": 3, "b": 1}
        if not was_reached:
            break
    assert k == 4  # ledger, segment and ledger read back, slot


def test_c3_a_fresh_segment_that_does_not_read_back_is_retracted_and_voids_the_draft() -> None:
    world = World()
    good = world.flush(opened("a"), chunk("a", 0, [1, 2]))
    bad = world.flush(opened("b"), chunk("b", 0, [4]), chunk("a", 2, [3]))
    for damage in (
        lambda: world.inner.put(bad.info.key, world.inner.get(bad.info.key)[:-1] + b"?"),
        lambda: world.inner.delete(bad.info.key),
    ):
        damage()
        draft = world.publication.record(STATES)
        wrong = world.publication.validate(draft, [good, bad])
        if wrong:  # the second time the ledger does not refer to it any more
            assert len(wrong) == 1 and isinstance(wrong[0], (DigestMismatch, ObjectMissing))
            assert bad.info.key in str(wrong[0])
    assert not world.publication.ledger.knows_segment(bad.info.key)
    seq = world.publish(good, bad)
    assert world.loaded(seq) == {"a": 2}, "b was opened there; a keeps what came before"


def test_a_segment_that_holds_other_records_is_found() -> None:
    world = World()
    staged = world.flush(opened("a"), chunk("a", 0, [1, 2]))
    other = PlainSegments().encode([opened("a"), chunk("a", 0, [1, 3])], "x")
    world.inner.put(staged.info.key, other.data)
    lying = Staged(
        PlainSegments()._info(staged.info.key, other.data, 2), staged.coordinates, staged.writer, staged.flush
    )
    (wrong,) = world.publication.validate(world.publication.record(STATES), [lying])
    assert "does not hold the records that were written" in str(wrong)


@pytest.mark.parametrize("at", [0, -1, 40])
@pytest.mark.parametrize("was_decoded", [True, False])
def test_one_flipped_bit_of_a_segment_is_found(was_decoded: bool, at: int) -> None:
    """Whether the worker decoded what it stored, so that a sum is enough, or nobody did."""
    world = World()
    staged = world.flush(opened("a"), chunk("a", 0, [1, 2]))
    data = bytearray(world.inner.get(staged.info.key))
    draft = world.publication.record(STATES)
    fresh = staged if was_decoded else replace(staged, checked=b"")
    assert world.publication.validate(draft, [fresh]) == []
    data[at] ^= 4
    world.inner.put(staged.info.key, bytes(data))
    (wrong,) = world.publication.validate(draft, [fresh])
    assert staged.info.key in str(wrong)
    assert not world.publication.ledger.knows_segment(staged.info.key), "it was retracted"


def test_a_ledger_or_state_that_does_not_read_back_stops_the_attempt() -> None:
    for folder in ("ledger/", "state/"):
        world = World()
        fresh = world.flush(opened("a"))
        draft = world.publication.record(STATES)
        (item,) = world.inner.list(folder)
        world.inner.put(item.key, b"?" * item.nbytes)
        with pytest.raises(Damaged, match=item.key):
            world.publication.validate(draft, [fresh])
        assert world.loaded(world.publish(fresh)) == {"a": 0}


def test_c8_a_fenced_publication_publishes_nothing_ever_again() -> None:
    world = World()
    fresh = world.flush(opened("a"))
    SlotLog(world.inner, ManualClock(), SeededEntropy("heir"), "heir").claim()
    for _ in range(2):
        draft = world.publication.record(STATES)
        world.publication.validate(draft, [fresh])
        with pytest.raises(Fenced):
            world.publication.publish(draft, cause="interval", fingerprint="", restored_from=None)
    assert len(world.inner.list("log/")) == 2
    with pytest.raises(Fenced):
        world.publication.collect()


# ---- garbage ---------------------------------------------------------------------------------------------------


def names(store: ObjectStore) -> set[str]:
    return {item.key for prefix in layout.PREFIXES for item in store.list(prefix)}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_c7_what_k_snapshots_do_not_reach_is_intended_and_then_deleted(keep: int) -> None:
    """The newest `keep` snapshots can be loaded at every moment; in the end nothing else is left."""
    world = World(keep=keep)
    seqs = [world.publish(world.flush(opened("a")))]
    world.publication.collect()
    for i in range(40):
        fresh = world.flush(opened(f"b{i}"), chunk(f"b{i}", 0, [1]))
        if i % 2:
            world.publication.ledger.drop(name(f"b{i - 1}"))
        seqs.append(world.publish(fresh, states={"job": b"%d" % (i // 3)}))
        world.publication.collect()
        for seq in seqs[-keep:]:
            world.loaded(seq)
    for _ in range(keep + 2):
        seqs.append(world.publish(states={"job": b"13"}))
        world.publication.collect()
    reached = world.publication.reached()
    assert reached <= names(world.inner)
    left = names(world.inner) - reached
    assert all(key.startswith(("gc/", "ledger/")) for key in left) and len(left) <= keep + 2 + WORTH_A_SLOT
    deleted = [seq for seq in seqs if seq < seqs[-keep]]
    assert any(not _can_be_loaded(world, seq) for seq in deleted)


def _can_be_loaded(world: World, seq: int) -> bool:
    try:
        world.loaded(seq)
    except Damaged:
        return False
    return True


def test_an_intent_is_in_the_log_before_anything_is_deleted() -> None:
    world = World(keep=1)
    counting = CountingStore(world.inner)
    world.store.inner = counting
    intended: set[str] = set()
    for i in range(6):
        world.publish(world.flush(opened(f"c{i}")), states={"job": b"%d" % i})
        before = len(counting.log)
        world.publication.collect()
        for call in counting.log[before:]:
            if call.verb == "delete":
                assert call.key in intended, "deleted without an intent that precedes this snapshot"
        for item in world.inner.list("log/"):
            slot = json.loads(world.inner.get(item.key))
            if slot["kind"] == "gc":
                victims = slot["body"]["victims"]["key"]
                try:
                    intended |= set(json.loads(world.inner.get(victims)))
                except ObjectMissing:
                    assert victims in intended
    assert counting.count("delete") > 3


@pytest.mark.parametrize("error", [StoreUnavailable("down"), OutcomeUnknown("?")])
@pytest.mark.parametrize("step", [RaiseBefore, RaiseAfter])
def test_a_failure_anywhere_in_collecting_costs_nothing_but_garbage(error: Exception, step: Any) -> None:
    for k in range(8):
        world = World(keep=1)
        seq = 0
        for i in range(8):
            seq = world.publish(world.flush(opened(f"c{i}")), states={"job": b"%d" % i})
            if i == 4:
                plan = iter([PASS] * k + [step(error)])
                world.fail(lambda verb, key, plan=plan: next(plan, PASS))
            with contextlib.suppress(type(error)):
                world.publication.collect()
            world.fail(lambda verb, key: PASS)
            world.publication.log.settle()
            assert world.loaded(seq) == {f"c{j}": 0 for j in range(i + 1)}
        assert world.publication.reached() <= names(world.inner)
        assert len(names(world.inner) - world.publication.reached()) < 8


def test_an_object_that_cannot_be_deleted_does_not_keep_the_others() -> None:
    world = World(keep=1)
    stuck: list[str] = []

    def refuse(verb: str, key: str) -> Any:
        if verb == "delete":
            stuck[:] = stuck or [key]
            return RaiseBefore(StoreUnavailable("no")) if key == stuck[0] else PASS
        return PASS

    world.fail(refuse)
    for i in range(20):
        world.publish(world.flush(opened(f"c{i}")), states={"job": b"%d" % i})
        with contextlib.suppress(StoreUnavailable):
            world.publication.collect()
    left = names(world.inner) - world.publication.reached()
    assert stuck[0] in left and len(left) < 12, "of some forty"


# ---- size ------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_many_states_and_many_workers_can_be_read_again() -> None:
    """500 finished groups that no batch was settled for, and 2,000 workers: a slot of more than 64 KiB."""
    world = World()
    world.publication.flushed.update({f"w{number}.{number:08x}": 1 for number in range(2000)})
    states = {**STATES, **{f"group-{number}": b'{"draw":%d}' % number for number in range(500)}}
    seq = world.publish(world.flush(opened("a")), states=states)
    assert len(world.inner.get(f"log/{seq:012d}.json")) > 1 << 16
    assert world.loaded(seq) == {"a": 0}
    read = read_slot(world.inner, seq)
    assert read is not None and load(world.inner, PlainLedgers(), Snapshot.from_slot(read.slot)).states == states


def test_c7_more_garbage_than_one_list_may_name_goes_with_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.publication.VICTIMS_MAX", WORTH_A_SLOT)
    world = World(keep=1)
    for i in range(20):
        world.publish(world.flush(opened(f"c{i}")))
    for i in range(20):
        world.publication.ledger.drop(name(f"c{i}"))
    for i in range(16):
        world.publish(states={"job": b"%d" % i})
        world.publication.collect()
    assert not [key for key in names(world.inner) if key.startswith("seg/")]
    lists = [json.loads(world.inner.get(key)) for key in names(world.inner) if key.startswith("gc/")]
    assert lists and all(len(one) <= WORTH_A_SLOT for one in lists)


def test_a_state_of_more_than_64_mib_can_be_read_again() -> None:
    """A finished group of many long samples."""
    world = World()
    states = {**STATES, "group-1": b'{"draw":0}' + b" " * (64 << 20)}
    seq = world.publish(world.flush(opened("a")), states=states)
    read = read_slot(world.inner, seq)
    assert read is not None and load(world.inner, PlainLedgers(), Snapshot.from_slot(read.slot)).states == states


def test_a_state_that_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    seq = world.publish(world.flush(opened("a")))
    monkeypatch.setattr("recovery.publication.MAX_JSON_BYTES", 100)
    world.flush(opened("b"))
    with pytest.raises(SnapshotAbandoned, match="'group-1' has 101 bytes; at most 100 can be read"):
        world.publish(states={**STATES, "group-1": b"x" * 101})
    assert world.loaded(seq) == {"a": 0}
    assert world.loaded(world.publish(states={**STATES, "group-1": b"x" * 100})) == {"a": 0, "b": 0}
