"""Counts that survive SIGKILL: for each sample, tokens at the start of a run and tokens decoded in it.

Owns: a memory-mapped file of int64, shape (3, samples): row 0 the tokens that the store had of each sample when the run
started, row 1 the tokens that the engine delivered for it in this run, row 2 whether the store had its whole answer.
The kernel keeps the pages when the process is killed.
Does not know: why anybody counts. `run --tally FILE` writes it; the demo and the tests read it.

Invariants:
1. What was counted before a SIGKILL is in the file after it. A loss of power may lose it: it is no
   record, but a measurement.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt


class Tally:
    """Written by one run."""

    def __init__(self, path: Path, n_samples: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._counts = np.memmap(path, dtype="<i8", mode="w+", shape=(3, max(1, n_samples)))

    def started(self, sample: int, n_tokens: int, *, ended: bool) -> None:
        self._counts[0, sample] = n_tokens
        self._counts[2, sample] = ended

    def decoded(self, sample: int, n_tokens: int) -> None:
        self._counts[1, sample] += n_tokens


def read_tally(path: Path) -> npt.NDArray[np.int64]:
    """Shape (3, samples); see the module."""
    counts = np.fromfile(path, dtype="<i8")
    return counts.reshape(3, -1).astype(np.int64)
