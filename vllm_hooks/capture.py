"""A proxy of the engine whose `generate` captures every token before it hands it on.

The reference is the wrapper: the engine is asked for deltas, each captured as it comes. Where the self-test saw it
agree, a FINAL_ONLY request is left alone instead and read at each cut (pull.py).

Owns: the order capture -> fence -> terminal for one call, and which requests are passed through uncaptured.
Does not know: stores, snapshots, threads. It talks to one Capturing on the engine's event loop.

Invariants:
1. A token is in the call's buffer before the caller sees it.
2. A call is terminal only with stop, length or repetition; an abort, an error or a silent end is a cut, and the call
   can be carried on (spec: completeness rule).
3. An abandoned generator still aborts the engine's request.
4. With mode `off` this class is not in the path at all: `RecoverableEngine(engine, session)` is `engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from recovery import resume
from recovery.calls import LiveCall
from recovery.errors import CaptureDisagrees, InputError
from recovery.model import FINISH_REASONS, Request
from recovery.resume_table import DRAWS, GENERATOR_DRAWS, POSITION_DRAWS, is_greedy
from vllm_hooks import siblings, surface, top_logprobs
from vllm_hooks.adapters import Adapters
from vllm_hooks.capturing import Capturing
from vllm_hooks.marks import SCHEME
from vllm_hooks.outputs import Assembly
from vllm_hooks.position import Position
from vllm_hooks.pull import Pulled, PullReader, can_pull

_REASONING = "reasoning_parser_kwargs"
ABOUT_GRAMMAR = ("reasoning_ended", _REASONING)
"""Arguments that the engine looks at for structured outputs alone; the server sends them with every chat."""

REPLAYED_AT_ONCE = 16
"""Saved tokens that a caller is given before the loop may do something else."""


class RecoverableEngine:
    """An engine with the same `generate`, whose calls survive the process.

    Args:
        engine: a vLLM AsyncLLM (or anything with its `generate`).
        session: what captured tokens go to. If its mode is `off`, the engine itself is returned.
        replays: a stream of deltas that is carried on begins with the saved tokens one by one, as they came, and not
            with one delta of all of them: for parsers that expect little of a delta.

    `request_id` names the call across processes: the same id with the same prompt and sampling after a crash is the
    same call, and is carried on from its saved tokens. Everything else is delegated to the engine.
    """

    def __new__(cls, engine: Any, session: Capturing, *, replays: bool = False) -> Any:
        return super().__new__(cls) if session.capturing else engine

    def __init__(self, engine: Any, session: Capturing, *, replays: bool = False) -> None:
        self._engine = engine
        self._replays = replays
        self._session = session
        self._tokenizer = surface.tokenizer_of(engine)
        self._stop = session.unresumable.rules(surface.stop_rules(engine))
        self._reasons = surface.reasons(engine)
        self._reader = PullReader(engine)
        self._adapters = Adapters()
        self._siblings: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, position: Position | None = None, **arguments: Any
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.generate. Raises what the engine raises, and InputError for a request that is refused.

        `position`: where in a trajectory it stands (vllm_hooks.trajectory); `request_id` is then the engine's name of
        it alone.
        """
        session = self._session
        ids, engine_input, uncaptured = await surface.prompt_token_ids(
            self._engine, prompt, arguments.get("tokenization_kwargs")
        )
        if ids is None or uncaptured:
            session.unresumable.pass_through(request_id, uncaptured)
            async for output in self._engine.generate(prompt, sampling_params, request_id, **arguments):
                yield output
            return
        digest = session.source_digests.get(request_id, "")
        if sampling_params.n == 1:
            stream = self._one(ids, engine_input, sampling_params, request_id, arguments, digest, position)
        elif position is not None:
            raise InputError(
                f"model call {request_id!r} asks for {sampling_params.n} samples",
                hint="make as many calls of a trajectory as it needs samples, each with n: 1",
            )
        else:
            stream = self._samples(ids, engine_input, sampling_params, request_id, arguments, digest)
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def abort(self, request_id: str | Iterable[str], *rest: Any, **named: Any) -> None:
        """As AsyncLLM.abort, also of a request with `n` above 1 by its own id."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._engine.abort([name for one in ids for name in self._siblings.get(one, (one,))], *rest, **named)

    async def _samples(
        self, ids: Any, engine_input: Any, params: Any, request_id: str, arguments: dict[str, Any], digest: str
    ) -> AsyncGenerator[Any, None]:
        names = self._siblings[request_id] = siblings.sibling_ids(request_id, params.n)
        streams = [
            self._one(ids, copy.copy(engine_input), siblings.sibling_params(params, index), name, arguments, digest)
            for index, name in enumerate(names)
        ]
        try:
            stream = siblings.joined(streams, request_id, final_only=surface.is_final_only(params))
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield output
        finally:
            self._siblings.pop(request_id, None)

    async def _one(
        self,
        ids: Any,
        engine_input: Any,
        params: Any,
        request_id: str,
        arguments: dict[str, Any],
        digest: str,
        position: Position | None = None,
    ) -> AsyncGenerator[Any, None]:
        session = self._session
        adapter = await self._adapters.extra_of(arguments.get("lora_request"))
        request = self._request(request_id, ids, params, arguments, adapter, digest)
        params = surface.native(params)
        if position is not None:
            request = position.request(request)
        call = await session.admit(request, self._stop, placed=position is not None)
        if position is not None:
            position.call = call
        try:
            stream = self._captured(call, engine_input, params, request_id, arguments)
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield output
        finally:
            session.left(call, placed=position is not None)

    def _request(
        self,
        request_id: str,
        ids: Any,
        params: Any,
        arguments: dict[str, Any],
        extra: dict[str, Any],
        digest: str,
    ) -> Request:
        sampling = surface.sampling_fields(params)
        if POSITION_DRAWS in self._stop.abilities and not is_greedy(sampling):
            given = params.seed
            extra[DRAWS] = {"scheme": SCHEME, "seed": self._session.new_seed() if given is None else given}
        return Request(
            rollout=request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            extra=extra,
            restart_only=resume.hindrance(sampling, [*extra, *self._set_of(params, arguments)], self._stop),
            source_digest=digest,
        )

    def _set_of(self, params: Any, arguments: dict[str, Any]) -> list[str]:
        """What asks for something beside the sampling fields."""
        extra = params.extra_args or {}
        given = [
            name for name, value in arguments.items() if value not in (None, 0, False, {}) and name not in ABOUT_GRAMMAR
        ]
        if params.structured_outputs is not None:
            given += [name for name in ABOUT_GRAMMAR if arguments.get(name)]
            given += [_REASONING] * self._reasons
        return [*given, *(name for name in extra if name.endswith("_transfer_params"))]

    async def _captured(
        self, call: LiveCall, engine_input: Any, params: Any, request_id: str, arguments: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        session = self._session
        prompt_ids = [int(token) for token in call.request.prompt_token_ids]
        engine_input = surface.salted(engine_input, session.version)
        assembly = Assembly(
            params,
            request_id,
            prompt_ids,
            surface.prompt_text(engine_input),
            self._tokenizer,
            call.transcript_ids,
            call.transcript_logprobs,
            call.columns,
        )
        if len(call.transcript_ids) and params.prompt_logprobs is not None:
            assembly.prompt_logprobs = await self._of_the_prompt(engine_input, params, request_id, arguments)
        replays = self._replays and surface.is_delta(params)
        plan = self._plan(call)
        ended = (call.ended.finish_reason, call.ended.stop_reason) if call.ended else self._ended_by(plan, assembly)
        if ended is not None and call.ended is None:
            await session.terminal(call, *ended)
        n_replayed = max(0, len(call.transcript_ids) - (ended is not None)) if replays else 0
        for n, output in enumerate(assembly.replay(n_replayed), start=1):
            yield output
            if n % REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if ended is not None:
            yield assembly.finished(*ended)
            return
        if isinstance(plan, resume.Resume):
            engine_input = surface.token_prompt([*prompt_ids, *call.transcript_ids], like=engine_input)
        n_top = self._n_kept(params)
        pulled = self._session.pull(call, self._reader, request_id, n_top) if self._may_pull(params, plan) else None
        engine_params = surface.pulled_params(params) if pulled else surface.capturing_params(params)
        if isinstance(plan, resume.Resume):
            surface.resuming_params(engine_params, plan)
            if params.seed is not None and GENERATOR_DRAWS in self._stop.abilities:
                surface.winding_params(engine_params, plan.n_prefix)
        if DRAWS in call.request.extra and POSITION_DRAWS in self._stop.abilities:
            surface.drawing_params(engine_params, int(call.request.extra[DRAWS]["seed"]))
        try:
            stream = self._engine.generate(engine_input, engine_params, request_id, **arguments)
            async with contextlib.aclosing(stream):
                try:
                    async for output in stream:
                        ended_here = assembly.settle(output)
                        shaped = await self._take(call, pulled, n_top, output, assembly)
                        if shaped is not None:
                            yield shaped
                        if ended_here:
                            break  # the engine does not know; leaving its stream aborts the request
                finally:
                    # An abort is a cut. When the caller leaves, what is there is read before the engine is told; a
                    # cancelled wait has told it already, and costs what came since the last poll.
                    session.pull_last(call)
        except Exception as error:
            if surface.is_engine_dead(error):
                session.engine_died(error)
            if isinstance(error, CaptureDisagrees):
                session.fail(error)
            raise

    async def _of_the_prompt(
        self, engine_input: Any, params: Any, request_id: str, arguments: dict[str, Any]
    ) -> Any | None:
        """The prompt's logprobs of a call that is not begun at its prompt any more (case B10)."""
        only = surface.prompt_only_params(params)
        output = await drain(self._engine.generate(engine_input, only, f"{request_id}-prompt", **arguments))
        return output.prompt_logprobs

    def _may_pull(self, params: Any, plan: resume.ResumePlan) -> bool:
        if isinstance(plan, resume.Resume) and params.repetition_detection is not None:
            return False  # what ends it may lie before the cut, so that each token has to be looked at
        return self._session.pulls and self._reader.readable and can_pull(params)

    @staticmethod
    def _ended_by(plan: resume.ResumePlan, assembly: Assembly) -> tuple[str, int | str | None] | None:
        """Finish and stop reason, if the saved tokens are the whole answer."""
        if isinstance(plan, resume.Finish):
            return plan.finish_reason, plan.stop_reason
        if not isinstance(plan, resume.Resume):
            return None
        ended = assembly.begin()
        return ("length", None) if ended is None and plan.max_tokens == 0 else ended

    def _plan(self, call: LiveCall) -> resume.ResumePlan:
        n = len(call.transcript_ids)
        return resume.plan(call.request, n, call.transcript_ids[-1] if n else None, self._stop)

    def _n_kept(self, params: Any) -> int | None:
        n_top = top_logprobs.n_kept(params)
        return None if n_top == 0 and not self._session.keeps_ranks else n_top

    async def _take(
        self, call: LiveCall, pulled: Pulled | None, n_top: int | None, output: Any, assembly: Assembly
    ) -> Any | None:
        """One engine output: into the buffer first, then to the caller. No await before the buffer has it."""
        completion = output.outputs[0]
        if pulled is not None:
            self._session.captured(call, *pulled.rest(completion.token_ids, completion.logprobs))
        else:
            ids = completion.token_ids
            self._session.captured(call, ids, *top_logprobs.captured_of(completion.logprobs, ids, 0, n_top))
        shaped = assembly.add(output)
        if completion.finish_reason in FINISH_REASONS:
            await self._session.terminal(call, completion.finish_reason, completion.stop_reason)
        return shaped


async def drain(stream: AsyncGenerator[Any, None]) -> Any:
    """The last output of a `generate` stream."""
    last = None
    async for output in stream:
        last = output
    if last is None:
        raise asyncio.InvalidStateError("the engine ended a stream without an output")
    return last
