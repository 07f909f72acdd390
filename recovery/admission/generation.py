"""Running one group's generate function until all of its work has stopped.

Owns: the ways in which a generate function may be written, its threads, and the proof that it has ended.
Does not know: receipts, slots, what becomes of the result.

Invariants (numbers are those of docs/admission.md):
1. (A50) A cancellation is a request. The execution is over when the function, or the thread it runs in, has returned.
2. When one sample of a group fails, its siblings are cancelled and waited for before the failure is reported.
3. The first error is reported as it was raised, not wrapped in a group; but StopIteration, which no task can raise, is
   the cause of a RuntimeError.
4. A group that executes never waits for a thread, and takes none from anybody else: each of the E has its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def check_keep(keep: Callable[..., object]) -> None:
    """Raises ConfigError for a function whose every answer would be taken for a yes."""
    if inspect.iscoroutinefunction(keep) or inspect.iscoroutinefunction(type(keep).__call__):
        raise ConfigError("keep= is a coroutine function, and nobody awaits it", hint="write it as a plain `def`")


async def each_sample(samples: list[Sample], engine: Engine) -> Sequence[Sample]:
    """The default: every sample for itself, at the same time."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(sample)) for sample in samples]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Generation:
    """A rollout's generate function, and a thread for each of the groups that may execute at a time."""

    def __init__(self, generate: Generate, executing: int) -> None:
        self._generate = generate
        self._in_place = inspect.iscoroutinefunction(generate) or inspect.iscoroutinefunction(type(generate).__call__)
        self._threads = ThreadPoolExecutor(executing, thread_name_prefix="generate")

    async def run(self, samples: list[Sample], engine: Engine) -> Any:
        """What the function returns. Ends only when its work has."""
        if self._in_place:
            return await self._generate(samples, engine)
        call = partial(contextvars.copy_context().run, self._outcome, samples, engine)
        thread = asyncio.get_running_loop().run_in_executor(self._threads, call)
        cancelled: asyncio.CancelledError | None = None
        while not thread.done():
            try:
                await asyncio.wait({thread})
            except asyncio.CancelledError as error:  # the thread goes on, and with it the execution
                cancelled = error
        result, raised = thread.result()
        if cancelled is not None:  # its result is not wanted any more
            if inspect.iscoroutine(result):
                result.close()
            raise cancelled
        if isinstance(raised, StopIteration):
            raise RuntimeError("the generate function raised StopIteration") from raised
        if raised is not None:
            raise raised
        return await result if inspect.isawaitable(result) else result

    def _outcome(self, samples: list[Sample], engine: Engine) -> tuple[Any, BaseException | None]:
        """What it returned, or what it raised: as a value, for there are exceptions that a future does not take."""
        try:
            return self._generate(samples, engine), None
        except BaseException as error:
            return None, error

    def close(self) -> None:
        """Nothing is executing any more."""
        self._threads.shutdown(wait=False)
