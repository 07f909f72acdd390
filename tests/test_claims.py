"""recovery.claims: who held a store and who fenced whom, without reading the whole log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import log
from recovery.claims import latest_claims
from recovery.errors import Damaged, ObjectMissing
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore
from tests.fakes import ManualClock, SeededEntropy


def log_with(lengths: list[int]) -> MemoryStore:
    """One coordinator after the other; each claims and appends so many slots."""
    store = MemoryStore()
    for number, n_slots in enumerate(lengths):
        one = SlotLog(store, ManualClock(), SeededEntropy(number), f"owner {number}")
        one.claim()
        for _ in range(n_slots):
            one.append("snapshot", {})
    return store


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 5))
def test_c14_the_latest_claims_are_found_newest_first(lengths: list[int], most: int) -> None:
    """C14: against a plain count: each coordinator's claim stands where the slots before it end."""
    tail = sum(lengths) + len(lengths)
    starts = [1 + sum(lengths[:n]) + n for n in range(len(lengths))]
    found = latest_claims(log_with(lengths), tail, most)
    wanted = list(zip(starts, (f"owner {n}" for n in range(len(lengths))), strict=True))[::-1][:most]
    assert [(slot.seq, slot.owner) for slot in found] == wanted
    assert all(slot.kind == "epoch" for slot in found)


def test_a_long_log_is_not_read_through() -> None:
    counting = CountingStore(log_with([3, 1500]))
    assert [slot.seq for slot in latest_claims(counting, 1505, 2)] == [5, 1]
    assert counting.count() < 40


def test_what_is_missing_or_damaged_on_the_way_is_named() -> None:
    store = log_with([3, 4])
    store.put(log.slot_key(6), b"?")
    with pytest.raises(Damaged, match="log slot 6"):
        latest_claims(store, 9, 2)
    store.delete(log.slot_key(6))
    with pytest.raises(ObjectMissing, match="log slot 6 is missing"):
        latest_claims(store, 9, 2)
