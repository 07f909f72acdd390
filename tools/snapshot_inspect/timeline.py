"""When things happened: times of flushes, and the life of each call.

Owns: the estimate of a flush's time, and how a call's tokens fall into runs that are new, reused or regenerated.
Does not know: how a timeline is drawn.

A store holds no time but those of its log. A snapshot says up to which flush of each writer it accounts; between two
such points, time is taken to pass evenly from flush to flush.

Invariants:
1. Estimated times never run backwards along the flushes of one writer, and lie within the writer's epoch.
2. Every token of a call is in exactly one run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from recovery.layout import SegmentPosition, segment_position
from recovery.ledger import Entry
from recovery.model import ChunkRef, PolicyVersion, Restarted, Resumed

NEW, REUSED, REGENERATED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Span:
    """The time of an epoch in seconds: its claim, the last entry it wrote to the log, and when the next one claimed."""

    begin: float
    end: float
    limit: float = math.inf


class FlushTimes:
    """Estimates the time at which a flush was stored.

    `spans`: by epoch. `accounted`: (epoch, time, flush number by writer) of each snapshot whose ledger can be read.
    `keys`: the segments that will be asked for.
    """

    def __init__(
        self, spans: Mapping[int, Span], accounted: Iterable[tuple[int, float, Mapping[str, int]]], keys: Iterable[str]
    ) -> None:
        self._spans = spans
        points: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
        for epoch, at, flushed in accounted:
            for writer, flush in flushed.items():
                points[epoch, writer][flush] = min(at, points[epoch, writer].get(flush, math.inf))
        self._points = {where: _increasing(known) for where, known in points.items()}
        last: dict[tuple[int, str], int] = defaultdict(int)
        for position in filter(None, map(segment_position, keys)):
            last[position.epoch, position.writer] = max(position.flush, last[position.epoch, position.writer])
        for (epoch, writer), flush in last.items():
            if (epoch, writer) not in self._points:  # nothing is known but that the epoch ended some time
                self._points[epoch, writer] = [(flush, spans[epoch].end)] if epoch in spans else []

    def at(self, position: SegmentPosition, *, before: bool = False) -> float:
        """When that flush was stored, or with `before` the one before it (when its tokens began to be generated)."""
        span = self._spans.get(position.epoch, Span(0.0, 0.0))
        flush = position.flush - before
        known = [(0, span.begin), *self._points.get((position.epoch, position.writer), ())]
        right = min(bisect_right(known, (flush, math.inf)), len(known) - 1)
        if right == 0:
            return span.begin
        # Beyond the last point: as evenly as on the whole way to it, until the next epoch began.
        (f0, t0), (f1, t1) = known[right - 1], known[right]
        if flush > f1:
            f0, t0 = known[0]
        at = t0 + (t1 - t0) * (flush - f0) / max(1, f1 - f0)
        return min(max(at, span.begin), span.limit)


def _increasing(known: Mapping[int, float]) -> list[tuple[int, float]]:
    """Points in the order of flushes whose times do not run backwards."""
    points: list[tuple[int, float]] = []
    for flush in sorted(known):
        if not points or known[flush] >= points[-1][1]:
            points.append((flush, known[flush]))
    return points


@dataclass(slots=True)
class Run:
    """Tokens of one call that came one after the other: of one epoch, kind and version."""

    epoch: int
    begin: float
    end: float
    n_tokens: int
    kind: int
    version: PolicyVersion


@dataclass(slots=True)
class Life:
    """One call's time: from its request to its newest token."""

    begin: float
    end: float
    runs: list[Run] = field(default_factory=list)

    def count(self, kind: int) -> int:
        return sum(run.n_tokens for run in self.runs if run.kind == kind)


def life_of(entry: Entry, times: FlushTimes) -> Life:
    opened = segment_position(entry.identity.opened.segment)
    opened_at = times.at(opened) if opened is not None else 0.0
    life = Life(opened_at, opened_at)
    kept = max((event.at for event in entry.history if isinstance(event, Resumed)), default=0)
    again = max((event.at for event in entry.history if isinstance(event, Restarted)), default=0)
    if _restarted_last(entry):
        kept = 0
    for chunk in entry.chunks:
        position = segment_position(chunk.at.segment)
        if position is None:
            continue
        for start, stop, kind in _kinds(chunk, kept, again):
            share = (start - chunk.start) / chunk.n_tokens, (stop - chunk.start) / chunk.n_tokens
            t0, t1 = times.at(position, before=True), times.at(position)
            begin, end = (t0 + (t1 - t0) * part for part in share)
            last = life.runs[-1] if life.runs else None
            if last is not None and (last.epoch, last.kind, last.version) == (position.epoch, kind, chunk.version):
                last.end = end
                last.n_tokens += stop - start
            else:
                life.runs.append(Run(position.epoch, begin, end, stop - start, kind, chunk.version))
    if life.runs:
        life.begin = min(opened_at, life.runs[0].begin)
        life.end = max(life.runs[-1].end, opened_at)
    return life


def _restarted_last(entry: Entry) -> bool:
    """Whether what earlier resumes had kept was thrown away since."""
    return bool(entry.history) and isinstance(entry.history[-1], Restarted)


def _kinds(chunk: ChunkRef, kept: int, again: int) -> Iterator[tuple[int, int, int]]:
    """Parts of a chunk as (start, stop, kind)."""
    start = chunk.start
    for bound, kind in ((kept, REUSED), (again, REGENERATED), (chunk.stop, NEW)):
        stop = min(bound, chunk.stop)
        if stop > start:
            yield start, stop, kind
            start = stop
