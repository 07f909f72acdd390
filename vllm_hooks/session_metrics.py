"""What one capturing process tells a Prometheus scraper (docs/metrics.md lists every name).

Owns: the names, their labels, and how a session's counters become samples.
Does not know: who serves them (prefix_recovery.metrics_server, or the caller's own registry).

Names follow Prometheus (base units, `_total`) and stay valid as OpenTelemetry instruments when they are scraped by a
collector.

Invariants:
1. Every label has a fixed set of values, given here; no id, version or free text ever becomes one. What is none of them
   is `other`.
2. A scrape reads counters and takes no lock that the event loop or a snapshot waits for.
3. Counters are since the start of the process and never go down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from recovery import errors
from recovery.admission.metrics import HOLD_OWNERS
from recovery.coordinator import Attempt
from recovery.protocol import Effect, Verdict

if TYPE_CHECKING:
    from vllm_hooks.session import RecoverySession

PREFIX = "prefix_recovery"
CAUSES = ("interval", "final", "request", "other")
VERDICTS = tuple(verdict.value for verdict in Verdict)
OTHER = "other"
STALL_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25)
FENCE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
_FENCED_STEPS = (
    Effect.PREPARE,
    Effect.CUT,
    Effect.STAGE,
    Effect.RECORD,
    Effect.VALIDATE,
    Effect.PUBLISH,
    Effect.LOWER_FENCE,
)
_HOLD_OWNER = {"coordinator": "snapshot"}
"""Owners as the session calls them, by their label."""


def snake(name: str) -> str:
    """`StoreUnavailable` as `store_unavailable`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _leaves(kind: type[errors.RecoveryError]) -> Iterator[str]:
    """The tree of recovery.errors alone: subclasses of others are `other`."""
    if not kind.__dict__.get("abstract", False):
        yield snake(kind.__name__)
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _leaves(below)


FAILURES = (*sorted(_leaves(errors.RecoveryError)), OTHER)
"""Why a snapshot failed: the classes of recovery.errors."""


