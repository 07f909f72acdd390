"""What a fully asynchronous rollout counts, under a fixed set of names.

Owns: the counters of the present interval, and the names.
Does not know: who reads them, when.

Invariants (numbers are those of docs/admission.md):
1. (A68 to A70) The keys are exactly KEYS, at every emission; no version, id or owner's label ever becomes one.
2. Counters start again at an emission; gauges are what they are at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery.admission.versions import Distance, Lag

_BUCKETS = ("count_0", "count_1", "count_2_to_3", "count_4_plus", "count_unknown")

COUNTERS = (
    *(f"fully_async/version_lag/{bucket}" for bucket in _BUCKETS),
    "fully_async/count/stale_rejected",
    "fully_async/count/stale_requeued",
    "fully_async/count/aborted_requeued",
    "rollout/fully_async/aborted_groups_filtered",
    "rollout/fully_async/stale_groups_filtered",
    "rollout/fully_async/evicted_stale_groups",
    "rollout/fully_async/evicted_overflow_groups",
    "rollout/fully_async/aborted_groups_recycled",
    "rollout/fully_async/stale_groups_recycled",
    "rollout/fully_async/refused_leases",
    "rollout/fully_async/negative_lags",
    "rollout/fully_async/lineage_mismatches",
    "rollout/fully_async/escalated_groups",
    "rollout/fully_async/samples_withheld",
    "rollout/fully_async/filtered_groups",
    "rollout/fully_async/tokens_reused",
    "rollout/fully_async/tokens_regenerated",
)

HOLD_OWNERS = ("weight_update", "evaluation", "snapshot", "other")
RETAINED_CAUSES = ("commit_failed", "rollback_failed", "newer_than_current")

GAUGES = (
    "fully_async/queue/completed_groups",
    "fully_async/policy/current_version",
    "rollout/fully_async/queue_size",
    "rollout/fully_async/buffer_avg_staleness",
    "rollout/fully_async/buffer_max_staleness",
    "rollout/fully_async/holds_active",
    *(f"rollout/fully_async/hold_age_s/{owner}" for owner in HOLD_OWNERS),
    "rollout/fully_async/frontier_groups",
    "rollout/fully_async/open_leases",
    *(f"rollout/fully_async/retained/{cause}" for cause in RETAINED_CAUSES),
    "rollout/fully_async/slots_used",
    "rollout/fully_async/slots_total",
)

_DERIVED = (
    "rollout/fully_async/avg_staleness",
    "rollout/fully_async/max_staleness",
    "rollout/fully_async/evict_rate",
)

KEYS = frozenset((*COUNTERS, *GAUGES, *_DERIVED))


@dataclass(slots=True)
class Metrics:
    """One interval. `add` takes a name of COUNTERS by its last part."""

    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    _lags: list[int] = field(default_factory=list)
    _put: int = 0

    def add(self, name: str, n: int = 1) -> None:
        self._counts[_BY_LAST_PART[name]] += n

    def finished(self) -> None:
        """One group was put into the buffer."""
        self._put += 1

    def leased(self, distance: Distance) -> None:
        """One group of a lease, as far from the current version as that."""
        if not isinstance(distance, Lag):
            self.add("count_unknown")
            return
        self._lags.append(distance.updates)
        n = distance.updates
        self.add(f"count_{n}" if n < 2 else "count_2_to_3" if n < 4 else "count_4_plus")

    def emit(self, gauges: Mapping[str, float]) -> dict[str, float]:
        """Every key once; the counters start again. Raises ValueError unless exactly the gauges are given."""
        if set(gauges) != set(GAUGES):
            raise ValueError(f"not the gauges: {sorted(set(gauges) ^ set(GAUGES))}")
        evicted = sum(self._counts[_BY_LAST_PART[name]] for name in ("evicted_stale_groups", "evicted_overflow_groups"))
        found: dict[str, float] = {
            **self._counts,
            **gauges,
            "rollout/fully_async/avg_staleness": sum(self._lags) / len(self._lags) if self._lags else 0.0,
            "rollout/fully_async/max_staleness": max(self._lags, default=0),
            "rollout/fully_async/evict_rate": evicted / self._put if self._put else 0.0,
        }
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._lags, self._put = [], 0
        return found


_BY_LAST_PART = {name.rpartition("/")[2]: name for name in COUNTERS}
