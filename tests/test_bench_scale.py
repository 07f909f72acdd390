"""`bench scale --quick`: the simulations run, and what they count is right; how long they take is not looked at.

Invariant: nothing here depends on how fast the machine is, or on what the seed draws.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from bench import everything
from bench.__main__ import VERBS, main
from bench.jobs import Life
from bench.prices import dollars
from bench.scale_day import Day, Size
from bench.simulated import Fleet, is_as_decoded
from recovery.errors import StoreUnavailable
from recovery.layout import SEGMENTS
from recovery.protocol import Verdict
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore, RaiseBefore, Step, Verb


def _document(tmp_path: Path, part: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert main(["scale", "--quick", "--only", part, "--json", str(file)]) == 0
    assert main(["plot", str(file), str(tmp_path / "law.png")]) == 0
    with Image.open(tmp_path / "law.png") as drawn:
        assert drawn.format == "PNG" and drawn.width == 560 * 2
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def test_a_million_calls_in_small(tmp_path: Path) -> None:
    document = _document(tmp_path, "million")
    figures = document["figures"]["million"]
    assert figures["in the ledger"] == {"calls": 400, "chunks": 400 * 5}
    assert figures["restore"]["as_decoded"] == 400
    assert figures["objects created"]["all"] == [8 + 3] * 5, "a segment for each worker; ledger, slot and hint"
    assert figures["requests"]["put_new"] == 5 * (8 + 2)
    assert all(bound["met"] for bound in document["bounds"])


def test_a_day_of_failures_in_small_loses_nothing(tmp_path: Path) -> None:
    document = _document(tmp_path, "day")
    figures = document["figures"]["day"]
    assert figures["snapshots published"] + figures["snapshots abandoned"] <= 60 and figures["requests"]["put_new"]
    met = {bound["name"]: bound["met"] for bound in document["bounds"]}
    assert len(met) == 4 and all(met.values()), met


def test_a_store_that_hardly_ever_works_loses_nothing_either(rng: random.Random) -> None:
    draw = np.random.default_rng(rng.randrange(1 << 32))
    day = Day(Size(workers=3, calls=12, minutes=40, tokens=64, failures=40), draw)
    day.run()
    assert (day.seen.behind, day.seen.lost, day.seen.other, day.seen.ended_twice) == (0, 0, 0, 0)


def test_what_was_stored_before_a_snapshot_failed_is_in_the_next() -> None:
    """One worker's segment is stored, the other's is not, and the snapshot is abandoned."""
    segments: list[str] = []

    def step(verb: Verb, key: str) -> Step:
        segments.extend([key] * (verb == "put_new" and key.startswith(SEGMENTS)))
        return RaiseBefore(StoreUnavailable("now")) if len(segments) == 4 and segments[-1] == key else PASS

    life = Life(FaultyStore(MemoryStore(), step), lambda seat: Fleet(seat, 2))
    life.workers.open(range(6), [100] * 6)
    verdicts = []
    for _ in range(3):
        life.workers.decode(8)
        verdicts.append(life.attempt().verdict)
        if verdicts[-1] is Verdict.PUBLISHED:
            assert life.workers.behind(life.publication.ledger) == 0
    assert verdicts == [Verdict.PUBLISHED, Verdict.ABANDONED, Verdict.PUBLISHED]
    assert [entry.n_tokens for entry in life.publication.ledger] == [24] * 6


def test_a_lost_worker_begins_its_calls_again_and_a_rewound_one_hands_them_over_again() -> None:
    store = MemoryStore()
    life = Life(store, lambda seat: Fleet(seat, 2))
    life.workers.open(range(6), [100] * 6)
    life.workers.decode(8)
    life.snapshot()
    life.workers.lose(0)
    life.workers.decode(8)
    life.snapshot()
    assert sorted((e.attempt, e.n_tokens) for e in life.publication.ledger) == [(0, 16)] * 3 + [(1, 8)] * 3
    ledger = life.publication.ledger
    stored = {entry.call_id: None for entry in list(ledger)}
    for call_id in stored:
        ledger.drop(call_id)
    life.workers.rewind(stored)
    life.snapshot()
    assert sorted((e.attempt, e.n_tokens) for e in ledger) == [(0, 16)] * 3 + [(1, 8)] * 3
    again = Life(store, lambda seat: Fleet(seat, 2))
    assert len(again.restored.calls) == 6 and all(map(is_as_decoded, again.restored.calls))


def test_a_thousand_writes_cost_what_is_listed() -> None:
    assert dollars({"put_new": 600, "put": 200, "list": 200, "get": 10_000, "delete": 5}) == 0.005 + 0.004


def test_all_of_them_are_run_and_every_bound_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=200)
    out, pictures = tmp_path / "out", tmp_path / "docs"
    pictures.mkdir()
    ran = everything.run(console, ("scale", "no-such-verb"), out, 5, quick=True, pictures=pictures)
    said = capsys.readouterr().out
    assert ran == 1 and "scale-day: calls that ended twice" in said and "bench no-such-verb FAILED" in said
    runs = ("scale-million", "scale-day")
    assert {path.name for path in out.iterdir()} == {
        f"{run}.{suffix}" for run in runs for suffix in ("json", "png")
    } | {"all.json"}
    assert {path.name for path in pictures.iterdir()} == {f"benchmarks-{run}.png" for run in runs}
    assert set(json.loads((out / "all.json").read_text())["figures"]["seconds"]) == set(runs)


def test_every_part_is_run_once_and_what_takes_time_has_the_machine_to_itself() -> None:
    steps = everything.steps(tuple(VERBS))
    names = [name for step in steps for lane in step for name in lane]
    assert len(set(names)) == len(names)
    assert [step for step in steps if len(step) > 1] == [[["scale-day"], ["kills", "scale-million"]]]
    for verb, module in VERBS.items():
        runs = everything.PARTS.get(verb, {verb: module.PARTS})
        assert set(runs) <= set(names) and sorted(part for parts in runs.values() for part in parts) == sorted(
            module.PARTS
        )
