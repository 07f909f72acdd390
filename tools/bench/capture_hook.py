"""What the hook costs for each token, against a token source that is a function of call and step.

Owns: the source, the same tokens through the hook and into Python lists, round by round.
Does not know: engines.

A step gives every call one token and its logprob in the engine's own container, as decoding does. Ways: the hook as a
stream of deltas calls it (one output, one token); as the polling of FINAL_ONLY requests calls it (as many tokens a look
as it aims at with flushes of the default size, the front end's own growth included); and two list appends. What takes
ids, logprobs and ranks out of the container is part of the hook; with ranks a library session keeps them beside the
logprobs, without them a batch job does not. Flushes are made by the stager's thread and are no part of the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.jobs import SAMPLING
from bench.measuring import Spread, paired, settle
from bench.report import Law, Report
from recovery import codec
from recovery.calls import LiveCall
from recovery.config import CheckpointingConfig
from recovery.model import Request
from vllm_hooks.capturing import Capturing
from vllm_hooks.flushing import Flushing
from vllm_hooks.pull import Pulled, PullReader, tokens_per_poll
from vllm_hooks.top_logprobs import captured_of

CALLS, STEPS, ROUNDS = (256, 1024, 10_000), 512_000, 7
CALLS_QUICK, STEPS_QUICK, ROUNDS_QUICK = (8, 16), 128, 1
MICROSECONDS_MAX = 2.0
CONFIG = CheckpointingConfig(enabled=True, store="none")
TOKENS_PER_POLL = tokens_per_poll(CONFIG.gym.generation_chunk_flush_tokens)


class Captures(Capturing):
    """The half of a session that the engine meets, with nobody to flush to."""

    def __init__(self) -> None:
        super().__init__(CONFIG, capturing=True, keeps_results=False)
        nowhere: Any = None
        self.flushing = Flushing(nowhere, self.table.freeze, self.table.longest_pending, 0, lambda error: None)

    def open(self, n_calls: int) -> list[LiveCall]:
        found = []
        for number in range(n_calls):
            request = Request(
                rollout=f"rollout-{number}", prompt_token_ids=np.arange(3, dtype=np.int32), sampling=SAMPLING
            )
            found.append(self.table.open(request, codec.call_id(request.rollout, 0, codec.request_digest(request)), 0))
        return found


def token_of(call: int, step: int) -> int:
    return (call * 7919 + step * 31) % 50_021


def measure(report: Report, rng: np.random.Generator) -> None:
    calls, tokens = (CALLS_QUICK, STEPS_QUICK) if report.quick else (CALLS, STEPS)
    rounds = ROUNDS_QUICK if report.quick else report.rounds or ROUNDS
    report.title(f"microseconds for each token, {rounds} paired rounds")
    rows: list[list[object]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    settle()
    for n_calls in calls:
        steps = max(TOKENS_PER_POLL, tokens // n_calls // TOKENS_PER_POLL * TOKENS_PER_POLL)
        source = _source(n_calls, steps)
        ways = {
            "streamed": _streamed(source, 0),
            "streamed, no ranks": _streamed(source, None),
            "polled": _polled(source, 0),
            "polled, no ranks": _polled(source, None),
            "lists": _lists(source),
        }
        wall, processor = paired(ways, rounds, rng, partial(Made, n_calls))
        n = n_calls * steps
        for way, seconds in wall.items():
            spread = Spread.of([1e6 * value / n for value in seconds])
            busy = Spread.of([1e6 * value / n for value in processor[way]])
            figure = {**spread.as_json(), "processor": busy.as_json(), "tokens": n}
            report.figure("hook", f"{way}, {n_calls} calls", figure)
            rows.append([f"{n_calls:,}", way, spread.text(2), busy.text(2)])
            series.setdefault(way, []).append((n_calls, spread.median))
            if not report.quick and way != "lists":
                report.bound(f"microseconds a token, {way}, {n_calls:,} calls", spread.median, MICROSECONDS_MAX)
    report.table(("calls", "", "microseconds", "of processor time"), rows)
    report.law(Law("microseconds a token", "calls", series, MICROSECONDS_MAX, log=True))


Source = list[list[tuple[list[int], list[dict[int, Any]]]]]


def _source(n_calls: int, steps: int) -> Source:
    """By step and call: what one output of the engine carries."""
    from vllm.logprobs import Logprob

    def one(call: int, step: int) -> tuple[list[int], list[dict[int, Any]]]:
        token = token_of(call, step)
        return [token], [{token: Logprob(-(step % 8) / 8, 1 + step % 3, None)}]

    return [[one(call, step) for call in range(n_calls)] for step in range(steps)]


class Made:
    """A session with open calls, and what the engine's front end keeps of each."""

    def __init__(self, n_calls: int) -> None:
        self.session = Captures()
        self.calls = self.session.open(n_calls)
        self.states = [_State() for _ in range(n_calls)]
        processor = SimpleNamespace(
            request_states={str(number): state for number, state in enumerate(self.states)},
            external_req_ids={str(number): [str(number)] for number in range(n_calls)},
        )
        self.reader = PullReader(SimpleNamespace(output_processor=processor))
        self.lists: list[tuple[list[int], list[float]]] = [([], []) for _ in range(n_calls)]


def _streamed(source: Source, n_top: int | None) -> Callable[[Made], None]:
    """As RecoverableEngine does with each output."""

    def run(made: Made) -> None:
        session = made.session
        for step in source:
            for call, (ids, logprobs) in zip(made.calls, step, strict=True):
                session.captured(call, ids, *captured_of(logprobs, ids, 0, n_top))
        assert session.counters.tokens_captured == len(source) * len(made.calls)

    return run


def _polled(source: Source, n_top: int | None) -> Callable[[Made], None]:
    """The front end's own growth, two list extensions a look, is in the time."""
    n_calls, looks = len(source[0]), len(source) // TOKENS_PER_POLL
    by_look = [
        [([step[call][0][0] for step in steps], [step[call][1][0] for step in steps]) for call in range(n_calls)]
        for steps in (source[look * TOKENS_PER_POLL : (look + 1) * TOKENS_PER_POLL] for look in range(looks))
    ]

    def run(made: Made) -> None:
        session = made.session
        pulled = [Pulled(call, made.reader, str(number), n_top) for number, call in enumerate(made.calls)]
        for look in by_look:
            for state, (ids, logprobs) in zip(made.states, look, strict=True):
                state.grow(ids, logprobs)
            for one in pulled:  # as Polling.read_all does
                session.captured(one.call, *one.read())
        assert session.counters.tokens_captured == looks * TOKENS_PER_POLL * n_calls

    return run


def _lists(source: Source) -> Callable[[Made], None]:
    def run(made: Made) -> None:
        for step in source:
            for (to_ids, to_logprobs), (ids, logprobs) in zip(made.lists, step, strict=True):
                to_ids.append(ids[0])
                to_logprobs.append(logprobs[0][ids[0]].logprob)

    return run


class _State:
    """What the engine's front end keeps of a request, as far as it is read."""

    def __init__(self) -> None:
        self.detokenizer = SimpleNamespace(output_token_ids=[])
        self.logprobs_processor = SimpleNamespace(logprobs=[])

    def grow(self, ids: list[int], logprobs: list[dict[int, Any]]) -> None:
        self.detokenizer.output_token_ids.extend(ids)
        self.logprobs_processor.logprobs.extend(logprobs)
