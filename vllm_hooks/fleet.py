"""The coordinator's view of one capturing process: every step of a snapshot, carried to the event loop.

Owns: how a call from the coordinator's thread is done on the loop, and how long it may take.
Does not know: the protocol's order, the format.

Invariants:
1. What runs on the loop is synchronous: the cut is one function between two engine outputs.
2. Every wait has a deadline; a loop that does not answer costs one snapshot, nothing else.
3. Exactly the hold acquired for this snapshot is released.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from recovery.admission.holds import Hold, HoldKind
from recovery.calls import Stored
from recovery.errors import EngineDead, RecoveryError, SnapshotAbandoned
from recovery.staging import Staged

if TYPE_CHECKING:
    from vllm_hooks.session import RecoverySession

T = TypeVar("T")

UNDO_TIMEOUT_S = 10.0
"""What takes a snapshot back is waited for so long."""


class LoopFleet:
    """recovery.coordinator.Fleet for one process."""

    def __init__(self, session: RecoverySession) -> None:
        self._session = session
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hold: Hold | None = None
        self._stall_s: float | None = None
        self._flush: Future[RecoveryError | None] | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def acquire_hold(self, reason: str, timeout_s: float) -> None:
        def acquire() -> None:
            self._release()  # one that a timed-out release left: two holds of one owner would never both be released
            self._hold = self._session.barriers.hold(HoldKind.CUT, "coordinator", reason, time.time())
            self._session.participants.hold(reason)

        self._on_loop(acquire, timeout_s)

    def release_hold(self) -> None:
        self._on_loop(self._release, UNDO_TIMEOUT_S, undo=True)

    def _release(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            self._session.barriers.release(hold)
        self._session.participants.release()

    def raise_fence(self, timeout_s: float) -> None:
        self._on_loop(self._session.barriers.raise_fence, timeout_s)

    def lower_fence(self) -> None:
        self._on_loop(self._session.barriers.lower_fence, UNDO_TIMEOUT_S, undo=True)

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        def states_now() -> Mapping[str, bytes]:
            states = self._session.participants.states()
            self._session.stored.due()  # in the same step: what is forgotten later is still owned in these states
            return states

        return self._on_loop(states_now, timeout_s)

    def resume(self, published: bool) -> None:
        if published:
            self._session.stager.published()
        self._on_loop(lambda: self._session.participants.resume(published), UNDO_TIMEOUT_S, undo=True)

    def cut(self, timeout_s: float) -> None:
        session = self._session

        def cut() -> None:
            if session.dead_engine is not None:
                raise EngineDead(
                    f"the engine died: {session.dead_engine}", hint="run the same command again to continue the job"
                )
            began = time.perf_counter()
            self._flush = session.flushing.submit(session.cut())
            self._stall_s = time.perf_counter() - began

        self._on_loop(cut, timeout_s)

    def take_stall_s(self) -> float | None:
        """How long the last cut kept the loop from everything else. Once per cut."""
        stall_s, self._stall_s = self._stall_s, None
        return stall_s

    def stage(self, timeout_s: float) -> list[Staged]:
        assert self._flush is not None
        try:
            error = self._flush.result(timeout_s)
        except TimeoutError:
            raise SnapshotAbandoned(
                f"the cut was not stored within the {timeout_s:.1f} s that were left",
                hint="look at the store's back end; the tokens go with the next flush",
            ) from None
        if error is not None:
            raise error
        return self._session.stager.take_staged()

    def store_again(self, staged: Staged, timeout_s: float) -> Staged | None:
        try:
            return self._session.stager.store_again(staged).result(timeout_s)
        except TimeoutError:
            raise SnapshotAbandoned(
                f"{staged.info.key} does not read back, and was not stored again within {timeout_s:.1f} s",
                hint="look at the store's back end; the next snapshot tries it again",
            ) from None

    def rewind(self, stored: Stored) -> None:
        session = self._session

        def rewind() -> None:
            session.table.rewind(stored)
            session.flushing.want()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(rewind)

    def _on_loop(self, work: Callable[[], T], timeout_s: float, *, undo: bool = False) -> T:
        """Do `work` on the loop. What undoes a step stays queued when the wait for it is given up."""
        loop = self._loop
        if loop is None or loop.is_closed():
            raise SnapshotAbandoned("the event loop is gone", hint="nothing to do: the job is ending")
        done: Future[Any] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        loop.call_soon_threadsafe(run)
        try:
            return done.result(timeout_s)
        except TimeoutError:
            if not undo:
                done.cancel()
            raise SnapshotAbandoned(
                f"the event loop did not answer within {timeout_s:.1f} s",
                hint="something blocks the loop that consumes the engine",
            ) from None
