"""The output was lost, in part or whole, and the store has the answers: rows are written without an engine, and what is
damaged is generated again, while no other row waits for it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from prefix_recovery import job
from recovery.config import load_config
from tests.conftest import OnLoop
from tests.engine_runs import read_back
from tests.job_files import assert_whole, lines, rows_of, write_job
from tests.job_here import run_here


class EngineAsked(Exception):
    """A run wanted to start one."""


def run_without_engine(config: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """`prefix-recovery run` in this process. Raises EngineAsked where it would start an engine."""
    monkeypatch.setattr(job, "Engine", mock.Mock(side_effect=EngineAsked))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with mock.patch.dict(os.environ):
        return job.run_job(load_config(config), job.RunOptions())


def test_answers_that_the_store_has_are_written_without_an_engine(
    engine: Any,
    on_loop: OnLoop[Any],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Byte for byte as the runs with an engine wrote them: random bytes as text, one with a stop string, and those that
    were carried on where the stop found them in their middle. As soon as one more is wanted, an engine is.
    """
    rows = lines(6, least=30, step=25)
    rows[1]["sampling"]["stop"] = ["e"]
    config = write_job(tmp_path, tiny_model, rows, flush=16)
    on_loop(run_here(engine, config, stop_at=(100, 0)))
    on_loop(run_here(engine, config))
    output = tmp_path / "results.jsonl"
    written = output.read_bytes().splitlines()
    assert len(written) == 6
    for kept in (written[2:4], []):
        output.write_bytes(b"".join(line + b"\n" for line in kept))
        assert run_without_engine(config, monkeypatch) == 0
        assert sorted(output.read_bytes().splitlines()) == sorted(written)
        assert "written without an engine" in capsys.readouterr().err
    output.unlink()
    more = write_job(tmp_path, tiny_model, [*rows, {**rows[0], "id": "one more"}], flush=16)
    with pytest.raises(EngineAsked):
        run_without_engine(more, monkeypatch)


def test_a_damaged_answer_is_generated_again_and_the_others_are_written(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others without an engine; then one is wanted."""
    rows = lines(8, least=30, step=25)
    config = write_job(tmp_path, tiny_model, rows, flush=16)
    on_loop(run_here(engine, config))
    wanted = rows_of(tmp_path)
    assert len(wanted) == 8
    (tmp_path / "results.jsonl").unlink()
    longest = max(read_back(tmp_path / "store").entries.values(), key=lambda entry: entry.n_tokens)
    segment = tmp_path / "store" / longest.chunks[-1].at.segment
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(bytes(data))
    with pytest.raises(EngineAsked):
        run_without_engine(config, monkeypatch)
    assert 0 < len(rows_of(tmp_path)) < 8
    outcome, counters = on_loop(run_here(engine, config))
    assert outcome.rows_from_store == 0 and counters.tokens_captured > 0
    assert_whole(rows_of(tmp_path), wanted)
