"""Moves what compaction chose into new segments: beside the job, one round at a time.

Owns: reading, joining, writing and reading back of a round, its results until the coordinator takes them, what was
counted.
Does not know: what is worth moving (compaction.py), the ledger's changes meanwhile (Ledger.move refuses what no longer
fits), when a snapshot is due.

Invariants:
1. Nothing that a round writes counts before the coordinator has put it into the ledger and published that: a zombie's
   rounds, and those that a crash cut short, leave objects that nobody names.
2. Every record is checked against the ledger before it is moved; what was written is read back, decoded and compared
   before it is handed over. Digests of joined chunks are those of the joined content.
3. A round that fails, in whatever step, changes nothing. After N failures in a row N snapshots pass before the next.
4. A segment that did not read back as the ledger has it is named, and left alone from then on.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recovery import compaction, layout
from recovery.codec import chunk_digest, request_digest
from recovery.compaction import Limits, Part, Round
from recovery.errors import Damaged, DigestMismatch, RecoveryError, SnapshotAbandoned
from recovery.ledger import ChunkAt, Coordinates, Ledger, OpenedAt
from recovery.model import Chunk, ChunkRef, Opened, Record, RecordRef, SegmentInfo
from recovery.ports import Entropy, ObjectStore, SegmentCodec
from recovery.records import raw_nbytes
from recovery.staging import SEGMENT_RECORDS, coordinates_of

SEGMENT_RAW_NBYTES = 64 << 20
"""Of one written segment, before it is compressed."""

ROUND_RAW_NBYTES = 4 * SEGMENT_RAW_NBYTES
"""What a round may come to in memory; one that would exceed it is given up, and the next ones read less."""

_LEAST_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Move:
    """These chunks of a part, or its request, lie elsewhere now."""

    part: Part
    chunks: tuple[ChunkRef, ...]
    opened: RecordRef | None


@dataclass(frozen=True, slots=True)
class Moved:
    """A round that is done: new segments, and what lies in them. One that failed has only keys that nobody needs."""

    segments: tuple[SegmentInfo, ...] = ()
    moves: tuple[Move, ...] = ()
    abandoned: tuple[str, ...] = ()


@dataclass(slots=True)
class CompactionCounters:
    """Since the start of the process. `unused`: moves that the ledger refused, its call having changed meanwhile.
    `error` is what the last round said, None if it was done."""

    rounds: int = 0
    segments_read: int = 0
    nbytes_read: int = 0
    segments_written: int = 0
    nbytes_written: int = 0
    chunks_before: int = 0
    chunks_after: int = 0
    unused: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    error: RecoveryError | None = None


class TooLarge(Exception):
    """The round does not fit in memory."""


def in_background(work: Callable[[], None]) -> None:
    """Do `work` in a thread that nobody waits for, also not the end of the process."""
    threading.Thread(target=work, name="compaction", daemon=True).start()


class Compactor:
    """One per coordinator. `plan` and `take` are called by whoever owns the ledger; `submit` says where rounds run."""

    def __init__(
        self,
        store: ObjectStore,
        codec: SegmentCodec,
        entropy: Entropy,
        *,
        epoch: int,
        submit: Callable[[Callable[[], None]], None] = in_background,
        limits: Limits | None = None,
    ) -> None:
        self._store = store
        self._codec = codec
        self._entropy = entropy
        self._epoch = epoch
        self._submit = submit
        self._limits = limits or Limits()
        self._writer = f"{layout.COMPACTED}.{entropy.hex(4)}"
        self._number = 0
        self._nbytes = self._limits.round_nbytes
        self._running = self._closed = False
        self._done: Moved | None = None
        self._crashed: BaseException | None = None
        self._to_wait = 0
        self.bad: set[str] = set()
        self.counters = CompactionCounters()

    def plan(self, ledger: Ledger) -> bool:
        """After a publication: begin a round if none is under way and something is worth one."""
        if self._running or self._closed or self._done is not None:
            return False
        if self._to_wait:
            self._to_wait -= 1
            return False
        chosen = compaction.plan(ledger, self._limits, self._nbytes, self.bad)
        if chosen is None:
            return False
        self._running = True
        self._submit(lambda: self._run(chosen))
        return True

    def take(self) -> Moved | None:
        """The result of the last round, once. Raises what was no error of the tree: a bug is not to be overlooked."""
        if self._crashed is not None:
            raise self._crashed
        done, self._done = self._done, None
        return done

    def close(self) -> None:
        """Begin nothing any more; a round that is under way stops at its next step."""
        self._closed = True

    # ---- in the round's own thread -----------------------------------------------------------------------------

    def _run(self, chosen: Round) -> None:
        written: list[SegmentInfo] = []
        try:
            self._done = self._round(chosen, written)
            self.counters.failures_in_a_row, self.counters.error = 0, None
            self._nbytes = min(2 * self._nbytes, self._limits.round_nbytes)
        except TooLarge:
            self._nbytes = max(self._nbytes // 2, min(_LEAST_NBYTES, self._limits.round_nbytes))
            self._fail(SnapshotAbandoned("a round was larger than it may be in memory", hint="the next ones read less"))
        except RecoveryError as error:
            self._done = Moved(abandoned=tuple(info.key for info in written))
            self._fail(error)
        except BaseException as error:
            self._crashed = error
            raise
        finally:
            self._running = False

    def _fail(self, error: RecoveryError) -> None:
        counters = self.counters
        counters.failures += 1
        counters.failures_in_a_row += 1
        counters.error = error
        self._to_wait = counters.failures_in_a_row

    def _round(self, chosen: Round, written: list[SegmentInfo]) -> Moved | None:
        found = self._read(chosen)
        records: list[Record] = []
        owners: list[Part] = []
        for part in chosen.parts if not self._closed else ():
            for record in self._checked(part, found):
                records.append(record)
                owners.append(part)
        placed: list[Coordinates] = []
        while len(placed) < len(records) and not self._closed:
            placed += self._write(_as_many_as_fit(records[len(placed) :]), written)
        if self._closed:
            return None
        counters = self.counters
        counters.rounds += 1
        counters.chunks_before += sum(len(part.chunks) for part in chosen.parts)
        counters.chunks_after += sum(isinstance(record, Chunk) for record in records)
        return Moved(tuple(written), tuple(_moves(chosen.parts, owners, placed)))

    def _read(self, chosen: Round) -> dict[RecordRef, Record]:
        """The wanted records, each segment or batch read once."""
        found: dict[RecordRef, Record] = {}
        nbytes = 0
        for key, wanted in chosen.wanted().items():
            if self._closed:
                break
            info = chosen.segments[key]
            try:
                records = self._records(info, wanted)
            except Damaged:
                self.bad.add(key)
                raise
            self.counters.segments_read += 1
            for index in wanted:
                if index not in records:
                    self.bad.add(key)
                    raise DigestMismatch(f"{key} has no record {index}; the ledger names it")
                found[RecordRef(key, index)] = records[index]
                nbytes += raw_nbytes(records[index])
            if nbytes > ROUND_RAW_NBYTES:
                raise TooLarge
        return found

    def _records(self, info: SegmentInfo, wanted: set[int]) -> dict[int, Record]:
        """The wanted records, as far as they are there, by index.

        Read are the batches that hold them, or the whole segment, where that is about as much.
        """
        batches = {compaction.batch_of(info, index) for index in wanted}
        nbytes = sum(info.batches[batch].length for batch in batches)
        if 2 * nbytes >= info.nbytes:
            self.counters.nbytes_read += info.nbytes
            data = self._store.get(info.key, 0, info.nbytes + 1)
            return _some(self._codec.decode(data, info), 0, wanted)
        self.counters.nbytes_read += nbytes
        found: dict[int, Record] = {}
        first = 0
        for number, batch in enumerate(info.batches):
            if number in batches:
                data = self._store.get(info.key, batch.offset, batch.offset + batch.length)
                found |= _some(self._codec.decode_batch(data, info, number), first, wanted)
            first += batch.n_records
        return found

    def _write(self, records: Sequence[Record], written: list[SegmentInfo]) -> Sequence[Coordinates]:
        """Write one segment and read it back. Returns where its records lie."""
        self._number += 1
        stem = layout.segment_stem(self._epoch, self._writer, self._number, self._entropy.hex(4))
        segment = self._codec.encode(records, stem)
        info = segment.info
        written.append(info)
        self._store.put_new(info.key, segment.data)
        self.counters.segments_written += 1
        self.counters.nbytes_written += info.nbytes
        coordinates = coordinates_of(records, info.key)
        back = self._codec.decode(self._store.get(info.key, 0, info.nbytes + 1), info)
        if coordinates_of(back, info.key) != coordinates:
            raise DigestMismatch(f"{info.key} does not hold the records that were written")
        return coordinates

    def _checked(self, part: Part, found: dict[RecordRef, Record]) -> list[Record]:
        """The records of a part, compared with the ledger and joined."""
        records: list[Record] = []
        chunks: list[Chunk] = []
        if part.opened is not None:
            opened = found[part.opened]
            if not isinstance(opened, Opened) or request_digest(opened.request) != part.request_digest:
                raise self._wrong(part.opened, f"the request of {_name(part)}")
            records.append(opened)
        for ref in part.chunks:
            chunk = found[ref.at]
            if (
                not isinstance(chunk, Chunk)
                or (chunk.call_id, chunk.start, chunk.stop) != (part.call_id, ref.start, ref.stop)
                or (chunk.version, chunk_digest(chunk)) != (ref.version, ref.digest)
            ):
                raise self._wrong(ref.at, f"tokens {ref.start} to {ref.stop} of {_name(part)}")
            chunks.append(chunk)
        return [*records, *compaction.joined(chunks)]

    def _wrong(self, at: RecordRef, what: str) -> DigestMismatch:
        self.bad.add(at.segment)
        return DigestMismatch(f"{at.segment}: record {at.index} is not {what}")


def _name(part: Part) -> str:
    return f"call {part.call_id.hex()} ({part.rollout})"


def _as_many_as_fit(records: Sequence[Record]) -> Sequence[Record]:
    nbytes = 0
    for n, record in enumerate(records[:SEGMENT_RECORDS]):
        nbytes += raw_nbytes(record)
        if n and nbytes > SEGMENT_RAW_NBYTES:
            return records[:n]
    return records[:SEGMENT_RECORDS]


def _moves(parts: Sequence[Part], owners: Sequence[Part], placed: Sequence[Coordinates]) -> list[Move]:
    """What became of each part; `placed` is where each record lies, `owners` whose it is."""
    chunks: dict[int, list[ChunkRef]] = defaultdict(list)
    opened: dict[int, RecordRef] = {}
    for part, at in zip(owners, placed, strict=True):
        if isinstance(at, ChunkAt):
            chunks[id(part)].append(at.chunk)
        elif isinstance(at, OpenedAt):
            opened[id(part)] = at.identity.opened
    return [Move(part, tuple(chunks[id(part)]), opened.get(id(part))) for part in parts]


def _some(records: Sequence[Record], first: int, wanted: set[int]) -> dict[int, Record]:
    """Those that are wanted of records whose indexes begin with `first`. A record is made when it is looked at."""
    return {index: records[index - first] for index in wanted if first <= index < first + len(records)}
