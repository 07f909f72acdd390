"""The driver's side: a Ray to run on, a coordinator and workers placed in it, and what happens when one of them dies.

Owns: starting and ending a Ray of one's own, the actors' options, which worker gets which call, finding out that
somebody is gone, and what is told of a recovery.
Does not know: prompts, outputs, how an engine is made, what a snapshot is.

Runs on the driver's event loop.

Invariants:
1. A call of a worker that is gone is given to another only after the coordinator has taken over what was stored of it.
2. Nobody else waits for a recovery: each call has a task of its own, and workers are asked by nobody but their
   coordinator and the calls that they run.
3. A coordinator that died is started again by Ray, one that does not answer for SILENT_S is replaced; meanwhile calls
   decode on, and whoever needs it asks again until it answers.
4. A Ray that was started here ends with this process.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from recovery.config import CheckpointingConfig, RayConfig
from recovery.errors import ConfigError, EngineDead, Fenced, InputError, RecoveryError
from recovery.resume import StopRules
from vllm_hooks.ray_workers.actors import Answer, CoordinatorActor, EngineWorker, News
from vllm_hooks.ray_workers.answers import answer
from vllm_hooks.ray_workers.messages import Figures, Gone, Lost, NotAMember, Refused, Superseded, WorkerId

LOOK_S = 0.25
SILENT_S = 60.0
"""A coordinator that says nothing for so long is replaced; a worker that does is taken for lost."""

OTHERS_S = 120.0
"""How long a job that has a worker waits for its others before it begins; later ones get calls that begin later."""

BEFORE_S = 3.0
"""What a recovery's rates are compared with: the survivors' in so many seconds before."""

Say = Callable[[str], None]


@contextmanager
def connected(config: RayConfig, workers: int, folder: Path, more_cpus: int = 0) -> Iterator[None]:
    """A Ray: the one at `config.address`, or one of this process's own on this machine, with its files in `folder`.

    Sockets lie in that folder: its path must be short. `more_cpus`: that others than the workers need in one's own.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    arguments: dict[str, Any] = {
        "namespace": f"prefix-recovery-{secrets.token_hex(4)}",
        "logging_level": "ERROR",
        "log_to_driver": False,
    }
    if config.address is not None:
        environment = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}
        arguments |= {"address": config.address, "runtime_env": {"env_vars": environment}}
    else:
        cpus = math.ceil(workers * config.cpus_per_worker) + more_cpus
        arguments |= {"num_cpus": cpus, "include_dashboard": False, "_temp_dir": str(folder)}
    try:
        ray.init(**arguments)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = config.address or "this machine"
        raise ConfigError(f"Ray at {where} cannot be used: {error}", hint="check `ray.address`") from error
    try:
        yield
    finally:
        ray.shutdown()


class CoordinatorLink:
    """The coordinator of the moment."""

    def __init__(
        self,
        config: CheckpointingConfig,
        must: Mapping[str, Any],
        recorded: Mapping[str, Any],
        stop: StopRules,
        owner: str,
        say: Say,
    ) -> None:
        self._arguments = (config, must, recorded, stop, owner)
        self._say = say
        self.handle = self._make(again=False)
        self.figures = Figures(0)
        self.on_replaced: Callable[[], None] = lambda: None

    def _make(self, *, again: bool) -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 32}
        made = ray.remote(concurrency_groups={"claims": 32})(CoordinatorActor).options(**options)
        return made.remote(*self._arguments, again)

    async def ask(self, method: str, *arguments: Any, timeout_s: float = SILENT_S) -> Any:
        """Ask until somebody answers. Raises what the coordinator raises."""
        while True:
            handle = self.handle
            try:
                return await answer(getattr(handle, method).remote(*arguments), timeout_s)
            except (Gone, TimeoutError):
                await asyncio.sleep(LOOK_S)
            except Fenced:
                if handle is self.handle:
                    raise  # else by the one that took its place

    async def watch(self) -> None:
        """For ever: keep `figures`, notice another epoch, replace one that is silent. Raises what stops it."""
        while True:
            handle = self.handle
            try:
                figures: Figures = await answer(handle.figures.remote(), SILENT_S)
                if self.figures.epoch and figures.epoch != self.figures.epoch:
                    self._say(f"the coordinator was started again and goes on at epoch {figures.epoch}")
                self.figures = figures
            except Gone:
                pass  # Ray starts it again; it may take long where no node has room
            except Fenced:
                if handle is self.handle:
                    raise
            except TimeoutError:
                self.replace(f"it said nothing for {SILENT_S:.0f} s")
            await asyncio.sleep(LOOK_S)

    def replace(self, why: str) -> None:
        """Put another coordinator in its place; whatever the old one still does is fenced."""
        old = self.handle
        self._say(f"the coordinator is replaced: {why}")
        self.handle = self._make(again=True)
        ray.kill(old, no_restart=True)
        self.on_replaced()


