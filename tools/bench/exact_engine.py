"""One engine in a process of its own, which answers for how long it took to generate what it was told to.

Owns: the engine's start with given arguments and environment, and the timed round.
Does not know: what is compared with what (exact.py).

A line of JSON on stdin is one round, a line of JSON on stdout its answer; the end of stdin ends the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import Any


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
                print(json.dumps(await _round(started.llm, **json.loads(line))), file=answers, flush=True)
        finally:
            started.close()

    asyncio.run(run())


async def _round(engine: Any, *, calls: int, tokens: int, sampled: bool, drawn: bool) -> dict[str, float]:
    """So many calls at a time, all of the same length: wall seconds, and a sum by which answers can be compared."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_hooks import surface
    from vllm_hooks.capture import drain

    async def one(number: int) -> int:
        params = SamplingParams(
            temperature=float(sampled),
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if drawn:
            surface.drawing_params(params, number)
        elif sampled:
            params.seed = number
        prompt = [3 + (7 * number + at) % 500 for at in range(32)]
        output = await drain(engine.generate(surface.token_prompt(prompt), params, f"{time.monotonic_ns()}-{number}"))
        return sum(output.outputs[0].token_ids)

    began = time.perf_counter()
    sums = await asyncio.gather(*(one(number) for number in range(calls)))
    return {"seconds": time.perf_counter() - began, "sum": sum(sums)}


if __name__ == "__main__":
    said = json.loads(sys.argv[1])
    serve(said["model"], said["arguments"], plug_in=said["plug_in"])
