"""A call's request and tokens, put together when they are asked for.

Owns: how stretches of tokens, each where it lies, make one call.
Does not know: segments, the ledger, who checked what a stretch holds (gathering.py).

Invariants:
1. Nothing is copied before it is asked for, and then once: a transcript that nobody looks at costs its stretches.
2. An array is joined of whole stretches; no Python object is made per token. One that is a single stretch is a view,
   read-only if what it lies in is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from recovery.model import Array, BoolArray, Chunk, Float32Array, Int32Array, PolicyVersion, Request


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """The values of one wide column for the tokens [start, start + len(values))."""

    start: int
    values: Array

    @property
    def stop(self) -> int:
        return self.start + int(self.values.shape[0])


class Held(NamedTuple):
    """Tokens of many chunks of many calls, end to end."""

    token_ids: Int32Array
    logprobs: Float32Array
    mask: BoolArray


class Stretch(NamedTuple):
    """A chunk as part of a transcript: `n_tokens` of each array of `held`, from the positions `at` on (-1: none)."""

    start: int
    n_tokens: int
    version: PolicyVersion
    held: Held
    at: Sequence[int]
    columns: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Transcript:
    """A call's request and all its stored tokens, of contiguous stretches."""

    request: Request
    stretches: Sequence[Stretch]

    @cached_property
    def token_ids(self) -> Int32Array:
        return self._joined(0, np.int32)

    @cached_property
    def logprobs(self) -> Float32Array:
        """NaN where none was captured."""
        return self._joined(1, np.float32)

    @cached_property
    def mask(self) -> BoolArray:
        return self._joined(2, np.bool_)

    def _joined(self, column: int, dtype: Any) -> Array:
        parts = [
            held[column][at[column] : at[column] + n] if at[column] >= 0 else np.full(n, np.nan, dtype)
            for _, n, _, held, at, _ in self.stretches
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    @cached_property
    def version_spans(self) -> tuple[tuple[int, int, PolicyVersion], ...]:
        """(start, end, version), contiguous over the tokens."""
        spans: list[tuple[int, int, PolicyVersion]] = []
        for stretch in self.stretches:
            begin = spans.pop()[0] if spans and spans[-1][2] == stretch.version else stretch.start
            spans.append((begin, stretch.start + stretch.n_tokens, stretch.version))
        return tuple(spans)

    @cached_property
    def columns(self) -> Mapping[str, tuple[ColumnRun, ...]]:
        """The wide columns by name, each in the longest runs that can be joined, in order.

        One that every chunk has, of one type and width, is one run over all tokens. Where there is no run the column
        was not captured: nothing is made up for it.
        """
        return joined_columns((stretch.start, stretch.columns) for stretch in self.stretches)


def assemble(request: Request, chunks: Iterable[Chunk]) -> Transcript:
    """Contiguous chunks of one call, in order, as one transcript."""
    return Transcript(request, [_stretch(chunk) for chunk in chunks])


def _stretch(chunk: Chunk) -> Stretch:
    logprobs, logprob_at = (_NO_LOGPROBS, -1) if chunk.logprobs is None else (chunk.logprobs, 0)
    held = Held(chunk.token_ids, logprobs, chunk.mask)
    return Stretch(chunk.start, chunk.stop - chunk.start, chunk.version, held, (0, logprob_at, 0), chunk.columns)


_NO_LOGPROBS = np.empty(0, np.float32)


def joined_columns(pieces: Iterable[tuple[int, Mapping[str, Array]]]) -> dict[str, tuple[ColumnRun, ...]]:
    """`pieces`: the start of each chunk of a call and its wide columns, in order."""
    runs: dict[str, list[list[tuple[int, Array]]]] = {}
    for start, columns in pieces:
        for name in sorted(columns):
            values, known = columns[name], runs.setdefault(name, [])
            if known and _goes_on(*known[-1][-1], start, values):
                known[-1].append((start, values))
            else:
                known.append([(start, values)])
    return {
        name: tuple(ColumnRun(run[0][0], np.concatenate([values for _, values in run])) for run in runs[name])
        for name in sorted(runs)
    }


def _goes_on(start: int, values: Array, next_start: int, next_values: Array) -> bool:
    """Whether the second stretch of a column is joined to the first."""
    same = values.dtype == next_values.dtype and values.shape[1:] == next_values.shape[1:]
    return same and start + values.shape[0] == next_start
