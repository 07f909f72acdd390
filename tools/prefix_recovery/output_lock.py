"""`<output>.lock`: at most one run on this machine holds an output, and ends what its dead predecessor left.

Owns: the kernel's lock, and the note of which processes and folders a run made.
Does not know: the output's content.

Invariants:
1. The lock goes with the process: nothing has to be removed by hand after a crash.
2. Only processes that the predecessor noted are ended, and only its own folder is removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prefix_recovery.processes import Identity, end_leftovers
from recovery import notes
from recovery.errors import ConfigError, Locked, StoreFull

FOLDER_PREFIX = "prefix-recovery-"
"""What a run's temporary folder is called; nothing else is ever removed."""

_DYING_S = 10.0
"""How long what a dead run left may take to end."""


class OutputLock:
    """Held while a run lives. Across machines the store's epoch decides, not this file."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + ".lock")
        self._fd = -1

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
        self._remove_folder()
        self.note([])
        return ended

    def _remove_folder(self) -> None:
        folder = self._read().get("folder")
        if isinstance(folder, str) and Path(folder).name.startswith(FOLDER_PREFIX) and not Path(folder).is_symlink():
            shutil.rmtree(folder, ignore_errors=True)

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

    def note(self, children: Iterable[Identity], folder: Path | None = None) -> None:
        """Write down which processes this run started, and its temporary folder. Raises StoreFull."""
        document = {
            "run": Identity.own().as_json(),
            "children": [item.as_json() for item in children],
            "folder": str(folder) if folder is not None else None,
        }
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(document).encode(), 0)
        except OSError as error:
            raise StoreFull(
                f"cannot write {self.path}: {error.strerror}", hint="make room and run the same command again"
            ) from error

    def release(self) -> None:
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> Mapping[str, Any]:
        """Empty if it is not there or mangled: a crash may have left any part of it, and stands in nobody's way."""
        return notes.object_in(os.pread(self._fd, 1 << 20, 0)) or {}
