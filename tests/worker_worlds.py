"""Workers under one coordinator in one process: real sessions, a real coordination and store, no Ray and no engine.

Owns: a worker whose tokens are a function of all tokens before (fake_engine.py), a driver that sends calls again, and
killing either side.
Does not know: pytest, what is expected.

A killed worker answers Gone and writes nothing more; a killed coordinator is not asked any more. What either had put in
the store stays.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from recovery.calls import LiveCall
from recovery.config import CheckpointingConfig, GymConfig
from recovery.errors import RecoveryError
from recovery.model import CallId, Request
from recovery.ports import Participant
from storage_backends import open_store
from storage_backends.codecs import MixedSegmentCodec
from tests.fake_engine import EOS, MUST, PROMPTS, STOP, Prompt, logprob, next_token
from tests.fakes import SeededEntropy
from vllm_hooks import opening
from vllm_hooks.ray_workers.coordination import Coordination
from vllm_hooks.ray_workers.messages import Claimed, Gone, Joining, NotAMember, Superseded
from vllm_hooks.ray_workers.worker_session import WorkerSession

WAIT_S = 120.0


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds. Raises TimeoutError naming `what`."""
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.002)
    assert holds(), what


class Worker:
    """One engine: decodes one token of each of its calls whenever `pace` lets it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.killed = False
        self.left: asyncio.Event | None = None
        self.tasks: dict[str, asyncio.Task[list[int]]] = {}
        self.n_decoded = 0
        store = open_store(world.config.store or "", create=True)
        entropy = SeededEntropy(f"{name} {world.rng.random()}")
        parts = (MixedSegmentCodec("arrow"), entropy, name, self._claim, opening.staging_for(world.config, store))
        self.session = WorkerSession(world.config, store, *parts)
        self.session.bind()
        self.session.on_superseded = self._superseded

    def _superseded(self, call: LiveCall) -> None:
        self.tasks[call.request.rollout].cancel()

    async def _claim(self, worker: str, call_id: CallId) -> Claimed | None:
        coordination = self.world.coordination
        if coordination is None:
            raise Gone("no coordinator")
        claimed = await asyncio.to_thread(coordination.claim, worker, call_id, 5.0)
        if coordination is not self.world.coordination:
            raise Gone("it was killed before it answered")
        return claimed

    async def join(self) -> None:
        coordination = self.world.coordination
        assert coordination is not None
        joining = Joining(self.session.worker, self.session.leave(), MUST, {}, "bitwise")
        try:
            joined = await asyncio.to_thread(coordination.join, joining, self.ask)
        except NotAMember:
            self.session.forsake()
            await self.join()
            return
        self.session.follow(joined)

    def ask(self, step: str, epoch: int, *arguments: Any) -> Future[Any]:
        asked: Future[Any] = Future()
        worker, loop = self.session.worker, self.world.loop

        async def answer() -> Any:
            if self.killed:
                raise Gone(worker)
            return await self.session.step(worker, step, epoch, *arguments)

        asyncio.run_coroutine_threadsafe(answer(), loop).add_done_callback(lambda done: _hand_on(done, asked))
        return asked

    async def run(self, prompt: Prompt) -> list[int]:
        """One call to its durable end. Raises Gone if the worker is killed before."""
        task = self.tasks[prompt.rollout] = asyncio.create_task(self._generate(prompt))
        try:
            return await task
        except asyncio.CancelledError:
            raise (Gone if self.killed else Superseded)(prompt.rollout) from None

    async def _generate(self, prompt: Prompt) -> list[int]:
        session = self.session
        call = await session.admit(request_of(prompt), STOP)
        try:
            while call.ended is None:
                await self.world.pace(self)
                tokens = list(call.transcript_ids)
                if len(tokens) >= prompt.max_tokens or tokens[-1:] == [EOS]:
                    await session.terminal(call, "stop" if tokens[-1:] == [EOS] else "length", None)
                    break
                token = next_token(prompt.ids, tokens)
                session.captured(call, [token], [logprob(token, len(tokens))])
                self.n_decoded += 1
        finally:
            session.left(call)
        return list((await session.durable(prompt.rollout)).transcript_ids)

    async def retire(self) -> None:
        """As an actor does it that is to leave: nothing is decoded after the flush, and nothing is lost."""
        self.left = asyncio.Event()
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await self.session.flushed()
        self.killed = True
        self.left.set()

    def kill(self) -> None:
        """As SIGKILL: nothing more comes of it, but what the store has already been asked for."""
        self.killed = True
        for task in self.tasks.values():
            task.cancel()
        self.session.close()


class World:
    """A job of several workers. `pace` is awaited before each token of each call."""

    def __init__(self, folder: Any, rng: random.Random, *, flush: int = 8, **fields: Any) -> None:
        gym = GymConfig(generation_chunk_flush_tokens=flush)
        values = {"snapshot_interval_s": 3600.0, "snapshot_timeout_s": 60.0, **fields}
        self.config = CheckpointingConfig(enabled=True, store=str(folder), gym=gym, **values)
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.coordination: Coordination | None = None
        self.workers: list[Worker] = []
        self.participants: list[tuple[Participant, float]] = []
        """Those that a coordinator in another's place is told of."""
        self.pace: Callable[[Worker], Awaitable[None]] = lambda worker: asyncio.sleep(0)
        self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """As actors do it, but that joining is the test's."""
        while True:
            coordination = self.coordination
            for worker in self.alive:
                if coordination is not None and coordination.failure is None:
                    coordination.beat(worker.session.worker, worker.session.n_captured)
            await asyncio.sleep(0.01)

    async def coordinate(self, *, again: bool = False, owner: str = "this run") -> Coordination:
        """Start a coordinator (in the place of another with `again`), and let every worker join it."""
        made = await asyncio.to_thread(lambda: Coordination.open(self.config, MUST, {}, STOP, owner=owner, again=again))
        if again:
            made.go_on(self.participants)
        else:
            made.start()
        self.coordination = made
        for worker in self.workers:
            if not worker.killed:
                await worker.join()
        return made

    def kill_coordinator(self) -> Coordination:
        """Nobody asks it any more. It may still be in the middle of a snapshot: a stalled one."""
        old, self.coordination = self.coordination, None
        assert old is not None
        return old

    async def worker(self) -> Worker:
        made = Worker(self, f"w{len(self.workers)}")
        self.workers.append(made)
        if self.coordination is not None:
            await made.join()
        return made

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.killed]

    async def to_the_end(self, prompt: Prompt, first: Worker) -> list[int]:
        """A call in `first`, and elsewhere if that is killed, as the driver of a job does it."""
        worker = first
        while True:
            try:
                return await worker.run(prompt)
            except (Gone, Superseded):
                if worker.left is not None:
                    await worker.left.wait()
                if worker.killed:
                    await self.lost(worker)
                worker = self.rng.choice(self.alive)

    async def lost(self, worker: Worker) -> Any:
        while True:
            coordination = self.coordination
            if coordination is not None:
                try:
                    return await asyncio.to_thread(coordination.lost, worker.session.worker)
                except RecoveryError:
                    if coordination is self.coordination:
                        raise
            await asyncio.sleep(0.01)

    async def answers(self, prompts: Sequence[Prompt] = PROMPTS) -> dict[str, tuple[int, ...]]:
        """All calls, spread over the workers there are."""
        alive = self.alive
        calls = [self.to_the_end(prompt, alive[k % len(alive)]) for k, prompt in enumerate(prompts)]
        found = await asyncio.gather(*calls)
        return {prompt.rollout: tuple(tokens) for prompt, tokens in zip(prompts, found, strict=True)}

    async def snapshot(self) -> int:
        """Take one now; the number of those published."""
        coordination = self.coordination
        assert coordination is not None
        before = coordination.figures().snapshots
        coordination.request("request")
        await until(lambda: coordination.figures().snapshots > before, "a snapshot is published")
        return coordination.figures().snapshots

    async def close(self) -> None:
        self._beats.cancel()
        if self.coordination is not None:
            coordination = self.coordination
            await asyncio.to_thread(lambda: coordination.finish(last=True))
        for worker in self.alive:
            worker.session.close()


def request_of(prompt: Prompt) -> Request:
    ids = np.asarray(prompt.ids, dtype=np.int32)
    sampling = {"temperature": 0.0, "max_tokens": prompt.max_tokens}
    return Request(rollout=prompt.rollout, prompt_token_ids=ids, sampling=sampling)


def _hand_on(done: Future[Any], asked: Future[Any]) -> None:
    if done.cancelled():
        asked.set_exception(Gone("the world has ended"))
        return
    error = done.exception()
    if error is None:
        asked.set_result(done.result())
    else:
        asked.set_exception(error)
