"""From the signal that ends the server to its last snapshot.

At SIGTERM vLLM ends its engine and then its HTTP server, which waits for its connections. Streams of an engine that is
gone neither go on nor end: it waits until their clients leave, and the end of the lifespan comes after that, or never.

Owns: being told of the signal beside vLLM's own handler, and the order of what follows.
Does not know: what a snapshot is, how a connection is ended.

Invariants:
1. vLLM's handler is called as it was, first. Where there is none, the signal does what it did.
2. What is captured by then is asked for a snapshot at once. The last one is taken when nothing is generated any more,
   whether clients leave or not.
3. There is one end, whatever asks for it, and however often.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from recovery.errors import ProgramError, RecoveryError
from vllm_hooks.session import RecoverySession

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_LOOK_S = 0.05
"""How often it is looked whether the engine is down: vLLM tells nobody."""


class Stopping:
    """Made on the loop. `end_connections` returns when nobody is served any more, in a bounded time."""

    def __init__(
        self, engine: Any, session: RecoverySession, end_connections: Callable[[], Awaitable[None]], grace_s: float
    ) -> None:
        self._engine = engine
        self._session = session
        self._end_connections = end_connections
        self._grace_s = grace_s
        self._over = asyncio.Event()
        self._end: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._end is not None

    def listen(self) -> None:
        """From now on a signal begins the end. Only a main thread is told of signals."""
        loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            earlier = signal.getsignal(number)
            if callable(earlier):
                signal.signal(number, self._beside(earlier, loop))
                signal.siginterrupt(number, False)  # as event loops set it

    def _beside(self, earlier: Callable[[int, FrameType | None], Any], loop: asyncio.AbstractEventLoop) -> Any:
        def told(number: int, frame: FrameType | None) -> None:
            earlier(number, frame)
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.begin)

        return told

    def begin(self) -> None:
        """The server is going to end. It may serve what it serves for as long as its engine does."""
        if self._end is None:
            self._session.engine_may_end = True
            with contextlib.suppress(RecoveryError):  # nothing can be stored any more, and everybody was told
                self._session.want_snapshot("shutdown")
            self._run_once()

    async def finish(self) -> None:
        """The server has ended. Returns when the last snapshot was taken."""
        self._over.set()
        self._session.engine_may_end = True
        await self._run_once()

    def _run_once(self) -> asyncio.Task[None]:
        if self._end is None:
            self._end = asyncio.ensure_future(self._run())
            self._end.add_done_callback(self._ended)
        return self._end

    def _ended(self, end: asyncio.Task[None]) -> None:
        """Nobody may be left who waits for it: the HTTP server can outlive its signal for as long as a client likes."""
        if not end.cancelled() and (error := end.exception()) is not None:
            self._session.fail(
                error
                if isinstance(error, RecoveryError)
                else ProgramError(f"the server's end failed: {error!r}", hint="this is a bug; please report it")
            )

    async def _run(self) -> None:
        while not self._over.is_set() and not self._engine.errored:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _LOOK_S)
        await self._end_connections()
        await self._session.stop(timeout_s=self._grace_s)
