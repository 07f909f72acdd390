"""A rollout as a participant of snapshots: held, asked for its states, told how it ended.

Owns: which rollouts the published snapshots cover.
Does not know: the coordinator, the store; it is called on the event loop and never waits.

Invariants (numbers are those of docs/admission.md):
1. The states are taken in one step, under a cut hold whose frontier is frozen in that step.
2. (A42) A trainer's checkpoint is only said to be saved after a snapshot that covers it was published; otherwise a
   restart would find no snapshot that knows what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from recovery.admission.preparation import NotPrepared, covers, prepare
from recovery.admission.state import NAME
from recovery.errors import SnapshotAbandoned

if TYPE_CHECKING:
    from recovery.admission.rollout import FullyAsyncRollout


class NotCovered(Exception):
    """No published snapshot knows the batch of that rollout as settled."""


class RolloutParticipant:
    """recovery.ports.Participant."""

    def __init__(self, rollout: FullyAsyncRollout) -> None:
        self._rollout = rollout
        self._taken: int | None = None
        self.attached = False
        self.covered = 0
        """The highest rollout that a published snapshot covers."""

    def attach(self) -> None:
        self.attached = True

    def owns(self, name: str) -> bool:
        return name == NAME or name.startswith("group-")

    def hold(self, reason: str) -> None:
        self._rollout.updates.hold_for_cut(reason)

    def states(self) -> Mapping[str, bytes]:
        """Raises SnapshotAbandoned if the rollout has failed or is being closed."""
        own, hold = self._rollout.ownership, self._rollout.updates.cut_hold
        own.gate.freeze(hold)
        try:
            prepare(own, hold, checkpoint=False)
        except NotPrepared as error:
            raise SnapshotAbandoned(str(error), hint="the last snapshot stands") from error
        self._taken = covers(own)
        return self._rollout.state.states()

    def resume(self, published: bool) -> None:
        if published and self._taken is not None:
            self.covered = max(self.covered, self._taken)
        self._taken = None
        self._rollout.changes.tell()

    def release(self) -> None:
        self._rollout.updates.release_cut()

    def check_covers(self, rollout: int) -> None:
        """Raise NotCovered unless a restart at that rollout would find its snapshot."""
        if self.attached and rollout > self.covered:
            raise NotCovered(f"no snapshot covers rollout {rollout} yet, the newest one covers {self.covered}")
