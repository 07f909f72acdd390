"""What happens to workers whose flushes wait in a staging: deaths, each played to the end of every call.

Owns: the scenes, and what is true after each whatever the staging is.
Does not know: which staging it is; pytest.

Nothing here waits for a time: a scene waits for the state that it is about, and dies then.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from recovery.config import CheckpointingConfig
from tests.fake_engine import EOS, MUST, STOP, Prompt, logprob, next_token, reference_answers
from tests.worker_worlds import Worker, World, request_of, until
from vllm_hooks.session import RecoverySession

T = TypeVar("T")
_SOME = (Prompt(f"long-{k}", (7 + k, 3), 240) for k in range(1000))
LONG = tuple(prompt for prompt, _ in zip((p for p in _SOME if len(p.reference()) >= 180), range(4), strict=False))
"""Calls that do not end early: until one ends, nothing but a cut stores anything."""


def played(
    folder: Path, rng: random.Random, play: Callable[..., Coroutine[Any, Any, T]], *more: Any, staging: str = "store"
) -> T:
    async def all_of_it() -> T:
        world = World(folder / "store", rng, staging=staging)
        try:
            return await play(world, *more)
        finally:
            await world.close()

    return asyncio.run(all_of_it())


class Standing:
    """A pace at which every worker stops after so many tokens until it is let go."""

    def __init__(self, n_tokens: int) -> None:
        self._n_tokens = n_tokens
        self.go = asyncio.Event()

    async def __call__(self, worker: Worker) -> None:
        while worker.n_decoded >= self._n_tokens and not self.go.is_set():
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)


async def decoded_and_flushed(world: World, n_tokens: int) -> None:
    """Until each worker has decoded so much, and what it flushed is where it should be."""
    for worker in world.alive:
        await until(lambda w=worker: w.n_decoded >= n_tokens, "it decodes")  # type: ignore[misc]
        stager = worker.session._stager
        assert stager is not None
        await until(lambda w=worker, s=stager: w.session.table.longest_pending() < 8 and not s.busy, "flushed")  # type: ignore[misc]


async def kill_a_worker(world: World, before: Callable[[], None] = lambda: None) -> tuple[Any, int]:
    """Two workers; one is killed while its tokens wait. What the coordinator said, and how many it decoded in vain."""
    coordination = await world.coordinate()
    victim, _ = await world.worker(), await world.worker()
    world.pace = pace = Standing(100)
    answers = asyncio.create_task(world.answers(LONG))
    await decoded_and_flushed(world, 100)
    before()
    victim.kill()
    lost = await asyncio.to_thread(coordination.lost, victim.session.worker)
    pace.go.set()
    assert await answers == reference_answers(LONG)
    return lost, sum(w.n_decoded for w in world.workers) - sum(map(len, reference_answers(LONG).values()))


async def kill_the_coordinator(world: World) -> None:
    await world.coordinate()
    workers = [await world.worker() for _ in range(2)]
    world.pace = pace = Standing(100)
    answers = asyncio.create_task(world.answers(LONG))
    await decoded_and_flushed(world, 100)
    world.kill_coordinator()
    coordination = await world.coordinate(again=True)
    pace.go.set()
    assert await answers == reference_answers(LONG)
    await world.snapshot()
    assert all(entry.ended is not None and entry.attempt == 0 for entry in coordination.everything())
    assert sum(w.n_decoded for w in workers) == sum(map(len, reference_answers(LONG).values())), "nothing twice"


async def one_process(config: CheckpointingConfig, prompt: Prompt) -> tuple[int, list[int]]:
    """A session of its own process is killed in the middle of a call, and another goes on with it.

    How many tokens the second one found, and the whole call.
    """
    session = RecoverySession.open(config, must=MUST, stop=STOP)
    session.start()
    call = await session.admit(request_of(prompt), STOP)
    for _ in range(101):
        tokens = list(call.transcript_ids)
        session.captured(call, [next_token(prompt.ids, tokens)], [logprob(0, len(tokens))])
        await asyncio.sleep(0)
    await until(lambda: session.table.longest_pending() < 8 and not session.stager.busy, "flushed")
    assert session.stager.counters.waited > 0 == session.stager.counters.flushes, "all of it waits, nothing is stored"
    session.flushing.close()  # it is killed: what is in its memory goes nowhere any more
    later = RecoverySession.open(config, must=MUST, stop=STOP)
    later.start()
    call = await later.admit(request_of(prompt), STOP)
    found = len(call.transcript_ids)
    while len(tokens := list(call.transcript_ids)) < prompt.max_tokens and tokens[-1:] != [EOS]:
        later.captured(call, [next_token(prompt.ids, tokens)], [logprob(0, len(tokens))])
    await later.terminal(call, "stop", None)
    await later.stop()
    await session.stop(last_snapshot=False)
    return found, list(call.transcript_ids)


async def one_after_another(world: World) -> int:
    """Workers and coordinator die together; another run goes on. How many tokens it did not decode again."""
    await world.coordinate()
    for _ in range(2):
        await world.worker()
    world.pace = Standing(100)
    answers = asyncio.create_task(world.answers(LONG))
    await decoded_and_flushed(world, 100)
    world.kill_coordinator()
    for worker in world.workers:
        worker.kill()
    # Their driver finds that out, and waits for a coordinator; then it is gone too.
    await until(lambda: all(task.done() for w in world.workers for task in w.tasks.values()), "they are gone")
    for _ in range(5):
        await asyncio.sleep(0)
    answers.cancel()
    await asyncio.wait({answers})
    world.workers.clear()
    world.pace = lambda worker: asyncio.sleep(0)
    await world.coordinate(owner="another run")
    worker = await world.worker()
    assert await world.answers(LONG) == reference_answers(LONG)
    await world.snapshot()
    stager = worker.session._stager
    assert stager is not None
    await asyncio.wrap_future(stager._pool.submit(lambda: None))  # what was dropped is dropped
    return sum(map(len, reference_answers(LONG).values())) - worker.n_decoded
