"""recovery.staging: what a flush could not store goes with the next one, in order, and nothing is lost."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recovery.calls import CallTable
from recovery.codec import chunk_digest, request_digest
from recovery.errors import DigestMismatch, OutcomeUnknown, StoreFull, StoreUnavailable
from recovery.layout import segment_position
from recovery.ledger import ChunkAt, EndedAt, OpenedAt
from recovery.lineage import Lineage
from recovery.model import Chunk, Ended, Opened, PolicyVersion, Record
from recovery.ports import EncodedSegment, ObjectStore
from recovery.staging import Staged, Stager, coordinates_of
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore, Hang, RaiseAfter, RaiseBefore
from tests.fakes import V0, SeededEntropy, chunk, ended, name, opened, request
from tests.plain_codecs import PlainSegments

FULL = RaiseBefore(StoreFull("no space left on device"))


def stager(store: ObjectStore, **fields: Any) -> Stager:
    return Stager(store, PlainSegments(), SeededEntropy("s"), epoch=3, worker="w7", **fields)


def flush(one: Stager, table: CallTable) -> Any:
    return one.flush(table.freeze()).result(30)


def records_in(store: ObjectStore) -> list[list[Record]]:
    codec = PlainSegments()
    return [codec.decode(store.get(item.key), None) for item in store.list("seg/")]


def said(records: list[Record]) -> list[tuple[str, int, list[int]]]:
    return [
        (type(r).__name__, getattr(r, "start", 0), r.token_ids.tolist() if isinstance(r, Chunk) else [])
        for r in records
    ]


def table_of(n: int = 1) -> tuple[CallTable, list[Any]]:
    table = CallTable()
    return table, [table.open(request(f"r{i}"), name(f"r{i}"), 0) for i in range(n)]


class Forgetful(PlainSegments):
    """Encodes other tokens than it was given, as often as it is told."""

    times = 1

    def encode(self, records: Sequence[Record], key_stem: str) -> EncodedSegment:
        self.times -= 1
        last = records[-1]
        assert isinstance(last, Chunk)
        other = replace(last, token_ids=last.token_ids + 1) if self.times >= 0 else last
        return super().encode([*list(records)[:-1], other], key_stem)


def test_what_would_not_read_back_is_not_stored_and_goes_with_the_next_flush() -> None:
    store, table = MemoryStore(), CallTable()
    one = Stager(store, Forgetful(), SeededEntropy("s"), epoch=3, worker="w7")
    call = table.open(request("r0"), name("r0"), 0)
    call.append([1, 2], [-1.0, -2.0], V0)
    error = flush(one, table)
    assert isinstance(error, DigestMismatch) and "would not hold the records" in error.message
    assert store.list("") == [] and one.take_staged() == []
    assert flush(one, table) is None
    assert [said(list(records)) for records in records_in(store)] == [[("Opened", 0, []), ("Chunk", 0, [1, 2])]]
    (staged,) = one.take_staged()
    assert staged.checked == hashlib.sha256(store.get(staged.info.key)).digest()


def test_a_flush_is_one_segment_of_all_calls_and_its_coordinates() -> None:
    store = MemoryStore()
    one = stager(store)
    table, calls = table_of(3)
    for i, call in enumerate(calls):
        call.append([10 + i, 20 + i], [-0.5, -0.25], V0)
    calls[2].end("stop", 22)
    assert flush(one, table) is None
    (staged,) = one.take_staged()
    assert one.take_staged() == []
    (item,) = store.list("seg/")
    assert staged.info.key == item.key and staged.info.nbytes == item.nbytes
    at = segment_position(item.key)
    assert at is not None and (at.epoch, at.writer, at.flush) == (3, staged.writer, staged.flush) == (3, one.writer, 1)
    assert one.writer.startswith("w7.")
    (records,) = records_in(store)
    assert staged.coordinates == coordinates_of(records, item.key)
    assert [type(c) for c in staged.coordinates] == [OpenedAt, ChunkAt, OpenedAt, ChunkAt, OpenedAt, ChunkAt, EndedAt]
    assert (one.counters.flushes, one.counters.tokens, one.counters.nbytes) == (1, 6, item.nbytes)
    one.close(wait=True)


def test_coordinates_say_everything_the_ledger_needs_and_no_token() -> None:
    records: list[Record] = [
        opened("a", source_digest="sd", restart_only="seed", turn=2),
        chunk("a", 5, [1, 2, 3], attempt=1, version=PolicyVersion("b", 9)),
        ended("a", 8, attempt=1, reason="stop"),
    ]
    first, second, third = coordinates_of(records, "seg/x")
    assert isinstance(first, OpenedAt) and isinstance(second, ChunkAt) and isinstance(third, EndedAt)
    one = records[0]
    assert isinstance(one, Opened) and isinstance(records[1], Chunk) and isinstance(records[2], Ended)
    who = first.identity
    assert (who.rollout, who.turn, who.source_digest, who.restart_only) == ("a", 2, "sd", "seed")
    assert who.request_digest == request_digest(one.request)
    assert (who.opened.segment, who.opened.index) == ("seg/x", 0)
    ref = second.chunk
    assert (ref.at.index, ref.start, ref.stop, ref.version) == (1, 5, 8, PolicyVersion("b", 9))
    assert ref.digest == chunk_digest(records[1])
    assert (third.n_tokens, third.finish_reason, third.attempt) == (8, "stop", 1)


def test_f1_a_full_disk_and_then_room_again_loses_nothing_and_keeps_the_order() -> None:
    store = MemoryStore()
    one = stager(FaultyStore(store, [FULL, FULL, PASS]))
    table, (call,) = table_of()
    for tokens, has_room in (([1, 2], False), ([3], False), ([4, 5, 6], True), ([7], True)):
        call.append(tokens, None, V0)
        error = flush(one, table)
        assert (error is None) == has_room
        if error is not None:
            assert isinstance(error, StoreFull)
    assert said([record for part in records_in(store) for record in part]) == [
        ("Opened", 0, []),
        ("Chunk", 0, [1, 2]),
        ("Chunk", 2, [3]),
        ("Chunk", 3, [4, 5, 6]),
        ("Chunk", 6, [7]),
    ]
    counters = one.counters
    assert (counters.failures, counters.flushes, counters.backlog_records, counters.tokens) == (2, 2, 0, 7)
    assert counters.last_failure == "no space left on device"
    assert [staged.flush for staged in one.take_staged()] == [3, 4], "flush numbers grow, also over failures"
    one.close(wait=True)


def test_an_empty_flush_stores_nothing_but_carries_what_waits() -> None:
    store = MemoryStore()
    one = stager(FaultyStore(store, [FULL]))
    table, (call,) = table_of()
    call.append([1], None, V0)
    assert flush(one, table) is not None
    assert one.counters.backlog_records == 2
    assert flush(one, table) is None and len(records_in(store)) == 1
    assert flush(one, table) is None and len(records_in(store)) == 1
    one.close(wait=True)


def test_a_segment_whose_answer_was_lost_is_written_again_under_another_name() -> None:
    """The records are then in the store twice; the second time they do not fit the ledger, which is all that counts."""
    store = MemoryStore()
    one = stager(FaultyStore(store, [RaiseAfter(OutcomeUnknown("?"))]))
    table, (call,) = table_of()
    call.append([1, 2], None, V0)
    assert isinstance(flush(one, table), OutcomeUnknown)
    call.append([3], None, V0)
    assert flush(one, table) is None
    first, second = records_in(store)
    assert said(first) == said(second)[:2]
    assert [staged.flush for staged in one.take_staged()] == [2]
    one.close(wait=True)


@pytest.mark.parametrize("seed", range(20))
def test_any_pattern_of_failures_stores_every_record_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    store = MemoryStore()
    errors = [FULL, RaiseBefore(StoreUnavailable("down"))]
    one = stager(FaultyStore(store, [chance.choice([PASS, *errors]) for _ in range(25)]))
    table, calls = table_of(3)
    expected: dict[bytes, list[int]] = defaultdict(list)
    for token in range(100):
        call = chance.choice(calls)
        call.append([token], None, V0)
        expected[call.call_id].append(token)
        if chance.random() < 0.3:
            flush(one, table)
    while flush(one, table) is not None:
        pass
    found: dict[bytes, list[int]] = defaultdict(list)
    for records in records_in(store):
        for record in records:
            if isinstance(record, Chunk):
                assert record.start == len(found[record.call_id])
                found[record.call_id] += record.token_ids.tolist()
    assert found == expected
    one.close(wait=True)


def test_a_program_error_is_raised_and_the_records_wait() -> None:
    store = MemoryStore()
    one = stager(store)
    table, (call,) = table_of()
    call.append([1], None, V0)
    broken = PlainSegments()
    broken.encode = lambda records, key_stem: 1 / 0  # type: ignore[method-assign,assignment]
    codec, one._codec = one._codec, broken
    with pytest.raises(ZeroDivisionError):
        flush(one, table)
    assert not one.busy and one.counters.backlog_records == 2
    one._codec = codec
    assert flush(one, table) is None
    assert said(records_in(store)[0]) == [("Opened", 0, []), ("Chunk", 0, [1])]
    one.close(wait=True)


def test_it_is_busy_while_a_flush_hangs_and_a_refused_one_is_counted() -> None:
    event, entered = threading.Event(), threading.Event()
    store = MemoryStore()
    one = stager(FaultyStore(store, [Hang(event, entered)]))
    table, (call,) = table_of()
    assert not one.busy
    call.append([1], None, V0)
    first = one.flush(table.freeze())
    assert entered.wait(240) and one.busy
    one.refuse()  # a periodic flush: not even frozen
    call.append([2], None, V0)
    cut = one.flush(table.freeze())  # a cut is never refused
    assert one.busy and not first.done() and not cut.done()
    event.set()
    assert first.result(30) is None and cut.result(30) is None and not one.busy
    assert one.counters.skipped == 1
    assert [said(part)[-1] for part in records_in(store)] == [("Chunk", 0, [1]), ("Chunk", 1, [2])]
    one.close(wait=True)


@pytest.mark.parametrize("bounds", [{"SEGMENT_RECORDS": 3}, {"SEGMENT_RAW_NBYTES": 900}])
def test_a_flush_that_is_too_large_for_a_segment_is_several(
    bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With wide columns a flush may have any size; it is stored in order, and told one by one."""
    for constant, value in bounds.items():
        monkeypatch.setattr(f"recovery.staging.{constant}", value)
    store, told = MemoryStore(), []
    one = stager(store, on_staged=told.append)
    table, calls = table_of(5)
    for i, call in enumerate(calls):
        columns = {"wide": np.full((1, 300), i, np.uint8)} if i % 2 else None
        call.append([i], None, V0, columns)
    assert flush(one, table) is None
    parts = records_in(store)
    assert len(parts) >= 3 and said([r for part in parts for r in part]) == [
        row for i in range(5) for row in (("Opened", 0, []), ("Chunk", 0, [i]))
    ]
    assert told == one.take_staged() and [staged.flush for staged in told] == list(range(1, len(parts) + 1))
    assert [c.chunk.at.index for staged in told for c in staged.coordinates if isinstance(c, ChunkAt)] == [
        index for part in parts for index, record in enumerate(part) if isinstance(record, Chunk)
    ]
    one.close(wait=True)


