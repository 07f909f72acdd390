"""recovery.admission.replay: the replay set against plain sets, and states that must be refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recovery.admission.attempts import Attempt
from recovery.admission.replay import NotOutstanding, ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.settlement import Why
from recovery.errors import ConfigError, Damaged, FingerprintMismatch, InputError

N = 7


def rows(n: int = N, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "prompt": f"say {i}", **more} for i in range(n)]


def source(n: int = N, **options: Any) -> ReplaySource:
    return ReplaySource(IterableRows(rows(n)), **{"samples_per_prompt": 2, **options})


class ReplayMachine(RuleBasedStateMachine):
    """A6, A7, A42, A67 over restarts; the model keeps sets of group numbers and how often each was drawn."""

    @initialize()
    def begin(self) -> None:
        self.source = source()
        self.new = 0
        self.waiting: set[int] = set()
        self.out: dict[int, Attempt] = {}
        self.done: dict[int, int] = {}
        self.draws = dict.fromkeys(range(N), 0)
        self.saved = 0

    @rule(k=st.integers(1, 3))
    def reserve(self, k: int) -> None:
        expected = [*sorted(self.waiting), *range(self.new, N)][:k]
        got = self.source.reserve(k)
        if len(expected) < k:
            assert got == []
            return
        assert [one.group_index for one in got] == expected
        for one in got:
            assert one.reservation_id == f"p{one.group_index}" and one.draw == self.draws[one.group_index]
            tail = f".{one.draw}" if one.draw else ""
            assert [s.request_id for s in one.samples] == [f"p{one.group_index}/{i}{tail}" for i in range(2)]
            assert one.samples[0].row["prompt"] == f"say {one.group_index}"
            self.waiting.discard(one.group_index)
            self.out[one.group_index] = one
        self.new = max([self.new, *(g + 1 for g in expected)])

    @precondition(lambda self: self.out)
    @rule(data=st.data(), why=st.sampled_from(Why))
    def requeue(self, data: st.DataObject, why: Why) -> None:
        groups = data.draw(st.sets(st.sampled_from(sorted(self.out)), min_size=1))
        self.source.requeue([self.out.pop(group) for group in sorted(groups)], why)
        self.waiting |= groups
        for group in groups:
            self.draws[group] += 1

    @precondition(lambda self: self.out)
    @rule(data=st.data(), above=st.integers(1, 4))
    def acknowledge(self, data: st.DataObject, above: int) -> None:
        group = data.draw(st.sampled_from(sorted(self.out)))
        one = self.out[group]
        with pytest.raises(NotOutstanding):
            self.source.acknowledge([one], self.saved)
        for wrong in ([one, one], [one, source(1).reserve(1)[0]]):
            with pytest.raises(NotOutstanding):
                self.source.acknowledge(wrong, self.saved + above)
        self.source.acknowledge([one], self.saved + above)
        del self.out[group]
        self.done[group] = self.saved + above

    @rule(more=st.integers(0, 3))
    def checkpoint(self, more: int) -> None:
        self.saved += more
        self.source.checkpoint_saved(self.saved)
        with pytest.raises(NotOutstanding):
            self.source.checkpoint_saved(self.saved - 1)

    @rule(more=st.integers(0, 4))
    def restart(self, more: int) -> None:
        """The trainer comes back at its checkpoint `saved + more`."""
        state, rollout = json.loads(json.dumps(self.source.to_json())), self.saved + more
        back = [group for group, when in self.done.items() if when > rollout]
        self.source = source()
        self.source.restore(state, rollout)
        self.waiting |= {*self.out, *back}
        self.out = {}
        for group in back:
            del self.done[group]
            self.draws[group] += 1
        self.saved = rollout

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if not hasattr(self, "source"):
            return
        places = [*self.waiting, *self.out, *self.done, *range(self.new, N)]
        assert sorted(places) == list(range(N))
        state = self.source.to_json()
        assert [g for g, *_ in state["requeued"]] == sorted(self.waiting)
        assert [g for g, *_ in state["outstanding"]] == sorted(self.out)
        assert {g: r for g, *_, r in state["acknowledged"]} == {g: r for g, r in self.done.items() if r > self.saved}
        assert state["cursor"]["sample_frontier"] == 2 * self.new

    @invariant()
    def v18_what_is_trained_or_drawn_anew_is_spent_and_nothing_else(self) -> None:
        if not hasattr(self, "source"):
            return
        drawn = {(g, d): f"p{g}/1.{d}" if d else f"p{g}/1" for g in range(N) for d in range(self.draws[g] + 2)}
        due = {g: self.draws[g] for g in (*self.waiting, *self.out)}
        expected = {name for (g, d), name in drawn.items() if g < self.new and d < due.get(g, 99)}
        foreign = ["an evaluation", "p0", "p0/x", "p0/1.x", "q/1", "/1", ""]
        assert sorted(self.source.spent([*drawn.values(), *foreign])) == sorted(expected)


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(max_examples=80, stateful_step_count=25)


def worked() -> dict[str, Any]:
    one = source()
    attempts = one.reserve(4)
    one.acknowledge(attempts[:1], 3)
    one.requeue(attempts[1:2], Why.STALE)
    return one.to_json()


def test_a43_a_state_of_other_rows_is_refused_by_name_and_changes_nothing() -> None:
    state = worked()
    other_text = ReplaySource(IterableRows(rows(more=1)), samples_per_prompt=2)
    templated = ReplaySource(IterableRows(rows(), lambda row: {**row, "prompt": "T"}), samples_per_prompt=2)
    cases = [
        (source(8), "size: 7"),
        (source(samples_per_prompt=3), "samples_per_prompt: 2"),
        (source(shuffle_seed=1), "shuffle_seed: None"),
        (source(epochs=2), "epochs: 1"),
        (other_text, "rows"),
        (templated, "post-processing"),
    ]
    for one, said in cases:
        before = one.to_json()
        with pytest.raises(FingerprintMismatch, match=said):
            one.restore(state, 0)
        assert one.to_json() == before
    fine = source()
    fine.restore(state, 0)
    assert [a.group_index for a in fine.reserve(4)] == [0, 1, 2, 3]


def changed(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(state))
    at = copy
    *parents, last = path.split(".")
    for name in parents:
        at = at[name]
    at[last] = value
    return copy


@pytest.mark.parametrize(
    "path, value",
    [
        ("cursor.offset", 3),
        ("cursor.epoch", 1),
        ("cursor.sample_frontier", 7),
        ("cursor.group_frontier", 2),
        ("requeued", [[1, 0, 0, 0], [1, 0, 0, 0]]),
        ("requeued", [[2, 0, 0, 0]]),
        ("requeued", [[6, 0, 0, 0]]),
        ("requeued", [[-1, 0, 0, 0]]),
        ("requeued", [["x"]]),
        ("acknowledged", [[0]]),
        ("outstanding", None),
        ("digest", {}),
    ],
)
def test_a43_a_state_that_contradicts_itself_is_damaged(path: str, value: Any) -> None:
    one = source()
    before = one.to_json()
    with pytest.raises(Damaged):
        one.restore(changed(worked(), path, value), 0)
    assert one.to_json() == before


def test_a42_a_trainer_older_than_what_is_forgotten_is_refused() -> None:
    one = source()
    one.acknowledge(one.reserve(2), 4)
    one.checkpoint_saved(4)
    with pytest.raises(FingerprintMismatch, match="rollout 3"):
        source().restore(one.to_json(), 3)
    back = source()
    back.restore(one.to_json(), 4)
    assert [a.group_index for a in back.reserve(1)] == [2]


@pytest.mark.parametrize("rollout, replayed", [(2, [0, 1, 2]), (3, [1, 2]), (4, [2]), (5, [2]), (9, [2])])
def test_a42_what_is_acknowledged_above_r_comes_again_and_up_to_r_does_not(rollout: int, replayed: list[int]) -> None:
    one = source()
    first, second, _ = one.reserve(3)
    one.acknowledge([first], 3)
    one.acknowledge([second], 4)
    back = source()
    back.restore(one.to_json(), rollout)
    assert [a.group_index for a in back.reserve(len(replayed) + 1)] == [*replayed, 3]


def test_a6_a_row_that_cannot_be_made_does_not_move_the_cursor() -> None:
    def process(row: dict[str, Any]) -> Mapping[str, Any]:
        if row["id"] == "p1" and broken:
            raise InputError("the template has no field `x`")
        return row

    broken = True
    one = ReplaySource(IterableRows(rows(3), process), samples_per_prompt=1)
    assert [a.group_index for a in one.reserve(1)] == [0]
    before = one.to_json()["cursor"]
    with pytest.raises(InputError):
        one.reserve(1)
    assert one.to_json()["cursor"] == before


def test_a44_nothing_is_loaded_over_owned_work() -> None:
    one = source()
    state = one.to_json()
    one.reserve(1)
    with pytest.raises(NotOutstanding):
        one.restore(state, 0)


def test_epochs_and_shuffling_visit_every_row_once_each() -> None:
    for seed in (None, 0, 7):
        one = source(epochs=3, shuffle_seed=seed)
        ids = [a.reservation_id for a in one.reserve(3 * N)]
        assert one.reserve(1) == [] and len(set(ids)) == 3 * N
        order = [[name.partition("@")[0] for name in ids[e * N : (e + 1) * N]] for e in range(3)]
        assert all(sorted(part) == [f"p{i}" for i in range(N)] for part in order)
        assert (order[0] == order[1]) is (seed is None)
    state = source(epochs=3, shuffle_seed=7)
    state.reserve(N + 2)
    again = source(epochs=3, shuffle_seed=7)
    again.restore(state.to_json(), 0)
    assert [a.group_index for a in again.reserve(N + 2)] == list(range(N + 2))


def test_rows_of_unknown_number_are_taken_as_they_come() -> None:
    def endless() -> Any:
        for i in range(10**9):
            yield {"id": i}

    one = ReplaySource(IterableRows(endless()), samples_per_prompt=1)
    one.reserve(5)
    state = one.to_json()
    assert state["size"] is None and state["digest"]["rows"] == 5
    again = ReplaySource(IterableRows(endless()), samples_per_prompt=1)
    again.restore(state, 0)
    assert [a.group_index for a in again.reserve(6)] == [0, 1, 2, 3, 4, 5]
    for wrong in ({"epochs": 2}, {"shuffle_seed": 1}):
        with pytest.raises(ConfigError):
            ReplaySource(IterableRows(endless()), samples_per_prompt=1, **wrong)  # type: ignore[arg-type]
    short = ReplaySource(IterableRows(iter([{"id": 0}])), samples_per_prompt=1)
    with pytest.raises(InputError, match="1 rows"):
        short.restore(state, 0)


@pytest.mark.parametrize("there", ["generator", "list"])
@pytest.mark.parametrize("here", ["generator", "list"])
@pytest.mark.parametrize("seen", [2, 3, 4])
def test_a_cursor_means_the_same_whether_the_end_was_seen_or_not(there: str, here: str, seen: int) -> None:
    """`seen` of 3 rows were asked for; the fourth is the end of the data."""

    def over(kind: str, n: int = 3) -> ReplaySource:
        some = rows(n)
        return ReplaySource(IterableRows(iter(some) if kind == "generator" else some), samples_per_prompt=1)

    one = over(there)
    got = [one.reserve(1) for _ in range(seen)]
    state = json.loads(json.dumps(one.to_json()))
    assert state["size"] == (None if there == "generator" and seen < 4 else 3)
    one.acknowledge(got[0], 1)
    back = over(here)
    back.restore(json.loads(json.dumps(one.to_json())), 1)
    left: list[int] = []
    while more := back.reserve(1):
        left += [attempt.group_index for attempt in more]
    assert left == [1, 2]
    if state["size"] is not None:
        with pytest.raises(FingerprintMismatch, match="size: 3 in the snapshot"):
            over(here, 4).restore(state, 0)


def test_no_two_groups_have_one_name_whatever_the_rows_are_called() -> None:
    ids = ["a", "a@1", "a@1@0", "b@", "@1", "@", "a@0", "a@x", "a@²"]
    one = ReplaySource(IterableRows([{"id": name} for name in ids]), samples_per_prompt=2, epochs=3)
    attempts = one.reserve(3 * len(ids))
    names = [attempt.reservation_id for attempt in attempts]
    requests = [sample.request_id for attempt in attempts for sample in attempt.samples]
    assert len(set(names)) == 3 * len(ids) and len(set(requests)) == 6 * len(ids)
    plain = ReplaySource(IterableRows([{"id": name} for name in ids]), samples_per_prompt=1)
    assert [attempt.reservation_id for attempt in plain.reserve(len(ids))] == ids, "one epoch needs no more than the id"


@pytest.mark.parametrize("seed", [None, 3])
def test_no_rows_are_the_end_of_the_data(seed: int | None) -> None:
    one = source(0, shuffle_seed=seed, epochs=2)
    assert one.reserve(1) == []
    one.restore(one.to_json(), 0)
