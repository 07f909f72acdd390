"""A stored answer that is damaged when the output was lost too: generated again, and no other row waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import OnLoop
from tests.engine_runs import read_back
from tests.job_files import assert_whole, lines, rows_of, write_job
from tests.job_here import run_here


def test_a_damaged_answer_is_generated_again_and_the_others_are_written(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path
) -> None:
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
    outcome, counters = on_loop(run_here(engine, config))
    assert 0 < outcome.rows_from_store < 8 and counters.tokens_captured > 0
    assert_whole(rows_of(tmp_path), wanted)
