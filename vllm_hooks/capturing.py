"""What one engine's tokens go into: the live calls of one process, and what its loop does with them.

Owns: the table of live calls, the barriers that they may have to wait for, the policy version, what stops the process.
Does not know: where a call of an earlier life comes from, who takes snapshots (session.py), vLLM's classes.

Everything but what says otherwise runs on the one event loop that consumes the engine.

Invariants:
1. Between two outputs of the engine a cut is one synchronous function on the loop; it has no await and copies nothing.
2. While the fence is up terminal results wait and decoding goes on.
3. A periodic flush is skipped and counted while the stager is busy; its tokens go with the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.asked import checked
from recovery.buffer import Columns
from recovery.calls import CallTable, Captured, LiveCall
from recovery.config import CheckpointingConfig
from recovery.errors import InputError, ProgramError, RecoveryError
from recovery.ledger import EndedAt
from recovery.model import CallId, PolicyVersion, Request
from recovery.ports import Entropy
from recovery.resume import StopRules
from recovery.staging import Staged
from vllm_hooks.barriers import Barriers
from vllm_hooks.deliveries import Deliveries
from vllm_hooks.flushing import Flushing
from vllm_hooks.parity import NOT_TESTED
from vllm_hooks.pull import Polling, Pulled, PullReader
from vllm_hooks.unresumable import Unresumable


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
    calls_diverged: int = 0


class Capturing:
    """The half of a session that an engine meets (RecoverableEngine).

    `source_digests` maps a request id to the digest of the caller's own row, recorded with the call.
    `parity`: what the self-test saw, if there was one.
    `pulls`: set it where parity.self_test saw the pull capture agree; FINAL_ONLY requests are then read, not streamed.
    `keeps_ranks`: set it to False where nobody looks at ranks: with `logprobs: 0` they are then not captured.
    `on_tokens`, if set, is told on the loop of each captured output: the call and its number of new tokens; `on_left`
    of each call whose stream is over.
    """

    flushing: Flushing
    entropy: Entropy

    def __init__(self, config: CheckpointingConfig, *, capturing: bool, keeps_results: bool) -> None:
        self._config = config
        self.keeps_results = keeps_results
        self.capturing = capturing
        self.whole_calls = config.gym.mode == "turn"
        self.counters = SessionCounters()
        self.unresumable = Unresumable(config)
        self.source_digests: Mapping[str, str] = {}
        self._version = PolicyVersion()
        self.pulls = False
        self.keeps_ranks = True
        self.parity = NOT_TESTED
        self.on_tokens: Callable[[LiveCall, int], None] | None = None
        self.on_left: Callable[[LiveCall], None] | None = None
        self.barriers = Barriers()
        self.table = CallTable()
        self.failure: RecoveryError | None = None
        self.dead_engine: BaseException | None = None
        self.engine_may_end = False
        """Whoever owns the engine is ending it: that is no death, and the last snapshot is taken after it."""
        self._deliveries = Deliveries(keeps=keeps_results)
        self._n_captured = self._n_cut = 0
        self._polling = Polling(self.captured, config.gym.generation_chunk_flush_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failing: asyncio.Event | None = None
        self._stopped = False

    def _bind(self) -> None:
        """To the running loop."""
        self._loop = asyncio.get_running_loop()
        self._failing = asyncio.Event()

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

    # ---- what capture calls ------------------------------------------------------------------------------------

    async def admit(self, request: Request, stop: StopRules, *, placed: bool = False) -> LiveCall:
        """The live call for a request: new, carried on from a restore, or carried on after an interruption.

        `placed`: it is a call of a trajectory, and replaces what the store has at its place.

        Raises InputError for what cannot be kept (recovery.asked).
        """
        request = checked(request)
        self.unresumable.admit(request)

        def check() -> None:
            self.raise_if_failed()
            if self._stopped:
                raise InputError(
                    f"request {request.rollout!r} came after the session was stopped",
                    hint="open a new session; it carries on what this one saved",
                )

        await self.barriers.pass_gate(check)
        if placed:
            self._take_place(request)
        return await self._call_for(request, stop)

    def _take_place(self, request: Request) -> None:
        """Drop another call that stands at this request's place, and what followed from it."""

    async def _call_for(self, request: Request, stop: StopRules) -> LiveCall:
        raise NotImplementedError

    def captured(self, call: LiveCall, token_ids: Any, logprobs: list[float] | None, columns: Columns = None) -> None:
        """Take one engine output into the call's buffer."""
        if not token_ids:
            return
        n_pending = call.append(token_ids, logprobs or None, self._version, columns)
        self._n_captured += 1
        self.counters.tokens_captured += len(token_ids)
        if self.on_tokens is not None:
            self.on_tokens(call, len(token_ids))
        if not self.whole_calls:
            self.flushing.pending(n_pending)

    async def terminal(self, call: LiveCall, finish_reason: str, stop_reason: int | str | None) -> None:
        """Make a call terminal as soon as no fence is up."""
        await self.barriers.pass_fence()
        self.raise_if_failed()
        self._deliveries.ending(call)
        call.end(finish_reason, stop_reason)
        self._n_captured += 1
        self.flushing.ended()

    def new_seed(self) -> int:
        """For a sampled call that was given none. Stored with the call, so that it is drawn alike in every process."""
        return int(self.entropy.hex(6), 16)

    def pull(self, call: LiveCall, reader: PullReader, request_id: str, n_top: int | None) -> Pulled:
        """Read this call's tokens from the engine's front end, at cuts and now and then, from here on."""
        return self._polling.add(Pulled(call, reader, request_id, n_top))

    def pull_last(self, call: LiveCall) -> None:
        """Read what is there for the last time; harmless for a call that is streamed."""
        self._polling.remove(call)

    def left(self, call: LiveCall, *, placed: bool = False) -> None:
        """The caller's stream is over: ended, aborted or failed. A call of a trajectory is waited for with `saved`."""
        call.in_use = False
        if self.on_left is not None:
            self.on_left(call)
        if call.ended is not None and self.keeps_results and not placed:
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
        return self.table.freeze(whole_calls=self.whole_calls)

    async def durable(self, rollout: str) -> LiveCall:
        """The ended call of that request id, once its terminal record is in the store. Once per call.

        Only with `keeps_results`. Raises what stopped the session.
        """
        self.raise_if_failed()
        return await self._deliveries.take(rollout)

    async def saved(self, call_id: CallId) -> None:
        """Wait until the end of a call is in the store. At once for one that came from there, or has not ended.

        Raises what stopped the session.
        """
        self.raise_if_failed()
        if self._deliveries.awaits(call_id):
            self.flushing.want()  # where flushes are at cuts only, too
            await self._deliveries.saved(call_id)

    def engine_died(self, error: BaseException) -> None:
        """The engine process is gone: no snapshot is taken from here on, what was captured is flushed."""
        if self.dead_engine is None and not self.engine_may_end:
            self.dead_engine = error
            self.flushing.want()

    # ---- told by other threads ---------------------------------------------------------------------------------

    def _on_staged(self, staged: Staged) -> None:
        ended = [at.call_id for at in staged.coordinates.others.values() if isinstance(at, EndedAt)]
        self._call_on_loop(self._deliveries.stored, ended)

    def _on_program_error(self, error: BaseException) -> None:
        self.fail(ProgramError(f"storing what was captured failed: {error!r}", hint="this is a bug; please report it"))

    def _call_on_loop(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work, *arguments)

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

    def has_result(self, rollout: str) -> bool:
        """Whether `durable(rollout)` has something to give: False for a request that was not captured."""
        return self._deliveries.has(rollout)
