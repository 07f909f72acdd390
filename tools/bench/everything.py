"""`bench all`: every group of figures, each in a process of its own, and all bounds in one table.

Owns: the processes and their order, their documents and pictures, the table.
Does not know: what is measured.

Invariants:
1. A group that fails is named and makes the whole fail; a bound that is missed does not.
2. Only what counts runs beside something else (TOGETHER); what takes the time of this machine has it to itself.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bench.plot import plot
from bench.report import Report

ROUNDS = {"capture": 3}
"""Fewer than the verb's own, so that all of it takes at most three quarters of an hour."""

PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "scale": {"scale-million": ("million",), "scale-day": ("day",)},
    "kills": {"kills": ("ratio", "finish", "bias"), "kills-engine": ("engine",)},
}
"""Verbs of which each of these names is a run of its own."""

TOGETHER = ("scale-day", "kills")
"""Simulated time, bytes, requests: one beside the other, on a core each. (The seconds of the day are told as such.)"""

MINUTES_MAX = 45.0


def steps(verbs: Sequence[str]) -> list[list[str]]:
    """The runs of these verbs, those that go together in one step, after all others."""
    runs = [name for verb in verbs for name in PARTS.get(verb, {verb: ()})]
    together = [name for name in runs if name in TOGETHER]
    return [[name] for name in runs if name not in TOGETHER] + ([together] if together else [])


def run(
    console: Console, verbs: Sequence[str], out: Path, seed: int, *, quick: bool, pictures: Path | None = None
) -> int:
    """`pictures`: where those of the documentation are, which are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report = Report(console, seed, quick)
    failed: list[str] = []
    for step in steps(verbs):
        processes = {name: _start(name, out, seed, quick, aside=number > 0) for number, name in enumerate(step)}
        for name, process in processes.items():
            told, _ = process.communicate()
            if told:
                console.print(told.decode(), markup=False, end="")
            file = out / f"{name}.json"
            if process.returncode or not file.exists():
                failed.append(name)
                continue
            document = json.loads(file.read_text())
            report.figure("seconds", name, document["figures"]["run"]["seconds"])
            for bound in document["bounds"]:
                report.bound(f"{name}: {bound['name']}", bound["value"], bound["limit"])
            if document["laws"]:
                plot(file, file.with_suffix(".png"))
                if pictures is not None:
                    shutil.copyfile(file.with_suffix(".png"), pictures / f"benchmarks-{name}.png")
    minutes = (time.monotonic() - began) / 60
    if not quick:
        report.bound("minutes of all of it", minutes, MINUTES_MAX)
    seconds = report.figures.get("seconds", {})
    report.table(("", "s"), [[name, f"{seconds.get(name, 0):.0f}"] for step in steps(verbs) for name in step])
    report.show_bounds()
    report.note(f"{minutes:.1f} minutes, seed {seed}; figures are in {out}")
    report.write("all", out / "all.json")
    for name in failed:
        console.print(f"bench {name} FAILED: run it alone", style="bold red")
    return 1 if failed else 0


def _start(name: str, out: Path, seed: int, quick: bool, *, aside: bool) -> subprocess.Popen[bytes]:
    """`aside`: what it says is kept until it is done."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    verb = next((verb for verb, runs in PARTS.items() if name in runs), name)
    command = [sys.executable, "-m", "bench", verb, "--seed", str(seed), "--json", str(file)]
    command += ["--only", ",".join(PARTS[verb][name])] if verb in PARTS else []
    command += ["--quick"] if quick else []
    command += ["--rounds", str(ROUNDS[verb])] if verb in ROUNDS else []
    return subprocess.Popen(command, stdout=subprocess.PIPE if aside else None)
