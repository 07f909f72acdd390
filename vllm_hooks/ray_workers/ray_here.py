"""A Ray to run on: one that runs somewhere, or one of this process's own.

Owns: connecting, starting and ending it, and what one worker asks of it.
Does not know: which actors there are.

Invariants:
1. A Ray that was started here ends with this process.
2. A Ray that was started here has room for every worker as far as CPUs go: nobody else uses it, and how many engines a
   machine is to carry is for who asks for them. GPUs are counted everywhere.
3. It ends nobody because the machine's memory is nearly used, by whoever: what memory a job takes is the same matter
   in one process and in several. (`RAY_memory_monitor_refresh_ms` in the environment has the last word.)
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from recovery.config import RayConfig
from recovery.errors import ConfigError


@contextmanager
def connected(config: RayConfig, workers: int, folder: Path, more_cpus: int = 0) -> Iterator[None]:
    """A Ray: the one at `config.address`, or one of this process's own on this machine, with its files in `folder`.

    Sockets lie in that folder: its path must be short. `workers`: how many processes it makes ready at once;
    `more_cpus`: that others than the workers need in one's own.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    arguments: dict[str, Any] = {
        "namespace": f"prefix-recovery-{secrets.token_hex(4)}",
        "logging_level": "ERROR",
        "log_to_driver": False,
    }
    if config.address is not None:
        environment = {"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}
        arguments |= {"address": config.address, "runtime_env": {"env_vars": environment}}
    else:
        os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
        cpus = math.ceil(workers * config.cpus_per_worker) + more_cpus
        arguments |= {"num_cpus": cpus, "include_dashboard": False, "_temp_dir": str(folder)}
    try:
        ray.init(**arguments)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = config.address or "this machine"
        raise ConfigError(f"Ray at {where} cannot be used: {error}", hint="check `ray.address`") from error
    try:
        yield
    finally:
        ray.shutdown()


def restarts_of(handle: Any) -> int:
    """How often Ray has begun to start an actor again. Blocks.

    Only the table of actors says it: a call to an actor that is being started again fails at once, and so does not tell
    one death from a slow start. (Ray's public way to that table needs its dashboard.)
    """
    found: dict[str, Any] = ray._private.state.actors(handle._actor_id.hex())
    return int(found.get("NumRestarts", 0))


def worker_options(config: RayConfig) -> dict[str, Any]:
    """Of an actor with an engine."""
    options: dict[str, Any] = {
        "num_cpus": 0 if config.address is None else config.cpus_per_worker,
        "max_restarts": -1,
        "max_concurrency": 1000,
    }
    if config.gpus_per_worker:
        options["num_gpus"] = config.gpus_per_worker
    return options
