"""recovery.kept_columns: a live call has the wide columns that came, whatever was cut, lost and restored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.buffer import Run
from recovery.calls import CallTable, LiveCall, StoredUpTo
from recovery.kept_columns import KeptColumns
from recovery.transcripts import ColumnRun, assemble
from tests.fakes import V0, name, request

NAMES = ("rank", "top")
STEPS = st.lists(
    st.tuples(st.integers(1, 4), st.sets(st.sampled_from(NAMES)), st.sampled_from(["", "freeze", "rewind"])),
    max_size=12,
)


def row(column: str, position: int) -> list[int]:
    return [position] if column == "rank" else [position, -position]


def columns(names: set[str], start: int, n: int) -> dict[str, np.ndarray]:
    found = {column: np.array([row(column, at) for at in range(start, start + n)], np.int32) for column in names}
    if "rank" in found:
        found["rank"] = found["rank"][:, 0]
    return found


def by_position(joined: dict[str, tuple[ColumnRun, ...]]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for column, runs in joined.items():
        for run in runs:
            for at, values in enumerate(run.values.tolist(), start=run.start):
                assert (column, at) not in found, "a position has its columns twice"
                found[column, at] = values if isinstance(values, list) else [values]
    return found


def chunks_of(taken: list[object]) -> list[Run]:
    return [item for item in taken if isinstance(item, Run)]


@given(steps=STEPS, kept=st.integers(0, 40), restored=st.integers(0, 12))
def test_columns_come_back_and_are_handed_over_again(
    steps: list[tuple[int, set[str], str]], kept: int, restored: int
) -> None:
    """Asked of the live call at any moment, and of what is frozen after a store lost everything from `kept` on."""
    table = CallTable()
    call, expected = a_call(table, restored)
    for n, names, then in steps:
        start = call.n_tokens
        call.append(list(range(n)), None, V0, columns(names, start, n))
        expected |= {(column, at): row(column, at) for column in names for at in range(start, start + n)}
        if then == "freeze":
            table.freeze()
        elif then == "rewind":
            table.rewind({name("r"): StoredUpTo(3, min(kept, call.n_tokens))})
        assert by_position(dict(call.columns)) == expected
    first = min(kept, call.n_tokens)
    table.rewind({name("r"): StoredUpTo(3, first)})
    runs = chunks_of(list(table.freeze()))
    again = {
        (column, run.start + at): values if isinstance(values, list) else [values]
        for run in runs
        for column, array in run.to_chunk().columns.items()
        for at, values in enumerate(array.tolist())
    }
    assert again == {key: value for key, value in expected.items() if key[1] >= first}
    assert by_position(dict(call.columns)) == expected
    if first == 0 and runs:
        transcript = assemble(call.request, [run.to_chunk() for run in runs])
        assert by_position(dict(transcript.columns)) == expected


def a_call(table: CallTable, restored: int) -> tuple[LiveCall, dict[tuple[str, int], list[int]]]:
    """Carried on with so many tokens, the last of which have both columns and some of the others one."""
    half = restored // 2
    prefix = {
        "rank": (ColumnRun(0, np.arange(restored, dtype=np.int32)),),
        "top": (ColumnRun(half, np.array([row("top", at) for at in range(half, restored)], np.int32).reshape(-1, 2)),),
    }
    spans = [(0, restored, V0)] if restored else []
    call = table.carry_on(request("r"), name("r"), 3, [1] * restored, [float("nan")] * restored, spans, prefix)
    expected = {("rank", at): [at] for at in range(restored)}
    return call, expected | {("top", at): row("top", at) for at in range(half, restored)}


def test_a_long_stretch_is_handed_over_in_pieces_that_fit_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.buffer.COLUMN_BYTES_PER_CHUNK_MAX", 40)
    kept = KeptColumns({"a": (ColumnRun(2, np.arange(25, dtype=np.int32)),)})
    pieces = list(kept.between(0, 30))
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 2), (2, 12), (12, 22), (22, 27), (27, 30)]
    assert pieces[0].columns == pieces[-1].columns == {}
