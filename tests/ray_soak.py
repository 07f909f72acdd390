"""Jobs of two workers on Ray, killed at random: part of `python -m tests.soak` (--ray-rounds).

In a round a job's coordinator, the engine of a worker, a worker, and everything are killed, and it is made to shrink
and grow, in random order and each after a random number of decoded tokens; every other time all is well again
before the next. A job that was killed whole is continued on Ray. Then it runs to its end. What it had no
time for is done to another job, so that each kind comes once in every round.
Of two rounds one lets its flushes wait in a TransferQueue.

Owns: what is killed when, the figures (also of the recoveries, from what the jobs say), and the comparison with an
uninterrupted run in one process.
Does not know: how a job's processes are found (ray_jobs.py).
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from prefix_recovery.interrupted import compare
from prefix_recovery.tiny import make_tiny_llama
from prefix_recovery.wanted_workers import run_workers
from recovery.config import load_config
from tests.job_files import lines, rows_of, write_job
from tests.job_processes import JobProcess, run, running
from tests.ray_jobs import COORDINATOR, WAIT_S, called, decoded_more, engines, kill, kill_everything, until, until_said

CALLS = 32
KINDS = ("coordinator", "engine", "worker", "everything", "scaled")
JOBS_MAX = 6
"""Of one round."""

_RECOVERY = re.compile(r"worker \S+ is gone \((.*)\); after ([\d.]+) s its \d+ calls go on(.*)")
_WITHOUT = re.compile(r"without a coordinator for ([\d.]+) s(.*)")
_WHAT = {"its engine died": "engine", "it was asked to leave": "scaled"}
_SURVIVOR = re.compile(
    r"; (\S+) meanwhile made (\d+) steps, (\d+) tokens/s \((\d+) before\), longest pause (\d+) ms \((\d+) before\)"
)
WAITED_S = 5.0
"""A survivor that makes no step in a recovery of that length has waited for it."""


@dataclass(frozen=True, slots=True)
class Survived:
    """What the step log of one survivor says of one recovery. `what` was killed."""

    what: str
    recovery_s: float
    n_steps: int
    rate: int
    rate_before: int
    pause_ms: int
    pause_before_ms: int

    @property
    def waited(self) -> bool:
        """It stood still for the whole of a long recovery, or for one long step of it."""
        if not self.rate_before or self.recovery_s <= WAITED_S:
            return False
        return self.n_steps == 0 or self.pause_ms > max(500 * self.recovery_s, 2 * self.pause_before_ms)


def survivors(text: str) -> list[Survived]:
    """All that a job's log says of them."""
    told = [(_what(recovery[1]), recovery[2], recovery[3]) for recovery in _RECOVERY.finditer(text)]
    told += [("coordinator", *without.groups()) for without in _WITHOUT.finditer(text)]
    return [
        Survived(what, float(seconds), *(int(figure) for figure in one.groups()[1:]))
        for what, seconds, line in told
        for one in _SURVIVOR.finditer(line)
    ]


def _what(why: str) -> str:
    return next((what for begins, what in _WHAT.items() if why.startswith(begins)), "worker")


