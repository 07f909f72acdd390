"""recovery.admission.ownership: every rule that needs more than one machine, against a model of plain sets.

Owns: the stateful comparison, the exhaustive walk over small E, P, batch and cap, and the contract's lines one by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recovery.admission.attempts import Phase
from recovery.admission.holds import AdmissionClosed, CannotRecord, Hold, HoldKind, Lifecycle
from recovery.admission.leases import Lease, LeaseSpent
from recovery.admission.limits import (
    ABORTS_MAX,
    CancelledTooOften,
    CannotClose,
    Exhausted,
    Limits,
    NewerThanCurrent,
    Waiting,
)
from recovery.admission.ownership import Ownership
from recovery.admission.samples import MalformedSample, copies
from recovery.admission.settlement import SourceBroken
from recovery.admission.versions import State
from tests.admission_doubles import NaiveSource, SourceDown, attempt, owner, run_one, sample, update

DRAIN, CUT = HoldKind.DRAIN, HoldKind.CUT


def groups_of(lease: Lease) -> list[int]:
    return [group[0].group_index for group in lease.groups]


# ---- the machine against plain sets -----------------------------------------------------------------------------


class OwnershipMachine(RuleBasedStateMachine):
    """What the test itself did, in sets of group numbers; nothing is read back from the machine to predict it.

    Among others A8, A16 (admission only where no hold is), M12 (a result never waits for a slot), M18 and M19.
    """

    @initialize(
        executing=st.integers(1, 3),
        more=st.integers(0, 3),
        batch=st.integers(1, 3),
        cap=st.none() | st.integers(3, 4),
        limit=st.sampled_from([None, 0, 1, 2]),
        policy=st.sampled_from(["requeue_pristine", "reject", "wait_not_drop"]),
    )
    def begin(self, executing: int, more: int, batch: int, cap: int | None, limit: int | None, policy: Any) -> None:
        self.E, self.P, self.batch, self.N = executing, max(executing + more, batch), batch, limit
        self.source = NaiveSource(12)
        rules = {"limit": limit, "policy": policy, "max_requeues": 1}
        self.own = owner(self.source, executing=self.E, slots=self.P, batch=batch, cap=cap, **rules)
        self.running: dict[int, tuple[Any, int]] = {}
        self.admitted_at: dict[int, int] = {}
        self.leases: dict[int, Lease] = {}
        self.spent: list[Lease] = []
        self.holds: dict[int, tuple[Hold, set[int]]] = {}
        self.version = 0
        self.torn = False
        self.rollout = 0
        self.committed: Counter[int] = Counter()

    def blocked(self) -> bool:
        return bool(self.holds) or self.torn

    @rule()
    def admit(self) -> None:
        if self.own.refusal():
            return
        assert not self.blocked() and len(self.running) < self.E
        record = self.own.admit()
        if record is None:
            assert not self.source.waiting
            return
        group = record.attempt.group_index
        assert group == min([group, *self.source.waiting]), "A6: replay comes first, in order"
        assert group not in self.running and not self.committed[group]
        self.running[group] = (record.execution, self.version)
        self.admitted_at[group] = self.version

    @precondition(lambda self: self.running)
    @rule(data=st.data(), draw=st.integers(0, 9))
    def finish(self, data: st.DataObject, draw: int) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        execution, _ = self.running.pop(group)
        self.own.complete(execution, copies(execution.attempt.samples), draw)
        self.leave_frontiers(group)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), down=st.booleans())
    def abort(self, data: st.DataObject, down: bool) -> None:
        group = data.draw(st.sampled_from(sorted(self.running)))
        execution, _ = self.running[group]
        if execution.attempt.aborted + 1 >= ABORTS_MAX:
            return
        del self.running[group]
        if down:
            self.source.down = {"requeue"}
            with pytest.raises(SourceDown):
                self.own.aborted(execution)
            self.source.down = set()
            assert group in self.source.out, "A9: nothing was given back"
        else:
            self.own.aborted(execution)
            assert group in self.source.waiting
            self.leave_frontiers(group)

    @rule()
    def reconcile(self) -> None:
        before = {r.attempt.group_index for r in self.own.settlement.retained}
        assert self.own.reconcile() == []
        assert before <= set(self.source.waiting)
        for group in before:
            self.leave_frontiers(group)

    @rule(skip=st.integers(1, 2))
    def lease(self, skip: int) -> None:
        retained = {r.attempt.group_index for r in self.own.settlement.retained}
        got = self.own.lease(self.rollout + skip)
        for group in retained & set(self.source.waiting):
            self.leave_frontiers(group)
        if not isinstance(got, Lease):
            return
        assert not self.blocked(), "A28"
        self.rollout = got.rollout
        self.leases[got.rollout] = got
        groups = groups_of(got)
        assert len(set(groups)) == len(groups) <= self.batch
        taken = {g for lease in self.leases.values() if lease is not got for g in groups_of(lease)}
        assert not taken & set(groups) and not set(self.running) & set(groups)
        for group in groups:
            assert group in self.source.out and not self.committed[group]
            assert self.N is None or self.version - self.admitted_at[group] <= self.N, "A51, A58"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), down=st.sampled_from(["", "acknowledge", "acknowledge requeue"]))
    def commit(self, data: st.DataObject, down: str) -> None:
        lease = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        self.spent.append(lease)
        groups = groups_of(lease)
        if down:
            self.source.down = set(down.split())
            with pytest.raises(SourceDown, match="acknowledge"):
                self.own.commit(lease)
            self.source.down = set()
            where = self.source.out if "requeue" in down else self.source.waiting
            assert all(group in where for group in groups), "A32"
        else:
            self.own.commit(lease)
            self.committed.update(groups)
            assert all((group, lease.rollout) in self.source.trained for group in groups)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        self.spent.append(lease)
        self.own.roll_back(lease)
        assert all(group in self.source.waiting for group in groups_of(lease))

    @precondition(lambda self: self.spent)
    @rule(data=st.data(), verb=st.sampled_from(["commit", "roll_back"]))
    def settle_again(self, data: st.DataObject, verb: str) -> None:
        """A31: any second attempt is an error without effect."""
        lease = data.draw(st.sampled_from(self.spent))
        with pytest.raises(LeaseSpent, match="settled once"):
            getattr(self.own, verb)(lease)

    @rule(kind=st.sampled_from(HoldKind))
    def hold(self, kind: HoldKind) -> None:
        if len(self.holds) < 3:
            hold = self.own.acquire(kind, "me", "test", 0.0)
            self.holds[hold.number] = (hold, set(self.running))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.holds)))
        hold, _ = self.holds.pop(number)
        assert self.own.gate.release(hold) is (not self.holds)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), ok=st.booleans(), again=st.booleans())
    def update(self, data: st.DataObject, ok: bool, again: bool) -> None:
        hold, frontier = self.holds[data.draw(st.sampled_from(sorted(self.holds)))]
        target = self.own.versions.current if again else self.own.versions.next
        errors: tuple[type[Exception], ...] = (CannotRecord,)
        try:
            done = self.own.gate.done(hold)
        except SourceDown:
            return
        assert done is (not frontier)
        try:
            self.own.begin_update(hold, target)
        except errors:
            assert hold.kind is CUT or frontier or not done or self.recorded(hold)
            return
        assert hold.kind is DRAIN and not frontier
        self.own.end_update(hold, ok)
        self.torn = not ok
        self.version += ok and not again
        assert self.own.versions.current.number == self.version

    def recorded(self, hold: Hold) -> bool:
        return self.own.gate._claims[hold.number].recorded

    def leave_frontiers(self, group: int) -> None:
        for _, frontier in self.holds.values():
            frontier.discard(group)

    @invariant()
    def everything_is_somewhere_once(self) -> None:
        if not hasattr(self, "own"):
            return
        places = Counter([*self.source.waiting, *self.source.out, *(group for group, _ in self.source.trained)])
        assert set(places) == set(range(12)) and set(places.values()) == {1}
        assert {r.attempt.group_index for r in self.own.attempts} == set(self.source.out)
        assert self.own.slots.used == len(self.source.out) <= self.P, "A8"
        assert all(self.committed[group] <= 1 for group in range(12))

    @invariant()
    def frontiers_agree(self) -> None:
        if hasattr(self, "own"):
            for hold, frontier in self.holds.values():
                assert self.own.gate.left(hold) == len(frontier), "A17, A19"


TestOwnershipMachine = OwnershipMachine.TestCase
TestOwnershipMachine.settings = settings(max_examples=120, stateful_step_count=40)


# ---- every reachable state of small ones ------------------------------------------------------------------------


def key_of(own: Ownership, source: NaiveSource) -> Any:
    """What decides the future; ages beyond 3 are one."""
    records = tuple(
        sorted(
            (r.attempt.group_index, r.phase.value, min(3, own.ages.of(r)[1][0]), min(r.attempt.stale, 2))
            for r in own.attempts
        )
    )
    order = tuple(entry.record.attempt.group_index for entry in own.finished)
    holds = tuple(sorted(h.kind.value for h in own.gate.active))
    stale = tuple(sorted((g, min(n, 2)) for g, n in source.stale.items()))
    leases = tuple(tuple(groups_of(lease)) for lease in own.leases.open)
    state = (own.versions.state.value, min(own.patience.updates_due, 3), own.exhausted)
    return records, order, holds, stale, leases, state, tuple(source.waiting)


def actions(own: Ownership) -> Iterator[tuple[str, int]]:
    if not own.refusal():
        yield ("admit", 0)
    for record in own.attempts.in_phase(Phase.EXECUTING):
        yield ("finish", record.attempt.group_index)
        if record.attempt.aborted == 0:
            yield ("abort", record.attempt.group_index)
    yield ("lease", 0)
    for lease in own.leases.open:
        yield ("commit", lease.rollout)
        yield ("commit fails", lease.rollout)
    if not own.gate.active:
        yield ("hold", 0)
    else:
        yield ("release", 0)
        if not own.attempts.in_phase(Phase.EXECUTING) and own.versions.current.number < 2:
            yield ("update", 0)


def act(own: Ownership, source: NaiveSource, action: tuple[str, int]) -> None:
    name, number = action
    running = {r.attempt.group_index: r.execution for r in own.attempts.in_phase(Phase.EXECUTING)}
    leases = {lease.rollout: lease for lease in own.leases.open}
    match name:
        case "admit":
            own.admit()
        case "finish":
            own.complete(running[number], copies(running[number].attempt.samples), number)
        case "abort":
            own.aborted(running[number])
        case "lease":
            own.lease(own.leases.newest + 1)
        case "commit":
            own.commit(leases[number])
        case "commit fails":
            source.down = {"acknowledge", "requeue"}
            with pytest.raises(SourceDown):
                own.commit(leases[number])
            source.down = set()
        case "hold":
            own.acquire(DRAIN, "weights", "", 0.0)
        case "release":
            own.gate.release(own.gate.active[0])
        case "update":
            hold = own.gate.active[0]
            assert own.gate.done(hold), "nothing executes, so every frontier is done"
            if not own.gate._claims[hold.number].recorded:
                own.begin_update(hold, own.versions.next)
                own.end_update(hold, True)


def finishes(own: Ownership, source: NaiveSource, size: int) -> None:
    """From here a patient trainer gets everything: no stuck state."""
    for record in own.attempts.in_phase(Phase.EXECUTING):
        act(own, source, ("finish", record.attempt.group_index))
    for hold in own.gate.active:  # no consumer was needed for the frontier to end
        assert own.gate.done(hold)
        own.gate.release(hold)
    for _ in range(60):
        for lease in own.leases.open:
            own.commit(lease)
        assert own.reconcile() == []
        while not own.refusal() and own.admit() is not None:
            pass
        for record in own.attempts.in_phase(Phase.EXECUTING):
            act(own, source, ("finish", record.attempt.group_index))
        got = own.lease(own.leases.newest + 1)
        if isinstance(got, Exhausted):
            assert sorted(group for group, _ in source.trained) == list(range(size))
            return
        if isinstance(got, Lease):
            own.commit(got)
            update(own)
    raise AssertionError("stuck")


SMALL = [
    # groups, E, P, batch, cap, limit, policy
    (3, 1, 1, 1, None, None, "requeue_pristine"),
    (2, 1, 2, 1, 1, 0, "requeue_pristine"),
    (2, 2, 2, 1, None, 0, "wait_not_drop"),
    (3, 2, 2, 2, None, 1, "requeue_pristine"),
    (3, 1, 2, 2, None, 0, "requeue_pristine"),
    (2, 2, 3, 2, None, 0, "requeue_pristine"),
    (2, 2, 3, 1, None, 1, "wait_not_drop"),
    (3, 2, 3, 2, 2, 1, "requeue_pristine"),
    (2, 1, 3, 1, 2, 0, "reject"),
    (2, 2, 2, 1, None, 0, "requeue_pristine"),
]


def walk(size: int, executing: int, slots: int, batch: int, cap: int | None, limit: int | None, policy: Any) -> int:
    """Breadth first through every state; in each, every frontier ends and everything is trained once."""
    rules = {"limit": limit, "policy": policy, "max_requeues": 1}

    def reach(path: tuple[tuple[str, int], ...]) -> tuple[Ownership, NaiveSource]:
        source = NaiveSource(size)
        own = owner(source, executing=executing, slots=slots, batch=batch, cap=cap, **rules)
        for action in path:
            act(own, source, action)
        return own, source

    seen: set[Any] = set()
    level: list[tuple[tuple[str, int], ...]] = [()]
    while level:
        following = []
        for path in level:
            own, source = reach(path)
            key = key_of(own, source)
            if key in seen:
                continue
            seen.add(key)
            assert own.slots.used <= slots
            following += [(*path, action) for action in actions(own)]
            finishes(own, source, size)
        level = following
    return len(seen)


@pytest.mark.parametrize("small", SMALL, ids=str)
def test_a10_a13_no_state_of_a_small_rollout_is_stuck(small: tuple[Any, ...]) -> None:
    assert walk(*small) > 20


# ---- one by one -------------------------------------------------------------------------------------------------


def test_a1_a_short_answer_of_the_source_goes_back_whole_and_blocks_until_it_has() -> None:
    source = NaiveSource(4)
    own = owner(source)
    clash = run_one(own)
    source.says = [attempt(clash)]
    source.down = {"requeue"}
    with pytest.raises(SourceBroken, match="twice"):
        own.admit()
    assert "given back" in own.refusal() or own.failure is not None
    assert own.settlement.refuses and own.slots.used == 1
    source.down = set()
    assert own.reconcile() == [] and not own.settlement.refuses
    assert clash in source.out, "A2: the active one is untouched"


def test_a4_a_receipt_of_another_owner_or_execution_is_refused() -> None:
    own, other = owner(NaiveSource(4), batch=1), owner(NaiveSource(4), batch=1)
    run_one(own)
    run_one(other)
    theirs, mine = other.lease(1), own.lease(1)
    assert isinstance(theirs, Lease) and isinstance(mine, Lease)
    with pytest.raises(LeaseSpent, match="another rollout"):
        own.commit(theirs)
    own.commit(mine)


def test_a5_execution_never_touches_the_pristine_samples() -> None:
    own = owner(NaiveSource(1, n=2), batch=1)
    record = own.admit()
    assert record is not None and record.execution is not None
    made = copies(record.attempt.samples)
    made[0].row["x"] = 1
    made[0].token_ids.append(5)
    assert record.attempt.samples[0].row == {} and record.attempt.samples[0].token_ids == []


def test_a65_what_is_requeued_is_the_pristine_group_never_what_was_generated() -> None:
    own = owner(NaiveSource(1), batch=1)
    record = own.admit()
    assert record is not None and record.execution is not None
    made = copies(record.attempt.samples)
    made[0].row["x"], made[0].token_ids, made[0].version_spans = 1, [5], [(0, 1, "a", 0)]
    own.complete(record.execution, made, 0)
    lease = own.lease(1)
    assert isinstance(lease, Lease)
    own.roll_back(lease)
    again = own.admit()
    assert again is not None
    assert again.attempt.samples[0] == sample(0) and again.attempt is not record.attempt and again.samples == ()


def test_a14_limits_that_could_not_work_are_refused() -> None:
    for wrong in (
        {"executing": 0, "slots": 1, "batch_groups": 1},
        {"executing": 2, "slots": 1, "batch_groups": 1},
        {"executing": 1, "slots": 2, "batch_groups": 3},
        {"executing": 1, "slots": 4, "batch_groups": 3, "buffer_max": 2},
        {"executing": 1, "slots": 1, "batch_groups": 0},
    ):
        with pytest.raises(ValueError):
            Limits(**wrong)


@pytest.mark.parametrize("limit", [None, 0, 2])
@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_a51_a58_the_bound_holds_when_the_lease_is_issued(limit: int | None, lag: int) -> None:
    source = NaiveSource(2)
    own = owner(source, batch=1, limit=limit)
    first = run_one(own)
    for _ in range(lag):
        update(own)
    got = own.lease(1)
    if limit is None or lag <= limit:
        assert isinstance(got, Lease) and groups_of(got) == [first]
    else:
        assert isinstance(got, Waiting) and first in source.waiting and source.stale == {first: 1}
    counted = own.metrics._counts
    assert counted["fully_async/count/stale_rejected"] == counted["fully_async/count/stale_requeued"], "A66"


def test_a29_m15_a_batch_that_waited_for_a_hold_is_looked_at_again() -> None:
    source = NaiveSource(4)
    own = owner(source, batch=2, limit=0)
    run_one(own), run_one(own)
    hold = own.acquire(DRAIN, "weights", "", 0.0)
    assert isinstance(own.lease(1), Waiting), "A28"
    assert len(own.finished) == 2, "nothing was popped"
    assert own.gate.done(hold)
    own.begin_update(hold, own.versions.next)
    own.end_update(hold, True)
    own.gate.release(hold)
    assert isinstance(own.lease(1), Waiting) and len(own.finished) == 0 and source.waiting == [0, 1, 2, 3]


def test_m17_those_that_pass_are_kept_and_the_rest_is_topped_up() -> None:
    own = owner(NaiveSource(4), batch=2, limit=0)
    old = run_one(own)
    update(own)
    young = run_one(own)
    assert isinstance(own.lease(1), Waiting)
    assert [entry.record.attempt.group_index for entry in own.finished] == [young]
    assert run_one(own) == old
    got = own.lease(1)
    assert isinstance(got, Lease) and groups_of(got) == [young, old]


def test_m16_m32_a_requeue_that_fails_is_kept_told_and_retried() -> None:
    source, settled = NaiveSource(2), list[int]()
    own = owner(source, batch=1, limit=0, settled=lambda attempt: settled.append(attempt.group_index))
    stale = run_one(own)
    update(own)
    source.down = {"requeue"}
    with pytest.raises(SourceDown):
        own.lease(1)
    assert stale in source.out and own.slots.used == 1 and len(own.settlement.retained) == 1 and not settled
    source.down = set()
    assert isinstance(own.lease(1), Waiting)
    assert stale in source.waiting and own.slots.used == 0 and settled == [stale], "whoever kept its prefixes is told"


def test_a54_m33_a_group_newer_than_the_current_version_is_an_error_and_kept() -> None:
    source = NaiveSource(2)
    own = owner(source, batch=1)
    newer = run_one(own, token_ids=[1], version_spans=[(0, 1, "a", 4)])
    fresh = run_one(own)
    with pytest.raises(NewerThanCurrent, match="by 4"):
        own.lease(1)
    assert newer in source.out
    got = own.lease(1)
    assert isinstance(got, Lease) and groups_of(got) == [fresh]
    assert own.reconcile() == [] and newer in source.waiting


def test_a57_a_version_of_a_lineage_nobody_knows_fails_closed_only_with_a_limit() -> None:
    for limit in (None, 3):
        own = owner(NaiveSource(1), batch=1, limit=limit)
        run_one(own, token_ids=[1], version_spans=[(0, 1, "z", 0)])
        assert isinstance(own.lease(1), Lease) is (limit is None)


def test_v9_v10_no_group_of_a_dead_branch_passes_as_fresh() -> None:
    """Snapshot at 12, trainer back at 10, new 11 and 12: the dead 11 and 12 are ghosts, 10 and below are not."""
    own = owner(NaiveSource(9), batch=1, slots=9, limit=2)
    for _ in range(12):
        own.versions.begin(own.versions.next)
        own.versions.succeed()
    own.versions.fork("b", 10)
    for _ in range(2):
        own.versions.begin(own.versions.next)
        own.versions.succeed()
    passed = []
    for lineage, number in (("a", 12), ("a", 11), ("b", 11), ("a", 10), ("a", 9), ("b", 12)):
        run_one(own, token_ids=[1], version_spans=[(0, 1, lineage, number)])
        if isinstance(own.lease(own.leases.newest + 1), Lease):
            passed.append((lineage, number))
        else:
            assert run_one(own) >= 0  # what was requeued comes again and passes
            assert isinstance(own.lease(own.leases.newest + 1), Lease)
        for lease in own.leases.open:
            own.commit(lease)
    assert passed == [("b", 11), ("a", 10), ("b", 12)]


def test_resume_masked_trains_what_is_young_enough() -> None:
    own = owner(NaiveSource(1), batch=1, limit=1, policy="resume_masked")
    for _ in range(3):
        update(own)
    run_one(own, token_ids=[1, 2, 3], version_spans=[(0, 1, "a", 0), (1, 2, "a", 2), (2, 3, "a", 3)])
    got = own.lease(1)
    assert isinstance(got, Lease)
    assert got.groups[0][0].loss_mask == [0, 1, 1] and got.groups[0][0].version_spans[0] == (0, 1, "a", 0)


@pytest.mark.parametrize("policy", ["requeue_pristine", "reject", "wait_not_drop"])
def test_v17_a_stale_sibling_alone_is_withheld_and_its_reward_stays(policy: Any) -> None:
    spans = [[(0, 1, "a", 0), (1, 2, "a", 3)], [(0, 2, "a", 3)]]

    def at_3(granularity: Any, both_old: bool = False) -> tuple[Any, NaiveSource, Any]:
        source = NaiveSource(1, n=2)
        own = owner(source, batch=1, limit=1, policy=policy, granularity=granularity)
        for _ in range(3):
            update(own)
        record = own.admit()
        assert record is not None and record.execution is not None
        made = copies(record.attempt.samples)
        for one, found in zip(made, [spans[0]] * 2 if both_old else spans, strict=True):
            one.token_ids, one.version_spans, one.reward = [1, 2], list(found), 0.5
        own.complete(record.execution, made, 0)
        return own, source, own.lease(1)

    own, source, got = at_3("sibling")
    assert isinstance(got, Lease) and source.stale == {}
    assert [one.loss_mask for one in got.groups[0]] == [[0, 0], [1, 1]]
    assert [one.reward for one in got.groups[0]] == [0.5, 0.5], "it counts in the baseline"
    assert own.metrics._counts["rollout/fully_async/samples_withheld"] == 1
    assert not own.metrics._counts["fully_async/count/stale_rejected"]
    for case in (at_3("prompt_group"), at_3("sibling", both_old=True)):
        assert isinstance(case[2], Waiting | Exhausted), "the group: none of it is trained on"


def test_v17_a_cap_does_not_evict_as_stale_what_can_be_leased_in_part() -> None:
    for granularity in ("prompt_group", "sibling"):
        own = owner(NaiveSource(3, n=2), executing=1, cap=2, batch=2, limit=0, granularity=granularity)
        run_one(own)
        first = next(iter(own.finished)).record
        update(own)
        for one, number in zip(first.samples, (0, 1), strict=True):
            one.token_ids, one.loss_mask, one.version_spans = [1], [1], [(0, 1, "a", number)]
        assert own.ages.of(first)[0] is (granularity == "prompt_group")


@pytest.mark.parametrize("limit, admitted", [(0, 2), (1, 4), (2, 6), (None, 6)])
def test_where_every_group_is_waited_for_no_more_are_admitted_than_can_be_trained(limit: Any, admitted: int) -> None:
    """Batches of 2: within N updates come N + 1 batches, and no group has to be drawn again for age."""
    source = NaiveSource(20)
    own = owner(source, executing=6, slots=6, batch=2, limit=limit, policy="wait_not_drop")
    n = 0
    while not own.refusal():
        assert own.admit() is not None
        n += 1
    assert n == admitted
    for rollout in range(1, 11):
        while not own.refusal() and own.admit() is not None:
            pass
        for record in own.attempts.in_phase(Phase.EXECUTING):
            assert record.execution is not None
            own.complete(record.execution, copies(record.attempt.samples), 0)
        got = own.lease(rollout)
        assert isinstance(got, Lease), got
        own.commit(got)
        update(own)
    assert len(source.trained) == 20 and source.stale == {}


def test_reject_gives_a_stale_group_up_under_the_coming_rollout() -> None:
    source = NaiveSource(1)
    own = owner(source, batch=1, limit=0, policy="reject")
    run_one(own)
    update(own)
    assert own.admit() is None
    assert isinstance(own.lease(7), Exhausted) and source.trained == [(0, 1)] and own.slots.used == 0


def test_the_long_group_is_waited_for_after_it_was_requeued_for_age() -> None:
    """Escalation: consumption stops before the last update that the long group could bear."""
    source = NaiveSource(8)
    own = owner(source, executing=2, batch=1, limit=1, max_requeues=1)
    own.versions.begin(own.versions.next)
    own.versions.succeed()
    run_one(own, token_ids=[1], version_spans=[(0, 1, "a", 0)])
    own.versions.begin(own.versions.next)
    own.versions.succeed()
    assert isinstance(own.lease(1), Waiting) and source.stale == {0: 1}
    long = own.admit()
    assert long is not None and long.attempt.stale == 1
    run_one(own)
    first = own.lease(1)
    assert isinstance(first, Lease), "one update is borne"
    own.commit(first)
    run_one(own)
    waiting = own.lease(2)
    assert isinstance(waiting, Waiting) and "waited for" in waiting.reason
    own.versions.begin(own.versions.next)
    own.versions.succeed()
    assert isinstance(own.lease(2), Waiting)
    assert long.execution is not None
    own.complete(long.execution, copies(long.attempt.samples), 0)
    got = own.lease(2)
    assert isinstance(got, Lease) and groups_of(got) == [0], "it goes first"


def test_m11_m10_a_generation_that_fails_reaches_the_consumer_before_queued_groups() -> None:
    source = NaiveSource(4)
    own = owner(source, batch=1)
    run_one(own)
    record = own.admit()
    assert record is not None and record.execution is not None
    hold = own.acquire(DRAIN, "weights", "", 0.0)
    own.broke(record.execution, RuntimeError("the reward model is gone"))
    with pytest.raises(RuntimeError, match="reward"):
        own.lease(1)
    with pytest.raises(RuntimeError, match="reward"):
        own.gate.done(hold)
    assert record.attempt.group_index in source.waiting and own.gate.active == (hold,), "A20"
    assert own.refusal() == "the rollout has failed"
    own.close()
    assert own.settle_all() == [] and own.gate.lifecycle is Lifecycle.CLOSED, "M9: close settles everything"


def test_m13_what_is_no_group_is_rolled_back_and_a_failure() -> None:
    source = NaiveSource(4, n=2)
    own = owner(source, batch=1)
    for returned in (
        None,
        [],
        [sample(0)],
        [sample(0), "text"],
        [sample(0), sample(0, token_ids=[1], logprobs=[0, 0])],
    ):
        own.failure = None
        record = own.admit()
        assert record is not None and record.execution is not None
        with pytest.raises(MalformedSample):
            own.complete(record.execution, returned, 0)
        assert own.failure is not None and own.slots.used == 0
    assert source.waiting == [0, 1, 2, 3]


def test_a67_identity_is_stamped_on_whatever_object_came_back() -> None:
    own = owner(NaiveSource(1, n=2), batch=1)
    record = own.admit()
    assert record is not None and record.execution is not None
    own.complete(record.execution, [sample(7, 9), sample(8, 9)], 0)
    got = own.lease(1)
    assert isinstance(got, Lease)
    assert [(s.row_id, s.group_index, s.sample_index, s.request_id) for s in got.groups[0]] == [
        ("g0", 0, 0, "g0/0"),
        ("g0", 0, 1, "g0/1"),
    ]


def test_a_group_that_is_cancelled_for_ever_is_a_failure() -> None:
    own = owner(NaiveSource(1), batch=1)
    for _ in range(ABORTS_MAX):
        assert own.failure is None
        record = own.admit()
        assert record is not None and record.execution is not None
        own.aborted(record.execution)
    assert isinstance(own.failure, CancelledTooOften)


def test_a_filtered_group_is_committed_with_the_coming_rollout() -> None:
    source = NaiveSource(3)
    own = owner(source, batch=1, keep=lambda samples: samples[0].group_index != 0)
    run_one(own), run_one(own)
    assert source.trained == [(0, 1)] and own.slots.used == 1


def test_a25_a26_an_update_needs_a_drain_hold_that_saw_its_frontier_end() -> None:
    own = owner(NaiveSource(4))
    record = own.admit()
    assert record is not None and record.execution is not None
    drain, cut = own.acquire(DRAIN, "weights", "", 0.0), own.acquire(CUT, "snapshot", "", 0.0)
    for hold in (drain, cut):
        with pytest.raises(CannotRecord):
            own.begin_update(hold, own.versions.next)
    own.complete(record.execution, copies(record.attempt.samples), 0)
    with pytest.raises(CannotRecord, match="seen"):
        own.begin_update(drain, own.versions.next)
    assert own.gate.done(drain)
    own.begin_update(drain, own.versions.next)
    own.end_update(drain, False)
    assert own.gate.active == (drain, cut) and own.versions.state is State.TORN
    own.gate.release(drain), own.gate.release(cut)
    assert "torn" in own.refusal(), "A63: closed although nobody holds it"
    assert isinstance(own.lease(1), Waiting)
    update(own)
    assert own.refusal() == "" and own.versions.current.number == 1


def test_a23_a36_a46_a47_a48_m5_close_is_sticky_refuses_open_leases_and_resumes_from_what_is_left() -> None:
    source = NaiveSource(4)
    own = owner(source, batch=1)
    run_one(own), run_one(own)
    lease = own.lease(5)
    assert isinstance(lease, Lease)
    hold = own.acquire(DRAIN, "weights", "", 0.0)
    with pytest.raises(CannotClose, match="5"):
        own.close()
    assert own.gate.lifecycle is Lifecycle.CLOSING and own.gate.active == ()
    assert own.gate.release(hold) is False, "M6"
    with pytest.raises(AdmissionClosed):
        own.acquire(DRAIN, "weights", "", 0.0)
    with pytest.raises(AdmissionClosed):
        own.lease(6)
    own.commit(lease)
    own.close()
    source.down = {"requeue"}
    assert len(own.settle_all()) >= 1 and own.gate.lifecycle is Lifecycle.CLOSING, "M26"
    source.down = set()
    own.close()
    assert own.settle_all() == [] and own.gate.lifecycle is Lifecycle.CLOSED
    assert sorted(source.waiting) == [1, 2, 3] and source.trained == [(0, 5)] and not source.out


def test_a56_a_batch_takes_no_more_than_it_needs_in_the_order_of_finishing() -> None:
    """Compatibility: without a limit and a hold it is a queue."""
    own = owner(NaiveSource(6), executing=3, slots=6, batch=2)
    records = [own.admit() for _ in range(3)]
    for index in (2, 0, 1):
        record = records[index]
        assert record is not None and record.execution is not None
        own.complete(record.execution, copies(record.attempt.samples), 0)
    got = own.lease(1)
    assert isinstance(got, Lease) and groups_of(got) == [2, 0]
    assert [entry.record.attempt.group_index for entry in own.finished] == [1]


def test_the_last_batch_may_be_smaller_and_then_it_is_over() -> None:
    own = owner(NaiveSource(3), batch=2)
    for _ in range(3):
        run_one(own)
    first = own.lease(1)
    assert isinstance(first, Lease) and isinstance(own.lease(2), Waiting)
    assert own.admit() is None
    last = own.lease(2)
    assert isinstance(last, Lease) and groups_of(last) == [2]
    assert isinstance(own.lease(3), Waiting), "rolled back, they would come again"
    own.commit(first), own.commit(last)
    assert isinstance(own.lease(3), Exhausted)


@pytest.mark.parametrize("stale_first, draws", list(itertools.product([False, True], [(1, 0), (0, 1)])))
def test_a11_over_the_cap_the_stalest_goes_then_the_lowest_draw(stale_first: bool, draws: tuple[int, int]) -> None:
    source = NaiveSource(6)
    own = owner(source, executing=1, slots=6, batch=2, cap=2, limit=1 if stale_first else None)
    first = run_one(own, draw=draws[0], token_ids=[1], version_spans=[(0, 1, "a", 0)])
    second = run_one(own, draw=draws[1], token_ids=[1], version_spans=[(0, 1, "a", 0)])
    if stale_first:
        update(own)
        own.versions.begin(own.versions.next)
        own.versions.succeed()
    run_one(own, draw=9)
    gone = {first, second} if stale_first else {first if draws[0] < draws[1] else second}
    assert set(source.waiting) & {first, second} == gone
    assert own.slots.used == 3 - len(gone)
