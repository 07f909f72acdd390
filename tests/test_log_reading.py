"""recovery.log_reading: the tail whatever the hint says and a list shows, and the way back past damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import log
from recovery.codec import fingerprint
from recovery.errors import CredentialsRefused, Fenced, FingerprintMismatch, NotFoundOrRefused, ObjectMissing
from recovery.log import Slot
from recovery.log_reading import Read, find_tail, kept_snapshots, read_slot, slot_exists, walk_back
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore, Verb, Wrapped
from tests.lives import worked
from tests.log_stores import all_slots, claimed, damaged_store
from tests.plain_codecs import PlainLedgers
from vllm_hooks.opening import refuse_foreign

# ---- finding the tail ------------------------------------------------------------------------------------------

HINTS = [
    None,
    b"",
    b"\xff\x00",
    b"{}",
    b"[]",
    b"7",
    b"null",
    b'{"tail": null}',
    b'{"tail": "3"}',
    b'{"tail": true}',
    b'{"tail": 1.0}',
    b'{"tail": 1e999}',
    b'{"tail": 0}',
    b'{"tail": -4}',
    b'{"tail": 99}',
    b'{"tail": ' + b"9" * 2000 + b"}",
    b'{"tail": ' + b"9" * 4200 + b"}",
    b"[" * 4000,
    b'{"tail": 1}',
    b'{"tail": 3}',
    b'{"tail": 5}',
]


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: "none" if hint is None else hint[:20].decode("latin1"))
def test_a_hint_is_advice(hint: bytes | None) -> None:
    """Missing, wrong in either direction, or garbage: the tail is found all the same."""
    store = MemoryStore()
    one = claimed(store)
    for _ in range(4):
        one.append("snapshot", {})
    if hint is not None:
        store.put(log.HINT_KEY, hint)
    assert find_tail(store) == 5
    assert claimed(store, "two").tail == 6


def test_a_good_hint_saves_the_listing() -> None:
    store = MemoryStore()
    one = claimed(store)
    one.append("snapshot", {})
    one.leave_hint()
    counting = CountingStore(store)
    assert find_tail(counting) == 2
    assert counting.count("list") == 0 and counting.count() == 3


def test_a_claim_does_not_trust_the_hint_at_all() -> None:
    """With a slot lost in the middle, probing forward from a hint before it would find the hole and write into it."""
    store = MemoryStore()
    one = claimed(store)
    for _ in range(5):
        one.append("snapshot", {})
    store.put(log.HINT_KEY, b'{"tail": 2}')
    store.delete(log.slot_key(3))
    assert find_tail(store) == 2 and find_tail(store, trust_hint=False) == 6
    heir = claimed(store, "heir")
    assert heir.tail == 7
    with pytest.raises(Fenced):
        one.append("snapshot", {})
    assert [isinstance(read, Read) for read in walk_back(store, 7)] == [True] * 4 + [False] + [True] * 2


@pytest.mark.parametrize("data", [b"", b"garbage", b"{}"])
def test_n1_a_stray_file_with_a_slots_name_is_not_the_tail(data: bytes) -> None:
    store = MemoryStore()
    one = claimed(store)
    store.put_new(log.slot_key(10**12 - 1), data)
    store.put_new(log.slot_key(4000), data)
    assert find_tail(store) == 1
    assert one.append("snapshot", {}).seq == 2 and claimed(store, "two").tail == 3


def test_an_empty_store_has_no_tail() -> None:
    store = MemoryStore()
    assert find_tail(store) == 0 and list(walk_back(store, 0)) == [] and read_slot(store, 1) is None
    assert not slot_exists(store, 1)


def test_n1_foreign_names_among_the_slots_are_ignored() -> None:
    store = MemoryStore()
    one = claimed(store)
    for key in ("log/999999999999.json.backup", "log/99.json", "log/.ds_store", "log/x/000000000099.json"):
        store.put_new(key, b"?")
    assert find_tail(store) == 1 and one.append("snapshot", {}).seq == 2


def test_n4_ids_9_10_100_1000_come_in_order() -> None:
    store = MemoryStore()
    one = claimed(store)
    for _ in range(1000):
        one.append("snapshot", {})
    wanted = [seq for read in walk_back(store, find_tail(store)) if (seq := read.slot.seq) in (9, 10, 100, 1000)]  # type: ignore[union-attr]
    assert wanted == [1000, 100, 10, 9]
    assert [s.seq for s in all_slots(store)] == list(range(1, 1002))


# ---- where nothing may be listed ---------------------------------------------------------------------------------


class Unlisted(Wrapped):
    """S3 under a policy without s3:ListBucket."""

    def _call(self, verb: Verb, key: str, apply: Callable[[], Any]) -> Any:
        if verb == "list":
            raise CredentialsRefused("no list")
        try:
            return apply()
        except ObjectMissing:
            raise NotFoundOrRefused(f"{key}: not found or no permission") from None


@given(n_slots=st.integers(1, 40), hint=st.none() | st.integers(0, 60))
def test_s6_the_tail_is_found_by_reading_alone(n_slots: int, hint: int | None) -> None:
    """S6: for every length of the log and every hint, and a claim takes the next slot."""
    inner = MemoryStore()
    one = claimed(inner)
    for _ in range(n_slots - 1):
        one.append("snapshot", {})
    if hint is not None:
        inner.put("hint", b'{"tail": %d}' % hint)
    store = Unlisted(inner)
    assert find_tail(store) == find_tail(store, trust_hint=False) == n_slots
    assert slot_exists(store, n_slots) and not slot_exists(store, n_slots + 1) and read_slot(store, n_slots + 1) is None
    heir = claimed(store, "heir")
    assert heir.tail == n_slots + 1
    heir.check_not_fenced()
    assert heir.append("snapshot", {}).seq == n_slots + 2


def test_s6_a_long_log_is_not_read_through() -> None:
    inner = MemoryStore()
    one = claimed(inner)
    for _ in range(700):
        one.append("snapshot", {})
    counting = CountingStore(Unlisted(inner))
    assert find_tail(counting, trust_hint=False) == 701
    assert counting.count("get") < 40


def test_s6_a_log_that_cannot_be_read_at_all_is_no_empty_log() -> None:
    for call in (find_tail, lambda store: read_slot(store, 1), lambda store: slot_exists(store, 5)):
        with pytest.raises(NotFoundOrRefused, match="not found or no permission"):
            call(Unlisted(MemoryStore()))


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"garbage", b"{}", None], ids=["empty", "garbage", "object", "missing"])
def test_a_damaged_slot_in_the_middle_is_named_and_stepped_over(data: bytes | None) -> None:
    walked = list(walk_back(damaged_store(3, data), 6))
    assert [isinstance(read, Read) for read in walked] == [True, True, True, False, True, True]
    assert "slot 3" in str(walked[3])


def test_a_slot_that_was_replaced_is_found_by_its_successor() -> None:
    store = damaged_store(3, None)
    again = Slot(seq=3, epoch=1, kind="snapshot", nonce="x", prev="0" * 64, owner="forger", utc=0.0)
    store.put_new(log.slot_key(3), log.encode(again))
    walked = list(walk_back(store, 6))
    assert [isinstance(read, Read) for read in walked] == [True, True, True, False, True, True]
    assert "is not the one that slot 4 was written after" in str(walked[3])


def test_what_was_forgotten_is_no_snapshot_of_the_store() -> None:
    """Nor does a forget slot that says nothing sound take any away."""
    store = MemoryStore()
    one = claimed(store)
    kinds = ("snapshot", "snapshot", "pin", "snapshot", "snapshot")
    first, second, _, third, fourth = (one.append(kind, {"fingerprint": kind}).seq for kind in kinds)
    assert [slot.seq for slot in kept_snapshots(store, find_tail(store))] == [fourth, third, second, first]
    one.append("forget", {"snapshots": [second, fourth]})
    one.append("forget", {"snapshots": ["third"]})
    assert [slot.seq for slot in kept_snapshots(store, find_tail(store))] == [third, first]
    store.delete(log.slot_key(third))
    assert [slot.seq for slot in kept_snapshots(store, find_tail(store))] == [first]


def test_a_forgotten_snapshot_does_not_make_the_store_this_jobs() -> None:
    """It is refused before anything is claimed: what is left belongs to another job."""
    store = MemoryStore()
    worked(store, n_snapshots=2, keep=3)
    mine = {"model": "mine"}
    one = claimed(store, "again")
    slot = one.append("snapshot", {"fingerprint": fingerprint(mine)})
    refuse_foreign(store, PlainLedgers(), mine, "auto")
    one.append("forget", {"snapshots": [slot.seq]})
    with pytest.raises(FingerprintMismatch):
        refuse_foreign(store, PlainLedgers(), mine, "auto")
