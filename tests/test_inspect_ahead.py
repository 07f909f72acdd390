"""Slots that are asked for ahead are those that are there, in the same order, with the same errors."""

from __future__ import annotations

from typing import Any

import pytest

from recovery.errors import StoreUnavailable
from recovery.log_reading import read_slot
from recovery.slots import SlotLog
from snapshot_inspect import ahead
from snapshot_inspect.survey import Unreadable, walk
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy


def _log(n: int) -> MemoryStore:
    store = MemoryStore()
    stores.empty(store)
    log = SlotLog(store, ManualClock(), SeededEntropy(), "host-a pid 1")
    log.claim()
    ref = {"key": "ledger/e000001/00000000000000aa.arrow", "nbytes": 1, "sha256": "0" * 64}
    while log.tail < n:
        log.append("snapshot", {"ledger": ref, "states": {}})
    return store


def _told(found: Any) -> Any:
    return (found.seq, found.error.message) if isinstance(found, Unreadable) else found


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_a_log_is_the_same_ahead_or_not(n: int) -> None:
    store = _log(n)
    for missing, mangled in ((n // 2 + 1, n // 3 + 1), (1, n), (n - 1, 2)):
        damaged = stores.copy_of(store)
        damaged.delete(f"log/{max(1, missing):012d}.json")
        damaged.put(f"log/{mangled:012d}.json", b"{")
        for one in (store, damaged):
            counting = CountingStore(one)
            assert [_told(f) for f in walk(counting, n, whole=True)] == [_told(f) for f in walk(one, n)]
            assert counting.count("get") == n, "each slot once"


def test_a_short_look_asks_for_little() -> None:
    """Who stops at the newest one has asked for no more than a window, and a log that is not walked whole for one."""
    store = _log(200)
    for whole, most in ((True, ahead.WINDOW), (False, 1)):
        counting = CountingStore(store)
        found = walk(counting, 200, whole=whole)
        assert next(found) == read_slot(store, 200)
        found.close()  # type: ignore[attr-defined]
        assert counting.count("get") <= most


def test_an_error_comes_where_its_slot_is_wanted() -> None:
    class Failing(MemoryStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if key == "log/000000000150.json":
                raise StoreUnavailable("no answer")
            return super().get(key, start, end)

    store = Failing()
    for key, data in stores.objects_of(_log(200)).items():
        store.put_new(key, data)
    found = walk(store, 200, whole=True)
    assert [next(found).slot.seq for _ in range(50)] == list(range(200, 150, -1))  # type: ignore[union-attr]
    with pytest.raises(StoreUnavailable):
        next(found)
