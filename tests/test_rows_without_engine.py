"""Rows of answers that the store has, by a run that starts no engine: in one process or as a job on Ray, from snapshots
or from flushes alone; and when an engine is started all the same.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from prefix_recovery import job, job_on_ray
from prefix_recovery.job_here import job_here
from prefix_recovery.tiny import make_tiny_llama
from recovery.config import load_config
from recovery.log_reading import find_tail, kept_snapshots
from storage_backends import open_store
from storage_backends.local import LocalStore
from tests import inspect_stores
from tests.inspect_stores import say
from tests.job_files import rows_of, write_job

ROWS = [{"id": name, "prompt_token_ids": [3, 4, k]} for k, name in enumerate("abc")]


class EngineAsked(Exception):
    """A run wanted to start one, or Ray."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def leave(config: Path, *, ended: int, begun: int = 0, published: bool = True) -> None:
    """A store as a killed run leaves it: of the first `ended` prompts the answer, of `begun` more two tokens."""
    here = job_here(str(config))
    (config.parent / "store").mkdir()
    killed = inspect_stores.Job(LocalStore(config.parent / "store"), must=here.must)
    for k, row in enumerate(ROWS[: ended + begun]):
        name = f"{row['id']}#0"
        call = killed.open(name, row["prompt_token_ids"], source_digest=here.source_digests[name])
        say(call, 40 + k, 200, logprobs=[-0.5, float("-inf")])
        if k < ended:
            say(call, 41, logprobs=[-0.25])
            call.end("length", None)
    if published:
        killed.snapshot()
    else:
        killed.flush()
    killed.close()


def run(config: Path, monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> int:
    monkeypatch.setattr(job, "Engine", mock.Mock(side_effect=EngineAsked))
    monkeypatch.setattr(job_on_ray, "connected", mock.Mock(side_effect=EngineAsked))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with mock.patch.dict(os.environ):
        return job.run_job(
            load_config(config, [f"{key}={json.dumps(value)}" for key, value in overrides.items()]), job.RunOptions()
        )


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("published", [True, False])
def test_answers_of_all_that_lack_a_row(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: int,
    published: bool,
) -> None:
    """Snapshots or flushes alone, one engine or, with `workers`, a job on Ray: neither an engine nor Ray is asked."""
    config = write_job(tmp_path, model, ROWS)
    leave(config, ended=3, published=published)
    assert run(config, monkeypatch, workers=workers) == 0
    rows = rows_of(tmp_path)
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert [row["token_ids"] for row in rows] == [[40 + k, 200, 41] for k in range(3)]
    assert all(row["logprobs"] == [-0.5, "-Infinity", -0.25] and not row["resumes"] for row in rows)
    assert {row["finish_reason"] for row in rows} == {"length"} and all(row["text"] for row in rows)
    assert "without an engine" in capsys.readouterr().err
    store = open_store(tmp_path / "store")
    newest = next(kept_snapshots(store, find_tail(store)))
    assert newest.body["cause"] == "final", "as every run that ends by itself"
    written = (tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "results.jsonl").write_bytes(written[1])
    assert run(config, monkeypatch, workers=workers) == 0
    assert sorted((tmp_path / "results.jsonl").read_bytes().splitlines(keepends=True)) == sorted(written)


@pytest.mark.parametrize(("ended", "begun"), [(2, 1), (2, 0)])
def test_an_engine_is_started_for_what_is_not_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, begun: int
) -> None:
    """One call was cut, or not begun: no row is written before the engine is there, which could not start."""
    config = write_job(tmp_path, model, ROWS)
    leave(config, ended=ended, begun=begun)
    with pytest.raises(EngineAsked):
        run(config, monkeypatch)
    assert rows_of(tmp_path) == []
