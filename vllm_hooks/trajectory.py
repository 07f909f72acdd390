"""The model calls of one rollout of an agent, in their turns: each found again after a crash, or begun afresh.

Owns: the count of turns and model calls, and the name that each call has in the engine.
Does not know: prompts, tools, what an agent makes of an answer.

Invariants:
1. An answer is given out only when it is in the store: what an agent does because of it, a restart does again.
2. A call is found again at its place, after the same answers, with the same prompt; any other call begins at its prompt
   (recovery.trajectories).
"""

from __future__ import annotations

from typing import Any

from recovery.lineage import NO_PARENT
from recovery.model import FINISH_REASONS, CallId
from recovery.trajectories import Place
from vllm_hooks.capture import drain
from vllm_hooks.capturing import Capturing
from vllm_hooks.position import Position


class Trajectory:
    """Of the rollout with this name, which no other rollout of the store has.

    Args:
        engine: what RecoverableEngine(engine, session) gave.
        session: its session.
        rollout: the name.
    """

    def __init__(self, engine: Any, session: Capturing, rollout: str) -> None:
        self._engine = engine
        self._session = session
        self.rollout = rollout
        self.turn = 0
        self.model_call = 0
        self._parent = NO_PARENT

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
        if position.call_id is not None:
            await self._session.saved(position.call_id)
            self._parent = position.call_id
        self.model_call += 1
        return output

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON, for the state of the agent that it belongs to."""
        return {"turn": self.turn, "model_call": self.model_call, "parent": self._parent.hex()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was given. Calls that ended since are found in the store when they are made again."""
        self.turn, self.model_call = int(state["turn"]), int(state["model_call"])
        self._parent = CallId(bytes.fromhex(state["parent"]))
