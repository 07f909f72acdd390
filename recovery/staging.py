"""From frozen records to one stored segment: the only writer of segments.

Owns: flush numbers, what was frozen and is not stored yet, which of that also waits in a staging, the queue of what was
stored and no snapshot has taken yet, and the bytes of what is stored and not published.
Does not know: who froze it, when a snapshot is due, what a ledger is, what a staging is made of.

Invariants:
1. Flushes of one incarnation are stored in the order in which they were frozen, by one thread.
2. What a failed flush carried goes with the next one, in front: order per call is kept and nothing is lost.
3. Only coordinates leave this module; tokens go to the store and nowhere else.
   A flush that is larger than a segment may be is several segments, each the next flush by number.
4. A periodic flush is not made while another is queued: who wants one looks at `busy` and counts it with `refuse`. A
   cut is never refused.
5. Before a segment is stored its bytes are decoded and give the very records that were frozen; the SHA-256 of these
   bytes goes with the coordinates, so that who reads the segment back need not decode it again (Publication.validate).
6. The bytes of a segment are kept, encoded, until a snapshot with it is published (the newest KEPT_NBYTES of them): one
   that does not read back is stored again, as it was (`store_again`).
7. With a staging, what a periodic flush carries waits there, and here, until the next flush that is not periodic or
   carries the end of a call: that one stores all of it. Whatever the staging does, nothing of it is stored less.
8. A staging that failed is not asked again before the next snapshot is published: it costs one wait, not one a flush.
   What waited there is dropped when a snapshot is published after all of it was stored.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from recovery.buffer import Run
from recovery.calls import Captured
from recovery.coordinates import EndedAt, OpenedAt, StoredAt
from recovery.errors import DigestMismatch, RecoveryError
from recovery.layout import segment_stem
from recovery.lineage import lineage_of
from recovery.model import CallId, Ended, Identity, Record, RecordRef, SegmentInfo
from recovery.ports import EncodedSegment, Entropy, ObjectStore, SegmentCodec, Staging
from recovery.records import CHUNK, Records, raw_nbytes

SEGMENT_RECORDS, SEGMENT_RAW_NBYTES = 1 << 14, 512 << 20
"""A segment has at most so many records, and so many bytes before it is compressed: so that every codec can write it
and read it again, and one with large wide columns does not take the memory of the job."""

KEPT_NBYTES = 256 << 20
"""A snapshot interval of some fifty million tokens; more is kept by nobody who publishes."""

WAITING_RECORDS, WAITING_RAW_NBYTES = 1 << 14, 256 << 20
"""As much may wait in a staging, since it waits here too; with more, a periodic flush is stored."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One stored segment: where it is, what it holds, which flush of which worker incarnation it was.

    `checked`: the SHA-256 of the bytes that were seen to decode to exactly `coordinates`; empty: nobody looked.
    """

    info: SegmentInfo
    coordinates: StoredAt
    writer: str
    flush: int
    checked: bytes = b""


@dataclass(slots=True)
class StagingCounters:
    """Counted since the start of the process. `backlog_records` is what failed flushes left to carry; `stored_again`
    the segments that did not read back and were written a second time; `error` is what the last flush said, None if it
    was stored, and `failures_in_a_row` how many before it were not. `waited`: flushes that a staging took;
    `staging_failures`: those that it did not, `staging_error` what it said last, None if it took the last one."""

    flushes: int = 0
    failures: int = 0
    skipped: int = 0
    stored_again: int = 0
    tokens: int = 0
    nbytes: int = 0
    backlog_records: int = 0
    failures_in_a_row: int = 0
    error: RecoveryError | None = None
    last_failure: str = ""
    waited: int = 0
    staging_failures: int = 0
    staging_error: RecoveryError | None = None


def coordinates_of(records: Sequence[Record], segment: str) -> StoredAt:
    """What the ledger needs to know of `records` stored in order as `segment`."""
    whole = Records.of(records)
    call_ids: list[CallId] = whole.call_ids.tolist()
    others: dict[int, OpenedAt | EndedAt] = {}
    for index, request in whole.requests.items():
        lineage = lineage_of(request.extra)
        identity = Identity(
            rollout=request.rollout,
            turn=request.turn,
            request_digest=whole.digests[index].tobytes(),
            source_digest=request.source_digest,
            restart_only=request.restart_only,
            opened=RecordRef(segment, index),
            model_call=lineage.model_call,
            parent=lineage.parent,
        )
        others[index] = OpenedAt(call_ids[index], int(whole.attempts[index]), identity)
    for index, end in whole.ends.items():
        others[index] = EndedAt(call_ids[index], int(whole.attempts[index]), int(whole.starts[index]), *end)
    return StoredAt(
        segment=segment,
        call_ids=call_ids,
        attempts=whole.attempts,
        starts=whole.starts,
        n_tokens=whole.n_tokens,
        digests=whole.digests,
        versions=whole.versions,
        version_at=whole.version_at,
        others=others,
    )


def checked_sum(codec: SegmentCodec, segment: EncodedSegment, coordinates: StoredAt) -> bytes:
    """The SHA-256 of a segment in memory. Raises Damaged unless its bytes hold exactly what was encoded."""
    info = segment.info
    if coordinates_of(codec.decode(segment.data, info), info.key) != coordinates:
        raise DigestMismatch(f"{info.key} would not hold the records that were to be written")
    return hashlib.sha256(segment.data).digest()


class Stager:
    """Writes segments for one incarnation of one worker.

    `on_staged` is called in the writing thread after each stored segment, when the stager is no longer busy with it.
    """

    def __init__(
        self,
        store: ObjectStore,
        codec: SegmentCodec,
        entropy: Entropy,
        *,
        epoch: int,
        worker: str,
        on_staged: Callable[[Staged], None] = lambda staged: None,
        staging: Staging | None = None,
    ) -> None:
        self._store = store
        self._staging = staging
        self._n_waiting = self._waiting_nbytes = 0
        self._waiting: list[str] = []
        self._obsolete: list[str] = []
        self._rests = self._closed = False
        self._codec = codec
        self._entropy = entropy
        self._epoch = epoch
        self.writer = f"{worker}.{entropy.hex(4)}"
        self._on_staged = on_staged
        self._lock = threading.Lock()
        self._queued = 0
        self._flush = 0
        self._backlog: list[Captured] = []
        self._staged: deque[Staged] = deque()
        self._kept: dict[str, bytes] = {}
        self._taken: list[str] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stager")
        self.counters = StagingCounters()

    @property
    def busy(self) -> bool:
        return self._queued > 0

    def flush(self, captured: Sequence[Captured], *, periodic: bool = False) -> Future[RecoveryError | None]:
        """Queue a flush. The future gives None, or the error because of which the records wait for the next one.

        Any other exception is a program error; the future raises it, and the records wait all the same. None for a
        `periodic` one may mean that the staging has it, and the store not yet.
        """
        with self._lock:
            self._queued += 1
        return self._pool.submit(self._run, captured, periodic)

    def refuse(self) -> None:
        """Count a periodic flush that was not even frozen because one is still being written."""
        self.counters.skipped += 1

    def take_staged(self) -> list[Staged]:
        """Everything stored since the last call, in order."""
        taken = []
        while self._staged:
            taken.append(self._staged.popleft())
        self._taken += [staged.info.key for staged in taken]
        return taken

    def published(self) -> None:
        """All that `take_staged` gave is in a published snapshot: its bytes are not kept any longer."""
        taken, self._taken = self._taken, []
        with self._lock:
            for key in taken:
                self._kept.pop(key, None)
            self._rests = False
            if self._staging is not None and self._obsolete and not self._closed:
                self._pool.submit(self._drop, self._staging)

    def store_again(self, staged: Staged) -> Future[Staged | None]:
        """Queue a second write of a segment, under another name. None: its bytes are not kept any more.

        The future raises what the store says; then the same may be asked again.
        """
        return self._pool.submit(self._store_again, staged)

    def close(self, *, wait: bool) -> None:
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _run(self, captured: Sequence[Captured], periodic: bool) -> RecoveryError | None:
        self._backlog.extend(captured)  # before anything can fail: invariant 2
        stored: list[Staged] = []
        failure: RecoveryError | None = None
        waits = False
        try:
            waits = periodic and self._stage()
            while self._backlog and not waits:
                stored.append(self._store_segment(self._next_records()))
        except RecoveryError as error:
            self.counters.failures += 1
            self.counters.failures_in_a_row += 1
            self.counters.error, self.counters.last_failure = error, error.message
            failure = error
        finally:
            self.counters.backlog_records = len(self._backlog) - self._n_waiting
            with self._lock:
                self._queued -= 1
        if failure is None and not waits:
            self.counters.failures_in_a_row, self.counters.error = 0, None
        for staged in stored:
            self._on_staged(staged)  # last: who is told may want the next flush, and must not find this one queued
        return failure

    def _stage(self) -> bool:
        """Give the staging what it has not. False: all of the backlog is to be stored now."""
        if self._staging is None or self._rests:
            return False
        if len(self._backlog) > WAITING_RECORDS or self._waiting_nbytes > WAITING_RAW_NBYTES:
            return False
        if any(isinstance(item, Ended) for item in self._backlog[self._n_waiting :]):
            return False
        try:
            while self._n_waiting < len(self._backlog):
                records = self._next_records(self._n_waiting)
                segment = self._encode(records)
                self._waiting.append(segment.info.key)  # before it is asked: it may have it and not say so
                self._staging.stage(segment.info.key, segment.data)
                self._n_waiting += len(records)
                self._waiting_nbytes += int(records.raw_nbytes().sum())
                self.counters.waited += 1
        except RecoveryError as error:
            self._staging_failed(error)
            return False
        self.counters.staging_error = None
        return True

    def _staging_failed(self, error: RecoveryError) -> None:
        self.counters.staging_failures += 1
        self.counters.staging_error = error
        self._rests = True

    def _drop(self, staging: Staging) -> None:
        keys, self._obsolete = self._obsolete, []
        try:
            staging.drop(keys)
        except RecoveryError as error:  # they are dropped after the next snapshot
            self._obsolete = keys + self._obsolete
            self._staging_failed(error)

    def _encode(self, records: Records) -> EncodedSegment:
        self._flush += 1
        stem = segment_stem(self._epoch, self.writer, self._flush, self._entropy.hex(4))
        return self._codec.encode(records, stem)

    def _next_records(self, first: int = 0) -> Records:
        """Records of the backlog from `first` on, as many as one segment takes; at least one."""
        records: list[Record] = []
        nbytes = 0
        for item in self._backlog[first : first + SEGMENT_RECORDS]:
            record = item.to_chunk() if isinstance(item, Run) else item
            nbytes += raw_nbytes(record)
            if records and nbytes > SEGMENT_RAW_NBYTES:
                break
            records.append(record)
        return Records.of(records)

    def _store_segment(self, records: Records) -> Staged:
        segment = self._encode(records)
        coordinates = coordinates_of(records, segment.info.key)
        checked = checked_sum(self._codec, segment, coordinates)
        # EXISTS can only be our own earlier answer that was lost: the name is random. Validation reads it back.
        self._store.put_new(segment.info.key, segment.data)
        self._backlog = self._backlog[len(records) :]
        self._n_waiting = max(0, self._n_waiting - len(records))
        if not self._n_waiting:
            self._obsolete += self._waiting
            self._waiting, self._waiting_nbytes = [], 0
        self._keep(segment.info.key, segment.data)
        staged = Staged(segment.info, coordinates, self.writer, self._flush, checked)
        self.counters.flushes += 1
        self.counters.nbytes += len(segment.data)
        self.counters.tokens += int(records.n_tokens[records.kinds == CHUNK].sum())
        self._staged.append(staged)
        return staged

    def _store_again(self, staged: Staged) -> Staged | None:
        data = self._kept.get(staged.info.key)
        if data is None:
            return None
        self._flush += 1
        stem = segment_stem(self._epoch, self.writer, self._flush, self._entropy.hex(4))
        key = f"{stem}-{staged.info.key.rpartition('-')[2]}"  # the same bytes have the same sum
        self._store.put_new(key, data)
        self._keep(key, data)
        self._taken.append(key)
        self.counters.stored_again += 1
        info = replace(staged.info, key=key)
        coordinates = coordinates_of(self._codec.decode(data, info), key)
        return Staged(info, coordinates, self.writer, self._flush, staged.checked)

    def _keep(self, key: str, data: bytes) -> None:
        with self._lock:
            self._kept[key] = data
            total = sum(map(len, self._kept.values()))
            while total > KEPT_NBYTES:
                total -= len(self._kept.pop(next(iter(self._kept))))
