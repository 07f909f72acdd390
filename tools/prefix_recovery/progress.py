"""What a person sees while a job runs: a bar on a terminal, a line now and then in a log file. Always stderr.

Owns: rendering; the figures come from whoever runs the job.
Does not know: engines, stores.

Invariant:
1. A display that cannot be written to falls silent; the job goes on.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

_LINE_EVERY_S = 10.0


class Progress:
    """Results done of results wanted, and the decode rate; `tokens` gives the tokens decoded so far."""

    def __init__(self, total: int, done: int, tokens: Callable[[], int], *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._total = total
        self._done = done
        self._tokens = tokens
        self._began = self._last_line = time.monotonic()
        self._n_refused = 0
        self._bars: Bars | None = None
        if sys.stderr.isatty() and not quiet:
            self._bars = Bars(
                TextColumn("results"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} tokens/s"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bars.add_task("results", total=total, completed=done, rate=0.0)
            self._bars.start()

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that went away must not end the job
            self._console.print(line, markup=False, soft_wrap=True)

    def finished(self, n: int) -> None:
        self._done += n
        self.tick()

    def refused(self, name: str, error: str) -> None:
        self._n_refused += 1
        if self._n_refused <= 20:
            self.say(f"no result for {name}: {error}")

    @property
    def rate(self) -> float:
        """Tokens per second since the start."""
        return self._tokens() / max(1e-9, time.monotonic() - self._began)

    def tick(self) -> None:
        if self._bars is not None:
            self._bars.update(self._task, completed=self._done, rate=self.rate)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"{self._done} of {self._total} results, {self.rate:.0f} tokens/s")

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
