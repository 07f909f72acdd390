"""Waiting for anything to change, with a deadline.

Owns: who waits, and that one who waits long for another is told so.
Does not know: what changed; who wakes up looks again.

Invariants:
1. A wait never changes what it waits for; a deadline, or a cancellation of the waiter, only ends the wait.
2. `tell` wakes everybody who waits at that moment, and nobody who comes later.
"""

from __future__ import annotations

import asyncio
import warnings

from recovery.errors import ProgramError

TOLD_AFTER_S = 60.0
"""So long somebody may wait for another's hold before it is told; evaluations take minutes."""


def running_loop(verb: str) -> asyncio.AbstractEventLoop:
    """The loop that this is a step of. Raises ProgramError in a thread that runs none, `verb` being what was tried."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ProgramError(
            f"rollout.{verb}() was called where no event loop runs",
            hint=f"call it on the rollout's loop: loop.call_soon_threadsafe(rollout.{verb}, ...) from another thread",
        ) from None


class Deadline:
    """A moment on the loop's clock; None is never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - asyncio.get_running_loop().time())

    @property
    def passed(self) -> bool:
        return self.left_s == 0.0

    def or_before(self, other: Deadline) -> Deadline:
        """The earlier one of both."""
        left_s, others_s = self.left_s, other.left_s
        return other if left_s is None or (others_s is not None and others_s < left_s) else self


class LongWait:
    """Says once what a wait is for, when it is for the same thing for TOLD_AFTER_S."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._what: object = None
        self._due = Deadline(None)

    def until(self, deadline: Deadline, what: object, said: str) -> Deadline:
        """When to look again at the latest. `what` is waited for, falsy for nothing worth telling; `said` tells it."""
        if what != self._what:
            self._what, self._due = what, Deadline(TOLD_AFTER_S if what else None)
        if self._due.passed:
            self._due = Deadline(None)
            warnings.warn(f"{self._who} has waited for {TOLD_AFTER_S:.0f} s: {said}", stacklevel=3)
        return deadline.or_before(self._due)


class Changes:
    """One for everything that a rollout's waiters wait for."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order, so that a schedule can be replayed

    def tell(self) -> None:
        for one in self._waiting:
            if not one.done():
                one.set_result(None)
        self._waiting = {}

    async def next(self, deadline: Deadline) -> bool:
        """Whether something changed before the deadline."""
        one = asyncio.get_running_loop().create_future()
        self._waiting[one] = None
        try:
            done, _ = await asyncio.wait({one}, timeout=deadline.left_s)
            return bool(done)
        finally:
            self._waiting.pop(one, None)
