"""recovery.admission.samples: what a generate function may return, and who may still change it.

Owns: numbers of any library, objects that come back twice or for another group, and leases that their trainer changes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.admission.samples import MalformedSample, Sample, apart, finished, from_json, to_json
from recovery.admission.state import NAME
from tests.test_rollout import batch_of, on_virtual_time, rollout
from tests.test_rollout_snapshots import again, cut


def pristine(n: int = 1, row: str = "r0") -> list[Sample]:
    return [
        Sample(row_id=row, group_index=4, sample_index=i, request_id=f"{row}/{i}", row={"id": row}) for i in range(n)
    ]


def made(**fields: Any) -> Sample:
    return Sample(row_id="?", group_index=-1, sample_index=-1, request_id="?", row={"id": "r0"}, **fields)


@given(
    tokens=st.lists(st.integers(0, 200_000), max_size=9),
    dtype=st.sampled_from([np.int32, np.int64, np.uint32]),
    reward=st.none() | st.floats(-9, 9, width=32),
)
def test_numbers_of_numpy_are_kept_as_numbers(tokens: list[int], dtype: Any, reward: float | None) -> None:
    n = len(tokens)
    array = np.array(tokens, dtype)
    theirs = made(
        token_ids=array,
        logprobs=np.full(n, -0.5, np.float32),
        loss_mask=np.arange(n) % 2 == 0,
        version_spans=[[0, array.dtype.type(n), "a", 0]] if n else [],
        reward=None if reward is None else np.float32(reward),
    )
    (one,) = finished(pristine(), [theirs])
    assert one.token_ids == tokens and one.logprobs == [-0.5] * n and one.reward == reward
    assert one.loss_mask == [1 - i % 2 for i in range(n)] and one.version_spans == [(0, n, "a", 0)] * bool(n)
    assert from_json(json.loads(json.dumps(to_json(one)))) == one, "so a snapshot keeps it"


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": "abc"},
        {"token_ids": None},
        {"token_ids": [1.5]},
        {"token_ids": [1], "logprobs": None},
        {"token_ids": [1], "logprobs": [None]},
        {"token_ids": [1], "loss_mask": [2]},
        {"token_ids": [1], "loss_mask": ["0"]},
        {"token_ids": [1], "loss_mask": [float("nan")]},
        {"token_ids": [1], "version_spans": None},
        {"token_ids": [1], "version_spans": [(0, 1, "a")]},
        {"token_ids": [1], "version_spans": [(0, 1, None, 0)]},
        {"reward": "good"},
    ],
)
def test_m13_a_field_that_is_no_such_thing_is_refused_with_the_sample(fields: dict[str, Any]) -> None:
    name = list(fields)[-1]
    with pytest.raises(MalformedSample, match=f"sample 0 of 'r0': {name} is "):
        finished(pristine(), [made(**fields)])


def test_a67_one_object_for_two_samples_is_refused_and_one_for_two_groups_is_copied() -> None:
    samples = pristine(2)
    with pytest.raises(MalformedSample, match=r"'r0'.*twice"):
        finished(samples, [samples[0], samples[0]])
    memo = made(token_ids=[7])
    first, second = finished(pristine(), [memo]) + finished(pristine(row="r9"), [memo])
    assert (first.row_id, second.row_id, memo.row_id) == ("r0", "r9", "?")
    second.loss_mask[0] = 0
    assert first.loss_mask == [1] and first.token_ids == second.token_ids == [7]


@on_virtual_time
async def test_a67_a_memo_of_one_object_trains_every_row_once() -> None:
    memo: dict[str, Any] = {}

    async def generate(samples: Any, engine: Any) -> Any:
        return [memo.setdefault("answer", samples[0])]

    one = rollout(4, generate=generate)
    one.start()
    trained = []
    for _ in range(4):
        lease = await batch_of(one)
        trained.append(lease.groups[0][0].row_id)
        one.commit(lease)
    assert sorted(trained) == ["p0", "p1", "p2", "p3"]
    await one.close()


@on_virtual_time
async def test_what_a_trainer_changes_in_a_lease_does_not_come_back_after_a_restore() -> None:
    async def generate(samples: Any, engine: Any) -> Any:
        samples[0].token_ids, samples[0].extra = [1, 2, 3], {"turns": [{"n": 1}]}
        return samples

    one = rollout(1, generate=generate)
    one.start()
    lease = await batch_of(one)
    before = [apart(sample) for sample in lease.groups[0]]
    (mine,) = lease.groups[0]
    mine.token_ids.clear()
    mine.loss_mask[:] = [0]
    mine.extra["turns"][0]["n"] = mine.row["id"] = mine.reward = 9
    states = cut(one)
    one.roll_back(lease)
    await one.close()
    assert set(states) == {NAME, "group-0"}
    back = again(states, 0, n=1, generate=generate)
    back.start()
    kept = await batch_of(back)
    assert list(kept.groups[0]) == before
    back.commit(kept)
    await back.close()
