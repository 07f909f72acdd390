"""A source that fails when it is told to, and short ways to make attempts, samples and owners.

Owns: the naive source (plain containers) that the machines of recovery.admission are tested against.
Does not know: recovery.admission.replay, which is tested apart; schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recovery.admission.attempts import Attempt
from recovery.admission.holds import HoldKind
from recovery.admission.limits import Limits
from recovery.admission.ownership import Ownership
from recovery.admission.samples import Sample, copies
from recovery.admission.settlement import Why
from recovery.admission.staleness import Staleness
from recovery.admission.versions import PolicyVersions
from recovery.model import PolicyVersion


class SourceDown(Exception):
    """What the source raises when it is told to."""


def sample(group: int, index: int = 0, **fields: Any) -> Sample:
    return Sample(
        row_id=f"g{group}", group_index=group, sample_index=index, request_id=f"g{group}/{index}", row={}, **fields
    )


def attempt(group: int, n: int = 1, **fields: Any) -> Attempt:
    return Attempt(
        reservation_id=f"g{group}", group_index=group, samples=tuple(sample(group, i) for i in range(n)), **fields
    )


class NaiveSource:
    """Groups 0 … size - 1. `down` names the verbs that raise; `says` overrides one answer of reserve."""

    def __init__(self, size: int, n: int = 1) -> None:
        self.waiting = list(range(size))
        self.out: dict[int, Attempt] = {}
        self.trained: list[tuple[int, int]] = []
        self.stale: dict[int, int] = {}
        self.aborted: dict[int, int] = {}
        self.down: set[str] = set()
        self.says: list[Attempt] | None = None
        self._n = n

    def reserve(self, k: int) -> Sequence[Attempt]:
        self._check("reserve")
        if self.says is not None:
            said, self.says = self.says, None
            return said
        if len(self.waiting) < k:
            return []
        groups, self.waiting = self.waiting[:k], self.waiting[k:]
        for group in groups:
            counts = {"stale": self.stale.get(group, 0), "aborted": self.aborted.get(group, 0)}
            self.out[group] = attempt(group, self._n, **counts)
        return [self.out[group] for group in groups]

    def requeue(self, attempts: Sequence[Attempt], why: Why) -> None:
        self._check("requeue")
        for one in attempts:
            if self.out.get(one.group_index) is one:
                del self.out[one.group_index]
                self.waiting = sorted([*self.waiting, one.group_index])
                counts = {Why.STALE: self.stale, Why.ABORTED: self.aborted, Why.OTHER: {}}[why]
                counts[one.group_index] = counts.get(one.group_index, 0) + 1

    def acknowledge(self, attempts: Sequence[Attempt], rollout: int) -> None:
        self._check("acknowledge")
        for one in attempts:
            assert self.out.pop(one.group_index) is one
            self.trained.append((one.group_index, rollout))

    def _check(self, verb: str) -> None:
        if verb in self.down:
            raise SourceDown(verb)


def owner(
    source: Any, *, executing: int = 2, slots: int = 4, batch: int = 2, cap: int | None = None, **rules: Any
) -> Ownership:
    keep, settled = rules.pop("keep", lambda samples: True), rules.pop("settled", lambda attempt: None)
    return Ownership(
        source,
        Limits(executing=executing, slots=slots, batch_groups=batch, buffer_max=cap),
        Staleness(**rules),
        PolicyVersions(PolicyVersion("a", 0)),
        incarnation="one",
        keep=keep,
        settled=settled,
    )


def run_one(own: Ownership, draw: int = 0, **fields: Any) -> int:
    """Admit a group and finish it at once. Returns its number."""
    record = own.admit()
    assert record is not None and record.execution is not None
    made = copies(record.attempt.samples)
    for one in made:
        for name, value in fields.items():
            setattr(one, name, value)
    own.complete(record.execution, made, draw)
    return record.attempt.group_index


def update(own: Ownership, ok: bool = True) -> None:
    """A weight update with its drain hold, where nothing is executing."""
    hold = own.acquire(HoldKind.DRAIN, "weights", "update", 0.0)
    assert own.gate.done(hold)
    own.begin_update(hold, own.versions.next)
    own.end_update(hold, ok)
    own.gate.release(hold)
