"""`bench exact`: what the settings cost that make an engine bit-exact, and what the plug-in costs who does not use it.

Owns: which engines are compared, each in a process of its own, round by round.
Does not know: how a round is run (engine_process.py), how figures are shown (report.py).

Invariants:
1. A ratio is of two engines that did the same work one right after the other; the order is drawn anew each round.
2. What this machine cannot measure (batch invariance needs a GPU) is named and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench import engines
from bench.measuring import Spread, ratios
from bench.report import Report

SPLIT = "VLLM_CPU_ATTN_SPLIT_KV"


@dataclass(frozen=True, slots=True)
class Side:
    """One engine, and what it is asked."""

    plug_in: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    sampled: bool = False
    drawn: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`over` divided by `under`, in seconds for the same tokens."""

    name: str
    over: Side
    under: Side


_SPLIT_ON = {SPLIT: "1"}

COMPARISONS = {
    "plug-in": Comparison("plug-in, nothing uses it / no plug-in", Side(), Side(plug_in=False)),
    "draws": Comparison(
        "drawn by position / by the engine", Side(sampled=True, drawn=True), Side(plug_in=False, sampled=True)
    ),
    "split": Comparison("split KV off / on, float32", Side(), Side(environment=_SPLIT_ON)),
    "split-bfloat16": Comparison(
        "split KV off / on, bfloat16", Side(dtype="bfloat16"), Side(dtype="bfloat16", environment=_SPLIT_ON)
    ),
}
ON_A_GPU = {
    "invariance": Comparison(
        "batch invariance on / off",
        Side(environment={"VLLM_BATCH_INVARIANT": "1"}),
        Side(environment={"VLLM_BATCH_INVARIANT": "0"}),
    )
}
ABOUT = "cost of the settings that make an engine bit-exact, and of the plug-in"
PARTS = (*COMPARISONS, *ON_A_GPU)
ROUNDS = 15


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    """All comparisons, one after the other; each has two engines alive."""
    from prefix_recovery.engine import is_cpu_build

    here = COMPARISONS if is_cpu_build() else ON_A_GPU
    todo = [comparison for key, comparison in here.items() if key in parts]
    rng = np.random.default_rng(report.seed)
    rounds, calls, tokens = (2, 4, 16) if report.quick else (report.rounds or ROUNDS, 16, 128)
    report.title(f"seconds for {calls} calls of {tokens} tokens at a time, {rounds} paired rounds, tiny model")
    rows = []
    with engines.tiny_model(folder) as model:
        for comparison in todo[:1] if report.quick else todo:
            found, same = _compare(comparison, model, rounds, {"calls": calls, "tokens": tokens}, rng)
            report.figure("exact", comparison.name, {**found.as_json(), "same_tokens": same})
            rows.append(
                (
                    comparison.name,
                    f"{found.median:.3f}",
                    f"{found.low:.3f}",
                    f"{found.high:.3f}",
                    "yes" if same else "no",
                )
            )
    report.table(("", "median ratio", "low", "high", "same tokens"), rows)
    if is_cpu_build():
        report.note("batch invariance (VLLM_BATCH_INVARIANT=1): not measured, it needs a GPU")


def _compare(
    comparison: Comparison, model: str, rounds: int, work: Mapping[str, int], rng: np.random.Generator
) -> tuple[Spread, bool]:
    with ExitStack() as stack:
        sides = [comparison.over, comparison.under]
        processes = [
            stack.enter_context(
                engines.started(model, plug_in=side.plug_in, environment=side.environment, dtype=side.dtype)
            )
            for side in sides
        ]
        seconds: list[list[float]] = [[], []]
        sums: list[set[float]] = [set(), set()]
        for number in range(rounds + 1):  # the first one is not counted
            for at in rng.permutation(2).tolist():
                answer = engines.ask(
                    processes[at], do="decode", sampled=sides[at].sampled, drawn=sides[at].drawn, **work
                )
                sums[at].add(answer["sum"])
                if number:
                    seconds[at].append(answer["seconds"])
        return ratios(*seconds), sums[0] == sums[1]
