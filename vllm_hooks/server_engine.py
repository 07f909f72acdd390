"""The engine as the OpenAI server's handlers see it: a request with an attempt id is captured under that name.

Owns: the names of the calls of an attempt, and which streams belong to which connection.
Does not know: HTTP, who may use an attempt id.

Invariants:
1. A request without an attempt goes to the engine as it is.
2. The names of two attempts never meet, whatever their ids: `attempt-ID-PROMPT`, and `SAMPLE_attempt-ID-PROMPT`.
3. What a request is refused for is a ValueError here: the handlers answer 400, and no client asks again.
4. While the server ends, an engine that aborts or dies ends no message: its connection does, which says why.
5. The attempt id itself is not part of what is asked for, so that header and `vllm_xargs` name one call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from recovery.errors import InputError
from vllm_hooks.server_claims import XARG
from vllm_hooks.session import RecoverySession

_NAME = re.compile(r"(?:\d+_)?attempt-(.+)-\d+")


@dataclass(slots=True)
class Serving:
    """One connection's use of the engine. `record` is stored with each of its calls."""

    attempt: str
    record: str
    streams: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By the name of the call, in the order in which handlers asked; with the engine that it is from."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def next_name(self) -> str:
        return f"attempt-{self.attempt}-{len(self.streams)}"

    async def close(self) -> None:
        """Nothing of it is generated any more; what was captured is kept.

        The handler is done, but a task of it may be left that still waits for a stream: the stream of an aborted
        request ends by itself.
        """
        self.closing.set()
        async with AsyncExitStack() as all_of_them:
            for name, (engine, stream) in self.streams.items():
                all_of_them.push_async_callback(_close, name, engine, stream)


async def _close(name: str, engine: Any, stream: Any) -> None:
    if stream.ag_running:
        await engine.abort(name)
        while stream.ag_running:
            await asyncio.sleep(0.005)
    await stream.aclose()


SERVING: ContextVar[Serving | None] = ContextVar("SERVING", default=None)
"""Set for the task that handles one captured HTTP request, and for the tasks that it makes."""


def attempt_of_name(rollout: str) -> str | None:
    """The attempt that a call belongs to, None if it is not named as those of an attempt are."""
    found = _NAME.fullmatch(rollout)
    return found[1] if found else None


class Server(Protocol):
    """What is asked of the server."""

    session: RecoverySession

    @property
    def stopping(self) -> bool:
        """It is going to end: nothing new is begun."""


class AttemptEngine:
    """`engine` for requests without an attempt, `captured` (a RecoverableEngine around it) for those of one."""

    def __init__(self, engine: Any, captured: Any, server: Server, records: dict[str, str]) -> None:
        self._engine = engine
        self._captured = captured
        self._server = server
        self._records = records
        server.session.source_digests = records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **arguments: Any) -> Any:
        """As AsyncLLM.generate."""
        serving = SERVING.get()
        if serving is None:
            return self._engine.generate(prompt, sampling_params, request_id, **arguments)
        name = serving.next_name()
        self._records[name] = serving.record
        captured = self._captured.generate(prompt, without_attempt(sampling_params), name, **arguments)
        stream = self._told(captured, serving)
        serving.streams[name] = self._captured, stream
        return stream

    async def _told(self, stream: Any, serving: Serving) -> AsyncGenerator[Any, None]:
        """Invariants 3 and 4."""
        try:
            async with aclosing(stream):
                async for output in stream:
                    if self._server.stopping and _is_aborted(output):
                        break
                    yield output
                else:
                    return
        except InputError as error:
            raise ValueError(str(error)) from error
        except Exception:
            if not self._server.stopping:
                raise
        await serving.closing.wait()


def _is_aborted(output: Any) -> bool:
    return any(one.finish_reason == "abort" for one in output.outputs)


def without_attempt(params: Any) -> Any:
    """The same parameters, the attempt id not among the arguments that the engine is given."""
    if not params.extra_args or XARG not in params.extra_args:
        return params
    clone = params.clone()
    clone.skip_clone = False
    clone.extra_args = {name: value for name, value in params.extra_args.items() if name != XARG} or None
    return clone
