"""A job of two workers on Ray, whose engine, actor, coordinator and everything are killed, one after another.

One job, since engines start slowly; every kill comes while calls are decoded. What is random is how many tokens lie
between two kills. The soak (`python -m tests.soak --ray-rounds N`) kills at random moments and continues on Ray.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OnLoop
from tests.job_files import assert_whole, lines, rows_of, write_job
from tests.job_here import reference_rows
from tests.job_processes import run, running
from tests.ray_jobs import COORDINATOR, called, decoded_more, engines, kill, kill_everything, until_said

CALLS = 32


@pytest.mark.timeout(1500)
def test_w1_engine_actor_coordinator_and_everything_are_killed_and_no_token_differs(
    tiny_model: Path, engine: Any, on_loop: OnLoop[Any], quick_path: Path, rng: random.Random
) -> None:
    rows = lines(CALLS, least=500, step=12)
    config = write_job(quick_path / "job", tiny_model, rows, max_concurrent_calls=CALLS, workers=2)

    with running(config, "on-ray") as job:
        until_said(job, "2 of 2 workers ready")
        job.after(rng.randrange(100, 600))

        kill(called(job, COORDINATOR)[0])
        decoded_more(job, rng.randrange(10, 200))
        until_said(job, "goes on at epoch 2")

        mark = len(job.text)
        victim, survivor = rng.sample(list(engines(job)), 2)
        kill(engines(job)[victim])
        until_said(job, "its engine died", "calls go on", after=mark)

        mark = len(job.text)
        kill(survivor)
        until_said(job, "its process is gone", "calls go on", after=mark)
        decoded_more(job, rng.randrange(10, 400))
        log = job.text
        kill_everything(job)

    # What is left is continued by one engine in one process: it is the same job.
    last = run(config, "in-process", "--set", "workers=1")
    assert last.process.returncode == 0, f"{log}\n{last.text[-4000:]}"
    done = rows_of(config.parent)
    assert_whole(done, on_loop(_reference(engine, rows)))
    assert sum(len(row["resumes"]) for row in done) >= CALLS // 2, log
    print(log)


async def _reference(engine: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return await reference_rows(engine, rows)
