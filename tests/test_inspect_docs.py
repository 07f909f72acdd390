"""docs/snapshot-inspect.md shows what the program prints, and its code runs.

Owns: the stores that the page's examples look into.
Does not know: what is right (the other test_inspect files).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from snapshot_inspect import cli
from storage_backends.memory import MemoryStore
from tests import inspect_stores as stores

PAGE = Path(__file__).parent.parent / "docs" / "snapshot-inspect.md"
NOW = stores.BEGIN_UTC + 3600 + 60 + 200
"""A little more than three minutes after the last snapshot."""


def make_runs(folder: Path) -> None:
    """runs/16: one snapshot; runs/17: several, carried on after a crash; runs/18: the newest segment is lost."""
    for name, make in (("16", stores.one_snapshot), ("17", stores.carried_on), ("18", stores.several)):
        store = MemoryStore()
        make(store).close()
        stores.on_disk(folder / "runs" / name, stores.objects_of(store))
    max((folder / "runs" / "18" / "seg").rglob("*.arrow")).unlink()


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_runs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.time, "time", lambda: NOW)
    return tmp_path


def test_the_examples_print_what_the_page_shows(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [block.partition("\n") for block in _blocks("console")]
    assert len(shown) >= 9
    for command, _, output in shown:
        assert command.startswith("$ snapshot-inspect ")
        cli.main(command.split()[2:])
        assert _settled(capsys.readouterr().out) == _settled(output), command


def _settled(text: str) -> str:
    """Without what another version of Arrow changes: sizes, shares, sums in keys, and how wide their columns are."""
    text = re.sub(r"[0-9a-f]{8,}", "<hex>", text)
    text = re.sub(r"\d+\.\d %", "<share>", text)
    text = re.sub(r"\d+\.\d\d raw bytes a stored", "<ratio> raw bytes a stored", text)
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d)? k?B", "<size>", text))


def test_the_code_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["cat", "runs/17", "p-1", "--json"])
    (runs / "call.json").write_text(capsys.readouterr().out)
    for block in _blocks("python"):
        names: dict[str, Any] = {}
        exec(compile(block, str(PAGE), "exec"), names)
        assert names["logprobs"].tolist() == json.loads((runs / "call.json").read_text())["logprobs"]


def test_the_usage_lines_are_those_of_the_parser() -> None:
    (usage,) = _blocks("text")
    told: dict[str, set[str]] = defaultdict(set)
    for line in usage.splitlines():
        if line.startswith("snapshot-inspect"):
            verb = line.split()[1]
            told[verb] |= set(re.findall(r"--[a-z-]+", line))
    for verb, known in _options():
        assert told[verb] <= set(known) and set(known) - told[verb] <= {"--help", "--json"}, verb


def _options() -> list[tuple[str, list[str]]]:
    (verbs,) = [action for action in cli.parser()._actions if action.choices]
    assert isinstance(verbs.choices, dict)
    return [
        (name, [option for action in verb._actions for option in action.option_strings if option.startswith("--")])
        for name, verb in verbs.choices.items()
    ]


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).is_file(), target


def test_every_exit_code_that_can_come_out_is_in_the_table() -> None:
    for code in (0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 20, 130):
        assert re.search(rf"^\| {code} \|", PAGE.read_text(), re.MULTILINE), code
