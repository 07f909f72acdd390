"""`bench store --quick`: every figure is there and has the form that its schema says; its size is not looked at.

Invariant: nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from PIL import Image

from bench import corpus, full_copies, store
from bench.__main__ import main
from bench.measuring import Interval, Spread, paired, ratios, there_and_back
from bench.report import Bound, nbytes_text

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "schemas" / "bench-store.json").read_text())


def test_f3_all_parts_run_and_every_figure_is_there(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--quick", "--seed", "7", "--json", str(file), "--dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "bench", "store", *options]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    document: dict[str, Any] = json.loads(file.read_text())
    jsonschema.validate(document, SCHEMA)
    assert (document["seed"], document["quick"]) == (7, True)
    figures = document["figures"]
    assert figures.keys() == {"data", "run", *store.PARTS}
    for place in ("local", "local, compacted", "S3 (moto)"):
        for quantity in ("bytes", "of it ledger", "ms", "processor ms", "objects"):
            assert len(figures["cost"][f"{place}: {quantity}"]["all"]) >= 4
    what = "natural text, modelled logprobs"
    for name in ("arrow", "zarr"):
        for length in (64, 256, 1024):
            assert figures["size"][f"{what}: {name}, chunks of {length}"] > 0
    for name in ("raw arrays", "torch.save of tensors", "JSON lines", "Parquet (zstd)", "pickle of lists"):
        assert figures["size"][f"{what}: {name}"] >= 4
    assert {"token_ids", "logprobs", "digest"} <= figures["size"][f"{what}: columns of arrow, chunks of 256"].keys()
    assert (
        figures["restore"]["as flushed"]["chunks_per_call"] == 4
        and figures["restore"]["compacted"]["chunks_per_call"] == 1
    )
    assert len(figures["ways"]) == 7 and figures["ways"]["object per call and chunk"]["objects"] == 4 * 3
    assert figures["objects"]["in the store"]["chunks"] == 100 > figures["objects"]["in the store"]["total"]
    bounds = {bound["name"]: bound["met"] for bound in document["bounds"]}
    assert all(met for name, met in bounds.items() if name.startswith("objects")), bounds
    for words in ("seed 7", "cost of", "size of", "restore of", "today's ways", "(F3)", "bounds"):
        assert words in shown
    assert not list(tmp_path.glob("bench-store-*")), "its stores are removed"
    picture = tmp_path / "cost.png"
    assert main(["plot", str(file), str(picture)]) == 0
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG" and drawn.width > drawn.height > 300
        assert len(drawn.convert("RGB").getcolors()) > 5, "axes and each place"
    assert picture.stat().st_size < 100_000


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["store", "--only", "cost,speed"])
    assert caught.value.code == 2 and "there is no part 'speed'" in capsys.readouterr().err


def test_ways_are_run_once_a_round_and_ratios_are_of_one_round() -> None:
    ran: list[str] = []
    wall, processor = paired({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, 2, np.random.default_rng(1))
    assert [sorted(ran[at : at + 2]) for at in range(0, 6, 2)] == [["a", "b"]] * 3
    assert [len(times) for times in (*wall.values(), *processor.values())] == [2] * 4
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)


def test_what_drifts_evenly_falls_on_every_way_of_a_round_there_and_back() -> None:
    rng = np.random.default_rng(3)
    orders = [there_and_back(3, rng) for _ in range(20)]
    assert all(sum(at for at, way in enumerate(order) if way == one) == 5 for order in orders for one in range(3))
    assert len({tuple(order) for order in orders}) == 6


def test_an_interval_holds_its_median_and_a_control_is_as_far_off_as_its_farther_end() -> None:
    """Its width against the sign test's: of 25 ratios the 8th and the 18th hold the median 19 times of 20."""
    ratios = np.random.default_rng(5).normal(1.0, 0.1, 25)
    found = Interval.of(ratios.tolist(), np.random.default_rng(1))
    ordered = np.sort(ratios)
    assert ordered[5] < found.low < ordered[9] < found.median == ordered[12] < ordered[15] < found.high < ordered[19]
    assert Interval(0.9, 0.8, 1.1, 3).off == 1.25 and Interval(1.0, 0.99, 1.2, 3).off == 1.2
    assert Interval.of([2.0] * 4, np.random.default_rng(1)) == Interval(2.0, 2.0, 2.0, 4)


def test_what_is_promised_is_met_up_to_its_limit() -> None:
    assert Bound("x", 2.0, 2.0).met and not Bound("x", 2.01, 2.0).met
    assert [nbytes_text(n) for n in (12, 1200, 3_400_000, 5e9)] == ["12 B", "1.2 kB", "3.4 MB", "5.00 GB"]


def test_tokens_and_logprobs_are_the_same_for_the_same_seed() -> None:
    found = corpus.load_corpus(20_000)
    assert found.sha256 == corpus.load_corpus(20_000).sha256 and len(np.unique(found.token_ids)) > 500
    one, other = (corpus.model_logprobs(np.random.default_rng(3), 40_000) for _ in range(2))
    assert one.tobytes() == other.tobytes() and one.dtype == np.float32 and (one <= 0).all()
    assert 0.15 < (one == 0).mean() < 0.25 and 0.35 < (one > -0.01).mean() < 0.5 and -1 < one.mean() < -0.5


def test_a_way_that_loses_something_is_found_out() -> None:
    call = (np.arange(3, dtype=np.int32), np.zeros(3, np.float32))
    with pytest.raises(RuntimeError, match="x does not give back"):
        full_copies.check("x", [call], [(call[0] + 1, call[1])])


def test_a_look_at_a_long_log_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latest", "--quick", "--json", str(tmp_path / "f.json")]) == 0
    document = json.loads((tmp_path / "f.json").read_text())
    jsonschema.validate(document["figures"]["latest"]["bytes"], {"type": "integer", "exclusiveMinimum": 0})
    assert [bound["name"] for bound in document["bounds"]] == ["seconds of latest", "bytes of latest"]
