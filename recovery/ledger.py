"""Which chunks, in order, make up each call: the durable, token-free lineage of the job.

Owns: the state of every call, the rules by which a stored record extends it, and what changed since the last
published ledger object.
Does not know: tokens, the store, how a row is checked and made (ledger_rows.py) or encoded (ports.LedgerCodec), what is
said again in which object (ledger_writer.py), when a snapshot is taken.

Invariants:
1. The chunks of a call start at 0, are contiguous, and end at `n_tokens`.
2. A record extends a call only at the call's current attempt and exactly at its end; anything else is rejected with
   its reason and changes nothing.
3. An ended call never changes again, except to be dropped; where its records lie may change (`move`).
4. What published objects say in order is this ledger: `rows()` since the last `published()` loses nothing, and a
   publication that failed is contained in the next one.
5. The counts are those of the entries, at every moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from recovery.call_numbers import CallNumbers
from recovery.coordinates import ChunkAt, Coordinates, EndedAt, OpenedAt, StoredAt
from recovery.errors import Damaged
from recovery.ledger_columns import PACKED, ChunkRefs, LedgerRows, Names, unpacked
from recovery.ledger_rows import Changes, Entry, merge, rows_of
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

    def __init__(self, names: Names | None = None) -> None:
        self.names = names or Names()
        self._entries: dict[CallId, Entry] = {}
        self._changes = Changes()
        self._unsettled: set[CallId] = set()
        self.call_numbers = CallNumbers()
        self.segments = SegmentTable(self.names)
        self._n_ended = self._n_tokens = self._n_chunks = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, call_id: CallId) -> Entry | None:
        return self._entries.get(call_id)

    def segment(self, key: str) -> SegmentInfo:
        return self.segments[key]

    def knows_segment(self, key: str) -> bool:
        return self.segments.is_in_use(key)

    @property
    def n_chunks(self) -> int:
        return self._n_chunks

    def segments_in_use(self) -> set[str]:
        return self.segments.in_use()

    def excerpt(self, call_ids: Iterable[CallId]) -> Ledger:
        """Copies of these calls (of those that are known), for somebody who reads while this ledger goes on."""
        part = Ledger(Names(self.names))
        rows = rows_of(self._entries, Changes(), filter(self._entries.__contains__, call_ids), self.names, {})
        part.merge({"segments": {number: self.segments.info(number) for number in rows.segments()}}, rows)
        part.settle()
        return part

    def counts(self) -> Counts:
        return Counts(
            calls=len(self._entries),
            open=len(self._entries) - self._n_ended,
            ended=self._n_ended,
            tokens=self._n_tokens,
            chunks=self._n_chunks,
            segments=len(self.segments),
            nbytes=self.segments.nbytes_in_use(),
        )

    # ---- records extend calls -------------------------------------------------------------------------------

    def describe(self, info: SegmentInfo) -> None:
        """Make a segment known right before its coordinates are applied."""
        self.segments.describe(info)

    def apply(self, at: Coordinates) -> str:
        """Extend a call by one stored record. Returns "" or the reason why it does not extend the ledger."""
        match at:
            case OpenedAt():
                return self._open(at)
            case ChunkAt():
                return self._extend(at)
            case EndedAt():
                return self._end(at)

    def apply_all(self, stored: StoredAt) -> tuple[list[CallId], Counter[str]]:
        """Apply all records of a segment in order. Returns whose end was taken, and how many were not, by reason."""
        ended: list[CallId] = []
        rejected: Counter[str] = Counter()
        entries, changed, others = self._entries, self._changes.kept, stored.others
        number, packed, size = self.names.number(stored.segment), stored.packed(self.names), PACKED.itemsize
        rows = zip(
            stored.call_ids, stored.attempts.tolist(), stored.starts.tolist(), stored.n_tokens.tolist(), strict=True
        )
        n_chunks = 0
        for row, (call_id, attempt, start, n_tokens) in enumerate(rows):
            if row in others:
                self.segments.refer_some(number, n_chunks)  # what follows may let go of them
                n_chunks, at = 0, others[row]
                if reason := self.apply(at):
                    rejected[reason] += 1
                elif isinstance(at, EndedAt):
                    ended.append(call_id)
                continue
            entry = entries.get(call_id)
            if entry is None or entry.state != OPEN or entry.attempt != attempt or entry.n_tokens != start:
                rejected[self.apply(stored[row])] += 1
                continue
            chunks = entry.chunks.packed
            if call_id not in changed:
                changed[call_id] = len(chunks) // size
            chunks += packed[row * size : (row + 1) * size]
            entry.n_tokens = start + n_tokens
            self._n_tokens += n_tokens
            self._n_chunks += 1
            n_chunks += 1
        self.segments.refer_some(number, n_chunks)
        return ended, rejected

    def _open(self, at: OpenedAt) -> str:
        entry = self._entries.get(at.call_id)
        if entry is None:
            chunks = ChunkRefs(self.names, bytearray())
            number = self.call_numbers.take(at.call_id)
            self._entries[at.call_id] = Entry(at.call_id, at.attempt, at.identity, chunks, number=number)
            self.segments.refer(self.names.number(at.identity.opened.segment))
            self._changes.begin(at.call_id)
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
        self._changes.change(entry)
        entry.chunks.append(at.chunk)
        entry.n_tokens = at.chunk.stop
        self._n_tokens += at.chunk.n_tokens
        self._n_chunks += 1
        self.segments.refer(self.names.number(at.chunk.at.segment))
        return ""

    def _end(self, at: EndedAt) -> str:
        entry, reason = self._open_entry(at.call_id, at.attempt)
        if entry is None:
            return reason
        if at.n_tokens != entry.n_tokens:
            return f"the call is said to end after {at.n_tokens} tokens and has {entry.n_tokens}"
        self._changes.change(entry)
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
        for entry in filter(None, map(self._entries.get, self._changes.kept)):
            entry.history = tuple(replace(e, snapshot=now) if e.snapshot == before else e for e in entry.history)

    def finish(self, call_id: CallId, finish_reason: str, stop_reason: int | str | None) -> None:
        """End an open call whose tokens already are a whole answer."""
        entry = self._entries[call_id]
        reason = self._end(EndedAt(call_id, entry.attempt, entry.n_tokens, finish_reason, stop_reason))
        assert not reason, reason

    def retract(self, segment: str, call_ids: Iterable[CallId]) -> None:
        """A stored segment turned out bad: each of these calls is cut back to what lies before it."""
        number = self.names.number(segment)
        for call_id in call_ids:
            entry = self._entries.get(call_id)
            if entry is None:
                continue
            if entry.identity.opened.segment == segment:
                self.drop(call_id)
                continue
            bad = np.flatnonzero(unpacked(entry.chunks.after(0))["segment"] == number)
            keep = int(bad[0]) if bad.size else len(entry.chunks)
            self._changes.cut(entry, keep)
            self._keep_first(entry, keep)
            if entry.state == ENDED:
                self._n_ended -= 1
                entry.state, entry.ended = OPEN, None

    def move(self, call_id: CallId, old: Sequence[ChunkRef], new: Sequence[ChunkRef]) -> str:
        """The tokens of the chunks `old`, which follow one another, lie in `new` now. Returns the reason if not."""
        entry = self._entries.get(call_id)
        if entry is None:
            return "the call is unknown"
        first = int(np.searchsorted(unpacked(entry.chunks.after(0))["start"], old[0].start))
        if entry.chunks[first : first + len(old)] != list(old):
            return "the call has other chunks by now"
        assert (new[0].start, new[-1].stop) == (old[0].start, old[-1].stop)
        assert all(one.stop == other.start for one, other in pairwise(new))
        self._changes.cut(entry, first)
        for chunk in new:
            self.segments.refer(self.names.number(chunk.at.segment))
        for chunk in old:
            self.segments.unrefer(self.names.number(chunk.at.segment))
        entry.chunks.splice(first, len(old), new)
        self._n_chunks += len(new) - len(old)
        return ""

    def move_request(self, call_id: CallId, old: RecordRef, new: RecordRef) -> str:
        """The request of a call lies elsewhere now. Returns the reason if not."""
        entry = self._entries.get(call_id)
        if entry is None or entry.identity.opened != old:
            return "the call was opened elsewhere"
        self._changes.change(entry)
        self._changes.identities.add(call_id)
        self.segments.refer(self.names.number(new.segment))
        self.segments.unrefer(self.names.number(old.segment))
        entry.identity = entry.identity._replace(opened=new)
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
        """A call of another ledger, with its records where these say that they lie; their segments are described."""
        found = [self._open(OpenedAt(entry.call_id, entry.attempt, identity))]
        found += [self._extend(ChunkAt(entry.call_id, entry.attempt, chunk)) for chunk in chunks]
        if entry.ended is not None:
            found.append(self._end(EndedAt(entry.call_id, entry.attempt, entry.n_tokens, *entry.ended)))
        assert not any(found), found
        self._entries[entry.call_id].history = entry.history

    def drop(self, call_id: CallId) -> None:
        """Forget a call that nobody will ask for again."""
        entry = self._entries[call_id]
        self._changes.cut(entry, 0)
        self._keep_first(entry, 0)
        self.segments.unrefer(self.names.number(entry.identity.opened.segment))
        self._n_ended -= entry.state == ENDED
        self.call_numbers.drop(call_id, entry.number)
        del self._entries[call_id]

    def _begin_again(self, entry: Entry, attempt: int) -> None:
        self._changes.cut(entry, 0)
        self._keep_first(entry, 0)
        entry.attempt = attempt

    def _keep_first(self, entry: Entry, kept: int) -> None:
        """Keep only the first `kept` chunks."""
        gone = unpacked(entry.chunks.after(kept))
        self.segments.unrefer_all(gone)
        self._n_tokens -= int(gone["n_tokens"].sum())
        self._n_chunks -= len(gone)
        entry.chunks.cut(kept)
        entry.n_tokens = entry.chunks.stop

    def _note(self, entry: Entry, event: Restore) -> None:
        """Add to the history; a resume that got nowhere before the next one is not worth two lines."""
        self._changes.change(entry)
        self._changes.histories.add(entry.call_id)
        before = entry.history
        if before and isinstance(event, Resumed) and isinstance(before[-1], Resumed) and before[-1].at == event.at:
            before = before[:-1]
        entry.history = (*before, event)

    # ---- ledger objects ----------------------------------------------------------------------------------------

    def rows(self, whole: Iterable[CallId] = ()) -> LedgerRows:
        """Rows for what changed since the last publication, and everything about the calls in `whole`."""
        return rows_of(self._entries, self._changes, whole, self.names, self.call_numbers.dropped)

    def published(self) -> None:
        """What `rows()` gave is part of a published snapshot now."""
        self._changes.clear()
        self.call_numbers.published()
        self.segments.published()

    @classmethod
    def from_objects(cls, objects: Iterable[tuple[Mapping[str, Any], Iterable[LedgerRow]]]) -> Ledger:
        """The objects of a ledger, oldest first. Raises Damaged, naming the call, where invariant 1 does not hold."""
        ledger: Ledger | None = None
        for header, rows in objects:
            if ledger is None:
                ledger = cls(rows.names if isinstance(rows, LedgerRows) else None)
            ledger.merge(header, rows)
        if ledger is None:
            return cls()
        ledger.settle()
        ledger.names.calls.clear()
        return ledger

    def merge(self, header: Mapping[str, Any], rows: Iterable[LedgerRow]) -> None:
        """Apply one more object; before anything else is asked, `settle`. Raises Damaged."""
        for number, info in header["segments"].items():
            try:
                self.names.bind(info.key, number)
            except ValueError as error:
                raise Damaged(str(error)) from error
            self.segments.describe(info)
        self.names.reserve(header.get("numbered", 0))
        self.call_numbers.reserve(header.get("calls_numbered", 0))
        if isinstance(rows, LedgerRows):
            rows.resolve()
        merge(self._entries, LedgerRows.of(rows, self.names), self._unsettled)

    def settle(self) -> None:
        """Count what was merged. Raises Damaged unless the objects so far say everything."""
        for call_id in self._unsettled:
            raise Damaged(f"call {call_id.hex()}: it is changed, and no object of this ledger says it whole")
        entries = self._entries.values()
        chunks = unpacked(b"".join([entry.chunks.packed for entry in entries]))
        opened_in = (self.names.number(entry.identity.opened.segment) for entry in entries)
        self.segments.recount(chunks, opened_in)
        if missing := self.segments.undescribed():
            key = self.names.keys.get(min(missing), f"number {min(missing)}")
            call_id = next(entry.call_id for entry in entries if missing & entry.segments())
            raise Damaged(f"call {call_id.hex()}: segment {key} is not described")
        self._n_ended = sum(entry.state == ENDED for entry in entries)
        self._n_tokens = int(chunks["n_tokens"].sum(dtype="u8"))
        self._n_chunks = len(chunks)
