"""The attempts of one server process: its session's calls by attempt id, and the connections that wait or are served.

Owns: what the effects of recovery.reconnection do here, and what is known of an attempt.
Does not know: HTTP, the handlers. Runs on the event loop.

Invariants:
1. A connection has left only when its calls are not generated any more: its successor finds every token of theirs.
2. What is forgotten here is forgotten by the ledger with the next snapshot, and not before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from recovery.calls import LiveCall
from recovery.errors import Damaged
from recovery.model import CallId, Resumed
from recovery.reconnection import Begin, Claim, Effect, End, Forget, JustForgotten, Reconnection, Refusal
from vllm_hooks.server_engine import Serving, attempt_of_name
from vllm_hooks.session import RecoverySession

KEEP = 10_000
"""Idle attempts that are remembered: ended ones, to be answered again, and those whose client has not come back."""

_LEAVING_S = 5.0
"""For handlers that were told to end: longer would be of the time for the last snapshot."""


@dataclass(slots=True)
class Connection:
    """`begun`: it is its turn. `ended`: a newer one of its attempt came, or the server ends."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Attempts:
    """Made on the loop, of a started session that nothing was admitted to yet."""

    def __init__(self, session: RecoverySession, keep: int = KEEP) -> None:
        self._session = session
        self._book = Reconnection(keep)
        self._connections: dict[int, Connection] = {}
        self._numbers = count()
        self._calls: dict[str, dict[CallId, None]] = {}
        self.records: dict[str, str] = {}
        """By the names of calls that are being asked for; see RecoverySession.source_digests."""
        self._forgotten: dict[str, int] = {}
        """What was forgotten and the store may still have, with the first cut that is without it; oldest first."""
        session.on_left = self._note
        self._do(self._book.restore(self._stored()))

    def _stored(self) -> Iterable[Claim]:
        for entry in self._session.stored.entries():
            attempt = attempt_of_name(entry.identity.rollout)
            if attempt is None:
                continue
            try:
                claim = Claim.from_record(attempt, entry.identity.source_digest)
            except ValueError as error:
                raise Damaged(
                    str(error), hint="is this the store of a server? Give the server a store of its own"
                ) from error
            self._calls.setdefault(attempt, {})[entry.call_id] = None
            yield claim

    def _note(self, call: LiveCall) -> None:
        attempt = _attempt_of(call)
        if attempt is not None:
            self._calls.setdefault(attempt, {})[call.call_id] = None
            self._book.kept(attempt)

    def is_owned(self, attempt: str, key: str) -> bool:
        """Whether an attempt that is known belongs to who shows this key."""
        return self._book.owner(attempt) == Claim.owner_of(attempt, key)

    @asynccontextmanager
    async def connection(self, claim: Claim, serving: Serving) -> AsyncIterator[Connection | Refusal]:
        """A connection from its arrival to its end, whatever ends it. It may have to wait for its turn."""
        number, made = next(self._numbers), Connection()
        self._connections[number] = made
        effects = JustForgotten() if self._is_just_forgotten(claim.attempt) else self._book.arrive(claim, number)
        if not isinstance(effects, list):
            del self._connections[number]
            yield effects
            return
        self._do(effects)
        try:
            yield made
        finally:
            try:
                await serving.close()
            finally:
                for name in serving.streams:
                    self.records.pop(name, None)
                del self._connections[number]
                self._do(self._book.left(number))

    async def end_all(self) -> None:
        """Every connection is told to end. Returns when all have left, or at a time limit; nobody may arrive then."""
        for one in self._connections.values():
            one.ended.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty(), _LEAVING_S)

    async def _empty(self) -> None:
        while self._connections:
            await asyncio.sleep(0.005)

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Begin(connection=number):
                    self._connections[number].begun.set()
                case End(connection=number):
                    self._connections[number].ended.set()
                case Forget(attempt=attempt):
                    calls = self._calls.pop(attempt, {})
                    for call_id in calls:
                        self._session.forget(call_id)
                    if calls:
                        self._forgotten[attempt] = self._session.stored.next_cut

    def _is_just_forgotten(self, attempt: str) -> bool:
        """Until a snapshot without it is published: who asks would be told its answer, and a crash bring it back; and
        what is generated meanwhile would be a second answer to a call that has one."""
        stored = self._session.stored
        while self._forgotten and stored.is_said(next(iter(self._forgotten.values()))):
            del self._forgotten[next(iter(self._forgotten))]
        if attempt not in self._forgotten:
            return False
        self._session.want_snapshot("forget")  # nobody has asked for one if it was only idle for long
        return True

    def forget(self, attempt: str) -> bool:
        """Whether it could be forgotten: it is known, and has no connection."""
        effects = self._book.forget(attempt)
        if effects:
            self._session.want_snapshot("forget")
        self._do(effects)
        return bool(effects)

    def describe(self, attempt: str) -> dict[str, Any] | None:
        """For its owner; None if it is not known."""
        if not self._book.is_known(attempt):
            return None
        live = self._book.is_live(attempt)
        known = dict(self._calls.get(attempt, {}))
        if live:
            known |= {call.call_id: None for call in self._session.table if _attempt_of(call) == attempt}
        calls = [of for call_id in known if (of := self._of(call_id)) is not None]
        ended = bool(calls) and all(call["finish_reason"] for call in calls)
        return {
            "attempt": attempt,
            "state": "connected" if live else ("ended" if ended else "interrupted"),
            "calls": sorted(calls, key=lambda call: str(call["name"])),
        }

    def _of(self, call_id: CallId) -> dict[str, Any] | None:
        """The newest that is known, here or in the store; nothing of a call that is on its way between the two."""
        live, entry = self._session.table.get(call_id), self._session.stored.entry(call_id)
        if live is not None:
            name, n_tokens, reason = live.request.rollout, live.n_tokens, live.ended and live.ended.finish_reason
        elif entry is not None:
            name, n_tokens, reason = entry.identity.rollout, entry.n_tokens, entry.ended and entry.ended[0]
        else:
            return None
        resumed = [one.at for one in self._session.stored.history(call_id) if isinstance(one, Resumed)]
        return {"name": name, "n_tokens": n_tokens, "finish_reason": reason, "resumed_at": resumed}

    def status(self) -> dict[str, Any]:
        """Of this process since its start."""
        session, (live, idle) = self._session, self._book.counts()
        counters = session.counters
        return {
            "epoch": session.stored.epoch,
            "attempts_connected": live,
            "attempts_idle": idle,
            "calls_restored": counters.calls_restored,
            "tokens_reused": counters.tokens_reused,
            "tokens_captured": counters.tokens_captured,
            "tokens_pending": session.table.longest_pending(),
            "flushing": session.stager.busy,
            "snapshots": counters.snapshots,
            "snapshots_abandoned": counters.snapshots_abandoned,
            "last_snapshot": counters.last_snapshot,
            "exactness": session.parity.grade,
            "restart_only": dict(session.unresumable.restart_only),
            "uncaptured": dict(session.unresumable.uncaptured),
            "troubles": [str(one) for one in session.troubles],
            "failure": str(session.failure) if session.failure else None,
        }


def _attempt_of(call: LiveCall) -> str | None:
    return attempt_of_name(call.request.rollout)
