"""`python -m bench`: one verb for each group of figures.

Owns: verbs, flags, the seed.
Does not know: what is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import __doc__ as about
from bench import exact, latest, store
from bench.plot import plot
from bench.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("bench", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    of_store = verbs.add_parser("store", help="cost, size and restore speed of the store, and today's ways beside it")
    of_store.add_argument("--only", default=",".join(store.PARTS), help="parts, with commas (default: %(default)s)")
    of_exact = verbs.add_parser("exact", help="cost of the settings that make an engine bit-exact, and of the plug-in")
    of_exact.add_argument("--only", default=",".join(exact.PARTS), help="parts, with commas (default: %(default)s)")
    of_exact.add_argument("--rounds", type=int, default=15, help="of each pair (default: %(default)s)")
    of_latest = verbs.add_parser("latest", help="what `snapshot-inspect latest` costs on a long log in a bucket")
    of_latest.set_defaults(only=latest.PARTS[0])
    for verb in (of_store, of_exact, of_latest):
        verb.add_argument("--quick", action="store_true", help="small: shows that it works, measures nothing")
        verb.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
        verb.add_argument("--seed", type=int, help="of everything that is drawn (default: a new one)")
        verb.add_argument("--dir", type=Path, help="where stores are made (default: the temporary folder)")
    of_plot = verbs.add_parser("plot", help="draw what `store --json` measured: the cost of snapshot k")
    of_plot.add_argument("figures", type=Path, metavar="FILE.json")
    of_plot.add_argument("picture", type=Path, metavar="FILE.png")
    options = parser.parse_args(argv)
    if options.verb == "plot":
        plot(options.figures, options.picture)
        return 0
    parts = tuple(options.only.split(","))
    known = {"store": store.PARTS, "exact": exact.PARTS, "latest": latest.PARTS}[options.verb]
    if unknown := set(parts) - set(known):
        parser.error(f"there is no part {min(unknown)!r}; there are {', '.join(known)}")
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    report = Report(Console(highlight=False, width=None if sys.stdout.isatty() else 160), seed, options.quick)
    began = time.monotonic()
    if options.verb == "store":
        store.run(report, parts, options.dir)
    elif options.verb == "latest":
        latest.run(report)
    else:
        exact.run(report, parts, options.dir, options.rounds)
    report.figure("run", "seconds", time.monotonic() - began)
    if report.bounds:
        report.show_bounds()
    report.note(f"{time.monotonic() - began:.0f} s, seed {seed}")
    report.write(options.verb, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
