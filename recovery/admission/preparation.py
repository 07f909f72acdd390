"""What must hold before a state is taken: for the trainer's checkpoint, and for a snapshot in between.

Owns: the preconditions, each with an error of its own; the highest rollout that a state covers; who waits for one for a
checkpoint, and what each has heard since.
Does not know: how a state is written (state.py), who takes the hold.

Invariants (numbers are those of docs/admission.md):
1. (A39) For a checkpoint of rollout R: not closing, not failed, held, every frontier member done, no lease open,
   nothing retained after one more retry, nothing unsettled at the trainer.
2. For a snapshot in between, leases may be open and receipts retained: their groups are outstanding in the state, so a
   restore brings them back; only a trainer that had trained them already may not take it (`covers`).
3. A refusal changes nothing but what the retry settled.
4. (A39, A40) As long as anybody waits, snapshots are taken under the conditions of a checkpoint; what refuses one is
   told to each who waits, and the end of one wait changes nothing for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from recovery.admission.holds import Hold, Lifecycle
from recovery.admission.ownership import Ownership


class NotPrepared(Exception):
    """A precondition does not hold; the subclasses say which."""


class Closing(NotPrepared):
    """The rollout is being closed."""


class Failed(NotPrepared):
    """The rollout has failed."""


class NotHeldNow(NotPrepared):
    """The hold is not active."""


class FrontierRunning(NotPrepared):
    """A member of the hold's frontier is neither settled nor frozen."""


class LeasesOpen(NotPrepared):
    """A batch is with the trainer, neither committed nor rolled back."""


class ReceiptsRetained(NotPrepared):
    """Something could still not be given back to the source."""


class TrainerUnresolved(NotPrepared):
    """(A40) The trainer's answer to a publication is open, or failed."""


def prepare(ownership: Ownership, hold: Hold, *, unresolved: int = 0, checkpoint: bool) -> None:
    """Raise the NotPrepared that applies, or return: the state may be taken in this very step."""
    if ownership.gate.lifecycle is not Lifecycle.OPEN:
        raise Closing("the rollout is being closed; its state is what the last snapshot says")
    if ownership.failure is not None:
        raise Failed(f"the rollout has failed: {ownership.failure}") from ownership.failure
    if hold not in ownership.gate.active:
        raise NotHeldNow(f"hold {hold.number} of {hold.owner} is not active")
    left = ownership.gate.left(hold)
    if left:
        raise FrontierRunning(f"{left} groups of the hold of {hold.owner} are still executing")
    errors = ownership.reconcile() if checkpoint else []
    if not checkpoint:
        return
    if ownership.leases.open:
        rollouts = ", ".join(str(lease.rollout) for lease in ownership.leases.open)
        raise LeasesOpen(f"the leases of rollouts {rollouts} are open")
    if ownership.settlement.retained or ownership.settlement.refuses:
        n = len(ownership.settlement.retained)
        raise ReceiptsRetained(f"{n} receipts could not be given back: {errors[0] if errors else 'reconcile'}")
    if unresolved:
        raise TrainerUnresolved(
            f"{unresolved} publications to the trainer are not resolved: commit each, or roll it back, failed or not"
        )


def covers(ownership: Ownership) -> int:
    """The highest R of which a trainer may restore this state: every rollout up to it is settled and known to it."""
    open_leases = [lease.rollout for lease in ownership.leases.open]
    return min(open_leases) - 1 if open_leases else ownership.leases.newest


@dataclass(eq=False, slots=True)
class Wait:
    """Of one who waits: what refused a snapshot since, whether one is being taken, and whether one ended."""

    refused: NotPrepared | None = None
    held: bool = False
    ended: bool = False


class Waits:
    """All who wait at one rollout."""

    def __init__(self) -> None:
        self._all: dict[Wait, None] = {}

    @property
    def any(self) -> bool:
        return bool(self._all)

    @contextmanager
    def one(self) -> Iterator[Wait]:
        wait = Wait()
        self._all[wait] = None
        try:
            yield wait
        finally:
            del self._all[wait]

    def held(self) -> None:
        """A snapshot is being taken."""
        for wait in self._all:
            wait.held = True

    def refused(self, error: NotPrepared) -> None:
        for wait in self._all:
            wait.refused = error

    def ended(self) -> None:
        """A snapshot was published or given up."""
        for wait in self._all:
            wait.held, wait.ended = False, True
