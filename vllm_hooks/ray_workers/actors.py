"""The two kinds of actor: a coordinator, and a worker with an engine.

Owns: what Ray calls in them.
Does not know: how actors are placed and watched (cluster.py), how an error crosses between them (answers.py), what a
coordinator decides, what an engine is made of.

Invariants:
1. A worker asks after its coordinator several times a second, and joins whichever answers. One that can no longer do
   that fails; it does not go on unheard.
2. A coordinator that cannot open its store says so to whoever asks it; it does not vanish.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from recovery.calls import LiveCall
from recovery.config import CheckpointingConfig
from recovery.errors import EngineDead, Fenced, ProgramError, RecoveryError, Retry
from recovery.ledger import Ledger
from recovery.model import CallId, PolicyVersion, Request
from recovery.resume import StopRules
from storage_backends import open_store
from storage_backends.codecs import MixedSegmentCodec
from vllm_hooks import surface
from vllm_hooks.capture import RecoverableEngine, drain
from vllm_hooks.fingerprint import engine_fields
from vllm_hooks.opening import SystemEntropy, staging_for
from vllm_hooks.ray_workers.answers import RemoteParticipants, answer, asking
from vllm_hooks.ray_workers.coordination import Coordination
from vllm_hooks.ray_workers.messages import (
    Claimed,
    Figures,
    Gone,
    Joined,
    Joining,
    Lost,
    NotAMember,
    Refused,
    Superseded,
    WorkerId,
)
from vllm_hooks.ray_workers.step_log import Steps
from vllm_hooks.ray_workers.worker_session import WorkerSession
from vllm_hooks.start import graded, rules_of

BEAT_S = 0.25
ANSWER_S = 20.0
"""How long a worker waits for an answer of its coordinator before it asks anew."""
CLAIM_S = 10.0


class CoordinatorActor:
    """Coordination, for Ray. `again`: see Coordination.open; so is one that Ray has started again."""

    def __init__(
        self,
        config: CheckpointingConfig,
        must: Mapping[str, Any],
        recorded: Mapping[str, Any],
        stop: StopRules,
        owner: str,
        again: bool,
    ) -> None:
        again = again or bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._failure: RecoveryError | None = None
        self._remote = RemoteParticipants()
        while True:
            try:
                self._inner = Coordination.open(config, must, recorded, stop, owner=owner, again=again)
            except Retry as error:
                if again:  # a job is running: it waits for its store
                    time.sleep(1.0)
                    continue
                self._failure = error
            except RecoveryError as error:
                self._failure = error
            break

    def _coordination(self) -> Coordination:
        if self._failure is not None:
            raise self._failure
        return self._inner

    def opened(self) -> tuple[Any, list[str]]:
        """What was restored, and what differs since."""
        opened = self._coordination().opened
        return opened.restored, opened.changed

    def pid(self) -> int:
        return os.getpid()

    def start(self) -> None:
        self._coordination().start()

    def go_on(self, participants: Mapping[str, tuple[Any, float]]) -> None:
        """In another's place, with its participants: handle and deadline by name."""
        asked = [(self._remote.of(name, *given), given[1]) for name, given in participants.items()]
        self._coordination().go_on(asked)

    def join_participant(self, name: str, handle: Any, timeout_s: float, running: bool = False) -> None:
        one = self._remote.of(name, handle, timeout_s)
        self._coordination().participants.join(one, timeout_s, running=running)

    def participant_left(self, name: str) -> None:
        self._coordination().participants.leave(name)

    def finish(self, last: bool, timeout_s: float | None) -> Any:
        return self._coordination().finish(last=last, timeout_s=timeout_s)

    def join(self, joining: Joining, handle: Any) -> Joined:
        return self._coordination().join(joining, asking(joining.worker, handle))

    def beat(self, worker: WorkerId, n_captured: int) -> int | None:
        return self._coordination().beat(worker, n_captured)

    @ray.method(concurrency_group="claims")
    def claim(self, worker: WorkerId, call_id: CallId) -> Claimed | None:
        return self._coordination().claim(worker, call_id, CLAIM_S)

    def lost(self, worker: WorkerId) -> Lost:
        return self._coordination().lost(worker)

    def everything(self) -> Ledger:
        return self._coordination().everything()

    def excerpt(self, call_ids: list[CallId]) -> Ledger:
        return self._coordination().excerpt(call_ids)

    def drop(self, call_id: CallId) -> None:
        self._coordination().drop(call_id)

    def unsure(self, ended: Mapping[CallId, int]) -> list[CallId]:
        return self._coordination().unsure(ended)

    def request(self, cause: str) -> None:
        self._coordination().request(cause)

    def figures(self) -> Figures:
        return self._coordination().figures()


