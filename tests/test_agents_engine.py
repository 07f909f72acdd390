"""The workplace agent on the real engine, killed with SIGKILL in mid-decode and around its tool, in both modes.

Owns: that context, mailbox and log of actions equal those of an uninterrupted life on the session's engine.
Does not know: every step of a life; those are tests/test_workplace_agent.py's, with another token source.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import agent_engine_life as life
from tests.conftest import OnLoop

PATIENCE_S = 300.0

KILLS = (
    ("prefix_recovery", "1", "12"),
    ("prefix_recovery", "done r/1/0"),
    ("turn", "1", "12"),
    ("turn", "committed r/1/0"),
)


def lived(model: Path, folder: Path, die: tuple[str, ...]) -> int:
    """One life as a process group of its own; what it leaves of the engine is ended."""
    command = [sys.executable, "-m", "tests.agent_engine_life", str(model), str(folder), *die]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (0, -signal.SIGKILL), said
    return process.returncode


def outcome(folder: Path, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / mode / "outcome.json").read_text())
    return found


@pytest.mark.timeout(1500)  # five starts of an engine, each of which may take PATIENCE_S
def test_g8_an_agent_on_the_engine_killed_in_mid_decode_and_around_its_tool(
    tmp_path: Path, quick_path: Path, tiny_model: Path, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """G8: no action twice, none lost; mode prefix_recovery goes on in mid-call, mode turn begins the call again."""
    on_loop(life.both(engine, tmp_path, lambda session, mode, call: None, lambda mode, what: None))
    for die in KILLS:
        assert lived(tiny_model, quick_path, die) == -signal.SIGKILL, die
    assert lived(tiny_model, quick_path, ()) == 0
    for mode in life.MODES:
        assert outcome(quick_path, mode) == outcome(tmp_path, mode)
    assert outcome(tmp_path, "turn") == outcome(tmp_path, "prefix_recovery")
    reused = {}
    for mode in life.MODES:
        lives = (quick_path / mode / "lives.jsonl").read_text().splitlines()
        reused[mode] = [json.loads(line)["reused"] for line in lives]
    assert reused["turn"] == [0, 0, 0]
    assert reused["prefix_recovery"][0] == 0 and 0 < reused["prefix_recovery"][1] <= 12 + 4
