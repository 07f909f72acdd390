"""The job runner without an engine: prompts, results, rows, processes, what the command says and returns."""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from prefix_recovery import prompts as prompts_module
from prefix_recovery import saving
from prefix_recovery.cli import main
from prefix_recovery.doctor import run_doctor
from prefix_recovery.interrupted import Comparison, compare
from prefix_recovery.output_lock import OutputLock
from prefix_recovery.processes import Identity, descendants, end_leftovers
from prefix_recovery.progress import Progress
from prefix_recovery.prompts import read_prompts, source_digest
from prefix_recovery.results import Results, write_errors
from prefix_recovery.rows import json_number, make_row
from prefix_recovery.tally import read_tally
from recovery.config import job_schema, load_config
from recovery.errors import ConfigError, InputError, Locked, StoreFull, StoreUnavailable
from recovery.model import PolicyVersion, Request, Restarted, Resumed
from recovery.restored import PassedOver, Restored
from recovery.staging import StagingCounters
from tests.job_files import write_job, write_lines
from tests.test_notes import GARBAGE, NUMBERS

# ---- prompts -------------------------------------------------------------------------------------------------------

GOOD = '{"id": "a", "prompt": "hello"}'

BAD: list[tuple[str, str]] = [
    ("not json", "the line is not JSON"),
    ('{"id": "x", "prompt": "cut of', "the line is not JSON"),
    ("[1, 2]", "the line is not a JSON object"),
    ('"text"', "the line is not a JSON object"),
    ('{"prompt": "hello"}', "`id` is missing"),
    ('{"id": "", "prompt": "hello"}', "`id` is missing"),
    ('{"id": null, "prompt": "hello"}', "`id` is missing"),
    ('{"id": true, "prompt": "hello"}', "`id` is missing"),
    ('{"id": 1.5, "prompt": "hello"}', "`id` is missing"),
    ('{"id": "\\ud800", "prompt": "hello"}', "`id` holds half of a surrogate pair"),
    ('{"id": "x"}', "exactly one of prompt, messages, prompt_token_ids is needed, found none"),
    ('{"id": "x", "prompt": "a", "prompt_token_ids": [1]}', "found prompt and prompt_token_ids"),
    ('{"id": "x", "promt": "a"}', "unknown field 'promt'"),
    ('{"id": "x", "prompt": ""}', "`prompt` is empty"),
    ('{"id": "x", "prompt": 5}', "`prompt` is not a text"),
    ('{"id": "x", "prompt": ["a"]}', "`prompt` is not a text"),
    ('{"id": "x", "prompt": "\\udc00"}', "the text holds half of a surrogate pair"),
    ('{"id": "x", "prompt_token_ids": []}', "`prompt_token_ids` is not a list of token ids"),
    ('{"id": "x", "prompt_token_ids": "12"}', "`prompt_token_ids` is not a list of token ids"),
    ('{"id": "x", "prompt_token_ids": [1, -2]}', "holds something that is not a token id"),
    ('{"id": "x", "prompt_token_ids": [1, true]}', "holds something that is not a token id"),
    ('{"id": "x", "prompt_token_ids": [1, 2.0]}', "holds something that is not a token id"),
    ('{"id": "x", "prompt_token_ids": [2147483648]}', "holds something that is not a token id"),
    ('{"id": "x", "messages": {"role": "user"}}', "`messages` is not a list of objects with a role"),
    ('{"id": "x", "messages": [{"content": "a"}]}', "`messages` is not a list of objects with a role"),
    ('{"id": "x", "messages": [{"role": "user", "content": "\\ud83d"}]}', "half of a surrogate pair"),
    ('{"id": "x", "prompt": "a", "sampling": [1]}', "`sampling` is not an object"),
    ('{"id": "x", "prompt": "a", "sampling": {"n": 2}}', "samples_per_prompt"),
    ('{"id": "a", "prompt": "again"}', "the id 'a' was used in line 1 already"),
    ("[" * 100_000, "nested too deeply"),
]


