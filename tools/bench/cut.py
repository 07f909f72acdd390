"""`bench cut`: how long a cut keeps the engine's event loop from everything else.

Owns: tables of live calls that hold so many tokens, the timed cut, and the two other ways to get a consistent state.
Does not know: what is done with what a cut took.

A cut is what the session does on the loop: freeze every changed call, and queue what was taken for the stager's thread.
After each cut the runs that it took are put back into their buffers, so that every cut of a row finds the same tokens.
Beside it, on the same tables: a copy of all tokens and logprobs, made in the loop. And, on a real engine: pausing it
(keep its requests) and resuming it, without saving anything in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from bench import engines
from bench.jobs import SAMPLING, VERSION
from bench.measuring import Spread, settle
from bench.report import Law, Report
from recovery import codec
from recovery.buffer import Run
from recovery.calls import CallTable, LiveCall
from recovery.model import MAX_TOKENS_PER_CHUNK, Request

ABOUT = "stall of the engine's loop for each cut, beside pausing the engine and copying the state"
PARTS = ("cut", "pause")

CALLS, TOKENS, CUTS = (10, 100, 1000, 10_000), (10**4, 10**5, 10**6, 10**7, 10**8), 300
CALLS_QUICK, TOKENS_QUICK, CUTS_QUICK = (10, 100), (10**3, 10**4), 5
COPIES = 5
P99_MAX = {1000: 1e-3, 10_000: 10e-3}


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    """The larger part of the memory: 10^8 tokens are 2.5 GB."""
    if "cut" in parts:
        _cuts(report)
    if "pause" in parts:
        _pauses(report, folder)


def _cuts(report: Report) -> None:
    calls, tokens, cuts = (CALLS_QUICK, TOKENS_QUICK, CUTS_QUICK) if report.quick else (CALLS, TOKENS, CUTS)
    report.title(f"stall of the loop in ms, {cuts} cuts each, and {COPIES} copies of the same state")
    rows: list[list[object]] = []
    p99: dict[str, list[tuple[float, float]]] = {}
    copied: dict[str, list[tuple[float, float]]] = {}
    for n_calls in calls:
        for n_tokens in tokens:
            if n_tokens < n_calls:
                continue
            table, live = _table(n_calls, n_tokens)
            seconds = _cut_often(table, live, report.rounds or cuts)
            copies = [_copy(live) for _ in range(COPIES)]
            found = _percentiles(seconds)
            held = sum(call.n_pending for call in live)
            if held != n_tokens // n_calls * n_calls:
                raise RuntimeError(f"cuts of {n_tokens} tokens left {held} to the next")
            more = {"n": len(seconds), "tokens_after": held, "copy": Spread.of(copies).as_json()}
            report.figure("cut", f"{n_calls} calls, {n_tokens} tokens", {**found, **more})
            p99.setdefault(f"{n_calls:,} calls", []).append((n_tokens, 1e3 * found["p99"]))
            copied.setdefault(f"copy, {n_calls:,}", []).append((n_tokens, 1e3 * Spread.of(copies).median))
            times = [f"{1e3 * value:.3f}" for value in found.values()]
            rows.append([f"{n_calls:,}", f"{n_tokens:.0e}", *times, f"{1e3 * Spread.of(copies).median:.2f}"])
            del table, live
    report.table(("live calls", "held tokens", "p50", "p99", "max", "copy"), rows)
    for name, points in p99.items() if not report.quick else ():
        n_calls = int(name.split()[0].replace(",", ""))
        if n_calls in P99_MAX:
            most = max(ms for _, ms in points) / 1e3
            report.bound(f"p99 of a cut in s, {name}, whatever the tokens", most, P99_MAX[n_calls])
    largest = max(calls)
    series = {**p99, f"copy, {largest:,}": copied[f"copy, {largest:,}"]}
    report.law(Law("p99 of a cut, ms", "held tokens", series, 1.0, log=True))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "max": max(seconds)}


def _table(n_calls: int, n_tokens: int) -> tuple[CallTable, list[LiveCall]]:
    """Calls whose buffers hold so many tokens together, none of them frozen. Objects of tokens are shared."""
    table, live = CallTable(), []
    each = n_tokens // n_calls
    ids, logprobs = [1234] * MAX_TOKENS_PER_CHUNK, [-0.5] * MAX_TOKENS_PER_CHUNK
    for number in range(n_calls):
        request = Request(rollout=f"rollout-{number}", prompt_token_ids=np.arange(3, dtype=np.int32), sampling=SAMPLING)
        call = table.open(request, codec.call_id(request.rollout, 0, codec.request_digest(request)), 0)
        for first in range(0, each, MAX_TOKENS_PER_CHUNK):
            n = min(MAX_TOKENS_PER_CHUNK, each - first)
            call.append(ids[:n], logprobs[:n], VERSION)
        live.append(call)
    return table, live


def _cut_often(table: CallTable, live: Sequence[LiveCall], cuts: int) -> list[float]:
    queue: SimpleQueue[Any] = SimpleQueue()
    settle()
    seconds = []
    for _ in range(cuts + 1):
        began = time.perf_counter()
        queue.put(table.freeze())
        seconds.append(time.perf_counter() - began)
        taken = queue.get()
        _put_back(table, live, [run for run in taken if isinstance(run, Run)])
    return seconds[1:]  # the first one also takes what opens the calls


def _put_back(table: CallTable, live: Sequence[LiveCall], runs: Sequence[Run]) -> None:
    """As if the cut had not been: no public way leads back, and decoding 10^8 tokens again would take minutes."""
    of: dict[bytes, list[Run]] = {}
    for run_ in runs:
        of.setdefault(run_.call_id, []).append(run_)
    for call in live:
        own = of[call.call_id]
        call._buffer._runs, call._buffer.n_pending = own, sum(map(len, own))
        table.changed_calls[call] = None


def _copy(live: Sequence[LiveCall]) -> float:
    """Seconds for what a checkpoint by copy does in the loop."""
    began = time.perf_counter()
    copies = [(run_.token_ids, run_.logprobs) for call in live for run_ in call._buffer.pending]
    seconds = time.perf_counter() - began
    del copies
    return seconds


def _pauses(report: Report, folder: Path | None) -> None:
    calls, rounds = (2, 2) if report.quick else (32, report.rounds or 30)
    report.title(f"pausing the engine (keep) and resuming it, {calls} calls of the tiny model")
    with engines.tiny_model(folder) as model, engines.started(model) as engine:
        answer = engines.ask(engine, do="pause", calls=calls, rounds=rounds)
    rows = []
    for name in ("pause and resume", "no token for"):
        seconds = answer[name]
        found = {
            "p50": float(np.percentile(seconds, 50)),
            "p99": float(np.percentile(seconds, 99)),
            "max": max(seconds),
        }
        report.figure("pause", name, {**found, "n": len(seconds)})
        rows.append([name, *(f"{1e3 * value:.2f}" for value in found.values())])
    report.figure("pause", "tokens", answer["tokens"])
    report.table(("ms", "p50", "p99", "max"), rows)
