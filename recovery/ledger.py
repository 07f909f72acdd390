"""Which chunks, in order, make up each call: the durable, token-free lineage of the job.

Owns: the state of every call, the rules by which a stored record extends it, and what changed since the last
published ledger object.
Does not know: tokens, the store, how a row is checked and made (ledger_rows.py) or encoded (ports.LedgerCodec), when a
snapshot is taken.

Invariants:
1. The chunks of a call start at 0, are contiguous, and end at `n_tokens`.
2. A record extends a call only at the call's current attempt and exactly at its end; anything else is rejected with
   its reason and changes nothing.
3. An ended call never changes again, except to be dropped; where its records lie may change (`move`).
4. base + deltas in order = this ledger: `delta()` since the last `published()` loses nothing, and a publication that
   failed is contained in the next delta.
5. The counts are those of the entries, at every moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from recovery.ledger_rows import Change, Entry, mentioned, merged, row_of
from recovery.model import (
    ENDED,
    OPEN,
    CallId,
    ChunkRef,
    Identity,
    LedgerRow,
    RecordRef,
    Restarted,
    Restore,
    Resumed,
    SegmentInfo,
)
from recovery.segment_table import SegmentTable

__all__ = ["ChunkAt", "Coordinates", "Counts", "EndedAt", "Entry", "Ledger", "OpenedAt"]


@dataclass(frozen=True, slots=True)
class OpenedAt:
    """Coordinates of an `Opened` record."""

    call_id: CallId
    attempt: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class ChunkAt:
    """Coordinates of a chunk."""

    call_id: CallId
    attempt: int
    chunk: ChunkRef


@dataclass(frozen=True, slots=True)
class EndedAt:
    """An `Ended` record; it is small enough to be its own coordinates."""

    call_id: CallId
    attempt: int
    n_tokens: int
    finish_reason: str
    stop_reason: int | str | None


_EVERYTHING = Change(0, identity=True, history=True)

Coordinates = OpenedAt | ChunkAt | EndedAt


@dataclass(frozen=True, slots=True)
class Counts:
    """Figures over the whole ledger, for the log entry and for people."""

    calls: int
    open: int
    ended: int
    tokens: int
    chunks: int
    segments: int
    nbytes: int


class Ledger:
    """All calls of a job, as far as they are stored."""

    def __init__(self) -> None:
        self._entries: dict[CallId, Entry] = {}
        self._changes: dict[CallId, Change] = {}
        self._segments = SegmentTable()
        self._n_ended = self._n_tokens = self._n_chunks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, call_id: CallId) -> Entry | None:
        return self._entries.get(call_id)

    def segment(self, key: str) -> SegmentInfo:
        return self._segments[key]

    def knows_segment(self, key: str) -> bool:
        return self._segments.is_in_use(key)

    @property
    def n_changed(self) -> int:
        return len(self._changes)

    def segments_in_use(self) -> set[str]:
        return self._segments.in_use()

    def excerpt(self, call_ids: Iterable[CallId]) -> Ledger:
        """Copies of these calls (of those that are known), for somebody who reads while this ledger goes on."""
        part = Ledger()
        for entry in filter(None, map(self._entries.get, call_ids)):
            for at in (entry.identity.opened, *(chunk.at for chunk in entry.chunks)):
                part.describe(self._segments[at.segment])
            part._merge(row_of(entry.call_id, entry, _EVERYTHING))
        return part

    def counts(self) -> Counts:
        return Counts(
            calls=len(self._entries),
            open=len(self._entries) - self._n_ended,
            ended=self._n_ended,
            tokens=self._n_tokens,
            chunks=self._n_chunks,
            segments=len(self._segments.in_use()),
            nbytes=self._segments.nbytes_in_use(),
        )

    # ---- records extend calls -------------------------------------------------------------------------------

    def describe(self, info: SegmentInfo) -> None:
        """Make a segment known right before its coordinates are applied."""
        self._segments.describe(info)

    def apply(self, at: Coordinates) -> str:
        """Extend a call by one stored record. Returns "" or the reason why it does not extend the ledger."""
        match at:
            case OpenedAt():
                return self._open(at)
            case ChunkAt():
                return self._extend(at)
            case EndedAt():
                return self._end(at)

    def _open(self, at: OpenedAt) -> str:
        entry = self._entries.get(at.call_id)
        if entry is None:
            self._entries[at.call_id] = Entry(at.call_id, at.attempt, at.identity)
            self._segments.refer(at.identity.opened.segment)
            self._changes[at.call_id] = Change(0, identity=True, history=True)
            return ""
        if entry.state != OPEN:
            return "the call has ended"
        if at.attempt <= entry.attempt:
            return f"attempt {at.attempt} is not newer than the call's attempt {entry.attempt}"
        self._begin_again(entry, at.attempt)
        return ""

    def _extend(self, at: ChunkAt) -> str:
        entry, reason = self._open_entry(at.call_id, at.attempt)
        if entry is None:
            return reason
        if at.chunk.start != entry.n_tokens:
            return f"the chunk starts at {at.chunk.start}, the call ends at {entry.n_tokens}"
        self._change(entry)
        entry.chunks.append(at.chunk)
        entry.n_tokens = at.chunk.stop
        self._n_tokens += at.chunk.n_tokens
        self._n_chunks += 1
        self._segments.refer(at.chunk.at.segment)
        return ""

    def _end(self, at: EndedAt) -> str:
        entry, reason = self._open_entry(at.call_id, at.attempt)
        if entry is None:
            return reason
        if at.n_tokens != entry.n_tokens:
            return f"the call is said to end after {at.n_tokens} tokens and has {entry.n_tokens}"
        self._change(entry)
        entry.state = ENDED
        entry.ended = (at.finish_reason, at.stop_reason)
        self._n_ended += 1
        return ""

    def _open_entry(self, call_id: CallId, attempt: int) -> tuple[Entry | None, str]:
        entry = self._entries.get(call_id)
        if entry is None:
            return None, "the call is unknown"
        if entry.state != OPEN:
            return None, "the call has ended"
        if attempt != entry.attempt:
            return None, f"the record is of attempt {attempt}, the call is at attempt {entry.attempt}"
        return entry, ""

    # ---- what restores and retention do ------------------------------------------------------------------------

    def resume(self, call_id: CallId, snapshot: int, exactness: str) -> None:
        """A restore carries an open call on: its next records come under a new attempt."""
        entry = self._entries[call_id]
        self._note(entry, Resumed(entry.n_tokens, snapshot, exactness))
        entry.attempt += 1

    def restart(self, call_id: CallId, snapshot: int, reason: str) -> None:
        """A restore throws an open call's tokens away and begins it again."""
        entry = self._entries[call_id]
        if entry.n_tokens:
            self._note(entry, Restarted(entry.n_tokens, snapshot, reason))
        self._begin_again(entry, entry.attempt + 1)

    def renumber(self, before: int, now: int) -> None:
        """What was noted as done by snapshot `before` since the last publication is done by `now`."""
        for entry in filter(None, map(self._entries.get, self._changes)):
            entry.history = tuple(replace(e, snapshot=now) if e.snapshot == before else e for e in entry.history)

    def finish(self, call_id: CallId, finish_reason: str, stop_reason: int | str | None) -> None:
        """End an open call whose tokens already are a whole answer."""
        entry = self._entries[call_id]
        reason = self._end(EndedAt(call_id, entry.attempt, entry.n_tokens, finish_reason, stop_reason))
        assert not reason, reason

    def retract(self, segment: str, call_ids: Iterable[CallId]) -> None:
        """A stored segment turned out bad: each of these calls is cut back to what lies before it."""
        for call_id in call_ids:
            entry = self._entries.get(call_id)
            if entry is None:
                continue
            if entry.identity.opened.segment == segment:
                self.drop(call_id)
                continue
            keep = next((i for i, c in enumerate(entry.chunks) if c.at.segment == segment), len(entry.chunks))
            change = self._change(entry)
            change.kept = min(change.kept, keep)
            self._keep_first(entry, keep)
            if entry.state == ENDED:
                self._n_ended -= 1
                entry.state, entry.ended = OPEN, None

    def move(self, call_id: CallId, old: Sequence[ChunkRef], new: Sequence[ChunkRef]) -> str:
        """The tokens of the chunks `old`, which follow one another, lie in `new` now. Returns the reason if not."""
        entry = self._entries.get(call_id)
        if entry is None:
            return "the call is unknown"
        first = bisect_left(entry.chunks, old[0].start, key=lambda chunk: chunk.start)
        if entry.chunks[first : first + len(old)] != list(old):
            return "the call has other chunks by now"
        assert (new[0].start, new[-1].stop) == (old[0].start, old[-1].stop)
        assert all(one.stop == other.start for one, other in pairwise(new))
        change = self._change(entry)
        change.kept = min(change.kept, first)
        for chunk in new:
            self._segments.refer(chunk.at.segment)
        for chunk in old:
            self._segments.unrefer(chunk.at.segment)
        entry.chunks[first : first + len(old)] = new
        self._n_chunks += len(new) - len(old)
        return ""

    def move_request(self, call_id: CallId, old: RecordRef, new: RecordRef) -> str:
        """The request of a call lies elsewhere now. Returns the reason if not."""
        entry = self._entries.get(call_id)
        if entry is None or entry.identity.opened != old:
            return "the call was opened elsewhere"
        self._change(entry).identity = True
        self._segments.refer(new.segment)
        self._segments.unrefer(old.segment)
        entry.identity = replace(entry.identity, opened=new)
        return ""

    def move_segment(self, old: str, coordinates: Iterable[Coordinates]) -> None:
        """What the ledger has of segment `old` lies at `coordinates` now, record by record the same."""
        for at in coordinates:
            if isinstance(at, OpenedAt):
                self.move_request(at.call_id, replace(at.identity.opened, segment=old), at.identity.opened)
            elif isinstance(at, ChunkAt):
                before = replace(at.chunk, at=replace(at.chunk.at, segment=old))
                self.move(at.call_id, [before], [at.chunk])

    def take_over(self, entry: Entry, identity: Identity, chunks: Iterable[ChunkRef]) -> None:
        """A call of another ledger, or of this one before it was dropped, with its records where these say they lie.

        If they are fewer chunks than the call had, it is open. Their segments are described here by now.
        """
        found = [self._open(OpenedAt(entry.call_id, entry.attempt, identity))]
        found += [self._extend(ChunkAt(entry.call_id, entry.attempt, chunk)) for chunk in chunks]
        mine = self._entries[entry.call_id]
        if entry.ended is not None and mine.n_tokens == entry.n_tokens:
            found.append(self._end(EndedAt(entry.call_id, entry.attempt, entry.n_tokens, *entry.ended)))
        assert not any(found), found
        mine.history = entry.history

    def drop(self, call_id: CallId) -> None:
        """Forget a call that nobody will ask for again."""
        entry = self._entries[call_id]
        self._change(entry).kept = 0
        self._keep_first(entry, 0)
        self._segments.unrefer(entry.identity.opened.segment)
        self._n_ended -= entry.state == ENDED
        del self._entries[call_id]

    def _begin_again(self, entry: Entry, attempt: int) -> None:
        self._change(entry).kept = 0
        self._keep_first(entry, 0)
        entry.attempt = attempt

    def _keep_first(self, entry: Entry, kept: int) -> None:
        """Keep only the first `kept` chunks."""
        for chunk in entry.chunks[kept:]:
            self._segments.unrefer(chunk.at.segment)
            self._n_tokens -= chunk.n_tokens
            self._n_chunks -= 1
        del entry.chunks[kept:]
        entry.n_tokens = entry.chunks[-1].stop if entry.chunks else 0

    def _note(self, entry: Entry, event: Restore) -> None:
        """Add to the history; a resume that got nowhere before the next one is not worth two lines."""
        self._change(entry).history = True
        before = entry.history
        if before and isinstance(event, Resumed) and isinstance(before[-1], Resumed) and before[-1].at == event.at:
            before = before[:-1]
        entry.history = (*before, event)

    def _change(self, entry: Entry) -> Change:
        return self._changes.setdefault(entry.call_id, Change(len(entry.chunks)))

    # ---- bases and deltas --------------------------------------------------------------------------------------

    def delta(self) -> list[LedgerRow]:
        """Rows for what changed since the last publication."""
        return [row_of(call_id, self._entries.get(call_id), change) for call_id, change in self._changes.items()]

    def base(self) -> list[LedgerRow]:
        """Rows for everything."""
        return [row_of(entry.call_id, entry, _EVERYTHING) for entry in self]

    def segment_tables(self, rows: Iterable[LedgerRow], *, base: bool) -> tuple[list[SegmentInfo], list[str]]:
        """The segments that `rows` mention: those to describe, and those that ancestors described."""
        return self._segments.split(mentioned(rows), base=base)

    def published(self, described: Iterable[SegmentInfo], *, base: bool) -> None:
        """What `delta()` or `base()` gave is part of a published snapshot now."""
        self._changes.clear()
        self._segments.published(described, base=base)

    @classmethod
    def from_objects(cls, objects: Iterable[tuple[Mapping[str, Any], list[LedgerRow]]]) -> Ledger:
        """Base and deltas in order. Raises Damaged, naming the call, where invariant 1 does not hold."""
        ledger = cls()
        for header, rows in objects:
            for info in header["segments"]:
                ledger.describe(info)
            ledger._segments.published(header["segments"], base=False)
            for row in rows:
                ledger._merge(row)
        return ledger

    def _merge(self, row: LedgerRow) -> None:
        old = self._entries.get(row.call_id)
        entry = merged(old, row, self._segments)
        if old is not None:
            self._keep_first(old, row.kept)
            self._segments.unrefer(old.identity.opened.segment)
            self._n_ended -= old.state == ENDED
        if entry is None:
            self._entries.pop(row.call_id, None)
            return
        # In its old place: the order of the calls is that in which they were opened.
        self._entries[row.call_id] = entry
        for at in (entry.identity.opened, *(chunk.at for chunk in row.chunks)):
            self._segments.refer(at.segment)
        self._n_ended += entry.state == ENDED
        self._n_tokens += sum(chunk.n_tokens for chunk in row.chunks)
        self._n_chunks += len(row.chunks)
