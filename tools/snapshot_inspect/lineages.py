"""Ledger objects of many snapshots, each read once and replayed once.

Owns: chains of bases and deltas, which snapshot stands where on which chain, what each refers to.
Does not know: whether what is referred to exists (verify.py), what is in a segment (segments.py).

Snapshots share their ledger objects: the chain of one is mostly the beginning of the next one's. A lineage is the
longest such chain; a snapshot is a position on it, and a replay passes through the ledger of every position.

Invariants:
1. An object is read and decoded once, whatever the number of snapshots above it.
2. Merging is that of recovery.ledger; what it refuses is wrong for this position and all later ones, not for those
   before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.ledger import Entry, Ledger
from recovery.model import BatchInfo, CallId, ChunkRef, Identity, LedgerRow, RecordRef, SegmentInfo
from recovery.ports import LedgerCodec, ObjectStore
from recovery.snapshots import MAX_DEPTH, LedgerObject, ObjectRef, Snapshot, get_object
from snapshot_inspect.findings import INCONSISTENT, Problem
from snapshot_inspect.statements import contradictions


class Replay(Ledger):
    """A ledger that grows by one ledger object after the other."""

    def extend(self, item: LedgerObject) -> None:
        """Raises Damaged, naming the call, if `item` does not continue what came before."""
        for info in item.header["segments"]:
            self.describe(info)
        for row in item.rows:
            self._merge(row)


@dataclass(frozen=True, slots=True)
class Use:
    """A record of a segment that a ledger refers to: a call's request (`chunk` is None) or a chunk of it."""

    call_id: CallId
    identity: Identity
    chunk: ChunkRef | None

    @property
    def place(self) -> RecordRef:
        return self.identity.opened if self.chunk is None else self.chunk.at

    @property
    def index(self) -> int:
        return self.place.index


def uses_of(entries: Iterable[Entry]) -> dict[str, list[Use]]:
    """What these calls refer to, by segment, in the order of the records there."""
    uses: dict[str, list[Use]] = defaultdict(list)
    for entry in entries:
        uses[entry.identity.opened.segment].append(Use(entry.call_id, entry.identity, None))
        for chunk in entry.chunks:
            uses[chunk.at.segment].append(Use(entry.call_id, entry.identity, chunk))
    for found in uses.values():
        found.sort(key=lambda use: use.index)
    return uses


@dataclass(slots=True)
class Lineage:
    """A base and its deltas; `snapshots` stand at positions of it."""

    objects: list[LedgerObject]
    snapshots: dict[int, list[Snapshot]] = field(default_factory=lambda: defaultdict(list))

    @property
    def length(self) -> int:
        """Up to the last position at which a snapshot stands."""
        return max(self.snapshots, default=-1) + 1


