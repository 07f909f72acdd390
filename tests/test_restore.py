"""recovery.restore: what is chosen, what is passed over and why, and what becomes of each call."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from recovery import log
from recovery.codec import canonical_json
from recovery.errors import (
    CredentialsRefused,
    Damaged,
    Fenced,
    FingerprintMismatch,
    FormatNotUnderstood,
    NothingPublished,
    ObjectMissing,
    RecoveryError,
    StoreUnavailable,
)
from recovery.ledger_columns import Names
from recovery.log_reading import read_slot
from recovery.model import ENDED, OPEN, Restarted, Resumed
from recovery.restore import Choice, compatibility_record, differences
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseBefore
from tests.fake_engine import Life, Prompt, V, next_token, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.lives import DAMAGES, damage_missing, ids, own_objects, tokens, worked

# ---- the plain path --------------------------------------------------------------------------------------------


def test_the_first_start_publishes_an_empty_snapshot_before_anything_is_dispatched() -> None:
    store = MemoryStore()
    life = Life(store, 1)
    restored = life.restored
    assert (restored.snapshot, restored.published, restored.calls, restored.passed_over) == (None, 2, [], [])
    read = read_slot(store, 2)
    assert read is not None and read.slot.body["cause"] == "adoption" and read.slot.body["counts"]["calls"] == 0
    assert life.run_to_end() == reference_answers()


def test_a_second_restore_before_anything_happened_loses_nothing() -> None:
    store = MemoryStore()
    life = worked(store)
    found = []
    for number in range(2, 7):
        again = Life(store, number)
        again.keeps(life.flushed)
        found.append(tokens(again))
        for entry in again.publication.ledger:
            if entry.state == OPEN:
                assert entry.attempt == number - 1
                assert [type(event) for event in entry.history] == [Resumed], "got nowhere: one line, not five"
    assert found == [found[0]] * 5
    assert again.run_to_end() == reference_answers()


def test_a_restart_only_call_begins_again_and_says_why() -> None:
    prompts = (Prompt("r", (5, 6, 8), 9, "lora_path"), Prompt("p", (8,), 14))
    store = MemoryStore()
    life = Life(store, 1, prompts=prompts)
    life.dispatch()
    life.decode(3)
    life.snapshot()
    life.decode(1)
    life.flush()
    again = Life(store, 2, prompts=prompts)
    entry = next(e for e in again.publication.ledger if e.identity.rollout == "r")
    assert (entry.n_tokens, entry.attempt) == (0, 1)
    assert entry.history == (Restarted(4, again.restored.published or 0, entry.history[0].reason),)  # type: ignore[union-attr]
    assert "lora_path" in entry.history[0].reason  # type: ignore[union-attr]
    assert again.run_to_end() == reference_answers(prompts)


def test_a_call_that_had_all_its_tokens_but_not_its_end_is_finished() -> None:
    prompts = (Prompt("p", (8,), 5),)
    store = MemoryStore()
    life = Life(store, 1, prompts=prompts)
    life.dispatch()
    life.decode(4)
    call = life.live[0]
    call.append([next_token((8,), list(call.transcript_ids))], [-0.5], V)  # the last token, and then the crash
    life.flush()
    again = Life(store, 2, prompts=prompts)
    (entry,) = again.publication.ledger
    assert (entry.state, entry.ended, entry.n_tokens) == (ENDED, ("length", None), 5)
    assert again.answers() == reference_answers(prompts)


# ---- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_c3_w13_damage_of_the_newest_falls_back_and_names_it(damage: Any, which: int) -> None:
    store = MemoryStore()
    life = worked(store)
    fresh = own_objects(store, life)
    key = fresh[which % len(fresh)]
    damage(store, key)
    again = Life(store, 2)
    assert again.restored.snapshot == ids(life)[-2]
    assert again.restored.passed_over[0].what == f"snapshot {ids(life)[-1]}"
    assert key in again.restored.passed_over[0].reason
    assert again.run_to_end() == reference_answers()
    third = Life(store, 3)
    assert third.restored.passed_over == [], "the adoption is a new, whole snapshot"


@pytest.mark.parametrize("damage", DAMAGES)
def test_w13_strict_refuses_what_auto_passes_over(damage: Any) -> None:
    store = MemoryStore()
    life = worked(store)
    key = own_objects(store, life)[0]
    damage(store, key)
    with pytest.raises(Damaged, match=key):
        Life(store, 2, choice="strict")
    assert Life(store, 3).restored.snapshot == ids(life)[-2]


SLOT_DAMAGES: list[tuple[str, Callable[[bytes], bytes | None]]] = [
    ("missing", lambda data: None),
    ("empty", lambda data: b""),
    ("garbage", lambda data: b"\0" * 100),
    ("odd key", lambda data: data.replace(b"ledger/", b"LEDGER/")),
    ("odd length", lambda data: data.replace(b'"nbytes":', b'"nbytes":-')),
    ("float length", lambda data: data.replace(b'"nbytes":', b'"nbytes":1e999,"n":')),
    ("no ledger", lambda data: data.replace(b'"ledger":', b'"l":')),
    ("states", lambda data: data.replace(b'"states":{', b'"states":7,"s":{')),
]


@pytest.mark.parametrize(("what", "change"), SLOT_DAMAGES)
@pytest.mark.parametrize("later_slots", [0, 1])
def test_w13_a_damaged_slot_is_passed_over(
    what: str, change: Callable[[bytes], bytes | None], later_slots: int
) -> None:
    """Also when it is the tail, which a claim has to be written after."""
    store = MemoryStore()
    life = worked(store, keep=3)
    if later_slots:
        SlotLog(store, ManualClock(), SeededEntropy("x"), "x").claim()
    seq = ids(life)[-1]
    data = change(store.get(log.slot_key(seq)))
    if data is None:
        if not later_slots:
            return  # a tail that is gone is no tail
        store.delete(log.slot_key(seq))
    else:
        store.put(log.slot_key(seq), data)
    with pytest.raises(RecoveryError, match=str(seq)):
        Life(store, 9, choice="strict")
    again = Life(store, 2)
    assert again.restored.snapshot == ids(life)[-2]
    assert any(item.what in (f"log slot {seq}", f"snapshot {seq}") for item in again.restored.passed_over)
    assert again.run_to_end() == reference_answers()


def test_nothing_restorable_is_an_error_and_not_a_new_beginning() -> None:
    """Exactly once would be lost if a job began anew because it could not read what it had done."""
    store = MemoryStore()
    life = worked(store)
    for item in store.list("ledger/"):
        store.delete(item.key)
    with pytest.raises(Damaged, match="no snapshot of this store can be restored") as caught:
        Life(store, 2)
    assert all(f"snapshot {seq}" in str(caught.value) for seq in ids(life))
    for seq in ids(life):
        store.put(log.slot_key(seq), b"?")
    with pytest.raises(Damaged, match=f"log slot {ids(life)[0]}"):
        Life(store, 3)
    assert Life(store, 4, choice="never").run_to_end() == reference_answers()


# ---- explicit ids ----------------------------------------------------------------------------------------------


def test_an_explicit_id_does_not_mind_damage_of_newer_ones() -> None:
    """It is what one does about it."""
    store = MemoryStore()
    life = worked(store, n_snapshots=3, keep=3)
    store.put(log.slot_key(ids(life)[-1]), b"?")
    again = Life(store, 2, choice=ids(life)[1], keep_latest_k=3)
    assert again.restored.snapshot == ids(life)[1]
    assert [item.what for item in again.restored.passed_over] == [f"log slot {ids(life)[-1]}"]


@pytest.mark.parametrize("choice", [1, 3, 99])
def test_an_id_that_is_no_snapshot_is_said(choice: Choice) -> None:
    store = MemoryStore()
    Life(store, 1)
    with pytest.raises(NothingPublished, match=f"no snapshot {choice}") as caught:
        Life(store, 2, choice=choice)
    assert caught.value.exit_code == 14


def test_an_explicit_id_that_is_damaged_is_refused() -> None:
    store = MemoryStore()
    life = worked(store)
    damage_missing(store, own_objects(store, life)[0])
    with pytest.raises(ObjectMissing):
        Life(store, 2, choice=ids(life)[-1])
    store.put(log.slot_key(ids(life)[-1]), b"?")
    with pytest.raises(Damaged, match=f"log slot {ids(life)[-1]}"):
        Life(store, 3, choice=ids(life)[-1])


# ---- fingerprints and formats ----------------------------------------------------------------------------------


def test_k8_another_fingerprint_is_refused_with_its_fields_and_exit_code_15() -> None:
    store = MemoryStore()
    worked(store)
    before = [item for item in store.list("") if not item.key.startswith("log/")]
    with pytest.raises(FingerprintMismatch) as caught:
        Life(store, 2, must={"model": "other", "tokenizer": ["x"]})
    assert caught.value.exit_code == 15
    assert "model: 'fake' in the store, 'other' here" in str(caught.value)
    assert "tokenizer: None in the store, ['x'] here" in str(caught.value)
    assert [item for item in store.list("") if not item.key.startswith("log/")] == before
    assert Life(store, 3).run_to_end() == reference_answers()


def test_k8_of_another_jobs_snapshot_no_segment_is_read() -> None:
    counting = CountingStore(MemoryStore())
    worked(counting)
    counting.log.clear()
    with pytest.raises(FingerprintMismatch):
        Life(counting, 2, must={"model": "other"})
    assert not [call for call in counting.log if call.verb == "get" and call.key.startswith("seg/")]
    Life(counting, 3)
    read = [call.key for call in counting.log if call.verb == "get" and call.key.startswith("seg/")]
    assert read, "or this test could not fail"


def test_segments_are_read_while_the_ledger_still_is() -> None:
    """Before an older object of the ledger is there, those are begun that the newest one says open calls grew into."""

    class Waits(MemoryStore):
        """The second object of the ledger comes when a segment was asked for."""

        def __init__(self) -> None:
            super().__init__()
            self.ledgers, self.begun = 0, threading.Event()

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if key.startswith("seg/"):
                self.begun.set()
            self.ledgers += key.startswith("ledger/")
            if self.ledgers == 2 and not self.begun.wait(120):
                raise AssertionError("no segment was begun before the second object of the ledger was read")
            return super().get(key, start, end)

    store = Waits()
    worked(store)
    store.ledgers = 0
    store.begun.clear()
    assert Life(store, 2).run_to_end() == reference_answers()
    assert store.ledgers > 1, "or this test could not fail"


def test_differences_are_those_of_json_not_of_python() -> None:
    """A tuple is a list in the store; that is no difference."""
    store = MemoryStore()
    Life(store, 1, must={"a": (1, 2), "b": 1})
    with pytest.raises(FingerprintMismatch) as caught:
        Life(store, 2, must={"a": (1, 2), "b": 2})
    assert "b: 1 in the store, 2 here" in str(caught.value) and "a:" not in str(caught.value)
    assert differences({"x": 1}, {"x": 1, "y": 2}) == ["y: None in the store, 2 here"]


def test_a_mangled_compatibility_record_is_damage() -> None:
    store = MemoryStore()
    life = Life(store, 1)
    life.fleet._states = {"job": b"[]"}
    assert life.snapshot().snapshot is not None
    again = Life(store, 2)
    assert again.restored.passed_over == [], "the fingerprint is enough as long as it fits"
    assert json.loads(compatibility_record({"b": 1}, {"a": 2})) == {"must": {"b": 1}, "recorded": {"a": 2}}
    again.fleet._states = {"job": b"[]"}
    again.snapshot()
    with pytest.raises(FingerprintMismatch):
        Life(store, 3, must={"model": "other"})


def test_f4_a_newer_ledger_is_passed_over_by_name_and_alone_it_refuses_with_13() -> None:
    store = MemoryStore()
    life = worked(store)

    class Newer(type(life.ledgers)):  # type: ignore[misc]
        def decode(self, data: bytes, names: Names) -> Any:
            if b"p0" in data:
                raise FormatNotUnderstood("a ledger of version 2 requires tiers")
            return super().decode(data, names)

    again = Life(store, 2, ledgers=Newer(), choice="auto")
    assert again.restored.snapshot == ids(life)[0] and "tiers" in again.restored.passed_over[0].reason

    class Unknown(type(life.ledgers)):  # type: ignore[misc]
        def decode(self, data: bytes, names: Names) -> Any:
            raise FormatNotUnderstood("a ledger of version 2")

    with pytest.raises(FormatNotUnderstood, match="version 2") as caught:
        Life(store, 3, ledgers=Unknown())
    assert caught.value.exit_code == 13


def test_the_newest_refusal_is_the_one_that_is_told() -> None:
    store = MemoryStore()
    Life(store, 1, must={"model": "older"})
    Life(store, 2, choice="never", must={"model": "newer"})
    with pytest.raises(FingerprintMismatch, match="'newer' in the store"):
        Life(store, 3)


# ---- trouble during the restore --------------------------------------------------------------------------------


def test_c8_a_restore_that_was_overtaken_is_fenced() -> None:
    store = MemoryStore()
    worked(store)
    claims: list[int] = []

    def ask(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("ledger/") and not claims:
            claims.append(SlotLog(store, ManualClock(), SeededEntropy("heir"), "heir").claim())
        return PASS

    with pytest.raises(Fenced, match="heir"):
        Life(FaultyStore(store, ask), 2)  # type: ignore[arg-type]
    assert Life(store, 3).run_to_end() == reference_answers()


@pytest.mark.parametrize("error", [StoreUnavailable("down"), CredentialsRefused("expired")])
def test_s7_a_store_that_does_not_answer_is_not_taken_for_damage(error: RecoveryError) -> None:
    """At any call: an older snapshot is never restored because the newest could not be asked for."""
    store = MemoryStore()
    worked(store)
    objects = dict(store._objects)
    counting = CountingStore(store)
    Life(counting, 2)
    for k in range(counting.count()):
        store._objects = dict(objects)
        plan = iter([PASS] * k + [RaiseBefore(error)])
        try:
            again = Life(FaultyStore(store, plan), 3)
        except type(error):
            continue
        assert again.restored.passed_over == [] and again.restored.uncollected in (None, error)
    assert Life(store, 4).run_to_end() == reference_answers()


# ---- many crashes ----------------------------------------------------------------------------------------------


def test_w2_fifty_lives_that_each_do_a_little_finish_the_job() -> None:
    prompts = (*(Prompt(f"q{i}", (i, 3), 40) for i in range(8)), Prompt("r", (5, 6, 8), 9, "seed"))
    store = MemoryStore()
    promised = None
    for number in range(1, 51):
        life = Life(store, number, prompts=prompts)
        if promised is not None:
            life.keeps(promised)
        life.dispatch()
        life.decode(1)
        if number % 3:
            life.flush()
        if number % 4 == 0:
            life.decode(1)
            life.snapshot()
        life.decode(1)
        life.close()
        promised = life.flushed
    assert Life(store, 99, prompts=prompts).run_to_end() == reference_answers(prompts)


def test_the_compatibility_record_is_canonical() -> None:
    assert compatibility_record({"b": 1, "a": 2}, {}) == canonical_json({"must": {"a": 2, "b": 1}, "recorded": {}})
