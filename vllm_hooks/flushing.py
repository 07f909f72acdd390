"""When captured tokens are handed to the stager between snapshots. Runs on the event loop.

Owns: the wish to flush, the threshold, group commit.
Does not know: what is frozen, how it is stored.

Invariants:
1. One flush carries what all calls have: it runs after the other consumers of the same engine step had their turn.
2. While the stager writes, a wish is counted and kept, not queued; it is granted when the write is done. A write that
   failed is tried again every RETRY_S.
3. A flush begins early enough that its tokens are durable by the time the bound is reached: the bound less twice the
   tokens that a call was seen to gain while a flush was being stored, between a quarter and three quarters of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from recovery.calls import Captured
from recovery.errors import RecoveryError
from recovery.staging import Stager

RETRY_S = 1.0
"""Between two tries to store what a store refused."""


class Flushing:
    """Periodic flushes of one session. `flush_tokens` 0: only at cuts."""

    def __init__(
        self,
        stager: Stager,
        freeze: Callable[[], Sequence[Captured]],
        longest_pending: Callable[[], int],
        flush_tokens: int,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._stager = stager
        self._freeze = freeze
        self._longest_pending = longest_pending
        self._bound = flush_tokens
        self._on_error = on_error
        self._closed = False
        self._gained = 0.0
        self.at = max(1, flush_tokens // 2) if flush_tokens else 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted = self._scheduled = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def pending(self, n_tokens: int) -> None:
        """A call has this many tokens that no flush has taken."""
        if self.at and n_tokens >= self.at:
            self.want()

    def ended(self) -> None:
        """A call became terminal: its caller may wait for that to be durable."""
        if self.at:
            self.want()

    def want(self) -> None:
        self._wanted = True
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def submit(self, captured: Sequence[Captured], *, periodic: bool = False) -> Future[RecoveryError | None]:
        """Hand records to the stager; when it is done with them, whichever way, what had to wait is granted."""
        flush = self._stager.flush(captured, periodic=periodic)
        flush.add_done_callback(self._tell_loop)
        return flush

    def close(self) -> None:
        """No further flush of its own accord."""
        self._closed = True

    def _tell_loop(self, flush: Future[RecoveryError | None]) -> None:
        """In the stager's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._done, flush)

    def _done(self, flush: Future[RecoveryError | None]) -> None:
        if flush.cancelled():
            return
        if (program_error := flush.exception()) is not None:
            self._on_error(program_error)
        elif flush.result() is not None and self._loop is not None:
            # What could not be stored is kept; somebody may wait for it, so it is tried again without being asked.
            self._loop.call_later(RETRY_S, self.want)
            return
        if self._bound:
            self._gained = max(float(self._longest_pending()), 0.9 * self._gained)
            latest, earliest = self._bound - max(1, self._bound // 4), self._bound // 4
            self.at = max(1, earliest, min(latest, int(self._bound - 2 * self._gained)))
        if self._wanted:
            self.want()

    def _flush(self) -> None:
        self._scheduled = False
        if not self._wanted or self._closed:
            return
        if self._stager.busy:
            self._stager.refuse()
            return
        self._wanted = False
        self.submit(self._freeze(), periodic=True)
