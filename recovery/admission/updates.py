"""Weight updates, evaluations and cuts: three kinds of work that hold a rollout up, behind one fence.

Owns: the order of fence, hold, frontier, work, publication and release; the hold that a failed update leaves.
Does not know: how weights are pushed, what an evaluation does, how a snapshot is written.

Invariants (numbers are those of docs/admission.md):
1. (A27) An update excludes evaluations and cuts, and each of them an update.
2. (A59, A64) The version grows after the push and after the hook, and only if both succeeded, and whoever has to be
   told of it in that step was.
3. (A26, A63, M30) A failed update leaves its hold active and the engines torn; the next update goes on under that hold.
4. (M30) Who waits for the fence while the engines are torn is told so instead of waiting for ever.
5. (A27) A task that is inside is refused what would have to wait until it has left; an evaluation that
   is started in another one does not stand in line behind those who wait for that one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from recovery.admission.changes import Deadline, LongWait
from recovery.admission.exclusion import Pass, Work
from recovery.admission.holds import AdmissionClosed, Hold, HoldKind, Lifecycle
from recovery.admission.settlement import under
from recovery.errors import ConfigError, SnapshotAbandoned
from recovery.model import PolicyVersion

if TYPE_CHECKING:
    from recovery.admission.rollout import FullyAsyncRollout

Push = Callable[[PolicyVersion], Awaitable[object]]
Before = Callable[[PolicyVersion], Awaitable[object]]
After = Callable[[PolicyVersion, bool], Awaitable[object]]

_STARTED_IN: ContextVar[frozenset[Pass]] = ContextVar("passes inside which this was started", default=frozenset())
"""Tasks begin with the context of who made them."""


class DeadlinePassed(Exception):
    """The fence or the frontier was waited for too long. Nothing was done, and nothing is held because of it."""


class WaitsForItself(Exception):
    """A program error: an update inside one's own evaluation, or the other way round, would wait for its own end."""


class EnginesTorn(Exception):
    """(A63) A weight update failed: which weights the engines serve is not known until an update succeeds."""


def _awaitable(name: str, work: Awaitable[object]) -> Awaitable[object]:
    """`work`. Raises ConfigError for what no coroutine function returns."""
    if not inspect.isawaitable(work):
        raise ConfigError(
            f"{name} returned {'nothing' if work is None else f'a {type(work).__name__}'}, which cannot be awaited",
            hint=f"write it as `async def {name}(...)`",
        )
    return work


