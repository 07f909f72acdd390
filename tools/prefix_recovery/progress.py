"""What a person sees while a job runs: bars on a terminal, a line now and then in a log file. Always stderr.

Owns: rendering; the figures come from whoever runs the job.
Does not know: engines, stores.

Invariants:
1. A display that cannot be written to falls silent; the job goes on.
2. Both forms tell how much is done, at what rate, and how long it will take at that rate.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from snapshot_inspect.render import console
from snapshot_inspect.texts import nbytes_text, printable_lines, seconds_text

_LINE_EVERY_S = 10.0
_SETTLED_S = 2.0
"""A rate over less says nothing; most restores are over by then."""


class Progress:
    """Results done of results wanted, and the decode rate; `tokens` gives the tokens decoded so far."""

    def __init__(self, total: int, done: int, tokens: Callable[[], int], *, quiet: bool = False) -> None:
        self._console = console(stderr=True, highlight=False, quiet=quiet)
        self._total = total
        self._done = self._done_before = done
        self._tokens = tokens
        self._began = self._last_line = time.monotonic()
        self._n_refused = 0
        self._bars: Bars | None = None
        if sys.stderr.isatty() and not quiet:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[done]}"),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bars.add_task("results", total=total, completed=done, done=f"{done}/{total}", rate="")
            self._bars.start()

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that went away must not end the job
            self._console.print(printable_lines(line), markup=False, soft_wrap=True)

    def finished(self, n: int) -> None:
        self._done += n
        self.tick()

    def refused(self, name: str, error: str) -> None:
        self._n_refused += 1
        if self._n_refused <= 20:
            self.say(f"no result for {name}: {error}")

    def decoding(self) -> None:
        """From here on results come in: what came before says nothing about how long it will take."""
        self._began, self._done_before = time.monotonic(), self._done

    @property
    def rate(self) -> float:
        """Tokens per second since decoding began."""
        return self._tokens() / max(1e-9, time.monotonic() - self._began)

    def tick(self) -> None:
        if self._bars is not None:
            done = f"{self._done}/{self._total}"
            self._bars.update(self._task, completed=self._done, done=done, rate=f"{self.rate:.0f} tokens/s")
        elif self.is_time():
            self.say(f"{self._done} of {self._total} results, {self.rate:.0f} tokens/s{self._time_left()}")

    def is_time(self) -> bool:
        """Whether a log file is due another line; asking counts as saying it."""
        now = time.monotonic()
        if now - self._last_line < _LINE_EVERY_S:
            return False
        self._last_line = now
        return True

    def _time_left(self) -> str:
        gained = self._done - self._done_before
        if not gained:
            return ""
        left_s = (self._total - self._done) * (time.monotonic() - self._began) / gained
        return f", {seconds_text(left_s)} left"

    @contextlib.contextmanager
    def restoring(self) -> Iterator[Restoring]:
        """While the store is read; nothing is shown if there is nothing to read."""
        restoring = Restoring(self, self._bars)
        try:
            yield restoring
        finally:
            restoring.end()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()


class Restoring:
    """How much of a store a restore has read (vllm_hooks.watching.Reading). From any one thread."""

    def __init__(self, progress: Progress, bars: Bars | None) -> None:
        self._progress = progress
        self._bars = bars
        self._began = time.monotonic()
        self._most = self._read = self._before = 0
        self._task = None if bars is None else bars.add_task("restoring", visible=False, total=None, done="", rate="")

    def expect(self, nbytes: int) -> None:
        """Rate and time left count from here: what came before was a look at a few small objects."""
        self._most = nbytes
        self._began, self._before = time.monotonic(), self._read

    def read(self, nbytes: int) -> None:
        self._read += nbytes
        if not self._most:
            return
        self._most = max(self._most, self._read)
        took_s = time.monotonic() - self._began
        rate = (self._read - self._before) / max(1e-9, took_s)
        done = f"{nbytes_text(self._read)} of at most {nbytes_text(self._most)}"
        if self._bars is not None and self._task is not None:
            said = f"{nbytes_text(rate)}/s"
            self._bars.update(self._task, visible=True, total=self._most, completed=self._read, done=done, rate=said)
        elif took_s >= _SETTLED_S and self._progress.is_time():
            left = seconds_text((self._most - self._read) / rate) if rate else "unknown time"
            self._progress.say(f"restoring: {done} read, {nbytes_text(rate)}/s, at most {left} left")

    def end(self) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.remove_task(self._task)
