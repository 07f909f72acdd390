"""recovery.staging with a staging: what waits in it is stored at the next cut, whatever becomes of the staging."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from typing import Any

import pytest

from recovery.calls import CallTable
from recovery.errors import StoreFull, StoreUnavailable
from recovery.layout import segment_position
from recovery.model import Chunk
from recovery.ports import ObjectStore
from recovery.salvage import salvage
from recovery.staging import Stager
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.memory import MemoryStore
from storage_backends.stagings import CheckedStaging, MemoryRows
from storage_backends.testing.faults import PASS, FaultyStore, RaiseBefore
from storage_backends.testing.stagings import Fault, FaultyRows
from tests.fakes import V0, SeededEntropy, name, request

CODEC = MixedSegmentCodec("arrow")


def stager(store: ObjectStore, rows: Any, **fields: Any) -> Stager:
    return Stager(store, CODEC, SeededEntropy("s"), epoch=3, worker="w7", staging=CheckedStaging(rows), **fields)


def table_of(n: int = 1) -> tuple[CallTable, list[Any]]:
    table = CallTable()
    return table, [table.open(request(f"r{i}"), name(f"r{i}"), 0) for i in range(n)]


def periodic(one: Stager, table: CallTable) -> Any:
    return one.flush(table.freeze(), periodic=True).result(60)


def cut(one: Stager, table: CallTable) -> Any:
    return one.flush(table.freeze()).result(60)


def tokens_in(store: ObjectStore) -> dict[bytes, list[int]]:
    """By call, as a ledger takes them: what does not extend is left."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for item in store.list("seg/"):
        for record in CODEC.decode(store.get(item.key), None):
            if isinstance(record, Chunk) and record.start == len(found[record.call_id]):
                found[record.call_id] += record.token_ids.tolist()
    return dict(found)


def idle(one: Stager) -> None:
    """Wait until it has done what it was told."""
    one._pool.submit(lambda: None).result(60)


def test_periodic_flushes_wait_and_the_cut_stores_all_of_them_as_one() -> None:
    store, rows = MemoryStore(), MemoryRows()
    one, (table, (call,)) = stager(store, rows), table_of()
    for token in range(3):
        call.append([token], None, V0)
        assert periodic(one, table) is None
    assert store.list("seg/") == [] and one.take_staged() == [] and len(rows.keys()) == 3
    assert one.counters.waited == 3 and one.counters.flushes == one.counters.backlog_records == 0
    call.append([3], None, V0)
    assert cut(one, table) is None
    (staged,) = one.take_staged()
    assert tokens_in(store) == {call.call_id: [0, 1, 2, 3]} and [i.key for i in store.list("seg/")] == [staged.info.key]
    assert staged.flush == 4, "numbers grow over those that wait"
    assert len(rows.keys()) == 3, "dropped when a snapshot is published, no sooner"
    one.published()
    idle(one)
    assert rows.keys() == []
    one.close(wait=True)


def test_the_end_of_a_call_is_stored_at_once_and_with_it_what_waits() -> None:
    """Whoever waits for a result to be durable is told when the store has it."""
    store, told = MemoryStore(), []
    one, (table, calls) = stager(store, MemoryRows(), on_staged=told.append), table_of(2)
    for call in calls:
        call.append([1], None, V0)
    periodic(one, table)
    assert told == []
    calls[0].append([2], None, V0)
    calls[0].end("stop", 2)
    periodic(one, table)
    assert len(told) == 1 and tokens_in(store) == {calls[0].call_id: [1, 2], calls[1].call_id: [1]}
    one.close(wait=True)


