"""The best tokens of each position and the rank of the sampled one: from the engine's outputs to columns, and back.

Owns: the columns `rank`, `top_ids` and `top_logprobs`, and the logprob entries that a resumed caller is given.
Does not know: buffers, stores; which output is captured when.

Invariants:
1. A position is the sampled token and the engine's best k in its order, whichever of vLLM's containers it came in.
2. Entries of a resumed call are made by vLLM's own processor over all its positions: text, ranks and sum are those of
   a call that was never cut.
3. What was not captured is not made up: such a position has its sampled token alone, and no rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from recovery.buffer import Columns, Rows
from recovery.errors import CaptureDisagrees
from recovery.model import Array, WideColumn
from recovery.resume_table import TOP_LOGPROBS_MAX
from recovery.transcripts import ColumnRun
from vllm_hooks import surface

RANK, TOP_IDS, TOP_LOGPROBS = "rank", "top_ids", "top_logprobs"
_RANK_ALONE = (WideColumn(RANK, "int32", 0),)


def _ranks(ranks: list[int]) -> Rows:
    return Rows(len(ranks), _RANK_ALONE, (array("i", ranks).tobytes(),))


_RANK_OF_ONE = [_ranks([rank]) for rank in range(256)]
"""Of one token, as a stream brings it."""


def n_kept(params: Any) -> int | None:
    """How many best tokens of each position are captured for this request; None: not even the rank."""
    asked = params.logprobs
    if asked is None or not 0 <= asked <= TOP_LOGPROBS_MAX or getattr(params, "logprob_token_ids", None):
        return None
    return int(asked)


class Position(NamedTuple):
    """The sampled token first, then the best ones; the ids and logprobs are of the same length."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int | None


def captured_of(logprobs: Any, token_ids: Sequence[int], start: int, n_top: int | None) -> tuple[list[float], Columns]:
    """What is kept of `token_ids`, which lie from position `start` on in either container: sampled logprobs, columns.

    Nothing where the engine has none. Raises CaptureDisagrees if it gave something else than was asked. Every token
    comes this way, most of them one by one and with no more than their rank: that is quick, the rest need not be.
    """
    if not n_top and type(logprobs) is list and len(logprobs) == 1 == len(token_ids):
        (position,) = logprobs
        entry = position[token_ids[0]]
        if n_top is None:
            return [entry.logprob], None
        if len(position) == 1 and 0 <= (rank := entry.rank or 0) < len(_RANK_OF_ONE):
            return [entry.logprob], _RANK_OF_ONE[rank]
    if n_top is None or logprobs is None or not token_ids:
        return surface.sampled_logprobs_from(logprobs, token_ids, start), None
    stop = start + len(token_ids)
    if n_top or hasattr(logprobs, "start_indices"):
        values = surface.sampled_logprobs_from(logprobs, token_ids, start)
        return values, columns_of(positions_of(logprobs, start, stop, n_top), n_top)
    values, ranks = [], []
    for token, position in zip(token_ids, logprobs[start:stop], strict=True):
        if len(position) != 1:
            raise _not_asked_for(len(position), n_top)
        entry = position[token]
        values.append(float(entry.logprob))
        ranks.append(entry.rank or 0)
    return values, _ranks(ranks)


def positions_of(logprobs: Any, start: int, stop: int, n_top: int) -> list[Position]:
    """[start, stop) of either container. Raises CaptureDisagrees if the engine gave something else than was asked."""
    return [_position(_items(logprobs, at), n_top) for at in range(start, stop)]


def _items(logprobs: Any, at: int) -> list[tuple[int, float, int | None]]:
    if hasattr(logprobs, "start_indices"):
        own = slice(logprobs.start_indices[at], logprobs.end_indices[at])
        return list(zip(logprobs.token_ids[own], logprobs.logprobs[own], logprobs.ranks[own], strict=True))
    return [(token, value.logprob, value.rank) for token, value in logprobs[at].items()]


def _position(items: list[tuple[int, float, int | None]], n_top: int) -> Position:
    sampled, best = items[0], items[1:]
    if len(best) == n_top - 1 and sampled[2] is not None:
        best.insert(sampled[2] - 1, sampled)  # a dictionary has the sampled token once, also where it is a best one
    if len(best) != n_top:
        raise _not_asked_for(len(items), n_top)
    both = [sampled, *best]
    return Position([item[0] for item in both], [item[1] for item in both], sampled[2])


