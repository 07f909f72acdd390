"""Stored arrays as JSON, and wide columns in words.

Owns: the form of numbers that JSON lacks, and that of wide columns in `cat`.
Does not know: documents, files.

Invariants:
1. A float of any width comes back bit for bit from its JSON form, but for the payload of a NaN.
2. A wide column is shown where it was captured and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recovery.model import Array
from recovery.transcripts import ColumnRun


def floats(values: Sequence[float]) -> list[float | str]:
    """JSON has no NaN and no infinity: they are the strings `NaN`, `Infinity`, `-Infinity`."""
    return [_float(value) for value in values]


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def columns(found: Mapping[str, tuple[ColumnRun, ...]]) -> list[dict[str, Any]]:
    """Wide columns by name and position."""
    return [
        {
            "name": name,
            "type": run.values.dtype.name,
            "width": run.values.shape[1] if run.values.ndim == 2 else 0,
            "start": run.start,
            "stop": run.stop,
            "values": _values(run.values),
        }
        for name, runs in found.items()
        for run in runs
    ]


def _values(values: Array) -> list[Any]:
    if values.dtype.kind != "f":
        return values.tolist()  # type: ignore[no-any-return]
    return floats(values.tolist()) if values.ndim == 1 else [floats(row) for row in values.tolist()]


def column_words(column: Mapping[str, Any]) -> str:
    """What a column is, but for its values."""
    width = f" x {column['width']}" if column["width"] else ""
    return f"{column['name']}, {column['type']}{width}, tokens {column['start']} to {column['stop']}"
