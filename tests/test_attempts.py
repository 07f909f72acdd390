"""recovery.admission.attempts, slots, leases: receipts are objects, moves are a table, nothing happens twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.admission.attempts import TRANSITIONS, Attempts, Phase, ReceiptRefused, Record, Terminal
from recovery.admission.leases import Lease, Leases, LeaseSpent
from recovery.admission.slots import SlotError, Slots
from recovery.model import PolicyVersion
from tests.admission_doubles import attempt

V0 = PolicyVersion("a", 0)


def terminal(table: Attempts, group: int = 0) -> tuple[Record, Terminal]:
    record = table.adopt(attempt(group), V0)
    table.end(table.begin(record))
    assert record.terminal is not None
    return record, record.terminal


@given(st.lists(st.sampled_from(Phase), min_size=1, max_size=6))
def test_only_moves_of_the_table_are_made(path: list[Phase]) -> None:
    table = Attempts("one", "rollout")
    record = table.adopt(attempt(0), V0)
    for phase in path:
        before = record.phase
        if phase in TRANSITIONS[before]:
            table.move(record, phase)
            assert record.phase is phase
            if not TRANSITIONS[phase]:
                assert len(table) == 0
                return
        else:
            with pytest.raises(ReceiptRefused):
                table.move(record, phase)
            assert record.phase is before and len(table) == 1


def test_every_unsettled_phase_but_executing_can_be_rolled_back_or_kept() -> None:
    for phase, following in TRANSITIONS.items():
        if following and phase not in (Phase.EXECUTING, Phase.RETAINED):
            assert Phase.ROLLED_BACK in following and Phase.RETAINED in following, phase


def test_a3_a4_a_batch_is_checked_whole_before_anything_changes() -> None:
    table, other = Attempts("one", "rollout"), Attempts("two", "rollout")
    first, one = terminal(table)
    second, two = terminal(table, 1)
    _, foreign = terminal(other)
    copy = Terminal(one.execution)
    for wrong in ([one, one], [one, foreign], [one, copy], [copy]):
        with pytest.raises(ReceiptRefused):
            table.check(wrong, Phase.TERMINAL)
    with pytest.raises(ReceiptRefused, match="terminal"):
        table.check([one, two], Phase.LEASED)
    assert table.check([two, one], Phase.TERMINAL) == [second, first]


def test_a4_a_receipt_of_an_earlier_execution_is_refused() -> None:
    table = Attempts("one", "rollout")
    record, receipt = terminal(table)
    execution = record.execution
    assert execution is not None
    with pytest.raises(ReceiptRefused, match="running"):
        table.end(execution)
    table.move(record, Phase.ROLLED_BACK)
    again = table.adopt(attempt(0), V0)
    table.begin(again)
    with pytest.raises(ReceiptRefused):
        table.end(execution)
    with pytest.raises(ReceiptRefused):
        table.check([receipt], Phase.EXECUTING, Phase.TERMINAL)


def test_a2_newcomers_with_an_outstanding_id_are_named_and_not_adopted() -> None:
    table = Attempts("one", "rollout")
    active = table.adopt(attempt(0), V0)
    new, twin, fine = attempt(0), attempt(1), attempt(1)
    assert table.clashes([new, attempt(2)]) == [new]
    assert table.clashes([twin, fine]) == [twin, fine]
    with pytest.raises(ReceiptRefused, match="already"):
        table.adopt(new, V0)
    assert list(table) == [active]


@given(total=st.integers(1, 4), events=st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), max_size=30))
def test_a8_a9_slots_are_a_bounded_set(total: int, events: list[tuple[bool, str]]) -> None:
    slots, held = Slots(total), []
    for take, who in events:
        if take and who not in held:
            assert slots.take(who) is (len(held) < total)
            held += [who] if len(held) < total else []
        elif not take and who in held:
            slots.give_back(who)
            held.remove(who)
        else:
            with pytest.raises(SlotError):
                (slots.take if take else slots.give_back)(who)
        assert slots.used == len(held) <= total
    with pytest.raises(ValueError):
        Slots(0)


@given(events=st.lists(st.tuples(st.sampled_from(["issue", "spend"]), st.integers(1, 6)), max_size=25))
def test_a31_a33_a_lease_is_spent_once_and_rollouts_only_grow(events: list[tuple[str, int]]) -> None:
    leases = Leases()
    made: dict[int, Lease] = {}
    spent: set[int] = set()
    for name, rollout in events:
        if name == "issue":
            lease = Lease(rollout=rollout, receipts=(), groups=(), version=V0)
            if rollout > max(made, default=0):
                made[rollout] = leases.issue(lease)
            else:
                assert not leases.may_issue(rollout)
                with pytest.raises(LeaseSpent):
                    leases.issue(lease)
        elif rollout in made and rollout not in spent:
            leases.spend(made[rollout])
            spent.add(rollout)
        else:
            with pytest.raises(LeaseSpent):
                leases.spend(made.get(rollout, Lease(rollout=rollout, receipts=(), groups=(), version=V0)))
        assert {lease.rollout for lease in leases.open} == set(made) - spent
