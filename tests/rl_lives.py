"""Process-lives of `python -m examples.rl` that are killed, and what is left on the disk in the end.

Owns: starting one, killing it at a named moment or at a moment of the caller's, reading the last checkpoint.
Does not know: which moments are tried (test_rl_example.py, rl_soak.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.rl.moments import VARIABLE
from prefix_recovery.processes import descendants, end_leftovers
from tests.job_processes import wait_until

ROOT = Path(__file__).parents[1]


@dataclass(slots=True)
class Life:
    """How one life ended. `text`: what it said."""

    returncode: int
    text: str

    @property
    def killed(self) -> bool:
        return self.returncode == -signal.SIGKILL

    @property
    def figures(self) -> dict[str, Any]:
        return dict(json.loads(self.text.splitlines()[-1]))


def live(
    folder: Path,
    arguments: list[str],
    *,
    die_at: str | None = None,
    kill_when: Callable[[str], bool] | None = None,
    timeout_s: float = 400.0,
) -> Life:
    """One life, the leader of its process group. Killed with its group once `kill_when` holds of what it has said."""
    log = folder.with_name(f"{folder.name}.log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "examples.rl", "--dir", str(folder), *arguments],
            cwd=ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**os.environ, VARIABLE: die_at or "", "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"},
        )
    children = []

    def text() -> str:
        return log.read_text(encoding="utf-8", errors="replace")

    def due() -> bool:
        children[:] = {*children, *descendants(process.pid)}
        return process.poll() is not None or (kill_when is not None and kill_when(text()))

    try:
        wait_until(due, f"a life of {folder.name} came to its end", timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end_leftovers(children)
    return Life(process.returncode, text())


def trained(folder: Path) -> Counter[tuple[str, int, int]]:
    """(prompt, sample, tokens) of everything that is in the newest checkpoint's weights."""
    newest = max((folder / "checkpoints").glob("rollout-*"))
    anchor = json.loads((newest / "anchor.json").read_text(encoding="utf-8"))
    return Counter((one["id"], one["sample"], one["tokens"]) for one in anchor["trained"])
