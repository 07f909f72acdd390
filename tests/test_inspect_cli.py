"""`snapshot-inspect` as a program: help, usage errors, terminals, pipes, signals, progress, what it loads.

Owns: everything of the command line that is not about one kind of store.
Does not know: what verbs find (the other test_inspect files).
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from snapshot_inspect import cli, places, progress, texts
from snapshot_inspect.render import Screen
from storage_backends.memory import MemoryStore
from tests import inspect_stores as stores

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = MemoryStore()
    stores.several(store).close()
    path = tmp_path_factory.mktemp("cli") / "store"
    stores.on_disk(path, stores.objects_of(store))
    return path


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm-256color", **more}


def program(*argv: str) -> list[str]:
    return [sys.executable, "-m", "snapshot_inspect", *argv]


def on_terminal(*argv: str, **env: str) -> tuple[int, str]:
    """Exit code and what a terminal of 120 columns got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        program(*argv), stdin=theirs, stdout=theirs, stderr=theirs, env=environment(COLUMNS="120", **env)
    )
    os.close(theirs)
    got = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:
            break
        if not piece:
            break
        got += piece
    os.close(ours)
    return process.wait(240), got.decode()


# ---- help and usage ------------------------------------------------------------------------------------------------


def test_no_argument_shows_the_useful_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for verb in ("list", "show", "latest", "verify", "calls", "cat"):
        assert f"snapshot-inspect {verb} runs/17" in out
    assert "This folder is a store" not in out
    monkeypatch.chdir(folder)
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "This folder is a store:" in out and "snapshot     5" in out
    (tmp_path / "format.json").write_text('{"format": "prefix-recovery", "version": 7}')
    monkeypatch.chdir(tmp_path)
    assert cli.main([]) == 0
    assert "This folder is a store, but: the store has format 'prefix-recovery' version 7" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["list", "show", "latest", "verify", "calls", "cat"])
def test_help_teaches_by_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert ("examples:" in out and out.count(f"snapshot-inspect {verb} runs/17") >= 2) or verb == "list"
    assert "14 nothing published" in out and "--json" in out


