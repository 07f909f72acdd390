"""`bench capture`: what capturing costs, by token and by throughput.

Owns: which parts are run.
Does not know: how one measures (capture_hook.py, capture_engine.py).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench import capture_engine, capture_hook
from bench.report import Report

ABOUT = "cost of the hook for each token, and tokens a second of an engine with capture and flushes over without"
PARTS = ("hook", "tiny", "real")


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    rng = np.random.default_rng(report.seed)
    if "hook" in parts:
        capture_hook.measure(report, rng)
    for model in ("tiny", "real"):
        if model in parts and not (report.quick and model == "real"):
            capture_engine.measure(report, model, folder, rng)
