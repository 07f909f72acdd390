"""vllm_hooks.routed_experts on a fake engine with routing that is a function of the context, to chunks and back.

Owns: that a call that was cut anywhere has the rows of one that was not.
Does not know: vLLM. No engine of vLLM 0.32 that reports experts runs on a CPU: docs/decisions/0026.
"""

from __future__ import annotations

import numpy as np
import pytest

from recovery import codec
from recovery.buffer import Run
from recovery.calls import CallTable
from recovery.model import Array, Chunk, PolicyVersion, Request
from recovery.transcripts import Transcript, assemble
from tests.fake_engine import next_token
from vllm_hooks.routed_experts import columns_of, rows_of, whole

LAYERS, EXPERTS = 3, 2
PROMPT = (5, 6, 8)


def routing(context: list[int]) -> list[list[int]]:
    """Of the last token of a context."""
    return [[(sum(context) + 7 * layer + k) % 64 for k in range(EXPERTS)] for layer in range(LAYERS)]


class FakeEngine:
    """Reports a row for each input position, as the engine's front end collects them."""

    def __init__(self, prompt: list[int], first_position: int = 0) -> None:
        self.context, self.first_position = list(prompt), first_position
        self.rows = [routing(self.context[: p + 1]) for p in range(first_position, len(prompt) - 1)]

    def step(self) -> int:
        self.rows.append(routing(self.context))
        token = next_token(list(PROMPT), self.context[len(PROMPT) :])
        self.context.append(token)
        return token

    def reported(self) -> Array:
        return np.array(self.rows, np.int16).reshape(-1, LAYERS, EXPERTS)


def request() -> Request:
    return Request(rollout="r", prompt_token_ids=np.array(PROMPT, np.int32), sampling={"temperature": 0.0})


def captured(n_tokens: int, flush_every: int, first_position: int) -> Transcript:
    """A call of so many tokens, as a store has it."""
    table, engine = CallTable(), FakeEngine(list(PROMPT), first_position)
    call, chunks = table.open(request(), codec.call_of(request()), 0), []
    for at in range(n_tokens):
        token = engine.step()
        column = columns_of(engine.reported(), first_position, len(PROMPT), at, at + 1)
        call.append([token], [-1.0], PolicyVersion(), column)
        if at % flush_every == 0:
            chunks += [one for one in table.freeze() if isinstance(one, Run)]
    chunks += [one for one in table.freeze() if isinstance(one, Run)]
    return assemble(request(), [as_chunk(run) for run in chunks])


def as_chunk(run: Run) -> Chunk:
    n = run.stop - run.start
    return Chunk(
        call_id=run.call_id,
        attempt=run.attempt,
        start=run.start,
        token_ids=np.array(run.token_ids, np.int32),
        logprobs=np.array(run.logprobs, np.float32),
        mask=np.ones(n, np.bool_),
        version=run.version,
        columns=run.arrays(),
    )


@pytest.mark.parametrize("first_position", [0, 2])
@pytest.mark.parametrize("flush_every", [1, 3])
@pytest.mark.parametrize("cut", range(1, 9))
def test_a_call_that_was_cut_has_the_rows_of_one_that_was_not(cut: int, flush_every: int, first_position: int) -> None:
    uncut = FakeEngine(list(PROMPT), first_position)
    for _ in range(9):
        uncut.step()
    saved = captured(cut, flush_every, first_position)
    stored = rows_of(saved.columns, cut)
    assert stored is not None and stored.dtype == np.int16
    prompt = FakeEngine(list(PROMPT), first_position).reported()
    resumed = FakeEngine([*PROMPT, *saved.token_ids.tolist()], len(PROMPT) + cut - 1)
    for _ in range(9 - cut):
        resumed.step()
    assert whole(prompt, stored, resumed.reported()).tolist() == uncut.reported().tolist()


def test_a_token_without_a_row_leaves_none() -> None:
    saved = captured(4, 2, 0)
    assert rows_of(saved.columns, 5) is None and rows_of({}, 4) is None
    assert rows_of({"rank": saved.columns["routed_experts.3x2"]}, 4) is None


def test_rows_that_were_not_reported_yet_are_not_made_up() -> None:
    engine = FakeEngine(list(PROMPT))
    engine.step()
    with pytest.raises(ValueError, match="the engine has reported 3"):
        columns_of(engine.reported(), 0, len(PROMPT), 0, 2)