def prompts_file(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    write_lines(path, rows)
    return path


@pytest.mark.parametrize(("line", "why"), BAD, ids=[why[:30] + f" {n}" for n, (_, why) in enumerate(BAD)])
def test_a_malformed_line_costs_that_line(tmp_path: Path, line: str, why: str) -> None:
    path = prompts_file(tmp_path, GOOD, line, '{"id": "z", "prompt": "last"}')
    file = read_prompts(path)
    assert [prompt.id for prompt in file.prompts] == ["a", "z"]
    (bad,) = file.bad
    assert bad.line == 2 and why in bad.error
    if '"id": "x"' in line and "cut of" not in line:
        assert bad.id == "x"


@pytest.mark.parametrize(("line", "why"), BAD[:3])
def test_strict_input_stops_at_the_first(tmp_path: Path, line: str, why: str) -> None:
    path = prompts_file(tmp_path, GOOD, line, "{}")
    with pytest.raises(InputError) as caught:
        read_prompts(path, strict=True)
    assert f"{path} line 2: {why}" in caught.value.message
    assert caught.value.exit_code == 3


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"id": "x", "prompt": "\xff"}\n')
    (bad,) = read_prompts(path).bad
    assert (bad.line, "not UTF-8" in bad.error and "at byte 23" in bad.error) == (2, True)


def test_windows_files_and_blank_lines(tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines anywhere and no newline at the end are no errors; line numbers count all."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'\r\n{"id": "a", "prompt": "x"}\r\n\r\n  \r\n{"id": "b", "prompt": "y"}')
    file = read_prompts(path)
    assert [(p.id, p.line) for p in file.prompts] == [("a", 2), ("b", 5)] and not file.bad
    path.write_bytes(codecs.BOM_UTF8 + GOOD.encode())
    assert [p.id for p in read_prompts(path).prompts] == ["a"]


def test_a_line_without_end_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "MAX_LINE_BYTES", 1000)
    path = prompts_file(tmp_path, GOOD, json.dumps({"id": "x", "prompt": "y" * 2000}), '{"id": "b", "prompt": "z"}')
    file = read_prompts(path)
    assert [p.id for p in file.prompts] == ["a", "b"]
    assert "at most 1000 are allowed" in file.bad[0].error


def test_a_long_line_is_fine(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, json.dumps({"id": "a", "prompt_token_ids": list(range(500_000))}))
    assert len(read_prompts(path).prompts[0].value) == 500_000


def test_integer_ids_are_their_text(tmp_path: Path) -> None:
    path = prompts_file(tmp_path, '{"id": 7, "prompt": "a"}', '{"id": "7", "prompt": "b"}', '{"id": 0, "prompt": "c"}')
    file = read_prompts(path)
    assert [p.id for p in file.prompts] == ["7", "0"]
    assert "the id '7' was used in line 1 already" in file.bad[0].error


@pytest.mark.parametrize("content", [b"", b"\n\n", codecs.BOM_UTF8, b"\r\n  \r\n"])
def test_a_file_without_lines_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is empty"):
        read_prompts(path)


def test_prompts_that_cannot_be_read(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "is not a file")):
        with pytest.raises(ConfigError, match=why):
            read_prompts(path)


def test_w9_names_and_digests(tmp_path: Path) -> None:
    """W9: two equal prompts are two prompts; a digest knows content, not place; names cannot collide."""
    rows = [
        '{"id": "a", "prompt": "same"}',
        '{"id": "b", "prompt": "same"}',
        '{"id": "a#1", "prompt": "other", "sampling": {"top_k": 1, "seed": 2}}',
    ]
    file = read_prompts(prompts_file(tmp_path, *rows))
    moved = '{"sampling": {"seed": 2, "top_k": 1}, "prompt": "other", "id": "a#1"}'
    again = read_prompts(prompts_file(tmp_path, moved, *rows[1::-1]))
    names = [sample.name for sample in file.samples(3)]
    assert names[:3] == ["a#0", "a#1", "a#2"] and len(set(names)) == 9
    digests = {p.id: p.digest for p in file.prompts}
    assert digests == {p.id: p.digest for p in again.prompts}
    assert len({digests["a"], digests["a#1"]}) == 2


# ---- results -------------------------------------------------------------------------------------------------------


