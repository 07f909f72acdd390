"""vllm_hooks.siblings: n samples of one request are n captured calls, and one request to their caller (B9, W9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.errors import InputError
from tests.conftest import OnLoop
from tests.engine_runs import PROMPT, ask, capturing, greedy, read_back, tokens_of, until
from vllm_hooks.siblings import joined, sibling_ids

N = 3


async def stream_of(n_outputs: int, ended: list[int], error: Exception | None = None) -> AsyncGenerator[Any, None]:
    try:
        for at in range(n_outputs):
            await asyncio.sleep(0)
            completion = SimpleNamespace(index=0, token_ids=[at])
            yield SimpleNamespace(request_id="child", outputs=[completion], finished=at == n_outputs - 1 and not error)
        if error is not None:
            raise error
    finally:
        ended.append(n_outputs)


@pytest.mark.parametrize("final_only", [False, True])
def test_streams_are_one_stream(final_only: bool) -> None:
    """Each sibling's outputs in order under its index; `finished` once, at the end."""
    ended: list[int] = []

    async def scenario() -> list[Any]:
        lengths = [3, 1, 5]
        stream = joined([stream_of(n, ended) for n in lengths], "r", final_only=final_only)
        return [output async for output in stream]

    got = asyncio.run(scenario())
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True] and sorted(ended) == [1, 3, 5]
    assert {output.request_id for output in got} == {"r"}
    if final_only:
        (output,) = got
        assert [(one.index, one.token_ids) for one in output.outputs] == [(0, [2]), (1, [0]), (2, [4])]
    else:
        seen = [(output.outputs[0].index, *output.outputs[0].token_ids) for output in got]
        assert [at for at in seen if at[0] == 2] == [(2, at) for at in range(5)] and len(seen) == 9


@pytest.mark.parametrize("leaves", [False, True])
def test_a_failure_or_a_caller_that_leaves_ends_them_all(leaves: bool) -> None:
    ended: list[int] = []

    async def scenario() -> None:
        error = None if leaves else ValueError("of one")
        stream = joined([stream_of(2, ended, error), stream_of(10**6, ended)], "r", final_only=False)
        if leaves:
            await anext(stream)
            await stream.aclose()
            return
        with pytest.raises(ValueError, match="of one"):
            async for _ in stream:
                pass

    asyncio.run(scenario())
    assert sorted(ended) == [2, 10**6]


def test_a_stream_that_just_ends_is_an_error() -> None:
    async def scenario() -> None:
        with pytest.raises(asyncio.InvalidStateError, match="sample 0"):
            async for _ in joined([stream_of(0, [])], "r", final_only=True):
                pass

    asyncio.run(scenario())


async def samples(engine: Any, params: Any, name: str) -> list[tuple[list[int], str, list[float]]]:
    """Ids, text and sampled logprobs of each sample, whatever the kind of output."""
    ids: list[list[int]] = [[] for _ in range(params.n)]
    texts, logprobs = [""] * params.n, [[] for _ in range(params.n)]  # type: list[str], list[list[float]]
    delta = params.output_kind.name == "DELTA"
    finished = 0
    async for output in engine.generate(PROMPT, params, name):
        finished += output.finished
        assert output.request_id == name
        for one in output.outputs:
            fresh = [float(row[token].logprob) for token, row in zip(one.token_ids, one.logprobs, strict=True)]
            ids[one.index] = [*ids[one.index], *one.token_ids] if delta else list(one.token_ids)
            texts[one.index] = texts[one.index] + one.text if delta else one.text
            logprobs[one.index] = logprobs[one.index] + fresh if delta else fresh
    assert finished == 1
    return list(zip(ids, texts, logprobs, strict=True))


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE", "FINAL_ONLY", "PULLED"])
def test_samples_aborted_and_carried_on(engine: Any, on_loop: OnLoop[Any], quick_path: Path, kind: str) -> None:
    """B9, W9: aborted by the request's id, restored in a new session: each is the call of its own seed, whole."""
    params = greedy(200, kind, n=N, temperature=1.0, seed=11, logprobs=1)

    async def scenario() -> None:
        async with capturing(engine, quick_path / "whole") as (wrapped, _):
            alone = [
                await ask(wrapped, PROMPT, greedy(200, temperature=1.0, seed=11 + index, logprobs=1), f"r{index}")
                for index in range(N)
            ]
        async with capturing(engine, quick_path / "cut", pulls=kind == "PULLED") as (wrapped, session):
            task = asyncio.ensure_future(samples(wrapped, params, "r"))
            await until(lambda: tokens_of(session) >= 12)
            await wrapped.abort("r")
            cut = await task
            assert all(len(ids) < 200 for ids, _, _ in cut)
        assert (params.n, params.seed) == (N, 11)
        async with capturing(engine, quick_path / "cut", pulls=kind == "PULLED") as (wrapped, session):
            got = await samples(wrapped, params, "r")
            assert 0 < session.counters.tokens_captured < 200 * N - 11
        stored = read_back(quick_path / "cut")
        assert sorted(stored.entries) == sorted(sibling_ids("r", N))
        for index, (ids, text, logprobs) in enumerate(got):
            whole = alone[index]
            assert (ids, text) == (whole.token_ids, whole.text)
            assert logprobs == pytest.approx(whole.sampled, abs=2e-5)
            transcript = stored.transcripts[f"{index}_r"]
            assert transcript.token_ids.tolist() == ids and transcript.request.extra["draws"]["seed"] == 11 + index

    on_loop(scenario())


def test_samples_without_a_seed_are_given_one_each(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    params = greedy(20, n=N, temperature=1.0)

    async def scenario() -> None:
        async with capturing(engine, quick_path) as (wrapped, _):
            first = await samples(wrapped, params, "r")
            assert len({tuple(ids) for ids, _, _ in first}) == N
            with pytest.raises(InputError, match="running already"):
                stream = wrapped.generate(PROMPT, params, "twice")
                await asyncio.gather(samples(wrapped, params, "twice"), anext(stream))
        async with capturing(engine, quick_path) as (wrapped, session):
            assert await samples(wrapped, params, "r") == first
            assert session.counters.tokens_captured == 0, "it was stored"

    on_loop(scenario())
