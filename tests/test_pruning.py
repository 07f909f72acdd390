"""recovery.pruning: what nobody needs goes at once, what anybody may need stays, wherever it is interrupted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recovery import layout, pins
from recovery.errors import (
    Damaged,
    Fenced,
    NothingPublished,
    OutcomeUnknown,
    RecoveryError,
    StoreFull,
    StoreUnavailable,
)
from recovery.protocol import Verdict
from recovery.pruning import Pruned, prune
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore, RaiseAfter, RaiseBefore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests.fake_engine import Life, Prompt, content_of, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.lives import damage_flip, ids, objects_of, own_objects
from tests.plain_codecs import PlainLedgers, PlainSegments
from tests.test_pins import changing, pin

PROMPTS = (Prompt("p0", (3,), 45), Prompt("p1", (5,), 60), Prompt("p2", (9, 9), 3))
REFERENCE = reference_answers(PROMPTS)


def life_of(store: Any, number: int, **fields: Any) -> Life:
    return Life(store, number, prompts=PROMPTS, **fields)


def pruned(store: Any, keep: int = 1, seed: object = 0) -> Pruned:
    entropy = SeededEntropy(("prune", seed))
    log = SlotLog(store, ManualClock(), entropy, "pruner")
    return prune(store, PlainSegments(), PlainLedgers(), entropy, log, keep_latest_k=keep)


def working(store: Any, number: int, n_snapshots: int = 3) -> Life:
    """A life whose every snapshot has a state of its own, and that flushed something after the last."""
    life = life_of(store, number, keep_latest_k=9)
    life.dispatch()
    for i in range(n_snapshots):
        life.decode(2)
        life.flush()
        life.decode(1)
        changing(life, 10 * number + i)
        assert life.snapshot().verdict is Verdict.PUBLISHED
    life.decode(2)
    life.flush()
    return life


def littered(store: Any) -> Life:
    """A store after three processes that kept all of their snapshots; the first two flushed once more as zombies."""
    lives = []
    for number in (1, 2, 3):
        lives.append(working(store, number))
        for zombie in lives[:-1]:
            zombie.decode(1)
            zombie.flush()
    return lives[-1]


def objects(store: MemoryStore) -> set[str]:
    return {item.key for prefix in layout.PREFIXES for item in store.list(prefix)}


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_what_is_left_is_what_the_kept_snapshots_reach(keep: int) -> None:
    store = MemoryStore()
    life = littered(store)
    newest = ids(life)[-keep:]
    before = objects(store)
    kept = set().union(*(objects_of(store, seq) for seq in ids(life)[-keep + 1 :])) if keep > 1 else set()
    found = pruned(store, keep)
    assert found.restored.snapshot == newest[-1] and found.restored.adopted_segments == 1
    assert kept <= objects(store) and len(objects(store)) < len(before)
    left = objects(store) - set().union(*(objects_of(store, seq) for seq in found.snapshots)) - kept
    assert all(key.startswith("gc/") for key in left) and len(left) <= 1, left
    assert life.snapshot().verdict is Verdict.FENCED
    again = life_of(store, 4)
    assert again.restored.snapshot == found.snapshots[-1]
    again.keeps(life.flushed)
    assert again.run_to_end() == REFERENCE


def test_no_call_is_planned_and_none_changes() -> None:
    """An attempt, a history: what a prune does is not a restore that somebody would see in a result."""
    store = MemoryStore()
    life = littered(store)
    before = life_of(_copy(store), 9, keep_latest_k=9).restored
    pruned(store)
    again = life_of(store, 4)
    for entry in again.publication.ledger:
        assert len([event for event in entry.history if event.snapshot > ids(life)[-1]]) <= 1
    assert {c.entry.identity.rollout: (c.entry.attempt, len(c.transcript.token_ids)) for c in again.restored.calls} == {
        c.entry.identity.rollout: (c.entry.attempt, len(c.transcript.token_ids)) for c in before.calls
    }


def _copy(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    copy._objects.update(store._objects)
    return copy


def test_a_second_one_finds_nothing_but_what_the_first_left_over() -> None:
    store = MemoryStore()
    littered(store)
    pruned(store)
    sizes = []
    for seed in range(1, 6):
        pruned(store, seed=seed)
        sizes.append(len([key for key in objects(store) if not key.startswith("ledger/")]))
    assert len(set(sizes)) == 1, "nor does it leave more each time; of ledger objects there are 64 at most"


def test_c7_what_is_pinned_stays_whole() -> None:
    store = MemoryStore()
    life = littered(store)
    seq = ids(life)[0]
    wanted, content = set(objects_of(store, seq)), life.published[seq]
    pin(store, seq)
    pruned(store)
    assert wanted <= set(store._objects)
    assert life_of(_copy(store), 9, choice=seq).chosen_content == content
    pins.unpin(store, seq)
    pruned(store, seed="again")
    assert not wanted <= set(store._objects)


def test_n1_foreign_names_are_not_touched() -> None:
    store = MemoryStore()
    life = littered(store)
    (segment, *_) = store.list("seg/")
    foreign = [f"{segment.key}.backup", "seg/e000001/lost-found/x", "step-100.backup", "pin/notes.txt", "gc/x.json"]
    for key in foreign:
        store.put_new(key, b"mine")
    pruned(store)
    assert [store.get(key) for key in foreign] == [b"mine"] * len(foreign)
    assert life_of(store, 4).run_to_end() == REFERENCE and life.flushed.tokens


def test_where_a_snapshot_was_passed_over_the_rest_is_left_to_look_at() -> None:
    store = MemoryStore()
    life = littered(store)
    mine = own_objects(store, life)
    damage_flip(store, next(key for key in mine if key.startswith("seg/")))
    before = objects(store)
    found = pruned(store)
    assert found.restored.passed_over[0].what == f"snapshot {ids(life)[-1]}"
    assert before <= objects(store), "nothing had been named before"
    assert life_of(store, 4).run_to_end() == REFERENCE


def test_an_empty_store_is_not_even_claimed() -> None:
    store = MemoryStore()
    make_root(store, SeededEntropy(1))
    SlotLog(store, ManualClock(), SeededEntropy(2), "me").claim()
    with pytest.raises(NothingPublished):
        pruned(store)
    assert len(store.list("log/")) == 1


def test_a_store_of_which_nothing_can_be_restored_loses_nothing() -> None:
    store = MemoryStore()
    life = life_of(store, 1)
    damage_flip(store, objects_of(store, ids(life)[0])[0])
    before = objects(store)
    with pytest.raises(Damaged):
        pruned(store)
    assert objects(store) == before


@pytest.mark.parametrize("error", [StoreFull("full"), StoreUnavailable("down"), OutcomeUnknown("?")])
@pytest.mark.parametrize("step", [RaiseBefore, RaiseAfter])
def test_f1_one_that_fails_anywhere_can_be_done_again(error: RecoveryError, step: Any) -> None:
    k = 0
    template = MemoryStore()
    life = working(template, 1)
    while True:
        store = _copy(template)
        plan = iter([PASS] * k + [step(error)])
        try:
            pruned(FaultyStore(store, lambda verb, key, plan=plan: next(plan, PASS)))
        except type(error):
            pass
        finished = next(plan, None) is not None
        if not finished and k % 3 == 0:
            pruned(store, seed="again")
        again = life_of(store, 2)
        again.keeps(life.flushed)
        assert again.run_to_end(60) == REFERENCE
        if finished:
            assert k > 20
            return
        k += 1


def test_c8_who_is_overtaken_deletes_nothing_more() -> None:
    store = MemoryStore()
    littered(store)
    taken: list[Life] = []

    def take_over(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("gc/") and not taken:
            taken.append(life_of(store, 8))
        return PASS

    with pytest.raises(Fenced):
        pruned(FaultyStore(store, take_over))
    assert taken[0].run_to_end() == REFERENCE


def test_a_kill_at_every_store_call_of_a_prune() -> None:
    """Of a store with a pinned snapshot: it and the newest one are whole, and the job ends as if nothing had been."""
    kills = at = 0
    template = MemoryStore()
    life = working(template, 1, 4)
    first, newest = ids(life)[1], ids(life)[-1]
    wanted = set(objects_of(template, first))
    pin(template, first)
    while True:
        at += 1
        for how in WAYS:
            store = _copy(template)
            killing = KillingStore(store, at, how)
            try:
                pruned(killing)
            except (Killed, RecoveryError):
                kills += 1
            if killing.n_calls < at:
                print(f"{kills} kills over {at - 1} store calls of a prune")
                assert at > 30
                return
            assert wanted <= set(store._objects)
            again = life_of(store, 2)
            again.keeps(life.flushed)
            assert again.restored.passed_over == [] and again.restored.snapshot is not None
            assert again.restored.snapshot >= newest
            if at % 4 == 0:
                pruned(store, seed="again")
                again = life_of(store, 3)
            assert again.run_to_end(60) == REFERENCE
            assert content_of(life_of(store, 4, choice=first).publication.ledger).keys() == life.published[first].keys()


def test_its_snapshots_are_ordinary_ones() -> None:
    store = MemoryStore()
    life = littered(store)
    found = pruned(store)
    slots = [json.loads(store.get(item.key)) for item in store.list("log/")]
    told = [(slot["kind"], slot["body"].get("cause")) for slot in slots[-5:]]
    assert ("snapshot", "adoption") in told and ("snapshot", "final") in told and ("gc", None) in told
    first = slots[found.snapshots[0] - 1]["body"]
    assert first["restored_from"] == ids(life)[-1] and first["states"] == slots[ids(life)[-1] - 1]["body"]["states"]
