"""What the self-test saw on an engine like this one, kept for the next start.

Owns: where it lies, and what "like this one" is: everything that is known of engine, machine and environment.
Does not know: the test (parity.py), what a grade is good for.

Invariants:
1. Another version, setting, model, machine or number of threads is another engine, and is tested anew.
2. A file that cannot be read as what it should be counts for nothing. Without a place to write to, nothing is kept.
3. A grade from here says that it is an earlier one. A test that found anything amiss is not kept: it is run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recovery import notes
from vllm_hooks.parity import Parity

VARIABLE = "PREFIX_RECOVERY_CACHE"
"""Environment variable: the folder; empty: nothing is kept, every start tests."""

TEST = 2
"""Number of the self-test; a test that tests something else has another."""


def folder() -> Path | None:
    """Where grades are kept: `$PREFIX_RECOVERY_CACHE`, else below the user's cache folder."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "prefix-recovery"


def key_of(engine: Any, fields: Mapping[str, Any]) -> str:
    """`fields`: what is known of the engine (fingerprint.engine_fields, both parts together)."""
    import torch

    config = engine.vllm_config
    scheduler = config.scheduler_config
    known = {
        "test": TEST,
        "fields": dict(fields),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_", "OMP_", "MKL_"))
        },
        "compute": config.compute_hash(),
        "scheduler": [scheduler.max_num_batched_tokens, scheduler.max_num_seqs, str(scheduler.policy)],
        "block_size": config.cache_config.block_size,
        "cores": len(os.sched_getaffinity(0)),
        "device": _device(torch),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _device(torch: Any) -> list[str]:
    names = [f"{torch.cuda.get_device_name(at)}" for at in range(torch.cuda.device_count())]
    return [*names, str(torch.backends.cpu.get_cpu_capability()), _processor()]


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return ""


def load(key: str, where: Path | None) -> Parity | None:
    """The grade of an engine like this one, if there is one."""
    if where is None:
        return None
    try:
        note = (where / f"parity-{key}.json").read_bytes()
    except OSError:
        return None
    found = notes.object_in(note) or {}
    grade, n_calls, gap = found.get("grade"), notes.whole(found.get("n_calls"), 1, 2**31), found.get("largest_gap")
    if grade not in ("bitwise", "token") or n_calls is None or type(gap) is not float or not 0 <= gap < math.inf:
        return None
    return Parity(grade, n_calls, 0, gap, pull_agrees=True, earlier=True)


def store(key: str, parity: Parity, where: Path | None) -> None:
    """Keep a grade; whole or not at all. A cache only saves seconds: one that cannot be written is done without."""
    if where is None or parity.divergences or not parity.pull_agrees or not parity.n_calls:
        return
    fields = {"grade": parity.grade, "n_calls": parity.n_calls, "largest_gap": parity.largest_gap}
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix="parity-", suffix=".new", dir=where)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(fields, file)
        os.replace(name, where / f"parity-{key}.json")
