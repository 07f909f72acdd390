"""A job's loop on an engine of this process, as job.py runs it, without its signals and its lock.

Owns: how a Dispatch over a started session is made for a config, and the rows that the bare engine gives.
Does not know: what is expected of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefix_recovery.dispatch import Dispatch, Outcome
from prefix_recovery.progress import Progress
from prefix_recovery.prompts import read_prompts
from prefix_recovery.results import Results
from recovery.config import load_config
from tests.engine_runs import ask, standing, until
from vllm_hooks import RecoverableEngine, open_session, surface


@contextlib.asynccontextmanager
async def job(engine: Any, config_path: Path) -> AsyncIterator[tuple[Dispatch, Any]]:
    """A Dispatch over a started session, as job.py makes it; the session is stopped at the end."""
    config = load_config(config_path)
    file = read_prompts(config.prompts)
    results = Results(Path(config.output))
    results.open()
    must = {"job.samples_per_prompt": config.samples_per_prompt}
    session = await open_session(engine, config.rollout_checkpointing, must=must, test=False, keeps_results=True)
    try:
        samples = list(file.samples(config.samples_per_prompt))
        capturing = RecoverableEngine(engine, session)
        yield (
            Dispatch(config, capturing, session, results, samples, Progress(0, 0, lambda: 0, quiet=True), None),
            session,
        )
    finally:
        await session.stop()
        results.close()


async def run_here(engine: Any, config_path: Path, stop_at: tuple[int, int] | None = None) -> tuple[Outcome, Any]:
    """A whole run, or one that is asked to stop at so many tokens and rows. Gives what it did, and counters.

    By then as many calls as `rows` must have ended: more come to no end before the stop.
    """
    async with job(engine, config_path) as (dispatch, session):
        todo, stop = await dispatch.matched(), asyncio.Event()
        work = asyncio.ensure_future(dispatch.run(todo, stop))
        if stop_at is not None:
            tokens, rows = stop_at
            results = dispatch._results
            await until(lambda: session.counters.tokens_captured >= tokens)
            async with standing(engine):  # no more end, however slowly the row of one that has ended is stored
                await until(lambda: len(results.done) >= rows)
                stop.set()
        await work
        return dispatch.outcome, session.counters


async def reference_rows(engine: Any, lines: Sequence[Mapping[str, Any]], samples: int = 1) -> list[dict[str, Any]]:
    """The rows of a job as the engine gives them uncaptured; `samples` of each line."""
    answers = [await _reference_row(engine, line) for line in lines]
    return [{**answer, "sample_index": index} for answer in answers for index in range(samples)]


async def _reference_row(engine: Any, line: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "logprobs": 0, **line.get("sampling", {})}
    prompt = line.get("prompt_token_ids") or line["prompt"]
    answer = await ask(engine, prompt, surface.sampling_params(fields), f"reference-{line['id']}")
    return {
        "id": line["id"],
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": answer.token_ids,
        "logprobs": answer.sampled,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
