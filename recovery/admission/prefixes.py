"""What a restart finds of unfinished samples, and whether it is worth going on with.

Owns: the port to whoever keeps prefixes, and the verdict on a whole group.
Does not know: how prefixes are stored or resumed (vllm_hooks does), when a group is begun.

Invariants (numbers are those of docs/admission.md):
1. (V12) It is asked when a replayed group is begun, before any token is spent on it.
2. (V17) A group's samples go on together or are drawn anew together; with `sibling` they go on if one of them may.
3. `pin_weights`: a group whose prefixes one engine can go on with goes to that engine, and to no other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from recovery.admission.attempts import Attempt
from recovery.admission.ownership import Ownership
from recovery.admission.staleness import Action
from recovery.model import PolicyVersion


@dataclass(frozen=True, slots=True)
class Prefix:
    """Saved tokens of an unfinished sample: how many, sampled under which versions, with logprobs or without."""

    n_tokens: int
    versions: frozenset[PolicyVersion]
    has_logprobs: bool = True


class Prefixes(Protocol):
    """Saved prefixes by request id."""

    @property
    def saved(self) -> bool:
        """Whether there is a store that takes snapshots of them."""

    def of(self, request_id: str) -> Prefix | None:
        """What is saved of that request; None if nothing is."""

    def known(self) -> Collection[str]:
        """Every request of which anything is saved, a whole answer too."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """(V18) Trained, or requeued pristine: nobody asks for them again; they go with a next snapshot."""


class _None:
    saved = False

    def of(self, request_id: str) -> Prefix | None:
        return None

    def known(self) -> Collection[str]:
        return ()

    def forget(self, request_ids: Sequence[str]) -> None:
        """There is nothing to forget."""


NO_PREFIXES: Prefixes = _None()


def verdict_of(
    attempt: Attempt, prefixes: Prefixes, own: Ownership, served: Collection[PolicyVersion]
) -> tuple[Action, int]:
    """What to do with the group's prefixes, and how many tokens they have. RESUME if there is none.

    PIN: every sample that has a prefix goes on under one of `served`, the versions of the engines it may go to.
    """
    found = [prefix for sample in attempt.samples if (prefix := prefixes.of(sample.request_id)) is not None]
    n_tokens = sum(prefix.n_tokens for prefix in found)
    action, refused = Action.RESUME, 0
    for prefix in found:
        verdict = own.staleness.of_prefix(
            own.versions,
            prefix.versions,
            attempt.stale,
            has_logprobs=prefix.has_logprobs,
            served=served,
        )
        if verdict.action in (Action.REQUEUE, Action.REJECT):
            refused += 1
            action = verdict.action
        elif refused == 0 and verdict.action is Action.PIN:
            action = verdict.action
    if own.staleness.granularity == "sibling" and refused < len(attempt.samples):
        return Action.RESUME, n_tokens  # (V17) those that stay too old are withheld when they are leased
    return action, n_tokens
