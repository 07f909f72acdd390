"""The workplace agent killed at every step of its trajectory, each in a process of its own with a real SIGKILL.

Owns: the acceptance line that context, mailbox and log of actions then equal those of a life that was never killed, in
both modes, and how much of a call is generated again.
Does not know: the engine. tests/test_agents_engine.py does some of this on the real one.

AGENT_TURNS sets how many turns the trajectory has (2; what there is to see at a third is the same).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_lives import TOKENS, TURNS, Job, Lives, ModeName

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
def test_g8_killed_at_every_step_a_tool_acts_once(quick_path: Path, lives: Lives, mode: ModeName) -> None:
    """G8: neither twice nor never; final state and log of actions are those of the uninterrupted job."""
    whole = Job(quick_path / "whole", mode)
    whole.folder.mkdir()
    assert lives.live(whole) == 0
    reference = said(whole)
    steps = reference["steps"]
    assert len(steps) > 40 and len(set(steps)) == len(steps)
    for number, step in enumerate(steps):
        job = Job(quick_path / str(number), mode)
        job.folder.mkdir()
        assert lives.live(job, step) == -signal.SIGKILL, f"{step} was not reached"
        assert lives.live(job) == 0, step
        found = said(job)
        assert found["outcome"] == reference["outcome"], step
        check_generated(mode, step, found["generated"])


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
