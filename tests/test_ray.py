"""A job on Ray that grows and shrinks, whose engine, actor, coordinator and everything are killed, one after another.

One job, since engines start slowly; every kill comes while calls are under way. What is random is how many tokens lie
between two kills. The soak (`python -m tests.soak --ray-rounds N`) kills at random moments and continues on Ray.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.cli import main
from storage_backends import open_store
from tests.conftest import OnLoop
from tests.job_files import assert_whole, lines, rows_of, write_job
from tests.job_here import reference_rows
from tests.job_processes import run, running
from tests.ray_jobs import (
    COORDINATOR,
    assert_fenced,
    called,
    decoded_more,
    engines,
    kill,
    kill_everything,
    sipping,
    standing,
    until,
    until_said,
)

CALLS = 32


@pytest.mark.timeout(1500)
def test_w1_c7_engine_actor_coordinator_and_everything_are_killed_and_no_token_differs(
    tiny_model: Path, engine: Any, on_loop: OnLoop[Any], quick_path: Path, rng: random.Random
) -> None:
    rows = lines(CALLS, least=600, step=12)
    config = write_job(quick_path / "job", tiny_model, rows, max_concurrent_calls=CALLS, workers=2)

    with running(config, "on-ray", program=("-m", "tests.impatient_job")) as job:
        until_said(job, "2 of 2 workers ready")
        assert len(engines(job)) == 2
        job.after(rng.randrange(100, 600))

        mark = len(job.text)
        kill(called(job, COORDINATOR)[0])
        decoded_more(job, rng.randrange(10, 200))
        with standing(job):
            until_said(job, "goes on at epoch", "without a coordinator for", after=mark)

        # The newest leaves, and all that it had goes on in the other.
        mark, before = len(job.text), engines(job)
        with sipping(job):
            assert main(["workers", str(config), "1"]) == 0
            until_said(job, "it was asked to leave", "its 16 calls go on", after=mark)
        with standing(job):
            until(job, lambda: sum(one.alive() for pair in before.items() for one in pair) == 2, "it has ended")
        decoded_more(job, rng.randrange(10, 200))

        # Another one comes while the coordinator is stalled, replaced, and woken. Nothing is decoded in that time.
        mark, old = len(job.text), called(job, COORDINATOR)[-1]
        os.kill(old.pid, signal.SIGSTOP)
        decoded_more(job, rng.randrange(10, 100))
        ((first, its_engine),) = engines(job).items()
        with standing(job):
            assert main(["workers", str(config), "2"]) == 0
            until_said(job, "the coordinator is replaced", "goes on at epoch", after=mark)
            if old.alive():
                os.kill(old.pid, signal.SIGCONT)
            until(job, lambda: not old.alive(), "the woken coordinator has ended")
            until_said(job, "worker w2-", "is ready", after=mark)
            until(job, lambda: len(engines(job)) == 2, "there are two engines")
        (second,) = engines(job).keys() - {first}
        decoded_more(job, rng.randrange(10, 100))

        mark = len(job.text)
        kill(its_engine)
        with sipping(job):
            until_said(job, "its engine died", "calls go on", after=mark)

        mark, its_engine = len(job.text), engines(job)[second]
        kill(second)
        until_said(job, "its process is gone", "calls go on", after=mark)
        until(job, lambda: not its_engine.alive(), "no engine outlives its worker")
        decoded_more(job, rng.randrange(10, 400))
        log = job.text
        kill_everything(job)

    # What is left is continued by one engine in one process: it is the same job.
    last = run(config, "in-process", "--set", "workers=1")
    assert last.process.returncode == 0, f"{log}\n{last.text[-4000:]}"
    done = rows_of(config.parent)
    assert_whole(done, on_loop(_reference(engine, rows)))
    assert sum(len(row["resumes"]) for row in done) >= CALLS // 2, log
    assert_fenced(open_store(str(config.parent / "store")))
    print(log)


@pytest.mark.timeout(900)
def test_c7_stalled_coordinators_are_fenced_and_participants_are_not_rewound(tmp_path: Path) -> None:
    """On Ray, without an engine: see ray_coordinators.py."""
    command = [sys.executable, "-m", "tests.ray_coordinators", str(tmp_path / "store")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-6000:]}"


async def _reference(engine: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return await reference_rows(engine, rows)