@pytest.mark.parametrize(
    "argv",
    [
        *("lst", "list", "show s", "cat s", "list s --last 0", "list s --last x", "verify s --read"),
        *("latest s extra", "calls s --state dead", "--json"),
    ],
)
def test_usage_errors_exit_with_2(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "usage: snapshot-inspect" in captured.err and "error: " in captured.err


def test_every_example_can_be_parsed() -> None:
    texts_ = [text for text in cli.parser().format_help().splitlines() if text.startswith("  snapshot-inspect")]
    texts_ += [example for _, example, _ in cli.EXAMPLES]
    for text in texts_:
        cli.parser().parse_args(text.split()[1:])


# ---- terminals and pipes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["list", "latest", "verify", "calls"])
def test_in_a_pipe_there_is_plain_text(verb: str, folder: Path) -> None:
    for more in ({}, {"FORCE_COLOR": "1"}):
        done = subprocess.run(program(verb, str(folder)), capture_output=True, env=environment(**more), timeout=240)
        assert done.returncode == 0 and done.stderr == b""
        assert done.stdout.isascii() and b"\x1b" not in done.stdout
    if verb in ("list", "calls"):
        rows = [re.split(r"  +", line.strip()) for line in done.stdout.decode().splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}, "columns are told apart by two spaces"


def test_on_a_terminal_there_are_tables(folder: Path) -> None:
    code, out = on_terminal("list", str(folder))
    assert code == 0 and "─" in out
    code, out = on_terminal("verify", str(folder), "--read-data")
    assert code == 0 and "\x1b[" in out and "no problem found" in out


def test_no_color(folder: Path) -> None:
    _, out = on_terminal("verify", str(folder), NO_COLOR="1")
    assert "no problem found" in out and not re.search(r"\x1b\[[0-9;]*m", out), "nor bold"
    _, coloured = on_terminal("verify", str(folder))
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", coloured)


def test_a_terminal_is_shown_no_control_characters_of_a_name(tmp_path: Path) -> None:
    store = MemoryStore()
    job = stores.Job(store)
    stores.say(job.open("a\x1b]0;owned\x07[red]b[/red]"), 5)
    job.snapshot()
    job.close()
    stores.on_disk(tmp_path / "s", stores.objects_of(store))
    _, out = on_terminal("calls", str(tmp_path / "s"))
    assert (
        "\x1b]0;" not in out
        and "\\x1b]0;owned\\x07" in re.sub(r"\s", "", out)
        and "[red]b[/red]" in re.sub(r"\s", "", out)
    )


def test_json_is_the_same_on_a_terminal(folder: Path) -> None:
    _, out = on_terminal("calls", str(folder), "--json")
    assert [json.loads(line)["rollout"] for line in out.splitlines()] == ["p-1", "p-2", "p-10"]


def test_a_closed_pipe_is_quiet_and_keeps_the_exit_code(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    stores.on_disk(
        broken,
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()},
    )
    (segment, *_) = broken.glob("seg/*/*/*")
    segment.unlink()
    for path, code in ((folder, 0), (broken, 1)):
        for more in ((), ("--json",)):
            ours, theirs = os.pipe()
            os.close(ours)
            done = subprocess.run(
                program("verify", str(path), *more),
                stdout=theirs,
                stderr=subprocess.PIPE,
                env=environment(),
                timeout=240,
            )
            os.close(theirs)
            assert (done.returncode, done.stderr) == (code, b"")


INTERRUPTED = """
import os, signal, sys
from snapshot_inspect import progress
progress.Lines.advance = lambda self, nbytes: os.kill(os.getpid(), signal.SIGINT)
from snapshot_inspect.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [("list",), ("calls", "--json"), ("export", "--jsonl", "-"), ()])
def test_a_full_disk_under_stdout_is_an_error_like_any_other(words: tuple[str, ...], folder: Path) -> None:
    argv = [words[0], str(folder), *words[1:]] if words else []
    with open("/dev/full", "w") as full:
        ran = subprocess.run(program(*argv), stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
    assert ran.returncode == 20
    assert "error: cannot write to stdout: no space is left" in ran.stderr and "Traceback" not in ran.stderr


def test_interrupting_is_safe(folder: Path) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, "verify", str(folder), "--read-data", "--json"]
    done = subprocess.run(argv, capture_output=True, env=environment(), timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


IMPORTING = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
import runpy
runpy.run_module(sys.argv[2], run_name="__main__")
"""


@pytest.mark.parametrize("module", ["snapshot_inspect", "prefix_recovery"])
def test_interrupting_the_imports_is_one_line(module: str) -> None:
    argv = [sys.executable, "-c", IMPORTING, f"{module}.cli", module]
    done = subprocess.run(argv, capture_output=True, env=environment(), timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["lates", "x"], "did you mean latest?"),
        (["ls", "x"], "did you mean list?"),
        (["qqq"], "no verb 'qqq'. There are"),
    ],
)
def test_a_mistyped_verb_names_the_nearest(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert wanted in capsys.readouterr().err


def test_the_program_is_what_is_installed(folder: Path) -> None:
    done = subprocess.run(program("latest", str(folder), "--json"), capture_output=True, env=environment(), timeout=240)
    assert done.returncode == 0 and json.loads(done.stdout)["id"] == 5
    assert 'snapshot-inspect = "snapshot_inspect.__main__:command"' in (ROOT / "pyproject.toml").read_text()


LOADED = """
import sys
from snapshot_inspect.cli import main
main(sys.argv[1:])
sys.exit(", ".join({"pyarrow", "rich", "torch", "vllm", "zarr", "fsspec", "tokenizers"} & set(sys.modules)) or 0)
"""


def test_what_needs_no_ledger_loads_no_arrow_and_no_tables(folder: Path) -> None:
    for words in (["list"], ["latest"], ["show", "latest"]):
        argv = [sys.executable, "-c", LOADED, words[0], str(folder), *words[1:]]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=240)
        assert (done.stderr, done.returncode) == ("", 0)


