"""What one call has produced and nobody has stored yet: append, freeze-and-swap.

Owns: the order of tokens, logprobs and versions of one attempt of one call until they are frozen.
Does not know: the event loop, the store, other calls (calls.py), how runs become chunks on disk.

Invariants:
1. `append` and `freeze` are synchronous and touch only this buffer, so a caller on one event loop sees either all
   of an engine output or none of it: never a token without its logprob.
2. `freeze` swaps lists and copies nothing: its cost does not depend on how many tokens are held.
3. A frozen run is never touched again. Successive runs are contiguous and no run spans two policy versions.
4. A run has the same wide columns from its first token to its last, and never more than a chunk may have. What
   `append` is given is copied there and then: the caller may use its arrays again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """Tokens [start, start + len(token_ids)) under one version; `logprobs` is None or as long as `token_ids`.

    `columns`: the bytes of each of the wide columns `wide`, in this machine's order, row by row. With them a run has at
    most `room` tokens.
    """

    call_id: CallId
    attempt: int
    start: int
    version: PolicyVersion
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    wide: tuple[WideColumn, ...] = ()
    columns: tuple[bytearray, ...] = ()
    room: int = MAX_TOKENS_PER_CHUNK

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)

    def arrays(self, *, copy: bool = False) -> dict[str, Array]:
        """The wide columns by name. Without a copy the run takes no more tokens."""
        return _arrays(len(self.token_ids), self.wide, map(bytes, self.columns) if copy else self.columns)

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
            columns=self.arrays(),
        )


_NONE: Sequence[Run] = ()
"""One for all: a cut makes no object for each call, so that it does not call for a collection of garbage."""


class TokenBuffer:
    """Unfrozen tokens of one attempt of one call, from position `start` on."""

    __slots__ = ("_attempt", "_call_id", "_end", "_n_pending", "_runs")

    def __init__(self, call_id: CallId, attempt: int, start: int = 0) -> None:
        self._call_id = call_id
        self._attempt = attempt
        self._end = start
        self._n_pending = 0
        self._runs: Sequence[Run] = _NONE

    @property
    def end(self) -> int:
        """Tokens of the call so far, frozen ones included."""
        return self._end

    @property
    def n_pending(self) -> int:
        """Tokens that the next freeze would take."""
        return self._n_pending

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        version: PolicyVersion,
        columns: Columns = None,
    ) -> None:
        """Add what one engine output carried.

        Raises ValueError or TypeError, changing nothing, if it is not one run.
        """
        n = len(token_ids)
        if logprobs is not None and len(logprobs) != n:
            raise ValueError(f"{n} tokens came with {len(logprobs)} logprobs")
        if n > MAX_TOKENS_PER_CHUNK:
            raise ValueError(f"one output carried {n} tokens; at most {MAX_TOKENS_PER_CHUNK} fit in a chunk")
        wide: tuple[WideColumn, ...] = ()
        values: tuple[bytes, ...] = ()
        if columns:
            n_rows, wide, values = columns if isinstance(columns, Rows) else Rows.of(columns, n)
            if n_rows != n:
                raise ValueError(f"{n} tokens came with {n_rows} rows of wide columns")
        if n == 0:
            return
        run = self._runs[-1] if self._runs else None
        # Identity first: versions are compared for every token, and are the same object as long as they are the same.
        if (
            run is None
            or (run.version is not version and run.version != version)
            or (run.logprobs is None) != (logprobs is None)
            or len(run.token_ids) + n > run.room
            or run.wide != wide
        ):
            if n > (room := tokens_max(wide)):
                raise ValueError(f"one output carried {n} tokens; at most {room} with these columns fit in a chunk")
            given: list[float] | None = None if logprobs is None else []
            empty = tuple(bytearray() for _ in wide)
            run = Run(self._call_id, self._attempt, self._end, version, [], given, wide, empty, room)
            self._runs = [*self._runs, run]
        run.token_ids.extend(token_ids)
        if logprobs is not None and run.logprobs is not None:
            run.logprobs.extend(logprobs)
        if wide:
            for at, rows in enumerate(values):
                run.columns[at].extend(rows)
        self._end += n
        self._n_pending += n

    @property
    def pending(self) -> Sequence[Run]:
        """What the next freeze would take; not to be changed."""
        return self._runs

    def freeze(self) -> Sequence[Run]:
        """Everything appended since the last freeze; the buffer is empty afterwards."""
        frozen, self._runs = self._runs, _NONE
        self._n_pending = 0
        return frozen


def tokens_max(wide: tuple[WideColumn, ...]) -> int:
    """How many tokens one chunk may have with these columns."""
    if not wide:
        return MAX_TOKENS_PER_CHUNK
    return min(MAX_TOKENS_PER_CHUNK, COLUMN_BYTES_PER_CHUNK_MAX // sum(column.row_nbytes for column in wide))
