"""Resumes on an engine of another kind: bfloat16, prefills in chunks, a cache too small for its calls (B19, G5).

One engine for all of them: every start costs seconds.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OnLoop
from tests.engine_runs import PROMPT, ask, assert_same, capturing, cut_everywhere, greedy, prompts, put_cut

BEGINS, ENDS = "hel", "lo!"
"""What thinking is put between, in the tiny model's words: one token, and two."""


@pytest.fixture(scope="module")
def other_engine(tiny_model: Path, on_loop: OnLoop[Any]) -> Iterator[Any]:
    from prefix_recovery.engine import Engine, set_environment

    before = dict(os.environ)
    set_environment()
    from vllm.config import ReasoningConfig

    started = Engine(
        str(tiny_model),
        {
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 32,
            "block_size": 32,
            "num_gpu_blocks_override": 40,
            "reasoning_config": ReasoningConfig(reasoning_start_str=BEGINS, reasoning_end_str=ENDS),
        },
    )
    os.environ.clear()
    os.environ.update(before)
    tempfile.tempdir = None

    async def close() -> None:
        started.close()

    yield started.llm
    on_loop(close())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_g5_a_thinking_budget_goes_on_where_it_was(
    other_engine: Any, on_loop: OnLoop[Any], quick_path: Path, temperature: float
) -> None:
    """G5: a budget of 12, cut at every position of thinking, inside the end marker that is forced, and after it."""
    tokenizer = other_engine.get_tokenizer()
    prompt = [*PROMPT, *tokenizer.encode(BEGINS, add_special_tokens=False)]
    params = greedy(30, temperature=temperature, seed=5, thinking_token_budget=12)

    async def scenario() -> None:
        outside = [cut for cut in range(1, 31) if cut != 13]
        whole = await cut_everywhere(other_engine, quick_path / "s", prompt, params, outside, tolerance=0.0)
        assert tokenizer.decode(whole.token_ids[12:14]) == ENDS
        async with capturing(other_engine, quick_path / "inside") as (wrapped, session):
            await put_cut(session, other_engine, "r", params, whole, 0, 13)
            assert_same(await ask(wrapped, prompt, params, "r"), whole, tolerance=0.0)
            assert session.counters.tokens_captured == 13 + 30, "it was not begun again"

    on_loop(scenario())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b19_preempted_in_chunks_and_in_half_the_precision(
    other_engine: Any, on_loop: OnLoop[Any], quick_path: Path, temperature: float
) -> None:
    """B19: prompts longer than a prefill's chunk, more calls than the cache holds, cut and carried on: bit for bit."""
    asked = prompts(12, 90)
    params = greedy(60, temperature=temperature, seed=4, presence_penalty=0.5)

    async def scenario() -> None:
        async with capturing(other_engine, quick_path / "whole") as (wrapped, _):
            wanted = [await ask(wrapped, prompt, params, f"r{i}") for i, prompt in enumerate(asked)]
        async with capturing(other_engine, quick_path / "cut") as (_, session):
            for i, whole in enumerate(wanted):
                await put_cut(session, other_engine, f"r{i}", params, whole, 0, (7 * i) % 60)
        async with capturing(other_engine, quick_path / "cut") as (wrapped, _):
            got = await asyncio.gather(*(ask(wrapped, asked[i], params, f"r{i}") for i in range(12)))
        for one, whole in zip(got, wanted, strict=True):
            assert_same(one, whole, tolerance=0.0)

    on_loop(scenario())
