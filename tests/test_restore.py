"""recovery.restore, adoption, garbage: what is chosen, what is passed over and why, what a crash may cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recovery import garbage, layout, log
from recovery.codec import canonical_json
from recovery.errors import (
    CredentialsRefused,
    Damaged,
    DigestMismatch,
    Fenced,
    FingerprintMismatch,
    FormatNotUnderstood,
    NothingPublished,
    ObjectMissing,
    RecoveryError,
    StoreUnavailable,
)
from recovery.model import ENDED, OPEN, Restarted, Resumed
from recovery.protocol import Verdict
from recovery.restore import Choice, compatibility_record, differences
from recovery.slots import SlotLog, read_slot
from recovery.snapshots import Snapshot, put_object
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseBefore
from tests.fake_engine import MUST, Life, Prompt, V, content_of, next_token, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.plain_codecs import PlainLedgers

Lives = Callable[..., Life]


@pytest.fixture
def lives() -> Iterator[Lives]:
    """Makes process-lives and closes them."""
    made: list[Life] = []

    def make(store: Any, number: int, **fields: Any) -> Life:
        made.append(Life(store, number, **fields))
        return made[-1]

    yield make
    for life in made:
        life.close()


def worked(lives: Lives, store: Any, n_snapshots: int = 2, number: int = 1, keep: int = 2) -> Life:
    """A life that took so many snapshots, and then flushed something more."""
    life = lives(store, number, keep_latest_k=keep)
    life.dispatch()
    for _ in range(n_snapshots):
        life.decode(2)
        life.flush()
        life.decode(1)
        assert life.snapshot().verdict is Verdict.PUBLISHED
    life.decode(2)
    life.flush()
    return life


def ids(life: Life) -> list[int]:
    return sorted(life.published)


def tokens(life: Life) -> dict[str, int]:
    return {entry.identity.rollout: entry.n_tokens for entry in life.publication.ledger}


def objects_of(store: Any, seq: int) -> list[str]:
    """What snapshot `seq` references, newest ledger object first."""
    read = read_slot(store, seq)
    assert read is not None
    snapshot = Snapshot.from_slot(read.slot)
    reached = garbage.reached_by(store, PlainLedgers(), snapshot)
    return [snapshot.ledger.key, *sorted(reached - {snapshot.ledger.key})]


# ---- the plain path --------------------------------------------------------------------------------------------


def test_the_first_start_publishes_an_empty_snapshot_before_anything_is_dispatched(lives: Lives) -> None:
    store = MemoryStore()
    life = lives(store, 1)
    restored = life.restored
    assert (restored.snapshot, restored.published, restored.calls, restored.passed_over) == (None, 2, [], [])
    read = read_slot(store, 2)
    assert read is not None and read.slot.body["cause"] == "adoption" and read.slot.body["counts"]["calls"] == 0
    assert life.run_to_end() == reference_answers()


def test_w1_what_was_flushed_and_never_published_is_adopted(lives: Lives) -> None:
    """The snapshot is older than the flush: what the crash costs is bounded by the flush."""
    store = MemoryStore()
    life = worked(lives, store)
    again = lives(store, 2)
    again.keeps(life.flushed)
    assert again.restored.snapshot == ids(life)[-1] and again.chosen_content == life.published[ids(life)[-1]]
    assert again.restored.adopted_segments == 1 and again.restored.adopted_tokens == 6
    assert again.restored.tokens_reused == sum(call.entry.n_tokens for call in again.restored.calls) > 0
    read = read_slot(store, again.restored.published or 0)
    assert read is not None and read.slot.body["restored_from"] == again.restored.snapshot
    assert again.run_to_end() == reference_answers()


def test_adoption_works_without_any_snapshot_of_the_own_process(lives: Lives) -> None:
    store = MemoryStore()
    life = lives(store, 1)
    life.dispatch()
    for _ in range(3):
        life.decode(2)
        life.flush()
    again = lives(store, 2)
    again.keeps(life.flushed)
    assert again.restored.adopted_segments == 3
    assert again.run_to_end() == reference_answers()


def test_a_second_restore_before_anything_happened_loses_nothing(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    found = []
    for number in range(2, 7):
        again = lives(store, number)
        again.keeps(life.flushed)
        found.append(tokens(again))
        for entry in again.publication.ledger:
            if entry.state == OPEN:
                assert entry.attempt == number - 1
                assert [type(event) for event in entry.history] == [Resumed], "got nowhere: one line, not five"
    assert found == [found[0]] * 5
    assert again.run_to_end() == reference_answers()


def test_a_restart_only_call_begins_again_and_says_why(lives: Lives) -> None:
    prompts = (Prompt("r", (5, 6, 8), 9, "seed"), Prompt("p", (8,), 14))
    store = MemoryStore()
    life = lives(store, 1, prompts=prompts)
    life.dispatch()
    life.decode(3)
    life.snapshot()
    life.decode(1)
    life.flush()
    again = lives(store, 2, prompts=prompts)
    entry = next(e for e in again.publication.ledger if e.identity.rollout == "r")
    assert (entry.n_tokens, entry.attempt) == (0, 1)
    assert entry.history == (Restarted(4, again.restored.published or 0, entry.history[0].reason),)  # type: ignore[union-attr]
    assert "seed" in entry.history[0].reason  # type: ignore[union-attr]
    assert again.run_to_end() == reference_answers(prompts)


def test_a_call_that_had_all_its_tokens_but_not_its_end_is_finished(lives: Lives) -> None:
    prompts = (Prompt("p", (8,), 5),)
    store = MemoryStore()
    life = lives(store, 1, prompts=prompts)
    life.dispatch()
    life.decode(4)
    call = life.live[0]
    call.append([next_token((8,), list(call.transcript_ids))], [-0.5], V)  # the last token, and then the crash
    life.flush()
    again = lives(store, 2, prompts=prompts)
    (entry,) = again.publication.ledger
    assert (entry.state, entry.ended, entry.n_tokens) == (ENDED, ("length", None), 5)
    assert again.answers() == reference_answers(prompts)


# ---- what is not adopted ---------------------------------------------------------------------------------------


def test_w10_an_explicit_older_id_adopts_nothing_and_fences_the_newer_off(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store, n_snapshots=3, keep=3)
    first = ids(life)[1]
    again = lives(store, 2, choice=first, keep_latest_k=3)
    assert again.restored.snapshot == first and again.restored.adopted_segments == 0
    assert content_of(again.publication.ledger) == life.published[first]
    third = lives(store, 3, keep_latest_k=3)  # auto: the newest is the one that was rolled back to
    assert third.restored.snapshot == again.restored.published and third.restored.adopted_segments == 0
    assert content_of(third.publication.ledger).keys() == life.published[first].keys()
    assert third.run_to_end() == reference_answers()


def test_late_segments_of_a_zombie_are_not_adopted(lives: Lives) -> None:
    """The old process still decodes and flushes after the new one has restored; it can publish nothing."""
    store = MemoryStore()
    zombie = worked(lives, store)
    heir = lives(store, 2)
    zombie.decode(3)
    zombie.flush()
    assert zombie.snapshot().verdict is Verdict.FENCED
    heir.dispatch()
    heir.decode(1)
    heir.flush()
    third = lives(store, 3)
    assert third.restored.snapshot == heir.restored.published
    assert third.restored.adopted_segments == 1 and third.restored.rejected == {}
    third.keeps(heir.flushed)
    assert third.run_to_end() == reference_answers()


def test_records_of_a_life_that_began_anew_never_mix_with_those_before(lives: Lives) -> None:
    """`restore: never` makes the same calls with the same attempts; its segments must not extend the older snapshot."""
    store = MemoryStore()
    worked(lives, store)
    anew = lives(store, 2, choice="never")
    assert len(anew.publication.ledger) == 0
    anew.dispatch()
    anew.decode(6)
    anew.flush()
    third = lives(store, 3)
    assert third.restored.snapshot == anew.restored.published
    assert set(tokens(third).values()) <= {3, 6} and third.restored.rejected == {}
    third.keeps(anew.flushed)
    assert third.run_to_end() == reference_answers()


def test_a_life_with_another_fingerprint_leaves_nothing_to_the_job_before_it(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    other = lives(store, 2, choice="never", must={"model": "another"})
    other.dispatch()
    other.decode(9)
    other.flush()
    again = lives(store, 3)
    assert again.chosen_content == life.published[ids(life)[-1]]
    (passed,) = again.restored.passed_over
    assert passed.what == f"snapshot {other.restored.published}" and "model" in passed.reason
    # What was flushed before `never` was garbage from then on; what was flushed after it is another job's.
    assert again.restored.adopted_segments == 0 and content_of(again.publication.ledger) == again.chosen_content
    assert again.run_to_end() == reference_answers()


def test_n1_foreign_and_unfinished_names_are_neither_adopted_nor_deleted(lives: Lives) -> None:
    """C10: what a crashed writer left under another name is not taken for a segment."""
    store = MemoryStore()
    life = worked(lives, store)
    (item, *_) = store.list("seg/")
    foreign = [
        f"{item.key}.backup",
        "seg/e000001/lost-found/readme",
        "seg/e000001/w0.00000000/00000099-0000.tmp",
        "ledger/e000001/copy-of-ledger.arrow",
        "state/e000001/.ds_store",
        "gc/notes.txt",
        "readme.txt",
    ]
    for key in foreign:
        store.put_new(key, b"mine")
    for number in range(2, 8):
        again = lives(store, number, keep_latest_k=1)
        again.keeps(life.flushed)
        again.snapshot()
    assert [store.get(key) for key in foreign] == [b"mine"] * len(foreign)
    assert again.run_to_end() == reference_answers()


# ---- damage ----------------------------------------------------------------------------------------------------


def damage_missing(store: MemoryStore, key: str) -> None:
    store.delete(key)


def damage_flip(store: MemoryStore, key: str) -> None:
    data = store.get(key)
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def damage_truncate(store: MemoryStore, key: str) -> None:
    store.put(key, store.get(key)[:-3])


DAMAGES = [damage_missing, damage_flip, damage_truncate]


def own_objects(store: MemoryStore, life: Life) -> list[str]:
    """Objects that the newest snapshot references and the one before does not."""
    newest, before = ids(life)[-1], ids(life)[-2]
    older = objects_of(store, before)
    return [key for key in objects_of(store, newest) if key not in older]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_c3_w13_damage_of_the_newest_falls_back_and_names_it(lives: Lives, damage: Any, which: int) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    fresh = own_objects(store, life)
    key = fresh[which % len(fresh)]
    damage(store, key)
    again = lives(store, 2)
    assert again.restored.snapshot == ids(life)[-2]
    assert again.restored.passed_over[0].what == f"snapshot {ids(life)[-1]}"
    assert key in again.restored.passed_over[0].reason
    assert again.run_to_end() == reference_answers()
    third = lives(store, 3)
    assert third.restored.passed_over == [], "the adoption is a new, whole snapshot"


@pytest.mark.parametrize("damage", DAMAGES)
def test_w13_strict_refuses_what_auto_passes_over(lives: Lives, damage: Any) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    key = own_objects(store, life)[0]
    damage(store, key)
    with pytest.raises(Damaged, match=key):
        lives(store, 2, choice="strict")
    assert lives(store, 3).restored.snapshot == ids(life)[-2]


def test_strict_takes_a_sound_newest_snapshot_and_refuses_a_damaged_flush(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    again = lives(store, 2, choice="strict")
    assert again.restored.snapshot == ids(life)[-1] and again.restored.adopted_segments == 1
    again.dispatch()
    again.decode(1)
    again.flush()
    damage_flip(store, store.list("seg/e000002/")[-1].key)
    with pytest.raises(DigestMismatch, match="seg/e000002"):
        lives(store, 3, choice="strict")
    third = lives(store, 4)
    assert [item.what for item in third.restored.passed_over] == [f"segment {store.list('seg/e000002/')[-1].key}"]
    assert third.run_to_end() == reference_answers()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_flush_costs_its_calls_what_came_after_it(lives: Lives, damage: Any) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    for _ in range(3):
        life.decode(1)
        life.flush()
    newest = [item.key for item in store.list("seg/") if item.key not in objects_of(store, ids(life)[-1])]
    damage(store, newest[1])
    again = lives(store, 2)
    passed = [item.what for item in again.restored.passed_over]
    assert passed == ([] if damage is damage_missing else [f"segment {newest[1]}"])
    assert sum(again.restored.rejected.values()) > 0
    published = life.published[ids(life)[-1]]
    for call_id, (n, _) in content_of(again.publication.ledger).items():
        assert n >= published[call_id][0]
    assert again.run_to_end() == reference_answers()


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
    lives: Lives, what: str, change: Callable[[bytes], bytes | None], later_slots: int
) -> None:
    """Also when it is the tail, which a claim has to be written after."""
    store = MemoryStore()
    life = worked(lives, store, keep=3)
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
        lives(store, 9, choice="strict")
    again = lives(store, 2)
    assert again.restored.snapshot == ids(life)[-2]
    assert any(item.what in (f"log slot {seq}", f"snapshot {seq}") for item in again.restored.passed_over)
    assert again.run_to_end() == reference_answers()


def test_nothing_restorable_is_an_error_and_not_a_new_beginning(lives: Lives) -> None:
    """Exactly once would be lost if a job began anew because it could not read what it had done."""
    store = MemoryStore()
    life = worked(lives, store)
    for item in store.list("ledger/"):
        store.delete(item.key)
    with pytest.raises(Damaged, match="no snapshot of this store can be restored") as caught:
        lives(store, 2)
    assert all(f"snapshot {seq}" in str(caught.value) for seq in ids(life))
    for seq in ids(life):
        store.put(log.slot_key(seq), b"?")
    with pytest.raises(Damaged, match=f"log slot {ids(life)[0]}"):
        lives(store, 3)
    assert lives(store, 4, choice="never").run_to_end() == reference_answers()


# ---- explicit ids ----------------------------------------------------------------------------------------------


def test_an_explicit_id_does_not_mind_damage_of_newer_ones(lives: Lives) -> None:
    """It is what one does about it."""
    store = MemoryStore()
    life = worked(lives, store, n_snapshots=3, keep=3)
    store.put(log.slot_key(ids(life)[-1]), b"?")
    again = lives(store, 2, choice=ids(life)[1], keep_latest_k=3)
    assert again.restored.snapshot == ids(life)[1]
    assert [item.what for item in again.restored.passed_over] == [f"log slot {ids(life)[-1]}"]


@pytest.mark.parametrize("choice", [1, 3, 99])
def test_an_id_that_is_no_snapshot_is_said(lives: Lives, choice: Choice) -> None:
    store = MemoryStore()
    lives(store, 1)
    with pytest.raises(NothingPublished, match=f"no snapshot {choice}") as caught:
        lives(store, 2, choice=choice)
    assert caught.value.exit_code == 14


def test_an_explicit_id_that_is_damaged_is_refused(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    damage_missing(store, own_objects(store, life)[0])
    with pytest.raises(ObjectMissing):
        lives(store, 2, choice=ids(life)[-1])
    store.put(log.slot_key(ids(life)[-1]), b"?")
    with pytest.raises(Damaged, match=f"log slot {ids(life)[-1]}"):
        lives(store, 3, choice=ids(life)[-1])


def test_an_id_whose_objects_are_about_to_be_deleted_is_refused(lives: Lives) -> None:
    """Their deletion is decided; whoever decided it may be asleep, and delete them under us."""
    store = MemoryStore()
    life = lives(store, 1, keep_latest_k=1)
    life.dispatch()
    life.decode(3)
    life.snapshot()
    first = ids(life)[-1]
    life.fleet._states = {"job": compatibility_record(MUST, {"changed": 1})}
    life.snapshot()
    named = {key for item in store.list("gc/") for key in json.loads(store.get(item.key))}
    doomed = named & set(objects_of(store, first))
    assert doomed and all(store.get(key) for key in doomed), "named, and still there"
    with pytest.raises(Damaged, match="were about to be deleted by a later garbage collection"):
        lives(store, 2, choice=first)


# ---- fingerprints and formats ----------------------------------------------------------------------------------


def test_k8_another_fingerprint_is_refused_with_its_fields_and_exit_code_15(lives: Lives) -> None:
    store = MemoryStore()
    worked(lives, store)
    before = [item for item in store.list("") if not item.key.startswith("log/")]
    with pytest.raises(FingerprintMismatch) as caught:
        lives(store, 2, must={"model": "other", "tokenizer": ["x"]})
    assert caught.value.exit_code == 15
    assert "model: 'fake' in the store, 'other' here" in str(caught.value)
    assert "tokenizer: None in the store, ['x'] here" in str(caught.value)
    assert [item for item in store.list("") if not item.key.startswith("log/")] == before
    assert lives(store, 3).run_to_end() == reference_answers()


def test_differences_are_those_of_json_not_of_python(lives: Lives) -> None:
    """A tuple is a list in the store; that is no difference."""
    store = MemoryStore()
    lives(store, 1, must={"a": (1, 2), "b": 1})
    with pytest.raises(FingerprintMismatch) as caught:
        lives(store, 2, must={"a": (1, 2), "b": 2})
    assert "b: 1 in the store, 2 here" in str(caught.value) and "a:" not in str(caught.value)
    assert differences({"x": 1}, {"x": 1, "y": 2}) == ["y: None in the store, 2 here"]


def test_a_mangled_compatibility_record_is_damage(lives: Lives) -> None:
    store = MemoryStore()
    life = lives(store, 1)
    life.fleet._states = {"job": b"[]"}
    assert life.snapshot().snapshot is not None
    again = lives(store, 2)
    assert again.restored.passed_over == [], "the fingerprint is enough as long as it fits"
    assert json.loads(compatibility_record({"b": 1}, {"a": 2})) == {"must": {"b": 1}, "recorded": {"a": 2}}
    again.fleet._states = {"job": b"[]"}
    again.snapshot()
    with pytest.raises(FingerprintMismatch):
        lives(store, 3, must={"model": "other"})


def test_f4_a_newer_ledger_is_passed_over_by_name_and_alone_it_refuses_with_13(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store)

    class Newer(type(life.ledgers)):  # type: ignore[misc]
        def decode(self, data: bytes) -> Any:
            if b"p0" in data:
                raise FormatNotUnderstood("a ledger of version 2 requires tiers")
            return super().decode(data)

    again = lives(store, 2, ledgers=Newer(), choice="auto")
    assert again.restored.snapshot == ids(life)[0] and "tiers" in again.restored.passed_over[0].reason

    class Unknown(type(life.ledgers)):  # type: ignore[misc]
        def decode(self, data: bytes) -> Any:
            raise FormatNotUnderstood("a ledger of version 2")

    with pytest.raises(FormatNotUnderstood, match="version 2") as caught:
        lives(store, 3, ledgers=Unknown())
    assert caught.value.exit_code == 13


def test_the_newest_refusal_is_the_one_that_is_told(lives: Lives) -> None:
    store = MemoryStore()
    lives(store, 1, must={"model": "older"})
    lives(store, 2, choice="never", must={"model": "newer"})
    with pytest.raises(FingerprintMismatch, match="'newer' in the store"):
        lives(store, 3)


# ---- trouble during the restore --------------------------------------------------------------------------------


def test_c8_a_restore_that_was_overtaken_is_fenced(lives: Lives) -> None:
    store = MemoryStore()
    worked(lives, store)
    claims: list[int] = []

    def ask(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("ledger/") and not claims:
            claims.append(SlotLog(store, ManualClock(), SeededEntropy("heir"), "heir").claim())
        return PASS

    with pytest.raises(Fenced, match="heir"):
        lives(FaultyStore(store, ask), 2)  # type: ignore[arg-type]
    assert lives(store, 3).run_to_end() == reference_answers()


def test_a_store_that_is_down_is_not_taken_for_damage(lives: Lives) -> None:
    store = MemoryStore()
    worked(lives, store)
    counting = CountingStore(store)
    lives(counting, 2)
    for k in range(counting.count()):
        plan = iter([PASS] * k + [RaiseBefore(StoreUnavailable("down"))])
        try:
            again = lives(FaultyStore(store, plan), 10 + k)  # type: ignore[arg-type]
        except StoreUnavailable:
            continue
        assert again.restored.passed_over == []
    assert lives(store, 3).run_to_end() == reference_answers()


def test_garbage_that_may_not_be_deleted_does_not_stop_a_restore(lives: Lives) -> None:
    store = MemoryStore()
    worked(lives, store)
    refused = RaiseBefore(CredentialsRefused("no deleting"))
    forbidding = FaultyStore(store, lambda verb, key: refused if verb in ("delete", "put") else PASS)
    again = lives(forbidding, 2)
    assert isinstance(again.restored.uncollected, CredentialsRefused)
    assert again.run_to_end() == reference_answers()


def test_a_damaged_older_snapshot_stops_garbage_collection_and_nothing_else(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store)
    older = objects_of(store, ids(life)[-2])[0]
    newest = objects_of(store, ids(life)[-1])
    if older in newest:  # a delta's parent: damage it only for the older one, by removing its slot
        store.put(log.slot_key(ids(life)[-2]), b"?")
    again = lives(store, 2)
    assert again.restored.passed_over == [] and again.restored.uncollected is None
    assert again.run_to_end() == reference_answers()


def test_an_unreadable_list_of_garbage_is_named_and_then_nothing_is_adopted(lives: Lives) -> None:
    store = MemoryStore()
    life = worked(lives, store, keep=1)
    life.fleet._states = {"job": compatibility_record(MUST, {"x": 1})}
    life.snapshot()  # the older state is garbage now
    life.decode(1)
    life.flush()
    newest = ids(life)[-1]
    lists = store.list("gc/")
    assert lists and store.list("log/")[-1].key == log.slot_key(newest + 1)
    store.put(lists[-1].key, b"[" + b" " * (lists[-1].nbytes - 1))
    with pytest.raises(DigestMismatch, match=lists[-1].key):
        lives(store, 9, choice="strict")
    again = lives(store, 2, keep_latest_k=1)
    assert [item.what for item in again.restored.passed_over] == [f"gc {newest + 1}"]
    assert again.restored.snapshot == newest and again.restored.adopted_segments == 0
    assert again.run_to_end() == reference_answers()


def test_a_list_of_garbage_must_name_objects_of_ours() -> None:
    store = MemoryStore()
    for data in (b"{}", b'["format.json"]', b'["seg/../x"]', b"[7]", b"[", b"\xff"):
        key = layout.garbage_key(1, SeededEntropy(data).hex(8))
        store.put_new(key, data)
        ref = put_object(store, layout.garbage_key(2, SeededEntropy(data).hex(8)), data)
        slot = log.Slot(
            seq=4, epoch=1, kind="gc", nonce="", prev="", owner="", utc=0.0, body={"victims": ref.as_json()}
        )
        with pytest.raises(Damaged, match="gc slot 4"):
            garbage.intended(store, slot)
        store.delete(ref.key)
        assert garbage.intended(store, slot) == set()


# ---- many crashes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("progress", ["none", "flush", "snapshot"])
def test_c10_a_hundred_crashes_leave_bounded_objects(lives: Lives, keep: int, progress: str) -> None:
    """A crash loop must not fill the disk, wherever in its life each process dies."""
    prompts = (Prompt("long", (4, 1, 3, 3), 400), Prompt("short", (9, 9), 3))
    store = MemoryStore()
    most = 0
    for number in range(1, 101):
        life = Life(store, number, prompts=prompts, keep_latest_k=keep)
        life.dispatch()
        if progress != "none":
            life.decode(1)
            life.flush()
        if progress == "snapshot":
            assert life.snapshot().verdict is Verdict.PUBLISHED
        life.close()
        others = [item for item in store.list("") if not item.key.startswith(("log/", "seg/"))]
        most = max(most, len(others))
    # The ledger's chain is at most 64 deltas, twice while a new base is not yet old enough; the log alone grows.
    assert most <= 2 * 66 + 12, most
    assert len(store.list("log/")) <= 5 * 100
    segments = len(store.list("seg/"))
    assert segments <= (0 if progress == "none" else 60), segments


def test_w2_fifty_lives_that_each_do_a_little_finish_the_job(lives: Lives) -> None:
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
    assert lives(store, 99, prompts=prompts).run_to_end() == reference_answers(prompts)


def test_the_compatibility_record_is_canonical() -> None:
    assert compatibility_record({"b": 1, "a": 2}, {}) == canonical_json({"must": {"a": 2, "b": 1}, "recorded": {}})
