"""MemoryStore: the contract of every store, and what is its own."""

from __future__ import annotations

from pathlib import Path

from recovery.ports import ObjectStore, Put
from storage_backends import open_store
from storage_backends.memory import MemoryStore
from storage_backends.testing.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    def make_store(self, folder: Path) -> MemoryStore:
        return MemoryStore()

    def raw_put(self, store: ObjectStore, key: str, data: bytes) -> None:
        assert isinstance(store, MemoryStore)
        store._objects[key] = data

    def raw_get(self, store: ObjectStore, key: str) -> bytes | None:
        assert isinstance(store, MemoryStore)
        return store._objects.get(key)

    def raw_keys(self, store: ObjectStore) -> set[str]:
        assert isinstance(store, MemoryStore)
        return set(store._objects)


def test_a_name_is_one_store_in_this_process() -> None:
    first = open_store("memory://one", create=True)
    assert first.put_new("a", b"x") is Put.CREATED
    assert open_store("memory://one").get("a") == b"x"
    assert open_store("memory://two").list("") == []


def test_what_was_put_is_the_callers_no_more() -> None:
    store = MemoryStore()
    data = bytearray(b"abc")
    store.put_new("a", data)  # type: ignore[arg-type]
    data[0] = 0
    assert store.get("a") == b"abc"
