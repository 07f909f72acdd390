"""The capturing side of one engine whose snapshots another process takes.

Owns: the stager of the epoch that is followed, what of it the coordinator has not acknowledged, claims of calls, and
doing the steps of a snapshot on the loop.
Does not know: Ray, vLLM, the ledger. It runs on the one loop that consumes the engine.

Invariants:
1. Capture and flushes never wait for the coordinator. Without one, calls decode and their chunks go to the store; what
   is not in the ledger of the next one is handed over again (`follow`).
2. A step of a coordinator whose epoch is not the followed one is refused and changes nothing: an older one is Fenced.
3. A call enters the table only by a claim that the followed coordinator has answered.
4. What an old coordinator held up is let go when a new one is followed, or when its snapshot is long over.
5. What was stored is told again until the coordinator says that it has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from recovery import codec as digests
from recovery.admission.holds import Hold, HoldKind
from recovery.calls import LiveCall, Stored
from recovery.config import CheckpointingConfig
from recovery.errors import EngineDead, Fenced, ObjectMissing, RecoveryError, SnapshotAbandoned
from recovery.ledger import EndedAt
from recovery.model import CallId, Request
from recovery.ports import Entropy, ObjectStore, SegmentCodec, Staging
from recovery.reading import read_transcripts
from recovery.resume import StopRules
from recovery.staging import Staged, Stager
from vllm_hooks.admission import again, bring_back
from vllm_hooks.capturing import Capturing
from vllm_hooks.flushing import Flushing
from vllm_hooks.ray_workers.messages import Claimed, Cut, Gone, Joined, NotAMember, WorkerId
from vllm_hooks.ray_workers.step_log import StepLog

RETRY_S = 0.1
LET_GO_AFTER_S = 60.0
"""Beyond a snapshot's own deadline, a hold or fence that nobody took back is taken back here."""

Claim = Callable[[WorkerId, CallId], Awaitable[Claimed | None]]


