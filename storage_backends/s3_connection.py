"""One process's way to a bucket's server: an event loop in a thread, and s3fs on it.

Owns: when the file system is made, closed and made anew, in which thread its coroutines run, and how long one may take.
Does not know: which request is made, whether it is repeated.

Invariants:
1. Nothing is connected before the first call, and what one process made no other uses: after a fork the child makes a
   loop, a thread and a file system of its own, and leaves its parent's alone (it does not even close them).
2. A call blocks the thread that makes it and no other; that thread may have a running event loop of its own.
3. A call returns within its time, also if the server takes no bytes, gives none, or gives them one by one.
4. `renew` makes the file system anew, with credentials looked up anew, once for all threads that saw the old one fail.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import fsspec.config
import s3fs

from storage_backends.s3_options import S3Options, filesystem_arguments

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]
"""Given the file system, does one request."""

_THREAD = "s3-io"
_CLOSE_S = 2.0


@dataclass(slots=True)
class S3Counters:
    """Counted since the first call of this process."""

    requests: int = 0
    retries: int = 0
    busy: int = 0
    """Answers that said: slow down."""
    lost: int = 0
    """Requests without an answer, or with one that leaves open whether they were done."""
    renewals: int = 0
    waited_s: float = 0.0


class _Io:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=_THREAD, daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """False in a child of the process that made it: threads are not forked."""
        return self.thread.is_alive()


_ios: dict[int, _Io] = {}


def _io() -> _Io:
    """This process's loop. Without a lock: one that another thread holds during a fork would never be free again."""
    pid = os.getpid()
    found = _ios.get(pid)
    if found is None or not found.alive:
        if found is not None:  # a dead ancestor had the same number
            _ios.pop(pid, None)
        new = _Io()
        found = _ios.setdefault(pid, new)
        if found is not new:
            new.loop.call_soon_threadsafe(new.loop.stop)
    return found


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_open: dict[Any, tuple[int, asyncio.AbstractEventLoop]] = {}
"""The makers of the connections that are open, with process and loop."""


def _keep_for_ever() -> None:
    """In a forked child: never let what the parent made come to its end here, not even when the child exits.

    Its end would take the parent's sockets out of the parent's event loop: parent and child share one epoll.
    """
    for each in (*_clients, *_ios.values(), *_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(after_in_child=_keep_for_ever)


class Client:
    """The file system of one process."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._io = _io()
        self._lock = threading.Lock()
        self._fs: Any = None
        self._replaced: Any = None
        self.generation = 0
        self.worked = False
        """Whether a request was ever done."""
        self.counters = S3Counters()
        _clients.add(self)

    @property
    def alive(self) -> bool:
        return self._io.alive

    def call(self, work: Work[T], timeout_s: float) -> T:
        """Result of `work`; raises what it raises, or TimeoutError."""
        future = asyncio.run_coroutine_threadsafe(self._do(work), self._io.loop)
        try:
            found = future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise
        self.worked = True
        return found

    async def _do(self, work: Work[T]) -> T:
        with self._lock:
            if self._fs is None:
                configured: Mapping[str, Any] = fsspec.config.apply_config(s3fs.S3FileSystem, {})
                self._fs = s3fs.S3FileSystem(**filesystem_arguments(self._options, configured))
                self._fs.retries = 1
            fs = self._fs
        if fs._s3 is None:
            await fs.set_session()
            if fs._s3creator not in _open:
                _open[fs._s3creator] = (os.getpid(), self._io.loop)
                weakref.finalize(fs, _begin_to_close, fs._s3creator).atexit = False
        return await work(fs)

    def renew(self, generation: int) -> bool:
        """Look credentials up anew, unless that was done since `generation`. False if they were given as they are."""
        with self._lock:
            if self._fs is not None and (self._fs.key is not None or self._fs.anon):
                return False
            if self.generation == generation:
                self._fs, self._replaced = None, self._fs
                self.generation += 1
                self.counters.renewals += 1
            return True

    def count(self, **more: float) -> None:
        with self._lock:
            for name, n in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + n)

    @property
    def endpoint(self) -> str:
        """The server's address, as far as it is known."""
        connected = getattr(self._fs, "_s3", None)
        if connected is not None:
            return str(connected.meta.endpoint_url)
        given = (self._options.endpoint_url, os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
        return next(filter(None, given), "S3")

    @property
    def region(self) -> str:
        connected = getattr(self._fs, "_s3", None)
        return str(connected.meta.region_name) if connected is not None else (self._options.region or "unknown")

    def who(self) -> str:
        """Whose credentials these are and where they were found; nothing secret."""
        fs = self._fs or self._replaced  # another thread may be renewing it
        if fs is None:
            return "no credentials"
        if fs.key is not None:
            return f"the access key {fs.key} (given as an option or in FSSPEC's configuration)"
        if fs.anon:
            return "nobody (anon)"

        async def look_up(fs: Any) -> str:
            found = await fs.session.get_credentials()
            return f"the access key {found.access_key} (found by: {found.method})" if found else "no credentials"

        with suppress(Exception):  # an error message must not fail
            return self.call(look_up, _CLOSE_S)
        return "credentials that could not be read"


class Connection:
    """A Client per process, made when it is first needed there."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._clients: dict[int, Client] = {}

    def here(self) -> Client:
        """This process's client (invariant 1; without a lock for the reason that `_io` gives)."""
        pid = os.getpid()
        found = self._clients.get(pid)
        if found is None or not found.alive:
            if found is not None:
                self._clients.pop(pid, None)
            found = self._clients.setdefault(pid, Client(self._options))
        return found


def _begin_to_close(creator: Any) -> Future[Any] | None:
    """Close the connections of a file system that nobody has any more. Does not wait: any thread may come here."""
    pid, loop = _open.get(creator, (0, None))
    if loop is None or pid != os.getpid() or not loop.is_running():
        return None
    del _open[creator]
    return asyncio.run_coroutine_threadsafe(creator.__aexit__(None, None, None), loop)


@atexit.register
def _close_all() -> None:
    """What is still open when the process ends, also what a renewal has replaced."""
    closing = [_begin_to_close(creator) for creator in list(_open)]
    for future in filter(None, closing):
        with suppress(Exception):  # the process ends, and its connections with it
            future.result(_CLOSE_S)
