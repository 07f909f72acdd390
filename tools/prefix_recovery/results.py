"""The output file: one row per sample, each exactly once, across any number of crashes.

Owns: which rows are there and what they answer, how a row is appended durably.
Does not know: where a row comes from, what is asked for now (changes.py), who else runs (output_lock.py).

Invariants:
1. A row is in the file for good once `append` returns: written in one piece, fsynced.
2. (id, sample_index) occurs once: what is in the file at the start is never appended again.
3. A torn last line, left by a kill in the middle of a write, is cut off; its row is appended again from the store.
   No other byte of the file is ever changed.
4. A run whose output others can reach (a shared folder) reads it again after it claimed the store: what a predecessor
   appended until then is seen, and what is appended goes to the end whatever else was.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from recovery import notes
from recovery.errors import ConfigError, StoreFull

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Found:
    """A row's line in the file (0: appended by this run), and what it says it answers; None in rows made without."""

    line: int
    source: str | None


class Results:
    """The output file, opened for appending, or only looked at."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[Key, Found] = {}
        self._fd = -1
        self._cut_at: int | None = None
        """Where a part of rows begins that could not be taken back yet."""

    def open(self) -> None:
        """Read what is there and make ready to append.

        Raises ConfigError, naming file and line, if the file holds something that is not a result: it may be somebody
        else's file, and nothing of it is touched.
        """
        if os.path.exists(self.path) and not os.path.isfile(self.path):  # Path raises for names that are too long
            raise ConfigError(f"the output {self.path} is not a file", hint="check `output` in the config")
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot open the output file {self.path}: {error.strerror}", hint="check `output` in the config"
            ) from error
        with open(self._fd, "rb", closefd=False) as file:
            end = self._read(file)
        size = os.fstat(self._fd).st_size
        if end < size:
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        elif end and os.pread(self._fd, 1, end - 1) != b"\n":
            os.write(self._fd, b"\n")
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def look(self) -> None:
        """Read what is there and change nothing. Raises what `open` does of it."""
        if os.path.isfile(self.path):
            with open(self.path, "rb") as file:
                self._read(file)

    def _read(self, file: BinaryIO) -> int:
        """Note every row. Returns where the last whole one ends."""
        end = 0
        for number, raw in enumerate(file, 1):
            if not self._take(raw, number):
                break
            end += len(raw)
        return end

    def reread(self) -> None:
        """Read the file again: after the claim no earlier run can have appended what is not seen here."""
        self.close()
        self.done = {}
        self.open()

    def _take(self, raw: bytes, number: int) -> bool:
        """Note one line; False if it is the torn last one."""
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError) as error:
            # A kill leaves the beginning of a row; a power failure may leave zeros where it should be.
            begin = b'{"id": '
            torn = raw.startswith(begin) or begin.startswith(raw) or not raw.strip(b"\0")
            if torn and not raw.endswith(b"\n"):
                return False
            raise self._foreign(number, "it is not JSON") from error
        try:
            name, index = str(row["id"]), notes.whole(row["sample_index"], 0)
            row["token_ids"]
            source = row.get("source")
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign(number, f"it lacks {error}") from error
        if index is None:
            raise self._foreign(number, "its sample_index is no number of a sample")
        key = (name, index)
        if key in self.done:
            raise ConfigError(
                f"{self.path} line {number} repeats the result of {key[0]!r} sample {key[1]}",
                hint="two runs on different machines may have written it; remove one of the two lines",
            )
        self.done[key] = Found(number, source if isinstance(source, str) else None)
        return True

    def _foreign(self, number: int, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path} line {number} is not a result of this program: {why}",
            hint="give this job an output file of its own, or move that line away",
        )

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows and make them durable. Raises StoreFull; then none of them is in the file."""
        lines, added = [], dict[Key, Found]()
        for row in rows:
            key = (str(row["id"]), int(row["sample_index"]))
            assert key not in self.done, f"{key} would be written twice"
            added[key] = Found(0, row.get("source"))
            lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) + "\n")
        data = "".join(lines).encode()
        try:
            self._cut()
            start = os.fstat(self._fd).st_size
            self._cut_at = start
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
            self._cut_at = None
        except OSError as error:
            with contextlib.suppress(OSError):  # it is cut off before the next row; the first error is the one to tell
                self._cut()
            raise StoreFull(
                f"cannot append to {self.path}: {error.strerror}",
                hint=f"make room or mend the disk under {self.path.parent}",
            ) from error
        self.done |= added

    def _cut(self) -> None:
        """Take back the part of rows that an append left."""
        if self._cut_at is not None:
            os.ftruncate(self._fd, self._cut_at)
            self._cut_at = None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_errors(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """`<output>.errors.jsonl`, made anew by every run: what has no result and why."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:  # ids need not be text
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StoreFull(
            f"cannot write {path}: {error.strerror}", hint="make room and run the same command again"
        ) from error
