"""How old a group is, and the part of it that is too old to be trained on.

Owns: the way from a group's tokens to distances, and masking.
Does not know: what follows from an age (staleness.py, ownership.py).

Invariants (numbers are those of docs/admission.md):
1. (A53) A group that reported no versions is as old as its admission; what a worker says at completion is not asked.
2. (A65, V11) Masking takes tokens out of the loss; no version is ever rewritten.
3. (V17) Whole siblings are withheld only if one is left that is trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

from recovery.admission.attempts import Record
from recovery.admission.samples import Sample, trainable_versions
from recovery.admission.staleness import Staleness, farthest
from recovery.admission.versions import Distance, Lag, PolicyVersions
from recovery.model import PolicyVersion

NO_LAG = 1 << 30
"""Stands for `farther than any number` where groups are put in order of age."""


class Ages:
    """Distances of groups to the current version, under one limit."""

    def __init__(self, staleness: Staleness, versions: PolicyVersions) -> None:
        self._staleness = staleness
        self._versions = versions

    def trained(self, record: Record) -> set[PolicyVersion | None]:
        """The versions of the tokens that would be trained on; of an unfinished group, its admission's."""
        return trainable_versions(record.samples, record.version) if record.samples else {record.version}

    def far(self, record: Record) -> Distance:
        """The distance that decides."""
        return farthest(self._versions.distance(version) for version in self.trained(record))

    def of(self, record: Record) -> tuple[bool, Sequence[int]]:
        """Whether the group is beyond the limit now, and the lag of each of its versions."""
        trained = self.trained(record)
        distances = [self._versions.distance(version) for version in trained]
        lags = [distance.updates if isinstance(distance, Lag) else NO_LAG for distance in distances]
        beyond = self._staleness.beyond(self._versions, trained)
        return beyond and not self._left(record), lags

    def _left(self, record: Record) -> list[Sample]:
        """Siblings that can be trained on without those that are too old."""
        if self._staleness.granularity != "sibling":
            return []
        found = [(sample, trainable_versions([sample], record.version)) for sample in record.samples]
        return [one for one, trained in found if trained and not self._staleness.beyond(self._versions, trained)]

    def withhold(self, record: Record) -> int:
        """(V17) Siblings that are too old become context, rewards stay. How many; 0: none is left, or not wanted."""
        left = self._left(record)
        stale = [sample for sample in record.samples if all(sample is not one for one in left)] if left else []
        stale = [sample for sample in stale if any(sample.loss_mask)]  # those that were not withheld before
        for sample in stale:
            sample.loss_mask[:] = [0] * len(sample.loss_mask)
            record.encoded = None
        return len(stale)

    def mask(self, record: Record) -> None:
        """Tokens that are too old become context of those that are not."""
        for sample in record.samples:
            for start, end, lineage, number in sample.version_spans:
                if not self._staleness.keep(self._versions, PolicyVersion(lineage, number)):
                    sample.loss_mask[start:end] = [0] * (end - start)
                    record.encoded = None