class WorkerSession(Capturing):
    """`claim` asks the coordinator for a call; it raises Gone, NotAMember or Fenced where none answers.

    `on_superseded` is told of a call that another worker has taken over.
    """

    def __init__(
        self,
        config: CheckpointingConfig,
        store: ObjectStore,
        segments: SegmentCodec,
        entropy: Entropy,
        name: str,
        claim: Claim,
        staging: Staging | None = None,
    ) -> None:
        super().__init__(config, capturing=True, keeps_results=True)
        self._store = store
        self._segments = segments
        self.entropy = entropy
        self._name = name
        self._claim = claim
        self._staging = staging
        self.worker: WorkerId = self._new_id()
        self.epoch = 0
        self.steps = StepLog()
        self.ended_in: dict[CallId, int] = {}
        """The epoch in which the end of a call was stored."""
        self.on_superseded: Callable[[LiveCall], None] = lambda call: None
        self._joined = asyncio.Event()
        self._stager: Stager | None = None
        self._unacknowledged: list[Staged] = []
        self._flush: Future[RecoveryError | None] | None = None
        self._hold: Hold | None = None
        self._letting_go: asyncio.TimerHandle | None = None
        self.on_tokens = self._note_step

    def _new_id(self) -> WorkerId:
        return f"{self._name}-{self.entropy.hex(4)}"

    def bind(self) -> None:
        """To the running loop."""
        self._bind()

    def _note_step(self, call: LiveCall, n_tokens: int) -> None:
        self.steps.add(time.time(), n_tokens)

    # ---- which coordinator is followed -------------------------------------------------------------------------

    @property
    def is_member(self) -> bool:
        """Whether the followed coordinator's answer to the last `leave` has come."""
        return self._joined.is_set()

    def leave(self) -> dict[CallId, int]:
        """Nobody may claim until `follow`. Returns the live calls, by attempt."""
        self._joined.clear()
        return {call.call_id: call.attempt for call in self.table}

    def forsake(self) -> None:
        """The coordinator has given everything here to others: come back as somebody else, with no call."""
        self.worker = self._new_id()
        self._supersede([call.call_id for call in self.table])

    def follow(self, joined: Joined) -> None:
        """Take part in the snapshots of another coordinator, and hand over again what it has not."""
        self._let_go()
        self._supersede(joined.superseded)
        if self._stager is not None:
            self.flushing.close()
            self._stager.close(wait=False)
        self.epoch = joined.epoch
        self._unacknowledged = []
        self._stager = self._new_stager(joined.epoch)
        self.flushing = Flushing(
            self._stager,
            self.freeze,
            self.table.longest_pending,
            self._config.gym.generation_chunk_flush_tokens,
            self._on_program_error,
        )
        self.flushing.bind(asyncio.get_running_loop())
        self.table.rewind(joined.stored)
        self.flushing.want()
        self._joined.set()

    def _new_stager(self, epoch: int) -> Stager:
        def staged(item: Staged) -> None:
            self._call_on_loop(self._note_staged, epoch, item)

        parts, name = (self._store, self._segments, self.entropy), self.worker
        return Stager(*parts, epoch=epoch, worker=name, on_staged=staged, staging=self._staging)

    def _note_staged(self, epoch: int, item: Staged) -> None:
        self._on_staged(item)
        for call_id in ended_by(item):
            self.ended_in[call_id] = epoch

    def _supersede(self, call_ids: Iterable[CallId]) -> None:
        for call_id in list(call_ids):
            call = self.table.get(call_id)
            if call is not None:
                self.table.forget(call_id)
                self.on_superseded(call)

    async def _call_for(self, request: Request, stop: StopRules) -> LiveCall:
        call_id = digests.call_of(request)
        while True:
            await self._joined.wait()
            self.raise_if_failed()
            live = self.table.get(call_id)
            if live is not None:
                return again(self.table, live, stop)
            epoch, worker = self.epoch, self.worker
            try:
                claimed = await self._claim(worker, call_id)
            except (Gone, NotAMember, Fenced):  # the next one answers, or the job is ended by who runs it
                claimed = None
            if claimed is None:
                await asyncio.sleep(RETRY_S)
                continue
            carried = None
            if (part := claimed.part) is not None:
                try:
                    read = await asyncio.to_thread(read_transcripts, self._store, self._segments, part, list(part))
                except ObjectMissing:  # moved by compaction meanwhile; or lost, which the next claim looks into
                    continue
                carried = read[call_id]
            if (epoch, worker) != (self.epoch, self.worker) or not self._joined.is_set():
                continue  # another coordinator by now: it must know whose the call is
            if (live := self.table.get(call_id)) is not None:
                return again(self.table, live, stop)
            if claimed.part is None or carried is None:
                return self.table.open(request, call_id, claimed.attempt)
            entry = claimed.part.get(call_id)
            assert entry is not None
            return bring_back(self.table, entry, carried, keep=True)

    # ---- a snapshot's steps ------------------------------------------------------------------------------------

    async def step(self, worker: WorkerId, name: str, epoch: int, *arguments: Any) -> Any:
        """Do what a coordinator asks. Raises Gone for another incarnation, Fenced for an older coordinator."""
        if worker != self.worker:
            raise Gone(worker)
        if epoch < self.epoch:
            raise Fenced(
                f"worker {worker} follows epoch {self.epoch}; this coordinator holds epoch {epoch}",
                hint="another coordinator took over; stop this one",
            )
        if epoch > self.epoch or not self._joined.is_set():
            raise SnapshotAbandoned(f"worker {worker} is just joining", hint="nothing to do: the next one has it")
        match name:
            case "hold":
                self._hold_for(*arguments)
            case "release":
                self._let_go()
            case "raise_fence":
                self.barriers.raise_fence()
            case "lower_fence":
                self.barriers.lower_fence()
            case "cut":
                return self._cut()
            case "stage":
                return await self._stage(*arguments)
            case "store_again":
                return await self._again(*arguments)
            case "rewind":
                self._rewind(*arguments)
            case "published":
                self._published(*arguments)
            case _:
                raise ValueError(f"there is no step {name!r}")
        return None

    def _hold_for(self, reason: str) -> None:
        self._let_go()
        self._hold = self.barriers.hold(HoldKind.CUT, "coordinator", reason, time.time())
        after_s = self._config.snapshot_timeout_s + LET_GO_AFTER_S
        self._letting_go = asyncio.get_running_loop().call_later(after_s, self._let_go)

    def _let_go(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            self.barriers.release(hold)
        if self._letting_go is not None:
            self._letting_go.cancel()
            self._letting_go = None
        self.barriers.lower_fence()

    def _cut(self) -> Cut:
        if self.dead_engine is not None:
            raise EngineDead(f"the engine died: {self.dead_engine}", hint="its calls go on in other workers")
        began = time.perf_counter()
        self._flush = self.flushing.submit(self.cut())
        return Cut(self._n_cut, time.perf_counter() - began)

    async def _stage(self, known: Mapping[str, int]) -> list[Staged]:
        assert self._flush is not None and self._stager is not None
        error = await asyncio.wrap_future(self._flush)
        if error is not None:
            raise error
        self._unacknowledged += self._stager.take_staged()
        self._unacknowledged = [item for item in self._unacknowledged if item.flush > known.get(item.writer, 0)]
        return list(self._unacknowledged)

    async def _again(self, staged: Staged) -> Staged | None:
        assert self._stager is not None
        return await asyncio.wrap_future(self._stager.store_again(staged))

    def _rewind(self, stored: Stored) -> None:
        self.table.rewind(stored)
        self.flushing.want()

    def _published(self, ended: Iterable[CallId]) -> None:
        assert self._stager is not None
        self._stager.published()
        self.table.published(ended)
        for call_id in ended:
            self.ended_in.pop(call_id, None)

    @property
    def n_captured(self) -> int:
        return self._n_captured

    @property
    def staging_trouble(self) -> RecoveryError | None:
        """Why flushes go to the store, and do not wait where they should."""
        return None if self._stager is None else self._stager.counters.staging_error

    async def flushed(self) -> None:
        """What is captured now is stored, or could not be."""
        if self._stager is not None:
            await asyncio.wrap_future(self.flushing.submit(self.freeze()))

    def close(self) -> None:
        """Take no more calls, and let go of the stager."""
        self._stopped = True
        self._polling.close()
        self._let_go()
        if self._stager is not None:
            self.flushing.close()
            self._stager.close(wait=False)


def ended_by(staged: Staged) -> list[CallId]:
    """Calls whose end is in a segment."""
    return [at.call_id for at in staged.coordinates if isinstance(at, EndedAt)]
