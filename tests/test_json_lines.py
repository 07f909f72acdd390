"""`snapshot-inspect export --jsonl`: one call a line, whole, in passes that bound memory.

Owns: the lines and how they get into a file or a pipe.
Does not know: portable files (test_export.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapshot_inspect import json_lines
from storage_backends.testing.faults import CountingStore
from tests import inspect_stores as stores
from tests.carried_stores import newest, rich
from tests.inspect_stores import made
from tests.test_export import large
from tests.test_inspect_cli import environment, program
from tests.test_inspect_screens import VALIDATORS, opened_as, run_once, validator

LINE = validator("jsonl")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    stores.on_disk(tmp_path / "s", stores.objects_of(made(rich)))
    return tmp_path / "s"


def read(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for document in found:
        LINE.validate(document)
    return found


def test_every_call_is_a_line_with_all_that_is_stored_of_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `cat` prints, call by call, but for the store and the places."""
    path = root.parent / "calls.jsonl"
    ran = run_once(capsys, "export", str(root), "--jsonl", str(path), "--json")
    assert ran.code == 0 and ran.err == ""
    (document,) = ran.documents
    VALIDATORS["export"].validate(document)
    assert document["form"] == "json_lines" and document["codec"] is None
    assert document["nbytes"] == path.stat().st_size
    lines = read(path)
    assert [line["rollout"] for line in lines] == ["e\u0301 🙂/+%2F", "p-1", "p-2", "p-3", "p-10"]
    for line in lines:
        (cat,) = run_once(capsys, "cat", str(root), line["call_id"], "--json").documents
        assert {name: value for name, value in cat.items() if name not in ("store", "chunks")} == line


def test_l3_numbers_come_back_bit_for_bit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_once(capsys, "export", str(root), "--jsonl", str(root.parent / "x"))
    first = read(root.parent / "x")[1]
    odd = np.array([float(value) for value in first["logprobs"][11:]]).astype(np.float32)
    wanted = np.array([np.nan, -np.inf, -0.0, 1e-45, np.nan], np.float32)
    assert odd.tobytes() == wanted.tobytes() and first["logprobs"][11:13] == ["NaN", "-Infinity"]
    columns = {column["name"]: column for column in first["columns"]}
    assert columns["top.logprobs"]["values"][0] == ["NaN", "-Infinity", -0.0] and columns["flag"]["values"] == [True]
    assert (columns["top.ids"]["start"], columns["top.ids"]["stop"]) == (11, 15)


def test_masks_are_spans(capsys: pytest.CaptureFixture[str]) -> None:
    from snapshot_inspect.call_documents import spans

    for text in ("", "1", "0", "0011101", "10" * 20):
        mask = np.array([bit == "1" for bit in text], np.bool_)
        found = spans(mask)
        assert "".join("01"[value] * (end - start) for start, end, value in found) == text
        assert all(a[1] == b[0] and a[2] != b[2] for a, b in pairwise(found))


def test_passes_change_nothing_but_what_is_in_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = large(30, 3, 40)
    opened_as(monkeypatch, store)
    assert run_once(capsys, "export", "STORE", "--jsonl", str(tmp_path / "a")).code == 0
    n_segments = len(store.list("seg/"))
    monkeypatch.setattr(json_lines, "TOKENS_PER_PASS", 700)
    counting = CountingStore(store)
    opened_as(monkeypatch, counting)
    assert run_once(capsys, "export", "STORE", "--jsonl", str(tmp_path / "b")).code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    reads = [call for call in counting.log if call.verb == "get" and call.key.startswith("seg/")]
    assert len(reads) == n_segments * 6, "five calls of 120 tokens a pass"


def test_in_a_pipe_there_are_lines_and_nothing_else(root: Path) -> None:
    for more in ((), ("--json",)):
        done = subprocess.run(
            program("export", str(root), "4", "--jsonl", "-", *more),
            capture_output=True,
            env=environment(),
            timeout=240,
        )
        assert done.returncode == 0 and done.stderr == b""
        lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
        assert [line["rollout"] for line in lines] == ["p-1", "p-2"] and {line["snapshot"] for line in lines} == {4}
    ours, theirs = os.pipe()
    os.close(ours)
    argv = program("export", str(root), "--jsonl", "-")
    done = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, env=environment(), timeout=240)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, b"")


def test_damage_ends_it_with_a_code_and_leaves_no_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = max(newest(stores.LocalStore(root)).ledger.segments_in_use())
    (root / key).unlink()
    ran = run_once(capsys, "export", str(root), "--jsonl", str(root.parent / "x"))
    assert ran.code == 1 and f"segment {key} is missing: " in ran.err and not (root.parent / "x").exists()
    ran = run_once(capsys, "export", str(root), "--jsonl", "-")
    assert ran.code == 1 and key in ran.err
