"""TransferQueue (the package of that name, on Ray) as the rows of a staging.

Owns: finding or starting the queue of a Ray, one partition of it for each store, and a deadline on every request.
Does not know: what is checked of a row (stagings.py), what a segment is, when something waits.

What the package does was found by trying (0.1.11, with its own storage in memory; tests/test_transfer_queue.py):

    kv_put of a key that is there                overwrites it, tag and all, and says nothing
    kv_batch_get of keys of which some are there gives fewer rows than keys, in silence; of none: ValueError
    a put that fails half-way, or of a tag alone leaves a key that is listed and has no row; to get it: ValueError
    kv_clear of what is not there                is fine
    kv_clear with the storage unit dead          says that it is done, and the key is gone; so are the bytes
    a dead storage unit                          put and get fail after 3 attempts of 200 s each, on defaults;
                                                 its rows are lost, and their keys are still listed
    a dead controller                            every request waits for ever: there is no time-out
    init on a Ray without room for its actors    never returns
    the process that called init ends            the queue ends with it: its actors are not detached

Invariants:
1. Nothing waits longer than it was told to, whatever the package does.
2. A row is one segment, put and got alone: a get of many would hide what is missing.
3. A queue that is there is used as it is, and never closed; one that is started here ends with the process that did it.
4. A queue that died stays dead for a process that used it; it says so at each request, and does not start another.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from recovery.errors import ConfigError, StoreUnavailable

CONTROLLER, NAMESPACE, UNIT = "TransferQueueController", "transfer_queue", "TransferQueueStorageUnit#0"
FIELD = "segment"
ANSWER_S, NBYTES_PER_S = 10.0, 20 << 20
"""A request is given so long, and longer if it carries much."""

LOOP_S = 5.0
"""Longer than its time nobody waits either if the package keeps the loop on which a request runs to itself."""

START_S = 120.0
CPUS = 2
"""Of Ray's, that a queue takes which is started here: one for its controller, one for its one storage unit."""

_SETTINGS = {
    "TQ_NUM_THREADS": "1",  # it sets torch's, for the process it is in
    "TQ_CLIENT_ZMQ_IO_THREADS": "1",
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": f"{ANSWER_S:.0f}",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
}
_TO_INSTALL = "pip install 'prefix-recovery[transfer-queue]', or `staging: store`"


def package() -> Any:
    """The package. Raises ConfigError if it, or what it needs, is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("transfer_queue")
    except ModuleNotFoundError as error:
        problem = f"staging: transfer_queue needs {error.name}, which is not installed"
        raise ConfigError(problem, hint=_TO_INSTALL) from error


def start_queue(timeout_s: float = START_S) -> bool:
    """See to it that the Ray that this process is connected to has a queue. True if it had none.

    Raises ConfigError if none can be started.
    """
    import ray

    queue, deadline = package(), time.monotonic() + timeout_s
    while _named(ray):
        if _alive(ray):
            return False
        if time.monotonic() > deadline:
            raise ConfigError("a TransferQueue that died keeps its name on this Ray", hint="start Ray again")
        time.sleep(0.1)  # until Ray has given its name up
    conf = {
        "controller": {"polling_mode": True},
        "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}},
    }
    omegaconf = importlib.import_module("omegaconf")
    try:
        _in_thread(lambda: queue.init(omegaconf.OmegaConf.create(conf)), timeout_s)
    except Exception as error:
        _end_what_was_begun(ray, queue)
        why = f"it was not up within {timeout_s:.0f} s" if isinstance(error, TimeoutError) else _said(error)
        raise ConfigError(
            f"TransferQueue cannot be started on this Ray: {why}",
            hint=f"it needs {CPUS} of Ray's CPUs that nobody has: give Ray more, or set `staging: store`",
        ) from error
    return True


class QueueRows:
    """stagings.Rows in one partition of the queue of this process's Ray. What it needs is looked for at the first use.

    Raises ConfigError if the package is not installed.
    """

    def __init__(self, partition: str, *, answer_s: float = ANSWER_S) -> None:
        self._queue = package()
        self._partition = partition
        self._answer_s = answer_s
        self._attached = False

    def put(self, key: str, data: bytes) -> None:
        torch = importlib.import_module("torch")
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        put = self._queue.async_kv_put
        self._ask("put", lambda: put(key, self._partition, {FIELD: row}, {"nbytes": len(data)}), len(data))

    def get(self, key: str) -> bytes | None:
        async def found() -> bytes | None:
            try:
                rows = (await self._queue.async_kv_batch_get(key, self._partition, FIELD))[FIELD]
            except ValueError:  # no such key, or one without its row: the two are not told apart but by wording
                return None
            return bytes(rows[0].numpy().tobytes()) if len(rows) == 1 else None

        data: bytes | None = self._ask("get", found)
        return data

    def keys(self) -> Sequence[str]:
        listed = self._ask("list", lambda: self._queue.async_kv_list(self._partition))
        return list(listed.get(self._partition, {}))

    def clear(self, keys: Sequence[str]) -> None:
        self._ask("clear", lambda: self._queue.async_kv_clear(list(keys), self._partition))

    def _ask(self, verb: str, request: Callable[[], Coroutine[Any, Any, Any]], nbytes: int = 0) -> Any:
        timeout_s = self._answer_s + nbytes / NBYTES_PER_S
        try:
            if not self._attached:
                self._attach()

            async def answer() -> Any:
                return await asyncio.wait_for(request(), timeout_s)

            return asyncio.run_coroutine_threadsafe(answer(), _loop()).result(timeout_s + LOOP_S)
        except StoreUnavailable:
            raise
        except Exception as error:
            why = f"no answer within {timeout_s:.1f} s" if isinstance(error, TimeoutError) else _said(error)
            raise StoreUnavailable(f"TransferQueue, {verb}: {why}", hint=_MEANWHILE) from error

    def _attach(self) -> None:
        import ray

        if not ray.is_initialized():
            raise StoreUnavailable("this process is not connected to a Ray", hint="ray.init(...) before the session")
        if not _alive(ray):
            raise StoreUnavailable("this Ray has no TransferQueue (any more)", hint=_START)
        _in_thread(self._queue.init, self._answer_s)
        self._attached = True


_START = "start it in a process that outlives this one: transfer_queue.init()"
_MEANWHILE = "tokens go to the store meanwhile; if its controller or storage unit died, start the job again"


def _named(ray: Any) -> Any:
    """The controller's actor, which may be dead; None if there is none."""
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return None


def _alive(ray: Any) -> bool:
    """Whether there is a controller; one that is busy is one."""
    controller = _named(ray)
    if controller is None:
        return False
    try:
        ray.get(controller.get_config.remote(), timeout=ANSWER_S)
    except ray.exceptions.RayActorError:
        return False
    except ray.exceptions.GetTimeoutError:
        pass
    return True


def _end_what_was_begun(ray: Any, queue: Any) -> None:
    """Of a queue that did not come up: an actor that waits for room would take it later."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(UNIT))
    queue.close()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Where this process's requests run; it ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="transfer-queue", daemon=True).start()
    return loop


def _in_thread(work: Callable[[], Any], timeout_s: float) -> None:
    """Do what may never return. Raises TimeoutError, and leaves it to itself then."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="transfer-queue-init", daemon=True).start()
    done.result(timeout_s)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}".rstrip(": ")
