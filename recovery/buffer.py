"""What one call has produced and nobody has stored yet: append, freeze-and-swap.

Owns: the order of tokens, logprobs and versions of one attempt of one call until they are frozen.
Does not know: the event loop, the store, other calls (calls.py), how runs become chunks on disk.

Invariants:
1. `append` and `freeze` are synchronous and touch only this buffer, so a caller on one event loop sees either all
   of an engine output or none of it: never a token without its logprob.
2. `freeze` hands over bounds and copies nothing: its cost does not depend on how many tokens are held. Tokens are held
   once: in the call's two arrays, which only grow.
3. A frozen run is never touched again. Successive runs are contiguous and no run spans two policy versions.
4. A run has the same wide columns from its first token to its last, and never more than a chunk may have. What
   `append` is given is copied there and then: the caller may use its arrays again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recovery.model import (
    COLUMN_BYTES_PER_CHUNK_MAX,
    MAX_TOKENS_PER_CHUNK,
    Array,
    CallId,
    Chunk,
    PolicyVersion,
    WideColumn,
    wide_columns,
)


class Rows(NamedTuple):
    """The wide columns of `n_tokens` tokens: which, ordered by name, and the bytes of each, in this machine's order.

    What takes every token of every call makes these itself: an array costs more than the token it comes with.
    """

    n_tokens: int
    wide: tuple[WideColumn, ...]
    values: tuple[bytes, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Array], n_tokens: int) -> Rows:
        """Raises TypeError or ValueError if they cannot be wide columns of so many tokens."""
        wide = wide_columns(arrays, n_tokens)
        return cls(n_tokens, wide, tuple(arrays[column.name].tobytes() for column in wide))

    def arrays(self) -> dict[str, Array]:
        """By name."""
        return _arrays(self.n_tokens, self.wide, self.values)


def _arrays(n_tokens: int, wide: Iterable[WideColumn], values: Iterable[bytes | bytearray]) -> dict[str, Array]:
    return {
        column.name: np.frombuffer(held, column.type).reshape(column.shape(n_tokens))
        for column, held in zip(wide, values, strict=True)
    }


Columns = Mapping[str, Array] | Rows | None
"""Wide columns by name, one row for each token; or that as bytes; or none."""


@dataclass(slots=True)
class Run:
    """Tokens [start, stop) of a call under one version, all with logprobs or all without.

    They lie in the call's own arrays, which go on being extended. `columns`: the bytes of each of the wide columns
    `wide`, in this machine's order, row by row. With them a run has at most `room` tokens.
    """

    call_id: CallId
    attempt: int
    start: int
    stop: int
    version: PolicyVersion
    of_ids: array[int]
    of_logprobs: array[float]
    has_logprobs: bool = True
    wide: tuple[WideColumn, ...] = ()
    columns: tuple[bytearray, ...] = ()
    room: int = MAX_TOKENS_PER_CHUNK

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def token_ids(self) -> array[int]:
        """A copy, int32."""
        return self.of_ids[self.start : self.stop]

    @property
    def logprobs(self) -> array[float] | None:
        """A copy, float32."""
        return self.of_logprobs[self.start : self.stop] if self.has_logprobs else None

    def arrays(self, *, copy: bool = False) -> dict[str, Array]:
        """The wide columns by name. Without a copy the run takes no more tokens."""
        return _arrays(len(self), self.wide, map(bytes, self.columns) if copy else self.columns)

    def to_chunk(self) -> Chunk:
        """The run as arrays. Costs O(tokens): called off the event loop."""
        logprobs = self.logprobs
        return Chunk(
            call_id=self.call_id,
            attempt=self.attempt,
            start=self.start,
            token_ids=np.frombuffer(self.token_ids, np.int32),
            logprobs=None if logprobs is None else np.frombuffer(logprobs, np.float32),
            mask=np.ones(len(self), dtype=np.bool_),
            version=self.version,
            columns=self.arrays(),
        )


_NONE: Sequence[Run] = ()
"""One for all: a cut makes no object for each call, so that it does not call for a collection of garbage."""


class TokenBuffer:
    """The tokens of one attempt of one call, a restored prefix included, and which of them no freeze has taken.

    `token_ids` (int32) and `logprobs` (float32, NaN for none) only ever grow, so that another thread may read runs of
    them. `spans`: (start, version), where each policy version begins; the last goes on.
    """

    __slots__ = ("_attempt", "_call_id", "_runs", "end", "logprobs", "n_pending", "spans", "token_ids")

    def __init__(
        self,
        call_id: CallId,
        attempt: int,
        token_ids: Iterable[int] = (),
        logprobs: Iterable[float] = (),
        spans: Iterable[tuple[int, PolicyVersion]] = (),
    ) -> None:
        """Those given are the prefix: stored already."""
        self._call_id = call_id
        self._attempt = attempt
        self.token_ids = array("i", token_ids)
        self.logprobs = array("f", logprobs)
        self.spans = list(spans)
        self.end = len(self.token_ids)
        """Tokens so far. Below the length of `token_ids` only while they are appended again."""
        self.n_pending = 0
        """Tokens that the next freeze would take."""
        self._runs: Sequence[Run] = _NONE

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version: PolicyVersion,
        columns: Columns = None,
    ) -> int:
        """Add what one engine output carried. Returns `n_pending`.

        Raises ValueError, TypeError or OverflowError, changing nothing, if it is not one run of what can be stored.
        """
        n = len(token_ids)
        has_logprobs = logprobs is not None
        if has_logprobs and len(logprobs) != n:  # type: ignore[arg-type]
            raise ValueError(f"{n} tokens came with {len(logprobs)} logprobs")  # type: ignore[arg-type]
        wide: tuple[WideColumn, ...] = ()
        values: tuple[bytes, ...] = ()
        if columns:
            n_rows, wide, values = columns if isinstance(columns, Rows) else Rows.of(columns, n)
            if n_rows != n:
                raise ValueError(f"{n} tokens came with {n_rows} rows of wide columns")
        if n == 0:
            return self.n_pending
        run, first = self._runs[-1] if self._runs else None, self.end
        # By identity: this is done for every token, and what is the same is mostly the same object.
        if (
            run is None
            or run.version is not version
            or run.has_logprobs is not has_logprobs
            or run.wide is not wide
            or first + n - run.start > run.room
        ):
            run = self._run_for(n, has_logprobs, version, wide)
        if first == len(self.token_ids):
            self._extend(token_ids, logprobs, n)
        if run.stop == run.start:
            self._begin(run)
        self.end = run.stop = first + n
        self.n_pending += n
        for at, rows in enumerate(values):
            held = run.columns[at]
            held += rows
        return self.n_pending

    def _extend(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, n: int) -> None:
        try:
            if n == 1:
                self.token_ids.append(token_ids[0])
                self.logprobs.append(math.nan if logprobs is None else logprobs[0])
            else:
                self.token_ids.extend(token_ids)
                self.logprobs.extend([math.nan] * n if logprobs is None else logprobs)
        except BaseException:
            del self.token_ids[self.end :], self.logprobs[self.end :]
            raise

    def _run_for(self, n: int, has_logprobs: bool, version: PolicyVersion, wide: tuple[WideColumn, ...]) -> Run:
        """The run that is under way, if `n` such tokens can be of it, or else a new one, which has none yet."""
        run = self._runs[-1] if self._runs else None
        if (
            run is not None
            and run.version == version
            and run.has_logprobs == has_logprobs
            and run.wide == wide
            and len(run) + n <= run.room
        ):
            return run
        if n > (room := tokens_max(wide)):
            with_these = " with these columns" if wide else ""
            raise ValueError(f"one output carried {n} tokens; at most {room}{with_these} fit in a chunk")
        empty = tuple(bytearray() for _ in wide)
        own = (self.token_ids, self.logprobs)
        return Run(self._call_id, self._attempt, self.end, self.end, version, *own, has_logprobs, wide, empty, room)

    def _begin(self, run: Run) -> None:
        self._runs = [*self._runs, run]
        start, before = self.spans[-1] if self.spans else (-1, None)
        if before != run.version and run.start > start:
            self.spans.append((run.start, run.version))

    def rewind(self, first: int) -> None:
        """All tokens from `first` on are to be stored again, and are appended again for that: none is added twice."""
        self.end, self.n_pending, self._runs = first, 0, _NONE

    @property
    def pending(self) -> Sequence[Run]:
        """What the next freeze would take; not to be changed."""
        return self._runs

    def freeze(self) -> Sequence[Run]:
        """Everything appended since the last freeze; the buffer holds none of it afterwards. No token is copied."""
        frozen, self._runs = self._runs, _NONE
        self.n_pending = 0
        return frozen


def tokens_max(wide: tuple[WideColumn, ...]) -> int:
    """How many tokens one chunk may have with these columns."""
    if not wide:
        return MAX_TOKENS_PER_CHUNK
    return min(MAX_TOKENS_PER_CHUNK, COLUMN_BYTES_PER_CHUNK_MAX // sum(column.row_nbytes for column in wide))
