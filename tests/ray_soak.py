"""Jobs of two workers on Ray, killed at random: part of `python -m tests.soak` (--ray-rounds).

A round is one job: its coordinator, the engine of a worker, a worker, and everything are killed, and it is made to
shrink and grow, in random order and each after a random number of decoded tokens; every other time the calls of what
was killed go on before the next. A job that was killed whole is continued on Ray. Then it runs to its end.
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

_RECOVERY = re.compile(r"worker (\S+) is gone \((.*?)\); after ([\d.]+) s its (\d+) calls go on(.*)")
_SURVIVOR = re.compile(
    r"; (\S+) meanwhile made (\d+) steps, (\d+) tokens/s \((\d+) before\), longest pause (\d+) ms \((\d+) before\)"
)
WAITED_S = 5.0
"""A survivor that makes no step in a recovery of that length has waited for it."""


@dataclass(frozen=True, slots=True)
class Survived:
    """What the step log of one survivor says of one recovery."""

    recovery_s: float
    n_steps: int
    rate: int
    rate_before: int
    pause_ms: int
    pause_before_ms: int

    @property
    def waited(self) -> bool:
        return self.n_steps == 0 and self.rate_before > 0 and self.recovery_s > WAITED_S


def survivors(text: str) -> list[Survived]:
    """All that a job's log says of them."""
    found = []
    for recovery in _RECOVERY.finditer(text):
        for one in _SURVIVOR.finditer(recovery[5]):
            found.append(Survived(float(recovery[3]), *(int(figure) for figure in one.groups()[1:])))
    return found


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
        job = write_job(folder / f"round-{done}", model, prompts, max_concurrent_calls=CALLS, workers=2, block=block)
        order = rng.sample(KINDS, len(KINDS))
        lives = _round(job, order, rng, killed)
        found = compare(rows_of(job.parent), reference)
        problems += lives[-1].process.returncode != 0 or bool(found.lost or found.duplicated or found.mismatched)
        here = [one for life in lives for one in survivors(life.text)]
        problems += any(one.waited for one in here)
        seen += here
        print(f"  ray round {done}, {block['staging']}, {', '.join(order)}: {found}", flush=True)
        for one in here:
            print(
                f"    recovery of {one.recovery_s} s: a survivor made {one.n_steps} steps, {one.rate} tokens/s "
                f"({one.rate_before} before), longest pause {one.pause_ms} ms ({one.pause_before_ms} before)"
            )
        if problems:
            print(f"PROBLEM: it ended with {lives[-1].process.returncode}:\n{lives[-1].text[-4000:]}")
    print(_told(seen))
    print(
        f"ray, seed {seed}: {done} rounds, {dict(killed)}, in {time.monotonic() - began:.0f} s: "
        f"{CALLS} rows equal in each, {problems} problems",
        flush=True,
    )
    return not problems and (done >= rounds or deadline is not None)


def _told(seen: list[Survived]) -> str:
    busy = [one for one in seen if one.rate_before]
    if not busy:
        return "no recovery had a survivor that was decoding"
    shares = [one.rate / one.rate_before for one in busy]
    return (
        f"{len(busy)} times a survivor decoded through a recovery: {sum(one.waited for one in busy)} waited for it; "
        f"{statistics.median(one.rate for one in busy):.0f} tokens/s, {100 * statistics.median(shares):.0f} % of their "
        f"rate before (medians); longest pause {max(one.pause_ms for one in busy)} ms, of recoveries of "
        f"{min(one.recovery_s for one in busy)} to {max(one.recovery_s for one in busy)} s"
    )


def _round(config: Path, order: list[str], rng: random.Random, killed: Counter[str]) -> list[JobProcess]:
    """Kill in this order while calls are decoded, then let it end; what comes too late for that is not counted."""
    left, lives = list(order), list[JobProcess]()
    while True:
        with running(config, f"life-{len(lives) + 1}") as job:
            lives.append(job)
            try:
                until_said(job, "workers ready")
                while left:
                    decoded_more(job, rng.randrange(50, 600))
                    what, calmly = left.pop(0), rng.random() < 0.5
                    mark = len(job.text)
                    _kill(job, what, rng, config)
                    killed[what] += 1
                    if what == "everything":
                        break
                    if what in ("engine", "worker") and calmly:
                        until(job, lambda mark=mark: _went_on(job.text[mark:]), "its calls go on")  # type: ignore[misc]
                else:
                    job.wait(WAIT_S * 2)
                    return lives
            except AssertionError:
                if job.process.poll() != 0:
                    raise
                return lives  # all rows were there first


def _went_on(text: str) -> bool:
    return "calls go on" in text or "it had no call" in text


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
