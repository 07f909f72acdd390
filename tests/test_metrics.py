"""What is scraped, what docs/metrics.md lists, and what the dashboard shows are the same names; labels are fixed sets.

Owns: a session on a small store without an engine.
Does not know: a real run's scrape (test_run.py).
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from prefix_recovery.metrics_server import MetricsServer, read_address
from recovery.admission.holds import HoldKind
from recovery.admission.metrics import COUNTERS, GAUGES, KEYS, Metrics
from recovery.config import CheckpointingConfig, JobConfig, parse_config
from recovery.coordinator import Attempt
from recovery.errors import ConfigError, Fenced, StoreUnavailable
from recovery.model import Request
from recovery.protocol import Verdict
from recovery.resume import StopRules
from vllm_hooks.rollout_metrics import EVENTS, RolloutMetrics
from vllm_hooks.session import RecoverySession
from vllm_hooks.session_metrics import CAUSES, FAILURES, SessionMetrics, snake

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "metrics.md"
BATCH = {"model": "m", "prompts": "p.jsonl", "output": "o.jsonl"}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[RecoverySession]:
    config = CheckpointingConfig(enabled=True, store=str(tmp_path / "store"), snapshot_interval_s=3600.0)
    opened = RecoverySession.open(config, must={"a": 1}, stop=StopRules((), 4096))
    yield opened
    opened.stager.close(wait=True)


class Scraped:
    """One scrape: values by name and labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import generate_latest

        self.text = generate_latest(registry).decode()
        self.families = list(text_string_to_metric_families(self.text))
        self.values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in self.families
            for sample in family.samples
            if not sample.name.endswith("_created")
        }

    def __call__(self, name: str, **labels: str) -> float:
        return float(self.values[f"prefix_recovery_{name}", *sorted(labels.items())])

    def kinds(self) -> dict[str, str]:
        """Type by name, as the docs have it: a counter's name ends with _total."""
        named = ((f.name + ("_total" if f.type == "counter" else ""), f.type) for f in self.families)
        return {name: kind for name, kind in named if not name.endswith("_created")}


def _everything(session: RecoverySession) -> CollectorRegistry:
    server = MetricsServer("0", lambda: (3, 7))
    try:
        server.watch(session)
        RolloutMetrics(server.registry)
        return server.registry
    finally:
        server.close()


# ---- the names -------------------------------------------------------------------------------------------------------


def _documented() -> dict[str, tuple[str, dict[str, str]]]:
    """Type and labels, with their values as the page words them, by name."""
    rows = re.findall(r"^\| `(prefix_recovery_\w+)` \| (\w+) \|(.*?)\| .* \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (kind, dict(re.findall(r"`(\w+)`: ([^;]*)", labels))) for name, kind, labels in rows}


def test_the_page_lists_what_is_scraped_and_nothing_else(session: RecoverySession) -> None:
    scraped = Scraped(_everything(session)).kinds()
    assert {name: kind for name, (kind, _) in _documented().items()} == scraped


def test_labels_are_the_documented_sets(session: RecoverySession) -> None:
    seen: dict[str, dict[str, set[str]]] = {}
    for family in Scraped(_everything(session)).families:
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le":
                    name = family.name + ("_total" if family.type == "counter" else "")
                    seen.setdefault(name, {}).setdefault(label, set()).add(value)
    owners = "weight_update, evaluation, snapshot, other"
    for name, (_, labels) in _documented().items():
        assert set(labels) == set(seen.get(name, {})), name
        for label, words in labels.items():
            values = seen[name][label]
            if "recovery.errors" in words:
                assert values == set(FAILURES)
            elif "recovery.admission.metrics" in words:
                assert values == set(EVENTS.values())
            else:
                assert values == set((owners if words.strip() == "the same" else words.strip()).split(", ")), name


def _asked(text: str) -> set[str]:
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"prefix_recovery_\w+", text)}


