"""All workers of a job, seen from its driver: placed, watched, given calls, and what happens when one is gone.

Owns: the workers' actors, which of them gets which call, finding out that one is gone, adding some, letting some leave.
Does not know: prompts, outputs, how an engine is made, what a snapshot is, how the coordinator is reached (link.py).

Runs on the driver's event loop.

Invariants:
1. A call of a worker that is gone is given to another only after the coordinator has taken over what was stored of it.
2. Nobody else waits for a recovery: each call has a task of its own, and workers are asked by nobody but their
   coordinator and the calls that they run.
3. A worker that leaves has stored all that it had before its calls are given to others: nothing of it is lost.
4. At least one worker stays, whoever is asked to leave.
5. One that ends again and again before it is ready is told of and given up: no job waits for it for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from recovery.config import RayConfig
from recovery.errors import ConfigError, EngineDead, InputError, RecoveryError
from vllm_hooks.ray_workers.actors import Answer, EngineWorker, News
from vllm_hooks.ray_workers.answers import answer
from vllm_hooks.ray_workers.link import LOOK_S, CoordinatorLink, Say
from vllm_hooks.ray_workers.messages import Gone, NotAMember, Refused, Superseded, WorkerId
from vllm_hooks.ray_workers.ray_here import restarts_of, worker_options
from vllm_hooks.ray_workers.recoveries import OfOne, Recoveries, Recovery, line_of, meanwhile

STARTS_MAX = 5
"""A worker that ends so often before it is ready is given up."""
STARTING_LOOK_S = 5.0
"""How often it is asked meanwhile whether it was started again."""

SILENT_S = 60.0
"""A worker that says nothing for so long is taken for lost."""

OTHERS_S = 120.0
"""How long a job that has a worker waits for its others before it begins; later ones get calls that begin later."""

BEFORE_S = 3.0
"""What a recovery's rates are compared with: the survivors' in so many seconds before."""

ANSWER_S, CLOSING_S = 10.0, 30.0


LEFT = "it was asked to leave"


@dataclass(slots=True)
class Slot:
    """A place for a worker: Ray starts a new one in it when one dies."""

    number: int
    handle: Any
    worker: WorkerId | None = None
    load: int = 0
    names: set[str] = field(default_factory=set)
    gone: asyncio.Task[None] | None = None
    leaving: bool = False

    @property
    def name(self) -> str:
        return f"w{self.number}"


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
        self._scaling = asyncio.Lock()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._recoveries = Recoveries()
        self._telling: set[asyncio.Task[None]] = set()
        self._n_made = 0
        self._slots = [self._slot() for _ in range(n)]
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _slot(self) -> Slot:
        number, self._n_made = self._n_made, self._n_made + 1
        actor = ray.remote(EngineWorker).options(**worker_options(self._config))
        return Slot(number, actor.remote(f"w{number}", *self._arguments))

    def start(self, link: CoordinatorLink) -> None:
        """They follow that coordinator from here on, and are watched."""
        self._link = link
        link.on_replaced = self._follow_all
        link.on_again = self._went_without
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

    @property
    def names(self) -> list[str]:
        """Of all workers that stay, also those that are not up."""
        return [slot.name for slot in self._staying]

    @property
    def _staying(self) -> list[Slot]:
        return [slot for slot in self._slots if not slot.leaving]

    def add(self) -> str:
        """One more worker, in the job as soon as Ray has room for it and its engine is up. Returns its name.

        Only after `start`. One that cannot be started is told of, and the others go on.
        """
        slot = self._slot()
        self._slots.append(slot)
        self._watch(slot)
        return slot.name

    async def leave(self, name: str) -> None:
        """Take a worker out: what it has is stored, its calls go on elsewhere, its engine and its actor end.

        Raises InputError if there is none of that name, or no other one that stays.
        """
        slot = next((slot for slot in self._staying if slot.name == name), None)
        if slot is None or len(self._staying) == 1:
            why = f"there is no worker {name!r}" if slot is None else f"worker {name} is the last one"
            raise InputError(why, hint=f"there are {', '.join(self.names)}; add one before the last one leaves")
        slot.leaving = True
        if slot.gone is not None:
            await asyncio.shield(slot.gone)
        self._watches.pop(name).cancel()
        if slot.worker is None:
            self._say(f"worker {name} leaves; it was not up")
        else:
            await self._is_gone(slot, slot.worker, LEFT)
            with suppress(Gone, TimeoutError):
                await answer(slot.handle.close.remote(), CLOSING_S)
        await self._end(slot)

    async def _end(self, slot: Slot) -> None:
        ray.kill(slot.handle, no_restart=True)
        async with self._changed:
            self._slots.remove(slot)
            self._changed.notify_all()

    async def scale(self, n: int) -> None:
        """Add workers, or have some leave, until there are `n`: first those that are not up, then the newest.

        Returns when those that leave have left; those that are added come when they are up.
        """
        if n < 1:
            raise InputError(f"{n} workers cannot do anything", hint="keep at least one; to stop the job end its run")
        async with self._scaling:
            while len(self._staying) < n:
                self.add()
            first = sorted(self._staying, key=lambda slot: (slot.worker is not None, -slot.number))
            await asyncio.gather(*(self.leave(slot.name) for slot in first[: len(first) - n]))

    # ---- one worker --------------------------------------------------------------------------------------------

    async def _keep(self, slot: Slot) -> None:
        """Bring a slot's worker in, and again whenever it had to be started anew."""
        before = 0  # restarts that are accounted for
        while (worker := await self._started(slot, before)) is not None:
            # One that was ready ends once, and is ended once more to be sure (`_take_over`).
            before = await asyncio.to_thread(restarts_of, slot.handle) + 2
            self._say(f"worker {worker} is ready")
            async with self._changed:
                slot.worker = worker
                self._changed.notify_all()
            await self._look(slot)
            if slot.gone is not None:
                await slot.gone

    async def _started(self, slot: Slot, before: int) -> WorkerId | None:
        """Wait until its worker is up. None: it leaves, or it was given up."""
        told, asked = 0, None
        while not slot.leaving:
            asked = asked or slot.handle.follow.remote(self._link.handle, self._link.number)
            gone = None
            try:
                worker: WorkerId = await answer(asked, STARTING_LOOK_S)
                return worker
            except TimeoutError:
                pass  # of a worker that was never up Ray says nothing, however often it ends
            except Gone as error:
                if "creation task" in str(error):
                    await self._unstarted(slot, _unstarted(error))
                    return None
                gone, asked = error, None
            ended = await asyncio.to_thread(restarts_of, slot.handle) - before
            why = Gone("") if gone is None else gone
            if ended > told:
                told = ended
                self._say(f"{slot.name} ended before it was ready ({why.why}); Ray starts it again")
            if ended >= STARTS_MAX:
                await self._unstarted(slot, _never_ready(why))
                return None
            if gone is not None:
                await asyncio.sleep(LOOK_S)
        return None

    async def _look(self, slot: Slot) -> None:
        """Until the worker is gone."""
        told = ""
        while slot.worker is not None:
            try:
                news: News = await answer(slot.handle.news.remote(), SILENT_S)
            except (Gone, TimeoutError) as error:
                await self._is_gone(slot, slot.worker, error.why if isinstance(error, Gone) else "it hangs")
                return
            if slot.worker is None:
                return  # somebody else has found out meanwhile
            self._count(news)
            if news.trouble not in ("", told):
                self._say(f"worker {slot.worker}: flushes go to the store and do not wait: {news.trouble}")
                told = news.trouble
            if news.dead:
                await self._is_gone(slot, slot.worker, f"its engine died: {news.dead}")
                return
            slot.worker = news.worker  # it may have had to come back under another name
            await asyncio.sleep(LOOK_S)

    def _count(self, news: News) -> None:
        for name, n_tokens in news.tokens.items():
            self._on_tokens(name, n_tokens)
        self._going_on(news.tokens)

    async def _unstarted(self, slot: Slot, wrong: ConfigError) -> None:
        """Its engine cannot be made here. Raises `wrong` if there is no other worker that is up."""
        if not self.ready:
            raise wrong
        self._say(f"{slot.name}: {wrong.message}; the others go on")
        await self._end(slot)

    def _follow_all(self) -> None:
        """Also those that are not up: they were told of the coordinator that there was when they were made."""
        for slot in self._slots:
            slot.handle.follow.remote(self._link.handle, self._link.number)

    async def _is_gone(self, slot: Slot, worker: WorkerId | None, why: str) -> None:
        """Once for each worker that is gone; whoever finds it out waits here until its calls may go elsewhere."""
        if slot.worker == worker and worker is not None and (slot.gone is None or slot.gone.done()):
            slot.worker = None
            slot.gone = asyncio.create_task(self._take_over(slot, worker, why))
        if slot.gone is not None:
            await asyncio.shield(slot.gone)

    async def _take_over(self, slot: Slot, worker: WorkerId, why: str) -> None:
        recovery = Recovery(worker, why, time.time(), set(slot.names), tuple(self.ready))
        if why == LEFT:
            with suppress(Gone, TimeoutError):  # what it cannot store any more is generated again
                self._count(await answer(slot.handle.retire.remote(), SILENT_S))
        recovery.lost = await self._link.ask("lost", worker)
        if not self._recoveries.begin(recovery):
            self._say(f"worker {worker} is gone ({why}); it had no call")
        if why != LEFT:
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
                self._going_on([name])
                return ended
            except Refused as error:
                raise InputError(str(error), hint="mend the line, run again") from None
            except (Superseded, NotAMember):
                await self._is_gone(slot, None, "")  # where it may be under way: others may have the call after that
            except Gone as error:
                await self._is_gone(slot, worker, error.why)
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

    def _going_on(self, names: Iterable[str]) -> None:
        """Tokens of these calls came, or their ends."""
        for recovery in self._recoveries.going_on(names):
            self._tell_later(self._tell(recovery, time.time()))

    def _went_without(self, since_s: float) -> None:
        """There is a coordinator again, after none had answered since then."""
        self._tell_later(self._tell_without(since_s, time.time(), tuple(self.ready)))

    def _tell_later(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, recovery: Recovery, end_s: float) -> None:
        self._say(line_of(recovery, end_s, await self._steps(recovery.survivors, recovery.began_s, end_s)))

    async def _tell_without(self, since_s: float, end_s: float, survivors: tuple[WorkerId, ...]) -> None:
        steps = await self._steps(survivors, since_s, end_s)
        self._say(f"without a coordinator for {end_s - since_s:.1f} s{meanwhile(steps)}")

    async def _steps(self, survivors: tuple[WorkerId, ...], began_s: float, end_s: float) -> list[OfOne]:
        steps = []
        for slot in tuple(self._slots):
            if slot.worker is None or slot.worker not in survivors:
                continue
            worker = slot.worker
            with suppress(Gone, TimeoutError, RecoveryError):
                during = await answer(slot.handle.steps.remote(began_s, end_s), ANSWER_S)
                before = await answer(slot.handle.steps.remote(began_s - BEFORE_S, began_s), ANSWER_S)
                steps.append((worker, during, before))
        return steps

    async def close(self) -> None:
        """End all engines."""
        for task in (*self._watches.values(), *self._telling):
            task.cancel()
        closing = [slot.handle.close.remote() for slot in self._slots if slot.worker is not None]
        await asyncio.gather(*(answer(ref, CLOSING_S) for ref in closing), return_exceptions=True)
        for slot in self._slots:
            ray.kill(slot.handle, no_restart=True)


def _never_ready(error: Gone) -> ConfigError:
    """Ended by whom Ray does not always know: a kernel that has no memory left does not say."""
    return ConfigError(
        f"a worker was started {STARTS_MAX} times and ended each time before it was ready: {error.why}",
        hint="if memory is short, set engine.kv_cache_memory_bytes or start with fewer workers; see Ray's logs",
    )


def _unstarted(error: Gone) -> ConfigError:
    """Why a worker cannot be made, as far as Ray tells: the last line that says it."""
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
    why = lines[-1] if lines else str(error)
    return ConfigError(f"a worker cannot be started: {why}", hint="check `model` and `engine`; start with workers: 1")
