"""The driver's link to the coordinator of the moment, which may die, hang, and be replaced.

Owns: the coordinator's actor and its options, finding out that it is silent, putting another in its place, and whom
that one has to be told of: the participants.
Does not know: workers, what a snapshot is.

Invariants:
1. A coordinator that died is started again by Ray; one that does not answer for SILENT_S is replaced. Whoever needs it
   asks again until one answers.
2. One that was replaced is not waited for: whatever it still does is fenced by the log, and Ray ends it.
3. One that is being started is not silent before STARTING_S: a slow machine must not begin anew for ever.
4. A coordinator that took another's place takes no snapshot before all participants are with it (`go_on`): a snapshot
   of the calls of this moment with a participant's state of an earlier one would be of no moment at all.
5. An actor that joins is with the coordinator of the moment once `join` returns, and is there once: also if an answer
   was lost, or if the one that it joined has been replaced meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from recovery.config import CheckpointingConfig
from recovery.coordinator import Attempt
from recovery.errors import Fenced
from recovery.resume import StopRules
from vllm_hooks.ray_workers.actors import CoordinatorActor
from vllm_hooks.ray_workers.answers import answer
from vllm_hooks.ray_workers.messages import Figures, Gone

LOOK_S = 0.25
SILENT_S = 60.0
STARTING_S = 600.0

Say = Callable[[str], None]


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
        *,
        silent_s: float = SILENT_S,
    ) -> None:
        self._arguments = (config, must, recorded, stop, owner)
        self._say = say
        self.silent_s = silent_s
        self._participants: dict[str, tuple[Any, float]] = {}
        self._answers = False
        self.number = 0
        """How many stood here before this one."""
        self.handle = self._make(again=False)
        self.figures = Figures(0)
        self.on_replaced: Callable[[], None] = lambda: None
        self.on_again: Callable[[float], None] = lambda since_s: None
        """Told that one goes on in another's place, and since when none had answered."""
        self._heard_s = time.time()

    def _make(self, *, again: bool) -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 32}
        made = ray.remote(concurrency_groups={"claims": 32})(CoordinatorActor).options(**options)
        return made.remote(*self._arguments, again)

    async def ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Ask until somebody answers. Raises what the coordinator raises."""
        while True:
            handle = self.handle
            try:
                waits_s = self.silent_s if timeout_s is None else timeout_s
                return await answer(getattr(handle, method).remote(*arguments), waits_s)
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
                await self._look(handle)
            except Gone:
                self._answers = False  # Ray starts it again; it may take long where no node has room
            except Fenced:
                if handle is self.handle:
                    raise
            except TimeoutError:
                self.replace(f"it said nothing for {self.silent_s:.0f} s")
            await asyncio.sleep(LOOK_S)

    async def _look(self, handle: Any) -> None:
        figures: Figures = await answer(handle.figures.remote(), self.silent_s if self._answers else STARTING_S)
        if handle is not self.handle:
            return
        self._answers = True
        if figures.waits:
            await answer(handle.go_on.remote(self._participants), STARTING_S)
            self._say(f"the coordinator was started again and goes on at epoch {figures.epoch}")
            for line in figures.passed_over:
                self._say(line)
            self.on_again(self._heard_s)
        self._heard_s = time.time()
        self.figures = figures

    def replace(self, why: str) -> None:
        """Put another coordinator in its place; whatever the old one still does is fenced."""
        old, self._answers = self.handle, False
        self._say(f"the coordinator is replaced: {why}")
        self.handle, self.number = self._make(again=True), self.number + 1
        ray.kill(old, no_restart=True)
        self.on_replaced()

    async def finish(self, last: bool, timeout_s: float | None) -> Attempt | None:
        """Stop taking snapshots, with a last one if wanted. Nobody watches any more."""
        one_s = max(timeout_s or 0.0, self._arguments[0].snapshot_timeout_s)
        due_s = self.silent_s + 2 * one_s  # one that is under way, and the last one
        while True:
            handle = self.handle
            try:
                await self._look(handle)
                finished: Attempt | None = await answer(handle.finish.remote(last, timeout_s), due_s)
                return finished
            except Gone:
                await asyncio.sleep(LOOK_S)
            except TimeoutError:
                self.replace("it does not finish")

    # ---- participants ------------------------------------------------------------------------------------------

    async def join(self, name: str, participant: Any, timeout_s: float) -> None:
        """Have an actor take part in every snapshot: recovery.ports.Participant, its methods called by Ray.

        It is handed what the restored snapshot has of it, once; a coordinator that takes this one's place finds it
        as it is. To join again is to have joined. Raises what recovery.participants.Participants.join raises.
        """
        given = (name, participant, timeout_s)
        running = self._participants.get(name, (None,))[0] == participant
        await self.ask("join_participant", *given, running, timeout_s=timeout_s + self.silent_s)
        self._participants[name] = given[1:]
        # One that was put in its place meanwhile may have been told of the others only.
        await self.ask("join_participant", *given, True)

    async def leave(self, name: str) -> None:
        """It has ended: from the next snapshot on nothing of it is kept. Harmless for one that is not there."""
        self._participants.pop(name, None)
        await self.ask("participant_left", name)
