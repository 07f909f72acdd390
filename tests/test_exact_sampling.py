"""Sampled calls on the real engine: cut anywhere and carried on, they are the call that would have been (G3, G4)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from recovery.resume_table import POSITION_DRAWS
from tests.conftest import OnLoop
from tests.engine_runs import (
    PROMPT,
    abort_after,
    ask,
    assert_same,
    capturing,
    cut_everywhere,
    greedy,
    prompts,
    put_cut,
    read_back,
)
from vllm_hooks import surface


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.02, "top_p": 0.95},
        {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "bad_words": ["e", "th"]},
        {"temperature": 0.9, "min_tokens": 12, "stop": ["a"], "logit_bias": {5: 2.0}},
        {"temperature": 1.0, "allowed_token_ids": list(range(30, 80)), "ignore_eos": False},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_g4_a_sampled_call_cut_at_every_position(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, fields: dict[str, Any]
) -> None:
    """G4: the draw is a function of seed and position; no generator is saved, and none is needed."""
    on_loop(cut_everywhere(engine, quick_path / "s", PROMPT, greedy(28, seed=7, **fields)))


def test_g4_three_cuts_are_as_good_as_one(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    params = greedy(40, temperature=1.0, seed=3)

    async def scenario() -> None:
        async with capturing(engine, quick_path / "whole") as (wrapped, _):
            whole = await ask(wrapped, PROMPT, params, "r")
        before = 0
        for cut in (5, 11, 29):
            async with capturing(engine, quick_path / "cut") as (_, session):
                await put_cut(session, engine, "r", params, whole, before, cut)
            before = cut
        async with capturing(engine, quick_path / "cut", exactness="bitwise") as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole, tolerance=2e-5)
            assert session.counters.tokens_captured == 11
        assert [event.exactness for event in read_back(quick_path / "cut").entries["r"].history][-1] == "bitwise"

    on_loop(scenario())


@pytest.mark.parametrize("kind", ["DELTA", "PULLED"])
def test_a_call_without_a_seed_is_given_one_that_is_stored(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, kind: str
) -> None:
    """Aborted here and restored there, it draws on; the seed in its record gives the same answer in one go."""
    params = greedy(240, kind, temperature=1.0)

    async def scenario() -> None:
        async with capturing(engine, quick_path / "a", pulls=kind == "PULLED") as (wrapped, session):
            first = await abort_after(wrapped, PROMPT, params, "r", 9)
            assert not session.unresumable.restart_only
        async with capturing(engine, quick_path / "a", pulls=kind == "PULLED") as (wrapped, session):
            got = await ask(wrapped, PROMPT, params, "r")
            assert session.counters.tokens_captured < 240 and got.token_ids[: len(first)] == first
        stored = read_back(quick_path / "a")
        draws = stored.transcripts["r"].request.extra["draws"]
        assert draws["scheme"] == "position-1" and stored.entries["r"].attempt == 1
        seeded = greedy(240, kind, temperature=1.0, seed=draws["seed"])
        async with capturing(engine, quick_path / "b") as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, seeded, "r"), got, tolerance=2e-5)
            others = [await ask(wrapped, PROMPT, params, f"r{i}") for i in range(3)]
        assert len({tuple(one.token_ids) for one in [got, *others]}) == 4, "two calls were given the same draws"

    on_loop(scenario())


def test_a_restarted_call_draws_what_it_had_drawn(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """A call that has to begin again keeps its seed: long answers, which are cut more often, are not drawn again."""
    params = greedy(240, temperature=1.0, routed_experts_prompt_start=1)

    async def scenario() -> None:
        async with capturing(engine, quick_path) as (wrapped, session):
            first = await abort_after(wrapped, PROMPT, params, "r", 6)
            answer = await ask(wrapped, PROMPT, params, "r")
            assert session.counters.tokens_captured >= len(first) + 240, "it was not begun again"
        assert answer.token_ids[: len(first)] == first

    on_loop(scenario())


def test_g3_a_seeded_call_is_the_same_alone_and_in_any_company(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """G3: seeded, unseeded and greedy calls in one batch; each seeded one equals its solo run, greedy ones too."""
    asked = prompts(9, 12)
    kinds: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 5}, {"temperature": 1.0}, {"temperature": 0.0}]
    params = [greedy(20 + 3 * i, **kinds[i % 3], top_p=0.9 if i % 3 != 2 else 1.0) for i in range(9)]

    async def scenario() -> None:
        async with capturing(engine, quick_path / "solo") as (wrapped, _):
            alone = {i: await ask(wrapped, asked[i], params[i], f"r{i}") for i in range(9) if i % 3 != 1}
        async with capturing(engine, quick_path / "batch") as (wrapped, _):
            got = await asyncio.gather(*(ask(wrapped, asked[i], params[i], f"r{i}") for i in range(9)))
        for i, one in alone.items():
            assert_same(got[i], one, tolerance=2e-5)

    on_loop(scenario())


def test_g4_sampled_calls_survive_preemption(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """The engine drops the cache of running calls and computes it again: nothing is drawn anew."""
    params = greedy(120, "DELTA", temperature=1.0, seed=9)

    async def scenario() -> None:
        async with capturing(engine, quick_path / "a") as (wrapped, _):
            whole = await ask(wrapped, PROMPT, params, "r")
        async with capturing(engine, quick_path / "b") as (wrapped, session):
            task = asyncio.ensure_future(ask(wrapped, PROMPT, params, "r"))
            while session.counters.tokens_captured < 20:
                await asyncio.sleep(0.002)
            await engine.pause_generation(mode="keep", clear_cache=True)
            await engine.resume_generation()
            assert_same(await task, whole, tolerance=2e-5)

    on_loop(scenario())


def test_the_engine_of_a_job_has_the_plug_in(engine: Any) -> None:
    assert POSITION_DRAWS in surface.stop_rules(engine).abilities


@pytest.mark.parametrize("fields", [{}, {"top_k": 30, "top_p": 0.9}, {"presence_penalty": 1.0, "min_p": 0.01}])
def test_g4_the_engines_generator_is_wound_on_to_the_cut(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, fields: dict[str, Any]
) -> None:
    """G4: with `draws: engine` a seeded call is what the bare engine makes of it, whole and cut at every position."""
    params = greedy(24, temperature=1.0, seed=4, **fields)

    async def scenario() -> None:
        bare = await ask(engine, PROMPT, params, "bare")
        cuts = range(1, 25)
        async with capturing(engine, quick_path, draws="engine") as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), bare)
            for cut in cuts:
                await put_cut(session, engine, f"r{cut}", params, bare, 0, cut, draws="engine")
        async with capturing(engine, quick_path, draws="engine") as (wrapped, session):
            for got in await asyncio.gather(*(ask(wrapped, PROMPT, params, f"r{cut}") for cut in cuts)):
                assert_same(got, bare, tolerance=2e-5)
            assert session.counters.tokens_captured == sum(24 - cut for cut in cuts)

    on_loop(scenario())


def test_draws_engine_without_a_seed_begins_again(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    async def scenario() -> None:
        async with capturing(engine, quick_path, draws="engine") as (wrapped, session):
            await ask(wrapped, PROMPT, greedy(5, temperature=1.0), "r")
            assert session.unresumable.restart_only == {"temperature": 1}

    on_loop(scenario())
