"""A real job carried to another store in the middle: exported, imported in the other encoding, and gone on with there.

Owns: that the rows of such a job are those of one that was never interrupted.
Does not know: what is in a file (test_export.py, test_import.py), kills (test_run.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from snapshot_inspect import cli
from tests.conftest import OnLoop
from tests.job_files import assert_whole, lines, rows_of, write_job
from tests.job_here import run_here


def test_a_job_goes_on_from_a_store_that_was_carried_as_one_file(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path
) -> None:
    rows = lines(6, least=20, step=60)  # at 200 tokens, 33 a call, the first has ended and no other
    on_loop(run_here(engine, write_job(tmp_path / "whole", tiny_model, rows)))
    here = write_job(tmp_path / "here", tiny_model, rows)
    on_loop(run_here(engine, here, stop_at=(200, 1)))
    assert 1 <= len(rows_of(tmp_path / "here")) < 6

    file = str(tmp_path / "carried.zip")
    assert cli.main(["export", "--adopt", str(tmp_path / "here" / "store"), file]) == 0
    there = write_job(tmp_path / "there", tiny_model, rows, block={"codec": "zarr"})
    assert cli.main(["import", file, str(tmp_path / "there" / "store"), "--codec", "zarr"]) == 0
    shutil.copy(tmp_path / "here" / "results.jsonl", tmp_path / "there" / "results.jsonl")

    _, counters = on_loop(run_here(engine, there))
    assert counters.tokens_reused > 0 and counters.calls_restored > 0
    assert_whole(rows_of(tmp_path / "there"), rows_of(tmp_path / "whole"))
    assert any(row["resumes"] for row in rows_of(tmp_path / "there"))
    assert cli.main(["verify", "--read-data", str(tmp_path / "there" / "store")]) == 0
