"""An agent of one turn: a question, an answer, a reward. It keeps no state, so it joins nothing.

Owns: nothing that a crash could take. The answer comes from the store if it had ended, and goes on if it had begun.
Does not know: tools, turns, how a call is found again (vllm_hooks.trajectory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_hooks.capturing import Capturing
from vllm_hooks.trajectory import Trajectory


async def ask(
    engine: Any,
    session: Capturing,
    rollout: str,
    question: Sequence[int],
    params: Any,
    reward: Callable[[Sequence[int]], float],
) -> tuple[list[int], float]:
    """The answer's token ids and their reward. Run it again with the same arguments after a crash."""
    output = await Trajectory(engine, session, rollout).generate(question, params)
    answer = list(output.outputs[0].token_ids)
    return answer, reward(answer)
