"""A job without an engine: the product's own capture, staging, coordinator and restore, fed with tokens that are given.

Owns: opening or carrying on a store with a fleet of any kind (`Life`), live calls over some workers (`Job`), and one
snapshot at a time with what it cost.
Does not know: which tokens, what is compared.

Invariants:
1. Every part is the one that a vLLM session uses; only the engine and its event loop are missing, so all happens in
   the caller's thread but for the staging threads.
2. A call's tokens are appended as an engine gives them: Python lists, a few at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from bench.counted import CountedStore, Traffic
from recovery import codec
from recovery.calls import CallTable, LiveCall, Stored
from recovery.compaction import Limits
from recovery.compactor import Compactor
from recovery.coordinator import Attempt, Coordinator, Fleet
from recovery.errors import RecoveryError
from recovery.model import Float32Array, Int32Array, PolicyVersion, Request
from recovery.ports import Entropy, LedgerCodec, ObjectStore, SegmentCodec
from recovery.protocol import Verdict
from recovery.publication import Publication
from recovery.restore import Chosen, choose, compatibility_record, restore
from recovery.restored import Restored, RestoredCall
from recovery.resume import StopRules
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from recovery.staging import Staged, Stager
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from vllm_hooks.opening import SystemClock, SystemEntropy

MUST = {"model": "none: a benchmark"}
STOP = StopRules((2,), 1 << 20)
VERSION = PolicyVersion("a", 0)
SAMPLING = {"temperature": 0.0, "max_tokens": 1 << 19, "ignore_eos": True}
_TIMEOUT_S = 600.0


def job_state() -> dict[str, bytes]:
    """The states of a snapshot of these jobs."""
    return {"job": compatibility_record(MUST, {})}


def newest(store: ObjectStore, segments: SegmentCodec, ledgers: LedgerCodec, tail: int) -> Chosen:
    """The snapshot of slot `tail` or before it. Raises RuntimeError if a newer one cannot be restored: whatever else
    a restore finds instead, or adopts, the figures are not of what was published."""
    chosen = choose(store, segments, ledgers, tail, "auto", MUST)
    if chosen.passed_over:
        raise RuntimeError(f"the restore passed over {chosen.passed_over}")
    return chosen


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker needs to store segments."""

    store: ObjectStore
    segments: SegmentCodec
    entropy: Entropy
    epoch: int


class Workers:
    """The fleet of a coordinator: a call table and a stager for each of some workers."""

    def __init__(self, seat: Seat, n_workers: int) -> None:
        self.stagers = [
            Stager(seat.store, seat.segments, seat.entropy, epoch=seat.epoch, worker=f"w{number}")
            for number in range(n_workers)
        ]
        self.tables = [CallTable() for _ in self.stagers]
        self._flushes: list[Future[RecoveryError | None]] = []

    def acquire_hold(self, reason: str, timeout_s: float) -> None: ...

    def release_hold(self) -> None: ...

    def raise_fence(self, timeout_s: float) -> None: ...

    def lower_fence(self) -> None: ...

    def resume(self, published: bool) -> None:
        for stager in self.stagers if published else ():
            stager.published()

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        return job_state()

    def cut(self, timeout_s: float) -> None:
        self._flushes = [stager.flush(table.freeze()) for table, stager in zip(self.tables, self.stagers, strict=True)]

    def stage(self, timeout_s: float) -> list[Staged]:
        self.wait(timeout_s)
        return [staged for stager in self.stagers for staged in stager.take_staged()]

    def wait(self, timeout_s: float) -> None:
        """Until the last cut is stored."""
        for flush in self._flushes:
            if (error := flush.result(timeout_s)) is not None:
                raise error

    def store_again(self, staged: Staged, timeout_s: float) -> Staged | None:
        return None  # a benchmark whose store does not keep what it was given has failed

    def rewind(self, stored: Stored) -> None:
        raise RuntimeError(f"the store lost what it was given of {len(stored)} calls")


@dataclass(frozen=True, slots=True)
class Taken:
    """One snapshot: its id, and what it cost. `ledger_depth`: how many ledger objects belong to it besides its own.

    `processor_seconds` are those of this process: the server of a bucket is another. `steps` are the seconds of each
    effect of the protocol.
    """

    id: int
    seconds: float
    processor_seconds: float
    traffic: Traffic
    ledger_depth: int
    steps: Mapping[str, float]


F = TypeVar("F", bound=Fleet)


