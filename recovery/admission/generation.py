"""Running one group's generate function until all of its work has stopped.

Owns: the ways in which a generate function may be written, and the proof that it has ended.
Does not know: receipts, slots, what becomes of the result.

Invariants (numbers are those of docs/admission.md):
1. (A50) A cancellation is a request. The execution is over when the function, or the thread it runs in, has returned.
2. When one sample of a group fails, its siblings are cancelled and waited for before the failure is reported.
3. The first error is reported as it was raised, not wrapped in a group.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from recovery.admission.samples import Sample
from recovery.errors import ConfigError
from recovery.model import PolicyVersion


class Engine(Protocol):
    """What generates: one sample in, the same or another object with its tokens out."""

    async def generate(self, sample: Sample) -> Sample: ...


def pinned(engine: Engine) -> PolicyVersion | None:
    """The version that an engine stays at: its attribute `pinned`. None (or no attribute): it follows every update."""
    found: PolicyVersion | None = getattr(engine, "pinned", None)
    return found


Generate = Callable[[list[Sample], Engine], Any]
"""A group's samples and an engine to the finished samples, in order: async, or sync (it runs in a thread then)."""


def check_engines(engines: Sequence[object], generate: Generate) -> None:
    """Raises ConfigError for an engine that the default could not ask for a sample."""
    for number, engine in enumerate(engines if generate is each_sample else ()):
        found = getattr(engine, "generate", None)
        if not callable(found) or inspect.isasyncgenfunction(found):
            what = "is a stream of outputs" if callable(found) else "is missing"
            raise ConfigError(
                f"engines[{number}], a {type(engine).__name__}, makes no samples: generate(sample) {what}",
                hint="wrap a vLLM engine in vllm_hooks.rollout_engine.RolloutEngine, or give generate= a function",
            )


async def each_sample(samples: list[Sample], engine: Engine) -> Sequence[Sample]:
    """The default: every sample for itself, at the same time."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(sample)) for sample in samples]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def run(generate: Generate, samples: list[Sample], engine: Engine) -> Any:
    """What `generate` returns. Ends only when its work has."""
    if inspect.iscoroutinefunction(generate) or inspect.iscoroutinefunction(type(generate).__call__):
        return await generate(samples, engine)
    thread = asyncio.ensure_future(asyncio.to_thread(generate, samples, engine))
    cancelled: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError as error:  # the thread goes on, and with it the execution
            cancelled = error
    if cancelled is not None:
        thread.exception()  # its result is not wanted any more
        raise cancelled
    result = thread.result()
    return await result if inspect.isawaitable(result) else result
