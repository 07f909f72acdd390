"""Waiting for anything to change, with a deadline.

Owns: who waits.
Does not know: what changed; who wakes up looks again.

Invariants:
1. A wait never changes what it waits for; a deadline, or a cancellation of the waiter, only ends the wait.
2. `tell` wakes everybody who waits at that moment, and nobody who comes later.
"""

from __future__ import annotations

import asyncio


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
