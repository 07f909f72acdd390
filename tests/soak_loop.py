"""One timed loop of everything that can go wrong with a job: `python -m tests.soak --for SECONDS`, `make soak`.

The seed draws one episode after another until the time is up: a job that is killed in calm, on a disk that is full at
times, on a bucket that fails, under a clock that jumps, or that a second coordinator takes over; a round of two
coordinators of which one is stopped and woken; schedules of the protocol and of a rollout. `--episode N` does that one
alone, as it was drawn.

Owns: which episode comes, the count at the end.
Does not know: what an episode does (job_soak.py, troubles.py, racing.py, schedules.py, rollout_worlds.py).

It ends well only if every row of every job was there exactly once and equal to an uninterrupted run's, every store
verified down to the bytes, and no round or schedule broke a rule.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests import troubles
from tests.job_soak import JobSoak
from tests.troubles import CALM

Part = Callable[[Path, int, int, float | None], bool]

EPISODES = ("kills", "disk", "endpoint", "clock", "rival", "race", "schedules", "rollouts")
KILLS = 5
"""Of each job."""
_SOME = {"race": 2, "schedules": 200, "rollouts": 200}


def loop(folder: Path, seed: int, seconds: float, parts: dict[str, Part], only: int | None = None) -> bool:
    """Whether everything went well. `parts`: how a round of races or some schedules are run."""
    began = time.monotonic()
    jobs = JobSoak(folder / "reference", random.Random(f"{seed} jobs"))
    done: Counter[str] = Counter()
    fine, number = True, 0
    while fine and (time.monotonic() < began + seconds if only is None else number <= only):
        rng = random.Random(f"{seed} episode {number}")
        # Each kind once in every eight episodes, in an order of the seed's.
        order = random.Random(f"{seed} order {number // len(EPISODES)}").sample(EPISODES, len(EPISODES))
        kind = order[number % len(EPISODES)]
        if only in (None, number):
            print(f"episode {number}: {kind} (alone: --seed {seed} --for 1 --episode {number})", flush=True)
            place = folder / f"episode-{number}"
            place.mkdir(parents=True)
            fine = (
                parts[kind](place, rng.getrandbits(32), _SOME[kind], None)
                if kind in parts
                else _job(jobs, kind, place, rng)
            )
            done[kind] += 1
        number += 1
    totals = jobs.totals
    for problem in totals.problems:
        print(f"PROBLEM: {problem}")
    print(
        f"soak, seed {seed}: {dict(done)} in {time.monotonic() - began:.0f} s; {totals.kills} kills of {totals.jobs} "
        f"jobs, {totals.verified} stores verified; of {totals.rows} rows {totals.lost} lost, {totals.doubled} doubled, "
        f"{totals.differing} differing, {totals.rows - totals.lost - totals.doubled - totals.differing} exactly once",
        flush=True,
    )
    return fine and not totals.failed


def _job(jobs: JobSoak, kind: str, place: Path, rng: random.Random) -> bool:
    match kind:
        case "kills":
            jobs.job(place / "job", rng, CALM, KILLS)
        case "rival":
            jobs.rival(place, rng)
        case _:
            make = {"disk": troubles.disk, "endpoint": troubles.endpoint, "clock": troubles.clock}[kind]
            with make(place / "trouble", rng) as trouble:
                if trouble is None:
                    print("  no small disk can be mounted here: left out", flush=True)
                    return True
                jobs.job(place / "job", rng, trouble, KILLS)
    return not jobs.totals.failed
