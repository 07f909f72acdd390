"""Workers of Ray that end before they are ready: told of, given up in the end, and nobody waits for them for ever.

Ray itself is not there: what a worker's actor would answer is made up, call by call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError, WorkerCrashedError

from recovery.config import RayConfig
from recovery.errors import ConfigError
from vllm_hooks.ray_workers import cluster
from vllm_hooks.ray_workers.answers import RemoteParticipants, answer
from vllm_hooks.ray_workers.cluster import STARTS_MAX, Slot, Workers
from vllm_hooks.ray_workers.link import CoordinatorLink
from vllm_hooks.ray_workers.messages import Gone


def ref(outcome: Any) -> Any:
    """What a remote call gives: settled with a value or an error."""
    future: Future[Any] = Future()
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    elif outcome is not None:
        future.set_result(outcome)
    return SimpleNamespace(future=lambda: future)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            OutOfMemoryError("Task was killed due to the node running low on memory.\nTop 10 users: ..."),
            "low on memory",
        ),
        (ActorDiedError(), "its process is gone"),
        (NodeDiedError("the node died"), "its process is gone"),
        (WorkerCrashedError(), "its process is gone"),
    ],
)
def test_whatever_ends_a_process_arrives_as_gone(error: Exception, why: str) -> None:
    with pytest.raises(Gone) as caught:
        asyncio.run(answer(ref(error)))
    assert why in caught.value.why and "\n" not in caught.value.why


def test_a_participant_that_joins_again_has_the_time_that_it_says_now() -> None:
    handle, found = SimpleNamespace(), RemoteParticipants()
    first = found.of("notes", "actor", 1.0)
    assert found.of("notes", "actor", 60.0) is first and first.timeout_s == 60.0
    assert found.of("notes", handle.__class__, 5.0) is not first and first.timeout_s == 60.0


def test_one_that_is_in_the_job_and_joins_again_is_not_handed_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first ask may reach a coordinator that has just taken another's place, and does not know of it yet."""
    link, asked = CoordinatorLink.__new__(CoordinatorLink), list[tuple[Any, ...]]()
    link._participants, link.silent_s = {}, 1.0

    async def ask(method: str, *arguments: Any, timeout_s: float | None = None) -> None:
        asked.append((method, *arguments))

    monkeypatch.setattr(link, "ask", ask)
    for actor in ("actor", "actor", "another"):
        asyncio.run(link.join("notes", actor, 2.0))
    running = [(actor, was) for _, _, actor, _, was in asked]
    assert running == [
        ("actor", False),
        ("actor", True),
        ("actor", True),
        ("actor", True),
        ("another", False),
        ("another", True),
    ]


class World:
    """Slots whose actors answer `follow` as they are told to; a look at one that is ready waits for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.ended: list[Any] = []
        monkeypatch.setattr(cluster, "LOOK_S", 0.0)
        monkeypatch.setattr(cluster, "restarts_of", lambda handle: handle.restarts)
        monkeypatch.setattr(cluster, "ray", SimpleNamespace(kill=lambda handle, no_restart: self.ended.append(handle)))
        self.workers = Workers(0, RayConfig(), (), self.said.append, lambda name, n: None)
        self.workers._link = SimpleNamespace(handle=None, number=0)  # type: ignore[assignment]

    def slot(self, outcomes: Iterator[Any], news: Any = None) -> Slot:
        """With each outcome goes whether Ray has begun to start it again since the last one."""

        def follow(*_: Any) -> Any:
            outcome, again = next(outcomes)
            handle.restarts += again
            return ref(outcome)

        handle = SimpleNamespace(
            follow=SimpleNamespace(remote=follow), news=SimpleNamespace(remote=lambda: ref(news)), restarts=0
        )
        slot = Slot(len(self.workers._slots), handle)
        self.workers._slots.append(slot)
        return slot


def dying(error: Exception | None = None) -> tuple[Exception, bool]:
    return error or ActorDiedError(), True


def test_the_only_worker_that_never_gets_ready_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        world = World(monkeypatch)
        slot = world.slot(iter([dying(OutOfMemoryError("low"))] * 100))
        with pytest.raises(ConfigError, match=f"started {STARTS_MAX} times.*ran low on memory") as caught:
            await world.workers._keep(slot)
        assert "kv_cache_memory_bytes" in str(caught.value.hint)
        assert len(world.said) == STARTS_MAX and all("low on memory" in line for line in world.said)

    asyncio.run(play())


def test_one_of_several_is_given_up_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        world = World(monkeypatch)
        ready, never = world.slot(iter([("w0-1", False)])), world.slot(iter([dying()] * 100))
        keeping = asyncio.create_task(world.workers._keep(ready))
        await world.workers._keep(never)
        assert world.workers.ready == ["w0-1"] and world.workers.names == ["w0"]
        assert world.ended == [never.handle]
        assert "the others go on" in world.said[-1]
        keeping.cancel()

    asyncio.run(play())


def test_one_of_which_ray_says_nothing_while_it_ends_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a worker that was never up waits: what tells is how often it was started."""

    async def play() -> None:
        world = World(monkeypatch)
        slot = world.slot(iter([(None, False)]))
        monkeypatch.setattr(cluster, "STARTING_LOOK_S", 0.0)
        starts = iter([0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4, 5])
        monkeypatch.setattr(cluster, "restarts_of", lambda handle: next(starts))
        with pytest.raises(ConfigError, match=f"started {STARTS_MAX} times"):
            await world.workers._keep(slot)
        assert len(world.said) == STARTS_MAX

    asyncio.run(play())


def test_a_start_that_takes_long_is_one_start_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray answers at once that it is not there, for as long as it takes."""

    async def play() -> None:
        world = World(monkeypatch)
        heard = [dying(), *[(ActorDiedError(), False)] * 500] * (STARTS_MAX - 1)
        slot = world.slot(iter([*heard, ("w0-1", False)]))
        keeping = asyncio.create_task(world.workers._keep(slot))
        async with world.workers._changed:
            await asyncio.wait_for(world.workers._changed.wait_for(lambda: slot.worker), 120)
        assert len([line for line in world.said if "before it was ready" in line]) == STARTS_MAX - 1
        keeping.cancel()

    asyncio.run(play())
