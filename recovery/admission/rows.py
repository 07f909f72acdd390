"""Rows with an id each, from a JSONL file or any iterable.

Owns: reading them, their post-processing, their digests.
Does not know: groups, epochs, order.

Invariants:
1. Row i is the same row in every process as long as its digest is.
2. An id comes once; a row without one, or with one that came before, is an InputError that names the line.
3. (A43) A digest is over the rows after post-processing, in order, so that a changed template is a changed row.
4. A file is read once for its rows' places and digests; a row that is read again is the same, or an InputError.
5. A row that could not be taken is the next one still: nothing is skipped, and an iterable that failed has not ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

from recovery.codec import canonical_json, sha256_hex
from recovery.errors import InputError

Row = Mapping[str, Any]
Process = Callable[[dict[str, Any]], Row]
"""What a row goes through before it is used, e.g. a template. A pure function of the row."""


def _as_is(row: dict[str, Any]) -> Row:
    return row


class _Checked:
    """What both kinds share: ids and the running digest."""

    def __init__(self, process: Process | None) -> None:
        self._process = process or _as_is
        self._ids: set[str] = set()
        self._digests = [""]

    def _take(self, row: Any, what: str) -> Row:
        """Row number len(digests) - 1, checked and counted. Raises InputError, nothing counted."""
        if not isinstance(row, Mapping):
            raise InputError(f"{what} is {type(row).__name__} instead of an object", hint="every row has an id")
        made = self._processed(dict(row), what)
        name = made.get("id")
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            raise InputError(f"{what} has no id", hint='give every row an "id" of its own')
        if str(name) in self._ids:
            raise InputError(f"{what}: the id {name!r} came before", hint="give every row an id of its own")
        try:
            digest = self._digest(len(self._digests) - 1, made)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{what} ({name!r}) is not JSON: {error}", hint="let rows hold JSON values") from error
        self._ids.add(str(name))
        self._digests.append(digest)
        return made

    def _processed(self, row: dict[str, Any], what: str) -> dict[str, Any]:
        """Through the caller's function. Raises InputError that names the row."""
        try:
            made = self._process(row)
        except Exception as error:
            raise InputError(
                f"{what}: the function that rows go through raised {error!r}", hint="mend the function, or the row"
            ) from error
        if not isinstance(made, Mapping):
            raise InputError(
                f"{what}: the function that rows go through returned {type(made).__name__} instead of an object",
                hint="let it return the row",
            )
        return dict(made)

    def _digest(self, index: int, made: Row) -> str:
        """Of all rows up to this one."""
        return sha256_hex(self._digests[index].encode() + canonical_json(made))


class IterableRows(_Checked):
    """Any iterable, taken as far as it is asked for and kept."""

    def __init__(self, rows: Iterable[Row], process: Process | None = None) -> None:
        super().__init__(process)
        self._rest = iter(rows)
        self._next: list[Row] = []
        self._broken: Exception | None = None
        self._kept: list[Row] = []
        self.size = len(rows) if isinstance(rows, Sized) else None

    def row(self, index: int) -> Row | None:
        self._read(index + 1)
        return self._kept[index] if index < len(self._kept) else None

    def digest(self, n: int) -> str:
        """Raises InputError if there are fewer rows."""
        self._read(n)
        if n >= len(self._digests):
            raise InputError(f"there are {len(self._kept)} rows, and there were {n}", hint="use the same rows again")
        return self._digests[n]

    def _read(self, n: int) -> None:
        while len(self._kept) < n:
            if self._broken is not None:
                raise self._broken
            try:
                row = self._next.pop() if self._next else next(self._rest)
            except StopIteration:
                self.size = len(self._kept)
                return
            except Exception as error:
                self._broken = error
                raise
            self._next.append(row)
            self._kept.append(self._take(row, f"row {len(self._kept)}"))
            self._next.clear()


class JsonlRows(_Checked):
    """A file of one JSON object a line; empty lines are skipped. Read once to find its lines."""

    def __init__(self, path: str | os.PathLike[str], process: Process | None = None) -> None:
        super().__init__(process)
        self._path = os.fspath(path)
        self._places: list[tuple[int, int, int]] = []
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise InputError(
                f"{self._path} is no regular file", hint="rows are read again and again: write them to one"
            )
        try:
            self._file = open(self._path, "rb")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InputError(f"{self._path}: {error.strerror}", hint="check the path") from error
        at = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._take(self._parsed(line, number), f"{self._path}, line {number}")
                self._places.append((at, len(line), number))
            at += len(line)
        self.size = len(self._places)

    def row(self, index: int) -> Row | None:
        if index >= len(self._places):
            return None
        at, n, number = self._places[index]
        line = os.pread(self._file.fileno(), n, at)  # as it is now, not as it was buffered
        try:
            made = self._processed(self._parsed(line, number), f"{self._path}, line {number}")
            if self._digest(index, made) == self._digests[index + 1]:
                return made
        except (InputError, TypeError, ValueError):
            pass  # it was a row once, so it is another line now
        raise InputError(
            f"{self._path}, line {number} is not what it was when the file was opened",
            hint="leave the file as it is while a job reads it (a new version is a new file), and let `process` be a "
            "pure function of the row",
        )

    def digest(self, n: int) -> str:
        """Raises InputError if there are fewer rows."""
        if n > len(self._places):
            raise InputError(f"{self._path} has {self.size} rows, and had {n}", hint="use the same file again")
        return self._digests[n]

    def close(self) -> None:
        self._file.close()

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._path}, line {number} is not JSON: {error}", hint="mend the line") from error
        if not isinstance(row, dict):
            raise InputError(f"{self._path}, line {number} is no JSON object", hint='{"id": …, …}')
        return row
