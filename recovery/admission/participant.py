"""A rollout as a participant of snapshots: held, asked for its states, told how it ended.

Owns: which rollouts the published snapshots cover, and whether the trainer waits for one to write its checkpoint.
Does not know: the coordinator, the store; it is called on the event loop and never waits.

Invariants (numbers are those of docs/admission.md):
1. The states are taken in one step, under a cut hold whose frontier is frozen in that step.
2. (A42) A trainer's checkpoint is only said to be saved after a snapshot that covers it was published; otherwise a
   restart would find no snapshot that knows what was trained.
3. (A39, A40) While a trainer waits to write its checkpoint, a snapshot is only taken if all that a checkpoint needs
   holds; what does not is told to the one who waits, and covers nothing.
4. Whatever moves a group or the version is news, whoever generates: a snapshot at an interval is for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from recovery.admission.preparation import NotPrepared, Waits, covers, prepare
from recovery.admission.state import NAME
from recovery.errors import RecoveryError, SnapshotAbandoned
from recovery.model import PolicyVersion

if TYPE_CHECKING:
    from recovery.admission.rollout import FullyAsyncRollout


class NotTakenUp(Exception):
    """A program error: the store has a state of the rollout, and the rollout began without it."""


class NotCovered(Exception):
    """No published snapshot knows the batch of that rollout as settled."""


class RolloutParticipant:
    """recovery.ports.LoopParticipant."""

    name = NAME

    def __init__(self, rollout: FullyAsyncRollout) -> None:
        self._rollout = rollout
        self._taken: int | None = None
        self._taken_at = self._published_at = self._moment()
        self._taken_strictly = False
        self.waits = Waits()
        self.attached = False
        self.stopped_by: RecoveryError | None = None
        self.covered = 0
        """The highest rollout that a published snapshot covers."""
        self.prepared = 0
        """The highest rollout that one covers which was taken under the conditions of a checkpoint."""

    def attach(self, carried: Mapping[str, bytes]) -> None:
        """Raises NotTakenUp: what was trained would be generated and trained on again."""
        if carried and not self._rollout.state.taken_up:
            raise NotTakenUp(
                "the restored snapshot has a state of this rollout, which was not taken up: call "
                "rollout.restore(session.restored.states, rollout=..., version=..., lineage=...) before "
                "session.participants.add(rollout.participant)"
            )
        self.attached = True
        self._published_at = self._moment()

    @property
    def has_news(self) -> bool:
        return self._moment() != self._published_at

    def _moment(self) -> tuple[int, PolicyVersion]:
        """Another one after whatever a snapshot would say."""
        return self._rollout.ownership.attempts.steps, self._rollout.version

    def owns(self, name: str) -> bool:
        return name == NAME or name.startswith("group-")

    def hold(self, reason: str) -> None:
        self.waits.held()
        self._rollout.updates.hold_for_cut(reason)

    def states(self) -> Mapping[str, bytes]:
        """Raises SnapshotAbandoned if the rollout has failed or is being closed."""
        own, hold = self._rollout.ownership, self._rollout.updates.cut_hold
        own.gate.freeze(hold)
        strict = self.waits.any
        try:
            prepare(own, hold, unresolved=self._rollout.unresolved, checkpoint=strict)
        except NotPrepared as error:
            self.waits.refused(error)
            raise SnapshotAbandoned(str(error), hint="the last snapshot stands") from error
        self._taken, self._taken_strictly, self._taken_at = covers(own), strict, self._moment()
        return self._rollout.state.states()

    def resume(self, published: bool) -> None:
        if published and self._taken is not None:
            self._published_at = self._taken_at
            self.covered = max(self.covered, self._taken)
            self.prepared = max(self.prepared, self._taken if self._taken_strictly else 0)
        self._taken = None
        self.waits.ended()
        self._rollout.changes.tell()

    def release(self) -> None:
        self._rollout.updates.release_cut()

    def stopped(self, error: RecoveryError) -> None:
        self.stopped_by = error
        self._rollout.changes.tell()

    def check_covers(self, rollout: int) -> None:
        """Raise NotCovered unless a restart at that rollout would find its snapshot, and its batch was settled.

        Raises what stopped this process, if it was: whether the checkpoint counts is for its successor to say.
        """
        if self.stopped_by is not None:
            raise self.stopped_by
        known = covers(self._rollout.ownership)
        if rollout > known:
            raise NotCovered(
                f"rollout {rollout} is no checkpoint yet: its batch was not committed (up to {known} all are)"
            )
        if self.attached and rollout > self.covered:
            raise NotCovered(f"no snapshot covers rollout {rollout} yet, the newest one covers {self.covered}")
