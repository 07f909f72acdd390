"""A call's request and tokens, put together when they are asked for.

Owns: how chunks of tokens, each where it lies, make one call.
Does not know: segments, the ledger, who checked what a chunk holds (gathering.py).

Invariants:
1. Nothing is copied before it is asked for, and then once: a transcript that nobody looks at costs three fields.
2. An array is joined of whole chunks; no Python object is made per token. One that is a single chunk is a view,
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


PLACE = np.dtype(
    [(name, np.int64) for name in ("start", "n_tokens", "version", "held", "token_at", "logprob_at", "mask_at")]
)
"""Where a chunk lies: in arrays of which Held, and from which position on in each (-1: it has none)."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Chunks of many calls. `places` has a row of int64 for each, the fields of PLACE; in it versions and Helds have
    numbers, and so have chunks in `wide`, which has their wide columns."""

    places: Array
    held: Sequence[Held]
    versions: Sequence[PolicyVersion]
    wide: Mapping[int, Mapping[str, Array]]

    def rows(self, chunks: range) -> list[list[int]]:
        """The places of these chunks, which follow one another."""
        rows: list[list[int]] = self.places[chunks.start : chunks.stop].tolist()
        return rows


def as_rows(places: Array) -> Array:
    """An array of dtype PLACE as rows of int64, the same memory."""
    return places.view(np.int64).reshape(-1, PLACE.itemsize // 8)


@dataclass(frozen=True, eq=False)
class Transcript:
    """A call's request and all its stored tokens: those of `chunks`, which are contiguous."""

    request: Request
    placed: Placed
    chunks: range

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
        held, parts = self.placed.held, []
        for row in self.placed.rows(self.chunks):
            n, at = row[1], row[4 + column]
            parts.append(held[row[3]][column][at : at + n] if at >= 0 else np.full(n, np.nan, dtype))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    @cached_property
    def version_spans(self) -> tuple[tuple[int, int, PolicyVersion], ...]:
        """(start, end, version), contiguous over the tokens."""
        spans: list[tuple[int, int, PolicyVersion]] = []
        for start, n, number, *_ in self.placed.rows(self.chunks):
            version = self.placed.versions[number]
            begin = spans.pop()[0] if spans and spans[-1][2] == version else start
            spans.append((begin, start + n, version))
        return tuple(spans)

    @cached_property
    def columns(self) -> Mapping[str, tuple[ColumnRun, ...]]:
        """The wide columns by name, each in the longest runs that can be joined, in order.

        One that every chunk has, of one type and width, is one run over all tokens. Where there is no run the column
        was not captured: nothing is made up for it.
        """
        starts, wide = (row[0] for row in self.placed.rows(self.chunks)), self.placed.wide
        return joined_columns((start, wide.get(chunk, {})) for chunk, start in zip(self.chunks, starts, strict=True))


def assemble(request: Request, chunks: Iterable[Chunk]) -> Transcript:
    """Contiguous chunks of one call, in order, as one transcript."""
    held: list[Held] = []
    versions: list[PolicyVersion] = []
    wide: dict[int, Mapping[str, Array]] = {}
    places: list[tuple[int, ...]] = []
    for number, chunk in enumerate(chunks):
        logprobs, logprob_at = (_NO_LOGPROBS, -1) if chunk.logprobs is None else (chunk.logprobs, 0)
        held.append(Held(chunk.token_ids, logprobs, chunk.mask))
        versions.append(chunk.version)
        wide[number] = chunk.columns
        places.append((chunk.start, chunk.stop - chunk.start, number, number, 0, logprob_at, 0))
    return Transcript(request, Placed(as_rows(np.array(places, PLACE)), held, versions, wide), range(len(places)))


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
    """Whether the second piece of a column is joined to the first."""
    same = values.dtype == next_values.dtype and values.shape[1:] == next_values.shape[1:]
    return same and start + values.shape[0] == next_start
