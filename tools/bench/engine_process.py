"""One engine in a process of its own, which does the rounds that it is told to do and says how long they took.

Owns: the engine's start with given arguments and environment, and the timed rounds.
Does not know: what is compared with what (exact.py, capture_engine.py, cut.py), who started it (engines.py).

A line of JSON on stdin is one round, a line of JSON on stdout its answer; the end of stdin ends the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import pairwise
from typing import Any

Round = Callable[..., Awaitable[dict[str, Any]]]


def serve(model: str, arguments: Mapping[str, Any], *, plug_in: bool) -> None:
    """Until stdin ends."""
    from prefix_recovery import engine as engines

    if not plug_in:
        engines.engine_arguments = dict  # type: ignore[attr-defined]
    answers = sys.stdout
    sys.stdout = sys.stderr  # what an engine says must not be taken for an answer

    async def run() -> None:
        started = engines.Engine(model, arguments)
        loop = asyncio.get_running_loop()
        try:
            print(json.dumps({"ready": True}), file=answers, flush=True)
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                told = json.loads(line)
                answer = await _ROUNDS[told.pop("do")](started.llm, **told)
                print(json.dumps(answer), file=answers, flush=True)
        finally:
            started.close()

    asyncio.run(run())


async def _decode(
    engine: Any,
    *,
    calls: int,
    tokens: int,
    sampled: bool = False,
    drawn: bool = False,
    store: str | None = None,
    parts: bool | None = None,
) -> dict[str, Any]:
    """So many calls at a time, all of the same length: wall seconds, processor seconds of this process (the front end,
    all threads; the engine has one of its own), and a sum by which answers can be compared.

    With `store` they are captured, flushed as a session does by default and snapshotted there. `parts`: whether the
    plug-in's parts run meanwhile, in an engine with a switch for them (switch.py), which also tells what its core did.
    """
    from vllm_hooks import surface

    async def one(generate: Any, number: int) -> int:
        params = _params(tokens, sampled=sampled)
        if drawn:
            surface.drawing_params(params, number)
        elif sampled:
            params.seed = number
        return sum(await _generated(generate, number, params))

    worked, running = 0.0, 0
    if parts is not None:
        running = sum(await engine.collective_rpc("switch_parts", args=(parts,)))
        worked -= await _processor_seconds(engine)
    async with _captured(engine, store) as (llm, counters):
        busy, began = time.process_time(), time.perf_counter()
        sums = await asyncio.gather(*(one(llm.generate, number) for number in range(calls)))
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
    if parts is not None:
        counters.update(core=worked + await _processor_seconds(engine), logits_processors=running)
    return {"seconds": seconds, "processor": busy, "sum": sum(sums), **counters}


async def _processor_seconds(engine: Any) -> float:
    return sum(await engine.collective_rpc("processor_seconds"))


@contextlib.asynccontextmanager
async def _captured(engine: Any, store: str | None) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """The engine, or what captures it, and then what was counted meanwhile."""
    counted: dict[str, Any] = {}
    if store is None:
        yield engine, counted
        return
    from recovery.config import CheckpointingConfig
    from vllm_hooks import RecoverableEngine, open_session

    session = await open_session(engine, CheckpointingConfig(enabled=True, store=store))
    try:
        yield RecoverableEngine(engine, session), counted
        counted.update(
            captured=session.counters.tokens_captured,
            flushes=session.stager.counters.flushes,
            skipped=session.stager.counters.skipped,
            pulls=session.pulls,
        )
    finally:
        await session.stop()


async def _pause(engine: Any, *, calls: int, rounds: int) -> dict[str, Any]:
    """Pause and resume while calls decode: how long that takes, and how long no call gets a token."""
    from vllm.sampling_params import RequestOutputKind

    arrivals: list[float] = []
    running = True

    async def one(number: int) -> int:
        n = 0
        while running:
            params = _params(400)
            params.output_kind = RequestOutputKind.DELTA
            async for output in engine.generate(_prompt(number), params, _name(number)):
                arrivals.append(time.perf_counter())
                n += len(output.outputs[0].token_ids)
                if not running:
                    break
        return n

    tasks = [asyncio.create_task(one(number)) for number in range(calls)]
    while len(arrivals) < 3 * calls:
        await asyncio.sleep(0.01)
    whole: list[float] = []
    without: list[float] = []
    for _ in range(rounds):
        await asyncio.sleep(0.05)
        began = time.perf_counter()
        await engine.pause_generation(mode="keep", clear_cache=False)
        await engine.resume_generation()
        whole.append(time.perf_counter() - began)
        n = len(arrivals)
        while len(arrivals) == n:
            await asyncio.sleep(0)
        around = [at for at in arrivals[-calls * 50 :] if at >= began] if arrivals[-1] >= began else []
        before = max((at for at in arrivals if at < began), default=began)
        times = [before, *around]
        without.append(max(b - a for a, b in pairwise(times)))
    running = False
    return {"pause and resume": whole, "no token for": without, "tokens": sum(await asyncio.gather(*tasks))}


def _params(tokens: int, *, sampled: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=float(sampled),
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def _generated(generate: Any, number: int, params: Any) -> list[int]:
    from vllm_hooks.capture import drain

    output = await drain(generate(_prompt(number), params, _name(number)))
    return list(output.outputs[0].token_ids)


def _prompt(number: int) -> Any:
    from vllm_hooks import surface

    return surface.token_prompt([3 + (7 * number + at) % 500 for at in range(32)])


def _name(number: int) -> str:
    return f"{time.monotonic_ns()}-{number}"


_ROUNDS: dict[str, Round] = {"decode": _decode, "pause": _pause}


if __name__ == "__main__":
    said = json.loads(sys.argv[1])
    serve(said["model"], said["arguments"], plug_in=said["plug_in"])
