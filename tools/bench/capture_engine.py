"""Tokens a second of an engine with capture and periodic flushes to local disk, over the same engine without.

Owns: the pairs, in one engine process.
Does not know: how a round is run (engine_process.py).

A pair is the same calls on the same engine twice, right after each other, in an order drawn anew: once through
RecoverableEngine with a session of its own on a new store (default configuration: flushes at 256 tokens or less,
snapshots each minute), once bare. Opening and stopping the session are not in the time.

Beside the ratio of seconds: what the front end's process computed more with capture than without, all its threads, as
a share of the bare seconds. Capture touches nothing else (the engine's own process runs the same code), so that on a
machine with a core to spare this is the most that it can cost, and processor time is told apart from what else the
machine does where seconds are not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from bench import engines
from bench.measuring import Spread, ratios
from bench.report import Law, Report

CALLS = (1, 8, 32, 64)
TOKENS = {"tiny": {1: 400, 8: 300, 32: 300, 64: 300}, "real": {1: 64, 8: 64, 32: 160, 64: 48}}
ROUNDS = {"tiny": 5, "real": 3}
COST_MAX, CALLS_OF_BOUND = 0.02, 32
CACHE_NBYTES = {"tiny": 128 << 20, "real": 1 << 30}


def measure(report: Report, model: str, folder: Path | None, rng: np.random.Generator) -> None:
    calls = (1, 4) if report.quick else CALLS
    rounds = 1 if report.quick else report.rounds or ROUNDS[model]
    report.title(f"seconds with capture over without, {model} model, {rounds} pairs")
    rows: list[list[object]] = []
    points = []
    make = engines.tiny_model if model == "tiny" else engines.real_model
    dtype = "float32" if model == "tiny" else "bfloat16"
    with make(folder) as path, engines.started(path, dtype=dtype, kv_cache_memory_bytes=CACHE_NBYTES[model]) as engine:
        for n_calls in calls:
            tokens = 8 if report.quick else TOKENS[model][n_calls]
            seconds: dict[bool, list[float]] = {True: [], False: []}
            processor: dict[bool, list[float]] = {True: [], False: []}
            counted: list[dict[str, int]] = []
            same = True
            for number in range(rounds + 1):
                sums = set()
                for at in rng.permutation(2).tolist():
                    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder) as store:
                        place = str(Path(store) / "store") if at else None
                        answer = engines.ask(engine, do="decode", calls=n_calls, tokens=tokens, store=place)
                    sums.add(answer.pop("sum"))
                    wall, busy = answer.pop("seconds"), answer.pop("processor")
                    if number:
                        seconds[bool(at)].append(wall)
                        processor[bool(at)].append(busy)
                        counted += [answer] if at else []
                same = same and len(sums) == 1
            if any(one["captured"] != n_calls * tokens for one in counted):
                raise RuntimeError(f"not every token was captured: {counted}")
            over = ratios(seconds[True], seconds[False])
            speed = Spread.of([n_calls * tokens / each for each in seconds[False]])
            more = Spread.of(
                [
                    (busy - idle) / bare
                    for busy, idle, bare in zip(processor[True], processor[False], seconds[False], strict=True)
                ]
            )
            figure = {
                **over.as_json(),
                "processor_share": more.as_json(),
                "tokens_per_second_bare": speed.as_json(),
                "tokens": tokens,
                "same": same,
            }
            report.figure("engine", f"{model}, {n_calls} calls", {**figure, "counted": counted[-1]})
            points.append((float(n_calls), over.median))
            if not report.quick and n_calls == CALLS_OF_BOUND:
                name = f"capture and flush, {model} model, {n_calls} calls"
                report.bound(f"cost of {name}", over.median - 1, COST_MAX)
                report.bound(f"processor time of {name}, over the seconds", more.median, COST_MAX)
            same_tokens = "yes" if same else "NO"
            rows.append(
                [n_calls, tokens, speed.text(0), over.text(3), more.text(4), same_tokens, counted[-1]["flushes"]]
            )
    report.table(
        ("calls", "tokens each", "tokens/s bare", "with over without", "processor", "same tokens", "flushes"), rows
    )
    report.law(Law("seconds with capture over without", "calls", {model: points}, 1 + COST_MAX))
