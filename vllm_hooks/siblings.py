"""The samples of one request (`n` above 1) as calls of their own, and their outputs as those of one request again.

Owns: names and seeds of siblings, and how their streams become the stream that the caller asked for.
Does not know: capture, the engine.

Invariants:
1. A sibling's seed is the request's plus its index, as in vLLM; without one each is given its own at admission.
2. Outputs are vLLM's: one index each as they come, or all by index in the one output of a FINAL_ONLY request; the last
   one alone says `finished`.
3. A caller that leaves, and a sibling that fails, end them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any


def sibling_ids(request_id: str, n: int) -> list[str]:
    """The names under which the samples are kept; vLLM's own for its children."""
    return [f"{index}_{request_id}" for index in range(n)]


def sibling_params(params: Any, index: int) -> Any:
    """A clone that asks for sample `index` alone."""
    clone = params.clone()
    clone.skip_clone = False
    clone.n = 1
    if clone.seed is not None:
        clone.seed += index
    return clone


async def joined(
    streams: Sequence[AsyncGenerator[Any, None]], request_id: str, *, final_only: bool
) -> AsyncGenerator[Any, None]:
    """The outputs of all siblings. A slow caller holds them up, so that outputs gather in the engine's front end."""
    arriving: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))
    tasks = [asyncio.ensure_future(_pump(index, stream, arriving)) for index, stream in enumerate(streams)]
    last: dict[int, Any] = {}
    n_over = 0
    try:
        while n_over < len(streams):
            index, output = await arriving.get()
            if isinstance(output, BaseException):
                raise output
            n_over += bool(output.finished)
            completion = output.outputs[0]
            completion.index = index
            output.request_id = request_id
            output.finished = n_over == len(streams)
            if final_only:
                last[index] = completion
                output.outputs = [last[at] for at in sorted(last)]
            if output.finished or not final_only:
                yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, stream: AsyncGenerator[Any, None], arriving: asyncio.Queue[tuple[int, Any]]) -> None:
    over = False
    try:
        async with contextlib.aclosing(stream):
            async for output in stream:
                over = output.finished
                await arriving.put((index, output))
    except Exception as error:
        await arriving.put((index, error))
    else:
        if not over:
            what = f"the engine ended sample {index} without a last output"
            await arriving.put((index, asyncio.InvalidStateError(what)))
