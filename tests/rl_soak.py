"""The example of reinforcement learning, killed at random: part of `python -m tests.soak` (--rl-kills).

One uninterrupted job of 64 prompts with heavy-tailed lengths first, then jobs that are killed several times each: at a
named moment of the loop, while it generates, or at any moment of a life, its start among them.

Owns: when a kill comes, the figures, and what is compared: the multiset of (prompt, sample, tokens) trained, the mean
length, open leases.
Does not know: how a life is started (rl_lives.py).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

from examples.rl.moments import ALL
from tests.rl_lives import Life, live, trained

ARGUMENTS = ["--prompts", "64", "--samples", "2", "--longest", "300", "--save-every", "3"]
KILLS_PER_JOB = 5


def kill_trainers(folder: Path, seed: int, kills: int, deadline: float | None) -> bool:
    """Whether so many kills were survived. Prints the figures."""
    began, rng = time.monotonic(), random.Random(f"rl {seed}")
    whole = live(folder / "whole", ARGUMENTS, timeout_s=900)
    if whole.returncode != 0:
        print(f"PROBLEM: the uninterrupted run failed:\n{whole.text[-4000:]}")
        return False
    expected, figures = trained(folder / "whole"), whole.figures
    done, jobs, reused, problems, how = 0, 0, 0, 0, Counter[str]()
    while done < kills and not problems and (deadline is None or time.monotonic() < deadline):
        jobs += 1
        one = folder / f"job-{jobs}"
        for _ in range(min(KILLS_PER_JOB, kills - done)):
            name, life = _killed(one, rng)
            if not life.killed:
                problems += life.returncode != 0
                break
            done += 1
            how[name] += 1
            print(f"  rl kill {done}: {name}; {steps_of(life.text)} steps in that life", flush=True)
        last = live(one, ARGUMENTS, timeout_s=900)
        if last.returncode != 0 or trained(one) != expected:
            problems += 1
            print(f"PROBLEM: job {jobs} ended with {last.returncode}:\n{last.text[-4000:]}")
            continue
        found = last.figures
        reused += found["tokens_reused"]
        problems += found["mean_tokens"] != figures["mean_tokens"] or found["open_leases"] != 0
        print(f"  rl job {jobs}: {found}", flush=True)
    print(
        f"rl, seed {seed}: {done} kills of {jobs} jobs {dict(how)} in {time.monotonic() - began:.0f} s: "
        f"{sum(expected.values())} (prompt, sample) trained once each in every job, {figures['mean_tokens']} tokens "
        f"in the mean with kills and without, {reused} tokens reused by the last lives, {problems} problems",
        flush=True,
    )
    return not problems and (done >= kills or deadline is not None)


def steps_of(text: str) -> int:
    """Batches that a life said it trained."""
    return sum(line.startswith("rollout ") for line in text.splitlines())


def _killed(folder: Path, rng: random.Random) -> tuple[str, Life]:
    """One life that is killed, unless it ends before; and how it was."""
    kind = rng.random()
    if kind < 0.5:
        name = f"{rng.choice([one for one in ALL if one != 'finished'])}:{rng.randint(1, 3)}"
        return name, live(folder, ARGUMENTS, die_at=name, timeout_s=900)
    if kind < 0.8:
        steps, wait_s = rng.randint(0, 6), rng.uniform(0, 1.5)
        since: list[float] = []

        def after_steps(text: str) -> bool:
            if "life " in text and steps_of(text) >= steps and not since:
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] >= wait_s

        return f"{wait_s:.2f} s after step {steps}", live(folder, ARGUMENTS, kill_when=after_steps, timeout_s=900)
    moment_s, began = rng.uniform(0.5, 25.0), time.monotonic()
    return f"after {moment_s:.1f} s", live(
        folder, ARGUMENTS, kill_when=lambda text: time.monotonic() - began >= moment_s, timeout_s=900
    )
