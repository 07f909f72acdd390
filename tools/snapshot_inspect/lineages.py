"""Ledger objects of many snapshots, each read once and replayed once.

Owns: chains of ledger objects, which snapshot stands where on which chain, what each refers to.
Does not know: whether what is referred to exists (verify.py), what is in a segment (segments.py).

Snapshots share their ledger objects: those of one are mostly those of the one before. A lineage is a chain of them, a
snapshot stands at its newest object, and a replay passes through the ledger of every position.

Invariants:
1. An object is read and decoded once, whatever the number of snapshots that need it.
2. Merging is that of recovery.ledger; what it refuses is wrong for this position and all later ones, not for those
   before it. A snapshot is sound only if the objects that it counts are enough; that a replay knows more does not help.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.ledger import Entry, Ledger
from recovery.ledger_columns import Names
from recovery.model import CallId, ChunkRef, Identity, RecordRef, SegmentInfo
from recovery.ports import LedgerCodec, ObjectStore
from recovery.snapshots import LedgerObject, ObjectRef, Snapshot, parent_of, read_ledger_object
from snapshot_inspect.findings import INCONSISTENT, Problem
from snapshot_inspect.statements import contradictions, flushed_problem


class Replay(Ledger):
    """A ledger that grows by one ledger object after the other, all of which were decoded with `names`."""

    def __init__(self, names: Names) -> None:
        super().__init__(Names(names))
        self._n_objects = 0
        self._said: dict[CallId, int] = {}
        self._described: dict[int, int] = {}

    def extend(self, item: LedgerObject) -> None:
        """Raises Damaged, naming the call, if `item` does not continue what came before."""
        self.merge(item.header, item.rows)
        self._n_objects += 1
        self._said.update(dict.fromkeys(compress(item.rows.call_ids, item.rows.whole()), self._n_objects))
        self._described.update(dict.fromkeys(item.header["segments"], self._n_objects))

    def depth(self) -> int:
        """How many objects before the last one are needed, now that it is settled."""
        said = [self._said[entry.call_id] for entry in self]
        described = [self._described[number] for number in self.segments.numbers_in_use()]
        return self._n_objects - min((*said, *described), default=self._n_objects)


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
    """A chain of objects, newest first; `snapshots` stand at positions of it."""

    objects: list[LedgerObject]
    snapshots: dict[int, list[Snapshot]] = field(default_factory=lambda: defaultdict(list))

    def needed(self, position: int) -> list[LedgerObject]:
        """What a snapshot at this position counts, newest first; more than there is is not known yet."""
        return self.objects[position : position + self.objects[position].header["depth"] + 1]


class Lineages:
    """Fed with snapshots, newest first, then replayed."""

    def __init__(self, store: ObjectStore, codec: LedgerCodec) -> None:
        self._store = store
        self._codec = codec
        self._names = Names()
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
        """Find the objects of a snapshot. Returns what is wrong with one of them."""
        if snapshot.ledger in self._place:
            lineage, position = self._place[snapshot.ledger]
        else:
            newest = self._object(snapshot.ledger)
            if isinstance(newest, Problem):
                return newest
            lineage, position = Lineage([newest]), 0
        more = self._missing(lineage, position)
        if isinstance(more, Problem):
            return more
        if len(lineage.objects) == 1 and not lineage.snapshots:
            self._lineages.append(lineage)
        lineage.objects += more
        for number, item in enumerate(lineage.objects):
            self._place.setdefault(item.ref, (lineage, number))
        lineage.snapshots[position].append(snapshot)
        return None

    def _missing(self, lineage: Lineage, position: int) -> list[LedgerObject] | Problem:
        """The objects that a snapshot at this position counts beyond those that are there."""
        head, last = lineage.objects[position], lineage.objects[-1]
        more: list[LedgerObject] = []
        for _ in range(position + head.header["depth"] + 1 - len(lineage.objects)):
            try:
                item = self._object(parent_of(last, head))
            except Damaged as error:
                return Problem(head.ref.key, INCONSISTENT, error.message, error.hint)
            if isinstance(item, Problem):
                return item
            more.append(item)
            last = item
        return more

    def _object(self, ref: ObjectRef) -> LedgerObject | Problem:
        if ref not in self._read:
            try:
                self._read[ref] = read_ledger_object(self._store, self._codec, ref, self._names)
            except (Damaged, FormatNotUnderstood) as error:
                self._read[ref] = Problem.of(ref.key, error)
        return self._read[ref]

    def replay(self) -> Iterator[tuple[Snapshot, Problem]]:
        """Go through every lineage; fills `segments` and `uses`. Yields what is wrong, by snapshot."""
        for lineage in self._lineages:
            fresh: dict[CallId, int] = {}
            for position, replay, problem in self._positions(lineage):
                item, standing = lineage.objects[position], lineage.snapshots.get(position, [])
                if problem is not None:
                    yield from ((snapshot, problem) for snapshot in standing)
                    continue
                for call_id, kept in zip(item.rows.call_ids, item.rows.kept, strict=True):
                    fresh[call_id] = min(kept, fresh.get(call_id, kept))
                for snapshot in standing:
                    said = contradictions(snapshot, replay.counts(), item.header["depth"])
                    yield from ((snapshot, wrong) for wrong in (*said, *_too_few(item, replay)))
                    if (other := flushed_problem(snapshot, item.header.get("flushed", {}))) is not None:
                        yield snapshot, other
                if standing:
                    self._note(replay, fresh)
                    fresh.clear()

    def _note(self, replay: Replay, fresh: Mapping[CallId, int]) -> None:
        """Remember what a snapshot refers to. `fresh`: calls, and how many of their chunks were there before."""
        self.segments.update((key, replay.segment(key)) for key in replay.segments_in_use())
        for call_id, known in fresh.items():
            entry = replay.get(call_id)
            if entry is None:
                continue
            identity = entry.identity
            at = identity.opened
            self.uses[at.segment][at.index, call_id, identity.request_digest] = Use(call_id, identity, None)
            for chunk in entry.chunks[known:]:
                at = chunk.at
                self.uses[at.segment][at.index, call_id, chunk.digest] = Use(call_id, identity, chunk)

    def users(self, keys: set[str]) -> dict[str, set[int]]:
        """Which snapshots need each of these segments."""
        found: dict[str, set[int]] = defaultdict(set)
        for lineage in self._lineages if keys else []:
            for position, replay, problem in self._positions(lineage):
                if problem is None and (standing := lineage.snapshots.get(position)):
                    for key in filter(replay.knows_segment, keys):
                        found[key].update(snapshot.id for snapshot in standing)
        return found

    def chain_keys(self, snapshot: Snapshot) -> set[str]:
        """Keys of the ledger objects of a snapshot, as far as they were read."""
        if snapshot.ledger not in self._place:
            return {snapshot.ledger.key}
        lineage, position = self._place[snapshot.ledger]
        return {item.ref.key for item in lineage.needed(position)}

    def accounted(self) -> Iterator[tuple[Snapshot, Mapping[str, int]]]:
        """Up to which flush of each writer every snapshot accounts, as its ledger says."""
        for lineage in self._lineages:
            for position, standing in lineage.snapshots.items():
                flushed = dict(lineage.objects[position].header.get("flushed", {}))
                yield from ((snapshot, flushed) for snapshot in standing)

    def ledger_of(self, snapshot: Snapshot) -> tuple[Ledger, Mapping[str, int]]:
        """The ledger of a snapshot that was found sound, and what it has accounted for."""
        lineage, position = self._place[snapshot.ledger]
        objects = lineage.needed(position)
        replay = Replay(self._names)
        for item in objects[::-1]:
            replay.extend(item)
        replay.settle()
        return replay, dict(objects[0].header.get("flushed", {}))

    def _positions(self, lineage: Lineage) -> Iterator[tuple[int, Replay, Problem | None]]:
        """From the oldest object on; where a snapshot stands, the replay is settled."""
        replay = Replay(self._names)
        lasting: Problem | None = None
        for position in range(len(lineage.objects) - 1, -1, -1):
            item, problem = lineage.objects[position], lasting
            if problem is None:
                try:
                    replay.extend(item)
                except Damaged as error:
                    problem = lasting = _inconsistent(item, error)
            if problem is None and lineage.snapshots.get(position):
                try:
                    replay.settle()
                except Damaged as error:  # later objects may say what is missing here
                    problem = _inconsistent(item, error)
            yield position, replay, problem


def _too_few(item: LedgerObject, replay: Replay) -> Iterator[Problem]:
    """A restore reads the objects that the newest one counts, and no more."""
    if (needed := replay.depth()) > (counted := item.header["depth"]):
        key = item.ref.key
        yield Problem(key, INCONSISTENT, f"{key} counts {counted} objects before it and needs {needed}")


def _inconsistent(item: LedgerObject, error: Damaged) -> Problem:
    return Problem(item.ref.key, INCONSISTENT, f"{item.ref.key}: {error.message}", error.hint)
