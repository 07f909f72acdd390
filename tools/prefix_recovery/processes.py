"""Processes by pid and start time: which of ours still runs, and ending it.

Owns: reading /proc, and the signal that ends what an earlier run left.
Does not know: engines, locks.

Invariants:
1. A process is identified by pid AND start time: a reused pid is never signalled. Nothing is found by name.
2. Only processes that this program wrote down as its own are ended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recovery import notes
from storage_backends.writer_name import boot_id

_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Identity:
    """A process. `started` is field 22 of /proc/<pid>/stat (clock ticks since boot), `boot` the boot's id."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process with that pid, None if there is none (or it is a zombie already)."""
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rsplit(b")", 1)[1].split()
        except (OSError, IndexError):
            return None
        return None if fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]), boot_id())

    @classmethod
    def own(cls) -> Identity:
        identity = cls.of(os.getpid())
        assert identity is not None
        return identity

    @classmethod
    def from_json(cls, value: Any) -> Identity | None:
        """Of a note; None if it is none that `as_json` gave."""
        if not isinstance(value, dict):
            return None
        pid, started = (notes.whole(value.get(name), 0, _MAX) for name in ("pid", "started"))
        boot = value.get("boot")
        return cls(pid, started, boot) if pid and started is not None and isinstance(boot, str) else None

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "started": self.started, "boot": self.boot}

    def alive(self) -> bool:
        return Identity.of(self.pid) == self


def descendants(pid: int) -> list[Identity]:
    """All processes below `pid`, children first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found: list[Identity] = []
    queue = list(children.get(pid, ()))
    while queue:
        child = queue.pop(0)
        identity = Identity.of(child)
        if identity is not None:
            found.append(identity)
        queue.extend(children.get(child, ()))
    return found


def end_leftovers(identities: Iterable[Identity], *, wait_s: float = 10.0) -> list[Identity]:
    """SIGKILL those that still run, and wait until they are gone. Returns those that were ended."""
    ended = []
    for identity in identities:
        if identity.pid != os.getpid() and identity.alive():
            os.kill(identity.pid, signal.SIGKILL)
            ended.append(identity)
    deadline = time.monotonic() + wait_s
    while any(identity.alive() for identity in ended) and time.monotonic() < deadline:
        time.sleep(0.02)
    return ended
