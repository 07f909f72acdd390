"""`python -m bench`: one verb for each group of figures, and all of them in turn.

Owns: verbs, flags, the seed.
Does not know: what is measured. Each verb is a module with ABOUT, PARTS and run(report, parts, folder).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console

from bench import __doc__ as about
from bench import capture, cut, everything, exact, kills, latest, restore, scale, snapshot, store
from bench.plot import plot
from bench.report import Report


class Verb(Protocol):
    """A module that measures a group of figures."""

    @property
    def ABOUT(self) -> str: ...

    @property
    def PARTS(self) -> tuple[str, ...]: ...

    @property
    def run(self) -> Callable[[Report, tuple[str, ...], Path | None], None]: ...


VERBS: dict[str, Verb] = {
    "store": store,
    "snapshot": snapshot,
    "restore": restore,
    "exact": exact,
    "latest": latest,
    "scale": scale,
    "cut": cut,
    "capture": capture,
    "kills": kills,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.verb == "plot":
        plot(options.figures, options.picture)
        return 0
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if options.verb == "all":
        return everything.run(console, tuple(VERBS), options.out, seed, quick=options.quick, pictures=options.pictures)
    verb = VERBS[options.verb]
    parts = tuple(options.only.split(","))
    if unknown := set(parts) - set(verb.PARTS):
        _parser().error(f"there is no part {min(unknown)!r}; there are {', '.join(verb.PARTS)}")
    report = Report(console, seed, options.quick, rounds=options.rounds)
    began = time.monotonic()
    verb.run(report, parts, options.dir)
    report.figure("run", "seconds", time.monotonic() - began)
    if report.bounds:
        report.show_bounds()
    report.note(f"{time.monotonic() - began:.0f} s, seed {seed}")
    report.write(options.verb, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bench", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, verb in VERBS.items():
        of_verb = verbs.add_parser(name, help=verb.ABOUT)
        of_verb.add_argument("--only", default=",".join(verb.PARTS), help="parts, with commas (default: %(default)s)")
        of_verb.add_argument("--rounds", type=int, help="how often each pair is measured (default: the part's own)")
        of_verb.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
        of_verb.add_argument("--dir", type=Path, help="where stores are made (default: the temporary folder)")
        _common(of_verb)
    of_all = verbs.add_parser("all", help="all of them, each in a process of its own; a table of every bound")
    of_all.add_argument("--out", type=Path, default=Path("build/bench"), help="where figures go (default: %(default)s)")
    of_all.add_argument("--pictures", type=Path, metavar="DIR", help="replace DIR/benchmarks-*.png (the docs') too")
    _common(of_all)
    of_plot = verbs.add_parser("plot", help="draw the scaling laws that --json wrote")
    of_plot.add_argument("figures", type=Path, metavar="FILE.json")
    of_plot.add_argument("picture", type=Path, metavar="FILE.png")
    return parser


def _common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--quick", action="store_true", help="small: shows that it works, measures nothing")
    verb.add_argument("--seed", type=int, help="of everything that is drawn (default: a new one)")


if __name__ == "__main__":
    sys.exit(main())
