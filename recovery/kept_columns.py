"""The wide columns of one live call, kept while the call lives: its caller may want them back, and so may the store.

Owns: which stretch of the call's tokens has which columns, and cutting them up again.
Does not know: what a column means, ids, logprobs, versions.

Invariants:
1. Nothing is filled in: a stretch that came without columns is a stretch without columns.
2. What is kept of a frozen run is its own memory and no copy. A token's columns are kept once, however often its run is
   frozen (a store that lost something is handed it again).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from recovery.buffer import Run, tokens_max
from recovery.model import Array, wide_columns
from recovery.transcripts import ColumnRun, joined_columns


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, stop) and their columns, all of `stop - start` rows."""

    start: int
    stop: int
    columns: Mapping[str, Array]

    def part(self, start: int, stop: int) -> Piece:
        own = slice(start - self.start, stop - self.start)
        return Piece(start, stop, {name: values[own] for name, values in self.columns.items()})


class KeptColumns:
    """In the order of the tokens."""

    __slots__ = ("_pieces",)

    def __init__(self, restored: Mapping[str, tuple[ColumnRun, ...]] | None = None) -> None:
        """`restored`: what a Transcript has of the tokens before."""
        self._pieces: list[Piece] = []
        runs = [(name, run) for name, found in (restored or {}).items() for run in found]
        bounds = sorted({at for _, run in runs for at in (run.start, run.stop)})
        for start, stop in pairwise(bounds):
            columns = {
                name: run.values[start - run.start : stop - run.start]
                for name, run in runs
                if run.start <= start and stop <= run.stop
            }
            if columns:
                self._pieces.append(Piece(start, stop, columns))

    def keep(self, frozen: Run) -> None:
        """A run that was frozen; they come in order."""
        kept = self._pieces[-1].stop if self._pieces else 0
        if frozen.columns and frozen.stop > kept:
            piece = Piece(frozen.start, frozen.stop, frozen.arrays())
            self._pieces.append(piece.part(max(kept, frozen.start), frozen.stop))

    def between(self, start: int, stop: int) -> Iterator[Piece]:
        """[start, stop) in pieces that can each be appended to a buffer; some have no columns."""
        at = start
        for piece in self._pieces:
            first, last = max(at, piece.start), min(stop, piece.stop)
            if first >= last:
                continue
            if at < first:
                yield Piece(at, first, {})
            step = tokens_max(wide_columns(piece.columns, piece.stop - piece.start))
            for begin in range(first, last, step):
                yield piece.part(begin, min(begin + step, last))
            at = last
        if at < stop:
            yield Piece(at, stop, {})

    def joined(self, pending: Iterable[Run]) -> dict[str, tuple[ColumnRun, ...]]:
        """All of them and those of runs that are not frozen yet, as a Transcript has them."""
        kept = self._pieces[-1].stop if self._pieces else 0
        later = [
            Piece(run.start, run.stop, run.arrays(copy=True)).part(max(kept, run.start), run.stop)
            for run in pending
            if run.columns and run.stop > kept
        ]
        return joined_columns((piece.start, piece.columns) for piece in (*self._pieces, *later))
