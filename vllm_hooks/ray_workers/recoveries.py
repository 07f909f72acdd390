"""A worker's calls on their way to others, and what the others' step logs say of that time.

Owns: which calls of a worker that is gone do not go on yet, who decoded meanwhile, the line that is said at the end.
Does not know: actors, how calls are given to workers.

Invariants:
1. A recovery is over once each of its calls has gone on: tokens of it came, or it ended.
2. A survivor is who decoded before: what a worker that only came meanwhile did shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_hooks.ray_workers.messages import Lost, WorkerId
from vllm_hooks.ray_workers.step_log import Steps


@dataclass(slots=True)
class Recovery:
    """`waiting`: names of the calls that do not go on yet."""

    worker: WorkerId
    why: str
    began_s: float
    waiting: set[str]
    survivors: tuple[WorkerId, ...] = ()
    lost: Lost = field(default_factory=Lost)
    n_calls: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_calls = len(self.waiting)


class Recoveries:
    """Those under way."""

    def __init__(self) -> None:
        self._under_way: list[Recovery] = []

    def begin(self, recovery: Recovery) -> bool:
        """False if it had no call, and is over."""
        if recovery.waiting:
            self._under_way.append(recovery)
        return bool(recovery.waiting)

    def going_on(self, names: Iterable[str]) -> list[Recovery]:
        """Tokens of these calls came. Returns the recoveries that are over with them."""
        names = frozenset(names)
        for recovery in self._under_way:
            recovery.waiting -= names
        over = [recovery for recovery in self._under_way if not recovery.waiting]
        self._under_way = [recovery for recovery in self._under_way if recovery.waiting]
        return over


OfOne = tuple[WorkerId, Steps, Steps]
"""A survivor's steps during a recovery, and before it."""


def line_of(recovery: Recovery, end_s: float, steps: Iterable[OfOne]) -> str:
    """The line. `steps`: of each survivor."""
    line = (
        f"worker {recovery.worker} is gone ({recovery.why}); after {end_s - recovery.began_s:.1f} s its "
        f"{recovery.n_calls} calls go on"
    )
    if recovery.lost.n_calls:  # a coordinator that was started again meanwhile never heard of them
        line += f", {recovery.lost.n_tokens} tokens of them were saved"
    lost = recovery.lost
    line += f", {lost.n_waiting} segments of them waited in the queue" if lost.n_waiting else ""
    line += f"; what else waited is generated again: {lost.error}" if lost.error else ""
    return line + meanwhile(steps)


def meanwhile(steps: Iterable[OfOne]) -> str:
    """The end of such a line: what the survivors did."""
    return "".join(
        f"; {worker} meanwhile made {during.n_steps} steps, {during.rate:.0f} tokens/s "
        f"({before.rate:.0f} before), longest pause {1000 * during.longest_pause_s:.0f} ms "
        f"({1000 * before.longest_pause_s:.0f} before)"
        for worker, during, before in steps
    )
