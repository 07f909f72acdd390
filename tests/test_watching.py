"""How far a restore is: what is told adds up to what was read, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

from recovery.config import CheckpointingConfig
from recovery.resume import StopRules
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.testing.conformance import StoreConformance
from storage_backends.testing.faults import CountingStore
from tests import inspect_stores as stores
from tests.inspect_stores import made
from vllm_hooks.session import RecoverySession
from vllm_hooks.watching import WatchedStore, watched


class Told:
    def __init__(self) -> None:
        self.expected: list[int] = []
        self.n_read: list[int] = []

    def expect(self, nbytes: int) -> None:
        self.expected.append(nbytes)

    def read(self, nbytes: int) -> None:
        self.n_read.append(nbytes)


def test_everything_that_is_read_is_told() -> None:
    told, counting = Told(), CountingStore(made(stores.crashed))
    store = watched(counting, 5, told)
    assert len(told.expected) == 1 and told.expected[0] > 11_000
    counting.log.clear()
    for item in store.list(""):
        store.get(item.key)
        store.get(item.key, 3, 9)
    assert sum(told.n_read) == counting.nbytes("get") and len(told.n_read) == counting.count("get")


def test_without_anybody_to_tell_the_store_is_the_store() -> None:
    store = MemoryStore()
    assert watched(store, 0, None) is store
    told = Told()
    watched(store, 0, told)
    assert told.expected == []


def test_a_session_tells_its_restore(tmp_path: Path) -> None:
    store = stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.crashed)))
    config = CheckpointingConfig(enabled=True, store=store.root)
    told = Told()
    session = RecoverySession.open(config, must=stores.MUST, stop=StopRules((2,), 4096), reading=told)
    session.stager.close(wait=True)
    assert isinstance(store, LocalStore) and session.restored is not None and session.restored.snapshot == 5
    segments = sum(item.nbytes for item in store.list("seg/e000001/"))
    assert told.expected and sum(told.n_read) >= segments, "those of open calls, and the adopted ones"


class TestWatchedStore(StoreConformance):
    """A wrapper with the same five verbs."""

    def make_store(self, folder: Path) -> WatchedStore:
        return WatchedStore(MemoryStore(), Told())
