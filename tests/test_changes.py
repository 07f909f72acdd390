"""A job that was changed: run, doctor, plan and explain refuse it in the same words, before anything is claimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery import job as jobs
from prefix_recovery.cli import main
from prefix_recovery.job_here import job_here
from recovery.errors import CredentialsRefused
from recovery.log_reading import find_tail
from recovery.ports import Listed
from snapshot_inspect.cli import main as inspect
from storage_backends import open_store
from storage_backends.local import LocalStore
from tests.inspect_stores import Job, say
from tests.job_files import write_job

A = {"id": "a", "prompt_token_ids": [3, 4]}
B = {"id": "b", "prompt_token_ids": [5, 6, 7], "sampling": {"max_tokens": 30}}
C = {"id": "c", "prompt": "hello"}
SAMPLING = {"temperature": 0, "ignore_eos": True}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the job, which has a store of three calls: one ended, one with a snapshot, one only flushed."""

    def started(*arguments: Any) -> Any:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(jobs, "Engine", started)

    def config(rows: list[Any], sampling: dict[str, Any], **fields: Any) -> Path:
        return write_job(tmp_path, tiny_model, rows, sampling=sampling, **fields)

    here = job_here(str(config([A, B, C], SAMPLING)))
    store = Job(open_store(tmp_path / "store", create=True), must=here.must)
    for name in ("a#0", "b#0", "c#0"):
        sample = here.samples[name]
        asked = {"sampling": here.requests.sampling_of(sample.prompt), "source_digest": here.source_digests[name]}
        call = store.open(name, here.requests.token_ids(sample.prompt), **asked)
        say(call, 11, 12, 13)
        if name == "a#0":
            call.end("stop", None)
        store.snapshot() if name != "c#0" else store.flush()
    store.close()
    return config


CHANGES: list[tuple[str, list[Any], dict[str, Any], str, str]] = [
    (
        "a prompt",
        [A, {**B, "prompt_token_ids": [5, 9]}, C],
        SAMPLING,
        "prompt 'b' (line 2) was changed since the store was made: its prompt (3 tokens in the store, 2 tokens here, "
        "the first other one is token 1)",
        "put line 2 of the prompts file back",
    ),
    (
        "a finished one",
        [{**A, "prompt_token_ids": [3]}, B, C],
        SAMPLING,
        "prompt 'a' (line 1) was changed",
        "put line 1 ",
    ),
    (
        "one that was only flushed, in another order",
        [{**C, "prompt": "hullo"}, A, B],
        SAMPLING,
        "prompt 'c' (line 1) was changed",
        "--set rollout_checkpointing.store=OTHER --set output=OTHER",
    ),
    (
        "a line's sampling",
        [A, {**B, "sampling": {"max_tokens": 31, "min_tokens": 2}}, C],
        SAMPLING,
        "prompt 'b' (line 2) is sampled otherwise than when the store was made: "
        "sampling.max_tokens: 30 in the store, 31 here; sampling.min_tokens: the default in the store, 2 here",
        "put line 2 of the prompts file back",
    ),
    (
        "the job's sampling",
        [A, B, C],
        {**SAMPLING, "temperature": 0.5},
        "prompt 'a' (line 1) is sampled otherwise than when the store was made: "
        "sampling.temperature: 0.0 in the store, 0.5 here (and 2 more stored calls)",
        "set `sampling.temperature` back to 0.0 in the config",
    ),
    (
        "how it is written",
        [A, B, C],
        {**SAMPLING, "top_p": 1.0},
        "prompt 'a' (line 1) or the job's `sampling` is written otherwise",
        "and may ask for the same",
    ),
    (
        "a line is gone",
        [A, C],
        SAMPLING,
        "the store holds an unfinished call 'b#0' that the prompts file no longer asks for",
        "put the line with id 'b' back",
    ),
]


