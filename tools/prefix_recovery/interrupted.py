"""A job killed on purpose: start it as a process group of its own, SIGKILL it when it got so far, run it again.

Owns: the kills and the measurements around them, from outside the killed process (tally.py).
Does not know: which job it is. The demo, the tests and the soak use it.

Invariants:
1. Only process groups that were started here are killed, by their id.
2. A kill comes when the engine has delivered a number of tokens that a seeded generator drew, not at a chosen step.
3. What is reported was counted in the killed processes' own memory maps and read from the output file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefix_recovery.tally import read_tally

_POLL_S = 0.01


@dataclass(slots=True)
class RunFigures:
    """One process of a job. `counts`: see tally.py; None if it died before it counted anything. `passed_over`: what it
    said that it could not use of what was stored."""

    exit_code: int
    killed: bool
    wall_s: float
    counts: npt.NDArray[np.int64] | None
    passed_over: list[str] = field(default_factory=list)


@dataclass(slots=True)
class JobFigures:
    """All processes of one job, in order."""

    runs: list[RunFigures] = field(default_factory=list)

    @property
    def counted(self) -> list[npt.NDArray[np.int64]]:
        return [run.counts for run in self.runs if run.counts is not None]

    @property
    def wall_s(self) -> float:
        return sum(run.wall_s for run in self.runs)

    @property
    def tokens_generated(self) -> int:
        return int(sum(counts[1].sum() for counts in self.counted))

    def reused_after_kills(self) -> list[int]:
        """Tokens of unfinished calls that each run after the first did not have to generate again."""
        return [int((counts[0] * (counts[2] == 0)).sum()) for counts in self.counted[1:]]

    def twice_after_kills(self) -> list[npt.NDArray[np.int64]]:
        """Per kill and sample: tokens that were there when the kill came and had to be generated again."""
        pairs = zip(self.counted, self.counted[1:], strict=False)
        return [before[0] + before[1] - after[0] for before, after in pairs]


def command(config: Path, tally: Path, *extra: str) -> list[str]:
    """The command line of one run."""
    return [sys.executable, "-m", "prefix_recovery", "run", str(config), "--tally", str(tally), *extra]


def run_once(
    config: Path,
    folder: Path,
    name: str,
    *,
    kill_at_tokens: int | None = None,
    timeout_s: float = 600.0,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RunFigures:
    """One process of the job, SIGKILLed with its whole group once it has decoded that many tokens.

    Its stderr goes to `<folder>/<name>.log`. Raises TimeoutError, after killing it, if it takes too long.
    """
    tally = folder / f"{name}.tally"
    began = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command(config, tally, *extra),
            stderr=log,
            stdout=log,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        killed = False
        try:
            while process.poll() is None:
                if kill_at_tokens is not None and _decoded(tally) >= kill_at_tokens:
                    os.killpg(process.pid, signal.SIGKILL)
                    killed = True
                    break
                if time.monotonic() - began > timeout_s:
                    raise TimeoutError(f"{name} did not end within {timeout_s} s; its log: {folder / (name + '.log')}")
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None and not killed:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    counts = read_tally(tally) if tally.exists() and tally.stat().st_size else None
    said = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    passed_over = [line for line in said if line.startswith("passed over ")]
    return RunFigures(code, killed, time.monotonic() - began, counts, passed_over)


def _decoded(tally: Path) -> int:
    try:
        return int(read_tally(tally)[1].sum())
    except (OSError, ValueError):
        return 0


def read_rows(output: Path) -> list[dict[str, Any]]:
    """The complete rows of an output file."""
    with output.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


@dataclass(frozen=True, slots=True)
class Comparison:
    """An interrupted job's rows beside an uninterrupted one's."""

    lost: int
    duplicated: int
    mismatched: int
    largest_logprob_gap: float


def compare(rows: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> Comparison:
    """Row by row: tokens, text, reasons and prompt must be equal; logprobs are reported.

    A row that the reference does not have is a mismatch. Raises ValueError if there is nothing to compare with.
    """
    if not reference:
        raise ValueError("an uninterrupted run without rows")
    by_key = {(row["id"], row["sample_index"]): row for row in rows}
    mismatched, gap = 0, 0.0
    fields = ("token_ids", "text", "finish_reason", "stop_reason", "prompt_token_ids")
    for expected in reference:
        row = by_key.get((expected["id"], expected["sample_index"]))
        if row is None:
            continue
        if any(row[name] != expected[name] for name in fields) or len(row["logprobs"]) != len(row["token_ids"]):
            mismatched += 1
            continue
        pairs = zip(row["logprobs"], expected["logprobs"], strict=True)
        gap = max([gap, *(abs(float(a) - float(b)) for a, b in pairs)])
    wanted = {(row["id"], row["sample_index"]) for row in reference}
    mismatched += len(by_key.keys() - wanted)
    return Comparison(len(wanted - set(by_key)), len(rows) - len(by_key), mismatched, gap)
