"""Jobs of the tiny model that are killed at random, in calm or in some trouble: part of `python -m tests.soak`.

Each job is killed several times: after a random number of decoded tokens, or at a random moment, which hits the start
of the engine, the restore and the end too; then it runs to its end, every row is compared with an uninterrupted run,
and its store is verified down to the bytes. Kills of the client alone come in between.

Owns: when a kill comes, the figures, what is compared at the end.
Does not know: how a job runs (it starts `prefix-recovery run` as anybody would), what a trouble is (troubles.py).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefix_recovery.interrupted import JobFigures, compare
from prefix_recovery.tiny import make_tiny_llama
from storage_backends import open_store
from tests.job_files import FLUSH, Saved, lines, rows_of, saved_in, write_job
from tests.job_processes import JobProcess, run, running, wait_until
from tests.troubles import CALM, CODES, Trouble

KILLS_PER_JOB = 12
_SHORTEST_START_S, _LONGEST_START_S = 1.0, 14.0


@dataclass(slots=True)
class Totals:
    """Over the whole soak. `twice_most`: the most tokens that one kill made one call generate again."""

    kills: int = 0
    jobs: int = 0
    lost: int = 0
    doubled: int = 0
    differing: int = 0
    twice_most: int = 0
    over_the_bound: int = 0
    generated: int = 0
    reused: int = 0
    rows: int = 0
    verified: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.doubled or self.differing or self.problems)


class JobSoak:
    """Jobs in a folder, compared with one that nothing happened to."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._rng = rng
        self.totals = Totals()
        self._model = make_tiny_llama(folder / "tiny")
        self._rows = lines(16, least=200, step=30)
        self._reference = self._finished(write_job(folder / "whole", self._model, self._rows, block={"enabled": False}))

    def run(self, folder: Path, kills: int, deadline: float | None) -> None:
        """One job after another until so many kills are done, or until the time is up."""
        while (wanted := kills - self.totals.kills) > 0 and not self.totals.failed:
            if deadline is not None and time.monotonic() >= deadline:
                break
            self.job(folder / f"job-{self.totals.jobs + 1}", self._rng, CALM, min(wanted, KILLS_PER_JOB))

    def _finished(self, config: Path) -> list[dict[str, Any]]:
        job = run(config, "whole")
        if job.process.returncode != 0:
            raise SystemExit(f"the uninterrupted run failed:\n{job.text[-4000:]}")
        return rows_of(config.parent)

    def job(self, folder: Path, rng: random.Random, trouble: Trouble, kills: int = KILLS_PER_JOB) -> None:
        """A job that is killed so often in trouble; then the trouble is over, and it runs to its end."""
        self.totals.jobs += 1
        interval_s = rng.choice([0.3, 1.0, 3600.0])
        config = self._written(folder, trouble.store, interval_s)
        print(f"job {self.totals.jobs}, {trouble.name}: snapshots every {interval_s} s", flush=True)
        figures, saved = JobFigures(), Saved({}, frozenset())
        for number in range(kills):
            job = self._killed(config, f"run-{number}", rng, trouble)
            figures.runs.append(job.figures())
            self._reuses(job, saved)
            if trouble is CALM and (folder / trouble.store).exists():
                saved = saved_in(open_store(folder / trouble.store))
            if self.totals.failed or (not job.killed and job.process.returncode == 0):
                break
        trouble.over.set()
        last = run(config, "last", environment=trouble.environment)
        figures.runs.append(last.figures())
        self._reuses(last, saved)
        self._expect(last, "last", {0})
        self._judge(folder, figures, trouble)

    def rival(self, folder: Path, rng: random.Random) -> None:
        """A second process takes the store of a running one, which has to end fenced, or be done before."""
        self.totals.jobs += 1
        store, interval_s = str(folder / "store"), rng.choice([0.3, 1.0])
        first, second = (self._written(folder / name, store, interval_s) for name in ("first", "second"))
        tokens = rng.randint(1, 1500)
        print(f"job {self.totals.jobs}, two coordinators: the second comes after {tokens} tokens", flush=True)
        with running(first, "first") as job:
            wait_until(lambda: job.decoded >= tokens or job.process.poll() is not None, "tokens of the first")
            other = run(second, "second")
            wait_until(lambda: job.process.poll() is not None, f"the end of the first:\n{job.text[-2000:]}")
            self._expect(job, "first", {0, 11})
        self._expect(other, "second", {0})
        self._judge(folder / "second", JobFigures([other.figures()]), Trouble("two coordinators", store))

    def _reuses(self, job: JobProcess, saved: Saved) -> None:
        """What was stored when the run before was killed is what this one begins with, or more."""
        counts = job.counts()
        if counts is None or (not counts[1].any() and job.process.returncode != 0):
            return  # it was killed before it had counted what it began with
        for number, row in enumerate(self._rows):
            stored = saved.tokens.get(f"{row['id']}#0", 0)
            if counts[0][number] < stored:
                self.totals.problems.append(
                    f"job {self.totals.jobs}: {row['id']} began with {counts[0][number]} tokens, {stored} were stored"
                )

    def _written(self, folder: Path, store: str, interval_s: float) -> Path:
        block = {"snapshot_interval_s": interval_s, "store": store}
        return write_job(folder, self._model, self._rows, block=block)

    def _expect(self, job: JobProcess, name: str, codes: set[int]) -> None:
        if job.process.returncode not in codes:
            self.totals.problems.append(f"{name} of job {self.totals.jobs} ended with code {job.process.returncode}")
            print(job.text[-4000:], flush=True)

    def _killed(self, config: Path, name: str, rng: random.Random, trouble: Trouble) -> JobProcess:
        """One run that is killed, unless it ends before."""
        alone = rng.random() < 0.15
        by_tokens = rng.random() < 0.6
        tokens = rng.randint(1, 1200)
        moment_s = rng.uniform(_SHORTEST_START_S, _LONGEST_START_S)
        with running(config, name, program=trouble.program, environment=trouble.environment) as job:
            children = []

            def due() -> bool:
                return job.decoded >= tokens if by_tokens else time.monotonic() - job.began >= moment_s

            wait_until(lambda: due() or job.process.poll() is not None, f"{name} came so far")
            if job.process.poll() is None:
                if alone:
                    children = job.descendants()
                    job.process.kill()
                    job.killed = True
                    job.process.wait()
                else:
                    job.signal_group(signal.SIGKILL)
                    job.process.wait()
                self.totals.kills += 1
            else:
                self._expect(job, name, {0} if trouble is CALM else CODES)
            wait_until(lambda: not any(child.alive() for child in children), "the engine followed its client", 30)
        when = f"{job.decoded} tokens" if by_tokens else f"{moment_s:.1f} s"
        what = ("client killed" if alone else "killed") if job.killed else "ended by itself"
        counts = job.counts()
        kept = 0 if counts is None else int((counts[0] * (counts[2] == 0)).sum())
        print(f"  kill {self.totals.kills}: {what} after {when}; it had begun with {kept} tokens", flush=True)
        return job

    def _judge(self, folder: Path, figures: JobFigures, trouble: Trouble) -> None:
        found = compare(rows_of(folder), self._reference)
        totals = self.totals
        totals.rows += len(self._reference)
        totals.lost += found.lost
        totals.doubled += found.duplicated
        totals.differing += found.mismatched
        totals.generated += figures.tokens_generated
        totals.reused += sum(figures.reused_after_kills())
        for twice in figures.twice_after_kills():
            totals.twice_most = max(totals.twice_most, int(twice.max()))
            totals.over_the_bound += int((twice > FLUSH).sum())
            if twice.min() < 0:
                totals.problems.append(f"job {totals.jobs}: the store has tokens that nobody generated")
        self._verify(folder, trouble)
        print(
            f"  job {totals.jobs}: {found.lost} lost, {found.duplicated} doubled, {found.mismatched} differing, "
            f"largest logprob gap {found.largest_logprob_gap:.2g}",
            flush=True,
        )

    def _verify(self, folder: Path, trouble: Trouble) -> None:
        command = [sys.executable, "-m", "snapshot_inspect", "verify", "--read-data", trouble.store]
        environment = {**os.environ, **trouble.environment}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            self.totals.problems.append(
                f"job {self.totals.jobs}: its store does not verify ({done.returncode}): {said}"
            )
        self.totals.verified += done.returncode == 0


def kill_jobs(folder: Path, seed: int, kills: int, deadline: float | None) -> bool:
    """Whether so many kills were survived. Prints the figures."""
    began = time.monotonic()
    soak = JobSoak(folder, random.Random(seed))
    soak.run(folder, kills, deadline)
    totals = soak.totals
    for problem in totals.problems:
        print(f"PROBLEM: {problem}")
    print(
        f"kills, seed {seed}: {totals.kills} kills of {totals.jobs} jobs in {time.monotonic() - began:.0f} s: "
        f"{totals.lost} lost, {totals.doubled} doubled, {totals.differing} differing; {totals.reused} tokens reused, "
        f"{totals.generated} generated; at most {totals.twice_most} generated twice by one kill of one call "
        f"(flush {FLUSH}, over it {totals.over_the_bound} times)",
        flush=True,
    )
    return not totals.failed and (totals.kills >= kills or deadline is not None)
