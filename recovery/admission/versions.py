"""Policy versions: how far apart two are, and how a new one is published around a weight update.

Owns: the current version, the tree of lineages, and whether the engines are known to serve it.
Does not know: how weights are pushed, who waits meanwhile.

Invariants (numbers are those of docs/admission.md):
1. (A59, A61) The number grows by one with a successful update and by nothing else; a lower one raises, an equal one
   is no change.
2. (A63) After a failed update the engines are torn: nobody is admitted until the old version was pushed again or the
   new one was.
3. (V9) A trainer that went back goes on in a lineage of its own, under a name that was never used.
4. (V10) Lag is defined towards an ancestor only; a version of a dead branch is a ghost, whatever its number.
5. (A54, A57) A version ahead of the current one, or none at all, is never a lag.
6. A rollout of a lineage is on the line that led here only up to the one at which the trainer went on under another
   name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from recovery.model import PolicyVersion


class State(Enum):
    """What the engines serve."""

    STEADY = "steady"
    UPDATING = "updating"
    TORN = "torn"


class Event(Enum):
    BEGIN = "begin"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STEADY, Event.BEGIN): State.UPDATING,
    (State.TORN, Event.BEGIN): State.UPDATING,
    (State.UPDATING, Event.SUCCEEDED): State.STEADY,
    (State.UPDATING, Event.FAILED): State.TORN,
}


@dataclass(frozen=True, slots=True)
class Lag:
    """So many updates ago."""

    updates: int


@dataclass(frozen=True, slots=True)
class Ghost:
    """Of a branch that the trainer went back from: no lag is defined."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Newer than the current version by so many updates: a restart makes this, and it is not fresh."""

    updates: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """No version was recorded, or its lineage was never heard of."""


Distance = Lag | Ghost | Ahead | Unknown


class VersionRefused(Exception):
    """A program error: the version or the step does not follow from the present one."""


class PolicyVersions:
    """The one place that holds the current version.

    `forks`: lineage -> (its parent, number it left the parent at). `begun`: lineage -> the trainer's rollout then.
    """

    def __init__(
        self,
        current: PolicyVersion,
        forks: Mapping[str, tuple[str, int]] | None = None,
        begun: Mapping[str, int] | None = None,
    ) -> None:
        self.current = current
        self.state = State.STEADY
        self.target: PolicyVersion | None = None
        self._forks = dict(forks or {})
        self._begun = dict(begun or {})

    @property
    def torn(self) -> bool:
        return self.state is State.TORN

    @property
    def next(self) -> PolicyVersion:
        return PolicyVersion(self.current.lineage, self.current.number + 1)

    def distance(self, version: PolicyVersion | None) -> Distance:
        """From `version` to the current one."""
        if version is None:
            return Unknown()
        lineage, newest = self.current.lineage, self.current.number
        while lineage != version.lineage:
            if lineage not in self._forks:
                known = version.lineage in self._forks or version.lineage in {p for p, _ in self._forks.values()}
                return Ghost() if known else Unknown()
            lineage, at = self._forks[lineage]
            newest = min(newest, at)  # a fork of a fork may go back beyond the first one
        if version.number <= newest:
            return Lag(self.current.number - version.number)
        return Ahead(version.number - newest) if lineage == self.current.lineage else Ghost()

    def same_weights(self, one: PolicyVersion | None, other: PolicyVersion) -> bool:
        """Whether both name the same weights: equal, or both on the line that led here, with the same number."""
        return one == other or (isinstance(far := self.distance(one), Lag) and far == self.distance(other))

    def begin(self, target: PolicyVersion) -> None:
        """An update to the next version, or to the present one again. Raises VersionRefused, nothing changed."""
        if target not in (self.current, self.next):
            raise VersionRefused(f"an update from {self.current} leads to {self.next} or repeats it, not to {target}")
        self._step(Event.BEGIN)
        self.target = target

    def succeed(self) -> PolicyVersion:
        self._step(Event.SUCCEEDED)
        assert self.target is not None
        self.current, self.target = self.target, None
        return self.current

    def fail(self) -> None:
        """The version stays; what the engines serve is not known."""
        self._step(Event.FAILED)
        self.target = None

    def publish(self, version: PolicyVersion) -> bool:
        """A version that somebody else pushed; it mends torn engines. Returns whether anything changed."""
        if version == self.current and self.state is State.STEADY:
            return False
        if version.lineage != self.current.lineage or version.number < self.current.number:
            raise VersionRefused(f"{version} is not above {self.current}")
        if self.state is State.UPDATING:
            raise VersionRefused(f"an update to {self.target} is under way")
        self.current, self.state = version, State.STEADY
        return True

    def line(self) -> list[tuple[str, int | None]]:
        """The lineages that led here, the current one first, each with its last rollout that did. None: no bound."""
        lineage, last = self.current.lineage, None
        found: list[tuple[str, int | None]] = [(lineage, None)]
        while lineage in self._forks:
            bounds = [one for one in (last, self._begun.get(lineage)) if one is not None]
            last = min(bounds, default=None)
            lineage = self._forks[lineage][0]
            found.append((lineage, last))
        return found

    def fork(self, lineage: str, at: int, rollout: int | None = None) -> PolicyVersion:
        """The trainer went back to number `at`, after that rollout of its own: go on from there under a new name."""
        if self.state is State.UPDATING:
            raise VersionRefused(f"an update to {self.target} is under way")
        used = {self.current.lineage, *self._forks, *(parent for parent, _ in self._forks.values())}
        if not lineage or lineage in used:
            raise VersionRefused(f"the lineage {lineage!r} was used before")
        if not 0 <= at <= self.current.number:
            raise VersionRefused(f"number {at} is not in the past of {self.current}")
        self._forks[lineage] = (self.current.lineage, at)
        if rollout is not None:
            self._begun[lineage] = rollout
        self.current = PolicyVersion(lineage, at)
        return self.current

    def take_over(self, other: PolicyVersions) -> None:
        """Be what `other` is: after a restore, before anything was admitted."""
        self.current, self.state = other.current, other.state
        self._forks, self._begun = dict(other._forks), dict(other._begun)

    def _step(self, event: Event) -> None:
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise VersionRefused(f"{event.value!r} while {self.state.value}")
        self.state = target

    def to_json(self) -> dict[str, Any]:
        forks = {name: list(fork) for name, fork in self._forks.items()}
        state = {"lineage": self.current.lineage, "number": self.current.number, "forks": forks}
        return {**state, "begun": self._begun}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PolicyVersions:
        """Raises KeyError, TypeError or ValueError for what `to_json` does not make."""
        forks = {str(name): (str(parent), int(at)) for name, (parent, at) in value["forks"].items()}
        begun = {str(name): int(rollout) for name, rollout in value.get("begun", {}).items()}
        return cls(PolicyVersion(value["lineage"], value["number"]), forks, begun)
