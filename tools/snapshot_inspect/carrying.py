"""One snapshot carried from the store that has it to an empty one: what `export` and `import` have in common.

Owns: which records go along, how they are grouped into new segments, and the order in which all is written.
Does not know: portable files, where either store lies, what is printed.

Invariants:
1. Every record that is written was read through every check, and every segment, the ledger and the states are read back
   and compared before the snapshot is published, by the one conditional create of the core (recovery.publication).
2. A chunk has the digest that it had: what the new ledger says of a chunk is computed from what was read back, and it
   differs from the old one in nothing but the place.
3. How records are grouped depends on their order and sizes alone, and the order is kept: carried once or ten times, in
   one encoding or the other, a snapshot is the same segments.
4. In memory are one group and what live_records.py holds, and the ledgers; no more, whatever the size of the store.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.codec import canonical_json
from recovery.errors import Damaged, DigestMismatch
from recovery.layout import segment_stem
from recovery.ledger import ChunkAt, Coordinates, Entry, Ledger, OpenedAt
from recovery.log import Slot
from recovery.model import ChunkRef, Identity, RecordRef
from recovery.ports import Entropy, LedgerCodec, ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.records import raw_nbytes
from recovery.slots import SlotLog
from recovery.snapshots import Loaded
from recovery.staging import Staged, coordinates_of
from snapshot_inspect.lineages import Use, uses_of
from snapshot_inspect.live_records import Live, in_order, live_records
from snapshot_inspect.progress import Progress
from snapshot_inspect.segments import name_of
from snapshot_inspect.statements import contradicted
from storage_backends.codecs import CodecName
from storage_backends.keys import is_component

GROUP_RECORDS, GROUP_BYTES = 1 << 14, 16 << 20
"""A new segment is closed when it has this many records, or this many bytes as they are in memory."""


class DerivedEntropy:
    """recovery.ports.Entropy without chance: the same digits for the same seed, in order."""

    def __init__(self, seed: Mapping[str, Any]) -> None:
        self._seed = canonical_json(dict(seed))
        self._n = 0

    def hex(self, nbytes: int) -> str:
        self._n += 1
        return hashlib.sha256(self._seed + self._n.to_bytes(8, "little")).hexdigest()[: 2 * nbytes]


class FixedClock:
    """recovery.ports.Clock that stands still."""

    def __init__(self, utc: float) -> None:
        self._utc = utc

    def monotonic(self) -> float:
        return 0.0

    def utc(self) -> float:
        return self._utc


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """Where a snapshot is carried to, and as what. `log` has claimed; nothing was published under its epoch."""

    store: ObjectStore
    segments: SegmentCodec
    ledgers: LedgerCodec
    entropy: Entropy
    log: SlotLog
    cause: str
    origin: Mapping[str, Any]


def codec_of(ledger: Ledger) -> CodecName:
    """The encoding that a snapshot has if nobody asks for another: that of the segment that was written last."""
    newest = in_order(ledger, ledger.segments_in_use())[-1:]
    return "zarr" if newest and newest[0].key.endswith(".zarr") else "arrow"


def check_carried(loaded: Loaded) -> None:
    """Raises Damaged unless what the snapshot says of itself is so, and its states can have names elsewhere."""
    for problem in contradicted(loaded):
        raise Damaged(problem)
    for name in loaded.states:
        if not is_component(f"{name}-{'0' * 16}.json"):
            raise Damaged(f"snapshot {loaded.snapshot.id} has a state of the name {name!r:.100}, which cannot be one")


def carry(source: ObjectStore, loaded: Loaded, to: Carrier, progress: Progress, *, strict: bool = False) -> Slot:
    """Write the snapshot `loaded` of `source` into `to`, whole. Returns the slot that published it.

    With `strict` also what no record lies in has to be as it was written (live_records).
    Raises Damaged, naming segment, call and tokens, at the first record that does not check; Fenced and the store's
    errors. Nothing was published then.
    """
    group = _carry_segments(source, loaded.ledger, to, progress, strict)
    ledger = Ledger()
    for staged in group.staged:
        ledger.describe(staged.info)
    for entry in sorted(loaded.ledger, key=lambda entry: entry.call_id):
        ledger.take_over(entry, group.identity(entry), group.chunks(entry))
    publication = Publication(to.store, to.segments, to.ledgers, to.entropy, to.log, ledger, keep_latest_k=1)
    publication.flushed = {item.writer: item.flush for item in group.staged}
    draft = publication.record(loaded.states)
    for error in publication.validate(draft, group.staged):
        raise error
    fingerprint = loaded.snapshot.slot.body.get("fingerprint")
    return publication.publish(
        draft,
        cause=to.cause,
        fingerprint=fingerprint if isinstance(fingerprint, str) else "",
        restored_from=None,
        origin=to.origin,
    )


def _carry_segments(source: ObjectStore, ledger: Ledger, to: Carrier, progress: Progress, strict: bool) -> Group:
    uses = uses_of(ledger)
    todo = in_order(ledger, uses)
    group = Group(to.store, to.segments, to.entropy, to.log.epoch, to.cause)
    with progress:
        progress.begin(len(todo), sum(info.nbytes for info in todo))
        for info in todo:
            for use, record in live_records(source, to.segments, info, uses.pop(info.key), strict=strict):
                if isinstance(record, Exception):
                    raise record
                group.add(use, record)
            progress.advance(info.nbytes)
        group.finish()
    return group


class Group:
    """Records on their way into new segments, which are written as they fill up, by an incarnation of `worker`."""

    def __init__(self, store: ObjectStore, codec: SegmentCodec, entropy: Entropy, epoch: int, worker: str) -> None:
        self._store = store
        self._codec = codec
        self._entropy = entropy
        self._epoch = epoch
        self._writer = f"{worker}.{entropy.hex(4)}"
        self._uses: list[Use] = []
        self._records: list[Live] = []
        self._nbytes = 0
        self.staged: list[Staged] = []
        self.moved: dict[RecordRef, OpenedAt | ChunkAt] = {}
        """Where records lie now, by where they lay."""

    def add(self, use: Use, record: Live) -> None:
        self._uses.append(use)
        self._records.append(record)
        self._nbytes += raw_nbytes(record)
        if len(self._records) >= GROUP_RECORDS or self._nbytes >= GROUP_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what is left."""
        if self._records:
            self._write()

    def identity(self, entry: Entry) -> Identity:
        """What a call is, with the place where its request lies now."""
        at = self.moved.get(entry.identity.opened)
        if not isinstance(at, OpenedAt):
            return entry.identity
        return entry.identity._replace(opened=at.identity.opened)

    def chunks(self, entry: Entry) -> Iterator[ChunkRef]:
        """The chunks of a call, with the places where they lie now."""
        for chunk in entry.chunks:
            at = self.moved.get(chunk.at)
            yield at.chunk if isinstance(at, ChunkAt) else chunk

    def _write(self) -> None:
        flush = len(self.staged) + 1
        stem = segment_stem(self._epoch, self._writer, flush, self._entropy.hex(4))
        segment = self._codec.encode(self._records, stem)
        key = segment.info.key
        self._store.put_new(key, segment.data)
        staged = Staged(segment.info, coordinates_of(self._records, key), self._writer, flush)
        for use, at in zip(self._uses, staged.coordinates, strict=True):
            self.moved[use.place] = _same(use, at)
        self.staged.append(staged)
        self._uses, self._records, self._nbytes = [], [], 0


def _same(use: Use, at: Coordinates) -> OpenedAt | ChunkAt:
    """Invariant 2, for one record."""
    match at, use.chunk:
        case OpenedAt(), None:
            if at.identity.request_digest == use.identity.request_digest:
                return at
        case ChunkAt(), ChunkRef() as chunk:
            if dataclasses.replace(at.chunk, at=chunk.at) == chunk:
                return at
    raise DigestMismatch(f"{name_of(use)} would be changed on its way; nothing was published")
