"""Too old, or not: what becomes of a finished group, and of the prefix of an unfinished one.

Owns: the limit, the policies (`on_stale` and what it escalates to), and the reason that goes with every verdict.
Does not know: groups, queues, how a verdict is carried out (ownership.py).

Invariants (numbers are those of docs/admission.md):
1. (A51) With limit N a lag of N passes and N + 1 does not; without a limit everything passes but what has no lag by
   A54.
2. (A52) A negative limit or headroom is refused where it is given, here too.
3. (A54, A57) Ahead of the current version is quarantined; with a limit, unknown versions and ghosts never pass.
4. (V11) Only trainable tokens count, and the farthest of them decides.
5. Whatever the policy, no trainable token farther than the limit passes: policies choose what is lost, never the bound.
6. After `max_pristine_requeues` requeues for age the policy is `escalate_to`; it stays so until the group is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from recovery.admission.versions import Ahead, Distance, Ghost, Lag, PolicyVersions, Unknown
from recovery.config import Granularity, Policy
from recovery.model import PolicyVersion


class Action(Enum):
    """ACCEPT and QUARANTINE are for finished groups, RESUME and PIN for prefixes, the others for both."""

    ACCEPT = "accept"
    RESUME = "resume"
    MASK = "mask"
    PIN = "pin"
    REQUEUE = "requeue"
    REJECT = "reject"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do and why. `lag` is the number of updates if there is one."""

    action: Action
    reason: str
    lag: int | None = None


def farthest(distances: Iterable[Distance]) -> Distance:
    """The one that decides: ahead before unknown before ghost before the largest lag; nothing trainable is lag 0."""

    def rank(distance: Distance) -> tuple[int, int]:
        match distance:
            case Ahead(updates):
                return (3, updates)
            case Unknown():
                return (2, 0)
            case Ghost():
                return (1, 0)
            case Lag(updates):
                return (0, updates)

    return max(distances, key=rank, default=Lag(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The rules of one rollout; the fields are those of the block `rollout`.

    `granularity` (V17): what a sample that is too old costs, its whole group or its own tokens; its reward stays in
    the baseline.
    """

    limit: int | None = None
    policy: Policy = "requeue_pristine"
    headroom: int = 0
    max_requeues: int = 3
    escalate_to: Policy = "wait_not_drop"
    granularity: Granularity = "prompt_group"

    def __post_init__(self) -> None:
        if (self.limit is not None and self.limit < 0) or self.headroom < 0 or self.max_requeues < 0:
            raise ValueError("a lag, a headroom and a number of requeues are not negative")

    def policy_for(self, stale_requeues: int) -> Policy:
        """The policy of a group that was requeued for age so often."""
        return self.escalate_to if self.escalated(stale_requeues) else self.policy

    def escalated(self, stale_requeues: int) -> bool:
        return self.policy not in ("reject", "wait_not_drop") and stale_requeues >= self.max_requeues

    def waits_for(self, stale_requeues: int) -> bool:
        """Whether consumption waits for such a group rather than let it grow too old."""
        return self.limit is not None and self.policy_for(stale_requeues) == "wait_not_drop"

    def of_group(
        self, versions: PolicyVersions, trained: Collection[PolicyVersion | None], stale_requeues: int
    ) -> Verdict:
        """At pop and at lease issue. `trained` are the versions of the group's trainable tokens."""
        far = farthest(versions.distance(version) for version in trained)
        match far:
            case Ahead(updates):
                return Verdict(Action.QUARANTINE, f"newer than {_text(versions.current)} by {updates}", -updates)
            case Lag(updates) if self.limit is None or updates <= self.limit:
                return Verdict(Action.ACCEPT, f"lag {updates}", updates)
            case _ if self.limit is None:
                return Verdict(Action.ACCEPT, "no limit is set")
        reason = _too_far(far, self.limit)
        policy = self.policy_for(stale_requeues)
        if policy == "reject":
            return Verdict(Action.REJECT, reason, _lag(far))
        fresh = [one for one in trained if self._within(versions.distance(one))]
        if policy == "resume_masked" and fresh and None not in trained:
            return Verdict(Action.MASK, f"{reason}: its older tokens become context", _lag(far))
        return Verdict(Action.REQUEUE, reason, _lag(far))

    def of_prefix(
        self,
        versions: PolicyVersions,
        sampled: Collection[PolicyVersion | None],
        stale_requeues: int,
        *,
        has_logprobs: bool = True,
        served: Collection[PolicyVersion] = (),
    ) -> Verdict:
        """At restore: is an unfinished sample's prefix worth going on with? `served`: versions that engines have.

        For `pin_weights` a version of an earlier life is served if the trainer's line went through it.
        """
        policy = self.policy_for(stale_requeues)
        far = farthest(versions.distance(version) for version in sampled)
        lag = _lag(far)
        if policy == "pin_weights" and sampled:
            if None not in sampled and any(all(versions.same_weights(one, s) for one in sampled) for s in served):
                return Verdict(Action.PIN, "an engine serves the version it was sampled under", lag)
            return Verdict(Action.REQUEUE, "no engine serves the version it was sampled under", lag)
        headroom = 0 if self.escalated(stale_requeues) else self.headroom
        within = self._within(far, headroom)
        if within and has_logprobs:
            return Verdict(Action.RESUME, "no limit is set" if self.limit is None else f"lag {lag} + {headroom}", lag)
        reason = _too_far(far, self.limit, headroom) if not within else "its logprobs are missing"
        if policy == "reject":
            return Verdict(Action.REJECT, reason, lag)
        if policy == "resume_masked" and not isinstance(far, Ahead):
            return Verdict(Action.MASK, f"{reason}: it becomes context", lag)
        return Verdict(Action.REQUEUE, reason, lag)

    def _within(self, distance: Distance, headroom: int = 0) -> bool:
        if isinstance(distance, Lag):
            return self.limit is None or distance.updates + headroom <= self.limit
        return self.limit is None and not isinstance(distance, Ahead | Ghost)

    def beyond(self, versions: PolicyVersions, trained: Collection[PolicyVersion | None]) -> bool:
        """Whether a group of such tokens could not be leased now."""
        return any(not self._within(versions.distance(version)) for version in trained) and self.limit is not None

    def keep(self, versions: PolicyVersions, version: PolicyVersion) -> bool:
        """Whether a token of that version may be trained on."""
        return self._within(versions.distance(version))


def _lag(distance: Distance) -> int | None:
    return distance.updates if isinstance(distance, Lag) else None


def _text(version: PolicyVersion) -> str:
    return f"({version.lineage}, {version.number})"


def _too_far(distance: Distance, limit: int | None, headroom: int = 0) -> str:
    match distance:
        case Lag(updates):
            more = f" and a headroom of {headroom}" if headroom else ""
            return f"lag {updates}{more} is over the limit {limit}"
        case Ghost():
            return "of a branch that the trainer went back from"
        case Ahead(updates):
            return f"newer than the current version by {updates}"
        case Unknown():
            return "its version is unknown"
