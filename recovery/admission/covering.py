"""Waiting until a published snapshot covers a rollout, so that the trainer's checkpoint may be written.

Owns: when a snapshot is asked for, and asked for again.
Does not know: who takes snapshots, what has to hold for one, who else waits (preparation.py).

Invariant:
1. A snapshot that ended without covering the rollout is asked for again, and so is one of which nothing was heard: who
   is asked raises what stops the process. A stop that the participant was told of ends every wait at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from recovery.admission.changes import Deadline

if TYPE_CHECKING:
    from recovery.admission.rollout import FullyAsyncRollout

AGAIN_AFTER_S = 1.0
"""Between a snapshot that was given up (for a weight update, say) and the next request."""

UNHEARD_FOR_S = 10.0
"""So long nothing may be heard of a request before it is repeated: the one that was asked may have stopped."""


async def covered(
    one: FullyAsyncRollout, rollout: int, want_snapshot: Callable[[str], None], timeout_s: float | None
) -> bool:
    """See FullyAsyncRollout.prepare_checkpoint."""
    deadline, ask = Deadline(timeout_s), Deadline(0.0)
    with one.participant.waits.one() as wait:
        while True:
            if wait.ended:
                wait.ended, ask = False, Deadline(AGAIN_AFTER_S)
            for error in (one.ownership.failure, one.participant.stopped_by, wait.refused):
                if error is not None:
                    raise error
            if one.participant.attached and one.participant.prepared >= rollout:
                return True
            if ask.passed and not wait.held:
                ask = Deadline(UNHEARD_FOR_S)
                want_snapshot("checkpoint")
                continue  # it may have been taken at once
            if not one.participant.attached:
                return True
            if deadline.passed:
                return False
            await one.changes.next(deadline if wait.held else deadline.or_before(ask))
