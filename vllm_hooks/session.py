"""The composition root of one capturing process: store, restore, staging, snapshots, and the loop they meet on.

Owns: the lifetime of the coordinator thread and the stager, the fence, the admission gate, the wish to flush.
Does not know: vLLM's classes (surface.py), prompts files, outputs.

Threads: everything named `on the loop` runs on the one event loop that consumes the engine; the coordinator runs in a
thread of its own and reaches the loop through LoopFleet; the stager has a third. The loop never touches the store.

Invariants:
1. Between two outputs of the engine a cut is one synchronous function on the loop; it has no await and copies nothing.
2. While the fence is up terminal results wait and decoding goes on.
3. A periodic flush is skipped and counted while the stager is busy; its tokens go with the next one.
4. No snapshot is taken from a dead engine (case W12); what was captured is still flushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.calls import CallTable, Captured, LiveCall
from recovery.compactor import Compactor
from recovery.config import CheckpointingConfig, effective_mode
from recovery.coordinator import Attempt, Coordinator, InOneThread
from recovery.errors import Fenced, InputError, ProgramError, RecoveryError
from recovery.ledger import EndedAt
from recovery.model import Array, PolicyVersion, Request
from recovery.participants import Participants
from recovery.protocol import Verdict
from recovery.restore import Restored, anything
from recovery.resume import StopRules
from recovery.staging import Staged, Stager
from vllm_hooks.admission import Admission
from vllm_hooks.barriers import Barriers
from vllm_hooks.deliveries import Deliveries
from vllm_hooks.fleet import LoopFleet
from vllm_hooks.flushing import Flushing
from vllm_hooks.opening import Opened, open_store_for
from vllm_hooks.parity import NOT_TESTED
from vllm_hooks.pull import Polling, Pulled, PullReader
from vllm_hooks.snapshot_loop import SnapshotLoop
from vllm_hooks.stored import StoredCalls
from vllm_hooks.trouble import RecentAttempts, Trouble, troubles_of
from vllm_hooks.unresumable import Unresumable
from vllm_hooks.watching import Reading


@dataclass(slots=True)
class SessionCounters:
    """Since the start of this process."""

    tokens_captured: int = 0
    tokens_reused: int = 0
    tokens_regenerated: int = 0
    calls_restored: int = 0
    snapshots: int = 0
    snapshots_abandoned: int = 0
    last_snapshot: int | None = None


class RecoverySession:
    """What a RecoverableEngine captures into. Make one with `open`, inside or before the engine's event loop.

    `source_digests` maps a request id to the digest of the caller's own row, recorded with the call.
    `stored`: the calls that the store holds. `participants`: whose states go into every snapshot.
    `parity`: what the self-test saw, if there was one.
    `pulls`: set it where parity.self_test saw the pull capture agree; FINAL_ONLY requests are then read, not streamed.
    `keeps_ranks`: set it to False where nobody looks at ranks: with `logprobs: 0` they are then not captured.
    `on_tokens`, if set, is told on the loop of each captured output: the call and its number of new tokens; `on_left`
    of each call whose stream is over. `on_attempt`, if set, is told in the coordinator's thread of each attempt.
    """

    def __init__(self, config: CheckpointingConfig, opened: Opened | None, *, keeps_results: bool = False) -> None:
        self._config = config
        self.keeps_results = keeps_results
        self.opened = opened
        self.capturing = opened is not None
        self.stored = StoredCalls(opened)
        self.counters = SessionCounters()
        self.unresumable = Unresumable(config)
        self.source_digests: Mapping[str, str] = {}
        self._version = PolicyVersion()
        self.pulls = False
        self.keeps_ranks = True
        self.parity = NOT_TESTED
        self.on_tokens: Callable[[LiveCall, int], None] | None = None
        self.on_left: Callable[[LiveCall], None] | None = None
        self.on_attempt: Callable[[Attempt], None] | None = None
        self.barriers = Barriers()
        self.table = CallTable()
        self.failure: RecoveryError | None = None
        self.dead_engine: BaseException | None = None
        self._deliveries = Deliveries()
        self._recent = RecentAttempts()
        self._n_captured = self._n_cut = self._n_published = 0
        self._polling = Polling(self.captured)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failing: asyncio.Event | None = None
        self._stopped = False
        if opened is not None:
            self._wire(opened)

    @property
    def version(self) -> PolicyVersion:
        """The policy version that captured tokens are stamped with.

        Set it after a weight update and before the engine decodes again: what the engine sampled before is read first,
        but an output that is still on its way to a streaming caller cannot be told from a later one.
        """
        return self._version

    @version.setter
    def version(self, version: PolicyVersion) -> None:
        self._polling.read_all()
        self._version = version

    # ---- opening and closing -----------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        config: CheckpointingConfig,
        *,
        must: Mapping[str, Any] | None = None,
        recorded: Mapping[str, Any] | None = None,
        stop: StopRules | None = None,
        owner: str = "",
        exactness: str = "statistical",
        keeps_results: bool = False,
        compatible: Callable[[Mapping[str, bytes]], None] = anything,
        reading: Reading | None = None,
    ) -> RecoverySession:
        """Claim the store, restore from it, and be ready to capture. Does I/O; call it off the event loop.

        Args:
            config: the block `rollout_checkpointing`.
            must: fields of which a difference refuses a restore (fingerprint.py makes them from an engine).
            recorded: fields that are written down and lower the grade of a restore when they differ.
            stop: what ends a call in the engine (surface.stop_rules).
            owner: who this is, for people.
            exactness: the grade that the engine earned; no result claims more.
            keeps_results: an ended call is kept until it was asked for with `durable`.
            compatible: raises CannotRestore for the states of a snapshot that must be passed over.
            reading: is told how far the restore is.

        Raises RecoveryError and its kin: see recovery.errors for the exit codes.
        """
        if effective_mode(config) == "off":
            return cls(config, None, keeps_results=keeps_results)
        rules = Unresumable(config).rules(stop or StopRules((), 1 << 30))
        opened = open_store_for(
            config,
            must or {},
            recorded or {},
            rules,
            owner=owner,
            exactness=exactness,
            compatible=compatible,
            reading=reading,
        )
        return cls(config, opened, keeps_results=keeps_results)

    def _wire(self, opened: Opened) -> None:
        self.admission = Admission(self.table, opened.publication.ledger, opened.restored.calls, self.stored.read)
        self.counters.tokens_reused = opened.restored.tokens_reused
        self.counters.tokens_regenerated = opened.restored.tokens_thrown_away
        self.counters.calls_restored = len(opened.restored.calls)
        opened.restored.calls = []  # their tokens belong to the admission now, until somebody asks for them
        self.stager = Stager(
            opened.store,
            opened.segments,
            opened.entropy,
            epoch=opened.publication.log.epoch,
            worker="w0",
            on_staged=self._on_staged,
        )
        self.participants = Participants(opened.states)
        self.fleet = LoopFleet(self)
        self.flushing = Flushing(
            self.stager,
            self.freeze,
            self.table.longest_pending,
            self._config.gym.generation_chunk_flush_tokens,
            self._on_program_error,
        )
        self.compactor = Compactor(opened.store, opened.segments, opened.entropy, epoch=opened.publication.log.epoch)
        coordinator = Coordinator(
            opened.publication,
            self.fleet,
            opened.clock,
            timeout_s=self._config.snapshot_timeout_s,
            fingerprint=opened.fingerprint,
            run=InOneThread(),
            compactor=self.compactor,
        )
        self.snapshots = SnapshotLoop(
            coordinator,
            interval_s=self._config.snapshot_interval_s,
            may_take=lambda: self.failure is None and self.dead_engine is None,
            has_news=lambda: self._n_captured != self._n_published,
            on_attempt=self._on_attempt,
            on_error=self._on_program_error,
        )

    def start(self) -> None:
        """Bind to the running event loop and begin to take snapshots. Call it on the loop, once."""
        if not self.capturing:
            return
        self._loop = asyncio.get_running_loop()
        self._failing = asyncio.Event()
        self.fleet.bind(self._loop)
        self.flushing.bind(self._loop)
        self.snapshots.start()

    async def stop(self, *, last_snapshot: bool = True, timeout_s: float | None = None) -> Attempt | None:
        """Take a last snapshot if wanted and possible, stop taking more, close the stager. Returns the last one.

        A second time it does nothing.
        """
        if not self.capturing or self._loop is None or self._stopped:
            return None
        wait_s = self._config.snapshot_timeout_s if timeout_s is None else timeout_s
        last = await asyncio.to_thread(
            lambda: self.snapshots.finish(last=last_snapshot, timeout_s=timeout_s, wait_s=wait_s)
        )
        if last is None or last.verdict is not Verdict.PUBLISHED:
            # Nothing more is published, but what was captured is worth a segment that the next run adopts.
            await asyncio.wait({asyncio.wrap_future(self.flushing.submit(self.freeze()))}, timeout=max(1.0, wait_s))
        self._stopped = True
        self.compactor.close()
        self.flushing.close()
        self._polling.close()
        self.barriers.gate.close()
        self.barriers.open_all()
        await asyncio.to_thread(lambda: self.stager.close(wait=not self.stager.busy))
        return last

    # ---- on the loop: what capture calls -----------------------------------------------------------------------

    async def admit(self, request: Request, stop: StopRules) -> LiveCall:
        """The live call for a request: new, carried on from a restore, or carried on after an interruption."""

        def check() -> None:
            self.raise_if_failed()
            if self._stopped:
                raise InputError(
                    f"request {request.rollout!r} came after the session was stopped",
                    hint="open a new session; it carries on what this one saved",
                )

        await self.barriers.pass_gate(check)
        self.stored.admitted()
        return await self.admission.admit(request, stop)

    def captured(
        self, call: LiveCall, token_ids: Any, logprobs: list[float] | None, columns: Mapping[str, Array] | None = None
    ) -> None:
        """Take one engine output into the call's buffer."""
        if not token_ids:
            return
        call.append(token_ids, logprobs or None, self._version, columns)
        self._n_captured += 1
        self.counters.tokens_captured += len(token_ids)
        if self.on_tokens is not None:
            self.on_tokens(call, len(token_ids))
        self.flushing.pending(call.n_pending)

    async def terminal(self, call: LiveCall, finish_reason: str, stop_reason: int | str | None) -> None:
        """Make a call terminal as soon as no fence is up."""
        await self.barriers.pass_fence()
        self.raise_if_failed()
        if self.keeps_results:
            self._deliveries.ending(call)
        call.end(finish_reason, stop_reason)
        self._n_captured += 1
        self.flushing.ended()

    def new_seed(self) -> int:
        """For a sampled call that was given none. Stored with the call, so that it is drawn alike in every process."""
        assert self.opened is not None
        return int(self.opened.entropy.hex(6), 16)

    def pull(self, call: LiveCall, reader: PullReader, request_id: str, n_top: int | None) -> Pulled:
        """Read this call's tokens from the engine's front end, at cuts and now and then, from here on."""
        return self._polling.add(Pulled(call, reader, request_id, n_top, []))

    def pull_last(self, call: LiveCall) -> None:
        """Read what is there for the last time; harmless for a call that is streamed."""
        self._polling.remove(call)

    def left(self, call: LiveCall) -> None:
        """The caller's stream is over: ended, aborted or failed."""
        call.in_use = False
        if self.on_left is not None:
            self.on_left(call)
        if call.ended is not None and self.keeps_results:
            self._deliveries.ended(call)

    def cut(self) -> list[Captured]:
        """The freeze of a snapshot: remembers how far it went."""
        captured = self.freeze()
        self._n_cut = self._n_captured
        return captured

    def read_now(self) -> None:
        """Read every call that is read and not streamed: before an abort makes the engine forget them."""
        self._polling.read_all()

    def freeze(self) -> list[Captured]:
        """Everything captured and not yet handed over, swapped out in one synchronous step."""
        self._polling.read_all()
        return self.table.freeze()

    async def durable(self, rollout: str) -> LiveCall:
        """The ended call of that request id, once its terminal record is in the store. Once per call.

        Only with `keeps_results`. Raises what stopped the session.
        """
        self.raise_if_failed()
        return await self._deliveries.take(rollout)

    def engine_died(self, error: BaseException) -> None:
        """The engine process is gone: no snapshot is taken from here on, what was captured is flushed."""
        if self.dead_engine is None:
            self.dead_engine = error
            self.flushing.want()

    # ---- told by the stager's and the coordinator's threads -----------------------------------------------------

    def _on_staged(self, staged: Staged) -> None:
        ended = [at.call_id for at in staged.coordinates if isinstance(at, EndedAt)]
        self._call_on_loop(self._deliveries.stored, ended)

    def _on_attempt(self, attempt: Attempt) -> None:
        counters = self.counters
        if attempt.verdict is Verdict.PUBLISHED:
            counters.snapshots += 1
            self._n_published = self._n_cut
            counters.last_snapshot = attempt.snapshot
            self._call_on_loop(self.table.published, attempt.ended)
        else:
            counters.snapshots_abandoned += 1
        self._recent.note(attempt)
        if self.on_attempt is not None:
            self.on_attempt(attempt)
        if attempt.verdict is Verdict.FENCED and isinstance(attempt.error, Fenced):
            self.fail(attempt.error)

    def _on_program_error(self, error: BaseException) -> None:
        self.fail(ProgramError(f"storing what was captured failed: {error!r}", hint="this is a bug; please report it"))

    def _call_on_loop(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *arguments)

    def want_snapshot(self, cause: str = "request") -> None:
        """Ask for a snapshot soon; returns at once, from any thread. Raises what stops this process, if anything."""
        self.raise_if_failed()
        if self.capturing:
            self.snapshots.request(cause)

    def fail(self, error: RecoveryError) -> None:
        """From any thread: this process must stop; everybody who waits is told."""
        self.failure = error
        self._call_on_loop(self._fail_on_loop, error)

    def _fail_on_loop(self, error: RecoveryError) -> None:
        self._deliveries.failed(error)
        self.barriers.open_all()
        if self._failing is not None:
            self._failing.set()

    async def failing(self) -> None:
        """Wait until this process must stop, and raise why. For ever if that never happens."""
        await (self._failing or asyncio.Event()).wait()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise what stops this process, if anything does."""
        if self.failure is not None:
            raise self.failure

    @property
    def troubles(self) -> list[Trouble]:
        """What cannot be stored at the moment."""
        if not self.capturing:
            return []
        return list(troubles_of(self.stager.counters, self._recent, self.compactor.counters))

    # ---- what others read --------------------------------------------------------------------------------------

    @property
    def restored(self) -> Restored | None:
        return self.opened.restored if self.opened is not None else None

    def has_result(self, rollout: str) -> bool:
        """Whether `durable(rollout)` has something to give: False for a request that was not captured."""
        return self._deliveries.has(rollout)
