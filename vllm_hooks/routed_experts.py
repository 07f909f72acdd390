"""Which experts each token was routed to: from an engine's rows to a wide column, and back.

Owns: the column, whose name says how many layers and experts a row has, and which row belongs to which token.
Does not know: buffers, stores, when rows are read. Nothing captures them yet: no engine that reports experts runs on a
CPU (docs/decisions/0026).

Invariants:
1. vLLM's row p is the routing of input position p, and the token after it was sampled from it: the column of generated
   token i is row `n_prompt - 1 + i`. The rows before belong to the prompt, and are computed again with it.
2. What was not captured is not made up: where a token has no row, there are none at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from recovery.model import Array
from recovery.transcripts import ColumnRun

_NAME = re.compile(r"routed_experts\.(\d+)x(\d+)")


def column_name(n_layers: int, n_experts: int) -> str:
    return f"routed_experts.{n_layers}x{n_experts}"


def columns_of(rows: Array, first_position: int, n_prompt: int, start: int, stop: int) -> dict[str, Array]:
    """The column of generated tokens [start, stop), of `rows` of shape (positions, layers, experts).

    `first_position`: of the first row (the request's `routed_experts_prompt_start`). Raises ValueError if the engine
    has not reported them all yet.
    """
    begin, end = n_prompt - 1 + start - first_position, n_prompt - 1 + stop - first_position
    if begin < 0 or end > len(rows):
        raise ValueError(f"rows {begin} to {end} are asked for, and the engine has reported {len(rows)}")
    own = np.ascontiguousarray(rows[begin:end])
    return {column_name(*own.shape[1:]): own.reshape(len(own), -1)}


def rows_of(columns: Mapping[str, tuple[ColumnRun, ...]], n_tokens: int) -> Array | None:
    """Rows (tokens, layers, experts) of all saved tokens; None unless each of them has one."""
    for name, runs in columns.items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        stops = [0, *(run.stop for run in runs)]
        if [run.start for run in runs] != stops[:-1] or stops[-1] != n_tokens:
            return None
        values = np.concatenate([run.values for run in runs])
        return values.reshape(n_tokens, int(match[1]), int(match[2]))
    return None


def whole(prompt_rows: Array, saved: Array, fresh: Array) -> Array:
    """What an uninterrupted call would have got: the prompt's rows but the last, the saved ones, the new ones."""
    return np.concatenate([prompt_rows, saved, fresh])
