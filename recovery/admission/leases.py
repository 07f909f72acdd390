"""Leases of train batches: who owns a batch, and that it is settled once.

Owns: the open leases and whether a handle is spent.
Does not know: how a batch is settled (settlement.py), how it was put together.

Invariants (numbers are those of docs/admission.md):
1. (A31) A handle is spent by its first settlement attempt, whatever became of it.
2. (A33) After that attempt the lease is not open any more.
3. (A30) A lease carries its receipts and its rollout id, which grows from lease to lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.admission.attempts import Terminal
from recovery.admission.samples import Sample
from recovery.model import PolicyVersion


class LeaseSpent(Exception):
    """A program error: the lease was settled before, or is not one of this owner."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lease:
    """One batch. `groups` are copies of the finished samples, in the order of `receipts`: what a trainer changes in
    them changes nothing that is kept. `version` is current at issue.
    """

    rollout: int
    receipts: tuple[Terminal, ...]
    groups: tuple[tuple[Sample, ...], ...]
    version: PolicyVersion


class Leases:
    """The open leases of one owner."""

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self.newest = 0
        """The highest rollout id that was leased, or that a checkpoint of the trainer has."""

    @property
    def open(self) -> tuple[Lease, ...]:
        return tuple(self._open.values())

    def may_issue(self, rollout: int) -> bool:
        return rollout > self.newest

    def issue(self, lease: Lease) -> Lease:
        if not self.may_issue(lease.rollout):
            raise LeaseSpent(f"rollout {lease.rollout} is not above {self.newest}, the newest one")
        self._open[lease.rollout] = lease
        self.newest = lease.rollout
        return lease

    def check_open(self, lease: Lease) -> None:
        """Raise LeaseSpent if it was settled before, or is another owner's."""
        if self._open.get(lease.rollout) is not lease:
            raise LeaseSpent(
                f"the lease of rollout {lease.rollout} is not open here: it was committed or rolled back already, or "
                "another rollout issued it (a lease is settled once)"
            )

    def spend(self, lease: Lease) -> None:
        """The one settlement attempt begins. Raises LeaseSpent, with nothing changed, if there was one."""
        self.check_open(lease)
        del self._open[lease.rollout]
