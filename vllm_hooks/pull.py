"""The pull capture: reading the front end's own per-request state at a cut, instead of having every token delivered.

Owns: which of vLLM's semi-private attributes are read (the same that vLLM's own RL router reads), and what was taken.
Does not know: buffers, stores; capturing.py decides when to read.

A FINAL_ONLY caller's request then costs nothing per token; the wrapper capture would have to stream it.

Invariants:
1. Read on the event loop between two outputs, a request's ids and logprobs are of the same length: vLLM applies both in
   one synchronous step.
2. What was pulled is a prefix of what the engine delivers at the end; if not, the capture stops the job by name.
3. Used only where the self-test (parity.py) saw it agree with delivered deltas, and only for requests whose delivered
   ids cannot be trimmed afterwards (no stop strings).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recovery.buffer import Columns
from recovery.calls import LiveCall
from recovery.errors import CaptureDisagrees
from recovery.model import CallId
from vllm_hooks import surface, top_logprobs

POLL_S_MIN, POLL_S_MAX = 0.002, 0.1
"""How often the loop looks whether a flush is due; a look costs some two microseconds per live call."""

TOKENS_PER_POLL_MAX, POLLS_PER_FLUSH = 8, 32
"""What a look finds is not lost with a call that is cancelled, and tells that a flush is due: so many looks between two
flushes are enough, and a look costs much the same whatever it finds."""


def tokens_per_poll(flush_tokens: int) -> int:
    """The polling slows down or speeds up towards this many new tokens of a call between two looks."""
    return max(1, min(TOKENS_PER_POLL_MAX, (flush_tokens or TOKENS_PER_POLL_MAX * POLLS_PER_FLUSH) // POLLS_PER_FLUSH))


class Taken(NamedTuple):
    """Ids and sampled logprobs, and the columns of top_logprobs.py if they are kept."""

    token_ids: list[int]
    logprobs: list[float]
    columns: Columns = None


_NOTHING = Taken([], [])


class PullReader:
    """Reads one engine's front end."""

    def __init__(self, engine: Any) -> None:
        self._processor = getattr(engine, "output_processor", None)

    @property
    def readable(self) -> bool:
        """Whether this engine has the attributes at all."""
        names = ("request_states", "external_req_ids")
        return self._processor is not None and all(hasattr(self._processor, name) for name in names)

    def read(self, request_id: str, start: int, n_top: int | None = None) -> Taken:
        """A running request from token `start` on; nothing if it is not running."""
        processor: Any = self._processor
        internal = processor.external_req_ids.get(request_id, ())
        if len(internal) != 1:
            return _NOTHING
        state = processor.request_states.get(internal[0])
        if state is None or state.detokenizer is None or state.logprobs_processor is None:
            return _NOTHING
        ids = state.detokenizer.output_token_ids
        if len(ids) == start:
            return _NOTHING
        fresh = ids[start:]
        return Taken(fresh, *top_logprobs.captured_of(state.logprobs_processor.logprobs, fresh, start, n_top))


@dataclass(slots=True)
class Pulled:
    """A running call that is read instead of streamed. `n_top`: see top_logprobs.n_kept.

    What was read is the call's transcript from `first` on, where this engine request began.
    """

    call: LiveCall
    reader: PullReader
    request_id: str
    n_top: int | None
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = len(self.call.transcript_ids)

    def read(self) -> Taken:
        """What the call does not have yet."""
        return self.reader.read(self.request_id, len(self.call.transcript_ids) - self.first, self.n_top)

    def rest(self, token_ids: Sequence[int], logprobs: Any) -> Taken:
        """What the engine's last output adds to what was read. Raises CaptureDisagrees."""
        taken = self.call.transcript_ids[self.first :]
        start = len(taken)
        if list(token_ids[:start]) != taken.tolist():
            raise CaptureDisagrees(
                f"request {self.request_id!r}: the tokens read at a cut are not those that the engine delivered",
                hint="report this with the vLLM version; run with --no-self-test, which captures by the wrapper alone",
            )
        fresh = list(token_ids[start:])
        return Taken(fresh, *top_logprobs.captured_of(logprobs, fresh, start, self.n_top))


class Polling:
    """All pulled calls of a session, and how often they are read. Runs on the event loop.

    `captured(call, ids, logprobs, columns)` takes what was read, all of it, before the call is read again.
    """

    def __init__(
        self, captured: Callable[[LiveCall, list[int], list[float], Columns], None], flush_tokens: int
    ) -> None:
        self._captured = captured
        self._tokens_per_poll = tokens_per_poll(flush_tokens)
        self._pulled: dict[CallId, Pulled] = {}
        self._scheduled = self._closed = False
        self._every_s = POLL_S_MIN

    def add(self, pulled: Pulled) -> Pulled:
        self._pulled[pulled.call.call_id] = pulled
        if not self._scheduled:
            self._schedule()
        return pulled

    def remove(self, call: LiveCall) -> None:
        """Read a call for the last time, if it is pulled."""
        pulled = self._pulled.pop(call.call_id, None)
        if pulled is not None and call.ended is None:
            self._captured(call, *pulled.read())

    def read_all(self) -> int:
        """Read every call. Returns the most new tokens that one of them had."""
        most = 0
        for pulled in self._pulled.values():
            if pulled.call.ended is None:
                fresh = pulled.read()
                if fresh is not _NOTHING:
                    self._captured(pulled.call, *fresh)
                    most = max(most, len(fresh.token_ids))
        return most

    def close(self) -> None:
        """Read no more of its own accord."""
        self._closed = True

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(self._every_s, self._poll)

    def _poll(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        most = self.read_all()
        wanted = self._tokens_per_poll
        factor = 0.5 if most > wanted else (1.5 if most < wanted else 1.0)
        self._every_s = min(POLL_S_MAX, max(POLL_S_MIN, self._every_s * factor))
        if self._pulled:
            self._schedule()


def can_pull(params: Any) -> bool:
    """Whether a request may be read instead of streamed."""
    return surface.is_final_only(params) and not params.stop
