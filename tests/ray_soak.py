"""Jobs of two workers on Ray, killed at random: part of `python -m tests.soak` (--ray-rounds).

A round is one job: its coordinator, the engine of a worker, a worker, and everything are killed, in random order and
each after a random number of decoded tokens; a job that was killed whole is continued on Ray. Then it runs to its end.
Of two rounds one lets its flushes wait in a TransferQueue.

Owns: what is killed when, the figures, and the comparison with an uninterrupted run in one process.
Does not know: how a job's processes are found (ray_jobs.py).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from prefix_recovery.interrupted import compare
from prefix_recovery.tiny import make_tiny_llama
from tests.job_files import lines, rows_of, write_job
from tests.job_processes import JobProcess, run, running
from tests.ray_jobs import COORDINATOR, WAIT_S, called, decoded_more, engines, kill, kill_everything, until, until_said

CALLS = 32
KINDS = ("coordinator", "engine", "worker", "everything")


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
    while done < rounds and not problems and (deadline is None or time.monotonic() < deadline):
        done += 1
        block = {"staging": ("store", "transfer_queue")[done % 2]}
        job = write_job(folder / f"round-{done}", model, prompts, max_concurrent_calls=CALLS, workers=2, block=block)
        order = rng.sample(KINDS, len(KINDS))
        last = _round(job, order, rng, killed)
        found = compare(rows_of(job.parent), reference)
        problems += last.process.returncode != 0 or bool(found.lost or found.duplicated or found.mismatched)
        print(f"  ray round {done}, {block['staging']}, {', '.join(order)}: {found}", flush=True)
        if problems:
            print(f"PROBLEM: it ended with {last.process.returncode}:\n{last.text[-4000:]}")
    print(
        f"ray, seed {seed}: {done} rounds, kills {dict(killed)}, in {time.monotonic() - began:.0f} s: "
        f"{CALLS} rows equal in each, {problems} problems",
        flush=True,
    )
    return not problems and (done >= rounds or deadline is not None)


def _round(config: Path, order: list[str], rng: random.Random, killed: Counter[str]) -> JobProcess:
    """Kill in this order while calls are decoded, then let it end; what comes too late for that is not counted."""
    left = list(order)
    number = 0
    while True:
        number += 1
        with running(config, f"life-{number}") as job:
            try:
                until_said(job, "workers ready")
                while left:
                    decoded_more(job, rng.randrange(50, 600))
                    what = left.pop(0)
                    _kill(job, what, rng)
                    killed[what] += 1
                    if what == "everything":
                        break
                else:
                    job.wait(WAIT_S * 2)
                    return job
            except AssertionError:
                if job.process.poll() != 0:
                    raise
                return job  # all rows were there first


def _kill(job: JobProcess, what: str, rng: random.Random) -> None:
    if what == "everything":
        kill_everything(job)
        return
    if what == "coordinator":
        until(job, lambda: bool(called(job, COORDINATOR)), "there is a coordinator")
        kill(called(job, COORDINATOR)[-1])
        return
    until(job, lambda: bool(engines(job)), "there is a worker with an engine")
    worker, engine = rng.choice(list(engines(job).items()))
    kill(engine if what == "engine" else worker)