def row(name: str, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"id": name, "sample_index": index, "token_ids": [1, 2], "text": "ü\u2028🙂", **fields}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Results]]:
    """Opens tmp_path/out.jsonl anew, as a further run does."""
    made: list[Results] = []

    def again() -> Results:
        made.append(Results(tmp_path / "out.jsonl"))
        made[-1].open()
        return made[-1]

    yield again
    for results in made:
        results.close()


def test_rows_are_appended_once(tmp_path: Path, opened: Callable[[], Results]) -> None:
    """W6: what is there stays byte for byte; what is there is known and never appended again."""
    opened().append([row("a"), row("a", 1)])
    before = (tmp_path / "out.jsonl").read_bytes()
    results = opened()
    assert set(results.done) == {("a", 0), ("a", 1)}
    results.append([row("b")])
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    with pytest.raises(AssertionError, match="twice"):
        results.append([row("a")])
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["id"] for line in lines[:-1]] == ["a", "a", "b"] and lines[-1] == ""
    assert json.loads(lines[0])["text"] == "ü\u2028🙂"


def test_w16_a_torn_last_line_is_cut_at_every_byte(tmp_path: Path, opened: Callable[[], Results]) -> None:
    """W16: a kill in the middle of a write leaves the beginning of a row: it goes, all else stays."""
    opened().append([row("a"), row("b")])
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        results = opened()
        assert set(results.done) == {("a", 0)}
        assert path.read_bytes() == whole[:first]
        results.append([row("b")])
        assert path.read_bytes() == whole


def test_zeros_of_a_power_failure_are_torn_too(tmp_path: Path, opened: Callable[[], Results]) -> None:
    opened().append([row("a")])
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 100)
    assert set(opened().done) == {("a", 0)}
    assert path.read_bytes() == whole


def test_a_missing_newline_at_the_end_is_added(tmp_path: Path, opened: Callable[[], Results]) -> None:
    """A kill between the row's last byte and its newline: the row counts, the next one begins on a line of its own."""
    opened().append([row("a")])
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    results = opened()
    assert set(results.done) == {("a", 0)}
    results.append([row("b")])
    assert path.read_bytes().startswith(whole) and len(path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize(
    "foreign",
    [
        "my notes\n",
        '{"id": "a"}\n',
        '{"id": "a", "sample_index": "x", "token_ids": []}\n',
        '{"id": "a", "sample_index": 1e400, "token_ids": []}\n',
        '{"id": "a", "sample_index": 1.5, "token_ids": []}\n',
        "[" * 100_000 + "\n",
        '{"a": 1}',
        "[1]\n",
        "5",
        "my notes without a newline",
        '{"id": "a", "sample_index": 0, "token_ids": []}\nsomething\n',
        '{"id": "a", "sampl\n{"id": "b", "sample_index": 0, "token_ids": []}\n',
        "\n",
    ],
)
def test_somebody_elses_file_is_refused_untouched(tmp_path: Path, opened: Callable[[], Results], foreign: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(foreign)
    before = path.stat().st_mtime_ns
    with pytest.raises(ConfigError) as caught:
        opened()
    wrong = 2 if "something" in foreign else 1
    assert f"{path} line {wrong} is not a result of this program" in caught.value.message
    assert (path.read_text(), path.stat().st_mtime_ns) == (foreign, before)


def test_a_doubled_row_is_refused(tmp_path: Path, opened: Callable[[], Results]) -> None:
    path = tmp_path / "out.jsonl"
    write_lines(path, [row("a"), row("b"), row("a")])
    with pytest.raises(ConfigError, match=r"out\.jsonl line 3 repeats the result of 'a' sample 0"):
        opened()


@pytest.mark.parametrize("n_written", [0, 10])
def test_f1_no_room_leaves_no_part_of_a_row(
    tmp_path: Path, opened: Callable[[], Results], monkeypatch: pytest.MonkeyPatch, n_written: int
) -> None:
    """F1: the disk is full after some bytes of a group: none of its rows is there; later they all are."""
    results = opened()
    results.append([row("a")])
    path = tmp_path / "out.jsonl"
    before = path.read_bytes()
    real_write = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) <= n_written or n_written == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        if path.stat().st_size > len(before):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[:n_written])

    monkeypatch.setattr("prefix_recovery.results.os.write", full)
    with pytest.raises(StoreFull, match="No space left on device") as caught:
        results.append([row("b"), row("c")])
    assert caught.value.exit_code == 20
    monkeypatch.undo()
    assert path.read_bytes() == before and set(results.done) == {("a", 0)}
    results.append([row("b"), row("c")])
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "b", "c"]


