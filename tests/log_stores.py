"""Logs to test with: writers, a log with a damaged slot, and all slots, read without the code under test.

Owns: making and reading them.
Does not know: what is tested.
"""

from __future__ import annotations

import hashlib
import json

from recovery import log
from recovery.log import Slot
from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore
from tests.fakes import ManualClock, SeededEntropy


def writer(store: ObjectStore, name: str = "w") -> SlotLog:
    return SlotLog(store, ManualClock(), SeededEntropy(name), name)


def claimed(store: ObjectStore, name: str = "w") -> SlotLog:
    one = writer(store, name)
    one.claim()
    return one


def all_slots(store: ObjectStore) -> list[Slot]:
    """Every slot, decoded and checked against its neighbours without the code under test."""
    slots = []
    prev = "0" * 64
    for number, item in enumerate(store.list("log/"), start=1):
        data = store.get(item.key)
        document = json.loads(data)
        assert item.key == f"log/{number:012d}.json" and document["seq"] == number, "numbers are dense from 1"
        assert document["prev"] == prev
        prev = hashlib.sha256(data).hexdigest()
        slots.append(log.decode(data, number))
    epoch = 0
    for slot in slots:
        assert slot.epoch == epoch + (slot.kind == "epoch")
        epoch = slot.epoch
    return slots


def damaged_store(seq: int, data: bytes | None, n: int = 6) -> MemoryStore:
    store = MemoryStore()
    one = claimed(store)
    for _ in range(n - 1):
        one.append("snapshot", {})
    if data is None:
        store.delete(log.slot_key(seq))
    else:
        store.put(log.slot_key(seq), data)
    return store
