"""recovery.admission.settlement: what a source that fails at any verb can do to whom."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recovery.admission.attempts import Attempts, Phase, Record
from recovery.admission.settlement import Settlement, SourceBroken, Why
from recovery.admission.slots import Slots
from recovery.model import PolicyVersion
from tests.admission_doubles import NaiveSource, SourceDown, attempt

V0 = PolicyVersion("a", 0)
VERBS = st.sets(st.sampled_from(["reserve", "requeue", "acknowledge"]))


class SettlementMachine(RuleBasedStateMachine):
    """A1, A7, A9, A32: in the end every group is with the source or outstanding, with exactly one slot."""

    @initialize()
    def begin(self) -> None:
        self.source, self.table, self.slots = NaiveSource(8), Attempts("one", "rollout"), Slots(8)
        self.settlement = Settlement(self.source, self.table, self.slots)
        self.mine: dict[int, Record] = {}
        self.kept: set[int] = set()
        self.trained = 0

    @rule(down=VERBS, k=st.integers(1, 3))
    def acquire(self, down: set[str], k: int) -> None:
        self.source.down = down
        try:
            for record in self.settlement.acquire(k, V0):
                self.table.end(self.table.begin(record))
                self.mine[record.attempt.group_index] = record
        except SourceDown:
            assert "reserve" in down
        self.source.down = set()

    @precondition(lambda self: self.mine)
    @rule(down=VERBS, n=st.integers(1, 3), commit=st.booleans())
    def settle(self, down: set[str], n: int, commit: bool) -> None:
        groups = sorted(self.mine)[:n]
        self.source.down = down
        records = [self.mine.pop(group) for group in groups]
        before = self.slots.used
        try:
            if commit:
                for record in records:
                    self.table.move(record, Phase.PUBLISHED)
                    self.table.move(record, Phase.LEASED)
                self.settlement.commit(records, 1)
                self.trained += len(records)
            else:
                self.settlement.roll_back(records, Why.OTHER)
        except SourceDown as error:
            assert str(error) == ("acknowledge" if commit else "requeue"), "A38: the first error"
            if "requeue" in down:
                self.kept |= set(groups)
                assert self.slots.used == before, "A9"
                assert not commit or "requeue" in "".join(error.__notes__)
        self.source.down = set()

    @rule(down=VERBS)
    def retry(self, down: set[str]) -> None:
        self.source.down = down
        done, errors = self.settlement.retry()
        if "requeue" in down:
            assert not done and len(errors) == len(self.kept)
        else:
            assert {record.attempt.group_index for record in done} == self.kept and not errors
            self.kept = set()
        self.source.down = set()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "source"):
            assert {r.attempt.group_index for r in self.settlement.retained} == self.kept
            assert set(self.source.out) == set(self.mine) | self.kept
            assert self.slots.used == len(self.mine) + len(self.kept) and len(self.source.trained) == self.trained


TestSettlementMachine = SettlementMachine.TestCase
TestSettlementMachine.settings = settings(max_examples=60, stateful_step_count=25)


@pytest.mark.parametrize("said", [[0], [0, 0], [0, 1, 2], [9, 1]])
def test_a1_a_wrong_answer_goes_back_whole_or_blocks(said: list[int]) -> None:
    """Asked for 2, with group 9 outstanding."""
    for down in (set(), {"requeue"}):
        source, table, slots = NaiveSource(4), Attempts("one", "rollout"), Slots(8)
        settlement = Settlement(source, table, slots)
        table.adopt(attempt(9), V0)
        source.waiting = [3]
        source.says = [attempt(group) for group in said]
        source.out = {one.group_index: one for one in source.says}
        source.down = set(down)
        with pytest.raises(SourceBroken):
            settlement.acquire(2, V0)
        assert len(table) == 1 and slots.used == 0 and settlement.refuses is bool(down)
        if down:
            with pytest.raises(SourceBroken, match="reconcile"):
                settlement.acquire(1, V0)
            source.down = set()
            assert settlement.retry() == ([], [])
        assert not source.out and [r.attempt.group_index for r in settlement.acquire(1, V0)] == [min([3, *said])]


def test_a2_an_attempt_that_is_outstanding_is_not_given_back_when_it_comes_again() -> None:
    source, table = NaiveSource(2), Attempts("one", "rollout")
    settlement = Settlement(source, table, Slots(4))
    (record,) = settlement.acquire(1, V0)
    source.says = [record.attempt]
    with pytest.raises(SourceBroken, match="twice"):
        settlement.acquire(1, V0)
    assert source.out == {0: record.attempt} and list(table) == [record]
