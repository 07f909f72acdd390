"""Times that can be compared: paired, repeated, interleaved.

Owns: the order in which ways of doing a thing are run, and what is said of many times.
Does not know: what is run.

Invariants:
1. In each round every way is run once, in an order drawn anew, or there and back; a ratio is of two times of one round.
2. What a way made is let go, and garbage is collected, outside of the measured time. What was there before (the
   libraries) is left out of every collection, so that no way pays for what another one imports.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int) -> str:
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high, "n": self.n}


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of some ratios, and where it lies 19 times of 20: what rounds drawn from these rounds give."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, ratios: Sequence[float], rng: np.random.Generator) -> Interval:
        drawn = np.median(rng.choice(np.asarray(ratios), (2000, len(ratios))), axis=1)
        low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
        return cls(statistics.median(ratios), low, high, len(ratios))

    @property
    def off(self) -> float:
        """By what factor its farther end is away from 1: of two ways that are the same, what may come of nothing."""
        return max(self.high, 1 / self.low)

    def text(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} to {self.high:.4f})"

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high, "n": self.n}


def there_and_back(n_ways: int, rng: np.random.Generator) -> list[int]:
    """The order of a round in which each way is run twice: whatever goes up or down evenly meanwhile falls on all."""
    there = rng.permutation(n_ways).tolist()
    return [*there, *reversed(there)]


Times = dict[str, list[float]]


def paired(
    ways: Mapping[str, Callable[..., Any]],
    rounds: int,
    rng: np.random.Generator,
    prepare: Callable[[], Any] | None = None,
) -> tuple[Times, Times]:
    """Wall and processor seconds of each way, by round. One round more is run before, and not counted.

    `prepare`: makes, before the time begins, what every way is given.
    """
    wall: Times = {name: [] for name in ways}
    processor: Times = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for at in rng.permutation(len(names)).tolist():
            way = ways[names[at]]
            seconds, busy = timed(way if prepare is None else partial(way, prepare()))
            if number:
                wall[names[at]].append(seconds)
                processor[names[at]].append(busy)
    return wall, processor


def settle() -> None:
    """Everything that is there from now on belongs to the libraries (invariant 2)."""
    gc.collect()
    gc.freeze()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds of one run."""
    gc.collect()
    busy, began = time.process_time(), time.perf_counter()
    made = work()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    del made
    return seconds, busy


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of each round the one time over the other."""
    return Spread.of([one / other for one, other in zip(over, under, strict=True)])
