"""What is worth writing again: many small pieces of a call, segments of which little is left.

Owns: the choice of what one round of compaction moves, and how chunks become one.
Does not know: the store (compactor.py reads and writes), when a round is due, the other snapshots.

A piece of a call is what lies of it, without a gap, in one segment. Each flush adds one. Of an open call the newest
pieces are joined as soon as there are PIECES of them, together with each older one that is no larger than all that is
newer. What is left is then fewer than PIECES pieces, and before them pieces each of which is larger than all newer ones
together: a call of n tokens lies in fewer than PIECES + log2(n) segments. A token is written again 1 + log2(n) times at
most: from the second time on its piece at least doubles.

Invariants:
1. What is chosen is in the ledger, and a round reads no more than it was allowed to.
2. Joined chunks hold the same tokens, logprobs, mask, versions and wide columns at the same positions. Joined are
   neighbours of one version that have the same columns.
3. Pieces of one call that are chosen and follow one another become one piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import numpy as np

from recovery.ledger import Entry, Ledger
from recovery.ledger_columns import PackedChunks, unpacked
from recovery.model import (
    COLUMN_BYTES_PER_CHUNK_MAX,
    MAX_TOKENS_PER_CHUNK,
    OPEN,
    CallId,
    Chunk,
    ChunkRef,
    RecordRef,
    SegmentInfo,
)

PIECES = 32
"""Of one open call. Most answers end before they have so many and are never written twice."""

LIVE_SHARE = 0.3
"""A segment with a smaller share of records in use is emptied: with it a third of what is stored may be garbage, and
a quarter is written again (measured for 512 calls of 2,000 tokens)."""

SMALL_RECORDS = 64
"""A segment of ended calls alone with fewer records in use is small: less than one batch."""

MOST_SPARSE = 32
"""So many sparse or small segments may lie there before a round empties them."""

ROUND_NBYTES = 16 << 20
"""Stored bytes that a round reads: some four million tokens, fifty megabytes in memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the constants above say; smaller in tests."""

    pieces: int = PIECES
    live_share: float = LIVE_SHARE
    small_records: int = SMALL_RECORDS
    most_sparse: int = MOST_SPARSE
    round_nbytes: int = ROUND_NBYTES


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks of one call that follow one another, or its request, or both; `attempt` is that of the call."""

    call_id: CallId
    rollout: str
    request_digest: bytes
    chunks: tuple[ChunkRef, ...]
    opened: RecordRef | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What is to be moved, and the segments that it lies in."""

    parts: tuple[Part, ...]
    segments: Mapping[str, SegmentInfo]

    def wanted(self) -> dict[str, set[int]]:
        """Indexes of records, by segment."""
        found: dict[str, set[int]] = defaultdict(set)
        for part in self.parts:
            for at in (*(chunk.at for chunk in part.chunks), *((part.opened,) if part.opened else ())):
                found[at.segment].add(at.index)
        return dict(found)


@dataclass(slots=True)
class _Chosen:
    """What is chosen of one call: indexes of its chunks, and whether its request goes too."""

    entry: Entry
    chunks: set[int] = field(default_factory=set)
    request: bool = False


def plan(ledger: Ledger, limits: Limits, round_nbytes: int, bad: Collection[str] = ()) -> Round | None:
    """The next round, None if nothing is worth one. `bad`: segments that did not read back are left alone."""
    chosen: dict[CallId, _Chosen] = {}
    budget = _Budget(ledger, round_nbytes)
    for entry, first in _long_calls(ledger, limits.pieces):
        chunks = entry.chunks[first:]
        if all(chunk.at.segment not in bad for chunk in chunks) and budget.takes(chunk.at for chunk in chunks):
            chosen[entry.call_id] = _Chosen(entry, set(range(first, len(entry.chunks))))
    victims = {key for key in _sparse(ledger, limits) if key not in bad and budget.takes_whole(key)}
    if victims:
        for entry, index in _chunks_in(ledger, victims):
            chosen.setdefault(entry.call_id, _Chosen(entry)).chunks.add(index)
        for entry in ledger:
            if entry.identity.opened.segment in victims:
                chosen.setdefault(entry.call_id, _Chosen(entry)).request = True
    parts = tuple(part for one in chosen.values() for part in _parts(one))
    if not parts:
        return None
    segments = {at.segment for part in parts for at in (*(c.at for c in part.chunks), *filter(None, [part.opened]))}
    return Round(parts, {key: ledger.segment(key) for key in sorted(segments)})


def window(chunks: PackedChunks, pieces: int) -> int | None:
    """Index of the first of the newest chunks that are to be joined; None if they are too few pieces."""
    if len(chunks) < pieces:
        return None
    firsts = np.flatnonzero(np.append(True, np.diff(chunks["segment"]) != 0))
    sizes = np.add.reduceat(chunks["n_tokens"].astype(np.int64), firsts)
    newer = sizes.sum() - np.cumsum(sizes)
    oldest = int(np.argmax(np.append(sizes[:-1] <= newer[:-1], True)))
    return int(firsts[oldest]) if len(sizes) - oldest >= pieces else None


def _long_calls(ledger: Ledger, pieces: int) -> list[tuple[Entry, int]]:
    """Open calls in too many pieces, those of the most chunks first, each with the first chunk to be joined."""
    found = []
    for entry in ledger:
        if entry.state == OPEN and len(entry.chunks) >= pieces:
            first = window(unpacked(entry.chunks.after(0)), pieces)
            if first is not None:
                found.append((entry, first))
    return sorted(found, key=lambda item: item[1] - len(item[0].chunks))


def _sparse(ledger: Ledger, limits: Limits) -> list[str]:
    """Segments to empty, in the order of their keys; none as long as there are few."""
    open_calls = [entry for entry in ledger if entry.state == OPEN]
    active = {entry.identity.opened.segment for entry in open_calls}
    numbers = np.unique(unpacked(b"".join(entry.chunks.after(0) for entry in open_calls))["segment"])
    active |= {ledger.names.keys[number] for number in numbers.tolist()}
    found = []
    for key, n in ledger.segments.references():
        sparse = n < limits.live_share * ledger.segment(key).n_records
        if sparse or (n < limits.small_records and key not in active):
            found.append(key)
    return sorted(found) if len(found) >= limits.most_sparse else []


def _chunks_in(ledger: Ledger, segments: Collection[str]) -> Iterator[tuple[Entry, int]]:
    """Every chunk that lies in one of these segments, as (call, index)."""
    entries = list(ledger)
    bounds = np.cumsum([len(entry.chunks) for entry in entries])
    numbers = [ledger.names.number(key) for key in segments]
    packed = unpacked(b"".join(entry.chunks.after(0) for entry in entries))
    for at in np.flatnonzero(np.isin(packed["segment"], numbers)).tolist():
        row = int(np.searchsorted(bounds, at, side="right"))
        yield entries[row], at - (int(bounds[row - 1]) if row else 0)


def _parts(one: _Chosen) -> Iterator[Part]:
    """Runs of chosen chunks; the request goes with the first."""
    entry = one.entry
    runs: list[list[ChunkRef]] = []
    previous = -2
    for i in sorted(one.chunks):
        if i != previous + 1:
            runs.append([])
        runs[-1].append(entry.chunks[i])
        previous = i
    opened = entry.identity.opened if one.request else None
    for run in runs or [[]]:
        yield Part(entry.call_id, entry.identity.rollout, entry.identity.request_digest, tuple(run), opened)
        opened = None


class _Budget:
    """How much a round reads: whole batches, each counted once."""

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self._ledger = ledger
        self._left = nbytes
        self._taken: set[tuple[str, int]] = set()

    def takes(self, records: Iterable[RecordRef]) -> bool:
        """Take the batches of these records, if they still fit."""
        return self._take({(at.segment, batch_of(self._ledger.segment(at.segment), at.index)) for at in records})

    def takes_whole(self, key: str) -> bool:
        return self._take({(key, batch) for batch in range(len(self._ledger.segment(key).batches))})

    def _take(self, batches: set[tuple[str, int]]) -> bool:
        fresh = batches - self._taken
        nbytes = sum(self._ledger.segment(key).batches[batch].length for key, batch in fresh)
        if nbytes > self._left:
            return False
        self._left -= nbytes
        self._taken |= fresh
        return True


def batch_of(info: SegmentInfo, index: int) -> int:
    """Which batch of a segment holds its record `index`. A segment has batches of one size but for the last."""
    for batch, end in enumerate(accumulate(b.n_records for b in info.batches)):
        if index < end:
            return batch
    return len(info.batches) - 1


def joined(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Chunks of one call that follow one another, as few as can be (invariant 2)."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups and _goes_on(groups[-1], chunk):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [_one(group) for group in groups]


def _goes_on(group: list[Chunk], chunk: Chunk) -> bool:
    last = group[-1]
    n = chunk.stop - group[0].start
    wide = chunk.wide()
    return (
        (last.version, last.stop, last.logprobs is None) == (chunk.version, chunk.start, chunk.logprobs is None)
        and last.wide() == wide
        and n <= MAX_TOKENS_PER_CHUNK
        and n * sum(column.row_nbytes for column in wide) <= COLUMN_BYTES_PER_CHUNK_MAX
    )


def _one(group: list[Chunk]) -> Chunk:
    if len(group) == 1:
        return group[0]
    logprobs = [chunk.logprobs for chunk in group if chunk.logprobs is not None]
    return Chunk(
        call_id=group[0].call_id,
        attempt=max(map(attrgetter("attempt"), group)),
        start=group[0].start,
        token_ids=np.concatenate([chunk.token_ids for chunk in group]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        mask=np.concatenate([chunk.mask for chunk in group]),
        version=group[0].version,
        columns={name: np.concatenate([chunk.columns[name] for chunk in group]) for name in group[0].columns},
    )
