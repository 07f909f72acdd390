"""recovery.buffer: nothing is lost, doubled or relabelled, and a freeze copies nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.buffer import Run, TokenBuffer
from recovery.model import MAX_TOKENS_PER_CHUNK, PolicyVersion
from tests.fakes import V0, name

CALL = name("b")


@dataclass(frozen=True)
class Token:
    """The model's one token: what may never come apart."""

    id: int
    logprob: float | None
    version: PolicyVersion


VERSIONS = st.builds(PolicyVersion, st.sampled_from("ab"), st.integers(0, 2))
OUTPUTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32)), max_size=5),
        st.booleans(),
        VERSIONS,
        st.booleans(),
    ),
    max_size=30,
)
"""(tokens, with logprobs?, version, freeze after it?)"""


def flat(runs: list[Run]) -> list[Token]:
    tokens = []
    for run in runs:
        logprobs = run.logprobs if run.logprobs is not None else [None] * len(run.token_ids)
        tokens += [Token(i, lp, run.version) for i, lp in zip(run.token_ids, logprobs, strict=True)]
    return tokens


@given(start=st.integers(0, 100), outputs=OUTPUTS)
def test_any_history_gives_back_exactly_its_tokens(start: int, outputs: list) -> None:
    """Freezing between any two appends loses, doubles and reorders nothing."""
    buffer = TokenBuffer(CALL, 3, start)
    model: list[Token] = []
    taken: list[Run] = []
    for tokens, with_logprobs, version, freeze in outputs:
        ids, lps = [t for t, _ in tokens], [lp for _, lp in tokens]
        buffer.append(ids, lps if with_logprobs else None, version)
        model += [Token(t, lp if with_logprobs else None, version) for t, lp in tokens]
        assert buffer.end == start + len(model)
        assert buffer.n_pending == len(model) - len(flat(taken))
        if freeze:
            taken += buffer.freeze()
            assert buffer.n_pending == 0
    taken += buffer.freeze()
    assert buffer.freeze() == []
    assert flat(taken) == model
    at = start
    for run in taken:  # contiguous, never empty, one version and one attempt each
        assert (run.start, run.call_id, run.attempt) == (at, CALL, 3)
        assert len(run.token_ids) >= 1
        at += len(run.token_ids)
    assert at == start + len(model)


@given(outputs=OUTPUTS)
def test_a_run_becomes_the_chunk_it_is(outputs: list) -> None:
    buffer = TokenBuffer(CALL, 1)
    for tokens, with_logprobs, version, _ in outputs:
        buffer.append([t for t, _ in tokens], [lp for _, lp in tokens] if with_logprobs else None, version)
    for run in buffer.freeze():
        chunk = run.to_chunk()
        assert (chunk.call_id, chunk.attempt, chunk.start, chunk.version) == (CALL, 1, run.start, run.version)
        assert chunk.token_ids.dtype == np.int32 and chunk.token_ids.tolist() == run.token_ids
        assert (chunk.logprobs is None) == (run.logprobs is None)
        if chunk.logprobs is not None:
            assert chunk.logprobs.dtype == np.float32 and chunk.logprobs.tolist() == run.logprobs
        assert chunk.mask.all() and chunk.mask.shape == chunk.token_ids.shape


def test_freeze_hands_over_the_very_lists_and_never_touches_them_again() -> None:
    """Its cost cannot depend on the number of tokens: nothing is copied."""
    buffer = TokenBuffer(CALL, 0)
    buffer.append([1, 2], [-0.5, -0.25], V0)
    buffer.append([3], [-1.0], V0)
    runs, ids, logprobs = buffer._runs, buffer._runs[0].token_ids, buffer._runs[0].logprobs
    frozen = buffer.freeze()
    assert frozen is runs
    assert frozen[0].token_ids is ids and frozen[0].logprobs is logprobs
    buffer.append([4], [-2.0], V0)
    assert (ids, logprobs) == ([1, 2, 3], [-0.5, -0.25, -1.0])
    assert [run.start for run in buffer.freeze()] == [3]


def test_what_does_not_fit_changes_nothing() -> None:
    buffer = TokenBuffer(CALL, 0)
    buffer.append([1], [-0.5], V0)
    for ids, logprobs in (([1, 2], [-0.5]), ([1], [])):
        with pytest.raises(ValueError, match="logprobs"):
            buffer.append(ids, logprobs, V0)
    with pytest.raises(ValueError, match="fit in a chunk"):
        buffer.append([0] * (MAX_TOKENS_PER_CHUNK + 1), None, V0)
    assert (buffer.end, buffer.n_pending) == (1, 1)
    assert flat(buffer.freeze()) == [Token(1, -0.5, V0)]


def test_a_run_is_never_longer_than_a_chunk_may_be() -> None:
    buffer = TokenBuffer(CALL, 0)
    buffer.append([7] * (MAX_TOKENS_PER_CHUNK - 1), None, V0)
    buffer.append([8, 9], None, V0)
    assert [(run.start, len(run.token_ids)) for run in buffer.freeze()] == [
        (0, MAX_TOKENS_PER_CHUNK - 1),
        (MAX_TOKENS_PER_CHUNK - 1, 2),
    ]
