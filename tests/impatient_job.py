"""`prefix-recovery`, whose driver takes a coordinator for stalled after SILENT_S: for the test that stalls one.

Owns: that number.
Does not know: what is stalled when.
"""

from __future__ import annotations

import functools

from prefix_recovery import job_on_ray
from prefix_recovery.cli import command
from vllm_hooks.ray_workers.link import CoordinatorLink

SILENT_S = 8.0

if __name__ == "__main__":
    job_on_ray.CoordinatorLink = functools.partial(CoordinatorLink, silent_s=SILENT_S)  # type: ignore[assignment,misc]
    command()
