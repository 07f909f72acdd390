"""Unfinished files: their names, and which of them nobody will finish.

Owns: the name of a temporary file, whether its writer still lives, the sweep.
Does not know: what is written into one, keys.

Invariants:
1. A name tells its writer: host, process id, start time of that process, and a random part.
2. The sweep takes a file of this host only if its writer is dead, and a file of another host only if it is older
   than AGE_S or the OTHERS_MAX newest of other hosts are kept without it: what crashes leave is bounded.
3. A file whose name is not of this form is foreign and stays. In a folder that is not a store's own, the name begins
   with a prefix that says what the file is of.
4. Losing a temporary file costs its writer a repetition, never an object (local.py, invariant 4): so a host's name
   that two machines share, or a clock that is wrong, does no harm.
"""

from __future__ import annotations

import os
import re
import stat
import time

AGE_S = 24 * 3600
OTHERS_MAX = 64

_NAME = re.compile(r"([A-Za-z0-9-]{1,100})\.([0-9]{1,10})\.([0-9]{1,20})\.[0-9a-f]{16}")
_NOT_IN_HOST = re.compile(r"[^A-Za-z0-9]")


def host() -> str:
    """This machine's name, in characters that may stand in a temporary file's name."""
    return _NOT_IN_HOST.sub("-", os.uname().nodename)[:100] or "-"


def start_time(pid: int) -> int:
    """When process `pid` started, in ticks since boot; 0 if there is no such (running) process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def new_name(prefix: str = "") -> str:
    """A name that no other file has, for this process."""
    pid = os.getpid()
    return f"{prefix}{host()}.{pid}.{start_time(pid)}.{os.urandom(8).hex()}"


def _lives(pid: int, started: int) -> bool:
    """Whether the process that wrote `started` into a name still runs (invariant 1)."""
    if not 0 < pid < 1 << 31:
        return False
    if os.path.exists("/proc/self/stat"):
        return started != 0 and start_time(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sweep(folder_fd: int, prefix: str = "") -> int:
    """Remove the temporary files in a folder that nobody will finish. Returns how many were removed."""
    return sum(_remove(name, folder_fd) for name in abandoned(folder_fd, prefix))


def abandoned(folder_fd: int, prefix: str = "") -> list[str]:
    """Names of the temporary files in a folder that nobody will finish."""
    here, now = host(), time.time()
    doomed: list[str] = []
    others: list[tuple[float, str]] = []
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name.removeprefix(prefix))
            if match is None or not entry.name.startswith(prefix):
                continue
            if match[1] == here:
                if not _lives(int(match[2]), int(match[3])):
                    doomed.append(entry.name)
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(status.st_mode):
                others.append((now - status.st_mtime, entry.name))
    others.sort()
    return doomed + [name for rank, (age, name) in enumerate(others) if age > AGE_S or rank >= OTHERS_MAX]


def _remove(name: str, folder_fd: int) -> bool:
    """Whether the file was removed; one that is gone or belongs to another user is left to the next sweep."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except OSError:
        return False
    return True
