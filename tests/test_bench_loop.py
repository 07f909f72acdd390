"""`bench cut --quick`, `bench capture --quick`: what is timed did what it should; how long it took is not looked at.

Invariant: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from bench.__main__ import main


def _figures(tmp_path: Path, *command: str) -> dict[str, Any]:
    file, picture = tmp_path / "figures.json", tmp_path / "law.png"
    assert main([*command, "--quick", "--seed", "5", "--json", str(file), "--dir", str(tmp_path)]) == 0
    assert main(["plot", str(file), str(picture)]) == 0
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
    figures: dict[str, Any] = json.loads(file.read_text())["figures"]
    return figures


def test_every_cut_finds_the_same_tokens(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "cut", "--only", "cut")["cut"]
    assert len(figures) == 4
    for name, found in figures.items():
        assert name.endswith(f" {found['tokens_after']} tokens") and found["n"] == 5
        assert 0 < found["p50"] <= found["p99"] <= found["max"]


def test_the_hook_takes_every_token_of_the_source(tmp_path: Path) -> None:
    figures = _figures(tmp_path, "capture", "--only", "hook")["hook"]
    ways = ("streamed", "streamed, no ranks", "polled", "polled, no ranks", "lists")
    assert figures.keys() == {f"{way}, {n} calls" for way in ways for n in (8, 16)}
    assert {found["tokens"] for found in figures.values()} == {128}
