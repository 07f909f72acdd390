"""`bench capture --quick` with an engine: capture changes no token; how long it took is not looked at."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import engines
from bench.__main__ import main


def test_an_engine_says_the_same_with_capture_and_without(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "tiny_model", lambda folder: nullcontext(str(tiny_model)))
    file = tmp_path / "figures.json"
    assert main(["capture", "--only", "tiny", "--quick", "--json", str(file), "--dir", str(tmp_path)]) == 0
    figures = json.loads(file.read_text())["figures"]["engine"]
    assert figures.keys() == {"tiny, 1 calls", "tiny, 4 calls"}
    for name, found in figures.items():
        calls = int(name.split()[1])
        assert found["same"] and found["counted"]["captured"] == 8 * calls
