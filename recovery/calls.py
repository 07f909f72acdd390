"""The table of live calls: who is open, what each has not yet handed over, and the cut across all of them.

Owns: one TokenBuffer, the not yet frozen `Opened`/`Ended` records and the transcript of every live call.
Does not know: asyncio, vLLM, the store. Everything here runs on the one loop that fills it.

Invariants:
1. `freeze` is synchronous and takes from every changed call in one go: that is the cut.
2. Per call and attempt, records leave in the order opened, runs by position, ended; none twice, none lost.
3. A call that was ended takes no more tokens; a call that was interrupted can be carried on at its end.
4. The cost of `freeze` is O(calls that changed since the last one), whatever the number of tokens.
5. What a store turned out not to have kept is handed over again, from the transcript (`rewind`). Until an end is known
   to be published (`settled`) its call stays here for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from recovery.buffer import Columns, Run, TokenBuffer
from recovery.kept_columns import KeptColumns
from recovery.model import MAX_TOKENS_PER_CHUNK, CallId, Ended, Opened, PolicyVersion, Request
from recovery.transcripts import ColumnRun

Captured = Opened | Run | Ended


@dataclass(frozen=True, slots=True)
class StoredUpTo:
    """What the ledger has of a call: `n_tokens` of it, and which attempt's records it takes next."""

    attempt: int
    n_tokens: int


Stored = Mapping[CallId, StoredUpTo | None]
"""By call; None: the ledger does not know the call (any more)."""


class LiveCall:
    """One attempt of one call in this process.

    `transcript_ids` (int32) and `transcript_logprobs` (float32, NaN where the engine gave none) hold all tokens
    of the call, a restored prefix included: what the caller's outputs are assembled from.
    """

    __slots__ = (
        "_buffer",
        "_ended",
        "_kept",
        "_opened",
        "_table",
        "attempt",
        "call_id",
        "ended",
        "in_use",
        "request",
        "settled",
        "transcript_ids",
        "transcript_logprobs",
    )

    def __init__(self, table: CallTable, request: Request, call_id: CallId, attempt: int) -> None:
        self._table = table
        self.request = request
        self.call_id = call_id
        self.attempt = attempt
        self._fill(TokenBuffer(call_id, attempt))
        self._kept = KeptColumns()
        self._opened: Opened | None = None
        self._ended: Ended | None = None
        self.ended: Ended | None = None
        self.in_use = True
        """A caller's stream is attached; False after an abort or error, until the same request comes again."""
        self.settled = False
        """Its end is in a published snapshot."""

    def _fill(self, buffer: TokenBuffer) -> None:
        self._buffer = buffer
        self.transcript_ids, self.transcript_logprobs = buffer.token_ids, buffer.logprobs

    @property
    def n_tokens(self) -> int:
        return self._buffer.end

    @property
    def n_pending(self) -> int:
        return self._buffer.n_pending

    @property
    def version_spans(self) -> list[tuple[int, int, PolicyVersion]]:
        """(start, end, version), contiguous over the transcript; a version is never changed afterwards."""
        spans = self._buffer.spans
        ends = [start for start, _ in spans[1:]] + [len(self.transcript_ids)] * bool(spans)
        return [(start, end, version) for (start, version), end in zip(spans, ends, strict=True)]

    @property
    def columns(self) -> Mapping[str, tuple[ColumnRun, ...]]:
        """The wide columns of all tokens so far, a restored prefix included, as a Transcript has them."""
        return self._kept.joined(self._buffer.pending)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version: PolicyVersion,
        columns: Columns = None,
    ) -> int:
        """Take what one engine output carried; all of it or, with an error, none of it. Returns `n_pending`.

        `columns` go to the store, and are kept here as long as the call is.

        Raises ValueError, TypeError or OverflowError for what cannot be stored: found here, where it came in, and not
        when the run is written.
        """
        if self.ended is not None:
            raise ValueError(f"call {self.request.rollout!r} has ended and takes no more tokens")
        n_pending = self._buffer.append(token_ids, logprobs, version, columns)
        self._table.changed_calls[self] = None
        return n_pending

    def end(self, finish_reason: str, stop_reason: int | str | None) -> Ended:
        """Make the call terminal. Raises ValueError for a reason that does not end a call."""
        if self.ended is None:
            self.ended = self._ended = Ended(
                call_id=self.call_id,
                attempt=self.attempt,
                n_tokens=self.n_tokens,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )
            self._table.changed_calls[self] = None
        return self.ended

    def settle_as_ended(self, finish_reason: str, stop_reason: int | str | None) -> None:
        """The store has the terminal record already: nothing of this call is written again."""
        self.end(finish_reason, stop_reason)
        self._ended = None
        self.settled = True

    def rewind(self, stored: StoredUpTo | None) -> None:
        """Hand over again what `stored` lacks.

        What is on its way to the store all the same is rejected there.
        """
        if self.settled or (stored is not None and stored.attempt > self.attempt):
            return
        first = stored.n_tokens if stored is not None and stored.attempt == self.attempt else 0
        if stored is None or stored.attempt < self.attempt:
            self._opened = Opened(call_id=self.call_id, attempt=self.attempt, request=self.request)
        for run in self._buffer.freeze():
            self._kept.keep(run)
        self._buffer.rewind(first)
        for start, end, version in self.version_spans:
            for at, stop, with_logprobs in self._alike(max(start, first), end):
                for piece in self._kept.between(at, stop):
                    own = slice(piece.start, piece.stop)
                    logprobs = self.transcript_logprobs[own] if with_logprobs else None
                    self._buffer.append(self.transcript_ids[own], logprobs, version, piece.columns)
        self._ended = self.ended
        self._table.changed_calls[self] = None

    def _alike(self, start: int, end: int) -> Iterable[tuple[int, int, bool]]:
        """[start, end) in runs that can be chunks: all with logprobs, or all without."""
        for absent, group in groupby(range(start, end), lambda i: math.isnan(self.transcript_logprobs[i])):
            positions = list(group)
            for at in range(positions[0], positions[-1] + 1, MAX_TOKENS_PER_CHUNK):
                yield at, min(at + MAX_TOKENS_PER_CHUNK, positions[-1] + 1), not absent

    def _move_to(self, taken: list[Captured]) -> None:
        if self._opened is not None:
            taken.append(self._opened)
            self._opened = None
        for run in self._buffer.freeze():
            taken.append(run)
            if run.columns:
                self._kept.keep(run)
        if self._ended is not None:
            taken.append(self._ended)
            self._ended = None


