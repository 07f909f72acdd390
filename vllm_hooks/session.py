"""The composition root of one capturing process: store, restore, staging, snapshots, and the loop they meet on.

Owns: the lifetime of the coordinator thread and the stager, and which part is told of what.
Does not know: vLLM's classes (surface.py), prompts files, outputs; what the loop does with tokens (capturing.py).

Threads: everything named `on the loop` runs on the one event loop that consumes the engine; the coordinator runs in a
thread of its own and reaches the loop through LoopFleet; the stager has a third. The loop never touches the store.

Invariants:
1. No snapshot is taken from a dead engine (case W12); what was captured is still flushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from recovery import codec as digests
from recovery.calls import LiveCall
from recovery.compactor import Compactor
from recovery.config import CheckpointingConfig, effective_mode
from recovery.coordinator import Attempt, Coordinator, InOneThread
from recovery.errors import Fenced, InputError, RecoveryError
from recovery.lineage import lineage_of
from recovery.model import CallId, Request
from recovery.participants import Participants
from recovery.protocol import Verdict
from recovery.restore import anything
from recovery.restored import Restored
from recovery.resume import StopRules
from recovery.staging import Stager
from recovery.trajectories import Place, Placed, Trajectories
from vllm_hooks.admission import Admission
from vllm_hooks.capturing import Capturing
from vllm_hooks.fleet import LoopFleet
from vllm_hooks.flushing import Flushing
from vllm_hooks.opening import Opened, open_store_for
from vllm_hooks.snapshot_loop import SnapshotLoop
from vllm_hooks.stored import StoredCalls
from vllm_hooks.trouble import RecentAttempts, Trouble, troubles_of
from vllm_hooks.unresumable import Unresumable
from vllm_hooks.watching import Reading


class RecoverySession(Capturing):
    """What a RecoverableEngine captures into. Make one with `open`, off the event loop, and `start` it on the
    loop that consumes the engine.

    `stored`: the calls that the store holds. `participants`: whose states go into every snapshot. `on_attempt`, if set,
    is told in the coordinator's thread of each attempt. The rest: Capturing.
    """

    def __init__(self, config: CheckpointingConfig, opened: Opened | None, *, keeps_results: bool = False) -> None:
        super().__init__(config, capturing=opened is not None, keeps_results=keeps_results)
        self.opened = opened
        self.stored = StoredCalls(opened)
        self._trajectories: Trajectories | None = None
        self.on_attempt: Callable[[Attempt], None] | None = None
        self._recent = RecentAttempts()
        self._n_published = 0
        if opened is not None:
            self._wire(opened)

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
        self.entropy = opened.entropy
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
            staging=opened.staging,
        )
        rewound = isinstance(self._config.restore, int)
        self.participants = Participants(opened.states, opened.clock, rewound=rewound)
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
            joined=self.participants,
            amend=self.stored.sweep,
        )
        self.snapshots = SnapshotLoop(
            coordinator,
            interval_s=self._config.snapshot_interval_s,
            may_take=lambda: self.failure is None and self.dead_engine is None,
            has_news=self._has_news,
            on_attempt=self._on_attempt,
            on_error=self._on_program_error,
        )

    def start(self) -> None:
        """Bind to the running event loop and begin to take snapshots. Call it on the loop, once."""
        if not self.capturing:
            return
        self._bind()
        loop = asyncio.get_running_loop()
        self.fleet.bind(loop)
        self.flushing.bind(loop)
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

    def _take_place(self, request: Request) -> None:
        """Raises InputError if another request is running at this place, or after it."""
        assert self.opened is not None
        if self._trajectories is None:
            self._trajectories = Trajectories(self.stored.placed())
        lineage = lineage_of(request.extra)
        place = Place(request.turn, lineage.model_call)
        one = Placed(request.rollout, place, digests.call_of(request), lineage.parent)
        for call_id in self._trajectories.displaced_by(one):
            live = self.table.get(call_id)
            if live is not None and live.in_use:
                raise InputError(
                    f"another request of rollout {request.rollout!r} is running at turn {place.turn}, "
                    f"model call {place.model_call}, or after it",
                    hint="give concurrent model calls of one turn numbers of their own",
                )
        gone = self._trajectories.take(one)
        self.stored.remember(one.call_id)
        self.counters.calls_diverged += bool(gone)
        for call_id in gone:
            self.forget(call_id)

    def forget(self, call_id: CallId) -> None:
        """Nobody will ask for this call again: the next snapshot is without it."""
        self.admission.forget(call_id)
        self.stored.forget(call_id)

    def rollout_ended(self, rollout: str) -> None:
        """Nobody will ask for the model calls of a trajectory again: the next snapshot is without them."""
        if self._trajectories is None and self.capturing:
            self._trajectories = Trajectories(self.stored.placed())
        for call_id in self._trajectories.leave(rollout) if self._trajectories is not None else ():
            self.forget(call_id)

    async def _call_for(self, request: Request, stop: StopRules) -> LiveCall:
        self.stored.admitted()
        return await self.admission.admit(request, stop)

    # ---- told by the stager's and the coordinator's threads -----------------------------------------------------

    def _has_news(self) -> bool:
        return self._n_captured != self._n_published or self.participants.has_news or self.stored.has_news

    def _on_attempt(self, attempt: Attempt) -> None:
        counters = self.counters
        if attempt.verdict is Verdict.PUBLISHED:
            counters.snapshots += 1
            self.stored.published()
            self._n_published = self._n_cut
            counters.last_snapshot = attempt.snapshot
            self._call_on_loop(self.table.published, attempt.ended)
        elif attempt.cause != "look":
            counters.snapshots_abandoned += 1
        self._recent.note(attempt)
        if self.on_attempt is not None:
            self.on_attempt(attempt)
        if attempt.verdict is Verdict.FENCED and isinstance(attempt.error, Fenced):
            self.fail(attempt.error)

    def _fail_on_loop(self, error: RecoveryError) -> None:
        super()._fail_on_loop(error)
        if self.capturing:
            self.participants.stopped(error)

    def want_snapshot(self, cause: str = "request") -> None:
        """Ask for a snapshot soon; returns at once, from any thread.

        Raises what stops this process, if anything, and InputError after `stop`: none is taken any more.
        """
        self.raise_if_failed()
        if self._stopped:
            raise InputError(
                f"a snapshot ({cause}) was asked for after the session was stopped",
                hint="end what trains before session.stop(), which takes the last one",
            )
        if self.capturing:
            self.snapshots.request(cause)

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
