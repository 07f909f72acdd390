"""recovery.calls: the cut takes from every changed call, once, in order."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.buffer import Run
from recovery.calls import CallTable, Captured, LiveCall, StoredUpTo
from recovery.model import FINISH_REASONS, Ended, Opened, PolicyVersion
from tests.fakes import V0, name, request

ROLLOUTS = ["r0", "r1", "r2"]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "carry on", "append", "append", "append", "end", "forget", "freeze"]),
        st.sampled_from(ROLLOUTS),
        st.integers(0, 4),
        st.integers(0, 1),
    ),
    max_size=60,
)


def opened(table: CallTable, rollout: str, attempt: int = 0) -> LiveCall:
    return table.open(request(rollout), name(rollout), attempt)


class Model:
    """What must have left the table, per attempt of a call, as plain lists."""

    def __init__(self) -> None:
        self.expected: dict[tuple[str, int], list[object]] = defaultdict(list)

    def check(self, taken: list[Captured]) -> None:
        found: dict[tuple[str, int], list[object]] = defaultdict(list)
        names = {name(rollout): rollout for rollout in ROLLOUTS}
        for item in taken:
            key = (names[item.call_id], item.attempt)
            if isinstance(item, Opened):
                found[key].append("opened")
            elif isinstance(item, Ended):
                found[key].append(("ended", item.n_tokens))
            else:
                found[key] += [(item.start + i, token, item.version.number) for i, token in enumerate(item.token_ids)]
        assert found == {key: items for key, items in self.expected.items() if items}


@settings(max_examples=200)
@given(operations=OPERATIONS)
def test_any_history_leaves_once_and_in_order(operations: list[tuple[str, str, int, int]]) -> None:
    """B12: opened, runs by position, ended; per call and attempt; a freeze between any two of them changes nothing."""
    table, model = CallTable(), Model()
    live: dict[str, LiveCall] = {}
    attempts = dict.fromkeys(ROLLOUTS, -1)
    taken: list[Captured] = []
    for what, rollout, n, number in operations:
        call = live.get(rollout)
        if what == "freeze":
            taken += table.freeze()
        elif what in ("open", "carry on"):
            if call is not None:
                with pytest.raises(ValueError, match="live already"):
                    opened(table, rollout)
                continue
            attempts[rollout] += 1
            if what == "open":
                live[rollout] = opened(table, rollout, attempts[rollout])
                model.expected[rollout, attempts[rollout]].append("opened")
            else:
                live[rollout] = table.carry_on(
                    request(rollout), name(rollout), attempts[rollout], [5] * n, [-1.0] * n, ()
                )
        elif call is None:
            continue
        elif what == "append":
            tokens = list(range(10, 10 + n))
            if call.ended is not None:
                with pytest.raises(ValueError, match="takes no more"):
                    call.append(tokens, None, V0)
                continue
            model.expected[rollout, call.attempt] += [
                (call.n_tokens + i, token, number) for i, token in enumerate(tokens)
            ]
            call.append(tokens, [-1.0] * n, PolicyVersion("a", number))
            assert call.n_tokens == len(call.transcript_ids) == len(call.transcript_logprobs)
        elif what == "end":
            if call.ended is None:
                model.expected[rollout, call.attempt].append(("ended", call.n_tokens))
            assert call.end("length", None) is call.end("stop", 7)  # the first end stands
        else:
            table.forget(call.call_id)  # also with records that were not yet frozen
            del live[rollout]
    taken += table.freeze()
    model.check(taken)
    assert table.freeze() == []
    assert len(table) == len(live)


def test_b23_two_running_and_two_waiting_calls_give_four_records() -> None:
    table = CallTable()
    calls = [opened(table, f"r{i}") for i in range(4)]
    calls[0].append([1, 2], [-0.1, -0.2], V0)
    calls[1].append([3], [-0.3], V0)
    taken = table.freeze()
    records = [item for item in taken if isinstance(item, Opened)]
    assert [record.call_id for record in records] == [call.call_id for call in calls]
    assert [call.n_tokens for call in calls] == [2, 1, 0, 0]
    for call in calls[2:]:  # the empty ones are resumable: they go on from their first token
        call.append([9], [-0.9], V0)
    assert [(item.call_id, item.start) for item in table.freeze() if isinstance(item, Run)] == [
        (calls[2].call_id, 0),
        (calls[3].call_id, 0),
    ]


def test_freeze_looks_only_at_what_changed_and_copies_nothing() -> None:
    table = CallTable()
    calls = [opened(table, f"r{i}") for i in range(100)]
    table.freeze()
    calls[7].append([1] * 1000, None, V0)
    assert list(table.changed_calls) == [calls[7]]
    (run,) = table.freeze()
    assert isinstance(run, Run) and run.of_ids is calls[7].transcript_ids
    assert not table.changed_calls


def test_wide_rows_leave_with_their_tokens() -> None:
    table = CallTable()
    call = opened(table, "r0")
    top = np.arange(6, dtype=np.int32).reshape(3, 2)
    call.append([1], [-1.0], V0, {"top": top[:1]})
    call.append([2, 3], [-1.0, -1.0], V0, {"top": top[1:]})
    with pytest.raises(ValueError, match="wide column"):
        call.append([4], [-1.0], V0, {"top": top})
    assert call.n_tokens == len(call.transcript_ids) == 3
    _, run = table.freeze()
    assert isinstance(run, Run) and run.to_chunk().columns["top"].tolist() == top.tolist()


def test_an_attempt_that_was_given_up_still_hands_over_its_records() -> None:
    """A call that is forgotten and opened again before the next freeze loses nothing of the first attempt."""
    table = CallTable()
    first = opened(table, "r0", 0)
    first.append([1, 2], None, V0)
    first.end("stop", 3)
    table.forget(first.call_id)
    second = opened(table, "r0", 1)
    second.append([4], None, V0)
    kinds = [(type(item).__name__, item.attempt) for item in table.freeze()]
    assert kinds == [("Opened", 0), ("Run", 0), ("Ended", 0), ("Opened", 1), ("Run", 1)]


def test_a_restored_prefix_is_part_of_the_transcript_and_not_written_again() -> None:
    """V4: with the logprobs it was sampled with."""
    table = CallTable()
    spans = [(0, 2, V0)]
    call = table.carry_on(request("r0"), name("r0"), 2, [1, 2], [-0.5, -0.25], spans)
    assert table.freeze() == []
    call.append([3], None, PolicyVersion("a", 1))
    (run,) = table.freeze()
    assert isinstance(run, Run) and (run.start, run.attempt, run.token_ids.tolist()) == (2, 2, [3])
    assert call.transcript_ids.tolist() == [1, 2, 3]
    assert call.transcript_logprobs.tolist()[:2] == [-0.5, -0.25] and math.isnan(call.transcript_logprobs[2])
    assert call.version_spans == [(0, 2, V0), (2, 3, PolicyVersion("a", 1))]


def test_b20_spans_join_where_the_version_is_the_same_and_only_there() -> None:
    """V3: the version is given with each output, by whom it was delivered."""
    table = CallTable()
    call = opened(table, "r0")
    for number, n in ((3, 2), (3, 1), (5, 4), (5, 0), (6, 0), (3, 1)):
        call.append([1] * n, None, PolicyVersion("a", number))
    v = {n: PolicyVersion("a", n) for n in (3, 5)}
    assert call.version_spans == [(0, 3, v[3]), (3, 7, v[5]), (7, 8, v[3])]


@pytest.mark.parametrize("reason", ["abort", "error", "", "eos", None])
def test_what_does_not_end_a_call_leaves_it_resumable(reason: str | None) -> None:
    """An abort is a cut, never a terminal."""
    table = CallTable()
    call = opened(table, "r0")
    with pytest.raises(ValueError, match="does not end a call"):
        call.end(reason, None)  # type: ignore[arg-type]
    call.append([1], None, V0)
    assert call.end("stop", None).n_tokens == 1
    assert {"stop", "length", "repetition"} == FINISH_REASONS


@pytest.mark.parametrize(
    ("ids", "logprobs"), [([1, 2**31], None), ([1, None], None), ([1, 2], [-0.5, None]), ([1, 2], [-0.5])]
)
def test_b5_an_output_that_cannot_be_stored_leaves_no_part_of_itself(ids: list, logprobs: list | None) -> None:
    """V2: tokens, logprobs and transcript never come apart, whatever comes in."""
    table = CallTable()
    call = opened(table, "r0")
    call.append([7], [-0.5], V0)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        call.append(ids, logprobs, V0)
    assert (call.transcript_ids.tolist(), call.transcript_logprobs.tolist(), call.n_tokens) == ([7], [-0.5], 1)
    assert call.version_spans == [(0, 1, V0)]
    run = table.freeze()[1]
    assert isinstance(run, Run) and run.logprobs is not None
    assert (run.token_ids.tolist(), run.logprobs.tolist()) == ([7], [-0.5])


def test_longest_pending_is_what_a_crash_would_cost_one_call() -> None:
    table = CallTable()
    assert table.longest_pending() == 0
    a, b = opened(table, "r0"), opened(table, "r1")
    a.append([1] * 3, None, V0)
    b.append([1] * 5, None, V0)
    assert table.longest_pending() == 5
    table.freeze()
    a.append([1], None, V0)
    assert table.longest_pending() == 1


def test_a_call_whose_end_the_store_has_writes_nothing_again() -> None:
    table = CallTable()
    call = table.carry_on(request("r0"), name("r0"), 1, [1], [-0.5], [(0, 1, V0)])
    call.settle_as_ended("stop", 2)
    assert call.ended is not None and table.freeze() == [] and call.settled


SPANS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=200)
@given(outputs=SPANS, frozen=st.integers(0, 6), kept=st.integers(0, 30), ends=st.booleans(), prefix=st.integers(0, 4))
def test_a_rewound_call_hands_over_exactly_what_the_store_lacks(
    outputs: list[tuple[int, int, bool]], frozen: int, kept: int, ends: bool, prefix: int
) -> None:
    """Whatever had been handed over and whatever had not, by position, version and logprob."""
    table = CallTable()
    restored = [(0, prefix, PolicyVersion("a", 9))] if prefix else []
    call = (
        table.carry_on(request("r"), name("r"), 3, range(prefix), [-0.5] * prefix, restored)
        if prefix
        else opened(table, "r", 3)
    )
    table.freeze()
    expected = [(i, i, 9, -0.5) for i in range(prefix)]
    for number, (n, version, with_logprobs) in enumerate(outputs):
        if number == frozen:
            table.freeze()
        tokens = list(range(call.n_tokens, call.n_tokens + n))
        logprobs = [-0.25 * token for token in tokens] if with_logprobs else None
        call.append(tokens, logprobs, PolicyVersion("a", version))
        expected += [(t, t, version, -0.25 * t if with_logprobs else None) for t in tokens]
    if ends:
        call.end("stop", None)
    if frozen % 2:
        table.freeze()
    kept = min(kept, call.n_tokens)
    table.rewind({name("r"): StoredUpTo(3, kept), name("who"): None})
    found, ended = [], 0
    for item in table.freeze():
        assert not isinstance(item, Opened)
        if isinstance(item, Run):
            logprobs_of = item.logprobs if item.logprobs is not None else [None] * len(item.token_ids)
            pairs = zip(item.token_ids, logprobs_of, strict=True)
            found += [(item.start + i, token, item.version.number, lp) for i, (token, lp) in enumerate(pairs)]
        ended += isinstance(item, Ended)
    assert found == expected[kept:] and ended == ends
    if not ends:
        call.append([7], None, V0)
        (run,) = table.freeze()
        assert isinstance(run, Run) and (run.start, run.token_ids.tolist()) == (len(expected), [7])


def test_a_rewound_call_of_which_the_ledger_knows_nothing_is_opened_again() -> None:
    table = CallTable()
    call = opened(table, "r", 2)
    call.append([4, 5], None, V0)
    table.freeze()
    for stored, first in ((None, 2), (StoredUpTo(1, 7), 2), (StoredUpTo(2, 1), 1)):
        table.rewind({name("r"): stored})
        taken = table.freeze()
        assert isinstance(taken[0], Opened) == (first == 2)
        (run,) = [item for item in taken if isinstance(item, Run)]
        assert len(run.token_ids) == first and run.start == 2 - first
    table.rewind({name("r"): StoredUpTo(3, 1)})
    assert table.freeze() == [], "a newer attempt has taken over: nothing of this one is wanted"


def test_an_ended_call_is_kept_until_its_end_is_published() -> None:
    table = CallTable()
    call = opened(table, "r")
    call.append([4], None, V0)
    table.settle([name("r"), name("who")])
    call.end("stop", None)
    table.freeze()
    call.in_use = False
    table.published([])
    assert table.get(name("r")) is call, "its end was not published yet"
    table.rewind({name("r"): StoredUpTo(0, 0)})
    assert [type(item) for item in table.freeze()] == [Run, Ended]
    table.settle([name("r")])
    table.rewind({name("r"): StoredUpTo(0, 0)})
    assert table.freeze() == []
    call.in_use = True
    table.published([])
    assert table.get(name("r")) is call, "somebody reads it"
    call.in_use = False
    table.published([])
    assert table.get(name("r")) is None
