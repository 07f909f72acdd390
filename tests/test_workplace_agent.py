"""The workplace agent killed at every step of its trajectory, each in a process of its own with a real SIGKILL.

Owns: the acceptance line that context, mailbox and log of actions then equal those of a life that was never killed, in
both modes, and how much of a call is generated again.
Does not know: the engine. tests/test_agents_engine.py does some of this on the real one.

AGENT_TURNS sets how many turns the trajectory has (2; what there is to see at a third is the same).
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_lives import TASK, TOKENS, TURNS, Job, Lives, ModeName
from tests.fake_engine import next_token

MODES: list[ModeName] = ["turn", "prefix_recovery"]


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    made = Lives()
    yield made
    made.close()


def said(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / "outcome.json").read_text())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_g8_b6_killed_at_every_step_a_tool_acts_once(quick_path: Path, lives: Lives, mode: ModeName) -> None:
    """G8: neither twice nor never; final state and log of actions are those of the uninterrupted job.

    B6: and so are the trajectory's tokens and their loss mask, wherever the kill came: in an answer, in a tool's
    transaction, between the two.
    """
    whole = Job(quick_path / "whole", mode)
    whole.folder.mkdir()
    assert lives.live(whole) == 0
    reference = said(whole)
    steps = reference["steps"]
    check_steps(mode, steps, json.loads(reference["outcome"]))
    check_tokens(json.loads(reference["outcome"]))
    for number, step in enumerate(steps):
        job = Job(quick_path / str(number), mode)
        job.folder.mkdir()
        assert lives.live(job, step) == -signal.SIGKILL, f"{step} was not reached"
        assert lives.live(job) == 0, step
        found = said(job)
        assert found["outcome"] == reference["outcome"], step
        check_generated(mode, step, found["generated"])


def check_steps(mode: ModeName, steps: list[str], outcome: dict[str, Any]) -> None:
    """Nothing that a life does is left out of the enumeration: counted from what it left behind, not from the steps."""
    assert len(set(steps)) == len(steps)
    found = Counter(step.rpartition("#")[0] for step in steps)
    expected = Counter(f"token {turn}.{n + 1}" for turn in range(TURNS) for n in range(TOKENS))
    expected.update(f"{what} {turn}" for turn in range(TURNS) for what in ("answered", "turn"))
    keys = [key for _, key, *_ in outcome["log"]]
    assert len(set(keys)) == len(keys) >= 2 * TURNS  # each turn has more than one action: between them it may die too
    expected.update(f"{what} {key}" for key in keys for what in ("begin", "done", "committed"))
    snapshots = TURNS + 1  # after each turn, and the last one
    for what in ("prepare agent", "prepare mailbox", "commit agent", "commit mailbox", "before log", "published"):
        expected[what] = snapshots
    expected["before state"] = 2 * TURNS  # of the agent and of the mailbox, where they changed
    expected["before seg"] = TURNS if mode == "turn" else TURNS * (TOKENS + 1)  # an end is a flush of its own
    assert found == expected


def check_tokens(outcome: dict[str, Any]) -> None:
    """B6: what a trainer gets is the context up to the last answer; the mask is 1 for answers and 0 for tools."""
    tokens, n_prompt = outcome["tokens"], len(TASK)
    whole = [*tokens["prompt_token_ids"], *tokens["token_ids"]]
    assert tokens["prompt_token_ids"] == list(TASK)
    assert whole == outcome["context"][: len(whole)]
    assert len(tokens["loss_mask"]) == len(tokens["logprobs"]) == len(whole) - n_prompt
    spans = [(start, end) for start, end, _, _ in tokens["version_spans"]]
    assert [end - start for start, end in spans] == [TOKENS] * TURNS
    generated = {at for start, end in spans for at in range(start, end)}
    assert tokens["loss_mask"] == [at in generated for at in range(len(tokens["loss_mask"]))]
    for start, end in spans:
        before = whole[: n_prompt + start]
        for at in range(start, end):
            assert whole[n_prompt + at] == next_token(before, whole[n_prompt + start : n_prompt + at])
    between = [tokens["logprobs"][at] for at in range(len(whole) - n_prompt) if at not in generated]
    assert between and not any(between)


def check_generated(mode: ModeName, step: str, generated: int) -> None:
    """What a kill at a token costs: the flush in mode prefix_recovery, the call in mode turn."""
    if not step.startswith("token"):
        return
    turn, tokens = map(int, step.partition("#")[0].removeprefix("token ").split("."))
    from_there = (TURNS - turn) * TOKENS
    if mode == "turn":
        assert generated == from_there, step
    else:
        assert from_there - tokens <= generated <= from_there - tokens + 2, step
