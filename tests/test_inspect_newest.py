"""`latest --check` answers what recovery.restore.choose answers, on every store with one fault.

Owns: the comparison of the two, and of what would be adopted with what is adopted.
Does not know: screens.

Invariants:
1. Faults are enumerated: each object (of the largest store each third one) missing, cut off, with a bit turned over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recovery.adoption import Adoption, adopt
from recovery.errors import RecoveryError
from recovery.ports import ObjectStore
from recovery.restore import Chosen, choose
from recovery.slots import find_tail
from snapshot_inspect.newest import Newest, newest
from snapshot_inspect.places import ledger_codec, segment_codec
from snapshot_inspect.survey import position
from storage_backends.memory import MemoryStore
from tests import inspect_stores as stores


def asked(store: ObjectStore) -> Newest | RecoveryError:
    try:
        return newest(store, position(store), (segment_codec(), ledger_codec()))
    except RecoveryError as error:
        return error


def restored(store: ObjectStore) -> tuple[Chosen, Adoption] | RecoveryError:
    """What a restore of the same job does, up to the moment at which it would write."""
    try:
        chosen = choose(store, segment_codec(), ledger_codec(), find_tail(store), "auto", stores.MUST)
    except RecoveryError as error:
        return error
    loaded = chosen.loaded
    if loaded is None or not chosen.adopts:
        return chosen, Adoption()
    epoch, flushed = loaded.snapshot.slot.epoch, loaded.flushed
    found = adopt(store, segment_codec(), loaded.ledger, epoch=epoch, flushed=flushed, collected=chosen.collected)
    return chosen, found


def compare(store: ObjectStore, what: str) -> None:
    ours, theirs = asked(store), restored(store)
    if isinstance(theirs, RecoveryError):
        assert isinstance(ours, RecoveryError) and ours.exit_code == theirs.exit_code, what
        return
    chosen, adoption = theirs
    if chosen.loaded is None:
        assert isinstance(ours, RecoveryError) and ours.exit_code == 14, what
        return
    assert isinstance(ours, Newest), (what, ours)
    assert ours.snapshot.id == chosen.loaded.snapshot.id, what
    assert [_number(item.what) for item in chosen.passed_over] == [item.seq for item in ours.passed_over], what
    assert ours.adoption is not None
    assert (len(ours.adoption.segments), ours.adoption.tokens) == (adoption.segments, adoption.tokens), what
    assert ours.adoption.rejected == adoption.rejected, what
    assert [key for key, _ in ours.adoption.unreadable] == [key for key, _ in adoption.unreadable], what


def _number(what: str) -> int:
    return int(what.split()[-1])


def faults(store: ObjectStore, every: int = 1) -> Iterator[tuple[str, MemoryStore]]:
    """The store with one fault, for each fault of every n-th object."""
    for key, data in list(stores.objects_of(store).items())[::every]:
        if key == "format.json":
            continue
        for name, mangled in (
            ("missing", None),
            ("cut off", data[:-7]),
            ("flipped", stores.flip(data, len(data) // 2)),
        ):
            copy = stores.copy_of(store)
            copy.delete(key)
            if mangled is not None:
                copy.put_new(key, mangled)
            elif key.startswith("log/"):
                copy.delete("hint")  # else it may hide what lies above the gap, from both in the same way
            yield f"{key} {name}", copy


@pytest.mark.parametrize("make", [stores.empty, stores.several, stores.crashed, stores.carried_on, stores.collected])
def test_the_answer_is_that_of_a_restore_whatever_is_damaged(make: Callable[[ObjectStore], Any]) -> None:
    """C3, W13."""
    store = MemoryStore()
    job = make(store)
    if job is not None:
        job.close()
    compare(store, "no fault")
    for what, damaged in faults(store, 3 if make is stores.collected else 1):
        compare(damaged, what)


def test_a_second_fault_on_top_of_a_first_one() -> None:
    store = MemoryStore()
    stores.several(store).close()
    for first, once in faults(store):
        if "ledger/" not in first or "missing" not in first:
            continue
        for second, twice in faults(once):
            compare(twice, f"{first}, {second}")


def test_what_a_newer_version_wrote() -> None:
    """F4: a ledger is passed over, a slot is not."""
    store = MemoryStore()
    stores.several(store).close()
    compare(stores.with_newer_ledger(store), "newer ledger")
    for seq in range(1, 6):
        copy = stores.copy_of(store)
        key = f"log/{seq:012d}.json"
        stores.replace(copy, key, copy.get(key).replace(b'"requires":[]', b'"requires":["x"]'))
        compare(copy, f"slot {seq} requires something")
