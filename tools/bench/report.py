"""What a benchmark says: tables for people, one JSON document, and the bounds with what was measured beside them.

Owns: how figures are shown and written.
Does not know: how they came about.

Invariants:
1. A bound that is missed is shown as such; nothing is left out because of how it turned out.
2. The document says on what kind of machine, with which versions and which seed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_VERSIONS = ("numpy", "pyarrow", "zarr", "torch", "s3fs", "moto")


def describe_machine() -> dict[str, Any]:
    """What kind of machine this is, without naming it."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _VERSIONS},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


@dataclass(frozen=True, slots=True)
class Bound:
    """A figure that the project promises: `value` should be at most `limit`."""

    name: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Law:
    """How something grows: points of some series, to be drawn (plot.py). `log`: both axes are logarithmic."""

    title: str
    x: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    bound: float | None = None
    log: bool = False


@dataclass(slots=True)
class Report:
    """Filled by the parts of a benchmark, in order."""

    console: Console
    seed: int
    quick: bool
    machine: dict[str, Any] = field(default_factory=describe_machine)
    figures: dict[str, Any] = field(default_factory=dict)
    bounds: list[Bound] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    rounds: int | None = None
    """How often a pair is measured, if it was said."""

    def title(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]")

    def note(self, text: str) -> None:
        self.console.print(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        table = Table(box=None, pad_edge=False)
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(str, row))
        self.console.print(table)

    def figure(self, part: str, name: str, value: Any) -> None:
        self.figures.setdefault(part, {})[name] = value

    def bound(self, name: str, value: float, limit: float) -> None:
        self.bounds.append(Bound(name, value, limit))

    def law(self, law: Law) -> None:
        """One more law, or more series of one that is there by that title."""
        for number, known in enumerate(self.laws):
            if known.title == law.title:
                self.laws[number] = replace(known, series={**known.series, **law.series})
                return
        self.laws.append(law)

    def show_bounds(self) -> None:
        self.title("bounds")
        rows = [(b.name, f"{b.value:.3g}", f"{b.limit:g}", "met" if b.met else "MISSED") for b in self.bounds]
        self.table(("bound", "measured", "at most", ""), rows)

    def document(self, bench: str) -> dict[str, Any]:
        return {
            "bench": bench,
            "seed": self.seed,
            "quick": self.quick,
            "machine": self.machine,
            "figures": self.figures,
            "bounds": [{**asdict(bound), "met": bound.met} for bound in self.bounds],
            "laws": [asdict(law) for law in self.laws],
        }

    def write(self, bench: str, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(self.document(bench), indent=1) + "\n")


def nbytes_text(nbytes: float) -> str:
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} GB"


def ms_text(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"
