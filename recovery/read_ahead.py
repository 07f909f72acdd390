"""Segments that other threads read and unpack while this one does something else.

Owns: the threads, how much is begun at a time, and in which order segments come.
Does not know: why a segment is expected, what is taken from it (gathering.py), how it is encoded (ports.SegmentPart).

Invariants:
1. The threads do what leaves the interpreter to others; records are made by who asks for them. Two threads that both
   make records only wait for each other.
2. At most AHEAD segments are begun and not yet handed out, and more than one only while they are not longer than
   AHEAD_NBYTES together.
3. What was expected and is not asked for is let go of, and what went wrong with it is nobody's concern.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np

from recovery.model import Array, SegmentInfo
from recovery.ports import ObjectStore, SegmentCodec
from recovery.records import Records

T = TypeVar("T")

READERS, UNPACKERS_MAX = 3, 3
"""Threads that wait for the store, and threads that compute: one less than there are processors, for who makes the
records computes too."""
AHEAD, AHEAD_NBYTES = 8, 64 << 20


class ReadAhead:
    """A context: when it is left its threads are gone. Raises what the store and the codec do, where it is asked."""

    def __init__(self, store: ObjectStore, codec: SegmentCodec) -> None:
        self._store = store
        self._codec = codec
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="reader")
        others = min(UNPACKERS_MAX, len(os.sched_getaffinity(0)) - 1)
        self._unpackers = ThreadPoolExecutor(max(1, others), thread_name_prefix="unpacker")
        self._begun: deque[tuple[SegmentInfo, _Work[list[_Part]]]] = deque()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._unpackers.shutdown(cancel_futures=True)

    def expect(self, infos: Iterable[SegmentInfo]) -> None:
        """Begin as many of these as may be, in order: `segments` will be asked for them, as it seems."""
        self._begin(deque(infos))

    def segments(self, infos: Iterable[SegmentInfo]) -> Iterator[tuple[SegmentInfo, Unpacked]]:
        """Each of these once, and next of those that are begun the one that is furthest on."""
        asked = {info.key: info for info in infos}
        for _ in range(len(self._begun)):
            info, work = self._begun.popleft()
            if asked.get(info.key) == info:
                del asked[info.key]
                self._begun.append((info, work))
            elif not work.future.cancel():
                work.future.add_done_callback(_let_go)
        waiting = deque(asked.values())
        while waiting or self._begun:
            self._begin(waiting)
            info, work = max(self._begun, key=lambda begun: _furtherance(begun[1].future))
            self._begun.remove((info, work))
            yield info, Unpacked(work.result())

    def _begin(self, waiting: deque[SegmentInfo]) -> None:
        nbytes = sum(info.nbytes for info, _ in self._begun)
        while waiting and len(self._begun) < AHEAD:
            nbytes += waiting[0].nbytes
            if self._begun and nbytes > AHEAD_NBYTES:
                break
            info = waiting.popleft()
            self._begun.append((info, _Work.begun(self._readers, partial(self._read, info))))

    def _read(self, info: SegmentInfo) -> list[_Part]:
        data = self._store.get(info.key, 0, info.nbytes + 1)
        return [(part.n_records, _Work.begun(self._unpackers, part.unpack)) for part in self._codec.parts(data, info)]


def _let_go(read: Future[list[_Part]]) -> None:
    if not read.cancelled() and read.exception() is None:
        for _, work in read.result():
            work.future.cancel()


def _furtherance(read: Future[list[_Part]]) -> float:
    """How much of a segment is unpacked, from 0 to 1; less than 0 if it is not even read."""
    if not read.done():
        return -1
    if read.cancelled() or read.exception() is not None:
        return 1  # there is nothing to wait for
    parts = read.result()
    return sum(work.future.done() for _, work in parts) / max(1, len(parts))


class Unpacked:
    """A segment, read: its parts are unpacked, or will be."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts

    def records(self, wanted: Array) -> Iterator[Records]:
        """All parts in order, to be asked for once. `wanted`: numbers of the records that will be used."""
        own = divided(wanted, [n_records for n_records, _ in self._parts])
        for (_, work), numbers in zip(self._parts, own, strict=True):
            yield work.result()(numbers)


@dataclass(frozen=True, slots=True)
class _Work(Generic[T]):
    """What a thread does, unless it is needed before one began."""

    do: Callable[[], T]
    future: Future[T]

    @classmethod
    def begun(cls, pool: ThreadPoolExecutor, do: Callable[[], T]) -> _Work[T]:
        return cls(do, pool.submit(do))

    def result(self) -> T:
        return self.do() if self.future.cancel() else self.future.result()


_Part = tuple[int, _Work[Callable[[Array | None], Records]]]


def divided(numbers: Array, lengths: list[int]) -> list[Array]:
    """Of parts of these lengths the numbers that lie in each, counted from its first."""
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    found = np.sort(numbers)
    cuts = np.searchsorted(found, bounds)
    return [found[begin:end] - first for begin, end, first in zip(cuts, cuts[1:], bounds, strict=False)]
