"""Which workers there are, and which of them has which call.

Owns: the members, the owner of every live call, and the attempt at which a call that no ledger knows yet begins.
Does not know: ledgers, engines, how anybody is asked. Pure; whoever calls it holds a lock.

Invariants:
1. A call has at most one owner, and the owner is a member.
2. Attempts of a call that are given out never repeat: what a lost worker may still write of it is told apart.
3. Who has left can join again; what was given to another member meanwhile stays the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from recovery.model import CallId
from vllm_hooks.ray_workers.messages import NotAMember, WorkerId


@dataclass(frozen=True, slots=True)
class Busy:
    """The call is another member's."""

    owner: WorkerId


@dataclass(frozen=True, slots=True)
class Yours:
    """`attempt`: at which the call begins if it was not begun yet."""

    attempt: int


class Members:
    """Under one coordinator, since its start."""

    def __init__(self) -> None:
        self._calls: dict[WorkerId, set[CallId]] = {}
        self._owner: dict[CallId, WorkerId] = {}
        self._next: dict[CallId, int] = {}

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(tuple(self._calls))

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def owner(self, call_id: CallId) -> WorkerId | None:
        return self._owner.get(call_id)

    def calls_of(self, worker: WorkerId) -> frozenset[CallId]:
        return frozenset(self._calls.get(worker, ()))

    def join(self, worker: WorkerId, calls: Mapping[CallId, int]) -> frozenset[CallId]:
        """It is a member, and has these calls at these attempts. Returns those that it has lost to another."""
        self._calls.setdefault(worker, set())
        superseded = set()
        for call_id, attempt in calls.items():
            other = self._owner.get(call_id)
            if (other is not None and other != worker) or attempt < self._next.get(call_id, 0) - 1:
                superseded.add(call_id)
                continue
            self._give(worker, call_id, attempt)
        return frozenset(superseded)

    def claim(self, worker: WorkerId, call_id: CallId) -> Yours | Busy:
        """Raises NotAMember. Claimed twice by its owner, a call is given to it anew."""
        if worker not in self._calls:
            raise NotAMember(worker)
        other = self._owner.get(call_id)
        if other is not None and other != worker:
            return Busy(other)
        attempt = self._next.get(call_id, 0)
        self._give(worker, call_id, attempt)
        return Yours(attempt)

    def leave(self, worker: WorkerId) -> frozenset[CallId]:
        """It is no member any more; its calls are nobody's. Harmless for who is none."""
        calls = self._calls.pop(worker, set())
        for call_id in calls:
            del self._owner[call_id]
        return frozenset(calls)

    def ended(self, call_ids: Iterable[CallId]) -> None:
        """These are done with: their ends are published."""
        for call_id in call_ids:
            owner = self._owner.pop(call_id, None)
            if owner is not None:
                self._calls[owner].discard(call_id)
            self._next.pop(call_id, None)

    def _give(self, worker: WorkerId, call_id: CallId, attempt: int) -> None:
        self._owner[call_id] = worker
        self._calls[worker].add(call_id)
        self._next[call_id] = max(self._next.get(call_id, 0), attempt + 1)
