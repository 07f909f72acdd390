"""Loss masks as runs: where the value changes, and what it is from there.

Owns: masks of many chunks to runs and back, in one go.
Does not know: Arrow, records.

Invariants:
1. The first run of a mask starts at 0, starts increase and stay below the mask's length, values alternate: there is
   exactly one way to write a mask.
2. `unpack(pack(masks)) == masks`; runs that break rule 1 are refused by `problem`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of several masks, one mask after the other; mask i has runs [positions[i], positions[i + 1])."""

    starts: Array
    values: Array
    positions: Array


def pack(mask: Array, bounds: Array) -> Runs:
    """Runs of the masks `mask[bounds[i]:bounds[i + 1]]`, none of which is empty."""
    changes = np.empty(mask.size, np.bool_)
    changes[1:] = mask[1:] != mask[:-1]
    changes[bounds[:-1]] = True
    at = np.flatnonzero(changes)
    positions = np.searchsorted(at, bounds)
    lengths = positions[1:] - positions[:-1]
    return Runs(at - np.repeat(bounds[:-1], lengths), mask[at], positions)


def problem(runs: Runs, bounds: Array) -> str:
    """Which rule the runs of masks with these bounds break; empty if none."""
    lengths = runs.positions[1:] - runs.positions[:-1]
    if (lengths < 1).any():
        return "a mask has no run"
    first = np.zeros(runs.starts.size, np.bool_)
    first[runs.positions[:-1]] = True
    if (runs.starts[first] != 0).any():
        return "the first run of a mask does not start at 0"
    later = np.flatnonzero(~first)
    if (runs.starts[later] <= runs.starts[later - 1]).any():
        return "the runs of a mask are not in order"
    if (runs.values[later] == runs.values[later - 1]).any():
        return "two runs of a mask that follow each other have one value"
    if (runs.starts[runs.positions[1:] - 1] >= bounds[1:] - bounds[:-1]).any():
        return "a run starts behind the end of its mask"
    return ""


def unpack(runs: Runs, bounds: Array) -> Array:
    """The masks, one after the other; only for runs without a problem."""
    lengths = runs.positions[1:] - runs.positions[:-1]
    begins = np.append(runs.starts + np.repeat(bounds[:-1], lengths), bounds[-1])
    return np.repeat(runs.values, np.diff(begins))
