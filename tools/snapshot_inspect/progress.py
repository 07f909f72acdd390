"""How far a long read is, on stderr: a bar on a terminal, a line now and then in a file.

Owns: rate and time left, how often something is said.
Does not know: what is read; whoever reads gives the words for it.

Invariants:
1. Nothing is written to stdout.
2. What takes less than EVERY_S says nothing in a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from snapshot_inspect.render import console
from snapshot_inspect.texts import nbytes_text, seconds_text

EVERY_S = 10.0


class Progress(Protocol):
    """Used as a context manager around the work."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...

    def begin(self, n_objects: int, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...


class Silent:
    """Says nothing."""

    def __enter__(self) -> object:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        return

    def begin(self, n_objects: int, nbytes: int) -> None:
        return

    def advance(self, nbytes: int) -> None:
        return


class Lines(Silent):
    """A line every EVERY_S seconds."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        verb: str = "verify",
        things: str = "segments",
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._verb, self._things = verb, things

    def begin(self, n_objects: int, nbytes: int) -> None:
        self._n_objects, self._nbytes = n_objects, nbytes
        self._n_done = self._nbytes_done = 0
        self._began = self._said = self._clock()

    def advance(self, nbytes: int) -> None:
        self._n_done += 1
        self._nbytes_done += nbytes
        now = self._clock()
        if now - self._said < EVERY_S:
            return
        self._said = now
        rate = self._nbytes_done / (now - self._began)
        left = (self._nbytes - self._nbytes_done) / rate if rate else 0.0
        print(
            f"{self._verb}: {self._n_done} of {self._n_objects} {self._things}, {nbytes_text(self._nbytes_done)} of "
            f"{nbytes_text(self._nbytes)}, {nbytes_text(rate)}/s, {seconds_text(left)} left",
            file=self._stream,
            flush=True,
        )


class Bar(Silent):
    """A bar with rate and time left."""

    def __init__(self, stream: TextIO, *, verb: str = "verify", things: str = "segments") -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn(f"{verb}: reading {things}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console(file=stream),
            transient=True,
        )

    def __enter__(self) -> object:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, n_objects: int, nbytes: int) -> None:
        self._task = self._bar.add_task("", total=nbytes)

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)


def progress_on(stream: TextIO, verb: str, things: str = "segments") -> Progress:
    """`verb` is doing it, to `things`."""
    return Bar(stream, verb=verb, things=things) if stream.isatty() else Lines(stream, verb=verb, things=things)
