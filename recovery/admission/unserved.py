"""Groups that are too old as soon as they are drawn: their engine reports another version than the one that is served.

Owns: how often that came in a row, for each group and for groups that were given up; and the error that ends it.
Does not know: what becomes of such a group (ownership.py), what an engine is.

Invariants:
1. A group that was admitted under the current version, or whose lineage nobody knows, and is too old all the same was
   not overtaken by updates: another draw would end in the same way. DRAWS_MAX of them in a row are a failure.
2. What is leased was progress: it, and what was given up meanwhile, is counted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from recovery.admission.attempts import Record
from recovery.admission.limits import VersionNotServed
from recovery.admission.versions import PolicyVersions, Unknown
from recovery.model import PolicyVersion

DRAWS_MAX = 8
"""As many as cancellations of one group (limits.ABORTS_MAX)."""


class Unserved:
    """Of one rollout."""

    def __init__(self, versions: PolicyVersions) -> None:
        self._versions = versions
        self._draws: dict[int, int] = {}
        self._given_up = 0

    def note(
        self, record: Record, trained: Collection[PolicyVersion | None], *, given_up: bool
    ) -> VersionNotServed | None:
        """A finished group is too old. The error if that has to end."""
        current = self._versions.current
        unknown = any(isinstance(self._versions.distance(one), Unknown) for one in trained)
        group = record.attempt.group_index
        if record.version != current and not unknown:
            self._draws.pop(group, None)
            return None
        self._draws[group] = self._draws.get(group, 0) + 1
        self._given_up += given_up
        if max(self._draws[group], self._given_up) < DRAWS_MAX:
            return None
        served = f"({current.lineage}, {current.number})"
        reported = ", ".join(sorted(f"({one.lineage}, {one.number})" for one in trained if one is not None))
        return VersionNotServed(
            f"group {record.attempt.reservation_id!r} was too old {DRAWS_MAX} times as soon as it was drawn: its "
            f"engine reports the version {reported or 'of its admission'}, and {served} is served; let "
            "version_spans name rollout.version (on_version= tells an engine of it)"
        )

    def leased(self, records: Iterable[Record]) -> None:
        self._given_up = 0
        for record in records:
            self._draws.pop(record.attempt.group_index, None)
