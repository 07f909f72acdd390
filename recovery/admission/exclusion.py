"""The one fence between weight updates, evaluations and cuts.

Owns: who is inside.
Does not know: holds, who waits.

Invariants (numbers are those of docs/admission.md):
1. (A27) A weight update is inside alone. Evaluations and cuts may be inside together: neither changes a version.
2. Leaving is a set removal; who is not inside cannot leave.
3. (A27) `may_close` is false while an update is inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Work(Enum):
    UPDATE = "weight update"
    EVALUATION = "evaluation"
    CUT = "cut"


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Proof of being inside."""

    work: Work
    owner: str


class NotInside(Exception):
    """A program error: the pass is not one of those inside."""


class ExclusionFence:
    """Readers and one writer, without a queue: who is refused asks again."""

    def __init__(self) -> None:
        self._inside: dict[Pass, None] = {}

    def enter(self, work: Work, owner: str) -> Pass | str:
        """A pass, or who is in the way."""
        if work is Work.UPDATE:
            blockers = list(self._inside)
        else:
            blockers = [one for one in self._inside if one.work is Work.UPDATE]
        if blockers:
            return f"{blockers[0].work.value} of {blockers[0].owner}"
        one = Pass(work, owner)
        self._inside[one] = None
        return one

    def leave(self, one: Pass) -> None:
        if one not in self._inside:
            raise NotInside(f"{one.work.value} of {one.owner} is not inside")
        del self._inside[one]

    @property
    def may_close(self) -> bool:
        return not any(one.work is Work.UPDATE for one in self._inside)
