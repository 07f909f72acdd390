"""recovery.salvage: what a dead writer left in a staging is in the store, once more under its own name."""

from __future__ import annotations

import random

import pytest

from recovery.errors import StoreFull
from recovery.layout import segment_position
from recovery.salvage import salvage
from storage_backends.memory import MemoryStore
from storage_backends.stagings import CheckedStaging, MemoryRows
from storage_backends.testing.faults import FaultyStore, RaiseBefore
from storage_backends.testing.stagings import Fault, FaultyRows, key_for


def filled(rows: FaultyRows | MemoryRows, *flushes: int, writer: str = "w0.0a1b2c3d") -> dict[str, bytes]:
    said = {}
    for flush in flushes:
        data = b"flush %d" % flush * 30
        said[key_for(data, writer=writer, flush=flush)] = data
        rows.put(key_for(data, writer=writer, flush=flush), data)
    return said


def test_everything_that_waits_is_stored_and_then_dropped() -> None:
    rows, store = MemoryRows(), MemoryStore()
    said = filled(rows, 1, 2, 3)
    found = salvage(CheckedStaging(rows), store, "seg/")
    assert (found.segments, found.nbytes, found.unreadable, found.error) == (3, sum(map(len, said.values())), [], None)
    assert {item.key: store.get(item.key) for item in store.list("")} == said and rows.keys() == []
    assert salvage(CheckedStaging(rows), store, "seg/").segments == 0


def test_another_workers_are_left_and_what_is_known_is_only_dropped() -> None:
    rows, store = MemoryRows(), MemoryStore()
    mine, theirs = filled(rows, 1, 2, 3), filled(rows, 1, writer="w1.0a1b2c3d")

    def wanted(key: str) -> bool:
        at = segment_position(key)
        return at is not None and at.flush > 2

    assert salvage(CheckedStaging(rows), store, "seg/e000001/w0.", wanted).segments == 1
    assert [item.key for item in store.list("")] == [max(mine)] and rows.keys() == list(theirs)


def test_one_that_is_not_what_it_was_is_left_and_the_rest_is_taken() -> None:
    rows, store = FaultyRows(MemoryRows(), [Fault.NONE, Fault.OVERWRITE, Fault.GHOST, Fault.NONE]), MemoryStore()
    said = filled(rows, 1, 2, 3, 4)
    found = salvage(CheckedStaging(rows), store, "seg/")
    good, ghosts = [list(said)[k] for k in (0, 3)], [list(said)[k] for k in (1, 2)]
    assert [item.key for item in store.list("")] == good == sorted(good) and [
        key for key, _ in found.unreadable
    ] == ghosts
    assert sorted(rows.keys()) == ghosts, "it may still be somebody's"


def test_a_staging_that_does_not_answer_is_said_and_stops_nothing() -> None:
    rows = FaultyRows(MemoryRows())
    filled(rows, 1)
    rows.dead = True
    found = salvage(CheckedStaging(rows), MemoryStore(), "seg/")
    assert found.error is not None and found.segments == 0


def test_a_store_that_refuses_is_an_error_and_nothing_is_dropped() -> None:
    rows = MemoryRows()
    said = filled(rows, 1, 2)
    store = FaultyStore(MemoryStore(), [RaiseBefore(StoreFull("no space"))])
    with pytest.raises(StoreFull):
        salvage(CheckedStaging(rows), store, "seg/")
    assert set(rows.keys()) == set(said)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_rows_do_only_what_was_staged_is_stored(seed: int) -> None:
    chance = random.Random(seed)
    plan = [chance.choice([Fault.NONE, Fault.DROP, Fault.GHOST, Fault.OVERWRITE, Fault.ANOTHER]) for _ in range(20)]
    rows, store = FaultyRows(MemoryRows(), plan), MemoryStore()
    said = filled(rows, *range(1, 21))
    found = salvage(CheckedStaging(rows), store, "seg/")
    assert all(store.get(item.key) == said[item.key] for item in store.list(""))
    sure = {key for key, fault in zip(said, plan, strict=True) if fault is Fault.NONE}
    assert sure <= {item.key for item in store.list("")}
    assert found.segments + len(found.unreadable) == 20 - plan.count(Fault.DROP)
