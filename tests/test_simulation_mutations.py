"""The schedules of tests/schedules.py can fail: each of these breaks one rule of the protocol, and is found.

Owns: the mutations, and in how many seeds each has to be found.
Does not know: how; any failure of a schedule counts.

`python -m tests.test_simulation_mutations` prints the first seed that finds each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from recovery import garbage, layout, pins, pruning, publication, restore, slots
from recovery.compactor import Compactor
from recovery.errors import RecoveryError
from recovery.log import Outcome, Slot
from recovery.publication import Publication
from recovery.retention import Retention
from recovery.slots import SlotLog
from recovery.staging import coordinates_of
from tests import fake_engine
from tests.schedules import Schedule

Patch = Callable[[Any, str, Any], None]
SEEDS = 400
"""That are tried at most."""


def delete_before_intent(patch: Patch) -> None:
    """What is due is deleted at once; the list is published afterwards."""
    intend = Publication._intend

    def mutated(self: Publication, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.delete(key)
        intend(self, keys)

    patch(Publication, "_intend", mutated)


def delete_with_the_intent(patch: Patch) -> None:
    """The list is published first, and what it names is deleted without waiting for one more snapshot."""
    intended = Retention.intended

    def mutated(self: Retention, keys: Sequence[str]) -> None:
        intended(self, keys)
        publications[self].extend(keys)

    publications: dict[Retention, list[str]] = {}
    intend = Publication._intend

    def and_delete(self: Publication, keys: Sequence[str]) -> None:
        named = publications[self.retention] = []
        intend(self, keys)
        for key in named:
            self._store.delete(key)

    patch(Retention, "intended", mutated)
    patch(Publication, "_intend", and_delete)


def lists_are_not_decided_anew(patch: Patch) -> None:
    """Who loses a slot to a pin writes the same list into the next one."""
    append_if = SlotLog.append_if

    def mutated(self: SlotLog, kind: str, body: Callable[[], Mapping[str, Any] | None]) -> Slot | None:
        said = body()
        return append_if(self, kind, lambda: said)

    patch(SlotLog, "append_if", mutated)


def pins_are_looked_at_once(patch: Patch) -> None:
    look = pins.Pinned.look

    def mutated(self: pins.Pinned) -> tuple[list[str], set[str]]:
        if self not in seen:
            seen[self] = look(self)
        return seen[self]

    seen: dict[pins.Pinned, tuple[list[str], set[str]]] = {}
    patch(pins.Pinned, "look", mutated)


def pins_are_not_looked_at(patch: Patch) -> None:
    patch(pins.Pinned, "look", lambda self: ([], set()))


def a_pin_does_not_look_at_the_log(patch: Patch) -> None:
    patch(pins, "refuse_if_condemned", lambda *args, **fields: None)


def compaction_is_published_without_fencing(patch: Patch) -> None:
    """Who meets a slot of a newer epoch goes on after it, and what its compaction moved with it."""
    follow = SlotLog._follow

    def mutated(self: SlotLog, found: slots.Read) -> None:
        self.epoch = max(self.epoch, found.slot.epoch)
        follow(self, found)

    patch(SlotLog, "_follow", mutated)


def compaction_deletes_what_it_has_read(patch: Patch) -> None:
    run = Compactor._round

    def mutated(self: Compactor, chosen: Any, written: Any) -> Any:
        done = run(self, chosen, written)
        for key in chosen.segments:
            self._store.delete(key)
        return done

    patch(Compactor, "_round", mutated)


def compaction_believes_what_it_writes(patch: Patch) -> None:
    """A segment that could not be written is handed over like one that was read back."""

    def mutated(self: Compactor, records: Sequence[Any], written: list[Any]) -> Sequence[Any]:
        self._number += 1
        stem = layout.segment_stem(self._epoch, self._writer, self._number, self._entropy.hex(4))
        segment = self._codec.encode(records, stem)
        written.append(segment.info)
        with contextlib.suppress(RecoveryError):
            self._store.put_new(segment.info.key, segment.data)
        return coordinates_of(records, segment.info.key)

    patch(Compactor, "_write", mutated)


def garbage_of_the_own_epoch(patch: Patch) -> None:
    """What no snapshot reaches is garbage, also what an unfinished publication or compaction is about to reference."""

    def collect(self: Publication, go_on: Callable[[], bool] = lambda: True) -> int:
        reached = self.reached()
        own = (key for prefix in layout.PREFIXES for key in (item.key for item in self._store.list(prefix)))
        unreached = [key for key in own if key not in reached and layout.epoch_of(key) == self.log.epoch]
        self.retention.take_over([], unreached)
        return collected(self, go_on)

    collected = Publication.collect
    patch(Publication, "collect", collect)


def garbage_that_a_kept_snapshot_reaches(patch: Patch) -> None:
    """A restore keeps only its own snapshot."""
    unreached = garbage.unreached

    def mutated(store: Any, ledgers: Any, tail: int, epoch: int, keep: int, known: Any) -> list[str]:
        return unreached(store, ledgers, tail, epoch, 1, known)

    patch(garbage, "unreached", mutated)


def forgotten_snapshots_count_as_kept(patch: Patch) -> None:
    patch(garbage, "forgotten_by", lambda slot: frozenset())


def forgotten_snapshots_are_restored(patch: Patch) -> None:
    patch(restore, "forgotten_by", lambda slot: frozenset())


def what_was_flushed_after_a_forgotten_one_is_adopted(patch: Patch) -> None:
    choose = restore.choose

    def mutated(*args: Any, **fields: Any) -> Any:
        chosen = choose(*args, **fields)
        chosen.adopts = True
        return chosen

    patch(fake_engine, "choose", mutated)
    patch(pruning, "choose", mutated)


def a_condemned_snapshot_is_restored(patch: Patch) -> None:
    patch(garbage, "intended", lambda store, slot: set())


def a_lost_answer_is_taken_for_a_success(patch: Patch) -> None:
    create = SlotLog._create

    def mutated(self: SlotLog, slot: Slot) -> Any:
        data = slots.log.encode(slot)
        try:
            self._store.put_new(slots.log.slot_key(slot.seq), data)
        except RecoveryError:
            self._advance(slots.Read(slot, data))
            return Outcome.COMMITTED, slots.Read(slot, data)
        return create(self, slot)

    patch(SlotLog, "_create", mutated)


def every_answer_that_a_slot_exists_is_a_success(patch: Patch) -> None:
    patch(slots.log, "classify", lambda mine, found: Outcome.COMMITTED)


def a_slot_is_published_before_its_ledger(patch: Patch) -> None:
    """The ledger object is written when the slot is there."""
    publish, put = Publication.publish_as, publication.put_object

    def mutated(self: Publication, seq: int | None, draft: Any, **fields: Any) -> Any:
        data = self._store.get(draft.ledger.ref.key)
        self._store.delete(draft.ledger.ref.key)
        slot = publish(self, seq, draft, **fields)
        self._store.put_new(draft.ledger.ref.key, data)
        return slot

    assert put is publication.put_object
    patch(Publication, "publish_as", mutated)


MUTATIONS: dict[Callable[[Patch], None], int] = {
    delete_before_intent: 1,
    delete_with_the_intent: 1,
    lists_are_not_decided_anew: 92,
    pins_are_looked_at_once: 10,
    pins_are_not_looked_at: 4,
    a_pin_does_not_look_at_the_log: 211,
    compaction_is_published_without_fencing: 3,
    compaction_deletes_what_it_has_read: 0,
    compaction_believes_what_it_writes: 517,
    garbage_of_the_own_epoch: 39,
    garbage_that_a_kept_snapshot_reaches: 1,
    forgotten_snapshots_count_as_kept: 281,
    forgotten_snapshots_are_restored: 7,
    what_was_flushed_after_a_forgotten_one_is_adopted: 73,
    a_condemned_snapshot_is_restored: 12,
    a_lost_answer_is_taken_for_a_success: 3,
    every_answer_that_a_slot_exists_is_a_success: 0,
    a_slot_is_published_before_its_ledger: 0,
}
"""With a seed that found it when this was written: the search begins there."""


def first_found(mutate: Callable[[Patch], None], patch: Patch, first: int = 0) -> tuple[int | None, str]:
    """The first seed from `first` on whose schedule fails with the mutation, and what it said."""
    mutate(patch)
    for seed in range(first, first + SEEDS):
        schedule = Schedule(seed)
        try:
            schedule.run()
            schedule.check_end()
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}".splitlines()[0][:110]
    return None, "not found"


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_each_is_found(mutate: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seed, said = first_found(mutate, monkeypatch.setattr, MUTATIONS[mutate])
    print(f"{mutate.__name__}: seed {seed}: {said}")
    assert seed is not None


if __name__ == "__main__":
    for one in MUTATIONS:
        with pytest.MonkeyPatch.context() as patches:
            print(f"{one.__name__}: seed %s: %s" % first_found(one, patches.setattr), flush=True)