def test_what_a_large_flush_stored_before_it_failed_is_not_stored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.staging.SEGMENT_RECORDS", 2)
    store, told = MemoryStore(), []
    one = stager(FaultyStore(store, [PASS, FULL]), on_staged=told.append)
    table, calls = table_of(3)
    for i, call in enumerate(calls):
        call.append([i], None, V0)
    assert isinstance(flush(one, table), StoreFull)
    assert len(told) == 1 and one.counters.backlog_records == 4 and not one.busy
    assert flush(one, table) is None
    assert said([r for part in records_in(store) for r in part]) == [
        row for i in range(3) for row in (("Opened", 0, []), ("Chunk", 0, [i]))
    ]
    assert told == one.take_staged() and [staged.flush for staged in told] == [1, 3, 4]
    one.close(wait=True)


def test_whoever_waits_is_told_after_the_segment_is_stored() -> None:
    store = MemoryStore()
    told: list[Staged] = []

    def on_staged(staged: Staged) -> None:
        store.get(staged.info.key)
        told.append(staged)

    one = stager(store, on_staged=on_staged)
    table, (call,) = table_of()
    call.append([1], None, V0)
    flush(one, table)
    assert told == one.take_staged() != []
    one.close(wait=True)


def test_c10_incarnations_never_share_a_name() -> None:
    store = MemoryStore()
    entropy = SeededEntropy("all")
    writers = [Stager(store, PlainSegments(), entropy, epoch=1, worker="w0") for _ in range(5)]
    table, calls = table_of(5)
    for one, call in zip(writers, calls, strict=True):
        call.append([1], None, V0)
        assert flush(one, table) is None
        one.close(wait=True)
    assert len({one.writer for one in writers}) == 5 == len(store.list("seg/"))


def test_coordinates_say_which_model_call_it_is_and_after_whose_answer() -> None:
    """What the ledger has of a lineage comes from here alone."""
    parent = name("parent")
    asked = replace(request("r"), extra=Lineage(2, parent).as_extra())
    record = Opened(call_id=name("r"), attempt=0, request=asked)
    (at,) = coordinates_of([record], "seg/e000001/w0.1a2b3c4d/00000001-00000000-00000000.arrow").others.values()
    assert isinstance(at, OpenedAt) and (at.identity.model_call, at.identity.parent) == (2, parent)