class Lineages:
    """Fed with snapshots, newest first, then replayed."""

    def __init__(self, store: ObjectStore, codec: LedgerCodec) -> None:
        self._store = store
        self._codec = codec
        self._read: dict[ObjectRef, LedgerObject | Problem] = {}
        self._place: dict[ObjectRef, tuple[Lineage, int]] = {}
        self._lineages: list[Lineage] = []
        self.segments: dict[str, SegmentInfo] = {}
        """Those that a snapshot needs."""
        self.uses: dict[str, dict[tuple[int, CallId, bytes], Use]] = defaultdict(dict)

    @property
    def n_objects(self) -> int:
        return sum(isinstance(item, LedgerObject) for item in self._read.values())

    @property
    def keys(self) -> set[str]:
        return {ref.key for ref in self._read}

    def add(self, snapshot: Snapshot) -> Problem | None:
        """Find the chain of a snapshot. Returns what is wrong with an object of it."""
        if snapshot.ledger not in self._place:
            chain = self._chain(snapshot.ledger)
            if isinstance(chain, Problem):
                return chain
            lineage = Lineage(chain)
            self._lineages.append(lineage)
            for position, item in enumerate(chain):
                self._place.setdefault(item.ref, (lineage, position))
        lineage, position = self._place[snapshot.ledger]
        lineage.snapshots[position].append(snapshot)
        return None

    def _chain(self, head: ObjectRef) -> list[LedgerObject] | Problem:
        chain: list[LedgerObject] = []
        ref: ObjectRef | None = head
        while ref is not None:
            item = self._object(ref)
            if isinstance(item, Problem):
                return item
            chain.append(item)
            if len(chain) > 4 * MAX_DEPTH:
                return Problem(head.key, INCONSISTENT, f"{head.key} has more than {4 * MAX_DEPTH} ancestors")
            ref = item.header["parent"]
        return chain[::-1]

    def _object(self, ref: ObjectRef) -> LedgerObject | Problem:
        if ref not in self._read:
            try:
                header, rows = self._codec.decode(get_object(self._store, ref))
                header["segments"] = [_segment(value) for value in header.get("segments", [])]
                parent = header.get("parent")
                header["parent"] = None if parent is None else ObjectRef.from_json(parent, ref.key)
                self._read[ref] = LedgerObject(ref, header, rows)
            except (Damaged, FormatNotUnderstood) as error:
                self._read[ref] = Problem.of(ref.key, error)
        return self._read[ref]

    def replay(self) -> Iterator[tuple[Snapshot, Problem]]:
        """Go through every lineage; fills `segments` and `uses`. Yields what is wrong, by snapshot."""
        for lineage in self._lineages:
            fresh: set[str] = set()
            for position, replay, problem in _positions(lineage):
                standing = lineage.snapshots.get(position, [])
                if problem is not None:
                    yield from ((snapshot, problem) for snapshot in standing)
                    continue
                item = lineage.objects[position]
                fresh.update(self._note(replay, item.rows))
                for snapshot in standing:
                    yield from ((snapshot, wrong) for wrong in contradictions(snapshot, replay.counts(), position))
                if standing:
                    needed = fresh & replay.segments_in_use()
                    self.segments.update((key, replay.segment(key)) for key in needed)
                    fresh -= needed

    def _note(self, replay: Replay, rows: list[LedgerRow]) -> Iterator[str]:
        """Remember what `rows` refer to. Yields the segments."""
        for row in rows:
            entry = replay.get(row.call_id)
            if entry is None:
                continue
            identity = entry.identity
            if row.identity is not None:
                at = identity.opened
                self.uses[at.segment][at.index, row.call_id, identity.request_digest] = Use(row.call_id, identity, None)
                yield at.segment
            for chunk in row.chunks:
                at = chunk.at
                self.uses[at.segment][at.index, row.call_id, chunk.digest] = Use(row.call_id, identity, chunk)
                yield at.segment

    def users(self, keys: set[str]) -> dict[str, set[int]]:
        """Which snapshots need each of these segments."""
        found: dict[str, set[int]] = defaultdict(set)
        for lineage in self._lineages if keys else []:
            for position, replay, problem in _positions(lineage):
                if problem is None and (standing := lineage.snapshots.get(position)):
                    for key in filter(replay.knows_segment, keys):
                        found[key].update(snapshot.id for snapshot in standing)
        return found

    def chain_keys(self, snapshot: Snapshot) -> set[str]:
        """Keys of the ledger objects of a snapshot, as far as they were read."""
        if snapshot.ledger not in self._place:
            return {snapshot.ledger.key}
        lineage, position = self._place[snapshot.ledger]
        return {item.ref.key for item in lineage.objects[: position + 1]}

    def accounted(self) -> Iterator[tuple[Snapshot, Mapping[str, int]]]:
        """Up to which flush of each writer every snapshot accounts, as its ledger says."""
        for lineage in self._lineages:
            for position, standing in lineage.snapshots.items():
                flushed = dict(lineage.objects[position].header.get("flushed", {}))
                yield from ((snapshot, flushed) for snapshot in standing)

    def ledger_of(self, snapshot: Snapshot) -> tuple[Ledger, Mapping[str, int]]:
        """The ledger of a snapshot that was found sound, and what it has accounted for."""
        lineage, position = self._place[snapshot.ledger]
        objects = lineage.objects[: position + 1]
        ledger = Ledger.from_objects((item.header, item.rows) for item in objects)
        return ledger, dict(objects[-1].header.get("flushed", {}))


def _positions(lineage: Lineage) -> Iterator[tuple[int, Replay, Problem | None]]:
    replay = Replay()
    problem: Problem | None = None
    for position, item in enumerate(lineage.objects[: lineage.length]):
        if problem is None:
            try:
                replay.extend(item)
            except Damaged as error:
                problem = Problem(item.ref.key, INCONSISTENT, f"{item.ref.key}: {error.message}", error.hint)
        yield position, replay, problem


def _segment(value: Any) -> SegmentInfo:
    """A segment as a header describes it; the codec has checked its fields."""
    batches = tuple(BatchInfo(*batch) for batch in value["batches"])
    return SegmentInfo(
        key=value["key"],
        nbytes=value["nbytes"],
        crc32c=value["crc32c"],
        batches=batches,
        wide=tuple(value.get("wide", ())),
    )
