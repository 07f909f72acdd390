"""vllm_hooks.top_logprobs over vLLM's own containers: whichever it is, and however much of it is taken at a time, a
call keeps what the engine said of each position. (What a resumed caller is given: test_exact_logprobs.py.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs, Logprob, append_logprobs_for_next_position

from recovery.buffer import TokenBuffer
from recovery.errors import CaptureDisagrees
from recovery.model import PolicyVersion
from vllm_hooks.top_logprobs import captured_of

VERSION = PolicyVersion("a", 0)


@given(
    ranks=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    n_top=st.sampled_from([0, 1, 3]),
    steps=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    keeps=st.booleans(),
    data=st.data(),
)
def test_what_is_kept_is_what_the_engine_said(
    ranks: list[int], n_top: int, steps: list[int], keeps: bool, data: st.DataObject
) -> None:
    container: Any = data.draw(st.sampled_from([list, FlatLogprobs]))()
    streamed = data.draw(st.booleans())
    ids, best = [], []
    for at, rank in enumerate(ranks):
        top = [1000 * at + n for n in range(1, n_top + 1)]
        ids.append(top[rank - 1] if rank <= n_top else 1000 * at)
        best.append(top)
        values = [-0.25 * rank, *(-0.25 * n for n in range(1, n_top + 1))]
        append_logprobs_for_next_position(container, [ids[-1], *top], values, [None] * (n_top + 1), rank, n_top)

    buffer, start = TokenBuffer(b"c" * 16, 0), 0
    for step in steps:
        stop = min(len(ids), start + step)
        own = ids[start:stop]
        given_, first = (container[start:stop], 0) if streamed else (container, start)
        logprobs, columns = captured_of(given_, own, first, n_top if keeps else None)
        buffer.append(own, logprobs, VERSION, columns)
        start = stop
    (run,) = buffer.freeze()
    chunk = run.to_chunk()

    assert chunk.token_ids.tolist() == ids
    assert chunk.logprobs is not None and chunk.logprobs.tolist() == [-0.25 * rank for rank in ranks]
    if not keeps:
        assert not chunk.columns
        return
    assert chunk.columns["rank"].dtype == np.int32 and chunk.columns["rank"].tolist() == ranks
    assert chunk.columns.keys() == {"rank", *(("top_ids", "top_logprobs") if n_top else ())}
    if n_top:
        assert chunk.columns["top_ids"].tolist() == best
        assert chunk.columns["top_logprobs"].tolist() == [[-0.25 * n for n in range(1, n_top + 1)]] * len(ids)


def test_a_token_without_a_rank_has_none_kept() -> None:
    logprobs, columns = captured_of([{7: Logprob(-1.0)}, {8: Logprob(-2.0, 5)}], [7, 8], 0, 0)
    buffer = TokenBuffer(b"c" * 16, 0)
    buffer.append([7, 8], logprobs, VERSION, columns)
    assert buffer.freeze()[0].to_chunk().columns["rank"].tolist() == [0, 5]


@pytest.mark.parametrize("n", [1, 2])
def test_more_than_was_asked_for_is_refused(n: int) -> None:
    position = {7: Logprob(-1.0, 1), 8: Logprob(-2.0, 2)}
    with pytest.raises(CaptureDisagrees, match="2 tokens where 0 and the sampled one"):
        captured_of([position] * n, [7] * n, 0, 0)


@pytest.mark.parametrize("n_top", [None, 0, 2])
def test_an_engine_without_logprobs_gives_none(n_top: int | None) -> None:
    assert captured_of(None, [7], 0, n_top) == ([], None)
    assert captured_of([], [], 0, n_top) == ([], None)
