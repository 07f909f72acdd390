"""The golden store whose ledger means calls by numbers: the job of v1-arrow, read by both readers to the same bits.

The store is bytes that an earlier version wrote. Nothing here writes into tests/golden. What v1-arrow has, which was
written before there were numbers, is carried on with them.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from storage_backends.local import LocalStore
from tests.golden.make_golden import Life
from tests.independent_reader import check_everything, read_store
from tests.test_independent_reader import EXPECTED, GOLDEN, NEWEST, WHOLE, check, independent, project

NAME = "v1-arrow-numbered"
STORE = GOLDEN / NAME


def requirements(root: Path) -> set[bool]:
    """Of its ledger objects with rows: whether each requires numbers. A file of a few bytes is foreign."""
    objects = filter(lambda data: len(data) > 100, (path.read_bytes() for path in root.glob("ledger/*/*.arrow")))
    files = [pa.ipc.open_file(pa.BufferReader(data)) for data in objects]
    return {b"call-numbers" in file.schema.metadata[b"prefix-recovery"] for file in files if file.read_all().num_rows}


def test_golden_files_are_the_ones_that_were_written() -> None:
    lines = (GOLDEN / f"{NAME}.sha256").read_text("utf-8").splitlines()
    listed = {key: digest for digest, key in (line.split("  ", 1) for line in lines)}
    files = [path for path in STORE.rglob("*") if path.is_file()]
    found = {path.relative_to(GOLDEN).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert found == listed
    assert sum(path.stat().st_size for path in files) < 170_000
    assert requirements(STORE) == {True} and requirements(GOLDEN / "v1-arrow") == {False}


def test_it_says_what_the_one_without_numbers_says() -> None:
    assert check_everything(STORE) == (EXPECTED["readable"], EXPECTED["collected"])


@pytest.mark.parametrize("number", WHOLE)
def test_golden_snapshot_read_by_both(number: int) -> None:
    wanted = EXPECTED["snapshots"][str(number)]["calls"]
    check(independent(read_store(STORE, number)["snapshot"]), wanted)
    check(project(LocalStore(STORE), number), wanted)


def test_a_store_without_numbers_is_carried_on(tmp_path: Path) -> None:
    """Its calls go on under their ids, new ones have numbers; both readers read what comes of it."""
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / "v1-arrow", root)
    before = {call["rollout"] for call in EXPECTED["snapshots"][str(NEWEST)]["calls"]}
    life = Life(LocalStore(root), seed="on")
    for number in range(3):
        life.open(f"later-{number}", 0, [5, 6, 7], sampling={"max_tokens": 64, "temperature": 0.0})
        life.flush()
        life.snapshot()
    life.close()
    calls = independent(read_store(root)["snapshot"])
    assert {call["rollout"] for call in calls} >= before | {f"later-{number}" for number in range(3)}
    check(project(LocalStore(root)), calls)
    assert requirements(root) == {False, True}
