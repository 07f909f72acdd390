"""What every store has to pass: subclass StoreConformance, say how a store is made, run pytest.

Owns: the five verbs' contract as tests.
Does not know: any back end. What a back end promises on top (durability, its own errors) is tested beside it.

A subclass gives `make_store` and, where there is another way to the bytes than the store itself, `raw_put`, `raw_get`
and `raw_keys`, so that a store is not only tested against itself. Codecs: SegmentConformance (segments.py).

Invariants:
1. No test depends on time: races are started by a barrier and judged by counting.
2. Each test gets an empty store of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.errors import ConfigError, ObjectMissing
from recovery.ports import Listed, ObjectStore, Put
from storage_backends.testing.segments import SegmentConformance

__all__ = ["SegmentConformance", "StoreConformance", "in_threads"]

ODD_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "a/..", "a/../b", "../a", "./a", "a/.", "a/./b", "A", "a b", "a+b", "a%2fb",
    "a:b", "a#b", "a?b", "a\\b", "a\nb", "a\n", "a\0b", "e\u0301", "\u00e9", "\U0001f600", "a*", "~", ".tmp/a", ".tmp",
    "x" * 256, "a/" * 600 + "a",
]  # fmt: skip

KEYS = st.sampled_from(["a", "a.b", "a-b", "b/c", "b-c/d", "b/c.d", "b.c", "b/d/e", "b0", "_", "log/000000000010.json"])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put_new"), KEYS, st.binary(max_size=20)),
        st.tuples(st.just("put"), KEYS, st.binary(max_size=20)),
        st.tuples(st.just("delete"), KEYS, st.just(b"")),
    ),
    max_size=20,
)


def in_threads(n_threads: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of `work(i)` in n threads that begin together; an exception in one is raised here."""
    barrier = threading.Barrier(n_threads)
    results: list[Any] = [None] * n_threads
    errors: list[BaseException] = []

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _put_own(store: ObjectStore, key: str, index: int) -> Put:
    return store.put_new(key, b"%04d" % index * 1000)