class CallTable:
    """All calls of one process that are open or whose records were not yet taken."""

    def __init__(self) -> None:
        self._calls: dict[CallId, LiveCall] = {}
        self.changed_calls: dict[LiveCall, None] = {}
        """Those that the next freeze takes from. By object: two attempts of one call may both have records that were
        not taken yet (invariant 2). Calls enter themselves, with no function called for each token."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[LiveCall]:
        return iter(self._calls.values())

    def get(self, call_id: CallId) -> LiveCall | None:
        return self._calls.get(call_id)

    def open(self, request: Request, call_id: CallId, attempt: int) -> LiveCall:
        """A call that no ledger knows yet; its `Opened` record goes with the next freeze."""
        call = self._add(request, call_id, attempt)
        call._opened = Opened(call_id=call_id, attempt=attempt, request=request)
        self.changed_calls[call] = None
        return call

    def carry_on(
        self,
        request: Request,
        call_id: CallId,
        attempt: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: Sequence[tuple[int, int, PolicyVersion]],
        columns: Mapping[str, tuple[ColumnRun, ...]] | None = None,
    ) -> LiveCall:
        """A call that a restore brought back with this prefix; the ledger has it at this attempt already."""
        call = self._add(request, call_id, attempt)
        begins = ((start, version) for start, _, version in version_spans)
        call._fill(TokenBuffer(call_id, attempt, token_ids, logprobs, begins))
        call._kept = KeptColumns(columns)
        return call

    def _add(self, request: Request, call_id: CallId, attempt: int) -> LiveCall:
        if call_id in self._calls:
            raise ValueError(f"call {request.rollout!r} is live already")
        call = self._calls[call_id] = LiveCall(self, request, call_id, attempt)
        return call

    def forget(self, call_id: CallId) -> None:
        """Drop an ended call once its caller has its result; what was not yet frozen still goes with a freeze."""
        self._calls.pop(call_id, None)

    def rewind(self, stored: Stored) -> None:
        """The store turned out to have only this of these calls; each hands over the rest again."""
        for call_id, what in stored.items():
            if (call := self._calls.get(call_id)) is not None:
                call.rewind(what)

    def settle(self, call_ids: Iterable[CallId]) -> None:
        """The ends of these calls are published."""
        for call_id in call_ids:
            if (call := self._calls.get(call_id)) is not None and call.ended is not None:
                call.settled = True

    def published(self, ended: Iterable[CallId]) -> None:
        """The ends of these calls are published; those that nobody reads any more are dropped."""
        self.settle(ended)
        for call in [call for call in self._calls.values() if call.settled and not call.in_use]:
            self.forget(call.call_id)

    def longest_pending(self) -> int:
        """Tokens of the call with the most unfrozen ones: what a crash now would cost one call."""
        return max((call.n_pending for call in self.changed_calls), default=0)

    def freeze(self, *, whole_calls: bool = False) -> list[Captured]:
        """The cut: everything captured since the last one, in order per call.

        `whole_calls`: only of calls that have ended; what the others have stays with them.
        """
        changed, self.changed_calls = self.changed_calls, {}
        if whole_calls:
            live = [call for call in changed if call.ended is None and self._calls.get(call.call_id) is call]
            self.changed_calls = dict.fromkeys(live)
            changed = dict.fromkeys(call for call in changed if call.ended is not None)
        taken: list[Captured] = []
        for call in changed:
            call._move_to(taken)
        return taken
