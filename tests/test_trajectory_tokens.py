"""recovery/trajectory_tokens.py against a plain walk over tokens, and what a rollout makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.admission.samples import Sample, finished, from_json, to_json, trainable_versions
from recovery.errors import InputError
from recovery.model import PolicyVersion
from recovery.trajectory_tokens import TrajectoryTokens, spans_of, whole

Turn = tuple[list[int], list[tuple[int, int]]]
"""What is read, and then the answer: each token with its version's number."""


def call(prompt: list[int], answer: list[tuple[int, int]]) -> TrajectoryTokens:
    """One model call; the logprob of a token is made of it."""
    spans = [(at, at + 1, PolicyVersion("a", number)) for at, (_, number) in enumerate(answer)]
    ids = [token for token, _ in answer]
    return TrajectoryTokens(
        prompt_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(ids, np.int32),
        loss_mask=np.ones(len(ids), np.bool_),
        logprobs=np.array([-token / 8 for token in ids], np.float32),
        version_spans=spans_of(spans),
    )


def calls_of(turns: list[Turn]) -> list[TrajectoryTokens]:
    made, context = [], []  # type: list[TrajectoryTokens], list[int]
    for read, answer in turns:
        context = [*context, *read]
        made.append(call(context, answer))
        context = [*context, *(token for token, _ in answer)]
    return made


tokens = st.integers(0, 60)
answers = st.lists(st.tuples(tokens, st.integers(0, 3)), max_size=5)
trajectories = st.lists(st.tuples(st.lists(tokens, max_size=4), answers), min_size=1, max_size=5)


@given(trajectories, st.data())
def test_b6_the_mask_is_as_long_as_the_tokens_and_0_for_what_was_read(turns: list[Turn], data: st.DataObject) -> None:
    """B6: however the calls were put together: at once, or cut anywhere and each part made first, as a restore does."""
    made = calls_of(turns)
    cut = data.draw(st.integers(0, len(made) - 1))
    in_parts = whole([*([whole(made[:cut])] if cut else []), whole(made[cut:])])
    for one in (whole(made), in_parts):
        generated: list[tuple[int, int, int]] = []  # token, 1 if it was generated, version
        for number, (read, answer) in enumerate(turns):
            generated += [(token, 0, -1) for token in read if number]
            generated += [(token, 1, version) for token, version in answer]
        assert one.prompt_token_ids.tolist() == turns[0][0]
        assert one.token_ids.tolist() == [token for token, _, _ in generated]
        assert one.loss_mask.tolist() == [bool(trained) for _, trained, _ in generated]
        assert one.logprobs.tolist() == [-token / 8 * trained for token, trained, _ in generated]
        versions = {at: number for start, end, _, number in one.version_spans for at in range(start, end)}
        assert versions == {at: version for at, (_, trained, version) in enumerate(generated) if trained}


@given(trajectories)
def test_v7_a_rollout_takes_it_as_a_sample(turns: list[Turn]) -> None:
    """V7: its fields are those of a sample: kept as they are, and trained on under the versions of the answers."""
    made = whole(calls_of(turns))
    pristine = Sample(row_id="r", group_index=0, sample_index=0, request_id="q", row={})
    fields: dict[str, Any] = {
        name: getattr(made, name) for name in ("token_ids", "loss_mask", "logprobs", "version_spans")
    }
    (sample,) = finished(
        [pristine], [Sample(row_id="", group_index=0, sample_index=0, request_id="", row={}, **fields)]
    )
    assert from_json(to_json(sample)) == sample
    assert sample.token_ids == made.token_ids.tolist() and len(sample.loss_mask) == len(sample.token_ids)
    numbers = {number for _, answer in turns for _, number in answer}
    assert trainable_versions([sample], None) - {None} == {PolicyVersion("a", number) for number in numbers}


def test_a_context_that_was_rewritten_is_refused_where_it_parts() -> None:
    first = call([1, 2], [(3, 0), (4, 0)])
    for prompt, where in (([1, 2, 3, 9, 5], 3), ([1, 2, 3], 3), ([2], 0), ([], 0)):
        with pytest.raises(InputError, match=f"they part at position {where}"):
            whole([first, call(prompt, [(7, 0)])])
    with pytest.raises(InputError, match="without a model call"):
        whole([])