def kill_workers(folder: Path, seed: int, rounds: int, deadline: float | None) -> bool:
    """Whether so many rounds ended in the uninterrupted run's rows. Prints the figures."""
    began, rng = time.monotonic(), random.Random(f"ray {seed}")
    model = make_tiny_llama(folder / "tiny")
    prompts = lines(CALLS, least=600, step=12)
    whole = write_job(folder / "whole", model, prompts, block={"enabled": False}, max_concurrent_calls=CALLS)
    first = run(whole, "whole")
    if first.process.returncode != 0:
        print(f"PROBLEM: the uninterrupted run failed:\n{first.text[-4000:]}")
        return False
    reference, done, killed, problems = rows_of(whole.parent), 0, Counter[str](), 0
    seen: list[Survived] = []
    while done < rounds and not problems and (deadline is None or time.monotonic() < deadline):
        done += 1
        block = {"staging": ("store", "transfer_queue")[done % 2]}
        left, jobs = rng.sample(KINDS, len(KINDS)), 0
        while left and not problems and jobs < JOBS_MAX:
            jobs += 1
            name = f"round-{done}-{jobs}"
            job = write_job(folder / name, model, prompts, max_concurrent_calls=CALLS, workers=2, block=block)
            order, before = tuple(left), killed.total()
            lives = _round(job, left, rng, killed)
            found = compare(rows_of(job.parent), reference)
            here = [one for life in lives for one in survivors(life.text)]
            wrong = lives[-1].process.returncode != 0 or bool(found.lost or found.duplicated or found.mismatched)
            problems += wrong or any(one.waited for one in here)
            seen += here
            for one in here:
                print(
                    f"    {one.what} gone for {one.recovery_s} s: a survivor made {one.n_steps} steps, "
                    f"{one.rate} tokens/s ({one.rate_before} before), "
                    f"longest pause {one.pause_ms} ms ({one.pause_before_ms} before)"
                )
            hit = ", ".join(order[: killed.total() - before])
            print(f"  ray round {done}, {block['staging']}, {hit or 'nothing in time'}: {found}", flush=True)
            if problems:
                print(f"PROBLEM: it ended with {lives[-1].process.returncode}:\n{lives[-1].text[-4000:]}")
        if left and not problems:
            problems += 1
            print(f"PROBLEM: {JOBS_MAX} jobs were over before {', '.join(left)} could come")
    for what in ("coordinator", "engine", "worker", "scaled"):
        print(_told(what, [one for one in seen if one.what == what]))
    print(
        f"ray, seed {seed}: {done} rounds, {dict(killed)}, in {time.monotonic() - began:.0f} s: "
        f"{CALLS} rows equal in each, {problems} problems",
        flush=True,
    )
    return not problems and (done >= rounds or deadline is not None)


def _told(what: str, seen: list[Survived]) -> str:
    busy = [one for one in seen if one.rate_before]
    if not busy:
        return f"{what}: no recovery had a survivor that was decoding"
    share = 100 * statistics.median(one.rate / one.rate_before for one in busy)
    rate, before = (statistics.median(rates) for rates in zip(*((o.rate, o.rate_before) for o in busy), strict=True))
    return (
        f"{what}: {len(busy)} times a survivor decoded through a recovery: {sum(one.waited for one in busy)} waited "
        f"for it; {rate:.0f} tokens/s, {before:.0f} before ({share:.0f} %; medians); longest pause "
        f"{max(one.pause_ms for one in busy)} ms, of recoveries of {min(one.recovery_s for one in busy)} to "
        f"{max(one.recovery_s for one in busy)} s"
    )


def _round(config: Path, left: list[str], rng: random.Random, killed: Counter[str]) -> list[JobProcess]:
    """Kill in this order while calls are decoded, then let it end; what comes too late for that stays in `left`."""
    lives = list[JobProcess]()
    while True:
        with running(config, f"life-{len(lives) + 1}") as job:
            lives.append(job)
            try:
                until_said(job, "workers ready")
                while left:
                    decoded_more(job, rng.randrange(50, 600))
                    what, calmly = left[0], rng.random() < 0.5
                    mark = len(job.text)
                    _kill(job, what, rng, config)
                    killed[left.pop(0)] += 1
                    if what == "everything":
                        break
                    if what in ("coordinator", "engine", "worker") and calmly:
                        until(job, lambda mark=mark: _went_on(job.text[mark:]), f"it goes on without the {what}")  # type: ignore[misc]
                else:
                    job.wait(WAIT_S * 2)
                    return lives
            except AssertionError:
                if job.process.poll() != 0:
                    raise
                return lives  # all rows were there first


def _went_on(text: str) -> bool:
    return any(said in text for said in ("calls go on", "it had no call", "without a coordinator for"))


def _kill(job: JobProcess, what: str, rng: random.Random, config: Path) -> None:
    if what == "everything":
        kill_everything(job)
        return
    if what == "coordinator":
        until(job, lambda: bool(called(job, COORDINATOR)), "there is a coordinator")
        kill(called(job, COORDINATOR)[-1])
        return
    if what == "scaled":
        mark = len(job.text)
        run_workers(load_config(config), 1)
        until_said(job, "wanted workers: 1", after=mark)
        run_workers(load_config(config), 2)
        return
    until(job, lambda: bool(engines(job)), "there is a worker with an engine")
    worker, engine = rng.choice(list(engines(job).items()))
    kill(engine if what == "engine" else worker)
