"""Results on their way to a caller who wants them durable first.

Owns: one future per ended call, set when its terminal record is in the store.
Does not know: the store, outputs. Runs on the event loop.

Invariants:
1. The future exists before the record can be stored, so no storing is missed.
2. A call is given out once.
3. Unless results are kept, what is stored is forgotten: there is nothing to wait for any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from recovery.calls import LiveCall
from recovery.errors import RecoveryError
from recovery.model import CallId


class Deliveries:
    """Ended calls that nobody has fetched yet."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._stored: dict[CallId, asyncio.Future[None]] = {}
        self._calls: dict[str, LiveCall] = {}

    def ending(self, call: LiveCall) -> None:
        """The call is about to become terminal."""
        self._stored[call.call_id] = asyncio.get_running_loop().create_future()

    def ended(self, call: LiveCall) -> None:
        """The caller's stream is over and the call has its end."""
        self._calls[call.request.rollout] = call

    def stored(self, call_ids: Iterable[CallId]) -> None:
        for call_id in call_ids:
            waiter = self._stored.get(call_id) if self._keeps else self._stored.pop(call_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def failed(self, error: RecoveryError) -> None:
        """Whoever waits is told why it will not come."""
        for waiter in self._stored.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # it may be nobody who waits

    def awaits(self, call_id: CallId) -> bool:
        """Whether the end of that call is on its way to the store."""
        return call_id in self._stored

    async def saved(self, call_id: CallId) -> None:
        """Wait for that. For calls that `take` does not give out."""
        await asyncio.shield(self._stored[call_id])
        self._stored.pop(call_id, None)

    def has(self, rollout: str) -> bool:
        return rollout in self._calls

    async def take(self, rollout: str) -> LiveCall:
        """The ended call of that request id, once its terminal record is in the store."""
        call = self._calls.pop(rollout)
        waiter = self._stored.get(call.call_id)
        if waiter is not None:
            await waiter
            self._stored.pop(call.call_id, None)
        return call
