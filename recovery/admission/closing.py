"""Closing a rollout: what runs is cancelled, waited for, and given back.

Owns: that one close is under way at a time, and how long each caller waits for it.
Does not know: what has to be settled, and how (ownership.py).

Invariants (numbers are those of docs/admission.md):
1. (A48, A49) One close goes on until it is through or has failed, whoever called it and whoever has gone; a later call
   joins it, or begins anew after a failure.
2. (A50) A deadline is the caller's own: it ends the wait and nothing else.
3. It succeeds only when nothing is owned any more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from recovery.admission.changes import Deadline
from recovery.admission.holds import Lifecycle
from recovery.admission.limits import TerminalPending

if TYPE_CHECKING:
    from recovery.admission.rollout import FullyAsyncRollout


class Closing:
    """Of one rollout."""

    def __init__(self, rollout: FullyAsyncRollout) -> None:
        self._rollout = rollout
        self._work: asyncio.Task[None] | None = None

    async def close(self, timeout_s: float | None) -> None:
        deadline = Deadline(timeout_s)
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._close(), name="close the rollout")
            self._work.add_done_callback(lambda work: work.cancelled() or work.exception())  # nobody may be left to ask
        work = self._work
        if await asyncio.wait({work}, timeout=deadline.left_s) == (set(), {work}):
            names = sorted(task.get_name() for task in self._rollout.running)
            raise TerminalPending(f"{len(names)} groups have not stopped: {', '.join(names)}")
        work.result()

    async def _close(self) -> None:
        one = self._rollout
        try:
            one.ownership.close()
        finally:
            one.changes.tell()
        for task in one.running:
            task.cancel()
        while one.running:
            await one.changes.next(Deadline(None))
        errors = one.ownership.settle_all()
        one.changes.tell()
        if errors:
            raise errors[0]
        if one.ownership.gate.lifecycle is not Lifecycle.CLOSED:
            left = ", ".join(f"{left.attempt.reservation_id} ({left.phase.value})" for left in one.ownership.attempts)
            raise TerminalPending(f"the rollout still owns {left}")
        one.generation.close()