@dataclass(slots=True)
class Slot:
    """A place for a worker: Ray starts a new one in it when one dies."""

    name: str
    handle: Any
    worker: WorkerId | None = None
    load: int = 0
    names: set[str] = field(default_factory=set)
    gone: asyncio.Task[None] | None = None
    leaving: bool = False


@dataclass(slots=True)
class Recovery:
    """One worker's calls on their way to others."""

    worker: WorkerId
    why: str
    began_s: float
    waiting: set[str]
    lost: Lost = field(default_factory=Lost)


class Workers:
    """All workers of a job. `on_tokens` is told of the tokens that were captured, by request id."""

    def __init__(
        self,
        n: int,
        config: RayConfig,
        worker_arguments: tuple[Any, ...],
        say: Say,
        on_tokens: Callable[[str, int], None],
    ) -> None:
        self._config = config
        self._arguments = worker_arguments
        self._say = say
        self._on_tokens = on_tokens
        self._changed = asyncio.Condition()
        self._slots = [self._slot(f"w{k}") for k in range(n)]
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._recoveries: list[Recovery] = []
        self._n_made = n
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _slot(self, name: str) -> Slot:
        options: dict[str, Any] = {
            "num_cpus": self._config.cpus_per_worker,
            "max_restarts": -1,
            "max_concurrency": 1000,
        }
        if self._config.gpus_per_worker:
            options["num_gpus"] = self._config.gpus_per_worker
        return Slot(name, ray.remote(EngineWorker).options(**options).remote(name, *self._arguments))

    def start(self, link: CoordinatorLink) -> None:
        """They follow that coordinator from here on, and are watched."""
        self._link = link
        link.on_replaced = self._follow_all
        for slot in self._slots:
            self._watch(slot)

    def _watch(self, slot: Slot) -> None:
        task = self._watches[slot.name] = asyncio.create_task(self._keep(slot))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def first(self) -> None:
        """Wait for a worker that is ready, and a while for the others: calls stay where they were given to."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ready)
            with suppress(TimeoutError):
                async with asyncio.timeout(OTHERS_S):
                    await self._changed.wait_for(lambda: len(self.ready) == len(self._slots))

    @property
    def ready(self) -> list[WorkerId]:
        return [slot.worker for slot in self._slots if slot.worker is not None]

    # ---- elastic -----------------------------------------------------------------------------------------------

    def add(self) -> str:
        """One more worker, in the job as soon as Ray has room for it and its engine is up. Returns its name."""
        slot = self._slot(f"w{self._n_made}")
        self._n_made += 1
        self._slots.append(slot)
        self._watch(slot)
        return slot.name

    async def leave(self, name: str) -> None:
        """Take a worker out: what it has is stored, and its calls go on elsewhere."""
        slot = next(slot for slot in self._slots if slot.name == name)
        slot.leaving = True
        if slot.worker is not None:
            await answer(slot.handle.flushed.remote())
            await self._is_gone(slot, slot.worker, "it was asked to leave")
        self._slots.remove(slot)
        self._watches.pop(name).cancel()
        ray.kill(slot.handle, no_restart=True)

    # ---- one worker --------------------------------------------------------------------------------------------

    async def _keep(self, slot: Slot) -> None:
        """Bring a slot's worker in, and again whenever it had to be started anew."""
        while True:
            try:
                worker: WorkerId = await answer(slot.handle.follow.remote(self._link.handle))
            except Gone as error:
                if "creation task" in str(error):
                    raise _unstarted(error) from None
                await asyncio.sleep(LOOK_S)
                continue
            self._say(f"worker {worker} is ready")
            async with self._changed:
                slot.worker = worker
                self._changed.notify_all()
            await self._look(slot)
            if slot.gone is not None:
                await slot.gone

    async def _look(self, slot: Slot) -> None:
        """Until the worker is gone."""
        told = ""
        while slot.worker is not None:
            try:
                news: News = await answer(slot.handle.news.remote(), SILENT_S)
            except (Gone, TimeoutError) as error:
                await self._is_gone(slot, slot.worker, "its process is gone" if isinstance(error, Gone) else "it hangs")
                return
            for name, n_tokens in news.tokens.items():
                self._on_tokens(name, n_tokens)
            await self._going_on(news.tokens)
            if news.trouble not in ("", told):
                self._say(f"worker {slot.worker}: flushes go to the store and do not wait: {news.trouble}")
                told = news.trouble
            if news.dead:
                await self._is_gone(slot, slot.worker, f"its engine died: {news.dead}")
                return
            slot.worker = news.worker  # it may have had to come back under another name
            await asyncio.sleep(LOOK_S)

    def _follow_all(self) -> None:
        for slot in self._slots:
            if slot.worker is not None:
                slot.handle.follow.remote(self._link.handle)

    async def _is_gone(self, slot: Slot, worker: WorkerId | None, why: str) -> None:
        """Once for each worker that is gone; whoever finds it out waits here until its calls may go elsewhere."""
        if slot.worker == worker and worker is not None and (slot.gone is None or slot.gone.done()):
            slot.worker = None
            slot.gone = asyncio.create_task(self._take_over(slot, worker, why))
        if slot.gone is not None:
            await asyncio.shield(slot.gone)

    async def _take_over(self, slot: Slot, worker: WorkerId, why: str) -> None:
        recovery = Recovery(worker, why, time.time(), set(slot.names))
        recovery.lost = await self._link.ask("lost", worker)
        if recovery.waiting:
            self._recoveries.append(recovery)
        else:
            self._say(f"worker {worker} is gone ({why}); it had no call")
        if not slot.leaving:
            ray.kill(slot.handle, no_restart=False)  # an engine that died never heals: Ray starts the actor again

    # ---- calls -------------------------------------------------------------------------------------------------

    async def run(self, name: str, prompt: Any, params: Any, source_digest: str) -> Answer:
        """One call, to its end, wherever it may have to go on. Raises InputError for what engines refuse."""
        while True:
            slot = await self._pick()
            worker = slot.worker
            slot.load += 1
            slot.names.add(name)
            try:
                ended: Answer = await answer(slot.handle.run.remote(name, prompt, params, source_digest))
                await self._going_on([name])
                return ended
            except Refused as error:
                raise InputError(str(error), hint="mend the line, run again") from None
            except (Superseded, NotAMember):
                continue
            except Gone:
                await self._is_gone(slot, worker, "its process is gone")
            except EngineDead as error:
                await self._is_gone(slot, worker, f"its engine died: {error.message}")
            finally:
                slot.load -= 1
                slot.names.discard(name)

    async def _pick(self) -> Slot:
        """The ready worker with the fewest calls."""

        def free() -> list[Slot]:
            return [slot for slot in self._slots if slot.worker is not None and not slot.leaving]

        async with self._changed:
            await self._changed.wait_for(free)
        return min(free(), key=lambda slot: slot.load)

    async def _going_on(self, names: Any) -> None:
        """Tokens of these calls came: a recovery is over once all that it was about go on."""
        for recovery in list(self._recoveries):
            recovery.waiting.difference_update(names)
            if not recovery.waiting:
                self._recoveries.remove(recovery)
                await self._told(recovery)

    async def _told(self, recovery: Recovery) -> None:
        end_s, lost = time.time(), recovery.lost
        line = (
            f"worker {recovery.worker} is gone ({recovery.why}); after {end_s - recovery.began_s:.1f} s its "
            f"{lost.n_calls} calls go on, {lost.n_tokens} tokens of them were saved"
        )
        line += f", {lost.n_waiting} segments of them waited in the queue" if lost.n_waiting else ""
        line += f"; what else waited is generated again: {lost.error}" if lost.error else ""
        for slot in self._slots:
            if slot.worker is None:
                continue
            try:
                during = await answer(slot.handle.steps.remote(recovery.began_s, end_s), LOOK_S * 40)
                before = await answer(slot.handle.steps.remote(recovery.began_s - BEFORE_S, recovery.began_s), 10.0)
            except (Gone, TimeoutError, RecoveryError):
                continue
            line += (
                f"; {slot.worker} meanwhile made {during.n_steps} steps, {during.rate:.0f} tokens/s "
                f"({before.rate:.0f} before), longest pause {1000 * during.longest_pause_s:.0f} ms "
                f"({1000 * before.longest_pause_s:.0f} before)"
            )
        self._say(line)

    async def close(self) -> None:
        """End all engines."""
        for task in self._watches.values():
            task.cancel()
        closing = [slot.handle.close.remote() for slot in self._slots if slot.worker is not None]
        await asyncio.gather(*(answer(ref, 30.0) for ref in closing), return_exceptions=True)
        for slot in self._slots:
            ray.kill(slot.handle, no_restart=True)


def _unstarted(error: Gone) -> ConfigError:
    """Why a worker cannot be made, as far as Ray tells: the last line that says it."""
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    why = lines[-1] if lines else str(error)
    return ConfigError(f"a worker cannot be started: {why}", hint="check `model` and `engine`; start with workers: 1")


__all__ = ["CoordinatorLink", "Workers", "connected"]
