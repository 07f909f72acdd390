"""`python -m examples.rl --dir DIR`: train a small model on a CPU; kill it whenever you like, and run it again.

Owns: the arguments, the configuration of the rollout and its snapshots, the exit code.
Does not know: what a life does (life.py).

Invariant:
1. The last line of stdout is one JSON object. Exit 0 only if every sample was trained on exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from examples.rl.life import Job, run
from examples.rl.moments import ALL, VARIABLE, Moments
from prefix_recovery.smollm2 import make_smollm2
from prefix_recovery.tiny import make_tiny_llama
from recovery.config import CheckpointingConfig, GymConfig, LoopConfig, RolloutConfig
from recovery.errors import ConfigError, RecoveryError

_ABOUT = """\
Reinforcement learning in one process: a vLLM engine generates answers, torch trains on them, and the new weights go
into the running engine. A reward anybody can verify: the share of an answer's characters that are a to z.

Kill it at any moment, in any way, and run the same command again: it goes on, and in the end every (prompt, sample) was
trained on exactly once. What is in DIR:

  store/        snapshots: the prompts' cursor, unfinished answers with their tokens, finished ones, versions
  checkpoints/  the trainer's own: weights, optimizer, what was trained on, and the rollout that ties it to a snapshot
  job.json      the arguments; other ones than those that DIR was begun with are refused
"""
_EPILOG = f"""\
To be killed at an exact moment, set {VARIABLE} to NAME, or NAME:N for the Nth time:
  {", ".join(ALL)}

  python -m examples.rl --dir /tmp/rl                                          # two minutes
  {VARIABLE}=weights_loaded:2 python -m examples.rl --dir /tmp/rl2   # dies within the second update
  python -m examples.rl --dir /tmp/rl2                                         # goes on
  python -m examples.rl --dir /tmp/rl3 --model smollm2 --learning-rate 1e-5    # a real language model; slow
"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        moments = Moments(os.environ.get(VARIABLE))
        job = _job(arguments)
        found = run(job, moments)
    except RecoveryError as error:
        print(f"python -m examples.rl: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found), flush=True)
    return 0 if found["lost"] == found["doubled"] == found["open_leases"] == 0 else 1


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1 is needed")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rl",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="where everything is kept; a folder of its own")
    add(
        "--model",
        default="tiny",
        help="tiny: a random Llama of 0.2 M weights; smollm2: SmolLM2-135M; or a model folder",
    )
    add("--prompts", type=_positive, default=24, help="rows of the task (default %(default)s)")
    add("--samples", type=_positive, default=4, help="answers to each prompt: a group (default %(default)s)")
    add("--batch", type=_positive, default=2, help="groups of an optimizer step (default %(default)s)")
    add("--shortest", type=_positive, default=8, help="tokens of the shortest answer (default %(default)s)")
    add("--longest", type=_positive, default=200, help="tokens of the longest answer (default %(default)s)")
    add("--learning-rate", type=float, default=1e-2, help="of AdamW (default %(default)s)")
    add("--save-every", type=_positive, default=2, help="steps between two checkpoints (default %(default)s)")
    add("--max-policy-version-lag", type=int, default=4, help="oldest tokens trained on (default %(default)s)")
    add("--snapshot-interval", type=float, default=2.0, metavar="S", help="seconds between snapshots beside those")
    return parser


def _job(arguments: argparse.Namespace) -> Job:
    folder: Path = arguments.dir
    made = {"tiny": make_tiny_llama, "smollm2": make_smollm2}.get(arguments.model)
    if made is None and not (Path(arguments.model) / "config.json").exists():
        raise ConfigError(
            f"{arguments.model} is no model folder", hint="use tiny, smollm2, or a folder with a config.json"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _check_same(folder / "job.json", {key: value for key, value in vars(arguments).items() if key != "dir"})
    model = Path(arguments.model) if made is None else made(folder / "model")
    rollout = RolloutConfig(
        max_policy_version_lag=arguments.max_policy_version_lag,
        max_executing_groups=4,
        completed_prefetch_groups=max(8, arguments.batch),
    )
    snapshots = CheckpointingConfig(
        enabled=True,
        store=str(folder / "store"),
        gym=GymConfig(generation_chunk_flush_tokens=16),
        snapshot_interval_s=arguments.snapshot_interval,
    )
    return Job(
        folder=folder,
        model=model,
        loop=LoopConfig(rollout_checkpointing=snapshots, rollout=rollout),
        prompts=arguments.prompts,
        samples=arguments.samples,
        batch=arguments.batch,
        shortest=arguments.shortest,
        longest=arguments.longest,
        learning_rate=arguments.learning_rate,
        save_every=arguments.save_every,
    )


def _check_same(path: Path, given: dict[str, Any]) -> None:
    text = json.dumps(given, indent=1)
    if not path.exists():
        new = path.with_name(f"{path.name}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored != given:
        changed = ", ".join(
            f"--{name.replace('_', '-')} {stored.get(name)}, now {value}"
            for name, value in given.items()
            if stored.get(name) != value
        )
        raise ConfigError(
            f"{path} was begun with other arguments: {changed}",
            hint="give those in it, or another --dir",
        )
