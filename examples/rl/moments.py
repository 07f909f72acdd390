"""Dying on purpose: a named moment of the loop at which this process sends itself SIGKILL.

Owns: the names of all moments, and the environment variable that picks one.
Does not know: what is done between them.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

from recovery.admission.training import MOMENTS
from recovery.errors import ConfigError

VARIABLE = "PREFIX_RECOVERY_RL_DIE_AT"
"""NAME or NAME:N, the Nth time."""

OWN = ("restored", "weights_written", "weights_loaded", "checkpoint_written", "finished")
"""Those of this example beside the loop's: between restore and the first push, inside a push, before the rename."""
ALL = (*MOMENTS, *OWN)


class Moments:
    """Call it with each moment's name."""

    def __init__(self, wanted: str | None) -> None:
        name, _, times = (wanted or "").partition(":")
        if name and (name not in ALL or (times and not times.isdigit())):
            raise ConfigError(
                f"{VARIABLE}={wanted} is no moment", hint=f"use one of {', '.join(ALL)}, with :N or without"
            )
        self._name, self._times = name, int(times or 1)
        self._seen: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        assert name in ALL, name
        self._seen[name] += 1
        if name == self._name and self._seen[name] == self._times:
            # The engine's processes too where they are a group of ours, as when a machine is taken away.
            group = os.getpgrp()
            (os.killpg if group == os.getpid() else os.kill)(os.getpid(), signal.SIGKILL)
