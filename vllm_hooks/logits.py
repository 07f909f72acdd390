"""Logits processors of the engine's V1 runner that tell the saved tokens of a resumed call from its prompt.

Owns: penalties and bad words over the true split; the base class with which custom processors see it.
Does not know: sessions, stores. Runs in the engine's worker; all it knows of a call is in its `extra_args`.

Invariants:
1. A request without a mark in `extra_args` is not touched. A batch without one costs a comparison in each of the two
   calls of a step, and one look at each row that joins it; no row, tensor or object is made.
2. Penalties are computed by vLLM's own function, once, over all tokens: an engine that penalised the new tokens and
   a processor that added the rest would round differently.
3. What is done depends on prompt and tokens alone, so that pre-emption inside the engine changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from vllm_hooks.marks import mark_of, marked

Row = TypeVar("Row")


class Joined(Sequence[int]):
    """The tokens of a call: those that came with it and those that the engine appends to its own list."""

    __slots__ = ("_live", "_saved")

    def __init__(self, saved: list[int], live: list[int]) -> None:
        self._saved = saved
        self._live = live

    def __len__(self) -> int:
        return len(self._saved) + len(self._live)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [*self._saved, *self._live][at]
        n = len(self._saved)
        at = at + len(self) if at < 0 else at
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._saved[at] if at < n else self._live[at - n]

    def __iter__(self) -> Iterator[int]:
        yield from self._saved
        yield from self._live

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def last(self, n: int) -> list[int]:
        """The last `n` tokens, fewer if there are not so many."""
        if n <= len(self._live):
            return self._live[len(self._live) - n :]
        return [*self._saved[len(self._saved) - min(n - len(self._live), len(self._saved)) :], *self._live]


def follow(rows: dict[int, Row], update: BatchUpdate, added: Mapping[int, Row]) -> None:
    """Carry per-request state along with the rows of the batch: removed, then added, then moved."""
    for index in update.removed:
        rows.pop(index, None)
    for index, *_ in update.added:
        rows.pop(index, None)
    rows.update(added)
    for source, target, direction in update.moved:
        moving, other = rows.pop(source, None), rows.pop(target, None)
        if moving is not None:
            rows[target] = moving
        if other is not None and direction == MoveDirectionality.SWAP:
            rows[source] = other


def true_split(update: BatchUpdate) -> BatchUpdate:
    """The same update with the saved tokens of resumed calls where they belong: among the output."""
    if not marked(update.added):
        return update
    added = []
    for index, params, prompt_ids, output_ids in update.added:
        n = mark_of(params).get("prefix", 0)
        if n and prompt_ids is not None:
            added.append((index, params, prompt_ids[:-n], Joined(prompt_ids[-n:], output_ids)))
        else:
            added.append((index, params, prompt_ids, output_ids))
    return replace(update, added=added)


class PrefixSafe:
    """Put this before the base of a custom processor: `class Mine(PrefixSafe, LogitsProcessor)`.

    It then is given the true prompt, and the saved tokens of a resumed call as output. Deriving from it says that what
    the processor does to a row depends on the parameters and on these two alone.
    """

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        super().update_state(true_split(batch_update) if batch_update else None)  # type: ignore[misc]


@dataclass(slots=True)
class _Penalised:
    prompt_ids: list[int]
    output_ids: Joined
    presence: float
    frequency: float
    repetition: float
    words: list[list[int]]


class TrueSplit(LogitsProcessor):
    """Presence, frequency and repetition penalties and bad words of resumed calls.

    The last of the processors that may change the most likely token, as penalties are the last step in the engine.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Penalised] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None or not (marked(batch_update.added) or self._rows):
            return
        added = {}
        for index, params, prompt_ids, output_ids in true_split(batch_update).added:
            if isinstance(output_ids, Joined):
                row = self._row(params, prompt_ids or [], output_ids)
                if row is not None:
                    added[index] = row
        follow(self._rows, batch_update, added)

    @staticmethod
    def _row(params: Any, prompt_ids: list[int], output_ids: Joined) -> _Penalised | None:
        presence, frequency, repetition = mark_of(params).get("penalties", (0.0, 0.0, 1.0))
        words = [word for word in params.bad_words_token_ids or () if len(word) > 1]
        if not words and (presence, frequency, repetition) == (0.0, 0.0, 1.0):
            return None
        return _Penalised(prompt_ids, output_ids, presence, frequency, repetition, words)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return logits
        for index, row in self._rows.items():
            for word in row.words:
                if row.output_ids.last(len(word) - 1) == word[:-1]:
                    logits[index, word[-1]] = -torch.inf
        penalised = {i: r for i, r in self._rows.items() if (r.presence, r.frequency, r.repetition) != (0.0, 0.0, 1.0)}
        if penalised:
            at = torch.tensor(list(penalised), device=self._device)
            logits[at] = self._penalise(logits[at], list(penalised.values()))
        return logits

    def _penalise(self, logits: torch.Tensor, rows: list[_Penalised]) -> torch.Tensor:
        from vllm.model_executor.layers.utils import apply_penalties

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)

        return apply_penalties(
            logits,
            self._padded([row.prompt_ids for row in rows], logits.shape[1]),
            self._padded([row.output_ids for row in rows], logits.shape[1]),
            column([row.presence for row in rows]),
            column([row.frequency for row in rows]),
            column([row.repetition for row in rows]),
        )

    def _padded(self, rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
        """Ids as a matrix; `pad` is the vocabulary's size, which stands for no token, and so does a placeholder."""
        longest = max(len(row) for row in rows)
        lists = [[pad if token < 0 else token for token in row] + [pad] * (longest - len(row)) for row in rows]
        return torch.tensor(lists, dtype=torch.int64, device=self._device)