def test_a_killed_writers_are_salvaged_and_extend_as_if_they_had_been_stored() -> None:
    store, rows = MemoryStore(), MemoryRows()
    one, (table, (call,)) = stager(store, rows), table_of()
    call.append([0], None, V0)
    cut(one, table)
    for token in (1, 2):
        call.append([token], None, V0)
        periodic(one, table)
    # It is killed here: what it has in memory is gone.
    assert tokens_in(store) == {call.call_id: [0]}
    assert salvage(CheckedStaging(rows), store, "seg/").segments == 2
    assert tokens_in(store) == {call.call_id: [0, 1, 2]}
    flushes = [at.flush for item in store.list("seg/") if (at := segment_position(item.key)) is not None]
    assert flushes == [1, 2, 3]
    one.close(wait=True)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_a_staging_that_fails_costs_one_try_until_the_next_snapshot(fault: Fault) -> None:
    store, rows = MemoryStore(), FaultyRows(MemoryRows(), [Fault.NONE, fault])
    one, (table, (call,)) = stager(store, rows), table_of()
    for token in range(4):
        call.append([token], None, V0)
        assert periodic(one, table) is None
    counters = one.counters
    assert (counters.waited, counters.staging_failures, counters.flushes) == (1, 1, 3)
    assert counters.staging_error is not None and counters.error is None
    assert tokens_in(store) == {call.call_id: [0, 1, 2, 3]}, "nothing is lost and nothing waits"
    one.published()
    call.append([4], None, V0)
    periodic(one, table)
    assert counters.waited == 2 and counters.staging_error is None
    idle(one)
    assert len([key for key in rows.keys() if segment_position(key)]) == 1, "what was of no use any more is dropped"  # noqa: SIM118
    one.close(wait=True)


def test_a_staging_that_hangs_holds_up_no_snapshot_of_another_and_loses_nothing() -> None:
    """Its wait is bounded by the adapter; meanwhile the flush is busy, and what is captured goes with the next."""
    answered, asked = threading.Event(), threading.Event()

    class Hanging(MemoryRows):
        def put(self, key: str, data: bytes) -> None:
            asked.set()
            assert answered.wait(240)
            raise StoreUnavailable("nobody answered")

    store = MemoryStore()
    one, (table, (call,)) = stager(store, Hanging()), table_of()
    call.append([0], None, V0)
    first = one.flush(table.freeze(), periodic=True)
    assert asked.wait(240) and one.busy
    call.append([1], None, V0)
    second = one.flush(table.freeze())
    answered.set()
    assert first.result(60) is None and second.result(60) is None
    assert tokens_in(store) == {call.call_id: [0, 1]}
    one.close(wait=True)


@pytest.mark.parametrize("bound", ["WAITING_RECORDS", "WAITING_RAW_NBYTES"])
def test_what_waits_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"recovery.staging.{bound}", 5)
    store, rows = MemoryStore(), MemoryRows()
    one, (table, (call,)) = stager(store, rows), table_of()
    for token in range(40):
        call.append([token], None, V0)
        periodic(one, table)
    assert one.counters.waited and one.counters.flushes
    assert len(tokens_in(store)[call.call_id]) >= 34
    one.close(wait=True)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_store_and_staging_do_every_token_is_stored_in_order(seed: int) -> None:
    """The two fail as they like; a writer that lives stores everything, and one that is killed loses no more than the
    flushes that neither of the two took."""
    chance = random.Random(seed)
    faults = [chance.choice([Fault.NONE, Fault.NONE, *Fault]) for _ in range(60)]
    rows, inner = FaultyRows(MemoryRows(), faults), MemoryStore()
    errors = [RaiseBefore(StoreFull("full")), RaiseBefore(StoreUnavailable("down"))]
    one = stager(FaultyStore(inner, [chance.choice([PASS, PASS, *errors]) for _ in range(25)]), rows)
    table, calls = table_of(3)
    expected: dict[bytes, list[int]] = defaultdict(list)
    sure: dict[bytes, int] = {}
    for token in range(120):
        call = chance.choice(calls)
        call.append([token], None, V0)
        expected[call.call_id].append(token)
        if chance.random() < 0.3:
            waits = chance.random() < 0.7
            if one.flush(table.freeze(), periodic=waits).result(60) is None:
                sure = {call_id: len(tokens) for call_id, tokens in expected.items()}
                if not waits:
                    assert {c: len(t) for c, t in tokens_in(inner).items()} == sure, "a cut leaves nothing waiting"
        if chance.random() < 0.1:
            one.published()
    if seed % 2:
        # It lives, and is asked to store what there is.
        while cut(one, table) is not None:
            pass
        assert tokens_in(inner) == expected
    else:
        salvage(CheckedStaging(rows), inner, "seg/")
        found = tokens_in(inner)
        for call_id, n in sure.items():
            assert found[call_id] == expected[call_id][: len(found[call_id])] and len(found[call_id]) >= n
    one.close(wait=True)
