"""When an engine delivered tokens, and how many: what shows whether it ever stood still.

Owns: the last ENTRIES moments at which tokens of one engine were captured, and figures over a span of them.
Does not know: clocks (moments are given), engines.

Invariants:
1. Moments do not go backwards; memory is bounded.
2. A rate is over the span that was asked for, whether or not anything was delivered in it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

ENTRIES = 1 << 16


@dataclass(frozen=True, slots=True)
class Steps:
    """Over a span: how many steps and tokens, tokens per second, and the longest pause between two steps in it."""

    n_steps: int
    n_tokens: int
    rate: float
    longest_pause_s: float


class StepLog:
    """One engine's."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=ENTRIES)

    def add(self, at_s: float, n_tokens: int) -> None:
        """Tokens that came at one moment are one step."""
        if self._steps and self._steps[-1][0] >= at_s:
            last, n = self._steps[-1]
            self._steps[-1] = (last, n + n_tokens)
        else:
            self._steps.append((at_s, n_tokens))

    def between(self, start_s: float, end_s: float) -> Steps:
        """The steps from `start_s` up to `end_s`; pauses count from the step before the span to the one after it."""
        inside = [(at, n) for at, n in self._steps if start_s <= at <= end_s]
        before = [at for at, _ in self._steps if at < start_s][-1:]
        after = [at for at, _ in self._steps if at > end_s][:1]
        moments = [*before, *(at for at, _ in inside), *after]
        pauses = [b - a for a, b in pairwise(moments)]
        n_tokens = sum(n for _, n in inside)
        span_s = end_s - start_s
        return Steps(len(inside), n_tokens, n_tokens / span_s if span_s > 0 else 0.0, max(pauses, default=0.0))
