"""A captured vLLM engine as an engine of FullyAsyncRollout, and the saved prefixes that it goes on with.

Owns: the way from a sample to a request and back, and which call every request id stands for.
Does not know: groups, batches, staleness (recovery.admission decides), how a sample's prompt is made (the caller says).

Invariants:
1. A sample's tokens, logprobs and version spans are those that were captured, also for the part of an earlier process.
2. A call that was forgotten is never resumed: its request id is not used again, and it leaves the ledger.
3. Tokens are stamped with the rollout's version from the step in which it is published (`serve`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from recovery import resume
from recovery.admission.prefixes import Prefix
from recovery.admission.samples import Sample
from recovery.calls import LiveCall
from recovery.model import CallId, PolicyVersion
from vllm_hooks.capture import RecoverableEngine, drain
from vllm_hooks.session import RecoverySession

Ask = Callable[[Sample], tuple[Any, Any]]
"""A sample to its prompt and SamplingParams."""


class RolloutEngine:
    """recovery.admission.generation.Engine and recovery.admission.prefixes.Prefixes, over one session.

    Args:
        engine: a vLLM AsyncLLM.
        session: the session that captures it; its `on_left` is this object's from now on.
        ask: what a sample asks the engine; a pure function, so that a restart asks the same.
        pinned: the version that the engine stays at; None: it follows every update.
    """

    def __init__(self, engine: Any, session: RecoverySession, ask: Ask, *, pinned: PolicyVersion | None = None) -> None:
        self.pinned = pinned
        if pinned is not None:
            session.version = pinned
        self._engine = RecoverableEngine(engine, session)
        self._session = session
        self._ask = ask
        self._left: dict[str, LiveCall] = {}
        waiting = session.admission.restored if session.capturing else ()
        self._prefixes = {call.entry.identity.rollout: call for call in waiting}
        self._call_ids: dict[str, CallId] = {
            entry.identity.rollout: entry.call_id for entry in session.stored.entries()
        }
        session.on_left = self._note
        session.keeps_ranks = False  # a sample has none

    def serve(self, version: PolicyVersion) -> None:
        """The rollout's version is this one from here on."""
        if self.pinned is None:
            self._session.version = version

    async def generate(self, sample: Sample) -> Sample:
        prompt, params = self._ask(sample)
        output = await drain(self._engine.generate(prompt, params, sample.request_id))
        completion = output.outputs[0]
        sample.text, sample.finish_reason = completion.text, completion.finish_reason or ""
        sample.token_ids = [int(token) for token in completion.token_ids]
        call = self._left.pop(sample.request_id, None)
        if call is not None:
            sample.logprobs = [float(logprob) for logprob in call.transcript_logprobs]
            sample.version_spans = [(start, end, v.lineage, v.number) for start, end, v in call.version_spans]
        return sample

    def _note(self, call: LiveCall) -> None:
        self._call_ids[call.request.rollout] = call.call_id
        if call.ended is not None:
            self._left[call.request.rollout] = call

    # ---- prefixes ----------------------------------------------------------------------------------------------

    @property
    def saved(self) -> bool:
        return self._session.capturing

    def of(self, request_id: str) -> Prefix | None:
        call = self._prefixes.get(request_id)
        if call is None or isinstance(call.plan, resume.Restart) or not call.n_tokens:
            return None
        versions = frozenset(version for _, _, version in call.transcript.version_spans)
        return Prefix(call.n_tokens, versions)

    def known(self) -> Collection[str]:
        return tuple(self._call_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._prefixes.pop(request_id, None)
            self._left.pop(request_id, None)
            call_id = self._call_ids.pop(request_id, None)
            if call_id is not None:
                self._session.forget(call_id)
