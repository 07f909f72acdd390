"""The model calls of one rollout of an agent, in their turns: each found again after a crash, or begun afresh.

Owns: the count of turns and model calls, the name that each call has in the engine, and all their tokens.
Does not know: what prompts are made of, tools, what an agent makes of an answer.

Invariants:
1. An answer is given out only when it is in the store: what an agent does because of it, a restart does again.
2. A call is found again at its place, after the same answers, with the same prompt; any other call begins at its prompt
   (recovery.trajectories).
3. Tokens are those of the calls' records, whether a call ended here, came from the store, or ended before the state
   that the agent was restored from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from recovery.blobs import BEGIN_ANEW, SCHEMA, check_schema
from recovery.calls import LiveCall
from recovery.errors import Damaged, InputError
from recovery.lineage import NO_PARENT
from recovery.model import FINISH_REASONS, CallId
from recovery.trajectories import Place
from recovery.trajectory_tokens import TrajectoryTokens, spans_of, whole
from recovery.transcripts import Transcript
from vllm_hooks.capture import drain
from vllm_hooks.capturing import Capturing
from vllm_hooks.position import Position
from vllm_hooks.stored import StoredCalls


class Trajectory:
    """Of the rollout with this name, which no other rollout of the store has.

    Args:
        engine: what RecoverableEngine(engine, session) gave.
        session: its session.
        rollout: the name, a text.

    Raises InputError for what is no name.
    """

    def __init__(self, engine: Any, session: Capturing, rollout: str) -> None:
        if not isinstance(rollout, str) or not rollout or not _is_text(rollout):
            raise InputError(f"a rollout cannot be named {rollout!r:.80}", hint="give it a text of its own")
        self._engine = engine
        self._session = session
        self.rollout = rollout
        self.turn = 0
        self.model_call = 0
        self._parent = NO_PARENT
        self._restored_at = NO_PARENT
        """The last call before this object's own: the store has it and those that led to it."""
        self._own: list[TrajectoryTokens] = []
        """What this object's calls gave: one piece for as long as each goes on from the one before."""

    def next_turn(self) -> None:
        """The calls from here on are of the next turn."""
        self.turn, self.model_call = self.turn + 1, 0

    async def generate(self, prompt: Any, params: Any, **arguments: Any) -> Any:
        """The engine's last output for one more model call of this turn, once it is in the store.

        Raises what RecoverableEngine.generate raises, and what stopped the session. After an error or an
        abort the next call takes the same place.
        """
        position = Position(self.rollout, Place(self.turn, self.model_call), self._parent)
        name = f"{self.rollout}.{self.turn}.{self.model_call}"
        more = {"position": position} if self._session.capturing else {}
        output = await drain(self._engine.generate(prompt, params, name, **more, **arguments))
        if output.outputs[0].finish_reason not in FINISH_REASONS:
            return output  # an abort: the same call may be made again
        if position.call is not None:
            await self._session.saved(position.call.call_id)
            self._parent = position.call.call_id
        self.model_call += 1
        self._took(_of_call(position.call) if position.call is not None else _of_output(output))
        return output

    def _took(self, call: TrajectoryTokens) -> None:
        try:
            self._own[-1:] = [whole([*self._own[-1:], call])]
        except InputError:  # an agent may rewrite its context; only who asks for the whole is told
            self._own.append(call)

    async def tokens(self) -> TrajectoryTokens:
        """Everything so far, end to end, with the mask of what was generated: for a trainer.

        Raises InputError if a prompt did not go on from the tokens before it, if there was no call yet, and if the
        store does not have the calls before the restored state (any more).
        """
        earlier = self._earlier()
        read = await asyncio.to_thread(self._stored.read, earlier) if earlier else {}
        return whole([*(_of_transcript(read[call_id]) for call_id in earlier), *self._own])

    @property
    def _stored(self) -> StoredCalls:
        stored: StoredCalls | None = getattr(self._session, "stored", None)
        if stored is None:
            raise InputError(
                f"the calls of {self.rollout!r} before its restored state are not read in a worker",
                hint="make the calls again from the first one: their answers come from the store",
            )
        return stored

    def _earlier(self) -> list[CallId]:
        """The calls that led to the restored state, in order."""
        found: list[CallId] = []
        at = self._restored_at
        while at != NO_PARENT:
            entry = self._stored.entry(at)
            if entry is None:
                raise InputError(
                    f"the store has no call {at.hex()} of rollout {self.rollout!r}",
                    hint="ask for the tokens before session.rollout_ended()",
                )
            found.append(at)
            at = entry.identity.parent
        return found[::-1]

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON, for the state of the agent that it belongs to."""
        place = {"turn": self.turn, "model_call": self.model_call, "parent": self._parent.hex()}
        return {"schema": SCHEMA, "rollout": self.rollout, **place}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was given. Calls that ended since are found in the store when they are made again.

        Raises InputError for the state of another rollout, Damaged for what is no state, and FormatNotUnderstood for
        one of another version; nothing is changed then.
        """
        who = f"the trajectory of {self.rollout!r}"
        check_schema(state, who)
        if state.get("rollout") != self.rollout:
            raise InputError(
                f"{who} was given the state of {state.get('rollout')!r:.80}",
                hint="hand each agent the state that its own trajectory gave",
            )
        try:
            place, parent = Place(state["turn"], state["model_call"]), bytes.fromhex(state["parent"])
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise Damaged(f"the state of {who} is malformed: {error!r:.200}", hint=BEGIN_ANEW) from error
        if len(parent) != len(NO_PARENT):
            raise Damaged(f"the state of {who} is malformed: parent {state['parent']!r:.80}", hint=BEGIN_ANEW)
        self.turn, self.model_call = place.turn, place.model_call
        self._parent = self._restored_at = CallId(parent)
        self._own = []


def _of_call(call: LiveCall) -> TrajectoryTokens:
    return TrajectoryTokens(
        prompt_token_ids=call.request.prompt_token_ids,
        token_ids=np.array(call.transcript_ids, np.int32),
        loss_mask=np.ones(len(call.transcript_ids), np.bool_),
        logprobs=np.array(call.transcript_logprobs, np.float32),
        version_spans=spans_of(call.version_spans),
    )


def _of_transcript(transcript: Transcript) -> TrajectoryTokens:
    return TrajectoryTokens(
        prompt_token_ids=transcript.request.prompt_token_ids,
        token_ids=transcript.token_ids,
        loss_mask=transcript.mask,
        logprobs=transcript.logprobs,
        version_spans=spans_of(transcript.version_spans),
    )


def _of_output(output: Any) -> TrajectoryTokens:
    """Of a call that was not captured: nobody knows its versions."""
    ids = np.array(output.outputs[0].token_ids, np.int32)
    return TrajectoryTokens(
        prompt_token_ids=np.array(output.prompt_token_ids or (), np.int32),
        token_ids=ids,
        loss_mask=np.ones(len(ids), np.bool_),
        logprobs=np.full(len(ids), np.nan, np.float32),
        version_spans=(),
    )


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False
