"""`bench snapshot`, `bench restore`, `bench kills`, all `--quick`: what they count is right, not how long it took.

Invariant: nothing here depends on how fast the machine is, or on what the seed draws.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.__main__ import main
from bench.kills_paced import FLUSH, Drop, Ours, Redo, drive


def _document(tmp_path: Path, *command: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert main([*command, "--quick", "--json", str(file), "--dir", str(tmp_path)]) == 0
    assert main(["plot", str(file), str(tmp_path / "law.png")]) == 0
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_a_snapshot_is_beside_full_copies_of_the_same_state(tmp_path: Path) -> None:
    figures = _document(tmp_path, "snapshot", "--only", "local")["figures"]["local disk"]
    tokens = [(k * 8 * 16) for k in range(2, 13)]
    assert [point[0] for point in figures["this project"]["all"]] == tokens
    assert max(point[3] for point in figures["this project"]["all"]) <= 8, "two segments, and six others at most"
    for name in ("pickle", "torch.save", "JSON lines", "torch.distributed", "Zarr array per call"):
        points = figures[name]["all"]
        assert [point[0] for point in points] == [tokens[0], tokens[5], tokens[-1]]
        assert points[-1][1] > points[0][1], "a full copy grows"
    assert figures["pickle"]["slope_bytes_per_token"] > 7.9, "eight bytes for every token, again each time"


def test_kills_cost_a_call_no_more_than_a_flush() -> None:
    rows = [3000, 40, 700, 16, 1, 2500] * 20
    ideal = drive(Redo(), rows, [])
    method = Ours()
    outcome = drive(method, rows, [2.0, 40.0, 75.0, 130.0])
    method.close()
    assert sorted(row for _, row in outcome.results) == list(range(len(rows))), "each row exactly once"
    assert outcome.kills >= 3 and method.wrong == 0
    assert max(method.lost_tokens) <= FLUSH
    assert ideal.decoded == sum(rows) <= outcome.decoded <= sum(rows) + sum(method.lost_tokens)
    redone = drive(Redo(), rows, [2.0, 40.0, 75.0, 130.0])
    assert redone.decoded > outcome.decoded and redone.seconds > outcome.seconds
    dropped = drive(Drop(), rows, [2.0, 40.0])
    assert len(dropped.results) < len(rows)


def test_kills_in_small(tmp_path: Path) -> None:
    document = _document(tmp_path, "kills")
    assert document["figures"].keys() == {"ratio", "finish", "bias", "run"}
    assert all(bound["met"] for bound in document["bounds"])


def test_a_restore_is_beside_pyarrow_for_more_and_more_calls(tmp_path: Path) -> None:
    document = _document(tmp_path, "restore")
    figures = document["figures"]["calls"]
    assert {calls: figure["tokens"] for calls, figure in figures.items()} == {"10": 320, "20": 640}
    (law,) = document["laws"]
    assert [len(points) for points in law["series"].values()] == [2, 2, 2, 2]
    assert figures["20"]["bytes"] > figures["10"]["bytes"] > 0
