"""recovery.admission.preparation, exclusion, metrics, samples: each refusal by its own name, each key once."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from recovery.admission.exclusion import ExclusionFence, NotInside, Pass, Work
from recovery.admission.finished import Entry, FinishedGroups
from recovery.admission.holds import HoldKind
from recovery.admission.leases import Lease
from recovery.admission.metrics import COUNTERS, GAUGES, KEYS, Metrics
from recovery.admission.preparation import (
    Closing,
    Failed,
    FrontierRunning,
    LeasesOpen,
    NotHeldNow,
    ReceiptsRetained,
    TrainerUnresolved,
    covers,
    prepare,
)
from recovery.admission.samples import MalformedSample, finished, from_json, to_json, trainable_versions
from recovery.admission.versions import Ahead, Ghost, Lag, Unknown
from recovery.model import PolicyVersion
from tests.admission_doubles import NaiveSource, SourceDown, owner, run_one, sample

CUT, DRAIN = HoldKind.CUT, HoldKind.DRAIN


def test_m27_a39_each_violated_precondition_has_its_own_error() -> None:
    source = NaiveSource(8)
    own = owner(source, batch=1)
    record = own.admit()
    assert record is not None and record.execution is not None
    hold = own.acquire(CUT, "checkpoint", "", 0.0)
    with pytest.raises(FrontierRunning, match="1 groups"):
        prepare(own, hold, checkpoint=True)
    own.gate.freeze(hold)
    prepare(own, hold, checkpoint=True)
    own.gate.release(hold)
    with pytest.raises(NotHeldNow):
        prepare(own, hold, checkpoint=True)
    run_one(own)
    lease = own.lease(3)
    assert isinstance(lease, Lease)
    hold = own.acquire(CUT, "checkpoint", "", 0.0)
    own.gate.freeze(hold)
    with pytest.raises(LeasesOpen, match="3"):
        prepare(own, hold, checkpoint=True)
    assert covers(own) == 2
    prepare(own, hold, checkpoint=False)
    source.down = {"acknowledge", "requeue"}
    with pytest.raises(SourceDown):
        own.commit(lease)
    with pytest.raises(ReceiptsRetained, match="requeue"):
        prepare(own, hold, checkpoint=True)
    prepare(own, hold, checkpoint=False)
    source.down = set()
    prepare(own, hold, checkpoint=True)
    assert own.settlement.retained == [] and covers(own) == 3, "A39: retried once"
    with pytest.raises(TrainerUnresolved):  # A40
        prepare(own, hold, unresolved=1, checkpoint=True)
    own.fail(RuntimeError("worker"))
    with pytest.raises(Failed, match="worker"):
        prepare(own, hold, checkpoint=True)
    own.close()
    with pytest.raises(Closing):
        prepare(own, hold, checkpoint=True)


@pytest.mark.parametrize("works", list(permutations(Work)))
def test_a27_an_update_is_inside_alone(works: tuple[Work, ...]) -> None:
    fence = ExclusionFence()
    inside: list[Pass] = []
    for work in works:
        got = fence.enter(work, work.name)
        may = not inside if work is Work.UPDATE else all(one.work is not Work.UPDATE for one in inside)
        assert isinstance(got, Pass) is may
        if isinstance(got, Pass):
            inside.append(got)
        else:
            assert got == f"{inside[0].work.value} of {inside[0].owner}" or inside
        assert fence.may_close is all(one.work is not Work.UPDATE for one in inside)
    for one in inside:
        fence.leave(one)
        with pytest.raises(NotInside):
            fence.leave(one)
    assert isinstance(fence.enter(Work.UPDATE, "w"), Pass)


def test_a68_a70_the_keys_are_these() -> None:
    spec = {
        *(f"fully_async/version_lag/count_{b}" for b in ("0", "1", "2_to_3", "4_plus", "unknown")),
        "fully_async/count/stale_rejected",
        "fully_async/count/stale_requeued",
        "fully_async/count/aborted_requeued",
        "fully_async/queue/completed_groups",
        "fully_async/policy/current_version",
    }
    assert {key for key in KEYS if key.startswith("fully_async/")} == spec
    also = (
        "queue_size aborted_groups_filtered stale_groups_filtered avg_staleness max_staleness buffer_avg_staleness "
        "buffer_max_staleness evicted_stale_groups evicted_overflow_groups evict_rate aborted_groups_recycled "
        "stale_groups_recycled"
    )
    assert {f"rollout/fully_async/{name}" for name in also.split()} <= KEYS, "A69"
    and_ = (
        "holds_active hold_age_s/evaluation frontier_groups open_leases retained/commit_failed slots_used slots_total"
    )
    more = "refused_leases negative_lags lineage_mismatches tokens_reused tokens_regenerated"
    assert {f"rollout/fully_async/{name}" for name in f"{and_} {more}".split()} <= KEYS, "A70"
    assert all(key.startswith(("fully_async/", "rollout/fully_async/")) for key in KEYS)


def test_counters_start_again_and_gauges_do_not() -> None:
    metrics, gauges = Metrics(), dict.fromkeys(GAUGES, 5.0)
    for distance in (Lag(0), Lag(1), Lag(2), Lag(3), Lag(4), Lag(90), Ghost(), Unknown(), Ahead(1)):
        metrics.leased(distance)
    metrics.finished(), metrics.finished(), metrics.add("evicted_stale_groups")
    first = metrics.emit(gauges)
    assert set(first) == KEYS
    assert [first[f"fully_async/version_lag/count_{b}"] for b in ("0", "1", "2_to_3", "4_plus", "unknown")] == [
        1,
        1,
        2,
        2,
        3,
    ]
    assert first["rollout/fully_async/max_staleness"] == 90 and first["rollout/fully_async/evict_rate"] == 0.5
    second = metrics.emit(gauges)
    assert all(second[key] == 0 for key in COUNTERS) and all(second[key] == 5.0 for key in GAUGES)
    with pytest.raises(ValueError):
        metrics.emit({**gauges, "sample/17": 1.0})


def spans(*numbers: int, mask: str = "") -> Any:
    n = len(numbers)
    return sample(
        0,
        token_ids=list(range(n)),
        version_spans=[(i, i + 1, "a", number) for i, number in enumerate(numbers)],
        loss_mask=[int(c) for c in mask],
    )


def test_v11_masked_tokens_do_not_count_and_no_spans_count_as_admission() -> None:
    a, admitted = "a", PolicyVersion("a", 9)
    (one,) = finished([sample(0)], [spans(1, 5, 7, mask="011")])
    assert trainable_versions([one], admitted) == {PolicyVersion(a, 5), PolicyVersion(a, 7)}
    (plain,) = finished([sample(0)], [sample(0, token_ids=[1, 2])])
    assert plain.loss_mask == [1, 1] and trainable_versions([one, plain], admitted) >= {admitted}


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [1], "loss_mask": [1, 1]},
        {"token_ids": [1], "logprobs": [0.0, 0.0]},
        {"token_ids": [1, 2], "version_spans": [(0, 1, "a", 0)]},
        {"token_ids": [1, 2], "version_spans": [(1, 2, "a", 0)]},
        {"token_ids": [1, 2], "version_spans": [(0, 2, "a", 0), (1, 2, "a", 1)]},
        {"token_ids": [1], "version_spans": [(0, 2, "a", 0)]},
        {"token_ids": [1], "version_spans": [(0, 1, "", 0)]},
        {"token_ids": [1], "version_spans": [(0, 1, "a", -1)]},
    ],
)
def test_v1_v7_lengths_and_spans_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedSample):
        finished([sample(0)], [sample(0, **wrong)])


def test_tool_tokens_have_no_version_and_no_loss() -> None:
    (one,) = finished(
        [sample(0)],
        [sample(0, token_ids=[1, 2, 3], loss_mask=[1, 0, 1], version_spans=[(0, 1, "a", 1), (2, 3, "a", 2)])],
    )
    assert trainable_versions([one], None) == {PolicyVersion("a", 1), PolicyVersion("a", 2)}


def test_a_sample_is_the_same_after_json_or_says_that_it_is_not() -> None:
    one = sample(
        3, 1, token_ids=[1], logprobs=[-0.5], version_spans=[(0, 1, "a", 2)], extra={"k": [1, None]}, reward=1.0
    )
    assert from_json(to_json(one)) == one
    for extra in ({"k": (1, 2)}, {1: 2}, {"k": object()}, {"k": float("nan")}):
        with pytest.raises((TypeError, ValueError)):
            to_json(sample(0, extra=extra))


def test_a11_everything_beyond_the_limit_goes_before_the_oldest() -> None:
    ages: dict[int, tuple[bool, list[int]]] = {}

    def entry(n: int, kept: bool = False) -> Entry:
        return Entry(record=n, kept=kept, draw=n)  # type: ignore[arg-type]

    queue = FinishedGroups(3, lambda record: ages[record])  # type: ignore[index]
    for n, age in enumerate([(False, [1]), (True, [4]), (False, [2, 0])]):
        ages[n] = age
        assert queue.put(entry(n)) == []
    ages[3], ages[4], ages[5], ages[6] = (True, [3]), (False, [2, 1]), (False, [0]), (False, [0])
    assert [(e.record, stale) for e, stale in queue.put(entry(3))] == [(1, True), (3, True)]
    assert queue.put(entry(4)) == [] and len(queue) == 3
    assert [(e.record, stale) for e, stale in queue.put(entry(5))] == [(4, False)], (
        "oldest, then the larger sum of lags"
    )
    ages[2] = (True, [9])
    kept = FinishedGroups(1, lambda record: (True, [9]))
    assert kept.put(entry(0, kept=True)) == [] and kept.put(entry(1, kept=True)) == [], "what is waited for stays"
    with pytest.raises(ValueError):
        FinishedGroups(0, lambda record: (False, []))