class StoreConformance:
    """The contract of ports.ObjectStore."""

    def make_store(self, folder: Path) -> ObjectStore:
        """A new, empty store; `folder` is empty and this test's own."""
        raise NotImplementedError

    def raw_put(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Put an object there without the store, where possible."""
        store.put(key, data)

    def raw_get(self, store: ObjectStore, key: str) -> bytes | None:
        """What is there, without asking the store, where possible; None for nothing."""
        try:
            return store.get(key)
        except ObjectMissing:
            return None

    def raw_keys(self, store: ObjectStore) -> set[str]:
        """The keys that are there, without asking the store, where possible."""
        return {item.key for item in store.list("")}

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return self.make_store(tmp_path)

    # ---- create ------------------------------------------------------------------------------------------------

    def test_put_new_creates_once(self, store: ObjectStore) -> None:
        assert store.put_new("a/b.c", b"first") is Put.CREATED
        assert store.put_new("a/b.c", b"second") is Put.EXISTS
        assert self.raw_get(store, "a/b.c") == b"first"
        assert self.raw_keys(store) == {"a/b.c"}

    def test_put_new_of_what_another_wrote_exists(self, store: ObjectStore) -> None:
        self.raw_put(store, "log/000000000001.json", b"theirs")
        assert store.put_new("log/000000000001.json", b"ours") is Put.EXISTS
        assert store.get("log/000000000001.json") == b"theirs"

    def test_put_new_after_delete_creates_again(self, store: ObjectStore) -> None:
        store.put_new("a", b"1")
        store.delete("a")
        assert store.put_new("a", b"2") is Put.CREATED
        assert store.get("a") == b"2"

    def test_race_of_threads_has_one_winner(self, store: ObjectStore) -> None:
        for number in range(20):
            key = f"race/{number:02d}"
            outcomes = in_threads(16, partial(_put_own, store, key))
            assert outcomes.count(Put.CREATED) == 1
            assert store.get(key) == b"%04d" % outcomes.index(Put.CREATED) * 1000

    def test_threads_with_different_keys_do_not_disturb_each_other(self, store: ObjectStore) -> None:
        keys = [[f"t{i % 4}/n{i}/k{j}" for j in range(8)] for i in range(8)]
        in_threads(8, lambda i: [store.put_new(key, key.encode()) for key in keys[i]])
        assert self.raw_keys(store) == {key for row in keys for key in row}
        assert all(store.get(key) == key.encode() for row in keys for key in row)

    # ---- overwrite ---------------------------------------------------------------------------------------------

    def test_put_creates_and_overwrites(self, store: ObjectStore) -> None:
        store.put("hint", b"long at first")
        store.put("hint", b"short")
        assert self.raw_get(store, "hint") == b"short"

    def test_readers_of_put_see_old_or_new(self, store: ObjectStore) -> None:
        values = [b"a" * 100_000, b"b" * 70_000]
        store.put("hint", values[0])
        done = threading.Event()

        def work(index: int) -> None:
            if index:
                while not done.is_set():
                    assert store.get("hint") in values
                return
            try:
                for number in range(30):
                    store.put("hint", values[number % 2])
            finally:
                done.set()

        in_threads(3, work)

    # ---- read --------------------------------------------------------------------------------------------------

    def test_get_of_nothing_is_missing(self, store: ObjectStore) -> None:
        store.put_new("a/b", b"x")
        for key in ("b", "a", "a/b/c", "a/c", "c/d/e"):
            with pytest.raises(ObjectMissing, match=key):
                store.get(key)

    def test_ranges(self, store: ObjectStore) -> None:
        self.raw_put(store, "r", bytes(range(100)))
        for start, end in ((0, None), (0, 0), (0, 1), (10, 20), (99, 100), (50, None), (90, 1 << 40), (100, None)):
            assert store.get("r", start, end) == bytes(range(100))[start:end]
        assert store.get("r", 200, 300) == b""

    def test_ranges_from_the_end_are_refused(self, store: ObjectStore) -> None:
        store.put_new("r", b"0123456789")
        for start, end in ((-1, None), (0, -1), (5, 4), (-5, -1)):
            with pytest.raises(ValueError, match="range"):
                store.get("r", start, end)

    def test_empty_object(self, store: ObjectStore) -> None:
        assert store.put_new("empty", b"") is Put.CREATED
        assert store.put_new("empty", b"x") is Put.EXISTS
        assert store.get("empty") == b""
        assert store.list("") == [Listed("empty", 0)]

    def test_big_object(self, store: ObjectStore) -> None:
        data = bytes(range(256)) * (1 << 16)
        store.put_new("big", data)
        assert store.get("big") == data
        assert store.get("big", len(data) - 3) == data[-3:]
        assert store.list("big") == [Listed("big", len(data))]

    def test_read_after_write(self, store: ObjectStore) -> None:
        for number in range(20):
            key = f"log/{number:012d}.json"
            store.put_new(key, b"%d" % number)
            assert store.get(key) == b"%d" % number
            assert store.list("log/")[-1].key == key
            store.put("hint", b"%d" % number)
            assert store.get("hint") == b"%d" % number

    # ---- list --------------------------------------------------------------------------------------------------

    def test_list_is_in_order_of_bytes(self, store: ObjectStore) -> None:
        keys = ["a", "a-b", "a.b/c", "a0", "b/a", "b/a.b", "b-/a", "b./a", "b/_", "b0/a", "b/a-/z", "_", "9", ".x", "-"]
        for key in keys:
            self.raw_put(store, key, b"")
        assert [item.key for item in store.list("")] == sorted(keys)

    def test_list_takes_prefix_and_after_as_strings(self, store: ObjectStore) -> None:
        keys = ["a0", "ab", "a/b", "a/bc", "a/b-c/x", "a/c", "b/a", "ab-c/d", "a.b/c", "a-/b", "a/d/b"]
        for key in keys:
            self.raw_put(store, key, key.encode())
        for prefix in ("", "a", "a/", "a/b", "ab", "ab/", "ab-", "c", "b/a", "b/a/", "a.b/c"):
            for after in ("", "a", "a/", "a/b", "a/bb", "ab-c/d", "a/b-c/", "b", "~", "a.b/c", "Z"):
                expected = [key for key in sorted(keys) if key.startswith(prefix) and key > after]
                assert [item.key for item in store.list(prefix, after)] == expected, (prefix, after)

    def test_n4_numbered_keys_come_in_order(self, store: ObjectStore) -> None:
        keys = [f"log/{n:012d}.json" for n in (9, 10, 100, 1000, 999)]
        for key in keys:
            store.put_new(key, b"")
        assert [item.key for item in store.list("log/", after=keys[0])] == sorted(keys)[1:]

    def test_list_of_an_empty_store(self, store: ObjectStore) -> None:
        assert store.list("") == [] == store.list("log/")

    # ---- delete ------------------------------------------------------------------------------------------------

    def test_delete_is_idempotent(self, store: ObjectStore) -> None:
        store.put_new("a/b", b"x")
        store.put_new("a/c", b"y")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/there")
        store.delete("a/c/d")
        assert self.raw_keys(store) == {"a/c"}

    # ---- keys --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
    def test_n6_odd_keys_are_refused_by_every_verb(self, store: ObjectStore, key: str) -> None:
        for call in (
            lambda: store.put_new(key, b"x"),
            lambda: store.put(key, b"x"),
            lambda: store.get(key),
            lambda: store.delete(key),
        ):
            with pytest.raises(ConfigError):
                call()
        assert self.raw_keys(store) == set()

    @pytest.mark.parametrize("prefix", ["/", "../", "a//", "A", "a/../", "a b", "./a", "é"])
    def test_n6_odd_prefixes_are_refused(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(ConfigError):
            store.list(prefix)

    @pytest.mark.parametrize("key", ["a", ".a", "...", "a..b", "-", "_", "x" * 255, "a/" * 400 + "a", "tmp/.tmp"])
    def test_n6_unusual_keys_are_kept(self, store: ObjectStore, key: str) -> None:
        assert store.put_new(key, b"x") is Put.CREATED
        assert store.get(key) == b"x"
        assert store.list("") == [Listed(key, 1)]

    # ---- against a dict ----------------------------------------------------------------------------------------

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )
    @given(operations=OPERATIONS)
    def test_any_history_equals_that_of_a_dict(
        self, tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, bytes]]
    ) -> None:
        store = self.make_store(tmp_path_factory.mktemp("store"))
        model: dict[str, bytes] = {}
        taken: set[str] = set()
        for verb, key, data in operations:
            if verb == "put_new":
                assert (store.put_new(key, data) is Put.CREATED) == (key not in model)
                model.setdefault(key, data)
            elif verb == "put":
                store.put(key, data)
                model[key] = data
            else:
                store.delete(key)
                model.pop(key, None)
            taken.add(key)
            assert store.list("") == [Listed(k, len(v)) for k, v in sorted(model.items())]
        for key in taken:
            assert self.raw_get(store, key) == model.get(key)
