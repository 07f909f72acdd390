"""`python -m tests.soak`: protocol, job, racing coordinators, the trainer of examples/rl, cut calls, at random.

Schedules: random schedules of the protocol's own code on stores in memory (schedules.py), one after another.

Rollouts: random schedules of a trainer, an evaluator and snapshots on one rollout, with deaths (rollout_worlds.py).

Kills: jobs of the tiny model run one after another, each killed several times (job_soak.py).

Races: rounds of two coordinator processes of which one is stopped and woken (racing.py), on disk and on two S3 servers.

Ray rounds: jobs of two workers on Ray, whose coordinator, engines, workers and everything are killed (ray_soak.py).

RL kills: the example examples/rl is killed at random (rl_soak.py).

Server kills: the OpenAI server is killed at random under clients that want whole messages (server_soak.py).

Parity: calls of every kind are cut and carried on (parity.py): in float32, in bfloat16 with the bit-exact settings,
and, to be told and not to be judged, in bfloat16 without them.

With --for there is one timed loop instead, in which all of this and more comes in turn (soak_loop.py).

Owns: the parts, the exit code: 0 only if nothing was lost, doubled or different, and all of it was achieved.
Does not know: what a part does.

The same --seed gives the same jobs, plans of kills and rounds; where a moment hits depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from storage_backends.testing import servers
from tests import rollout_worlds, virtual_loop
from tests.job_soak import kill_jobs
from tests.racing import Place, race
from tests.ray_soak import kill_workers
from tests.rl_soak import kill_trainers
from tests.schedules import run_schedules
from tests.server_soak import kill_servers
from tests.soak_loop import loop


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
    parser.add_argument("--ray-rounds", type=int, default=0, help="of jobs on Ray with four kills each")
    parser.add_argument("--schedules", type=int, default=10_000, help="of the protocol simulation; 0: none")
    parser.add_argument("--parity", type=int, default=232, help="cut calls that are carried on; 0: none")
    parser.add_argument("--rollouts", type=int, default=10_000, help="schedules of a rollout; 0: none")
    parser.add_argument("--seed", type=int, default=None, help="default: random, printed")
    parser.add_argument("--seconds", type=float, default=None, help="stop each part after so long, with what was done")
    parser.add_argument("--dir", type=Path, default=None, help="keep everything here (default: a temporary folder)")
    parser.add_argument(
        "--for", type=float, default=None, dest="for_s", metavar="SECONDS", help="one timed loop of all"
    )
    parser.add_argument("--episode", type=int, default=None, help="of the loop: this one alone")
    arguments = parser.parse_args()
    seed = int.from_bytes(os.urandom(4), "little") if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="prefix-recovery-soak-")) if arguments.dir is None else arguments.dir
    print(f"seed {seed}, in {folder}", flush=True)
    if arguments.for_s is not None:
        of_loop = {"race": race_coordinators, "schedules": run_simulations, "rollouts": run_rollouts}
        fine = loop(folder, seed, arguments.for_s, of_loop, arguments.episode)
        if arguments.dir is None and fine:
            shutil.rmtree(folder, ignore_errors=True)
        return 0 if fine else 1
    fine = True
    parts = (
        ("schedules", run_simulations, arguments.schedules),
        ("rollouts", run_rollouts, arguments.rollouts),
        ("kills", kill_jobs, arguments.kills),
        ("races", race_coordinators, arguments.races),
        ("rl", kill_trainers, arguments.rl_kills),
        ("servers", kill_servers, arguments.server_kills),
        ("ray", kill_workers, arguments.ray_rounds),
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