def test_text_that_a_terminal_cannot_show_is_escaped(folder: Path) -> None:
    done = subprocess.run(
        program("latest", str(folder)), capture_output=True, env=environment(PYTHONIOENCODING="ascii"), timeout=240
    )
    assert done.returncode == 0


# ---- progress ------------------------------------------------------------------------------------------------------


def test_a_line_now_and_then_in_a_log_file() -> None:
    now = [0.0]
    stream = io.StringIO()
    lines = progress.Lines(stream, lambda: now[0])
    with lines:
        lines.begin(40, 40_000_000)
        for _ in range(40):
            now[0] += 1.0
            lines.advance(1_000_000)
    said = stream.getvalue().splitlines()
    assert len(said) == 4
    assert said[0] == "verify: 10 of 40 segments, 10.0 MB of 40.0 MB, 1.0 MB/s, 30 s left"


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert cli.main(["verify", str(folder), "--read-data"]) == 0
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(folder: Path) -> None:
    code, out = on_terminal("verify", str(folder), "--read-data", "--json")
    assert code == 0 and "reading segments" in out
    documents = [line for line in out.splitlines() if '"store"' in line]
    assert json.loads(documents[0][documents[0].index("{") :])["ok"] is True


# ---- words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        *((0, "0 s ago"), (59.4, "59 s ago"), (61, "1 min 1 s ago"), (3600, "1 h ago"), (90061, "1 d 1 h ago")),
        *((-0.2, "0 s ago"), (-5, "5 s ahead of this clock"), (400 * 86400 + 61, "400 d ago"), (None, "unknown")),
    ],
)
def test_ages(seconds: float | None, says: str) -> None:
    assert texts.age_text(seconds) == says


@pytest.mark.parametrize(
    ("nbytes", "says"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_960, "1.0 MB"), (4 << 30, "4.3 GB")],
)
def test_sizes(nbytes: float, says: str) -> None:
    assert texts.nbytes_text(nbytes) == says


def test_a_row_is_a_line_whatever_is_in_it() -> None:
    stream = io.StringIO()
    Screen(stream).rows(("a", "b"), [["x\ny", ""], ["\x00", "z\u2028"]], frozenset({"a"}))
    assert stream.getvalue() == "   a  b\nx\\ny  -\n\\x00  z\\u2028\n"


def test_a_root_that_cannot_be_listed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: str) -> Callable[[], None]:
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "x").mkdir()
    monkeypatch.setattr(places.os, "scandir", refused)
    assert cli.main(["list", str(tmp_path)]) == 12
    assert "permission denied" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"snapshot-inspect {metadata.version('prefix-recovery')}\n"


@pytest.mark.parametrize("words", [("verify",), ("export", "one.zip"), ("export", "--jsonl", "one.jsonl")])
def test_what_reads_much_shows_a_bar(words: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    verb, *more = words
    more = [str(tmp_path / word) if "." in word else word for word in more]
    code, out = on_terminal(verb, str(folder), *more)
    assert code == 0 and f"{verb}: reading " in out


# ---- narrow terminals ----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80, 132, 400])
def test_a_wide_table_on_a_narrow_terminal_is_lines_of_their_own(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is cut or broken, no line is wider than the terminal, and every cell stands behind its head."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    heads = [f"head {n}" for n in range(12)]
    rows = [[f"cell {row} of {n}" for n in range(12)] for row in range(3)]
    Screen(stream).rows(heads, [*rows, ["9", *[""] * 10, "a reason"]])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    if columns == 400:
        assert "─" in lines[1]
    else:
        for row in rows:
            assert all(any(f"{head} {cell}" in line for line in lines) for head, cell in zip(heads, row, strict=True))
        assert any(line.startswith("head 0 9") and "head 11 a reason" in line for line in lines)
