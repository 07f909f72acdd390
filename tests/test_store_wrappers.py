"""Wrapper stores: each is a store, and does on top what its name says and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from recovery.errors import CredentialsRefused, OutcomeUnknown, StoreFull, StoreUnavailable
from recovery.ports import ObjectStore, Put
from storage_backends.memory import MemoryStore
from storage_backends.testing.conformance import StoreConformance, in_threads
from storage_backends.testing.faults import (
    PASS,
    Call,
    CountingStore,
    FaultyStore,
    Hang,
    Pass,
    RaiseAfter,
    RaiseBefore,
    ReadOnlyStore,
)
from storage_backends.testing.kills import WAYS, Killed, KillingStore


class TestCountingStoreIsAStore(StoreConformance):
    def make_store(self, folder: Path) -> ObjectStore:
        return CountingStore(MemoryStore())


class TestFaultyStoreWithoutFaultsIsAStore(StoreConformance):
    def make_store(self, folder: Path) -> ObjectStore:
        return FaultyStore(MemoryStore(), lambda verb, key: PASS)


class TestKillingStoreThatSparesIsAStore(StoreConformance):
    def make_store(self, folder: Path) -> ObjectStore:
        return KillingStore(MemoryStore(), at=0)


def test_counting_store_logs_every_call() -> None:
    store = CountingStore(MemoryStore())
    store.put_new("a", b"123")
    store.put_new("a", b"12345")
    store.get("a", 1)
    store.list("a")
    store.put("hint", b"1")
    with pytest.raises(Exception, match="nothing"):
        store.get("nothing")
    store.delete("a")
    assert store.log == [
        Call("put_new", "a", 3),
        Call("put_new", "a", 5),
        Call("get", "a", 2),
        Call("list", "a", 0),
        Call("put", "hint", 1),
        Call("get", "nothing", 0),
        Call("delete", "a", 0),
    ]
    assert (store.count(), store.count("get"), store.count("put", "put_new")) == (7, 2, 3)
    assert (store.nbytes(), store.nbytes("put_new")) == (11, 8)


def test_faulty_store_takes_one_step_per_call() -> None:
    inner = MemoryStore()
    plan = [PASS, RaiseBefore(StoreFull("full")), RaiseAfter(OutcomeUnknown("lost"))]
    store = FaultyStore(inner, plan)
    assert store.put_new("a", b"1") is Put.CREATED
    with pytest.raises(StoreFull):
        store.put_new("b", b"2")
    with pytest.raises(OutcomeUnknown):
        store.put_new("c", b"3")
    assert store.put_new("b", b"later") is Put.CREATED, "when the steps run out, calls pass"
    assert [item.key for item in inner.list("")] == ["a", "b", "c"]


def test_faulty_store_asks_with_verb_and_key() -> None:
    def plan(verb: str, key: str) -> Pass | RaiseBefore:
        return RaiseBefore(StoreUnavailable("down")) if (verb, key) == ("get", "a") else PASS

    store = FaultyStore(MemoryStore(), plan)
    store.put_new("a", b"1")
    with pytest.raises(StoreUnavailable):
        store.get("a")
    assert store.list("") != []


def test_faulty_store_hangs_until_it_is_let_go() -> None:
    inner = MemoryStore()
    event, entered = threading.Event(), threading.Event()
    store = FaultyStore(inner, [Hang(event, entered)])
    thread = threading.Thread(target=store.put_new, args=("a", b"1"))
    thread.start()
    assert entered.wait(240)
    assert inner.list("") == []
    event.set()
    thread.join()
    assert inner.get("a") == b"1"


def test_faulty_store_gives_each_thread_its_own_step() -> None:
    store = FaultyStore(MemoryStore(), [RaiseBefore(StoreFull("full")) for _ in range(8)])

    def call(index: int) -> bool:
        try:
            store.put_new(f"k{index}", b"")
        except StoreFull:
            return False
        return True

    assert in_threads(16, call).count(False) == 8


def test_read_only_store_refuses_every_write() -> None:
    inner = MemoryStore()
    inner.put_new("a", b"1")
    store = ReadOnlyStore(inner)
    for call in (lambda: store.put_new("b", b""), lambda: store.put("a", b""), lambda: store.delete("a")):
        with pytest.raises(CredentialsRefused, match="may only be read"):
            call()
    assert store.get("a") == b"1"
    assert [item.key for item in store.list("")] == ["a"]


def _scenario(store: ObjectStore) -> int:
    """Three calls; returns how many errors the caller survived."""
    survived = 0
    for call in (lambda: store.put_new("a", b"1"), lambda: store.put("b", b"2"), lambda: store.get("a")):
        try:
            call()
        except (OutcomeUnknown, StoreUnavailable):
            survived += 1
    return survived


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("how", WAYS)
def test_killing_store_dies_at_each_call_in_each_way(at: int, how: str) -> None:
    inner = MemoryStore()
    store = KillingStore(inner, at, how)  # type: ignore[arg-type]
    if how == "lost":
        assert _scenario(store) == 1
        assert store.n_calls == 3 and not store.killed
    else:
        with pytest.raises(Killed):
            _scenario(store)
        assert store.n_calls == at and store.killed
        for call in (lambda: store.get("a"), lambda: store.list(""), lambda: store.delete("a")):
            with pytest.raises(Killed):
                call()
    applied = min(2, at - (how == "before")) if how != "lost" else 2
    assert [item.key for item in inner.list("")] == ["a", "b"][:applied]


def test_killing_store_counts_the_calls_of_a_run_that_lives() -> None:
    store = KillingStore(MemoryStore(), at=0)
    assert _scenario(store) == 0
    assert store.n_calls == 3


def test_killing_store_loses_an_answer_that_is_an_error() -> None:
    with pytest.raises(Killed):
        KillingStore(MemoryStore(), 1, "after").get("nothing")
    with pytest.raises(StoreUnavailable):
        KillingStore(MemoryStore(), 1, "lost").get("nothing")
    with pytest.raises(OutcomeUnknown):
        KillingStore(MemoryStore(), 1, "lost").put_new("a", b"")


def test_killed_is_not_survived_by_code_that_survives_errors() -> None:
    assert not issubclass(Killed, Exception)
