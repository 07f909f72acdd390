"""recovery.read_ahead: what was expected is there when it is asked for, and nothing depends on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recovery import read_ahead
from recovery.errors import Damaged, DigestMismatch, ObjectMissing
from recovery.layout import segment_stem
from recovery.model import SegmentInfo
from recovery.ports import SegmentPart
from recovery.read_ahead import AHEAD, ReadAhead, divided
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore
from tests.fakes import chunk
from tests.plain_codecs import PlainSegments

DEADLINE_S = 120


def stored(store: MemoryStore, n_segments: int) -> list[SegmentInfo]:
    """Segments of three records each; the first token of a record is its number among all."""
    infos = []
    for number in range(n_segments):
        records = [chunk("a", at, [at]) for at in range(3 * number, 3 * number + 3)]
        segment = PlainSegments().encode(records, segment_stem(1, "w0.00000000", number + 1, "00000000"))
        store.put_new(segment.info.key, segment.data)
        infos.append(segment.info)
    return infos


def tokens(ahead: ReadAhead, infos: list[SegmentInfo]) -> list[list[int]]:
    """Of each segment, in the order in which they come, the tokens of its records."""
    return [
        [int(token) for records in segment.records(np.arange(3)) for token in records.token_ids]
        for _, segment in ahead.segments(infos)
    ]


def test_every_segment_comes_once_and_is_read_once() -> None:
    store = MemoryStore()
    infos = stored(store, 30)
    counting = CountingStore(store)
    with ReadAhead(counting, PlainSegments()) as ahead:
        ahead.expect(infos[12:14])
        found = tokens(ahead, infos)
    assert sorted(found) == [[3 * at, 3 * at + 1, 3 * at + 2] for at in range(30)]
    assert sorted(call.key for call in counting.log) == sorted(info.key for info in infos)


def test_what_is_expected_in_vain_is_let_go_of_whatever_is_wrong_with_it() -> None:
    store = MemoryStore()
    one, two, three = stored(store, 3)
    store.delete(one.key)
    with ReadAhead(store, PlainSegments()) as ahead:
        ahead.expect([one, replace(two, crc32c=1)])
        assert sorted(tokens(ahead, [two, three])) == [[3, 4, 5], [6, 7, 8]], "expected as another, and read anew"
    with ReadAhead(store, PlainSegments()) as ahead:
        ahead.expect([one])
    with ReadAhead(store, PlainSegments()) as ahead:
        ahead.expect([two, one])
        with pytest.raises(ObjectMissing):
            tokens(ahead, [one, two])
    with ReadAhead(store, PlainSegments()) as ahead, pytest.raises(DigestMismatch):
        tokens(ahead, [replace(two, crc32c=1)])


class Gate(PlainSegments):
    """Parts that are unpacked by no thread but the caller's before `opened`."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.caller = threading.get_ident()
        self.by_caller = 0

    def parts(self, data: bytes, info: SegmentInfo | None) -> list[SegmentPart]:
        return [replace(part, unpack=self._held(part.unpack)) for part in super().parts(data, info)]

    def _held(self, unpack: Callable[[], Any]) -> Callable[[], Any]:
        def held() -> Any:
            if threading.get_ident() == self.caller:
                self.by_caller += 1
            elif not self.opened.wait(DEADLINE_S):
                raise TimeoutError("nobody opened the gate")
            return unpack()

        return held


def test_who_waits_for_a_part_that_nobody_began_does_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "UNPACKERS_MAX", 1)
    store, gate = MemoryStore(), Gate()
    infos = stored(store, 4)
    with ReadAhead(store, gate) as ahead:
        segments = ahead.segments(infos)
        _, first = next(segments)
        _, second = next(segments)
        # The one thread is held by a part, of whichever segment was read first; no other part is ever begun by it.
        for part in second._parts[1:] + first._parts[1:]:
            assert part[1].result()(None).token_ids.shape == (1,)
        assert gate.by_caller == 4
        gate.opened.set()
        assert [len(list(segment.records(np.arange(3)))) for _, segment in segments] == [3, 3]


def test_no_more_is_begun_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    infos = stored(store, 3 * AHEAD)
    with ReadAhead(store, PlainSegments()) as ahead:
        ahead.expect(infos)
        assert len(ahead._begun) == AHEAD
        assert len(tokens(ahead, infos)) == len(infos)
    monkeypatch.setattr(read_ahead, "AHEAD_NBYTES", 2 * infos[0].nbytes)
    counting = CountingStore(store)
    with ReadAhead(counting, PlainSegments()) as ahead:
        ahead.expect(infos)
        assert len(ahead._begun) == 2
        next(ahead.segments(infos))
    assert counting.count("get") <= 2, "the third is begun when one of the two was handed out and another is asked for"
    monkeypatch.setattr(read_ahead, "AHEAD_NBYTES", 1)
    with ReadAhead(store, PlainSegments()) as ahead:
        assert len(tokens(ahead, infos)) == len(infos), "one at a time, however long"


def test_a_part_that_cannot_be_unpacked_is_told_where_it_is_asked_for() -> None:
    class Broken(PlainSegments):
        def parts(self, data: bytes, info: SegmentInfo | None) -> list[SegmentPart]:
            def broken() -> Any:
                raise Damaged("the third part is broken")

            return [*super().parts(data, info)[:2], SegmentPart(1, broken)]

    store = MemoryStore()
    (info,) = stored(store, 1)
    with ReadAhead(store, Broken()) as ahead:
        ((_, segment),) = ahead.segments([info])
        records = segment.records(np.arange(3))
        assert [next(records).token_ids.tolist() for _ in range(2)] == [[0], [1]]
        with pytest.raises(Damaged, match="the third part"):
            next(records)


def test_numbers_are_divided_among_parts() -> None:
    found = divided(np.array([7, 0, 3, 2, 9]), [3, 0, 4, 3])
    assert [part.tolist() for part in found] == [[0, 2], [], [0], [0, 2]]
    assert divided(np.array([], np.int64), []) == []


def test_what_is_unpacked_comes_before_what_takes_long() -> None:
    class Slow(MemoryStore):
        """The first segment comes when the others were taken."""

        def __init__(self) -> None:
            super().__init__()
            self.slow, self.taken = "", threading.Event()

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if key == self.slow and not self.taken.wait(DEADLINE_S):
                raise TimeoutError("the others were not taken first")
            return super().get(key, start, end)

    store = Slow()
    infos = stored(store, 5)
    store.slow = infos[0].key
    with ReadAhead(store, PlainSegments()) as ahead:
        ahead.expect(infos)
        for other in [work for info, work in ahead._begun if info.key != store.slow]:
            other.future.result(DEADLINE_S)
        found = []
        for info, _ in ahead.segments(infos):
            found.append(info)
            if len(found) == 4:
                store.taken.set()
        assert found[-1] == infos[0] and len(found) == 5