class SessionMetrics:
    """Register one per session: it is asked at each scrape, and told of each snapshot attempt."""

    def __init__(
        self, session: RecoverySession, registry: CollectorRegistry, *, utc: Callable[[], float] = time.time
    ) -> None:
        self._session = session
        self._utc = utc
        self._began = self._last_success = utc()
        self._attempts = {(cause, verdict): 0 for cause in CAUSES for verdict in VERDICTS}
        self._failures = dict.fromkeys(FAILURES, 0)
        self._bytes_written = self._collected = 0
        self._stall = Histogram(
            f"{PREFIX}_cut_stall_seconds",
            "How long a cut kept the event loop from consuming the engine.",
            registry=registry,
            buckets=STALL_BUCKETS_S,
        )
        self._fence = Histogram(
            f"{PREFIX}_fence_seconds",
            "How long the fence of a snapshot was up: terminal results waited, decoding did not.",
            registry=registry,
            buckets=FENCE_BUCKETS_S,
        )
        self._whole = Histogram(
            f"{PREFIX}_snapshot_seconds",
            "How long a snapshot attempt took, whatever became of it.",
            registry=registry,
            buckets=FENCE_BUCKETS_S,
        )
        registry.register(self)  # type: ignore[arg-type]
        self._registry = registry
        session.on_attempt = self.attempted

    def leave(self) -> None:
        """Serve nothing any more: another session takes this one's place in the registry."""
        for one in (self._stall, self._fence, self._whole, self):
            self._registry.unregister(one)  # type: ignore[arg-type]

    def attempted(self, attempt: Attempt) -> None:
        """In the coordinator's thread."""
        cause = attempt.cause if attempt.cause in CAUSES else OTHER
        self._attempts[cause, attempt.verdict.value] += 1
        if attempt.verdict is Verdict.PUBLISHED:
            self._last_success = self._utc()
        elif attempt.error is not None:
            name = snake(type(attempt.error).__name__)
            self._failures[name if name in self._failures else OTHER] += 1
        self._bytes_written += attempt.bytes_written
        self._collected += attempt.collected
        if (stall_s := self._session.fleet.take_stall_s()) is not None:
            self._stall.observe(stall_s)
        if Effect.LOWER_FENCE.value in attempt.seconds:
            self._fence.observe(sum(attempt.seconds.get(step.value, 0.0) for step in _FENCED_STEPS))
        self._whole.observe(sum(attempt.seconds.values()))

    # ---- at a scrape ---------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Any]:
        yield from self._snapshots()
        yield from self._tokens()
        yield from self._storing()
        yield from self._holds()

    def _snapshots(self) -> Iterator[Any]:
        attempts = _counter("snapshot_attempts", "Snapshot attempts.", "cause", "verdict")
        for labels, n in self._attempts.items():
            attempts.add_metric(labels, n)
        yield attempts
        failures = _counter("snapshot_failures", "Attempts that published nothing, by the kind of error.", "error")
        for name, n in self._failures.items():
            failures.add_metric([name], n)
        yield failures
        since = "since the restore's own, if none was published yet"
        yield _gauge("snapshot_age_seconds", f"Age of the last published snapshot, {since}.", self._age_s())
        yield _gauge("snapshot_last_success_timestamp_seconds", "When that was, UTC since 1970.", self._last_success)
        opened = self._session.opened
        epoch = opened.publication.log.epoch if opened is not None else 0
        yield _gauge("epoch", "The epoch that this process has claimed.", epoch)
        failed = self._session.failure is not None or self._session.dead_engine is not None
        yield _gauge("session_failed", "1 if this process must stop: fenced, engine dead, a bug.", float(failed))

    def _age_s(self) -> float:
        return max(0.0, self._utc() - self._last_success)

    def _tokens(self) -> Iterator[Any]:
        counters = self._session.counters
        yield _total("tokens_captured", "Tokens captured as the engine gave them.", counters.tokens_captured)
        yield _total("tokens_reused", "Saved tokens that the restore carried on from.", counters.tokens_reused)
        said = "Saved tokens that the restore threw away, to be generated again."
        yield _total("tokens_regenerated", said, counters.tokens_regenerated)
        yield _total("calls_restored", "Unfinished calls that the restore found.", counters.calls_restored)

    def _storing(self) -> Iterator[Any]:
        staging, captured = self._session.stager.counters, self._session.counters.tokens_captured
        compaction = self._session.compactor.counters
        nbytes = _counter("stored_bytes", "Bytes put into the store.", "kind")
        nbytes.add_metric(["segments"], staging.nbytes)
        nbytes.add_metric(["snapshots"], self._bytes_written)
        nbytes.add_metric(["compaction"], compaction.nbytes_written)
        yield nbytes
        objects = _counter("stored_objects", "Objects put into the store.", "kind")
        objects.add_metric(["segments"], staging.flushes)
        objects.add_metric(
            ["snapshots"], sum(n for (_, verdict), n in self._attempts.items() if verdict == "published")
        )
        objects.add_metric(["compaction"], compaction.segments_written)
        yield objects
        rounds = _counter("compaction_rounds", "Rounds of compaction by what became of them.", "outcome")
        rounds.add_metric(["moved"], compaction.rounds)
        rounds.add_metric(["failed"], compaction.failures)
        yield rounds
        yield _total("compaction_read_bytes", "Bytes of segments that compaction read.", compaction.nbytes_read)
        yield _total("collected_objects", "Objects that garbage collection deleted.", self._collected)
        flushes = _counter("flushes", "Flushes by what became of them.", "outcome")
        for outcome, n in (("stored", staging.flushes), ("failed", staging.failures), ("skipped", staging.skipped)):
            flushes.add_metric([outcome], n)
        flushes.add_metric(["waiting"], staging.waited)
        flushes.add_metric(["not_waiting"], staging.staging_failures)
        yield flushes
        backlog = "Tokens captured and not yet stored: what a crash now would cost."
        yield _gauge("backlog_tokens", backlog, max(0, captured - staging.tokens))
        yield _gauge("backlog_records", "Records that failed flushes left to carry.", staging.backlog_records)

    def _holds(self) -> Iterator[Any]:
        now = self._utc()
        held: dict[str, list[float]] = {owner: [] for owner in HOLD_OWNERS}
        for hold in self._session.barriers.gate.active:
            owner = _HOLD_OWNER.get(hold.owner, hold.owner)
            held[owner if owner in held else OTHER].append(max(0.0, now - hold.acquired_utc))
        active = GaugeMetricFamily(f"{PREFIX}_holds_active", "Holds that keep admission closed.", labels=["owner"])
        age = GaugeMetricFamily(f"{PREFIX}_hold_age_seconds", "Age of the oldest of them; 0: none.", labels=["owner"])
        for owner, ages in held.items():
            active.add_metric([owner], len(ages))
            age.add_metric([owner], max(ages, default=0.0))
        yield active
        yield age


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, labels=labels)


def _total(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
