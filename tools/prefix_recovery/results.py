"""The output file: one row per sample, each exactly once, across any number of crashes.

Owns: which rows are there, how a row is appended durably, the lock that keeps two runs apart.
Does not know: where a row comes from.

Invariants:
1. A row is in the file for good once `append` returns: written in one piece, fsynced.
2. (id, sample_index) occurs once: what is in the file at the start is never appended again.
3. A torn last line, left by a kill in the middle of a write, is cut off; its row is appended again from the store.
   No other byte of the file is ever changed.
4. At most one run on this machine holds the output.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefix_recovery.processes import Identity, end_leftovers
from recovery.errors import ConfigError, Locked, StoreFull

Key = tuple[str, int]

_DYING_S = 10.0
"""How long what a dead run left may take to end."""


class OutputLock:
    """`<output>.lock`: held while a run lives, and what it started, for its successor to end.

    The lock is the kernel's and goes with the process. Across machines the store's epoch decides, not this file.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + ".lock")
        self._fd = -1
        self._children: list[Identity] = []

    def acquire(self) -> list[Identity]:
        """Take the lock and end what a dead predecessor left running. Returns what was ended.

        Raises Locked if another run holds it, ConfigError if the folder cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write beside the output file {self.path}: {error.strerror}",
                hint="check `output` in the config and the permissions of its folder",
            ) from error
        ended: list[Identity] = []
        deadline = time.monotonic() + _DYING_S
        while not self._try_lock():
            # An engine is forked and keeps the lock of a run that was killed, until it is ended too.
            holder = Identity.from_json(self._read().get("run"))
            if holder is None or holder.alive() or time.monotonic() > deadline:
                os.close(self._fd)
                self._fd = -1
                raise Locked(
                    f"another run holds the output {self.path.with_suffix('')} (pid {holder.pid if holder else '?'})",
                    hint="wait for it, or end it with SIGTERM and run again",
                )
            ended += end_leftovers(self._noted())
            time.sleep(0.02)
        ended += end_leftovers(self._noted())
        self.note([])
        return ended

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _noted(self) -> list[Identity]:
        """The processes that the last run noted as its own."""
        children = self._read().get("children", [])
        found = [Identity.from_json(item) for item in children] if isinstance(children, list) else []
        return [item for item in found if item is not None]

    def note(self, children: Iterable[Identity]) -> None:
        """Write down which processes this run started."""
        self._children = list(children)
        document = {"run": Identity.own().as_json(), "children": [item.as_json() for item in self._children]}
        data = json.dumps(document).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> Mapping[str, Any]:
        try:
            document = json.loads(os.pread(self._fd, 1 << 20, 0) or b"{}")
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}


class Results:
    """The output file, opened for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[Key] = set()
        self.torn = 0
        self._fd = -1

    def open(self) -> None:
        """Read what is there and make ready to append.

        Raises ConfigError, naming file and line, if the file holds something that is not a result: it may be somebody
        else's file, and nothing of it is touched.
        """
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot open the output file {self.path}: {error.strerror}", hint="check `output` in the config"
            ) from error
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                if not self._take(raw, number):
                    break
                end += len(raw)
        size = os.fstat(self._fd).st_size
        if end < size:
            self.torn = size - end
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        elif end and os.pread(self._fd, 1, end - 1) != b"\n":
            os.pwrite(self._fd, b"\n", end)
        os.lseek(self._fd, 0, os.SEEK_END)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take(self, raw: bytes, number: int) -> bool:
        """Note one line; False if it is the torn last one."""
        try:
            row = json.loads(raw)
        except ValueError as error:
            # A kill leaves the beginning of a row; a power failure may leave zeros where it should be.
            begin = b'{"id": '
            torn = raw.startswith(begin) or begin.startswith(raw) or not raw.strip(b"\0")
            if torn and not raw.endswith(b"\n"):
                return False
            raise self._foreign(number, "it is not JSON") from error
        try:
            key = (str(row["id"]), int(row["sample_index"]))
            row["token_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign(number, f"it lacks {error}") from error
        if key in self.done:
            raise ConfigError(
                f"{self.path} line {number} repeats the result of {key[0]!r} sample {key[1]}",
                hint="two runs on different machines may have written it; remove one of the two lines",
            )
        self.done.add(key)
        return True

    def _foreign(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path} line {number} is not a result of this program: {why}",
            hint="give this job an output file of its own, or move that line away",
        )

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows and make them durable. Raises StoreFull; then none of them is in the file."""
        lines, keys = [], []
        for row in rows:
            key = (str(row["id"]), int(row["sample_index"]))
            assert key not in self.done, f"{key} would be written twice"
            keys.append(key)
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n")
        data = "".join(lines).encode()
        start = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, start)
            raise StoreFull(
                f"cannot append to {self.path}: {error.strerror}", hint="make room and run the same command again"
            ) from error
        self.done.update(keys)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_errors(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`<output>.errors.jsonl`, made anew by every run: what has no result and why."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
