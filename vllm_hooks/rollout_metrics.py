"""What a FullyAsyncRollout counts, for a Prometheus scraper (docs/metrics.md lists every name).

Owns: the names under which recovery.admission.metrics is scraped.
Does not know: the rollout. Its counters are per interval and start again when they are read, so that only one reader
may have them: the training loop, which hands on here what it read.

Invariants:
1. Every key of recovery.admission.metrics is in exactly one sample, or is derived from others that are.
2. Labels are those of session_metrics: fixed sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from recovery.admission.metrics import COUNTERS, GAUGES, HOLD_OWNERS, RETAINED_CAUSES
from vllm_hooks.session_metrics import PREFIX

_OWN = "rollout/fully_async"
LAGS = {f"fully_async/version_lag/count_{lag}": lag for lag in ("0", "1", "2_to_3", "4_plus", "unknown")}
TOKENS = {f"{_OWN}/tokens_{fate}": fate for fate in ("reused", "regenerated")}
EVENTS = {key: key.rpartition("/")[2] for key in COUNTERS if key not in LAGS and key not in TOKENS}
HOLD_AGES = {f"{_OWN}/hold_age_s/{owner}": owner for owner in HOLD_OWNERS}
RETAINED = {f"{_OWN}/retained/{cause}": cause for cause in RETAINED_CAUSES}
PLAIN = {
    "fully_async/queue/completed_groups": ("completed_groups", "Finished groups that wait for the trainer."),
    "fully_async/policy/current_version": ("policy_version", "Number of the current policy version."),
    f"{_OWN}/queue_size": ("queue_size", "Groups in the buffer."),
    f"{_OWN}/buffer_avg_staleness": ("buffer_staleness_mean", "Mean lag of the groups in the buffer."),
    f"{_OWN}/buffer_max_staleness": ("buffer_staleness_max", "Largest lag of the groups in the buffer."),
    f"{_OWN}/holds_active": ("holds_active", "Holds that keep source and leases closed."),
    f"{_OWN}/frontier_groups": ("frontier_groups", "Groups that holds wait for."),
    f"{_OWN}/open_leases": ("open_leases", "Batches that the trainer has and has not settled."),
    f"{_OWN}/slots_used": ("slots_used", "Slots for groups in use."),
    f"{_OWN}/slots_total": ("slots", "Slots for groups."),
}
assert {*HOLD_AGES, *RETAINED, *PLAIN} == set(GAUGES) and {*LAGS, *TOKENS, *EVENTS} == set(COUNTERS)


class RolloutMetrics:
    """Register one per rollout and call `update(rollout.metrics())` in the training loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sums: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._gauges: dict[str, float] = dict.fromkeys(GAUGES, 0.0)
        registry.register(self)  # type: ignore[arg-type]

    def update(self, emitted: Mapping[str, float]) -> None:
        """One emission of FullyAsyncRollout.metrics: counters are added up, gauges replaced."""
        for key in self._sums:
            self._sums[key] += emitted[key]
        self._gauges = {key: emitted[key] for key in self._gauges}

    def collect(self) -> Iterator[Any]:
        yield self._counted("version_lag_groups", "Leased groups by how many updates they are behind.", "lag", LAGS)
        yield self._counted("events", "What became of groups, leases and versions.", "event", EVENTS)
        yield self._counted("tokens", "Tokens of groups that were begun before, by their fate.", "fate", TOKENS)
        yield self._shown("hold_age_seconds", "Age of the oldest hold; 0: none.", "owner", HOLD_AGES)
        yield self._shown("retained_receipts", "Receipts that could not be settled yet.", "cause", RETAINED)
        for key, (name, text) in PLAIN.items():
            yield GaugeMetricFamily(f"{PREFIX}_rollout_{name}", text, value=self._gauges[key])

    def _counted(self, name: str, text: str, label: str, keys: Mapping[str, str]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{PREFIX}_rollout_{name}", text, labels=[label])
        for key, value in keys.items():
            family.add_metric([value], self._sums[key])
        return family

    def _shown(self, name: str, text: str, label: str, keys: Mapping[str, str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{PREFIX}_rollout_{name}", text, labels=[label])
        for key, value in keys.items():
            family.add_metric([value], self._gauges[key])
        return family