def test_the_dashboard_asks_for_names_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    asked = _asked(json.dumps(dashboard))
    assert asked <= set(_documented()) and len(asked) > 25, asked - set(_documented())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["targets"] for panel in dashboard["panels"])
    grid = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(g["x"] + g["w"] <= 24 for g in grid)


def test_the_page_speaks_of_names_that_exist() -> None:
    assert _asked(PAGE.read_text()) <= set(_documented())


def test_every_key_of_the_rollout_is_scraped() -> None:
    """Emissions are added up; what is derived (means per interval) a scraper makes itself."""
    registry = CollectorRegistry()
    bridge = RolloutMetrics(registry)
    counts = Metrics()
    gauges = {key: float(n) for n, key in enumerate(GAUGES, 1)}
    for key in COUNTERS:
        counts.add(key.rpartition("/")[2], 2)
    bridge.update(counts.emit(gauges))
    counts.add("count_0", 3)
    emitted = counts.emit(gauges)
    bridge.update(emitted)
    found = Scraped(registry)
    assert found("rollout_version_lag_groups_total", lag="0") == 5 and found("rollout_tokens_total", fate="reused") == 2
    shown = {value for (name, *_), value in found.values.items() if not name.endswith("_total")}
    assert shown == set(gauges.values()), "each gauge once"
    assert set(emitted) == KEYS and len(EVENTS) + 5 + 2 == len(COUNTERS)


# ---- the values ------------------------------------------------------------------------------------------------------


def _attempt(cause: str, verdict: Verdict, error: Any = None, **seconds: float) -> Attempt:
    attempt = Attempt(cause)
    attempt.verdict, attempt.error, attempt.bytes_written = verdict, error, 100
    attempt.seconds = {name.replace("_", " "): value for name, value in seconds.items()}
    return attempt


def test_attempts_are_counted_by_cause_and_error(session: RecoverySession) -> None:
    registry, now = CollectorRegistry(), [1000.0]
    SessionMetrics(session, registry, utc=lambda: now[0])
    assert session.on_attempt is not None
    now[0] = 1030.0
    assert Scraped(registry)("snapshot_age_seconds") == 30.0
    session.on_attempt(_attempt("interval", Verdict.PUBLISHED, cut=0.01, stage=0.04, lower_fence=0.0, acquire_hold=9.0))
    session.on_attempt(_attempt("interval", Verdict.ABANDONED, StoreUnavailable("gone")))
    session.on_attempt(_attempt("an id: p-17", Verdict.FENCED, Fenced("by 2")))
    now[0] = 1050.0
    found = Scraped(registry)
    assert found("snapshot_attempts_total", cause="interval", verdict="published") == 1
    assert found("snapshot_attempts_total", cause="other", verdict="fenced") == 1, "a cause that is none of ours"
    assert found("snapshot_failures_total", error="store_unavailable") == 1
    assert found("snapshot_failures_total", error="fenced") == 1
    assert found("snapshot_age_seconds") == 20.0 and found("snapshot_last_success_timestamp_seconds") == 1030.0
    assert found("fence_seconds_count") == 1 and found("fence_seconds_sum") == pytest.approx(0.05)
    assert found("snapshot_seconds_count") == 3 and found("stored_bytes_total", kind="snapshots") == 300
    assert len(found.values) == len(Scraped(registry).values), "the number of series is fixed"


def test_an_error_of_somebody_elses_is_other(session: RecoverySession) -> None:
    registry = CollectorRegistry()
    SessionMetrics(session, registry)
    strange = type("Strange", (StoreUnavailable,), {})("x")
    assert session.on_attempt is not None
    session.on_attempt(_attempt("final", Verdict.ABANDONED, strange))
    assert Scraped(registry)("snapshot_failures_total", error="other") == 1
    assert snake("StoreUnavailable") == "store_unavailable" and "interval" in CAUSES


