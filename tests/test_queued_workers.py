"""Workers whose flushes wait in a staging: whoever dies, and whatever the staging does, calls end as they would have.

The staging's rows are in memory here; test_transfer_queue.py plays the same with a real queue.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from recovery.config import CheckpointingConfig, GymConfig
from recovery.errors import StoreUnavailable
from storage_backends.stagings import CheckedStaging, MemoryRows, Rows
from storage_backends.testing.stagings import Fault, FaultyRows
from tests.queued_lives import (
    LONG,
    kill_a_worker,
    kill_the_coordinator,
    one_after_another,
    one_process,
    played,
)


@pytest.fixture
def rows() -> MemoryRows:
    return MemoryRows()


def staged_in(monkeypatch: pytest.MonkeyPatch, rows: Rows) -> None:
    monkeypatch.setattr("vllm_hooks.opening.staging_for", lambda config, store: CheckedStaging(rows))


def test_w1_a_killed_workers_tokens_are_salvaged(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    staged_in(monkeypatch, rows)
    lost, twice = played(tmp_path, rng, kill_a_worker)
    assert lost.n_waiting > 0 and not lost.error
    assert 100 - 2 * 8 < lost.n_tokens <= 102, "what it had decoded, but for less than a flush of each call"
    assert 0 <= twice < 2 * 8, "less than a flush of each of its two calls"


def test_a_killed_worker_with_a_dead_queue_costs_what_waited_and_nothing_else(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    faulty = FaultyRows(rows)
    staged_in(monkeypatch, faulty)

    def dies() -> None:
        faulty.dead = True

    lost, twice = played(tmp_path, rng, kill_a_worker, dies)
    assert lost.n_waiting == 0 and "nobody answers" in lost.error
    assert twice >= 100, "all that it had decoded"


def test_the_coordinator_dies_and_the_next_one_salvages(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    staged_in(monkeypatch, rows)
    played(tmp_path, rng, kill_the_coordinator)


def test_everything_dies_but_the_queue_and_the_next_run_goes_on_from_what_waited(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    staged_in(monkeypatch, rows)
    n_reused = played(tmp_path, rng, one_after_another)
    assert n_reused > 0 and len(rows.keys()) == 0, "what is in snapshots does not wait any more"


def test_what_waited_and_is_not_what_it_was_is_told(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    """Somebody overwrites all that a worker had flushed: its calls go on from what the store has."""
    staged_in(monkeypatch, rows)

    def overwritten() -> None:
        for key in rows.keys():  # noqa: SIM118
            rows.put(key, b"somebody else's")

    lost, twice = played(tmp_path, rng, kill_a_worker, overwritten)
    assert lost.n_waiting == 0 and "has crc32c" in lost.error
    assert twice >= 100


def test_w1_a_session_in_one_process_goes_on_from_what_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    staged_in(monkeypatch, rows)
    gym = GymConfig(generation_chunk_flush_tokens=8)
    config = CheckpointingConfig(enabled=True, store=str(tmp_path / "store"), gym=gym, snapshot_interval_s=3600)
    found, tokens = asyncio.run(one_process(config, LONG[0]))
    assert 101 - 8 < found <= 101 and tuple(tokens) == LONG[0].reference()


def test_a_run_whose_queue_does_not_answer_does_not_begin(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    faulty = FaultyRows(rows)
    faulty.dead = True
    staged_in(monkeypatch, faulty)
    with pytest.raises(StoreUnavailable, match="nobody answers"):
        played(tmp_path, rng, one_after_another)


@pytest.mark.filterwarnings("default::recovery.restored.PassedOverWarning")  # what the queue lost, it says so
@pytest.mark.parametrize("seed", range(8))
def test_with_a_queue_that_fails_as_it_likes_nothing_differs(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, rows: MemoryRows
) -> None:
    chance = random.Random(seed)
    faulty = FaultyRows(rows, [chance.choice([Fault.NONE, *Fault]) for _ in range(400)])
    staged_in(monkeypatch, faulty)
    play: Any = chance.choice([kill_a_worker, kill_the_coordinator])
    played(tmp_path, chance, play)
