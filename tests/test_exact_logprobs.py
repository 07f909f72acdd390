"""The best tokens of each position, on the real engine: as the engine gives them, also for what was saved (L1)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("CUMULATIVE", {"logprobs": 5}),
        ("FINAL_ONLY", {"logprobs": 0}),
        ("DELTA", {"logprobs": 3, "flat_logprobs": True}),
        ("CUMULATIVE", {"logprobs": 3, "flat_logprobs": True}),
        ("DELTA", {"logprobs": 4, "temperature": 1.8, "seed": 6, "prompt_logprobs": 2}),
        ("FINAL_ONLY", {"logprobs": 2, "detokenize": False}),
    ],
)
def test_the_best_tokens_cut_at_every_position(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    """Ids, values, ranks and texts of every entry, and their sum, are those of the bare engine's answer."""
    whole = on_loop(cut_everywhere(engine, quick_path / "s", PROMPT, greedy(24, kind, **fields)))
    assert whole.named is not None and all(rank is not None for entry in whole.named for rank, _ in entry)
    if fields.get("temperature"):
        assert any(entry[0][0] > 4 for entry in whole.named), "no token beyond the best was drawn"


@pytest.mark.parametrize(("kind", "flat"), [("CUMULATIVE", True), ("PULLED", False), ("PULLED", True)])
def test_the_best_tokens_aborted_here_and_restored_there(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, kind: str, flat: bool
) -> None:
    """Aborted twice in one process (also with tokens that no store has), then restored, then asked for once more."""
    params = greedy(240, kind, logprobs=3, flat_logprobs=flat)
    pulls = kind == "PULLED"

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        async with capturing(engine, quick_path, pulls=pulls) as (wrapped, session):
            for at_least in (5, 12):
                await abort_after(wrapped, PROMPT, params, "r", at_least)
            assert session.counters.tokens_captured >= 12
        async with capturing(engine, quick_path, pulls=pulls) as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole, tolerance=2e-5)
            assert session.counters.tokens_captured < 240
        async with capturing(engine, quick_path, pulls=pulls) as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole, tolerance=2e-5)
            assert session.counters.tokens_captured == 0
        columns = read_back(quick_path).transcripts["r"].columns
        assert {name: [run.values.shape for run in runs] for name, runs in columns.items()} == {
            "rank": [(240,)],
            "top_ids": [(240, 3)],
            "top_logprobs": [(240, 3)],
        }

    on_loop(scenario())


def test_many_kinds_of_logprobs_in_one_store(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """Calls with none, the sampled, two and five in the same flushes, read and streamed, each cut somewhere else."""
    asked = prompts(8, 10)
    kinds: list[dict[str, Any]] = [{"logprobs": None}, {"logprobs": 0}, {"logprobs": 2}, {"logprobs": 5}]
    params = [greedy(30, ("FINAL_ONLY", "DELTA")[i % 2], **kinds[i // 2]) for i in range(8)]
    shown = [greedy(30, **{**kinds[i // 2], "logprobs": kinds[i // 2]["logprobs"] or 0}) for i in range(8)]

    async def scenario() -> None:
        wanted = [await ask(engine, asked[i], params[i], f"bare-{i}") for i in range(8)]
        seen = [await ask(engine, asked[i], shown[i], f"seen-{i}") for i in range(8)]
        async with capturing(engine, quick_path, pulls=True) as (_, session):
            for i in range(8):
                await put_cut(session, engine, f"r{i}", params[i], seen[i], 0, 3 + 3 * i)
        async with capturing(engine, quick_path, pulls=True) as (wrapped, _):
            got = await asyncio.gather(*(ask(wrapped, asked[i], params[i], f"r{i}") for i in range(8)))
        for one, whole in zip(got, wanted, strict=True):
            assert_same(one, whole, tolerance=2e-5)
        found = read_back(quick_path).transcripts
        assert [sorted(found[f"r{i}"].columns) for i in range(0, 8, 2)] == [
            [],
            ["rank"],
            ["rank", "top_ids", "top_logprobs"],
            ["rank", "top_ids", "top_logprobs"],
        ]
        (best,) = found["r7"].columns["top_logprobs"]
        assert np.all(np.diff(best.values, axis=1) <= 0)

    on_loop(scenario())


def test_ranks_that_nobody_looks_at_are_not_kept(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    async def scenario() -> None:
        whole = await ask(engine, PROMPT, greedy(20, logprobs=0), "bare")
        async with capturing(engine, quick_path) as (wrapped, session):
            session.keeps_ranks = False
            await abort_after(wrapped, PROMPT, greedy(20), "r", 6)
            got = await ask(wrapped, PROMPT, greedy(20), "r")
        assert read_back(quick_path).transcripts["r"].columns == {}
        assert got.token_ids == whole.token_ids and got.named is not None and whole.named is not None
        assert got.named[0] == [(None, whole.named[0][0][1])] and got.named[-1] == whole.named[-1]

    on_loop(scenario())