def _not_asked_for(n_given: int, n_top: int) -> CaptureDisagrees:
    return CaptureDisagrees(
        f"the engine gave the logprobs of {n_given} tokens where {n_top} and the sampled one were asked for",
        hint="ask for `logprobs: 0`, and report this with the vLLM version",
    )


def columns_of(positions: Sequence[Position], n_top: int) -> dict[str, Array]:
    """As wide columns."""
    columns: dict[str, Array] = {RANK: np.array([at.rank or 0 for at in positions], np.int32)}
    if n_top:
        columns[TOP_IDS] = np.array([at.token_ids[1:] for at in positions], np.int32)
        columns[TOP_LOGPROBS] = np.array([at.logprobs[1:] for at in positions], np.float32)
    return columns


def positions_from(
    token_ids: Sequence[int], logprobs: Sequence[float], columns: Mapping[str, tuple[ColumnRun, ...]], n_top: int
) -> list[Position]:
    """Of saved tokens (invariant 3)."""
    found = [Position([token], [value], None) for token, value in zip(token_ids, logprobs, strict=True)]
    for run in columns.get(RANK, ()):
        for at, rank in enumerate(run.values.tolist(), start=run.start):
            found[at] = found[at]._replace(rank=rank or None)
    for ids, values in zip(columns.get(TOP_IDS, ()), columns.get(TOP_LOGPROBS, ()), strict=True):
        if ids.values.shape[1:] != (n_top,):
            continue
        best = zip(ids.values.tolist(), values.values.tolist(), strict=True)
        for at, (top_ids, top_logprobs) in enumerate(best, start=ids.start):
            sampled = found[at]
            found[at] = Position([*sampled.token_ids, *top_ids], [*sampled.logprobs, *top_logprobs], sampled.rank)
    return found


class Entries:
    """The logprob entries of one resumed call, and their sum."""

    def __init__(self, params: Any, tokenizer: Any | None) -> None:
        from vllm.v1.engine.logprobs import LogprobsProcessor

        request: Any = SimpleNamespace(sampling_params=params)
        self._processor = LogprobsProcessor.from_new_request(tokenizer if params.detokenize else None, request)
        self._n_given = 0

    def add(self, positions: Sequence[Position]) -> None:
        """The next ones."""
        from vllm.v1.outputs import LogprobsLists

        for at in positions:
            ids, values = np.array([at.token_ids]), np.array([at.logprobs], np.float64)
            ranks = np.array([at.rank or 0])
            output: Any = SimpleNamespace(
                new_logprobs=LogprobsLists(ids, values, ranks),
                new_prompt_logprobs_tensors=None,
                prompt_token_id_logprobs=None,
            )
            self._processor.update_from_output(output)
            if at.rank is None:
                _forget_rank(self._processor.logprobs)

    @property
    def cumulative(self) -> float | None:
        return self._processor.cumulative_logprob

    @property
    def all(self) -> Any:
        """So far, in the container that was asked for; a copy."""
        return self._processor.logprobs[:]

    def fresh(self, n_most: int | None = None) -> Any:
        """Those that this did not give before, of all so far or of the next `n_most`."""
        first, n = self._n_given, len(self._processor.logprobs)
        self._n_given = n if n_most is None else min(n, first + n_most)
        return self._processor.logprobs[first : self._n_given]


def extend(logprobs: Any, more: Any) -> None:
    """Add the positions of one container of vLLM's to another of its kind, as the engine itself does."""
    if not hasattr(logprobs, "start_indices"):
        logprobs.extend(more)
        return
    for at in range(len(more)):
        own = slice(more.start_indices[at], more.end_indices[at])
        ids, values, ranks = more.token_ids[own], more.logprobs[own], more.ranks[own]
        logprobs.append_fast(ids, values, ranks, more.decoded_tokens[own])


def _forget_rank(logprobs: Any) -> None:
    """Of the sampled token of the last position."""
    if hasattr(logprobs, "start_indices"):
        logprobs.ranks[logprobs.start_indices[-1]] = None
    else:
        next(iter(logprobs[-1].values())).rank = None