class WeightUpdates:
    """The fence of one rollout and everything that passes it."""

    def __init__(self, rollout: FullyAsyncRollout) -> None:
        self._rollout = rollout
        self._left_held: Hold | None = None
        self._cut: tuple[Pass, Hold] | None = None
        self._inside: dict[Pass, asyncio.Task[Any] | None] = {}

    async def update(
        self,
        push: Push,
        *,
        owner: str = "weight_update",
        again: bool = False,
        timeout_s: float | None = None,
        before: Before | None = None,
        after: After | None = None,
    ) -> PolicyVersion:
        """Drain, push the next version (`again`: the present one), publish it. Returns the version.

        Raises what `before`, `push`, `after` or `on_version` raised, or ConfigError for one that cannot be awaited. If
        `before` did, nothing has happened; after any other failure nothing is published, and the rollout stays held
        until a later update succeeds.
        """
        deadline = Deadline(timeout_s)
        one = await self._enter(Work.UPDATE, owner, deadline)
        try:
            hold = await self._drained(owner, deadline)
            versions = self._rollout.ownership.versions
            target = versions.current if again else versions.next
            try:
                if before is not None:
                    await _awaitable("before", before(target))
                self._rollout.ownership.begin_update(hold, target)
            except BaseException:
                self._release_unless_torn(hold)
                raise
            self._left_held = hold  # until it is known to have succeeded
            await self._push(hold, target, push, after)
            self._left_held = None
            self._rollout.release(hold)
            return target
        finally:
            self._leave(one)

    async def _push(self, hold: Hold, target: PolicyVersion, push: Push, after: After | None) -> None:
        own = self._rollout.ownership
        try:
            await _awaitable("push", push(target))
        except BaseException as error:
            own.end_update(hold, False)
            if after is not None:
                try:
                    await _awaitable("after", after(target, False))
                except BaseException as cleanup:
                    raise under(error, cleanup) from cleanup
            raise
        try:
            if after is not None:
                await _awaitable("after", after(target, True))
            own.gate.check_may_record(hold)
            self._rollout.on_version(target)
        except BaseException:
            own.end_update(hold, False)
            raise
        own.end_update(hold, True)

    async def _drained(self, owner: str, deadline: Deadline) -> Hold:
        """A drain hold whose frontier has ended: the one that a failed update left, or a new one."""
        left, gate = self._left_held, self._rollout.ownership.gate
        hold = left if left is not None and left in gate.active else None
        if hold is None:
            hold = self._rollout.acquire(HoldKind.DRAIN, owner, "weight update")
        try:
            if await self._rollout.wait_terminal(hold, timeout_s=deadline.left_s):
                return hold
        except BaseException:
            self._release_unless_torn(hold)
            raise
        self._release_unless_torn(hold)
        raise DeadlinePassed(f"{owner}: groups were still executing at the deadline")

    def _release_unless_torn(self, hold: Hold) -> None:
        if hold is not self._left_held and hold in self._rollout.ownership.gate.active:
            self._rollout.release(hold)

    @asynccontextmanager
    async def evaluation(self, owner: str = "evaluation", *, timeout_s: float | None = None) -> AsyncIterator[None]:
        """The engines are drained and belong to the block; no weight update comes in between.

        Raises DeadlinePassed or EnginesTorn before the block, with nothing held.
        """
        deadline = Deadline(timeout_s)
        one = await self._enter(Work.EVALUATION, owner, deadline)
        try:
            async with self._rollout.holding(HoldKind.DRAIN, owner, "evaluation") as hold:
                if not await self._rollout.wait_terminal(hold, timeout_s=deadline.left_s):
                    raise DeadlinePassed(f"{owner}: groups were still executing at the deadline")
                yield
        finally:
            self._leave(one)

    # ---- cuts: called by a snapshot, on the loop, without a wait -------------------------------------------------

    def hold_for_cut(self, reason: str) -> None:
        """Raises SnapshotAbandoned while a weight update is under way: versions would be torn."""
        self.release_cut()
        one = self._rollout.ownership.fence.enter(Work.CUT, "snapshot")
        if isinstance(one, str):
            raise SnapshotAbandoned(f"a {one} is under way", hint="nothing to do: the next snapshot comes after it")
        try:
            hold = self._rollout.acquire(HoldKind.CUT, "snapshot", reason)
        except AdmissionClosed as error:
            self._rollout.ownership.fence.leave(one)
            raise SnapshotAbandoned(
                f"the rollout is closed: {error}", hint="nothing to do: the job is ending"
            ) from error
        self._cut = (one, hold)

    @property
    def cut_hold(self) -> Hold:
        """Raises SnapshotAbandoned if none is held."""
        if self._cut is None:
            raise SnapshotAbandoned("the rollout is not held for a snapshot")
        return self._cut[1]

    def release_cut(self) -> None:
        """Harmless if nothing is held."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._rollout.ownership.fence.leave(cut[0])
            self._rollout.release(cut[1])

    # ---- the fence ---------------------------------------------------------------------------------------------

    async def _enter(self, work: Work, owner: str, deadline: Deadline) -> Pass:
        own, long = self._rollout.ownership, LongWait(owner)
        shared = work is Work.EVALUATION and any(one in self._inside and one.work is work for one in _STARTED_IN.get())
        place = None if shared else own.fence.stand(work, owner)
        try:
            while True:
                if own.gate.lifecycle is not Lifecycle.OPEN:
                    raise AdmissionClosed("the rollout was closed")
                if own.versions.torn and work is Work.EVALUATION:
                    raise EnginesTorn("a weight update failed: push this version again or the next one first")
                got = own.fence.enter(work, owner, place)
                if isinstance(got, Pass):
                    self._inside[got] = asyncio.current_task()
                    _STARTED_IN.set(_STARTED_IN.get() | {got})
                    return got
                for one, task in self._inside.items():
                    if task is asyncio.current_task():
                        raise WaitsForItself(
                            f"{owner} waits for a {work.value} inside the {one.work.value} of {one.owner}, in one task"
                        )
                if deadline.passed:
                    raise DeadlinePassed(f"{owner}: waited for the {got}")
                await self._rollout.changes.next(long.until(deadline, got, f"the {got} is not over"))
        except BaseException:
            if place is not None:
                own.fence.give_up(place)
                self._rollout.changes.tell()  # those behind it
            raise

    def _leave(self, one: Pass) -> None:
        del self._inside[one]
        _STARTED_IN.set(_STARTED_IN.get() - {one})
        self._rollout.ownership.fence.leave(one)
        self._rollout.changes.tell()
