"""An agent of several turns with a tool that changes something: it answers, acts, reads what came of it, and goes on.

Owns: the context so far, and the order model call, actions, next turn.
Does not know: how its actions are kept from being done twice (mailbox.py), how its calls are found again
(vllm_hooks.trajectory).

Invariants:
1. What an answer asks for is done only when the answer is in the store: a restart reads the same answer, and asks for
   the same actions under the same keys.
2. Its state is that of the last finished turn, changed in one step; a restart begins the turn after it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from examples.agents.mailbox import Mailbox, Step
from recovery.blobs import BEGIN_ANEW, SCHEMA, object_of
from recovery.errors import Damaged
from vllm_hooks.capturing import Capturing
from vllm_hooks.trajectory import Trajectory

Action = tuple[str, dict[str, Any]]
Reading = Callable[[Sequence[int]], list[Action]]


def read_actions(answer: Sequence[int]) -> list[Action]:
    """What an answer asks for: a stand-in for a tool-call parser that any model's tokens make sense to."""
    actions: list[Action] = [("send", {"sender": f"agent-{answer[0] % 7}", "text": f"about {sum(answer)}"})]
    if answer[-1] % 3:
        actions.append(("append", {"number": 1 + answer[-1] % 2, "text": f" and {answer[-1]}"}))
    if answer[-1] % 2:
        actions.append(("move", {"number": 1, "folder": f"folder-{answer[-1] % 5}"}))
    return actions


class Workplace:
    """One rollout. A participant of the snapshots; the mailbox is another."""

    def __init__(
        self,
        engine: Any,
        session: Capturing,
        rollout: str,
        task: Sequence[int],
        mailbox: Mailbox,
        *,
        turns: int,
        params: Any,
        read: Reading = read_actions,
        step: Step = lambda what: None,
    ) -> None:
        self.name = f"agent.{rollout}"
        self.trajectory = Trajectory(engine, session, rollout)
        self._mailbox, self._turns, self._params, self._read, self._step = mailbox, turns, params, read, step
        self.context = list(task)
        self._state = self._state_now()

    async def run(self) -> list[int]:
        """To the end of the task, from wherever it is. Returns the whole context."""
        while self.trajectory.turn < self._turns:
            rollout, turn = self.trajectory.rollout, self.trajectory.turn
            output = await self.trajectory.generate(self.context, self._params)
            answer = [int(token) for token in output.outputs[0].token_ids]
            self._step(f"answered {turn}")
            context = [*self.context, *answer]
            for number, (name, arguments) in enumerate(self._read(answer)):
                key = f"{rollout}/{turn}/{number}"
                result = await asyncio.to_thread(self._mailbox.do, key, name, arguments)
                context += [3 + byte % 64 for byte in json.dumps(result).encode()]
            self.context = context
            self.trajectory.next_turn()
            self._state = self._state_now()
            self._step(f"turn {turn}")
        return self.context

    def _state_now(self) -> bytes:
        state = {"schema": SCHEMA, "context": self.context, "trajectory": self.trajectory.state()}
        return json.dumps(state).encode()

    def prepare(self) -> bytes:
        self._step("prepare agent")
        return self._state

    def commit(self, published: bool) -> None:
        """Nothing stands still for a snapshot: its state is replaced as a whole."""
        self._step("commit agent")

    def restore(self, state: bytes, rewound: bool) -> None:
        """Raises Damaged, and what Trajectory.restore raises; it is as it was then."""
        self._step("restore agent")
        found = object_of(state, self.name)
        context = found.get("context")
        if not isinstance(context, list) or not all(type(token) is int for token in context):
            raise Damaged(f"the state of {self.name} has no context of token ids", hint=BEGIN_ANEW)
        self.trajectory.restore(found.get("trajectory", {}))
        self.context, self._state = context, state
