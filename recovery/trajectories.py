"""Which call stands at which place of a rollout's trajectory, and what another call at that place does to later ones.

Owns: the places (turn and model call) of all rollouts, and whose answer led to which call.
Does not know: tokens, requests, who calls. A call's id says all of it: it is made of place, parent and prompt.

Invariants:
1. A place has at most one call.
2. A call that takes the place of another is a divergence: that one, and every call that its answer led to, is of
   another trajectory and is not found again. What stands beside it or before it stays.
3. A call that comes again to its own place, or to one that is free, changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recovery.errors import InputError
from recovery.model import CallId

PLACES = 1 << 32
"""Turns of a rollout, and model calls of a turn, that the ledger can tell apart."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The how-manieth model call of which turn, both from 0."""

    turn: int
    model_call: int

    def __post_init__(self) -> None:
        for name in ("turn", "model_call"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < PLACES:
                raise InputError(
                    f"the {name} of a trajectory is {value!r:.80}", hint=f"it counts from 0, below {PLACES}"
                )


@dataclass(frozen=True, slots=True)
class Placed:
    """A call at its place; `parent`: recovery.lineage."""

    rollout: str
    place: Place
    call_id: CallId
    parent: CallId


class Trajectories:
    """`known`: the calls that a restore found."""

    def __init__(self, known: Iterable[Placed] = ()) -> None:
        self._rollouts: dict[str, dict[Place, Placed]] = {}
        for one in known:
            self._rollouts.setdefault(one.rollout, {})[one.place] = one

    def at(self, rollout: str) -> list[Placed]:
        """The calls of a rollout, in the order of their places."""
        calls = self._rollouts.get(rollout, {})
        return [calls[place] for place in sorted(calls)]

    def displaced_by(self, one: Placed) -> list[CallId]:
        """What `take` would drop, in the order of the places."""
        calls = self._rollouts.get(one.rollout, {})
        there = calls.get(one.place)
        if there is None or there.call_id == one.call_id:
            return []
        gone = {there.call_id}
        while more := {other.call_id for other in calls.values() if other.parent in gone} - gone:
            gone |= more
        return [calls[place].call_id for place in sorted(calls) if calls[place].call_id in gone]

    def take(self, one: Placed) -> list[CallId]:
        """A call is at its place now. Returns those that are nobody's any more (invariant 2)."""
        gone = self.displaced_by(one)
        calls = self._rollouts.setdefault(one.rollout, {})
        for place in [place for place, other in calls.items() if other.call_id in gone]:
            del calls[place]
        calls[one.place] = one
        return gone

    def leave(self, rollout: str) -> list[CallId]:
        """The rollout has ended, and nobody comes for its calls again. Returns them."""
        return [one.call_id for one in self._rollouts.pop(rollout, {}).values()]