def test_f1_a_sync_that_fails_takes_the_rows_back(
    tmp_path: Path, opened: Callable[[], Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = opened()

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("prefix_recovery.results.os.fsync", broken)
    with pytest.raises(StoreFull):
        results.append([row("a")])
    monkeypatch.undo()
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and not results.done


def test_f1_rows_that_cannot_be_taken_back_are_cut_off_before_the_next(
    tmp_path: Path, opened: Callable[[], Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1: the disk fails in the middle of a row and lets nothing be taken back: no torn row stays in between."""
    results = opened()
    results.append([row("a")])
    path = tmp_path / "out.jsonl"
    real_write = os.write

    def half(fd: int, data: bytes) -> int:
        real_write(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    def no(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("prefix_recovery.results.os.write", half)
        patch.setattr("prefix_recovery.results.os.ftruncate", no)
        for _ in range(2):
            with pytest.raises(StoreFull):
                results.append([row("b")])
    assert not path.read_bytes().endswith(b"\n")
    results.append([row("b"), row("c")])
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "b", "c"]


def test_the_output_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        Results(tmp_path).open()


def test_errors_are_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl.errors.jsonl"
    write_errors(path, [{"line": 1, "id": "a", "error": "x"}, {"line": 2, "id": "", "error": "ü"}])
    write_errors(path, [{"line": 2, "id": "", "error": "ü"}])
    assert path.read_text(encoding="utf-8") == '{"line": 2, "id": "", "error": "ü"}\n'
    assert list(tmp_path.iterdir()) == [path]


# ---- the lock and what a dead run left -----------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from prefix_recovery.output_lock import OutputLock
lock = OutputLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock of tmp_path/out.jsonl."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out.jsonl")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until it is ended."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_one_run_holds_an_output(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    lock = OutputLock(tmp_path / "out.jsonl")
    with pytest.raises(Locked) as caught:
        lock.acquire()
    assert f"another run holds the output {tmp_path / 'out.jsonl'} (pid {holder.pid})" in caught.value.message
    assert caught.value.exit_code == 11
    assert holder.poll() is None
    holder.kill()
    holder.wait()
    assert lock.acquire() == []
    lock.release()
    assert lock.path.read_bytes() == b""


def test_a_mangled_note_stops_nobody(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    """Who holds the output is not known then, but that somebody does; and nothing is ended on its word."""
    lock = OutputLock(tmp_path / "out.jsonl")
    runs = [f'{{"pid": {number}, "started": 1, "boot": "b"}}' for number in NUMBERS]
    for note in (*GARBAGE, *(f'{{"run": {run}}}'.encode() for run in runs)):
        lock.path.write_bytes(note)
        with pytest.raises(Locked, match=r"another run holds the output .* \(pid \?\)"):
            lock.acquire()
    holder.kill()
    holder.wait()
    for note in (*GARBAGE, f'{{"folder": 7, "children": [{", ".join(runs)}]}}'.encode()):
        lock.path.write_bytes(note)
        assert lock.acquire() == []
        lock.release()


def test_a_second_run_exits_11_and_names_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_job(tmp_path, tmp_path / "model", [GOOD])
    lock = OutputLock(tmp_path / "results.jsonl")
    lock.acquire()
    try:
        assert main(["run", str(config)]) == 11
    finally:
        lock.release()
    assert f"(pid {os.getpid()})" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists() and not (tmp_path / "store").exists()


def note(path: Path, run: Identity, *children: Identity) -> None:
    document = {"run": run.as_json(), "children": [child.as_json() for child in children]}
    path.with_name(path.name + ".lock").write_text(json.dumps(document))


def gone() -> Identity:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = Identity.of(process.pid)
    process.wait()
    return identity or Identity(process.pid, 1, "boot")


def test_leftovers_are_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    identity = Identity.of(sleeper.pid)
    assert identity is not None and identity.alive()
    note(tmp_path / "out.jsonl", gone(), identity)
    lock = OutputLock(tmp_path / "out.jsonl")
    assert lock.acquire() == [identity]
    lock.release()
    assert sleeper.wait() == -signal.SIGKILL


@pytest.mark.parametrize("field", ["started", "boot"])
def test_a_reused_pid_is_nobodys_leftover(tmp_path: Path, sleeper: subprocess.Popen[bytes], field: str) -> None:
    """The pid is that of a running process, its start time or boot is not: it is left alone."""
    identity = Identity.of(sleeper.pid)
    assert identity is not None
    other = Identity(identity.pid, identity.started - (field == "started"), identity.boot + "x" * (field == "boot"))
    note(tmp_path / "out.jsonl", gone(), other)
    lock = OutputLock(tmp_path / "out.jsonl")
    assert lock.acquire() == []
    lock.release()
    assert sleeper.poll() is None


def test_a_forked_engine_that_keeps_a_dead_runs_lock(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """An engine is forked and inherits the lock; when its client alone was killed, the next run ends it and goes on."""
    output = tmp_path / "out.jsonl"
    script = HOLD.replace(
        'print("held", flush=True)',
        "import os\nfrom prefix_recovery.processes import Identity\nchild = os.fork()\nif child == 0:\n"
        "    time.sleep(600)\nlock.note([Identity.of(child)])\nprint(child, flush=True)",
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    child = Identity.of(int(client.stdout.readline()))
    assert child is not None
    client.kill()
    client.wait()
    assert child.alive()
    lock = OutputLock(output)
    assert lock.acquire() == [child]
    lock.release()
    assert not child.alive()
    client.communicate()


@pytest.mark.parametrize("content", ["", "x", "[]", '{"children": 5}', '{"children": [5, {"pid": "x"}], "run": 7}'])
def test_a_mangled_lock_file_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "out.jsonl.lock").write_text(content)
    lock = OutputLock(tmp_path / "out.jsonl")
    assert lock.acquire() == []
    lock.release()


def test_processes(sleeper: subprocess.Popen[bytes]) -> None:
    own = Identity.own()
    assert own.alive() and own.pid == os.getpid()
    assert Identity.from_json(own.as_json()) == own
    for value in (None, {}, {"pid": "x"}, {**own.as_json(), "pid": None}):
        assert Identity.from_json(value) is None
    assert sleeper.pid in [child.pid for child in descendants(os.getpid())]
    assert end_leftovers([own]) == [] and own.alive()
    assert Identity.of(2**22 + 1) is None
    sleeper.kill()
    sleeper.wait()
    assert Identity.of(sleeper.pid) is None


# ---- rows and progress ---------------------------------------------------------------------------------------------


def test_a_row_has_the_documented_fields() -> None:
    request = Request(rollout="p-17#2", prompt_token_ids=np.asarray([1, 2], np.int32), sampling={})
    history = (Resumed(3, 12, "bitwise"), Restarted(5, 13, "temperature: because"))
    spans = [(0, 3, PolicyVersion("a", 3)), (3, 4, PolicyVersion("b", 4))]
    made = make_row(
        id="p-17",
        sample_index=2,
        source="5f" * 16,
        request=request,
        token_ids=[5, 6, 7, 8],
        logprobs=[-0.5, math.nan, -math.inf, math.inf],
        version_spans=spans,
        history=history,
        finish_reason="stop",
        stop_reason=8,
        text="hi",
    )
    assert json.loads(json.dumps(made, allow_nan=False)) == {
        "id": "p-17",
        "sample_index": 2,
        "source": "5f" * 16,
        "prompt_token_ids": [1, 2],
        "token_ids": [5, 6, 7, 8],
        "logprobs": [-0.5, "NaN", "-Infinity", "Infinity"],
        "text": "hi",
        "finish_reason": "stop",
        "stop_reason": 8,
        "version_spans": [[0, 3, "a", 3], [3, 4, "b", 4]],
        "resumes": [{"at": 3, "snapshot": 12, "exactness": "bitwise"}],
        "restarts": [{"at": 5, "snapshot": 13, "reason": "temperature: because"}],
    }
    assert math.copysign(1, float(json_number(-0.0))) == -1


def test_progress_in_a_log_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a terminal: a line now and then, refusals by name up to a bound, brackets taken as they are."""
    now = [0.0]
    monkeypatch.setattr("prefix_recovery.progress.time.monotonic", lambda: now[0])
    progress = Progress(40, 3, lambda: 500)
    progress.say("[bold]x[/bold] " + "y" * 200)
    now[0] = 5.0
    progress.finished(1)
    now[0] = 10.0
    progress.finished(1)
    for number in range(30):
        progress.refused(f"p-{number}", "too long")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[bold]x[/bold] " + "y" * 200
    assert lines[1] == "5 of 40 results, 50 tokens/s, 2 min 55 s left", "2 in 10 s, 35 to go"
    assert lines[2] == "no result for p-0: too long" and len(lines) == 22
    Progress(1, 0, lambda: 0, quiet=True).say("not seen")
    assert capsys.readouterr().err == ""


def test_progress_of_a_restore_in_a_log_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rate and time left now and then; nothing if there is nothing to read; the bound follows what is read."""
    now = [0.0]
    monkeypatch.setattr("prefix_recovery.progress.time.monotonic", lambda: now[0])
    progress = Progress(40, 0, lambda: 0)
    with progress.restoring() as reading:
        now[0] = 20.0
        reading.read(500)
    assert capsys.readouterr().err == ""
    with progress.restoring() as reading:
        reading.expect(100_000_000)
        for at in (21.0, 32.0, 33.0, 44.0, 60.0):
            now[0] = at
            reading.read(30_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "restoring: 60.0 MB of at most 100.0 MB read, 5.0 MB/s, at most 8 s left",
        "restoring: 120.0 MB of at most 120.0 MB read, 5.0 MB/s, at most 0 s left",
        "restoring: 150.0 MB of at most 150.0 MB read, 3.8 MB/s, at most 0 s left",
    ]
    progress.decoding()
    now[0] = 100.0
    progress.finished(4)
    assert capsys.readouterr().err == "4 of 40 results, 0 tokens/s, 6 min left\n", "counted from when decoding began"


def test_the_operator_is_told_what_a_restore_did_not_take() -> None:
    """Garbage that stays, and records of later segments that do not fit."""
    restored = Restored(
        snapshot=4,
        published=7,
        passed_over=[PassedOver("snapshot 5", "seg/x is missing")],
        adopted_segments=2,
        adopted_tokens=9,
        rejected={"the call has ended": 1, "the call is unknown": 3},
        calls=[],
        states={},
        uncollected=StoreUnavailable("the store did not answer"),
    )
    assert list(saving.restored_lines(restored, 3, 120)) == [
        "passed over snapshot 5: seg/x is missing",
        "WARNING: what was passed over is not used, and what it had is generated again -> snapshot-inspect verify "
        "--read-data STORE says more; with `restore: strict` a start that would pass something over stops instead",
        "continuing from snapshot 4, 2 later segments, as snapshot 7: 3 calls in flight, 120 tokens of them kept",
        "1 record of the later segments did not fit and is not used: the call has ended",
        "3 records of the later segments did not fit and are not used: the call is unknown",
        "garbage of earlier runs stays for a later run to collect: the store did not answer",
    ]
    fresh = Restored(None, 2, [], 0, 0, {}, [], {})
    assert list(saving.restored_lines(fresh, 0, 0)) == []


def test_the_operator_is_told_what_was_not_stored() -> None:
    counters = StagingCounters(flushes=7, skipped=2, failures=3, backlog_records=12, last_failure="no space left")
    assert saving.undelivered_line(3, "out.jsonl", stored=True) == (
        "3 finished rows are not in out.jsonl; the next run writes them from the store"
    )
    assert list(saving.closing_lines(counters, {"the call has ended": 2})) == [
        "2 records that were stored did not fit and are not used: the call has ended",
        "stored 7 segments; 2 periodic flushes skipped while another was being written (the next one took its tokens), "
        "3 failed",
        "12 records could not be stored and end with this process: no space left",
    ]
    assert list(saving.closing_lines(StagingCounters(flushes=7), {})) == []


def test_a_tally_outlives_its_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from prefix_recovery.tally import Tally\n"
        "t = Tally(Path(sys.argv[1]), 3); t.started(1, 7, ended=True); t.decoded(2, 5); t.decoded(2, 1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "t"
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -signal.SIGKILL
    assert read_tally(path).tolist() == [[0, 7, 0], [0, 0, 6], [0, 1, 0]]


def test_a_comparison_sees_what_is_wrong() -> None:
    """The measure that the demo, the soak and the tests rely on."""
    fields = {"prompt_token_ids": [1], "text": "x", "finish_reason": "length", "stop_reason": None}
    reference = [row(name, logprobs=[-1.0, -2.0], **fields) for name in "abcd"]
    rows = [dict(item) for item in reference]
    assert compare(rows, reference) == Comparison(0, 0, 0, 0.0)
    doubled = compare([*rows[:3], rows[0]], reference)
    assert (doubled.lost, doubled.duplicated) == (1, 1)
    for change in ({"token_ids": [1, 3]}, {"text": "y"}, {"finish_reason": "stop"}, {"logprobs": [-1.0]}):
        assert compare([{**rows[0], **change}, *rows[1:]], reference).mismatched == 1, change
    assert compare([{**rows[0], "logprobs": [-1.0, -2.25]}, *rows[1:]], reference).largest_logprob_gap == 0.25


# ---- the command line ----------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"promts": "x"}, 2, ["promts", "did you mean", "prompts", "job.yaml, line"]),
        ({"prompts": "none.jsonl"}, 2, ["cannot read the prompts file", "none.jsonl"]),
        ({"output": "prompts.jsonl"}, 2, ["output", "would overwrite prompts"]),
        ({"max_concurrent_calls": 0}, 2, ["max_concurrent_calls"]),
        ({"sampling": {"n": 2}}, 2, ["samples_per_prompt"]),
        ({"engine": {"model": "x"}}, 2, ["engine.model"]),
        ({"rollout_checkpointing": {"enabled": True}}, 2, ["rollout_checkpointing.store", "missing"]),
        ({"rollout_checkpointing": {"enabled": True, "store": "s", "gym": {"mode": "token"}}}, 2, ["mode", "token"]),
        ({"rollout_checkpointing": {"enabled": True, "store": "prompts.jsonl"}}, 2, ["prompts itself"]),
    ],
)
def test_a_config_that_cannot_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], code: int, words: list[str]
) -> None:
    config = write_job(tmp_path, tmp_path / "model", [GOOD], **change)
    assert main(["run", str(config)]) == code
    text = said(capsys)
    assert text.startswith("error: ") and all(word in text for word in words), text
    assert not (tmp_path / "store").exists()


def test_a_config_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path / "job.yaml")]) == 2
    assert "job.yaml" in said(capsys)


def test_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_job(tmp_path, tmp_path / "model", [GOOD])
    assert main(["run", str(config), "--set", "prompts=other.jsonl"]) == 2
    assert f"cannot read the prompts file {tmp_path / 'other.jsonl'}" in said(capsys)
    assert main(["run", str(config), "--set", "max_concurrent_calls=0"]) == 2
    assert "override max_concurrent_calls=0" in said(capsys)
    assert main(["run", str(config), "--rollout-checkpointing-keep-latest-k", "0"]) == 2
    assert "rollout_checkpointing.keep_latest_k" in said(capsys)


def test_strict_input_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_job(tmp_path, tmp_path / "model", [GOOD, "{}"])
    assert main(["run", str(config), "--strict-input"]) == 3
    text = said(capsys)
    assert f"{tmp_path / 'prompts.jsonl'} line 2: " in text and "mend the line" in text
    assert not (tmp_path / "store").exists() and not (tmp_path / "results.jsonl").exists()


def test_an_output_of_somebody_else_stops_before_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_job(tmp_path, tmp_path / "model", [GOOD])
    (tmp_path / "results.jsonl").write_text("my thesis\n")
    assert main(["run", str(config)]) == 2
    assert "line 1 is not a result of this program" in said(capsys)
    assert (tmp_path / "results.jsonl").read_text() == "my thesis\n"


def test_w6_nothing_to_do_needs_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """W6: every prompt has its row: exit 0 at once, with a model that does not even exist; the file is as it was."""
    config = write_job(tmp_path, tmp_path / "no-model", [GOOD], samples_per_prompt=2)
    write_lines(tmp_path / "results.jsonl", [row("a", 1), row("a", 0), row("from-before")])
    before = (tmp_path / "results.jsonl").read_bytes()
    assert main(["run", str(config)]) == 0
    text = said(capsys)
    assert "2 of 2 results" in text and "nothing to do" in text
    assert "has 1 row that no line" in text and "2 rows of" in text and "do not say what they answer" in text
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert not (tmp_path / "store").exists()


def test_malformed_lines_and_nothing_else_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 3, the errors file and stderr name each line; mended, the next run is fine and the file is empty."""
    config = write_job(tmp_path, tmp_path / "no-model", [GOOD, '{"id": "x"}', "nonsense"])
    write_lines(tmp_path / "results.jsonl", [row("a"), row("x")])
    errors = tmp_path / "results.jsonl.errors.jsonl"
    assert main(["run", str(config)]) == 3
    text = said(capsys)
    assert f"{tmp_path / 'prompts.jsonl'} line 2: exactly one of" in text
    assert f"{tmp_path / 'prompts.jsonl'} line 3: the line is not JSON" in text
    assert [(e["line"], e["id"]) for e in map(json.loads, errors.read_text().splitlines())] == [(2, "x"), (3, "")]
    write_lines(tmp_path / "prompts.jsonl", [GOOD, '{"id": "x", "prompt": "mended"}'])
    assert main(["run", str(config)]) == 0
    assert errors.read_text() == ""


def test_help_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "exit codes of run" in capsys.readouterr().out
    for arguments in (["runn"], ["run"], ["run", "a", "--nope"], ["model", "gpt-5", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()


def test_the_schema_describes_what_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == job_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    job = yaml.safe_load(write_job(tmp_path, tmp_path / "model", [GOOD]).read_text())
    validator.validate(job)
    for change in ({"promts": "x"}, {"model": 5}, {"rollout_checkpointing": {"store": 5}}, {"samples_per_prompt": 0}):
        assert not validator.is_valid({**job, **change}), change


def test_a_model_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "tiny", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").exists()


# ---- rows of another job --------------------------------------------------------------------------------------------


def test_a_row_of_another_job_with_the_same_id_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids like `a` are those of many jobs: another one's answer does not pass, whether or not all rows are there."""
    asked = [GOOD, '{"id": "b", "prompt": "two"}']
    config = write_job(tmp_path, tmp_path / "no-model", asked)
    prompts = {prompt.id: prompt for prompt in read_prompts(tmp_path / "prompts.jsonl").prompts}
    sampling = load_config(config).sampling
    own = {name: source_digest(prompt, sampling) for name, prompt in prompts.items()}
    for rows in ([row("a", source=own["a"]), row("b", source=own["a"])], [row("b", source=own["a"])]):
        write_lines(tmp_path / "results.jsonl", rows)
        before = (tmp_path / "results.jsonl").read_bytes()
        assert main(["run", str(config)]) == 15
        where = f"{tmp_path / 'results.jsonl'} line {len(rows)}: this result of 'b' answers another prompt than line 2"
        text = said(capsys)
        assert where in text and "--set output=OTHER.jsonl" in text
        assert (tmp_path / "results.jsonl").read_bytes() == before
        run_doctor(str(config))
        found = capsys.readouterr().out
        assert f"fail  {tmp_path / 'results.jsonl'} line {len(rows)}: this result of 'b'" in found
    write_lines(tmp_path / "results.jsonl", [row("a", source=own["a"]), row("b", source=own["b"])])
    assert main(["run", str(config)]) == 0
    text = said(capsys)
    assert "2 of 2 results" in text and "do not say" not in text and "no line" not in text


def test_doctor_reads_the_output_as_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And changes nothing of it, not even a torn last line."""
    config = write_job(tmp_path, tmp_path / "no-model", [GOOD])
    output = tmp_path / "results.jsonl"
    for content, wanted in (
        ("hello\n", "line 1 is not a result of this program"),
        ('{"id": "a", "answer": "blue"}\n', "line 1 is not a result of this program"),
        (json.dumps(row("z")) + '\n{"id": "a", "sam', "has 1 row that no line of the prompts file asks for"),
    ):
        output.write_text(content)
        run_doctor(str(config))
        assert wanted in capsys.readouterr().out
        assert output.read_text() == content
