"""A job of rows with heavy-tailed lengths in virtual time, with kills: this project's real code, and two other methods.

Owns: the pace, the rows, the driver that decodes and kills, and what each method has left after a kill.
Does not know: when kills come, what is made of the figures (kills.py).

Virtual time: a step of all live calls takes STEP_S, a start of the engine RESTART_S, prefill 1 / PREFILL of a second
for each token. Ours decodes into the product's own capture, with its flushes (a call never has more than FLUSH tokens
that were not handed over) and a snapshot each minute, on a store in memory; a kill drops the process's state as it is.
The others are what they do to a row: REDO begins every unfinished row again, DROP takes new rows in their place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from bench.jobs import Job
from bench.simulated import PROMPT, base_of, is_as_decoded, logprobs_of, number_of, tokens_of
from recovery.model import ENDED
from storage_backends.memory import MemoryStore

STEP_S, RESTART_S, PREFILL, BLOCK, SLOTS = 0.03, 30.0, 5000.0, 16, 64
FLUSH, SNAPSHOT_S = 128, 60.0
LENGTHS = (6.0, 1.2)
LENGTH_MAX = 32_000
"""Log-normal: median 403, mean 829; one row of a hundred has over 6,500 tokens."""


def lengths(rng: np.random.Generator, n: int) -> list[int]:
    drawn = np.minimum(rng.lognormal(*LENGTHS, n), LENGTH_MAX).astype(int) + 1
    found: list[int] = drawn.tolist()
    return found


class Method(Protocol):
    """What happens to rows when the process dies."""

    def decoded(self, rows: dict[int, int]) -> None:
        """These rows have so many tokens now."""

    def ended(self, rows: list[int]) -> None: ...

    def tick(self, now: float) -> None: ...

    def killed(self, rows: dict[int, int]) -> dict[int, int]:
        """Which of the unfinished rows go on, and at which token."""


class Redo:
    """Finished rows are kept, unfinished ones begin again."""

    def decoded(self, rows: dict[int, int]) -> None: ...

    def ended(self, rows: list[int]) -> None: ...

    def tick(self, now: float) -> None: ...

    def killed(self, rows: dict[int, int]) -> dict[int, int]:
        return dict.fromkeys(rows, 0)


class Drop(Redo):
    """Finished rows are kept, unfinished ones are given up."""

    def killed(self, rows: dict[int, int]) -> dict[int, int]:
        return {}


class Ours:
    """The product's own code on a store in memory."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._job = Job(self._store)
        self._number: dict[int, int] = {}
        self._at: dict[int, int] = {}
        self._flushed_at: dict[int, int] = {}
        self._snapshot_at = SNAPSHOT_S
        self._over: set[int] = set()
        self.lost_tokens: list[int] = []
        self.wrong = 0
        """Restored calls that are not what was decoded, and rows whose end was handed out and is not in the store."""

    def decoded(self, rows: dict[int, int]) -> None:
        longest = 0
        for row, n_tokens in rows.items():
            if row not in self._number:
                self._number[row] = self._job.open_as(row, PROMPT)
                self._at[row] = self._flushed_at[row] = 0
            call = self._job.calls[self._number[row]]
            positions = np.arange(self._at[row], n_tokens)
            ids = tokens_of(np.array(base_of(call.call_id)), positions)
            self._job.append(self._number[row], ids, logprobs_of(positions))
            self._at[row] = n_tokens
            longest = max(longest, n_tokens - self._flushed_at[row])
        if longest + BLOCK > FLUSH:
            self._flush()

    def _flush(self) -> None:
        self._job.flush()
        self._flushed_at.update(self._at)

    def ended(self, rows: list[int]) -> None:
        """A result is given to its caller when its end is durable: with the next flush."""
        for row in rows:
            self._job.calls[self._number[row]].end("stop", None)
            del self._at[row], self._flushed_at[row]
        self._over.update(rows)
        self._flush()

    def tick(self, now: float) -> None:
        if now >= self._snapshot_at:
            self._job.snapshot()
            self._snapshot_at = now + SNAPSHOT_S

    def killed(self, rows: dict[int, int]) -> dict[int, int]:
        self._job.close()
        self._job = Job(self._store)
        found: dict[int, int] = {}
        self._number, self._at, self._flushed_at = {}, {}, {}
        entries = list(self._job.publication.ledger)
        over = {number_of(entry.identity.rollout) for entry in entries if entry.state == ENDED}
        self.wrong += len(self._over ^ over)
        for call in self._job.restored.calls:
            row = number_of(call.entry.identity.rollout)
            self.wrong += not is_as_decoded(call)
            self._number[row] = self._job.carry_on(call)
            found[row] = self._at[row] = self._flushed_at[row] = call.entry.n_tokens
        self.lost_tokens += [n_tokens - found.get(row, 0) for row, n_tokens in rows.items()]
        return {row: found.get(row, 0) for row in rows}

    def close(self) -> None:
        self._job.close()


@dataclass(slots=True)
class Outcome:
    """How far a job came. `results`: the rows that finished, in order, at which time."""

    seconds: float = 0.0
    kills: int = 0
    decoded: int = 0
    results: list[tuple[float, int]] = field(default_factory=list)


def drive(
    method: Method, rows: list[int], kills: list[float], until: float = float("inf"), begin: float = 0.0
) -> Outcome:
    """Decode rows of these lengths on SLOTS slots, with kills at these times, until all are done or the time is up."""
    outcome = Outcome(begin)
    queue = deque(range(len(rows)))
    live: dict[int, int] = {}
    times = deque(kills)
    while (queue or live) and outcome.seconds < until:
        while queue and len(live) < SLOTS:
            live[queue.popleft()] = 0
        now = {row: min(n + BLOCK, rows[row]) for row, n in live.items()}
        outcome.seconds += BLOCK * STEP_S
        if times and outcome.seconds >= times[0]:
            times.popleft()
            outcome.kills += 1
            kept = method.killed(live)
            queue.extendleft(sorted((row for row, n in kept.items() if not n), reverse=True))
            live = {row: n for row, n in kept.items() if n}
            outcome.seconds += RESTART_S + sum(n + len(PROMPT) for n in live.values()) / PREFILL
            while times and times[0] <= outcome.seconds:
                times.popleft()
            continue
        outcome.decoded += sum(now.values()) - sum(live.values())
        method.decoded(now)
        over = [row for row, n in now.items() if n >= rows[row]]
        if over:
            method.ended(over)
            outcome.results += [(outcome.seconds, row) for row in over]
        live = {row: n for row, n in now.items() if n < rows[row]}
        method.tick(outcome.seconds)
    return outcome
