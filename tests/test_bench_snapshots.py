"""`bench snapshot`, `bench restore`, `bench kills`, all `--quick`: what they count is right, not how long it took.

Invariant: nothing here depends on how fast the machine is, or on what the seed draws.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import exact, store_restore
from bench.__main__ import main
from bench.jobs import Job
from bench.kills_paced import FLUSH, Drop, Ours, Redo, drive
from storage_backends import open_store
from storage_backends.memory import MemoryStore


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


def test_what_a_store_lacks_of_what_it_was_given_is_found_out() -> None:
    job = Job(MemoryStore())
    job.open([np.arange(3, dtype=np.int32)] * 2)
    for number in range(2):
        job.append(number, np.arange(4, dtype=np.int32), np.zeros(4, np.float32))
    job.snapshot()
    job.gives_back()
    job.append(1, np.arange(1, dtype=np.int32), np.zeros(1, np.float32))
    with pytest.raises(RuntimeError, match="does not give back what rollout-000001"):
        job.gives_back()
    before = job.store.list("ledger/")
    job.snapshot()
    job.gives_back()
    (newest,) = set(job.store.list("ledger/")).difference(before)
    del job.calls[0]
    with pytest.raises(RuntimeError, match="2 calls of 1"):
        job.gives_back()
    job.store.delete(newest.key)
    with pytest.raises(RuntimeError, match=r"passed over .*snapshot 4"):
        job.gives_back()
    job.close()


def test_a_baseline_that_decodes_less_is_found_out(tmp_path: Path) -> None:
    job = Job(open_store(tmp_path, create=True))
    job.open([np.arange(3, dtype=np.int32)])
    for _ in range(2):
        job.append(0, np.arange(4, dtype=np.int32), np.zeros(4, np.float32))
        job.snapshot()
    job.close()
    calls, keys = store_restore.restored(tmp_path), sorted(job.publication.ledger.segments_in_use())
    store_restore.same_work(calls, store_restore.decode(tmp_path, keys, threads=False))
    with pytest.raises(RuntimeError, match="brought back 8 tokens, pyarrow alone decoded 4"):
        store_restore.same_work(calls, store_restore.decode(tmp_path, keys[1:], threads=False))
    with pytest.raises(RuntimeError, match="brought back 0 tokens"):
        store_restore.same_work([], store_restore.decode(tmp_path, keys, threads=False))


def test_parts_that_were_not_taken_out_are_found_out() -> None:
    group = exact.GROUPS["parts"]
    exact.check_parts(group, [4, 2, 2])
    for running in ([2, 2, 2], [0, 0, 0], [4, 4, 2]):
        with pytest.raises(RuntimeError, match="not in, or not out"):
            exact.check_parts(group, running)


def test_an_end_that_was_handed_out_and_is_not_in_the_store_is_wrong() -> None:
    method = Ours()
    method.decoded({0: 16, 1: 16})
    method.ended([0])
    method.killed({1: 16})
    assert method.wrong == 0
    method._over.add(7)
    method.killed({1: 16})
    assert method.wrong == 1
    method.close()
