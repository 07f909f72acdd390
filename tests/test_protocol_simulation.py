"""Some hundreds of the schedules of tests/schedules.py; SIMULATIONS sets how many, SIMULATION_SEED the first seed.

`make soak-parts` runs ten thousand. A failure names its seed.
"""

from __future__ import annotations

import os

from tests.schedules import run_schedules


def test_random_schedules() -> None:
    """C4, C7, C8, W10: jobs, zombies, compaction and garbage collection; pins, forgets and prunes beside them."""
    n, first = int(os.environ.get("SIMULATIONS", "120")), int(os.environ.get("SIMULATION_SEED", "0"))
    figures = run_schedules(n, first)
    print(f"{n} schedules from seed {first}: {figures}")
    assert figures["fenced"] > n // 20 and figures["snapshots"] > 3 * n
    if n >= 100:
        assert all(figures.values()), figures
