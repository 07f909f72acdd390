"""recovery.adoption: what was flushed and never published is taken over, and nothing of another life."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from recovery.errors import (
    DigestMismatch,
)
from recovery.log_reading import read_slot
from recovery.ports import Listed
from recovery.protocol import Verdict
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore
from tests.fake_engine import Life, content_of, reference_answers
from tests.lives import DAMAGES, damage_flip, damage_missing, ids, objects_of, tokens, worked


def test_w1_what_was_flushed_and_never_published_is_adopted() -> None:
    """The snapshot is older than the flush: what the crash costs is bounded by the flush."""
    store = MemoryStore()
    life = worked(store)
    again = Life(store, 2)
    again.keeps(life.flushed)
    assert again.restored.snapshot == ids(life)[-1] and again.chosen_content == life.published[ids(life)[-1]]
    assert again.restored.adopted_segments == 1 and again.restored.adopted_tokens == 6
    assert again.restored.tokens_reused == sum(call.entry.n_tokens for call in again.restored.calls) > 0
    read = read_slot(store, again.restored.published or 0)
    assert read is not None and read.slot.body["restored_from"] == again.restored.snapshot
    assert again.run_to_end() == reference_answers()


def test_adoption_works_without_any_snapshot_of_the_own_process() -> None:
    store = MemoryStore()
    life = Life(store, 1)
    life.dispatch()
    for _ in range(3):
        life.decode(2)
        life.flush()
    again = Life(store, 2)
    again.keeps(life.flushed)
    assert again.restored.adopted_segments == 3
    assert again.run_to_end() == reference_answers()


def test_w10_an_explicit_older_id_adopts_nothing_and_fences_the_newer_off() -> None:
    store = MemoryStore()
    life = worked(store, n_snapshots=3, keep=3)
    first = ids(life)[1]
    again = Life(store, 2, choice=first, keep_latest_k=3)
    assert again.restored.snapshot == first and again.restored.adopted_segments == 0
    assert content_of(again.publication.ledger) == life.published[first]
    third = Life(store, 3, keep_latest_k=3)  # auto: the newest is the one that was rolled back to
    assert third.restored.snapshot == again.restored.published and third.restored.adopted_segments == 0
    assert content_of(third.publication.ledger).keys() == life.published[first].keys()
    assert third.run_to_end() == reference_answers()


def test_late_segments_of_a_zombie_are_not_adopted() -> None:
    """The old process still decodes and flushes after the new one has restored; it can publish nothing."""
    store = MemoryStore()
    zombie = worked(store)
    heir = Life(store, 2)
    zombie.decode(3)
    zombie.flush()
    assert zombie.snapshot().verdict is Verdict.FENCED
    heir.dispatch()
    heir.decode(1)
    heir.flush()
    third = Life(store, 3)
    assert third.restored.snapshot == heir.restored.published
    assert third.restored.adopted_segments == 1 and third.restored.rejected == {}
    third.keeps(heir.flushed)
    assert third.run_to_end() == reference_answers()


def test_records_of_a_life_that_began_anew_never_mix_with_those_before() -> None:
    """`restore: never` makes the same calls with the same attempts; its segments must not extend the older snapshot."""
    store = MemoryStore()
    worked(store)
    anew = Life(store, 2, choice="never")
    assert len(anew.publication.ledger) == 0
    anew.dispatch()
    anew.decode(6)
    anew.flush()
    third = Life(store, 3)
    assert third.restored.snapshot == anew.restored.published
    assert set(tokens(third).values()) <= {3, 6} and third.restored.rejected == {}
    third.keeps(anew.flushed)
    assert third.run_to_end() == reference_answers()


def test_a_life_with_another_fingerprint_leaves_nothing_to_the_job_before_it() -> None:
    store = MemoryStore()
    life = worked(store)
    other = Life(store, 2, choice="never", must={"model": "another"})
    other.dispatch()
    other.decode(9)
    other.flush()
    again = Life(store, 3)
    assert again.chosen_content == life.published[ids(life)[-1]]
    (passed,) = again.restored.passed_over
    assert passed.what == f"snapshot {other.restored.published}" and "model" in passed.reason
    # What was flushed before `never` was garbage from then on; what was flushed after it is another job's.
    assert again.restored.adopted_segments == 0 and content_of(again.publication.ledger) == again.chosen_content
    assert again.run_to_end() == reference_answers()


def test_what_was_read_before_the_adoption_is_not_read_after_it() -> None:
    """Each segment once to check the snapshot; those that are adopted once to look at them, and once more."""
    store = MemoryStore()
    life = worked(store)
    adoptable = [item.key for item in store.list("seg/") if item.key not in objects_of(store, ids(life)[-1])]
    counting = CountingStore(store)
    again = Life(counting, 2)
    assert again.restored.adopted_segments == len(adoptable) > 0
    times = Counter(call.key for call in counting.log if call.verb == "get" and call.key.startswith("seg/"))
    assert {key: n for key, n in times.items() if n > 1} == dict.fromkeys(adoptable, 2) and len(times) > len(adoptable)
    assert again.run_to_end() == reference_answers()


def test_strict_takes_a_sound_newest_snapshot_and_refuses_a_damaged_flush() -> None:
    store = MemoryStore()
    life = worked(store)
    again = Life(store, 2, choice="strict")
    assert again.restored.snapshot == ids(life)[-1] and again.restored.adopted_segments == 1
    again.dispatch()
    again.decode(1)
    again.flush()
    damage_flip(store, store.list("seg/e000002/")[-1].key)
    with pytest.raises(DigestMismatch, match="seg/e000002"):
        Life(store, 3, choice="strict")
    third = Life(store, 4)
    assert [item.what for item in third.restored.passed_over] == [f"segment {store.list('seg/e000002/')[-1].key}"]
    assert third.run_to_end() == reference_answers()


def test_a_flush_that_says_it_is_larger_than_any_segment_is_not_read() -> None:
    """No ledger says how large it is; reading it would end the process."""

    class Grown(MemoryStore):
        grown = ""

        def list(self, prefix: str, after: str = "") -> list[Listed]:
            found = super().list(prefix, after)
            return [Listed(item.key, 60 << 30) if item.key == self.grown else item for item in found]

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            assert key != self.grown or end is not None
            return super().get(key, start, end)

    store = Grown()
    life = worked(store)
    (grown,) = (item.key for item in store.list("seg/") if item.key not in objects_of(store, ids(life)[-1]))
    store.grown = grown
    again = Life(store, 2)
    assert [item.what for item in again.restored.passed_over] == [f"segment {grown}"]
    assert again.run_to_end() == reference_answers()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_flush_costs_its_calls_what_came_after_it(damage: Any) -> None:
    store = MemoryStore()
    life = worked(store)
    for _ in range(3):
        life.decode(1)
        life.flush()
    newest = [item.key for item in store.list("seg/") if item.key not in objects_of(store, ids(life)[-1])]
    damage(store, newest[1])
    again = Life(store, 2)
    passed = [item.what for item in again.restored.passed_over]
    assert passed == ([] if damage is damage_missing else [f"segment {newest[1]}"])
    assert sum(again.restored.rejected.values()) > 0
    published = life.published[ids(life)[-1]]
    for call_id, (n, _) in content_of(again.publication.ledger).items():
        assert n >= published[call_id][0]
    assert again.run_to_end() == reference_answers()
