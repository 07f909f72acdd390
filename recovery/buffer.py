"""What one call has produced and nobody has stored yet: append, freeze-and-swap.

Owns: the order of tokens, logprobs and versions of one attempt of one call until they are frozen.
Does not know: the event loop, the store, other calls (calls.py), how runs become chunks on disk.

Invariants:
1. `append` and `freeze` are synchronous and touch only this buffer, so a caller on one event loop sees either all
   of an engine output or none of it: never a token without its logprob.
2. `freeze` swaps lists and copies nothing: its cost does not depend on how many tokens are held.
3. A frozen run is never touched again. Successive runs are contiguous and no run spans two policy versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from recovery.model import MAX_TOKENS_PER_CHUNK, CallId, Chunk, PolicyVersion


@dataclass(slots=True)
class Run:
    """Tokens [start, start + len(token_ids)) under one version; `logprobs` is None or as long as `token_ids`."""

    call_id: CallId
    attempt: int
    start: int
    version: PolicyVersion
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None

    def to_chunk(self) -> Chunk:
        """The run as arrays. Costs O(tokens): called off the event loop."""
        n = len(self.token_ids)
        return Chunk(
            call_id=self.call_id,
            attempt=self.attempt,
            start=self.start,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=None if self.logprobs is None else np.asarray(self.logprobs, dtype=np.float32),
            mask=np.ones(n, dtype=np.bool_),
            version=self.version,
        )


class TokenBuffer:
    """Unfrozen tokens of one attempt of one call, from position `start` on."""

    __slots__ = ("_attempt", "_call_id", "_end", "_n_pending", "_runs")

    def __init__(self, call_id: CallId, attempt: int, start: int = 0) -> None:
        self._call_id = call_id
        self._attempt = attempt
        self._end = start
        self._n_pending = 0
        self._runs: list[Run] = []

    @property
    def end(self) -> int:
        """Tokens of the call so far, frozen ones included."""
        return self._end

    @property
    def n_pending(self) -> int:
        """Tokens that the next freeze would take."""
        return self._n_pending

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, version: PolicyVersion) -> None:
        """Add what one engine output carried. Raises ValueError, and changes nothing, if it cannot be one run."""
        n = len(token_ids)
        if logprobs is not None and len(logprobs) != n:
            raise ValueError(f"{n} tokens came with {len(logprobs)} logprobs")
        if n > MAX_TOKENS_PER_CHUNK:
            raise ValueError(f"one output carried {n} tokens; at most {MAX_TOKENS_PER_CHUNK} fit in a chunk")
        if n == 0:
            return
        run = self._runs[-1] if self._runs else None
        if (
            run is None
            or run.version != version
            or (run.logprobs is None) != (logprobs is None)
            or len(run.token_ids) + n > MAX_TOKENS_PER_CHUNK
        ):
            run = Run(self._call_id, self._attempt, self._end, version, [], None if logprobs is None else [])
            self._runs.append(run)
        run.token_ids.extend(token_ids)
        if logprobs is not None and run.logprobs is not None:
            run.logprobs.extend(logprobs)
        self._end += n
        self._n_pending += n

    def freeze(self) -> list[Run]:
        """Everything appended since the last freeze; the buffer is empty afterwards."""
        frozen, self._runs = self._runs, []
        self._n_pending = 0
        return frozen
