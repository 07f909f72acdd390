"""Resumes on an engine of another kind: bfloat16, prefills in chunks, a cache too small for its calls (B19, G5).

One engine for all of them: every start costs seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.model import PolicyVersion
from tests.conftest import OnLoop, engine_of
from tests.engine_runs import (
    PROMPT,
    abort_after,
    answer_of,
    ask,
    assert_same,
    capturing,
    cut_everywhere,
    greedy,
    prompts,
    put_cut,
)

BEGINS, ENDS = "hel", "lo!"
"""What thinking is put between, in the tiny model's words: one token, and two."""


@pytest.fixture(scope="module")
def other_engine(tiny_model: Path, on_loop: OnLoop[Any]) -> Iterator[Any]:
    from prefix_recovery.engine import set_environment

    before = dict(os.environ)
    set_environment()
    from vllm.config import ReasoningConfig

    arguments = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 32,
        "block_size": 32,
        "num_gpu_blocks_override": 40,
        "scheduling_policy": "priority",
        "enable_lora": True,
        "max_lora_rank": 8,
        "reasoning_config": ReasoningConfig(reasoning_start_str=BEGINS, reasoning_end_str=ENDS),
    }
    os.environ.clear()
    os.environ.update(before)
    with engine_of(tiny_model, arguments, on_loop) as llm:
        yield llm


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
    """B19: prompts longer than a prefill's chunk, more calls than the cache holds, cut and carried on: bit for bit.

    They are carried on with priorities, which decide who is pre-empted and nothing else.
    """
    asked = prompts(12, 90)
    params = greedy(60, temperature=temperature, seed=4, presence_penalty=0.5)

    async def scenario() -> None:
        async with capturing(other_engine, quick_path / "whole") as (wrapped, _):
            wanted = [await ask(wrapped, prompt, params, f"r{i}") for i, prompt in enumerate(asked)]
        async with capturing(other_engine, quick_path / "cut") as (_, session):
            for i, whole in enumerate(wanted):
                await put_cut(session, other_engine, f"r{i}", params, whole, 0, (7 * i) % 60)
        async with capturing(other_engine, quick_path / "cut") as (wrapped, _):
            got = await asyncio.gather(
                *(ask(wrapped, asked[i], params, f"r{i}", priority=5 * i % 3) for i in range(12))
            )
        for one, whole in zip(got, wanted, strict=True):
            assert_same(one, whole, tolerance=0.0)

    on_loop(scenario())


async def cached_and_answer(engine: Any, prompt: Any, params: Any, name: str, **arguments: Any) -> tuple[int, Any]:
    """How many tokens came from the prefix cache, and the answer."""
    cached: list[int] = []
    stream = engine.generate(prompt, params, name, **arguments)
    answer = await answer_of(stream, False, lambda output: cached.append(output.num_cached_tokens or 0))
    return max(cached), answer


@pytest.mark.parametrize("salt", [None, "mine"])
def test_a_prefix_is_cached_by_salt_and_policy_version(
    other_engine: Any, on_loop: OnLoop[Any], quick_path: Path, salt: str | None
) -> None:
    """Read from the cache or not, a resumed call is the same; after a weight update nothing of before is read."""
    (prompt,) = prompts(1, 100, seed=9)
    asked = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}

    async def scenario() -> None:
        await other_engine.reset_prefix_cache()
        async with capturing(other_engine, quick_path) as (wrapped, session):
            first, whole = await cached_and_answer(wrapped, asked, greedy(40), "whole")
            for name, fields in (("read", {}), ("unread", {"skip_reading_prefix_cache": True})):
                params = greedy(40, **fields)
                await put_cut(session, other_engine, name, params, whole, 0, 23)
                cached, got = await cached_and_answer(wrapped, asked, params, name)
                assert (cached >= 96) == (name == "read")
                assert_same(got, whole, tolerance=0.0)
            session.version = PolicyVersion("a", 1)
            later, again = await cached_and_answer(wrapped, asked, greedy(40), "later")
            more, _ = await cached_and_answer(wrapped, asked, greedy(40), "later still")
        assert (first, later) == (0, 0) and more >= 96
        assert again.token_ids == whole.token_ids

    on_loop(scenario())


def test_an_adapters_call_is_carried_on_under_the_same_adapter(
    other_engine: Any, on_loop: OnLoop[Any], quick_path: Path, tmp_path: Path
) -> None:
    """LoRA: cut at some positions; another adapter of that name is another call, and begins at its prompt."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("tuned", 1, str(make_adapter(tmp_path / "one", seed=1)))
    other = LoRARequest("tuned", 2, str(make_adapter(tmp_path / "two", seed=2)))
    params = greedy(200, temperature=1.0, seed=3, presence_penalty=0.5)

    async def scenario() -> None:
        async with capturing(other_engine, quick_path / "whole") as (wrapped, _):
            whole = await ask(wrapped, PROMPT, params, "r", lora_request=lora)
            plain = await ask(wrapped, PROMPT, params, "plain")
            otherwise = await ask(wrapped, PROMPT, params, "other", lora_request=other)
        assert len({tuple(one.token_ids) for one in (whole, plain, otherwise)}) == 3, "an adapter changed nothing"
        async with capturing(other_engine, quick_path / "cut") as (wrapped, session):
            assert not session.unresumable.restart_only
            for name in ("r", "s"):
                await abort_after(Bound(wrapped, lora), PROMPT, params, name, 9)
        async with capturing(other_engine, quick_path / "cut") as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r", lora_request=lora), whole, tolerance=0.0)
            assert session.counters.tokens_captured < 200
            before = session.counters.tokens_captured
            assert_same(await ask(wrapped, PROMPT, params, "s", lora_request=other), otherwise, tolerance=0.0)
            assert session.counters.tokens_captured == before + 200

    on_loop(scenario())


class Bound:
    """An engine whose every request is for one adapter."""

    def __init__(self, engine: Any, lora: Any) -> None:
        self._engine, self._lora = engine, lora

    def generate(self, *arguments: Any) -> Any:
        return self._engine.generate(*arguments, lora_request=self._lora)


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA of rank 4 on the attention of the tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name in ("q_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(4, 64, generator=draw)
            weights[f"{key}.lora_B.weight"] = torch.randn(64, 4, generator=draw)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
