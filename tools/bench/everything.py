"""`bench all`: every group of figures, each in a process of its own, and all bounds in one table.

Owns: the processes and their order, their documents and pictures, the table.
Does not know: what is measured.

Invariants:
1. A group that fails is named and makes the whole fail; a bound that is missed does not.
2. What takes the time of this machine has it to itself. Beside something else runs only what counts, and what has so
   much room below its bound that a busy neighbour cannot make a missed bound a met one (LANES).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from bench.plot import plot
from bench.report import Report

ROUNDS = {"capture": 3}
"""Fewer than the verb's own, for the time that all of it takes (MINUTES_MAX)."""

PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "scale": {"scale-million": ("million",), "scale-day": ("day",)},
    "kills": {"kills": ("ratio", "finish", "bias"), "kills-engine": ("engine",)},
}
"""Verbs of which each of these names is a run of its own."""

LANES = (("scale-day",), ("kills", "scale-million"))
"""Last of all, a core for each lane, in which one comes after the other: simulated time, bytes, requests. The seconds
of a million calls and of the day are those of a core whose neighbour is busy."""

MINUTES_MAX = 45.0

Ran = tuple[str, str, int]
"""A run's name, what it said if that was kept, its exit code."""


def steps(verbs: Sequence[str]) -> list[list[list[str]]]:
    """The runs of these verbs: steps one after the other, each of lanes side by side, each of runs one by one."""
    runs = [name for verb in verbs for name in PARTS.get(verb, {verb: ()})]
    aside = {name for lane in LANES for name in lane}
    lanes = [found for lane in LANES if (found := [name for name in lane if name in runs])]
    return [[[name]] for name in runs if name not in aside] + ([lanes] if lanes else [])


def run(
    console: Console, verbs: Sequence[str], out: Path, seed: int, *, quick: bool, pictures: Path | None = None
) -> int:
    """`pictures`: where those of the documentation are, which are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report = Report(console, seed, quick)
    failed: list[str] = []
    for step in steps(verbs):
        for name, said, code in _side_by_side(step, lambda name, aside: _ran(name, out, seed, quick, aside=aside)):
            console.print(said, markup=False, end="")
            file = out / f"{name}.json"
            if code or not file.exists():
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
    names = [name for step in steps(verbs) for lane in step for name in lane]
    report.table(("", "s"), [[name, f"{seconds.get(name, 0):.0f}"] for name in names])
    report.show_bounds()
    report.note(f"{minutes:.1f} minutes, seed {seed}; figures are in {out}")
    report.write("all", out / "all.json")
    for name in failed:
        console.print(f"bench {name} FAILED: run it alone", style="bold red")
    return 1 if failed else 0


def _side_by_side(lanes: Sequence[Sequence[str]], ran: Callable[[str, bool], Ran]) -> Iterator[Ran]:
    """What `ran` gives of all runs of a step, lane by lane. It is told whether a run has a neighbour."""

    def one_by_one(lane: Sequence[str]) -> list[Ran]:
        return [ran(name, len(lanes) > 1) for name in lane]

    with ThreadPoolExecutor(len(lanes)) as pool:
        for found in pool.map(one_by_one, lanes):
            yield from found


def _ran(name: str, out: Path, seed: int, quick: bool, *, aside: bool) -> Ran:
    """`aside`: what it says is kept until it is done."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)
    verb = next((verb for verb, runs in PARTS.items() if name in runs), name)
    command = [sys.executable, "-m", "bench", verb, "--seed", str(seed), "--json", str(file)]
    command += ["--only", ",".join(PARTS[verb][name])] if verb in PARTS else []
    command += ["--quick"] if quick else []
    command += ["--rounds", str(ROUNDS[verb])] if verb in ROUNDS else []
    done = subprocess.run(command, stdout=subprocess.PIPE if aside else None, check=False)
    return name, (done.stdout or b"").decode(), done.returncode