@pytest.mark.parametrize(("rows", "sampling", "said", "todo"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_changed_job_is_refused_by_all_in_the_same_words_before_anything_is_claimed(
    write: Write,
    rows: list[Any],
    sampling: dict[str, Any],
    said: str,
    todo: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = write(rows, sampling)
    store = open_store(tmp_path / "store")
    before = [(item.key, item.nbytes) for item in store.list("")]
    for command, arguments in (
        (main, ["run", str(config)]),
        (main, ["doctor", str(config)]),
        (inspect, ["plan", str(config)]),
    ):
        code = command(arguments)
        printed = capsys.readouterr()
        assert code == (1 if arguments[0] == "doctor" else 15), arguments
        assert said in printed.out + printed.err and todo in printed.out + printed.err, arguments
    assert inspect(["explain", str(config), "--json"]) == (15 if "'c'" not in said else 0), "it adopts nothing"
    found = json.loads(capsys.readouterr().out)["prompts"]
    assert bool(found["changed"] or found["missing"]) == ("'c'" not in said)
    if found["changed"]:
        assert inspect(["explain", str(config)]) == 15
        assert said.partition(" (and ")[0] in capsys.readouterr().out
    assert [(item.key, item.nbytes) for item in store.list("")] == before


def test_the_same_job_and_one_with_more_lines_get_to_the_engine(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    config = write([C, B, A, {"id": "new", "prompt": "x"}], SAMPLING)
    with pytest.raises(AssertionError, match="the engine was started"):
        main(["run", str(config), "--quiet"])
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ, "the engine is forked as if nothing had been compared"
    assert main(["doctor", str(config)]) == 0
    assert "the store belongs to this job; 3 stored calls with the same prompt and sampling" in capsys.readouterr().out


def test_s6_who_may_not_list_is_told_what_works_without(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S6: before the engine starts, in the words of the restore."""

    class Unlisted(LocalStore):
        def list(self, prefix: str, after: str = "") -> list[Listed]:
            raise CredentialsRefused("ListObjectsV2 of s3://b/x: access denied", hint="allow s3:ListBucket")

    config = write([A, B, C], SAMPLING)
    monkeypatch.setattr(jobs, "open_store", lambda address, **options: Unlisted(tmp_path / "store"))
    assert main(["run", str(config), "--quiet"]) == 12
    assert "a restore of one snapshot by its id needs no list" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="the engine was started"):
        main(["run", str(config), "--quiet", "--set", "rollout_checkpointing.restore=4"])


def test_another_model_is_refused_before_the_engine_starts_too(
    write: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tail = find_tail(open_store(tmp_path / "store"))
    config = write([A, B, C], SAMPLING, samples_per_prompt=2)
    assert main(["run", str(config), "--quiet"]) == 15
    assert "job.samples_per_prompt: 1 in the store, 2 here" in capsys.readouterr().err
    assert find_tail(open_store(tmp_path / "store")) == tail
    assert main(["doctor", str(config)]) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"engine": {"max_modle_len": 9}},
            "engine.max_modle_len: this vLLM has no such argument; did you mean max_mod",
        ),
        ({"sampling": {"temprature": 9}}, "sampling: there is no field 'temprature'; did you mean temperature?"),
    ],
)
def test_doctor_knows_the_fields_that_vllm_knows(
    write: Write, fields: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write([A, B, C], **{"sampling": SAMPLING, **fields})
    assert main(["doctor", str(config)]) == 1
    assert f"fail  {said}" in capsys.readouterr().out
    assert main(["run", str(config), "--quiet"]) == 2
    assert said in capsys.readouterr().err


def test_doctor_names_every_line_that_will_have_no_result(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"id": "odd", "prompt": "x", "sampling": {"topp": 1}}
    config = write([A, "{", B, C, {"id": "x"}, odd], SAMPLING)
    assert main(["doctor", str(config)]) == 0
    text = capsys.readouterr().out
    assert "warn  2 lines of " in text and "will have no result\n      line 2: " in text and "\n      line 5: " in text
    assert "warn  the sampling of 1 line is refused" in text and "line 6: sampling: there is no field 'topp'" in text


def test_nothing_of_vllm_is_on_stderr(write: Write, tmp_path: Path) -> None:
    config = write([A, B, C], SAMPLING)
    for verb in ("plan", "explain"):
        ran = subprocess.run(
            [sys.executable, "-m", "snapshot_inspect", verb, str(config)], capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0 and ran.stderr == "", ran.stderr