class Life(Generic[F]):
    """One process's life of a job with a fleet of any kind, from its claim on.

    With `compact` what compaction wants to do after a snapshot waits until `compact_now`, to be measured apart.
    """

    def __init__(
        self,
        store: ObjectStore,
        fleet: Callable[[Seat], F],
        *,
        write: CodecName = "arrow",
        keep_latest_k: int = 2,
        compact: Limits | None = None,
        entropy: Entropy | None = None,
    ) -> None:
        self.store = CountedStore(store)
        entropy, clock = entropy or SystemEntropy(), SystemClock()
        make_root(self.store, entropy)
        self.segments, ledgers = MixedSegmentCodec(write), ArrowLedgerCodec()
        log = SlotLog(self.store, clock, entropy, "bench")
        log.claim()
        chosen = newest(self.store, self.segments, ledgers, log.tail)
        self.publication = Publication.on_top_of(
            self.store, self.segments, ledgers, entropy, log, chosen.loaded, keep_latest_k=keep_latest_k
        )
        self.restored: Restored = restore(
            self.publication,
            self.store,
            self.segments,
            ledgers,
            chosen,
            choice="auto",
            keep_latest_k=keep_latest_k,
            stop=STOP,
            states=lambda found: job_state(),
            fingerprint_hex=codec.fingerprint(MUST),
            exactness="token",
        )
        self.workers = fleet(Seat(self.store, self.segments, entropy, log.epoch))
        self._to_compact: list[Callable[[], None]] = []
        self.compactor = (
            None
            if compact is None
            else Compactor(
                self.store, self.segments, entropy, epoch=log.epoch, submit=self._to_compact.append, limits=compact
            )
        )
        self._coordinator = Coordinator(
            self.publication,
            self.workers,
            clock,
            timeout_s=_TIMEOUT_S,
            fingerprint=codec.fingerprint(MUST),
            compactor=self.compactor,
        )

    def compact_now(self) -> tuple[float, Traffic] | None:
        """Do the round of compaction that the last snapshot asked for. None: it asked for none."""
        if not self._to_compact:
            return None
        self.store.take()
        began = time.perf_counter()
        self._to_compact.pop()()
        return time.perf_counter() - began, self.store.take()

    def attempt(self) -> Attempt:
        """Try to take a snapshot."""
        return self._coordinator.take("interval")

    def snapshot(self) -> Taken:
        """Take one; raises whatever kept it from being published."""
        self.store.take()
        busy, began = time.process_time(), time.perf_counter()
        attempt = self.attempt()
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
        if attempt.verdict is not Verdict.PUBLISHED or attempt.snapshot is None:
            raise attempt.error or RuntimeError(f"no snapshot: {attempt}")
        depth = self.publication.writer.depth
        return Taken(attempt.snapshot, seconds, busy, self.store.take(), depth, attempt.seconds)


class Job(Life[Workers]):
    """A life with call tables and stagers of its own, fed call by call; `close` ends its threads."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        n_workers: int = 1,
        write: CodecName = "arrow",
        keep_latest_k: int = 2,
        compact: Limits | None = None,
    ) -> None:
        super().__init__(
            store, lambda seat: Workers(seat, n_workers), write=write, keep_latest_k=keep_latest_k, compact=compact
        )
        self.calls: list[LiveCall] = []

    def open(self, prompts: Sequence[Int32Array]) -> None:
        """New calls with these prompts, spread over the workers."""
        for number, prompt in enumerate(prompts, len(self.calls)):
            self.open_as(number, prompt)

    def open_as(self, number: int, prompt: Int32Array) -> int:
        """A new call named after a number. Its place among `calls`."""
        request = Request(
            rollout=f"rollout-{number:06d}", prompt_token_ids=np.ascontiguousarray(prompt), sampling=SAMPLING
        )
        call_id = codec.call_id(request.rollout, 0, codec.request_digest(request))
        self.calls.append(self._table().open(request, call_id, 0))
        return len(self.calls) - 1

    def carry_on(self, restored: RestoredCall) -> int:
        """A call that the restore brought back. Its place among `calls`."""
        found, entry = restored.transcript, restored.entry
        table = self._table()
        self.calls.append(
            table.carry_on(
                found.request,
                entry.call_id,
                entry.attempt,
                found.token_ids.tolist(),
                found.logprobs.tolist(),
                found.version_spans,
            )
        )
        return len(self.calls) - 1

    def _table(self) -> CallTable:
        return self.workers.tables[len(self.calls) % len(self.workers.tables)]

    def append(self, number: int, token_ids: Int32Array, logprobs: Float32Array) -> None:
        """Tokens that call `number` has generated."""
        self.calls[number].append(token_ids.tolist(), logprobs.tolist(), VERSION)

    def flush(self) -> None:
        """A periodic flush of every worker."""
        self.workers.cut(_TIMEOUT_S)
        self.workers.wait(_TIMEOUT_S)

    def gives_back(self) -> None:
        """Raises RuntimeError unless the newest snapshot has all that every call was given, in as many calls: what
        was measured would be of something else."""
        chosen = newest(self.store, self.segments, ArrowLedgerCodec(), self.publication.log.tail)
        for call in self.calls:
            found = chosen.transcripts.get(call.call_id)
            if (
                found is None
                or found.token_ids.tobytes() != call.transcript_ids.tobytes()
                or found.logprobs.tobytes() != call.transcript_logprobs.tobytes()
            ):
                raise RuntimeError(f"the store does not give back what {call.request.rollout} was given")
        if len(chosen.transcripts) != len(self.calls):
            raise RuntimeError(f"the store has {len(chosen.transcripts)} calls of {len(self.calls)}")

    def close(self) -> None:
        for stager in self.workers.stagers:
            stager.close(wait=True)
