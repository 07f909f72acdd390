"""`python -m tests.ray_coordinators FOLDER`: coordinators as actors of a real Ray, with participants and no engine.

Two take part: a tool, and one in two shards, whose owners are actors too; a shard changes hands. A coordinator is
stalled (SIGSTOP) and replaced while the participants live on; it is woken, publishes nothing and ends. Then another run
takes the store while the coordinator is stalled, and that one, woken, is fenced by the log: nobody has ended it.
Workers come and go before they are up. A process of its own, since a Ray cannot be started everywhere in a test
process.

Owns: the play; it ends with an error if anything is otherwise.
Does not know: pytest, engines.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from prefix_recovery.processes import Identity, descendants
from recovery.blobs import unpacked
from recovery.config import CheckpointingConfig, RayConfig
from recovery.errors import ConfigError, Fenced, InputError
from recovery.log_reading import find_tail
from recovery.protocol import Verdict
from recovery.sharded import Sharded
from storage_backends import open_store
from tests.carried_stores import newest
from tests.fake_engine import MUST, STOP
from tests.job_processes import name_of
from tests.ray_jobs import WORKER, assert_fenced
from vllm_hooks.ray_workers.answers import RemoteParticipant
from vllm_hooks.ray_workers.cluster import Workers
from vllm_hooks.ray_workers.link import CoordinatorLink
from vllm_hooks.ray_workers.ray_here import connected

WAIT_S = 300.0
SILENT_S = 3.0


class Notes:
    """A tool in a process of its own, whose state is a number."""

    def __init__(self) -> None:
        self.n = 0
        self.takes_s = 0.0
        self.restored: list[tuple[bytes, bool]] = []

    def write(self, n: int, takes_s: float = 0.0) -> None:
        self.n, self.takes_s = n, takes_s

    def prepare(self, cut: int = 0) -> bytes:
        time.sleep(self.takes_s)
        return str(self.n).encode()

    def commit(self, published: bool) -> None:
        pass

    def restore(self, state: bytes, rewound: bool) -> None:
        self.restored.append((state, rewound))
        self.n = int(state)

    def times_restored(self) -> list[tuple[bytes, bool]]:
        return self.restored


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await holds():
            await asyncio.sleep(0.05)
    print(what, flush=True)


class Play:
    """`store`: what all of them coordinate."""

    def __init__(self, store: Path) -> None:
        self.store = open_store(str(store), create=True)
        self.config = CheckpointingConfig(enabled=True, store=str(store), snapshot_interval_s=3600.0)
        self.said: list[str] = []

    def link(self, owner: str, silent_s: float) -> CoordinatorLink:
        return CoordinatorLink(self.config, MUST, {}, STOP, owner, self.said.append, silent_s=silent_s)

    def notes(self) -> bytes:
        return self.state("notes")

    def state(self, name: str) -> bytes:
        """What the newest snapshot has of a participant."""
        return unpacked(newest(self.store).states[f"participant-{name}"], f"participant-{name}")

    def shards(self) -> dict[str, bytes]:
        return {name: base64.b64decode(text) for name, text in json.loads(self.state("envs"))["states"].items()}

    async def one_is_in_shards(self, link: CoordinatorLink) -> None:
        """Its owners are processes, and one of them is replaced."""
        envs = ray.remote(Sharded).options(num_cpus=0, max_concurrency=8).remote("envs", ["a", "b"])
        owners = [ray.remote(Notes).options(num_cpus=0).remote() for _ in range(3)]
        for shard, owner, n in zip("ab", owners, (10, 20), strict=False):
            await owner.write.remote(n)
            assert await envs.take.remote(shard, RemoteParticipant(shard, owner, 60.0)) == 1
        await link.join("envs", envs, 60.0)
        await self.snapshot(link)
        assert self.shards() == {"a": b"10", "b": b"20"}
        await owners[0].write.remote(11)  # after the cut: who takes over begins with what was published
        assert await envs.take.remote("a", RemoteParticipant("a", owners[2], 60.0)) == 2
        assert await owners[2].times_restored.remote() == [(b"10", False)]
        await owners[2].write.remote(12)
        await self.snapshot(link)
        assert self.shards() == {"a": b"12", "b": b"20"}

    async def snapshot(self, link: CoordinatorLink) -> None:
        """Take one; returns when it is published."""
        before = (await link.ask("figures")).snapshots
        await link.ask("request", "request")

        async def more() -> bool:
            return bool((await link.ask("figures")).snapshots > before)

        await until(more, "a snapshot is published")

    async def one_is_replaced(self, link: CoordinatorLink, notes: Any) -> None:
        await link.ask("start")
        await link.join("notes", notes, 60.0)
        await link.join("notes", notes, 60.0)
        other = ray.remote(Notes).options(num_cpus=0).remote()
        await refused(link.join("notes", other, 60.0), "is taken")
        await notes.write.remote(1)
        await self.snapshot(link)
        assert self.notes() == b"1"
        await self.one_is_in_shards(link)
        watch = asyncio.create_task(link.watch())
        await until(lambda: _is(link.figures.epoch == 1), "it is watched")
        old = await stalled(link)
        await notes.write.remote(2)
        await until(lambda: _is(link.figures.epoch == 2), "another one is in its place")
        assert await notes.times_restored.remote() == []
        await self.snapshot(link)
        assert self.notes() == b"2" and self.shards() == {"a": b"12", "b": b"20"}
        tail = find_tail(self.store)
        with suppress(ProcessLookupError):
            os.kill(old.pid, signal.SIGCONT)
        await until(lambda: _is(not old.alive()), "the woken one has ended")
        assert find_tail(self.store) == tail, "it published something"
        await self.snapshot(link)
        watch.cancel()

    async def one_is_fenced(self, link: CoordinatorLink, notes: Any) -> None:
        """By another run, whose driver does not know of it."""
        old = await stalled(link)
        other = self.link("another run", SILENT_S)
        await other.ask("start")
        await other.join("notes", notes, 60.0)
        await other.ask("join_participant", "notes", notes, 60.0)  # its answer was lost, and it is asked again
        assert await notes.times_restored.remote() == [(b"2", False)]
        await self.snapshot(other)
        tail = find_tail(self.store)
        os.kill(old.pid, signal.SIGCONT)
        await until(lambda: self._refused(link), "the woken one is fenced")
        assert find_tail(self.store) == tail, "it published something"
        await notes.write.remote(3, SILENT_S + 1.0)  # a last snapshot that takes long is no silence
        last = await other.finish(True, None)
        assert last is not None and last.verdict is Verdict.PUBLISHED and other.figures.epoch == 3
        assert self.notes() == b"3"

    async def _refused(self, link: CoordinatorLink) -> bool:
        try:
            await link.ask("request", "request")
        except Fenced:
            return True
        return False

    async def workers_come_and_go(self, link: CoordinatorLink) -> None:
        """Before they are up: none is left behind."""
        workers = self.workers(2, sleeping)
        workers.start(link)
        await refused(workers.leave("w9"), "no worker 'w9'")
        await refused(workers.scale(0), "0 workers")
        await workers.scale(3)
        assert workers.names == ["w0", "w1", "w2"]
        await workers.leave("w0")
        await workers.scale(1)
        assert workers.names == ["w1"], "the newest leave first"
        await refused(workers.leave("w1"), "last one")
        assert workers.add() == "w3"
        await until(lambda: _is(n_workers() == 2), "those that left have no process any more")
        await workers.close()
        await until(lambda: _is(n_workers() == 0), "nor has any of them")
        broken = self.workers(1, no_engine)
        broken.start(link)
        try:
            await broken.failed
        except ConfigError as error:
            assert "there is no engine" in error.message
        await broken.close()

    def workers(self, n: int, start: Callable[[], Any]) -> Workers:
        return Workers(n, RayConfig(), (start, self.config, {}, False), self.said.append, lambda name, n_tokens: None)


def sleeping() -> Any:
    """An engine that takes for ever to start."""
    while True:
        time.sleep(1.0)


def no_engine() -> Any:
    raise OSError("there is no engine")


def n_workers() -> int:
    return sum(name_of(one.pid).startswith(WORKER) for one in descendants(os.getpid()))


async def refused(what: Awaitable[None], why: str) -> None:
    try:
        await what
    except InputError as error:
        assert why in error.message, error
    else:
        raise AssertionError(why)


async def stalled(link: CoordinatorLink) -> Identity:
    """SIGSTOP to the coordinator's process."""
    pid = await link.ask("pid")
    (found,) = (one for one in descendants(os.getpid()) if one.pid == pid)
    os.kill(pid, signal.SIGSTOP)
    return found


async def _is(so: bool) -> bool:
    return so


async def play(store: Path) -> None:
    world = Play(store)
    notes = ray.remote(Notes).options(num_cpus=0).remote()
    link = world.link("this run", SILENT_S)
    await world.one_is_replaced(link, notes)
    await world.workers_come_and_go(link)
    await world.one_is_fenced(link, notes)
    assert_fenced(world.store)
    assert [line.split(":")[0] for line in world.said if "coordinator" in line] == [
        "the coordinator is replaced",
        "the coordinator was started again and goes on at epoch 2",
    ], world.said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pr-", dir="/tmp") as short, connected(RayConfig(), 1, Path(short)):
        asyncio.run(play(Path(sys.argv[1])))
