"""recovery.log: the rules of docs/format.md, section 6, one by one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import log
from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood, InputError
from recovery.log import GENESIS, Outcome, Slot


def slot(**fields: Any) -> Slot:
    values: dict[str, Any] = {
        "seq": 5,
        "epoch": 2,
        "kind": "snapshot",
        "nonce": "ab" * 16,
        "prev": "0" * 64,
        "owner": "me",
        "utc": 1767225600.25,
        "body": {"a": 1},
    }
    return Slot(**{**values, **fields})


def as_json(**fields: Any) -> bytes:
    document = {**json.loads(log.encode(slot())), **fields}
    return json.dumps({key: value for key, value in document.items() if value is not ...}).encode()


# ---- encoding --------------------------------------------------------------------------------------------------


def test_a_slot_is_the_documented_json() -> None:
    assert json.loads(log.encode(slot())) == {
        "seq": 5,
        "epoch": 2,
        "kind": "snapshot",
        "nonce": "ab" * 16,
        "prev": "0" * 64,
        "owner": "me",
        "utc": 1767225600.25,
        "requires": [],
        "body": {"a": 1},
    }


@given(
    seq=st.integers(1, 10**12 - 1),
    epoch=st.integers(1, 10**6),
    kind=st.sampled_from(["epoch", "snapshot", "gc"]),
    owner=st.text(st.characters(exclude_categories=["Cs"])),
    utc=st.floats(0, 1e11),
    body=st.dictionaries(st.text("abc"), st.integers() | st.text("xyz")),
)
def test_decode_is_the_inverse_of_encode(seq: int, **fields: Any) -> None:
    one = slot(seq=seq, **fields)
    assert log.decode(log.encode(one), seq) == one


def test_f4_unknown_fields_are_ignored_and_unknown_requirements_refuse() -> None:
    assert log.decode(as_json(colour="red"), 5) == slot()
    with pytest.raises(FormatNotUnderstood, match="log slot 5 requires shards, time-travel") as caught:
        log.decode(as_json(requires=["shards", "time-travel"]), 5)
    assert caught.value.exit_code == 13
    with pytest.raises(FormatNotUnderstood, match="unknown kind 'merge'"):
        log.decode(as_json(kind="merge"), 5)


MANGLED = [
    b"",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"{" * 100_000,
    b"[" * 60_000,
    log.encode(slot())[:-1],
    *(as_json(**{name: ...}) for name in ("seq", "epoch", "kind", "nonce", "prev", "owner", "body")),
    as_json(seq="5"),
    as_json(seq=5.0),
    as_json(seq=True),
    as_json(seq=6),
    as_json(epoch=0),
    as_json(epoch=-1),
    as_json(epoch=[1]),
    as_json(body=[["a", 1]]),
    as_json(body=None),
    as_json(nonce=7),
    log.encode(slot()).replace(b'"seq":5', b'"seq":1e999'),
    log.encode(slot()).replace(b'"seq":5', b'"seq":' + b"9" * 5000),
    log.encode(slot()) + b" " * log.MAX_SLOT_BYTES,
]


def test_a_slot_that_could_not_be_read_again_is_not_written() -> None:
    fits = log.MAX_SLOT_BYTES - len(log.encode(slot(body={"a": ""})))
    assert log.decode(log.encode(slot(body={"a": "x" * fits})), 5) == slot(body={"a": "x" * fits})
    with pytest.raises(InputError, match=r"log slot 5 \(snapshot\) would have 4194305 bytes"):
        log.encode(slot(body={"a": "x" * (fits + 1)}))


@pytest.mark.parametrize("data", MANGLED, ids=lambda data: data[:40].decode("latin1"))
def test_mangled_slots_are_damage_and_nothing_else(data: bytes) -> None:
    with pytest.raises(Damaged, match="log slot 5"):
        log.decode(data, 5)


@given(flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_crash_a_reader(flips: list[tuple[int, int]]) -> None:
    data = bytearray(log.encode(slot()))
    for at, value in flips:
        data[at % len(data)] = value
    with contextlib.suppress(Damaged, FormatNotUnderstood):
        assert log.decode(bytes(data), 5).seq == 5


@pytest.mark.parametrize("utc", [..., None, "now", float("nan"), 1e300, []])
def test_the_time_is_for_people_and_refuses_nothing(utc: Any) -> None:
    assert log.decode(as_json(utc=utc), 5) == replace(slot(), utc=0.0)


# ---- keys ------------------------------------------------------------------------------------------------------


def test_n4_slots_sort_by_number() -> None:
    numbers = [1, 9, 10, 100, 999, 1000, 500, 2500]
    assert [log.seq_of_key(key) for key in sorted(map(log.slot_key, numbers))] == sorted(numbers)


@pytest.mark.parametrize(
    "key",
    [
        "log/1.json",
        "log/00000000001.json",
        "log/0000000000001.json",
        "log/000000000001.json.backup",
        "log/000000000001",
        "log/00000000000a.json",
        "log/.ds_store",
        "log/000000000001.json/x",
        "other/000000000001.json",
        "000000000001.json",
        "log/-00000000001.json",
    ],
)
def test_n1_what_is_no_slot_is_not_taken_for_one(key: str) -> None:
    assert log.seq_of_key(key) is None


# ---- succession ------------------------------------------------------------------------------------------------

SUCCESSIONS = [  # kind and epoch of the earlier, of the later, is it allowed
    (("epoch", 1), ("snapshot", 1), True),
    (("epoch", 1), ("gc", 1), True),
    (("epoch", 1), ("epoch", 2), True),
    (("epoch", 1), ("epoch", 5), True),
    (("snapshot", 3), ("epoch", 4), True),
    (("gc", 3), ("gc", 3), True),
    (("epoch", 1), ("epoch", 1), False),
    (("epoch", 2), ("epoch", 1), False),
    (("snapshot", 2), ("snapshot", 3), False),
    (("snapshot", 2), ("snapshot", 1), False),
    (("epoch", 2), ("gc", 3), False),
    (("epoch", 2), ("snapshot", 1), False),
]


@pytest.mark.parametrize(("earlier", "later", "allowed"), SUCCESSIONS)
def test_epochs_grow_with_claims_and_only_with_claims(earlier: tuple, later: tuple, allowed: bool) -> None:
    one = slot(seq=5, kind=earlier[0], epoch=earlier[1])
    data = log.encode(one)
    two = slot(seq=6, kind=later[0], epoch=later[1], prev=hashlib.sha256(data).hexdigest())
    if allowed:
        log.check_successor(one, data, two)
    else:
        with pytest.raises(Damaged):
            log.check_successor(one, data, two)


def test_a_slot_names_the_bytes_before_it() -> None:
    one = slot(seq=5)
    data = log.encode(one)
    with pytest.raises(DigestMismatch, match="slot 5 is not the one"):
        log.check_successor(one, data, slot(seq=6, prev=hashlib.sha256(data + b" ").hexdigest()))
    with pytest.raises(Damaged, match="does not follow"):
        log.check_successor(one, data, slot(seq=7, prev=hashlib.sha256(data).hexdigest()))


def test_the_first_slot_is_a_claim_that_follows_nothing() -> None:
    log.check_first(slot(seq=1, kind="epoch", prev=GENESIS))
    for wrong in (slot(seq=1, kind="snapshot", prev=GENESIS), slot(seq=1, kind="epoch", prev="1" * 64)):
        with pytest.raises(Damaged, match="first"):
            log.check_first(wrong)


# ---- who won ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "epoch", "nonce", "outcome"),
    [
        ("snapshot", 2, "mine", Outcome.COMMITTED),
        ("snapshot", 9, "mine", Outcome.COMMITTED),
        ("snapshot", 3, "other", Outcome.FENCED),
        ("snapshot", 2, "other", Outcome.LOST),
        ("snapshot", 1, "other", Outcome.LOST),
        ("gc", 3, "other", Outcome.FENCED),
        ("epoch", 2, "mine", Outcome.COMMITTED),
        ("epoch", 3, "other", Outcome.LOST),
        ("epoch", 2, "other", Outcome.LOST),
    ],
)
def test_the_nonce_decides_and_a_claim_is_never_fenced(kind: str, epoch: int, nonce: str, outcome: Outcome) -> None:
    mine = slot(kind=kind, epoch=2, nonce="mine")
    assert log.classify(mine, slot(epoch=epoch, nonce=nonce)) is outcome
