"""`<output>.workers`: how many workers a running job on Ray has, and how many somebody wants it to have.

Owns: the file, what `prefix-recovery workers` says of it, and noticing that it was changed.
Does not know: workers, what it takes to have more or fewer.

Invariants:
1. The file is there while a run on Ray has the output; a run begins with the count of its job file, whatever another
   run was told.
2. What is no count changes nothing, and is said once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from prefix_recovery.processes import Identity
from recovery import notes
from recovery.config import JobConfig
from recovery.errors import ConfigError

WORKERS_MAX = 9999
_WRITES = "prefix-recovery workers CONFIG N writes it"


def _path(output: Path) -> Path:
    return output.with_name(output.name + ".workers")


class WantedWorkers:
    """The file, as the run that has the output sees it."""

    def __init__(self, output: Path, n: int, say: Callable[[str], None]) -> None:
        self._path = _path(output)
        self._n = n
        self._say = say
        _write(self._path, n)
        self._seen = self._look()

    @staticmethod
    def none(output: Path) -> None:
        """The run ends."""
        _path(output).unlink(missing_ok=True)

    def changed(self) -> int | None:
        """The count that is wanted now, if it is another than the last one."""
        seen = self._look()
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            n = _read(self._path)
        except ConfigError as error:
            self._say(error.message)
            return None
        if n is None or n == self._n:
            return None
        self._say(f"wanted workers: {n} ({self._n} before)")
        self._n = n
        return n

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:  # not there, or nothing that can be read: said where it is read
            return None
        return found.st_ino, found.st_mtime_ns


def run_workers(config: JobConfig, n: int | None) -> int:
    """Have the running job of `config` grow or shrink to `n` workers; without `n` say how many it should have."""
    output = Path(config.output)
    if not _run_lives(output) or not os.path.lexists(_path(output)):
        raise ConfigError(
            f"no run on Ray has {output} on this machine",
            hint="set `workers` in the job file and start it; a job in one process (workers: 1) is stopped first: "
            "it goes on where it was",
        )
    if n is None:
        print(_read(_path(output)))
        return 0
    if not 1 <= n <= WORKERS_MAX:
        raise ConfigError(f"{n} workers are not 1 to {WORKERS_MAX}", hint="keep at least one; SIGTERM stops the job")
    _write(_path(output), n)
    print(f"wanted workers: {n}; the run says what comes of it")
    return 0


def _run_lives(output: Path) -> bool:
    """By the note that it leaves beside its output (output_lock.py)."""
    try:
        noted = notes.object_in(output.with_name(output.name + ".lock").read_bytes())
    except OSError:
        return False
    run = Identity.from_json((noted or {}).get("run"))
    return run is not None and run.alive()


def _write(path: Path, n: int) -> None:
    """At once, or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(f"{n}\n", encoding="ascii")
    os.replace(temporary, path)


def _read(path: Path) -> int | None:
    """Raises ConfigError for what is no count; None if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=_WRITES) from error
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= WORKERS_MAX:
        raise ConfigError(
            f"{path}: {text!r:.40} is no number of workers, and changes nothing",
            hint=_WRITES,
        )
    return int(text)
