"""recovery.admission.staleness: the boundary, the policies and the escalation, as tables; the bound as a property."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.admission.staleness import Action, Policy, Staleness, farthest
from recovery.admission.versions import Ahead, Ghost, Lag, PolicyVersions, Unknown
from recovery.model import PolicyVersion

POLICIES = get_args(Policy)


def at_12() -> PolicyVersions:
    """Version 12 of lineage b, which left a at 10; a went on to 12 before."""
    versions = PolicyVersions(PolicyVersion("a", 12))
    versions.fork("b", 10)
    for _ in range(2):
        versions.begin(versions.next)
        versions.succeed()
    return versions


def v(number: int, lineage: str = "b") -> PolicyVersion:
    return PolicyVersion(lineage, number)


AGES = {
    "lag 0": v(12),
    "lag N": PolicyVersion("a", 10),
    "lag N + 1": PolicyVersion("a", 9),
    "ghost": PolicyVersion("a", 12),
    "unknown": PolicyVersion("z", 12),
    "no version": None,
    "ahead": v(13),
}
PASS = {
    None: {"lag 0", "lag N", "lag N + 1", "ghost", "unknown", "no version"},
    0: {"lag 0"},
    2: {"lag 0", "lag N"},
    3: {"lag 0", "lag N", "lag N + 1"},
}


@pytest.mark.parametrize("limit", PASS)
@pytest.mark.parametrize("age", AGES)
def test_a51_a54_a57_the_boundary_at_pop_and_at_lease(limit: int | None, age: str) -> None:
    verdict = Staleness(limit=limit).of_group(at_12(), {AGES[age]}, 0)
    expected = Action.QUARANTINE if age == "ahead" else Action.ACCEPT if age in PASS[limit] else Action.REQUEUE
    assert verdict.action is expected and verdict.reason


@pytest.mark.parametrize("limit", PASS)
@pytest.mark.parametrize("age", AGES)
def test_v10_v12_the_boundary_at_restore(limit: int | None, age: str) -> None:
    """Ghosts are never resumed unasked, limit or not."""
    verdict = Staleness(limit=limit).of_prefix(at_12(), {AGES[age]}, 0)
    resumes = age in PASS[limit] and age != "ghost"
    assert verdict.action is (Action.RESUME if resumes else Action.REQUEUE) and verdict.reason


@pytest.mark.parametrize("wrong", [{"limit": -1}, {"headroom": -1}, {"max_requeues": -1}])
def test_a52_negative_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Staleness(**wrong)


@pytest.mark.parametrize("headroom, resumes", [(0, True), (1, True), (2, False)])
def test_v13_a_prefix_needs_room_for_the_updates_of_its_suffix(headroom: int, resumes: bool) -> None:
    verdict = Staleness(limit=3, headroom=headroom).of_prefix(at_12(), {v(10)}, 0)
    assert verdict.action is (Action.RESUME if resumes else Action.REQUEUE) and verdict.lag == 2


@pytest.mark.parametrize(
    "policy, group, prefix",
    [
        ("reject", Action.REJECT, Action.REJECT),
        ("requeue_pristine", Action.REQUEUE, Action.REQUEUE),
        ("resume_mixed", Action.REQUEUE, Action.REQUEUE),
        ("resume_masked", Action.MASK, Action.MASK),
        ("pin_weights", Action.REQUEUE, Action.REQUEUE),
        ("wait_not_drop", Action.REQUEUE, Action.REQUEUE),
    ],
)
def test_what_each_policy_does_with_what_is_too_old(policy: Any, group: Action, prefix: Action) -> None:
    rules = Staleness(limit=1, policy=policy)
    assert rules.of_group(at_12(), {v(10), v(12)}, 0).action is group
    assert rules.of_prefix(at_12(), {v(10)}, 0).action is prefix


def test_v5_a_prefix_without_logprobs_is_masked_or_thrown_away() -> None:
    for policy in POLICIES:
        action = Staleness(policy=policy).of_prefix(at_12(), {v(12)}, 0, has_logprobs=False).action
        expected = {"resume_masked": Action.MASK, "reject": Action.REJECT}.get(policy, Action.REQUEUE)
        assert action is expected


def test_pin_weights_needs_an_engine_of_exactly_that_version() -> None:
    rules = Staleness(limit=0, policy="pin_weights")
    assert rules.of_prefix(at_12(), {v(11)}, 0, served=[v(11), v(12)]).action is Action.PIN
    assert rules.of_prefix(at_12(), {v(11)}, 0, served=[v(12)]).action is Action.REQUEUE
    assert rules.of_prefix(at_12(), {v(11), v(12)}, 0, served=[v(11), v(12)]).action is Action.REQUEUE


@pytest.mark.parametrize("requeues, escalated", [(0, False), (1, False), (2, True), (9, True)])
def test_it_escalates_after_so_many_requeues_for_age(requeues: int, escalated: bool) -> None:
    rules = Staleness(limit=1, max_requeues=2, escalate_to="resume_masked", headroom=1)
    assert (rules.policy_for(requeues) == "resume_masked") is escalated
    assert (rules.of_group(at_12(), {v(10), v(12)}, requeues).action is Action.MASK) is escalated
    assert (rules.of_prefix(at_12(), {v(11)}, requeues).action is Action.RESUME) is escalated, "headroom is waived"
    waits = Staleness(limit=1, max_requeues=2)
    assert waits.waits_for(requeues) is escalated
    assert not Staleness(max_requeues=0).waits_for(requeues), "without a limit nothing grows too old"


@given(
    limit=st.integers(0, 4),
    policy=st.sampled_from(POLICIES),
    escalate_to=st.sampled_from(POLICIES),
    requeues=st.integers(0, 4),
    trained=st.sets(st.sampled_from([*AGES.values(), v(11), v(10), v(9)]), min_size=1),
)
@settings(max_examples=300)
def test_whatever_the_policy_nothing_beyond_the_limit_is_trained_on(
    limit: int, policy: Any, escalate_to: Any, requeues: int, trained: set[PolicyVersion | None]
) -> None:
    rules = Staleness(limit=limit, policy=policy, escalate_to=escalate_to, max_requeues=2)
    ages = {12: 0, 11: 1, 10: 2, 9: 3}
    lags = {
        one: ages[one.number] for one in trained if one in (v(12), v(11), v(10), v(9), AGES["lag N"], AGES["lag N + 1"])
    }
    young = {one for one, lag in lags.items() if lag <= limit}
    verdict = rules.of_group(at_12(), trained, requeues)
    if verdict.action is Action.ACCEPT:
        assert young == trained
    if verdict.action is Action.MASK:
        assert young and young != trained
        kept = {one for one in trained if one is not None and rules.keep(at_12(), one)}
        assert kept == young
    assert (verdict.action is Action.QUARANTINE) is (AGES["ahead"] in trained)


def test_what_decides_is_the_farthest() -> None:
    order = [Lag(0), Lag(7), Ghost(), Unknown(), Ahead(1)]
    for n in range(1, len(order) + 1):
        assert farthest(order[:n]) == order[n - 1]
    assert farthest([]) == Lag(0)


def test_pin_weights_knows_the_same_weights_by_another_lineage_s_name() -> None:
    """A restart names its versions anew: the checkpoint's weights are those of the branch before, up to the fork."""
    versions = at_12()
    versions.fork("after", 11)
    rules = Staleness(policy="pin_weights")
    assert rules.of_prefix(versions, {v(11)}, 0, served=[versions.current]).action is Action.PIN
    assert rules.of_prefix(versions, {v(10)}, 0, served=[versions.current]).action is Action.REQUEUE
    assert rules.of_prefix(versions, {v(12)}, 0, served=[PolicyVersion("after", 12)]).action is Action.REQUEUE, (
        "a ghost"
    )
    assert rules.of_prefix(versions, {None}, 0, served=[versions.current]).action is Action.REQUEUE
