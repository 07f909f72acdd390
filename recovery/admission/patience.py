"""Waiting for long groups instead of letting them grow too old (`wait_not_drop`).

Owns: how many updates are due to batches that were leased, and what has to wait because of it.
Does not know: who is leased what, how a group is generated.

Invariants (numbers are those of docs/admission.md):
1. No lease is issued that would put an executing group that is waited for beyond the limit, once that lease and those
   before it have become updates. Only executing groups count: they end by themselves, so nothing waits for ever.
2. Where every group is waited for, no more are admitted than can be trained within the limit; one batch always is.
3. A publication makes up for all batches that are settled; those still leased are due.
"""

from __future__ import annotations

from recovery.admission.ages import Ages
from recovery.admission.attempts import Attempts, Phase
from recovery.admission.staleness import Staleness
from recovery.admission.versions import Lag


class Patience:
    """Of one rollout."""

    def __init__(self, staleness: Staleness, ages: Ages, attempts: Attempts, batch_groups: int) -> None:
        self._staleness = staleness
        self._ages = ages
        self._attempts = attempts
        self._batch_groups = batch_groups
        self.updates_due = 0

    def leased(self) -> None:
        self.updates_due += 1

    def not_trained(self) -> None:
        """A leased batch was given back."""
        self.updates_due -= 1

    def published(self, open_leases: int) -> None:
        self.updates_due = open_leases

    def has_enough(self) -> bool:
        """Whether one more group could not be trained within the limit."""
        limit = self._staleness.limit
        if limit is None or not self._staleness.waits_for(0):
            return False
        batches = max(1, limit + 1 - self.updates_due)
        untrained = self._attempts.in_phase(Phase.RESERVED, Phase.EXECUTING, Phase.TERMINAL, Phase.PUBLISHED)
        return len(untrained) >= batches * self._batch_groups

    def must_wait_for(self) -> str:
        """The group that the next lease would make too old; empty if there is none."""
        limit = self._staleness.limit
        for record in self._attempts.in_phase(Phase.EXECUTING):
            if limit is None or not self._staleness.waits_for(record.attempt.stale):
                continue
            far = self._ages.far(record)
            if isinstance(far, Lag) and far.updates <= limit < far.updates + self.updates_due + 1:
                return repr(record.attempt.reservation_id)
        return ""
