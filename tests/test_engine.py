"""prefix_recovery.engine without an engine: what is set where the config says nothing, and how its process is made."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from prefix_recovery.engine import default_arguments, is_cpu_build


def test_each_start_has_a_seed_of_its_own() -> None:
    """With one seed at every start a continued job would repeat the random draws of the run before it."""
    seeds = {default_arguments({})["seed"] for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**31 for seed in seeds)


def test_the_share_of_memory_fits_what_is_free() -> None:
    assert is_cpu_build(), "the tests run on the CPU build"
    assert 0 < default_arguments({})["gpu_memory_utilization"] <= 0.5
    alone, beside = (default_arguments({}, n)["gpu_memory_utilization"] for n in (1, 4))
    assert 0 < beside <= 0.5 / 4 and beside < alone
    assert "gpu_memory_utilization" not in default_arguments({"kv_cache_memory_bytes": 1 << 28})


@pytest.mark.parametrize(
    ("before", "forks"),
    [
        ("", True),
        ("import torch; torch.set_num_threads(2)", False),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
    ],
)
def test_s4_an_engine_is_forked_from_one_thread_only(before: str, forks: bool) -> None:
    """S4: a child of a process whose torch has a pool of threads would wait for them at its first parallel loop."""
    program = f"{before}\nfrom prefix_recovery.engine import may_fork\nprint(may_fork())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(forks)]
