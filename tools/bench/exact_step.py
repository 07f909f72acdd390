"""What the plug-in's parts take of a step that does not use them, beside vLLM's own: nanoseconds, without an engine.

Owns: the batches, which are given to the processors as the engine's runner gives them.
Does not know: a model, an engine. Rows ask for nothing: no mark, no bias, no least length.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from bench.report import Report

ROWS = (1, 8, 32, 64)
OURS = ("PositionDraws", "TrueSplit")


def measure(report: Report) -> None:
    import torch
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    from vllm_hooks.draws import PositionDraws
    from vllm_hooks.logits import TrueSplit

    repeats = 3 if report.quick else 30
    report.title("nanoseconds of a step for processors that no row asks for (the least of some runs)")
    cells: dict[str, list[str]] = {}
    for n_rows in ROWS:
        joined, one, logits = _batches(n_rows)
        for kind in (*BUILTIN_LOGITS_PROCESSORS, PositionDraws, TrueSplit):
            config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max(ROWS)))
            processor = kind(config, torch.device("cpu"), False)
            processor.update_state(joined)
            found = {
                "same batch": _least_ns(partial(processor.update_state, None), repeats)
                + _least_ns(partial(processor.apply, logits), repeats),
                "one row changed": _least_ns(partial(processor.update_state, one), repeats),
                "all rows new": _least_ns(partial(processor.update_state, joined), repeats),
            }
            report.figure("step", f"{kind.__name__}, {n_rows} rows", found)
            cells.setdefault(kind.__name__, []).append(" / ".join(f"{ns:,.0f}" for ns in found.values()))
    columns = ("same batch / one row changed / all rows new", *(f"{n_rows} rows" for n_rows in ROWS))
    report.table(columns, [(name, *texts) for name, texts in cells.items()])
    steps = [report.figures["step"][f"{name}, {ROWS[-1]} rows"]["same batch"] for name in OURS]
    asked = [_least_ns(partial(_asks(), given), repeats) for given in (None, _named())]
    report.figure("step", "asked at admission, without and with ours", asked)
    report.note(
        f"ours, a step of {ROWS[-1]} rows: {sum(steps):,.0f} ns; at a request's admission vLLM asks its processors "
        f"whether its parameters will do: {asked[0]:,.0f} ns without ours, {asked[1]:,.0f} ns with them"
    )


def _batches(n_rows: int) -> tuple[Any, Any, Any]:
    """All rows new; one row gone and another in its place; the logits."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

    added: list[Any] = [(at, SamplingParams(), list(range(32)), []) for at in range(n_rows)]
    joined = BatchUpdate(batch_size=n_rows, removed=[], added=added, moved=[])
    one = BatchUpdate(batch_size=n_rows, removed=[n_rows - 1], added=added[-1:], moved=[])
    return joined, one, torch.zeros(n_rows, 512)


def _named() -> list[str]:
    from vllm_hooks.abilities import DRAWS_CLASS, TRUE_SPLIT_CLASS

    return [DRAWS_CLASS, TRUE_SPLIT_CLASS]


def _asks() -> Callable[[Any], None]:
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    params = SamplingParams()
    return lambda given: validate_logits_processors_parameters(given, params)


def _least_ns(work: Callable[[], Any], repeats: int, times: int = 1000) -> float:
    """The least of some runs, less what a call of nothing takes."""

    def run(what: Callable[[], Any]) -> float:
        took = []
        for _ in range(repeats):
            began = time.perf_counter_ns()
            for _ in range(times):
                what()
            took.append((time.perf_counter_ns() - began) / times)
        return min(took)

    gc.disable()
    try:
        return max(0.0, run(work) - run(partial(int)))
    finally:
        gc.enable()
