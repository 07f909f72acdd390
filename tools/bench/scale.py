"""`bench scale`: the real coordinator, ledger, log and retention against simulated workers, far beyond one machine.

Owns: which simulations are run, in which sizes.
Does not know: how one is run (scale_million.py, scale_day.py), what a worker is (simulated.py).
"""

from __future__ import annotations

from pathlib import Path

from bench import scale_day, scale_million
from bench.report import Report

ABOUT = "a million live calls of a thousand workers, and a day of failures, simulated"
PARTS = ("million", "day")

MILLION = scale_million.Size(workers=1000, calls=1_000_000, snapshots=20, tokens=8)
MILLION_QUICK = scale_million.Size(workers=8, calls=400, snapshots=5, tokens=8)
DAY = scale_day.Size(workers=10, calls=10_000, minutes=24 * 60, tokens=16, failures=1)
DAY_QUICK = scale_day.Size(workers=4, calls=40, minutes=60, tokens=16, failures=4)


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    """The stores are in memory: what is measured is the coordinator."""
    if "million" in parts:
        scale_million.measure(report, MILLION_QUICK if report.quick else MILLION)
    if "day" in parts:
        scale_day.measure(report, DAY_QUICK if report.quick else DAY)
