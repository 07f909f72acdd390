"""`python -m tests.soak`: protocol, job, racing coordinators, the trainer of examples/rl, cut calls, at random.

Schedules: random schedules of the protocol's own code on stores in memory (schedules.py), one after another.

Rollouts: random schedules of a trainer, an evaluator and snapshots on one rollout, with deaths (rollout_worlds.py).

Kills: jobs of the tiny model run one after another. Each is killed several times: after a random number of decoded
tokens, or at a random moment, which hits the start of the engine, the restore and the end too; then it runs to its end
and every row is compared with an uninterrupted run. Kills of the client alone come in between.

Races: rounds of two coordinator processes of which one is stopped and woken (racing.py), on disk and on two S3 servers.

RL kills: the example examples/rl is killed at random (rl_soak.py).

Server kills: the OpenAI server is killed at random under clients that want whole messages (server_soak.py).

Parity: calls of every kind are cut and carried on (parity.py): in float32, in bfloat16 with the bit-exact settings,
and, to be told and not to be judged, in bfloat16 without them.

Owns: when a kill comes, the figures, the exit code: 0 only if nothing was lost, doubled or different, and all of it was
achieved.
Does not know: how a job runs. It starts `prefix-recovery run` as anybody would.

The same --seed gives the same jobs, plans of kills and rounds; where a moment hits depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefix_recovery.interrupted import JobFigures, compare
from prefix_recovery.tiny import make_tiny_llama
from storage_backends.testing import servers
from tests import rollout_worlds, virtual_loop
from tests.job_files import FLUSH, lines, rows_of, write_job
from tests.job_processes import JobProcess, run, running, wait_until
from tests.racing import Place, race
from tests.rl_soak import kill_trainers
from tests.schedules import run_schedules
from tests.server_soak import kill_servers

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
    problems: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.lost or self.doubled or self.differing or self.problems)


class Soak:
    """One soak in a folder; `rng` draws everything."""

    def __init__(self, folder: Path, rng: random.Random, kills: int, deadline: float | None) -> None:
        self._folder = folder
        self._rng = rng
        self._wanted = kills
        self._deadline = deadline
        self.totals = Totals()

    def run(self) -> Totals:
        model = make_tiny_llama(self._folder / "tiny")
        rows = lines(16, least=200, step=30)
        reference = self._finished(write_job(self._folder / "reference", model, rows, block={"enabled": False}))
        while self._more():
            self._job(model, rows, reference)
        return self.totals

    def _more(self) -> bool:
        in_time = self._deadline is None or time.monotonic() < self._deadline
        return self.totals.kills < self._wanted and in_time and not self.totals.failed

    def _finished(self, config: Path) -> list[dict[str, Any]]:
        job = run(config, "whole")
        if job.process.returncode != 0:
            raise SystemExit(f"the uninterrupted run failed:\n{job.text[-4000:]}")
        return rows_of(config.parent)

    def _job(self, model: Path, rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
        self.totals.jobs += 1
        folder = self._folder / f"job-{self.totals.jobs}"
        interval_s = self._rng.choice([0.3, 1.0, 3600.0])
        config = write_job(folder, model, rows, block={"snapshot_interval_s": interval_s})
        print(f"job {self.totals.jobs}: snapshots every {interval_s} s", flush=True)
        figures = JobFigures()
        for number in range(KILLS_PER_JOB):
            if not self._more():
                break
            job = self._killed(config, f"run-{number}")
            figures.runs.append(job.figures())
            if not job.killed:
                break
        last = run(config, "last")
        figures.runs.append(last.figures())
        if last.process.returncode != 0:
            self.totals.problems.append(f"job {self.totals.jobs} ended with code {last.process.returncode}")
            print(last.text[-4000:], flush=True)
        self._judge(folder, figures, reference)

    def _killed(self, config: Path, name: str) -> JobProcess:
        """One run that is killed, unless it ends before."""
        alone = self._rng.random() < 0.15
        by_tokens = self._rng.random() < 0.6
        tokens = self._rng.randint(1, 1200)
        moment_s = self._rng.uniform(_SHORTEST_START_S, _LONGEST_START_S)
        with running(config, name) as job:
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
            elif job.process.returncode != 0:
                self.totals.problems.append(f"{name} of job {self.totals.jobs} ended: {job.process.returncode}")
                print(job.text[-4000:], flush=True)
            wait_until(lambda: not any(child.alive() for child in children), "the engine followed its client", 30)
        when = f"{job.decoded} tokens" if by_tokens else f"{moment_s:.1f} s"
        what = ("client killed" if alone else "killed") if job.killed else "ended by itself"
        counts = job.counts()
        kept = 0 if counts is None else int((counts[0] * (counts[2] == 0)).sum())
        print(f"  kill {self.totals.kills}: {what} after {when}; it had begun with {kept} tokens", flush=True)
        return job

    def _judge(self, folder: Path, figures: JobFigures, reference: list[dict[str, Any]]) -> None:
        found = compare(rows_of(folder), reference)
        totals = self.totals
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
        print(
            f"  job {totals.jobs}: {found.lost} lost, {found.duplicated} doubled, {found.mismatched} differing, "
            f"largest logprob gap {found.largest_logprob_gap:.2g}",
            flush=True,
        )


def kill_jobs(folder: Path, seed: int, kills: int, deadline: float | None) -> bool:
    """Whether so many kills were survived. Prints the figures."""
    began = time.monotonic()
    totals = Soak(folder, random.Random(seed), kills, deadline).run()
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


def race_coordinators(folder: Path, seed: int, rounds: int, deadline: float | None) -> bool:
    """Whether so many rounds went well, on disk, on moto and on SeaweedFS in turn. Prints the figures."""
    began = time.monotonic()
    for name in ("disk", "moto", "seaweedfs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    started = [servers.start_moto(), servers.start_seaweedfs(folder / "seaweedfs")]
    try:
        for server in started:
            server.make_bucket(servers.BUCKET)
        places = [Place("disk", folder / "disk")]
        places += [Place(server.name, folder / server.name, server.url) for server in started]
        figures = race(places, seed, rounds, deadline)
    finally:
        for server in started:
            server.stop()
    for problem in figures.problems:
        print(f"PROBLEM: {problem}")
    print(f"races, seed {seed}: {figures}, {time.monotonic() - began:.0f} s", flush=True)
    return not figures.problems and (figures.rounds >= rounds or deadline is not None)


def run_simulations(folder: Path, seed: int, n: int, deadline: float | None) -> bool:
    """Whether so many random schedules of the protocol broke no rule. Prints the figures; a failure names its seed."""
    began = time.monotonic()
    figures: Counter[str] = Counter()
    done = 0
    first = seed % 10**9
    while done < n and (deadline is None or time.monotonic() < deadline):
        some = min(100, n - done)
        figures.update(run_schedules(some, first + done))
        done += some
    print(f"{done} schedules from seed {first}: {dict(figures)}, {time.monotonic() - began:.0f} s", flush=True)
    return done == n or deadline is not None


def compare_cut_calls(folder: Path, seed: int, pairs: int, deadline: float | None) -> bool:
    """Whether every call that was carried on is the call that would have been. Prints the figures."""
    began = time.monotonic()
    fine = True
    for dtype, split, n in (("float32", "0", pairs), ("bfloat16", "0", pairs // 2), ("bfloat16", "1", pairs // 2)):
        command = [sys.executable, "-m", "tests.parity", "--pairs", str(n), "--seed", str(seed), "--dtype", dtype]
        if deadline is not None:
            command += ["--seconds", str(max(1.0, deadline - time.monotonic()))]
        environment = {**os.environ, "VLLM_CPU_ATTN_SPLIT_KV": split}
        ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if not ran.stdout.strip():
            print(f"PROBLEM: {' '.join(command[2:])} ended with code {ran.returncode}")
            return False
        found = json.loads(ran.stdout.splitlines()[-1])
        gaps = [one["best_gap"] for one in found["different"] if one["best_gap"] is not None]
        print(
            f"parity, seed {seed}, {dtype}, split KV {'off' if split == '0' else 'on'}: {found['exact']} of "
            f"{found['pairs']} pairs exact ({found['kinds']} kinds, {found['sampled']} sampled, "
            f"{found['cut_thrice']} cut three times, "
            f"{found['tied']} with best tokens of one logprob swapped), "
            f"largest logprob gap {found['largest_logprob_gap']:.2g}"
            + (f", two best logits at most {max(gaps):.2g} apart where tokens part" if gaps else ""),
            flush=True,
        )
        if split == "0":
            for one in found["different"]:
                print(f"PROBLEM: {one}")
            fine = fine and found["exact"] == found["pairs"] and (found["pairs"] >= n or deadline is not None)
    print(f"parity: {time.monotonic() - began:.0f} s", flush=True)
    return fine


def run_rollouts(folder: Path, seed: int, n: int, deadline: float | None) -> bool:
    """Whether no random schedule of a rollout lost, doubled or trained what is too old. A failure names its seed."""
    began, first, done = time.monotonic(), seed % 10**9, 0
    counts: Counter[str] = Counter()
    while done < n and (deadline is None or time.monotonic() < deadline):
        try:
            counts += virtual_loop.run(rollout_worlds.schedule(first + done))
        except BaseException as error:
            error.add_note(f"SCHEDULE_SEED={first + done} SCHEDULES=1 pytest tests/test_rollout.py -k schedule")
            raise
        done += 1
    print(
        f"{done} schedules of a rollout from seed {first}: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True
    )
    return done == n or deadline is not None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="of jobs; 0: none")
    parser.add_argument("--races", type=int, default=100, help="rounds of two coordinators; 0: none")
    parser.add_argument("--rl-kills", type=int, default=10, help="of the trainer of examples/rl; 0: none")
    parser.add_argument("--server-kills", type=int, default=5, help="of the OpenAI server under clients; 0: none")
    parser.add_argument("--schedules", type=int, default=10_000, help="of the protocol simulation; 0: none")
    parser.add_argument("--parity", type=int, default=232, help="cut calls that are carried on; 0: none")
    parser.add_argument("--rollouts", type=int, default=10_000, help="schedules of a rollout; 0: none")
    parser.add_argument("--seed", type=int, default=None, help="default: random, printed")
    parser.add_argument("--seconds", type=float, default=None, help="stop each part after so long, with what was done")
    parser.add_argument("--dir", type=Path, default=None, help="keep everything here (default: a temporary folder)")
    arguments = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="prefix-recovery-soak-")) if arguments.dir is None else arguments.dir
    print(f"seed {seed}, in {folder}", flush=True)
    fine = True
    parts = (
        ("schedules", run_simulations, arguments.schedules),
        ("rollouts", run_rollouts, arguments.rollouts),
        ("kills", kill_jobs, arguments.kills),
        ("races", race_coordinators, arguments.races),
        ("rl", kill_trainers, arguments.rl_kills),
        ("servers", kill_servers, arguments.server_kills),
        ("parity", compare_cut_calls, arguments.parity),
    )
    for name, part, n in parts:
        if n:
            (folder / name).mkdir(parents=True, exist_ok=True)
            deadline = None if arguments.seconds is None else time.monotonic() + arguments.seconds
            fine = part(folder / name, seed, n, deadline) and fine
    if arguments.dir is None and fine:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
