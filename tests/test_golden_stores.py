"""The golden stores with wide columns, one job in two encodings, and the one of calls that led to one another: read by
both readers to the bits that were fed in (L3).

The stores are bytes that an earlier version wrote. Nothing here writes into tests/golden.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import Damaged
from storage_backends.codecs import CodecName
from storage_backends.local import LocalStore
from tests.golden.make_golden import bits, expectation
from tests.golden.make_golden_lineage import golden_lineage
from tests.golden.make_golden_wide import golden_wide
from tests.independent_reader import BadStore, check_everything, read_store
from tests.test_independent_reader import check, independent, project

GOLDEN = Path(__file__).parent / "golden"
WIDE: dict[str, CodecName] = {"v1-arrow-wide": "arrow", "v1-zarr": "zarr"}
LINEAGE = "v1-arrow-lineage"
STORES: dict[str, CodecName] = {**WIDE, LINEAGE: "arrow"}
FLIPS_PER_SEGMENT = 8

by_store = pytest.mark.parametrize("name", STORES)


def expected(name: str) -> Any:
    file = "expected-lineage.json" if name == LINEAGE else "expected-wide.json"
    return json.loads((GOLDEN / file).read_text("utf-8"))


@by_store
def test_golden_files_are_the_ones_that_were_written(name: str) -> None:
    lines = (GOLDEN / f"{name}.sha256").read_text("utf-8").splitlines()
    listed = {key: digest for digest, key in (line.split("  ", 1) for line in lines)}
    files = [path for path in (GOLDEN / name).rglob("*") if path.is_file()]
    assert {
        path.relative_to(GOLDEN).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    } == listed
    assert sum(path.stat().st_size for path in files) < 150_000
    segments = [path for path in files if "seg" in path.parts]
    assert len(segments) == 5 and {path.suffix for path in segments} == {f".{STORES[name]}"}


@by_store
def test_l3_both_readers_find_what_was_fed_in(name: str) -> None:
    store, told = read_store(GOLDEN / name), expected(name)
    assert [slot["kind"] for slot in store["slots"]] == told["kinds"]
    assert check_everything(GOLDEN / name) == (told["readable"], told["collected"])
    for number in told["readable"]:
        wanted = told["snapshots"][str(number)]
        found = read_store(GOLDEN / name, number)["snapshot"]
        assert {field: found[field] for field in ("cause", "restored_from", "states")} == {
            field: wanted[field] for field in ("cause", "restored_from", "states")
        }
        check(independent(found), wanted["calls"])
        check(project(LocalStore(GOLDEN / name), number), wanted["calls"])


def newest(name: str) -> list[Any]:
    """The calls of the newest snapshot."""
    told = expected(name)
    calls: list[Any] = told["snapshots"][str(told["readable"][-1])]["calls"]
    return calls


def test_the_golden_store_of_lineages_holds_what_it_is_for() -> None:
    calls = {(call["rollout"], call["turn"]): call for call in newest(LINEAGE)}
    root, first, second = (calls["a", turn] for turn in range(3))
    assert "lineage" not in root["extra"] and calls["b", 0]["extra"]["lineage"] == {"call": 2**32 - 1, "parent": None}
    assert first["extra"]["lineage"]["parent"] == root["call_id"]
    assert second["extra"]["lineage"] == {"call": 1, "parent": first["call_id"]}
    assert first["token_ids"][2] == 13, "adopted"
    objects = [path.read_bytes() for path in (GOLDEN / LINEAGE).glob("ledger/*/*")]
    assert len({b"call-lineage" in data for data in objects}) == 2, "objects that require it, and one that does not"


def test_the_golden_stores_hold_what_they_are_for() -> None:
    """The cases because of which they are as they are; without one of them they would prove less."""
    calls = {call["rollout"]: call for call in newest("v1-zarr")}
    columns = {name: call.get("columns", []) for name, call in calls.items()}
    assert not columns["without"] and len(calls["without"]["token_ids"]) == 5
    runs = [(c["name"], c["type"], c["width"], c["start"], c["stop"]) for c in columns["p-1"]]
    assert [run for run in runs if run[0] == "top_ids"] == [
        ("top_ids", "int32", 5, 0, 4),  # two chunks, joined; then a token without it
        ("top_ids", "int32", 2, 5, 7),  # another width
        ("top_ids", "int32", 5, 7, 10),  # an adopted chunk, joined with one of the next life; the last token is without
    ]
    assert [run for run in runs if run[0] == "top_logprobs"] == [("top_logprobs", "float32", 5, 0, 10)]
    assert {c["type"] for c in columns["every type"]} == {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    }
    words = "".join(c["bits"] for c in columns["p-1"] if c["name"] == "top_logprobs")
    for value in (float("nan"), -float("inf"), -0.0, 1e-45):
        assert bits(value).to_bytes(4, "little").hex() in words
    assert len(calls["many"]["token_ids"]) == 70 and [c["start"] for c in columns["many"]] == [0, 66]


@by_store
def test_current_code_writes_the_same_job(name: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    life = golden_lineage(store) if name == LINEAGE else golden_wide(store, STORES[name])
    assert json.loads(json.dumps(expectation(life, store, whole=None))) == expected(name)
    for calls in (independent(read_store(tmp_path)["snapshot"]), project(store)):
        check(calls, newest(name))


@by_store
def test_flipped_bytes_of_segments_are_found_and_named_by_both(name: str, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / name, root, copy_function=shutil.copyfile)
    for path in sorted(root.glob("seg/*/*/*")):
        data, key = path.read_bytes(), path.relative_to(root).as_posix()
        for at in range(0, len(data), len(data) // FLIPS_PER_SEGMENT):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            with pytest.raises(BadStore, match=key):
                read_store(root)
            with pytest.raises(Damaged, match=key):
                project(LocalStore(root))
        path.write_bytes(data)
    check(project(LocalStore(root)), newest(name))
