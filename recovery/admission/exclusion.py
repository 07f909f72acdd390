"""The one fence between weight updates, evaluations and cuts.

Owns: who is inside, and who asked first.
Does not know: holds, tasks, how long anybody waits.

Invariants (numbers are those of docs/admission.md):
1. (A27) A weight update is inside alone. Evaluations and cuts may be inside together: neither changes a version.
2. Leaving is a set removal; who is not inside cannot leave.
3. (A27) `may_close` is false while an update is inside.
4. (A27) Who stands in line is overtaken by nobody in it who would keep it waiting: neither updates nor evaluations
   starve the others.
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


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A place in the line before the fence."""

    work: Work
    owner: str


class NotInside(Exception):
    """A program error: the pass is not one of those inside."""


class ExclusionFence:
    """Readers and one writer. Who is refused keeps its place and asks again."""

    def __init__(self) -> None:
        self._inside: dict[Pass, None] = {}
        self._line: dict[Place, None] = {}

    def stand(self, work: Work, owner: str) -> Place:
        """A place at the end of the line, until `enter` lets it in or `give_up`."""
        place = Place(work, owner)
        self._line[place] = None
        return place

    def give_up(self, place: Place) -> None:
        """Harmless for one that entered."""
        self._line.pop(place, None)

    def enter(self, work: Work, owner: str, place: Place | None = None) -> Pass | str:
        """A pass, or who is in the way. Without a place the line is passed by: by what cannot wait for it."""
        ahead: list[Pass | Place] = list(self._inside)
        if place is not None:
            ahead += list(self._line)[: list(self._line).index(place)]
        blockers = [one for one in ahead if Work.UPDATE in (work, one.work)]
        if blockers:
            return f"{blockers[0].work.value} of {blockers[0].owner}"
        if place is not None:
            self.give_up(place)
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
