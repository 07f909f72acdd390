"""Which live call a request becomes: a new one, one that a restore brought back, or one that was interrupted here.

Owns: the restored calls until somebody asks for them.
Does not know: the engine, fences, flushes. Runs on the event loop.

Invariants:
1. One request (same id, prompt, sampling) is one call, however often it is sent; twice at the same time is an error.
2. A call that ended is never generated again: its tokens come from the table or the store.
3. A call that cannot be resumed begins again as a new attempt, and its old tokens are superseded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from recovery import codec as digests
from recovery import resume
from recovery.calls import CallTable, LiveCall
from recovery.errors import InputError
from recovery.ledger import Entry, Ledger
from recovery.model import CallId, Request
from recovery.restored import RestoredCall
from recovery.resume import StopRules
from recovery.transcripts import Transcript

ReadEnded = Callable[[list[CallId]], Mapping[CallId, Transcript]]
"""Reads the transcripts of ended calls from the store; blocks, so it is called off the loop."""


class Admission:
    """The calls of one session, by request."""

    def __init__(self, table: CallTable, ledger: Ledger, restored: Iterable[RestoredCall], read: ReadEnded) -> None:
        self._table = table
        self._ledger = ledger
        self._restored = {call.entry.call_id: call for call in restored}
        self._read = read

    async def admit(self, request: Request, stop: StopRules) -> LiveCall:
        """The call for `request`. Raises InputError if it is running already."""
        call_id = digests.call_of(request)
        live = self._table.get(call_id)
        if live is not None:
            return again(self._table, live, stop)
        restored = self._restored.pop(call_id, None)
        if restored is not None:
            keep = not isinstance(restored.plan, resume.Restart)
            return bring_back(self._table, restored.entry, restored.transcript, keep=keep)
        known = self._ledger.get(call_id)
        if known is not None and known.ended is not None:
            transcripts = await asyncio.to_thread(self._read, [call_id])
            live = self._table.get(call_id)  # the same request may have come twice meanwhile
            return (
                again(self._table, live, stop)
                if live
                else bring_back(self._table, known, transcripts[call_id], keep=True)
            )
        # One that was forgotten and is asked for again may be open in the ledger still: this is another attempt at it.
        return self._table.open(request, call_id, 0 if known is None else known.attempt + 1)

    @property
    def restored(self) -> Iterable[RestoredCall]:
        """Open calls that a restore brought back and nobody has asked for yet."""
        return self._restored.values()

    def forget(self, call_id: CallId) -> None:
        """Nobody will ask for this call again. What of it was not frozen yet still goes with a freeze."""
        self._restored.pop(call_id, None)
        self._table.forget(call_id)


def bring_back(table: CallTable, entry: Entry, transcript: Transcript, *, keep: bool) -> LiveCall:
    """A call of the ledger, live again with its saved tokens (`keep`) or from its prompt."""
    call = table.carry_on(
        transcript.request,
        entry.call_id,
        entry.attempt,
        transcript.token_ids.tolist() if keep else (),
        transcript.logprobs.tolist() if keep else (),
        transcript.version_spans if keep else (),
        transcript.columns if keep else {},
    )
    if entry.ended is not None:
        call.settle_as_ended(*entry.ended)
    return call


def again(table: CallTable, live: LiveCall, stop: StopRules) -> LiveCall:
    """The same request while its call is in the table: a retry after an abort or error goes on where it was."""
    if live.in_use:
        raise InputError(
            f"request {live.request.rollout!r} is running already",
            hint="give every concurrent request an id of its own",
        )
    live.in_use = True
    if live.ended is not None:
        return live
    n = len(live.transcript_ids)
    plan = resume.plan(live.request, n, live.transcript_ids[-1] if n else None, stop)
    if n and isinstance(plan, resume.Restart):
        table.forget(live.call_id)
        return table.open(live.request, live.call_id, live.attempt + 1)
    return live
