"""`bench all`: every group of figures, each in a process of its own, and all bounds in one table.

Owns: the processes, their documents and pictures, the table.
Does not know: what is measured.

Invariant: a group that fails is named and makes the whole fail; a bound that is missed does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.plot import plot
from bench.report import Report

ROUNDS = {"exact": 5}
"""Fewer than the verb's own, so that all of it takes some three quarters of an hour."""


def run(console: Console, verbs: Sequence[str], out: Path, seed: int, *, quick: bool) -> int:
    """One after the other: two at a time would measure each other."""
    out.mkdir(parents=True, exist_ok=True)
    report = Report(console, seed, quick)
    failed: list[str] = []
    for verb in verbs:
        file = out / f"{verb}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bench", verb, "--seed", str(seed), "--json", str(file)]
        command += ["--quick"] if quick else []
        command += ["--rounds", str(ROUNDS[verb])] if verb in ROUNDS else []
        if subprocess.run(command, check=False).returncode or not file.exists():
            failed.append(verb)
            continue
        document = json.loads(file.read_text())
        report.figure("seconds", verb, document["figures"]["run"]["seconds"])
        for bound in document["bounds"]:
            report.bound(f"{verb}: {bound['name']}", bound["value"], bound["limit"])
        if document["laws"]:
            plot(file, file.with_suffix(".png"))
    report.show_bounds()
    report.note(f"{sum(report.figures.get('seconds', {}).values()):.0f} s, seed {seed}; figures are in {out}")
    for verb in failed:
        console.print(f"bench {verb} FAILED: run it alone", style="bold red")
    return 1 if failed else 0
