"""Resumes on an engine that speculates (n-gram drafts): several tokens in one output, cut at every position.

Owns: that a greedy call is carried on exactly there, and that a call that draws begins again by name.
Does not know: which fields a speculative engine ignores (test_logits.py, G9).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OnLoop, engine_of
from tests.engine_runs import ask, capturing, cut_everywhere, greedy, put_cut

REPEATING = [185, 506, 103, 35] * 8
"""What an n-gram proposer finds again."""
LENGTH = 60


@pytest.fixture(scope="module")
def speculating(tiny_model: Path, on_loop: OnLoop[Any]) -> Iterator[Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    arguments = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "speculative_config": drafts}
    with engine_of(tiny_model, arguments, on_loop) as llm:
        yield llm


def test_a_greedy_call_of_a_speculating_engine_is_carried_on_at_every_position(
    speculating: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """Accepted drafts are captured, refused ones never are: the cut may fall inside of what one output brought."""
    params = greedy(LENGTH)

    async def scenario() -> None:
        sizes: list[int] = []
        async for output in speculating.generate({"prompt_token_ids": REPEATING}, greedy(LENGTH, "DELTA"), "bare"):
            sizes.append(len(output.outputs[0].token_ids))
        assert max(sizes) > 1 and sum(sizes) == LENGTH, f"no draft was accepted: {sizes}"
        await cut_everywhere(speculating, quick_path, REPEATING, params, range(1, LENGTH), tolerance=1e-5)

    on_loop(scenario())


def test_a_call_that_draws_begins_again_on_a_speculating_engine(
    speculating: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """How drafts line up with the cut decides what is accepted: with a seed too it is another sample."""
    params = greedy(LENGTH, temperature=1.0, seed=3)

    async def scenario() -> None:
        async with capturing(speculating, quick_path) as (wrapped, session):
            with pytest.warns(UserWarning, match="starts again after a crash"):
                whole = await ask(wrapped, REPEATING, params, "whole")
            assert session.unresumable.restart_only
            await put_cut(session, speculating, "r", params, whole, 0, 20)
            before = session.counters.tokens_captured
            got = await ask(wrapped, REPEATING, params, "r")
            assert session.counters.tokens_captured == before + LENGTH == before + len(got.token_ids)

    on_loop(scenario())
