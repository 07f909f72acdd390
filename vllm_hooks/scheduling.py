"""vLLM's scheduler, in which a resumed request's grammar stands where its saved tokens left it.

Owns: advancing the grammar of a request over its prefix, between the grammar's compilation and its first use.
Does not know: sessions, stores, what a grammar is. Runs in the engine's core; given to it as `scheduler_cls`.

Invariants:
1. A request without a mark, or without structured output, takes exactly the way of vLLM's own scheduler.
2. A prefix that the grammar does not take ends the request with the engine's own error: nothing is guessed.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_hooks.marks import mark_of


def advanced(grammar: Any, request_id: str, token_ids: list[int]) -> Future[Any]:
    """The grammar (or its compilation, a future) once it has taken `token_ids`."""
    ready: Future[Any] = Future()

    def take(compiled: Future[Any]) -> None:
        try:
            found = compiled.result()
            if not found.accept_tokens(request_id, token_ids):
                raise ValueError(f"request {request_id}: the grammar does not take the tokens that were saved")
        except Exception as error:
            ready.set_exception(error)
        else:
            ready.set_result(found)

    compiled: Future[Any] = grammar if isinstance(grammar, Future) else Future()
    if compiled is not grammar:
        compiled.set_result(grammar)
    compiled.add_done_callback(take)
    return ready


class PrefixScheduler(Scheduler):
    """vLLM's Scheduler for requests that may be marked with a prefix."""

    def add_request(self, request: Any) -> None:
        structured = request.structured_output_request
        if structured is not None and request.request_id not in self.requests:
            n = mark_of(request.sampling_params).get("prefix", 0)
            if n:
                saved = list(request.prompt_token_ids[-n:])
                structured.grammar = advanced(structured._grammar, request.request_id, saved)
        super().add_request(request)
