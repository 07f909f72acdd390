"""Other processes that use a store, to be raced, stopped in mid-write, or run into a full disk.

Owns: the programs (run as `python -m storage_backends.testing.writers`) and starting them.
Does not know: what the test makes of it.

Invariants:
1. Nothing waits by the clock: a program says on stdout where it is and goes on when a line comes on stdin.
2. A stop is at a system call of the local store, so it is the same in every run.

Programs:
    race URL N            say "ready"; on a line, create race/0000 to race/N-1; print the list of those created here
    stall URL KEY POINT   create KEY (1 MiB); at POINT say "stalled" and wait for ever
    crash URL KEY POINT   the same, but die there without any clean-up
    fill URL NBYTES LIMIT create fill/0000, fill/0001, ... of NBYTES until an error (RLIMIT_FSIZE is LIMIT if not 0);
                          print what was created, the error and what is listed afterwards
"""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from recovery.errors import RecoveryError
from recovery.ports import Put
from storage_backends import open_store

Point = Literal["half-written", "written", "synced", "linked"]
POINTS: tuple[Point, ...] = ("half-written", "written", "synced", "linked")
"""After half of the bytes; before the file's fsync; before the link; after the link."""

DATA = bytes(range(256)) * 4096


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", __name__, *arguments]


def environment() -> dict[str, str]:
    """This process's environment, so that the program imports what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def start(*arguments: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A program with pipes for its stdin and stdout."""
    return subprocess.Popen(
        [*prefix, *command(*arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def start_at(*arguments: str) -> subprocess.Popen[str]:
    """A program that has said its first word."""
    process = start(*arguments)
    assert process.stdout is not None
    word = process.stdout.readline().strip()
    if word not in ("ready", "stalled"):
        raise AssertionError(f"{arguments}: said {word!r} and {process.communicate()[1]}")
    return process


def stop_at(point: Point, stop: Callable[[], Any]) -> None:
    """From now on this process calls `stop` when it comes to `point`."""
    write, fsync, link = os.write, os.fsync, os.link

    def half_write(fd: int, data: bytes | memoryview) -> int:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            write(fd, data[: len(data) // 2])
            stop()
        return write(fd, data)

    def stop_before_sync(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            stop()
        fsync(fd)

    def stop_before_link(*args: Any, **options: Any) -> None:
        stop()
        link(*args, **options)

    def stop_after_link(*args: Any, **options: Any) -> None:
        link(*args, **options)
        stop()

    match point:
        case "half-written":
            os.write = half_write  # type: ignore[assignment]
        case "written":
            os.fsync = stop_before_sync  # type: ignore[assignment]
        case "synced":
            os.link = stop_before_link
        case "linked":
            os.link = stop_after_link


def _race(url: str, n_keys: str) -> list[int]:
    store = open_store(url)
    print("ready", flush=True)
    sys.stdin.readline()
    who = str(os.getpid()).encode()
    return [n for n in range(int(n_keys)) if store.put_new(f"race/{n:04d}", who * 1000) is Put.CREATED]


def _stall(url: str, key: str, point: Point) -> str:
    def stop() -> None:
        print("stalled", flush=True)
        while sys.stdin.readline():
            pass
        os._exit(4)  # the other end is gone

    stop_at(point, stop)
    return open_store(url).put_new(key, DATA).value


def _crash(url: str, key: str, point: Point) -> str:
    stop_at(point, lambda: os._exit(3))
    return open_store(url, create=True).put_new(key, DATA).value


def _fill(url: str, nbytes: str, limit: str) -> dict[str, Any]:
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    store = open_store(url, create=True)
    created: list[str] = []
    error = None
    while error is None:
        key = f"fill/{len(created):04d}"
        try:
            store.put_new(key, b"x" * (int(nbytes) << (len(created) if int(limit) else 0)))
            created.append(key)
        except RecoveryError as caught:
            error = caught
    listed = {item.key: len(store.get(item.key)) for item in store.list("")}
    unfinished = os.listdir(os.path.join(url, ".tmp"))
    store.delete(created[0])
    again = store.put_new("again", b"x" * 100).value
    return {
        "created": created,
        "error": type(error).__name__,
        "message": str(error),
        "listed": listed,
        "unfinished": unfinished,
        "again": again,
    }


def main() -> None:
    program, *arguments = sys.argv[1:]
    programs: dict[str, Callable[..., Any]] = {"race": _race, "stall": _stall, "crash": _crash, "fill": _fill}
    print(json.dumps(programs[program](*arguments)), flush=True)


if __name__ == "__main__":
    main()
