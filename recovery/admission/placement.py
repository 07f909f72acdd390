"""Which engine a group goes to, and whether it goes to any with the prefixes that are saved of it.

Owns: the choice among engines that follow every update and those that are pinned to one version.
Does not know: tasks, what an engine is made of.

Invariants (numbers are those of docs/admission.md):
1. A new draw goes to the engine with the fewest groups among those that follow the current version.
2. Under `pin_weights` a prefix goes on only where exactly its version is served, else it is drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from recovery.admission.attempts import Attempt
from recovery.admission.ownership import Ownership
from recovery.admission.prefixes import Prefixes, verdict_of
from recovery.admission.staleness import Action
from recovery.errors import ConfigError
from recovery.model import PolicyVersion


class Placement:
    """`pinned`: for each engine the version that it stays at, None if it follows every update."""

    def __init__(self, pinned: Sequence[PolicyVersion | None]) -> None:
        if None not in pinned:
            raise ConfigError("a rollout has at least one engine, and one that follows the weight updates")
        self._pinned = list(pinned)

    def of(self, attempt: Attempt, prefixes: Prefixes, own: Ownership, loads: Sequence[int]) -> tuple[Action, int, int]:
        """What to do with the group, the number of its saved tokens, its engine's index. `loads`: groups on each."""
        choices = [index for index, version in enumerate(self._pinned) if version is None]
        action, n_tokens = verdict_of(attempt, prefixes, own, [own.versions.current])
        if action in (Action.REQUEUE, Action.REJECT):
            serving = [
                index
                for index, version in enumerate(self._pinned)
                if version is not None and verdict_of(attempt, prefixes, own, [version])[0] is Action.PIN
            ]
            if serving:
                action, choices = Action.PIN, serving
        return action, n_tokens, min(choices, key=lambda index: loads[index])