@dataclass(frozen=True, slots=True)
class Answer:
    """A call that ended. `epoch`: in which its end was stored; None if it was not captured."""

    call_id: CallId | None
    epoch: int | None
    request: Request
    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[int, int, PolicyVersion]]
    finish_reason: str
    stop_reason: int | str | None
    text: str


@dataclass(frozen=True, slots=True)
class News:
    """A look at a worker. `tokens`: captured since the last look, by request id; `trouble`: with its staging."""

    worker: WorkerId
    epoch: int
    tokens: Mapping[str, int]
    dead: str = ""
    trouble: str = ""


class EngineWorker:
    """One engine. `start` makes it: anything with `llm` (an AsyncLLM) and `close`, such as prefix_recovery's Engine."""

    def __init__(
        self, name: str, start: Callable[[], Any], config: CheckpointingConfig, must: Mapping[str, Any], test: bool
    ):
        self._engine = start()
        self._config = config
        self._more = must
        self._test = test
        self._digests: dict[str, str] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._superseded: set[str] = set()
        self._tokens: dict[str, int] = {}
        self._name = name
        self._beats: asyncio.Task[None] | None = None
        self._ready: asyncio.Event | None = None
        self._retired = False
        self._coordinator: Any = None
        self._number = 0

    # ---- a coordinator -----------------------------------------------------------------------------------------

    async def follow(self, coordinator: Any, number: int) -> WorkerId:
        """Join this coordinator, now and whenever it was started again. Returns once the worker is a member.

        `number`: the how-manieth coordinator of the job it is. Ray may begin a later call of an actor before an
        earlier one, and the newest is followed whichever comes last.
        """
        if number >= self._number:
            self._coordinator, self._number = coordinator, number
        if self._ready is None:
            self._ready = asyncio.Event()
            await self._set_up()
        await self._ready.wait()
        self.session.raise_if_failed()
        return self.session.worker

    async def _set_up(self) -> None:
        config, llm = self._config, self._engine.llm
        assert config.store is not None
        rules = rules_of(llm, config)
        own, recorded = await asyncio.to_thread(engine_fields, llm, rules)
        store = await asyncio.to_thread(open_store, config.store, create=True, **config.store_options.given())
        staging = await asyncio.to_thread(staging_for, config, store)
        self.session = session = WorkerSession(
            config, store, MixedSegmentCodec(config.codec), SystemEntropy(), self._name, self._claim, staging
        )
        session.bind()
        session.source_digests = self._digests
        session.keeps_ranks = False
        session.on_superseded = self._on_superseded
        count = session.on_tokens
        assert count is not None

        def counted(call: LiveCall, n_tokens: int) -> None:
            count(call, n_tokens)
            self._tokens[call.request.rollout] = self._tokens.get(call.request.rollout, 0) + n_tokens

        session.on_tokens = counted
        if self._test:
            session.parity = await graded(llm, {**own, **recorded})
            session.pulls = session.parity.pull_agrees
        self._fields = ({**own, **self._more}, recorded)
        self.llm = RecoverableEngine(llm, session)
        self._follow_for_ever()

    async def _claim(self, worker: WorkerId, call_id: CallId) -> Claimed | None:
        try:
            claimed: Claimed | None = await answer(self._coordinator.claim.remote(worker, call_id), ANSWER_S + CLAIM_S)
        except TimeoutError:
            raise Gone("no answer") from None
        return claimed

    async def _beat(self) -> None:
        session = self.session
        while True:
            try:
                epoch = await answer(self._coordinator.beat.remote(session.worker, session.n_captured), ANSWER_S)
                # A member of this epoch that does not know it: the answer was lost. To join twice is to join once.
                if epoch is None or epoch != session.epoch or not session.is_member:
                    await self._join()
            except (Gone, NotAMember, TimeoutError, Retry, Fenced):
                pass  # asked again below, or another by then; meanwhile calls go on decoding
            except RecoveryError as error:
                session.fail(error)
            await asyncio.sleep(BEAT_S)

    def _follow_for_ever(self) -> None:
        self._beats = asyncio.create_task(self._beat())
        self._beats.add_done_callback(self._beats_ended)

    def _beats_ended(self, beats: asyncio.Task[None]) -> None:
        """A worker that nobody hears of any more must not go on as if nothing were."""
        if not beats.cancelled() and (error := beats.exception()) is not None:
            wrong = ProgramError(f"following the coordinator failed: {error!r}", hint="this is a bug; please report it")
            self.session.fail(wrong)

    async def _join(self) -> None:
        session = self.session
        assert self._ready is not None
        must, recorded = self._fields
        joining = Joining(session.worker, session.leave(), must, recorded, session.parity.grade)
        me = ray.get_runtime_context().current_actor
        try:
            joined: Joined = await answer(self._coordinator.join.remote(joining, me), ANSWER_S)
        except NotAMember:
            session.forsake()
            raise
        if joined.epoch < session.epoch:
            return  # an old one that still answers
        session.follow(joined)
        self._ready.set()

    def _on_superseded(self, call: LiveCall) -> None:
        name = call.request.rollout
        task = self._running.get(name)
        if task is not None:
            self._superseded.add(name)
            task.cancel()

    async def step(self, worker: WorkerId, name: str, epoch: int, *arguments: Any) -> Any:
        """What a coordinator asks: WorkerSession.step."""
        return await self.session.step(worker, name, epoch, *arguments)

    # ---- the driver --------------------------------------------------------------------------------------------

    async def run(self, name: str, prompt: Any, params: Any, source_digest: str) -> Answer:
        """Generate one call to its end, and return it when that is stored.

        Raises EngineDead if the engine is gone, Superseded if the call is another worker's by now, and what a refused
        request raises.
        """
        session = self.session
        if self._retired:
            raise Superseded(name)
        self._digests[name] = source_digest
        task = asyncio.create_task(self._to_the_end(name, prompt, params))
        self._running[name] = task
        try:
            return await task
        except asyncio.CancelledError:
            if name in self._superseded:
                raise Superseded(name) from None
            raise
        except Exception as error:
            if surface.is_engine_dead(error):
                await session.flushed()  # what its front end had is saved
                raise EngineDead(str(error) or "its process is gone", hint="") from None
            if surface.is_refusal(error):
                raise Refused(surface.refusal_text(error)) from None
            raise
        finally:
            del self._running[name]
            self._digests.pop(name, None)
            self._superseded.discard(name)

    async def _to_the_end(self, name: str, prompt: Any, params: Any) -> Answer:
        session = self.session
        output = await drain(self.llm.generate(prompt, params, name))
        completion = output.outputs[0]
        if not session.has_result(name):
            ids = list(completion.token_ids)
            request = Request(rollout=name, prompt_token_ids=output.prompt_token_ids, sampling={})
            logprobs = surface.sampled_logprobs(ids, completion.logprobs) or []
            spans = [(0, len(ids), session.version)]
            ended = (str(completion.finish_reason), completion.stop_reason, completion.text)
            return Answer(None, None, request, ids, logprobs, spans, *ended)
        call = await session.durable(name)
        assert call.ended is not None
        return Answer(
            call.call_id,
            session.ended_in.get(call.call_id, session.epoch),
            call.request,
            list(call.transcript_ids),
            list(call.transcript_logprobs),
            list(call.version_spans),
            call.ended.finish_reason,
            call.ended.stop_reason,
            completion.text,
        )

    async def news(self) -> News:
        """What happened since the last look."""
        session = self.session
        tokens, self._tokens = self._tokens, {}
        session.raise_if_failed()
        dead, trouble = session.dead_engine, str(session.staging_trouble or "")
        why = "" if dead is None else (str(dead) or "its process is gone")
        return News(session.worker, session.epoch, tokens, why, trouble)

    async def steps(self, start_s: float, end_s: float) -> Steps:
        """The engine's steps between two moments (seconds since 1970)."""
        return self.session.steps.between(start_s, end_s)

    async def retire(self) -> News:
        """Take no call any more and stop those that run: what they had is stored, and others may carry them on."""
        self._retired = True
        if self._beats is not None:
            self._beats.cancel()
        running = dict(self._running)
        self._superseded.update(running)
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        await self.session.flushed()
        return await self.news()

    async def parity(self) -> Any:
        return self.session.parity

    async def close(self) -> None:
        """End the engine."""
        if self._beats is not None:
            self._beats.cancel()
            self.session.close()
        self._engine.close()
