"""What one actor asks another, and how the answer or the error arrives.

Owns: the way of an error from one process to the other, and a participant that lives in another process.
Does not know: who asks what.

Invariants:
1. An error of ours arrives as what was raised; that there is no process any more arrives as Gone, whyever.
2. One actor under one name is one participant here, however often it is spoken of: who joins again is known again.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from vllm_hooks.ray_workers.messages import Ask, Gone, WorkerId

_GONE = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)


def _plain(error: BaseException) -> BaseException:
    if isinstance(error, OutOfMemoryError):
        return Gone(str(error), low_on_memory=True)
    if isinstance(error, _GONE):
        return Gone(str(error))
    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and isinstance(cause, BaseException):
        return cause
    return error


async def answer(ref: Any, timeout_s: float | None = None) -> Any:
    """What a remote call returns; raises what it raised, Gone, or TimeoutError."""
    settled = asyncio.wrap_future(ref.future())
    settled.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be nobody who waits by then
    try:
        return await asyncio.wait_for(asyncio.shield(settled), timeout_s)
    except (*_GONE, RayTaskError) as error:
        raise _plain(error) from None


def answer_now(ref: Any, timeout_s: float) -> Any:
    """The same, blocking."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError from None
    except (*_GONE, RayTaskError) as error:
        raise _plain(error) from None


def asking(worker: WorkerId, handle: Any) -> Ask:
    """How the coordinator asks a worker."""

    def ask(step: str, epoch: int, *arguments: Any) -> Future[Any]:
        asked: Future[Any] = Future()

        def settle(inner: Future[Any]) -> None:
            error = inner.exception()
            if error is None:
                asked.set_result(inner.result())
            else:
                asked.set_exception(_plain(error))

        handle.step.remote(worker, step, epoch, *arguments).future().add_done_callback(settle)
        return asked

    return ask


class RemoteParticipants:
    """Those of one coordinator, for as long as anybody has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: weakref.WeakValueDictionary[tuple[str, Any], RemoteParticipant] = weakref.WeakValueDictionary()

    def of(self, name: str, handle: Any, timeout_s: float) -> RemoteParticipant:
        """The same one for the same actor: a handle is another object each time that it is sent."""
        with self._lock:
            one = self._found.get((name, handle))
            if one is None:
                one = self._found[name, handle] = RemoteParticipant(name, handle, timeout_s)
            one.timeout_s = timeout_s  # who joins again may say another one
            return one


class RemoteParticipant:
    """recovery.ports.Participant, and recovery.sharded.Owner: an actor with these methods, each under the deadline."""

    def __init__(self, name: str, handle: Any, timeout_s: float) -> None:
        self.name = name
        self._handle = handle
        self.timeout_s = timeout_s

    def prepare(self, *cut: int) -> bytes:
        state: bytes = answer_now(self._handle.prepare.remote(*cut), self.timeout_s)
        return state

    def commit(self, published: bool) -> None:
        answer_now(self._handle.commit.remote(published), self.timeout_s)

    def restore(self, state: bytes, rewound: bool) -> None:
        answer_now(self._handle.restore.remote(state, rewound), self.timeout_s)