def test_holds_by_owner(session: RecoverySession) -> None:
    registry = CollectorRegistry()
    SessionMetrics(session, registry, utc=lambda: 110.0)
    barriers = session.barriers
    barriers.hold(HoldKind.CUT, "coordinator", "snapshot (interval)", 100.0)
    barriers.hold(HoldKind.DRAIN, "p-17 of somebody", "free text", 90.0)
    found = Scraped(registry)
    assert found("holds_active", owner="snapshot") == 1 and found("hold_age_seconds", owner="snapshot") == 10.0
    assert found("holds_active", owner="other") == 1 and found("hold_age_seconds", owner="other") == 20.0
    assert found("holds_active", owner="evaluation") == 0 and "p-17" not in found.text


def test_a_session_on_its_loop(session: RecoverySession) -> None:
    """Tokens captured, stored, cut and published: each in its own figure."""
    registry = CollectorRegistry()
    SessionMetrics(session, registry)

    async def work() -> None:
        session.start()
        asked = Request(rollout="a", prompt_token_ids=np.asarray([1], np.int32), sampling={"temperature": 0.0})
        call = await session.admit(asked, StopRules((), 4096))
        session.captured(call, [5, 6, 7], [-1.0, -1.0, -1.0])
        before = Scraped(registry)
        assert before("backlog_tokens") == 3 == before("tokens_captured_total")
        await session.stop()

    _run(work())
    found = Scraped(registry)
    assert found("backlog_tokens") == 0 and found("flushes_total", outcome="stored") == 1
    assert found("snapshot_attempts_total", cause="final", verdict="published") == 1
    assert found("cut_stall_seconds_count") == 1 and found("fence_seconds_count") == 1
    assert found("stored_objects_total", kind="segments") == 1 == found("stored_objects_total", kind="snapshots")
    assert found("epoch") == 1 and found("session_failed") == 0


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


# ---- the server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0", ("127.0.0.1", 0)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_is_loopback_unless_it_says_otherwise(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "65536", "-1", ":80", "a:b", "0x1f", "9400:"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics: "):
        read_address(text)


def test_a_server_tells_its_port_and_ends(session: RecoverySession) -> None:
    server = MetricsServer("0", lambda: (3, 7))
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*/metrics", server.url)
        before = urllib.request.urlopen(server.url, timeout=240).read().decode()
        assert "prefix_recovery_results 3.0" in before and "prefix_recovery_epoch" not in before
        server.watch(session)
        server.watch(session)  # in its own place
        served = urllib.request.urlopen(server.url, timeout=240).read().decode()
        assert "prefix_recovery_epoch 1.0" in served and served.count("# TYPE prefix_recovery_epoch ") == 1
        port = server.url.split(":")[2].split("/")[0]
        with pytest.raises(ConfigError, match=f"cannot be served at 127.0.0.1:{port}"):
            MetricsServer(port, lambda: (0, 0))
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=240)


def test_a_job_file_may_give_a_port_or_an_address() -> None:
    def config(value: Any) -> JobConfig:
        return parse_config({**BATCH, "metrics": value})

    assert (config(9400).metrics, config("0.0.0.0:9400").metrics, config(None).metrics) == (9400, "0.0.0.0:9400", None)
    with pytest.raises(ConfigError, match="metrics"):
        config(70_000)


def test_a_session_that_captures_nothing_has_no_samples() -> None:
    server = MetricsServer("0", lambda: (0, 0))
    try:
        server.watch(RecoverySession(CheckpointingConfig(), None))
        assert "prefix_recovery_epoch" not in Scraped(server.registry).text
    finally:
        server.close()


def test_the_code_of_the_page_runs(session: RecoverySession) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    names["watch"](session)
    names["rollout_metrics"].update(Metrics().emit(dict.fromkeys(GAUGES, 0.0)))
    assert Scraped(names["registry"])("epoch") == 1
