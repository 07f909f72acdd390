"""The wrapper and the pull see the same at every cut of a run in which everything happens at random (B12, B13).

Of the same requests one half is streamed to callers of any speed and one half is read; at each cut what the wrapper has
captured is compared with what the front end says at that moment, and a snapshot is compared with the whole answers. An
engine that dies under both: test_engine_death.py.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np

from recovery.buffer import Rows
from recovery.protocol import Verdict
from tests.conftest import OnLoop
from tests.engine_runs import Answer, ask, capturing, greedy, prompts, read_back, standing, take_snapshot, until
from vllm_hooks import top_logprobs
from vllm_hooks.pull import PullReader
from vllm_hooks.siblings import sibling_ids

N_CALLS, N_TOKENS, N_CUTS = 12, 90, 14
KINDS = ("DELTA", "FINAL_ONLY", "CUMULATIVE", "FINAL_ONLY")


def params_of(number: int) -> Any:
    """Greedy ones, seeded ones, and every fourth with two samples; best tokens and plain logprobs."""
    sampled = {"temperature": 1.0, "seed": number} if number % 3 else {}
    n = 2 if sampled and number % 4 in (0, 1) else 1
    return greedy(N_TOKENS, KINDS[number % 4], logprobs=number % 2 * 2, n=n, **sampled)


async def consume(engine: Any, prompt: Any, params: Any, name: str, rng: random.Random) -> None:
    """As fast as outputs come, or now and then not looking."""
    slow = rng.random() < 0.5
    async for _ in engine.generate(prompt, params, name):
        if slow:
            await asyncio.sleep(rng.uniform(0, 0.03))


def compare(session: Any, reader: PullReader) -> tuple[int, int]:
    """What each live call has captured, and what the front end has of it: calls compared, and calls it was ahead of."""
    compared = ahead = 0
    session.read_now()
    for call in list(session.table._calls.values()):
        n_top = top_logprobs.n_kept(greedy(1, logprobs=call.request.sampling.get("logprobs", 0)))
        ids, logprobs, columns = reader.read(call.request.rollout, 0, n_top)
        if not ids or call.ended is not None:
            continue
        captured = call.transcript_ids.tolist()
        n = len(captured)
        assert captured == ids[:n], call.request.rollout
        assert list(call.transcript_logprobs) == np.array(logprobs[:n], np.float32).tolist()
        arrays = columns.arrays() if isinstance(columns, Rows) else columns
        for column, values in (arrays or {}).items() if n else ():
            assert np.array_equal(np.concatenate([run.values for run in call.columns[column]]), values[:n]), column
        compared += 1
        ahead += len(ids) > n
    return compared, ahead


def all_have(session: Any, reader: PullReader, n_calls: int, n_tokens: int) -> bool:
    """Whether the front end has so many tokens of each call, none of which has ended."""
    calls = list(session.table._calls.values())
    return len(calls) == n_calls and all(len(reader.read(c.request.rollout, 0).token_ids) >= n_tokens for c in calls)


async def whole_answers(engine: Any, asked: list[list[int]], folder: Path) -> dict[str, Answer]:
    """Every sample of every request, uninterrupted, by the name under which it is kept."""
    one_by_one: dict[str, tuple[list[int], Any]] = {}
    for number, prompt in enumerate(asked):
        params = params_of(number)
        names = [f"r{number}"] if params.n == 1 else sibling_ids(f"r{number}", params.n)
        for index, name in enumerate(names):
            seed = {} if params.seed is None else {"temperature": 1.0, "seed": params.seed + index}
            one_by_one[name] = prompt, greedy(N_TOKENS, logprobs=params.logprobs, **seed)
    async with capturing(engine, folder) as (wrapped, _):
        answers = await asyncio.gather(*(ask(wrapped, *one, name) for name, one in one_by_one.items()))
    return dict(zip(one_by_one, answers, strict=True))


def test_both_captures_agree_at_every_cut(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, rng: random.Random
) -> None:
    asked = prompts(N_CALLS, 10)
    reader = PullReader(engine)

    async def cut(session: Any, wholes: dict[str, Answer]) -> None:
        attempt = await take_snapshot(session)
        assert attempt.verdict is Verdict.PUBLISHED, attempt
        for name, transcript in (await asyncio.to_thread(read_back, quick_path / "s")).transcripts.items():
            ids = transcript.token_ids.tolist()
            assert ids == wholes[name].token_ids[: len(ids)], name
            assert np.allclose(transcript.logprobs, wholes[name].sampled[: len(ids)], rtol=0, atol=2e-5)

    async def scenario() -> None:
        wholes = await whole_answers(engine, asked, quick_path / "whole")
        totals = np.zeros(2, int)
        async with capturing(engine, quick_path / "s", pulls=True, flush=16, keep_latest_k=1) as (wrapped, session):
            tasks = {
                number: asyncio.ensure_future(consume(wrapped, prompt, params_of(number), f"r{number}", rng))
                for number, prompt in enumerate(asked)
            }
            for at in (N_TOKENS // 9, N_TOKENS // 3):
                await until(lambda at=at: all_have(session, reader, len(wholes), at))
                async with standing(engine):
                    totals += compare(session, reader)
            assert totals[0] == 2 * len(wholes), "all were compared"
            for at in range(N_CUTS):
                await asyncio.sleep(rng.uniform(0, 0.05))
                totals += compare(session, reader)
                running = [number for number, task in tasks.items() if not task.done()]
                if at % 3 == 0 and running:
                    await wrapped.abort(f"r{rng.choice(running)}")
                elif at % 3 == 1:
                    await engine.pause_generation(mode="keep", clear_cache=rng.random() < 0.7)
                    totals += compare(session, reader)
                    await engine.resume_generation()
                if at % 4 == 3:
                    await cut(session, wholes)
            await asyncio.gather(*tasks.values())
            await asyncio.gather(
                *(consume(wrapped, asked[i], params_of(i), f"r{i}", random.Random(i)) for i in range(N_CALLS))
            )
            await cut(session, wholes)
        stored = read_back(quick_path / "s")
        assert set(stored.entries) == set(wholes)
        for name, whole in wholes.items():
            assert stored.transcripts[name].token_ids.tolist() == whole.token_ids, name

    on_loop(scenario())
