"""`latest --check` answers what recovery.restore.choose answers, on every store with one fault.

Owns: the comparison of the two, and of what would be adopted with what is adopted.
Does not know: screens.

Invariants:
1. Faults are enumerated: each object (of the largest store each third one) missing, cut off, with a bit turned over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.adoption import Adoption, adopt
from recovery.errors import Damaged, NothingPublished, RecoveryError
from recovery.forgetting import forget
from recovery.log_reading import find_tail
from recovery.ports import ObjectStore
from recovery.restore import Chosen, choose
from recovery.slots import SlotLog
from snapshot_inspect import cli
from snapshot_inspect.newest import Newest, newest
from snapshot_inspect.places import ledger_codec, segment_codec
from snapshot_inspect.survey import choose as choose_latest
from snapshot_inspect.survey import position
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy


def asked(store: ObjectStore) -> Newest | RecoveryError:
    try:
        return newest(store, position(store), (segment_codec(), ledger_codec()))
    except RecoveryError as error:
        return error


def restored(store: ObjectStore) -> tuple[Chosen, Adoption] | RecoveryError:
    """What a restore of the same job does, up to the moment at which it would write."""
    try:
        chosen = choose(store, segment_codec(), ledger_codec(), find_tail(store, trust_hint=False), "auto", stores.MUST)
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


@pytest.mark.parametrize("hint", [None, 1, 3, 5])
@pytest.mark.parametrize("gone", [2, 3, 4, 5])
def test_the_tail_is_the_one_that_a_claim_finds_whatever_the_hint_says(gone: int, hint: int | None) -> None:
    """C11: a hint below a gap must not hide what lies above it."""
    store = MemoryStore()
    stores.several(store).close()
    store.delete(f"log/{gone:012d}.json")
    store.delete("hint")
    if hint is not None:
        store.put("hint", json.dumps({"tail": hint}).encode())
    said = position(store).tail
    compare(store, f"slot {gone} is missing, the hint says {hint}")
    log = SlotLog(store, ManualClock(), SeededEntropy(), "a claim")
    log.claim()
    assert log.tail == said + 1


# ---- the newest entry, which nothing vouches for -------------------------------------------------------------------


def forged(change: Callable[[dict[str, Any]], None]) -> MemoryStore:
    store = MemoryStore()
    stores.several(store).close()
    entry = json.loads(store.get("log/000000000005.json"))
    change(entry)
    stores.replace(store, "log/000000000005.json", json.dumps(entry).encode())
    return store


def test_forged_figures_of_the_newest_entry_are_not_shown_as_true() -> None:
    """Without reading the ledger it is said that nothing vouches for them; with it they are counted."""
    store = forged(lambda entry: entry["body"]["counts"].update(tokens=999))
    found = newest(store, position(store))
    assert (found.vouched, found.problems, found.counts) == (False, [], None)
    found = asked(store)
    assert isinstance(found, Newest) and found.counts is not None
    assert found.counts.tokens == 11 and found.exit_code == 1
    assert ["states tokens 999" in problem for problem in found.problems] == [True]


def test_a_forged_fingerprint_is_seen_when_the_ledger_is_read() -> None:
    found = asked(forged(lambda entry: entry["body"].update(fingerprint="0" * 32)))
    assert isinstance(found, Newest) and "does not have the fingerprint of its job" in found.problems[0]


def _another_ledger(entry: dict[str, Any]) -> None:
    entry["body"]["ledger"]["nbytes"] += 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entry: entry.update(prev="0" * 64), "was not written after the entry before it"),
        (lambda entry: entry.update(epoch=7), "was not written after the entry before it"),
        (_another_ledger, "bytes, not"),
        (lambda entry: entry["body"]["ledger"].update(key="ledger/e000001/00000000000000aa.arrow"), "is missing"),
        (lambda entry: entry["body"]["states"]["job"].update(key="state/e000001/job-00000000000000aa.json"), "missing"),
    ],
)
def test_an_entry_that_names_what_is_not_there_is_a_problem_without_reading(
    change: Callable[[dict[str, Any]], None], says: str
) -> None:
    store = forged(change)
    counting = CountingStore(store)
    found = newest(counting, position(counting))
    assert not any(call.verb == "get" and not call.key.startswith(("log/", "hint")) for call in counting.log)
    assert found.exit_code == 1 and says in found.problems[0]


def test_an_entry_that_a_later_one_names_is_vouched_for() -> None:
    store = MemoryStore()
    stores.several(store).close()
    SlotLog(store, ManualClock(), SeededEntropy(), "another").claim()
    assert newest(store, position(store)).vouched


def test_a_folder_in_the_place_of_the_newest_slot_is_told_by_every_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C11: a listing passes over it, and no run could publish."""
    store = MemoryStore()
    stores.several(store).close()
    root = tmp_path / "store"
    stores.on_disk(root, stores.objects_of(store))
    slot = root / "log" / "000000000005.json"
    for kind in ("a folder", "a symbolic link"):
        slot.unlink()
        slot.mkdir() if kind == "a folder" else slot.symlink_to("nowhere")
        for words in (["latest"], ["latest", "--check"], ["list"], ["verify"]):
            assert cli.main([words[0], str(root), *words[1:]]) == 1
            assert f"log/000000000005.json is {kind}, not a file" in capsys.readouterr().out
        if kind == "a folder":
            with pytest.raises(Damaged):
                SlotLog(LocalStore(root), ManualClock(), SeededEntropy(), "a claim").claim()
            slot.rmdir()
            slot.touch()


# ---- what was forgotten ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [[5], [4], [4, 5], [2, 3, 4, 5]])
@pytest.mark.parametrize("make", [stores.several, stores.crashed])
def test_what_was_forgotten_is_not_the_latest(make: Callable[[ObjectStore], Any], gone: list[int]) -> None:
    """Neither for a restore nor for any verb, and nothing is adopted on top of what was before it."""
    store = MemoryStore()
    job = make(store)
    if job is not None:
        job.close()
    log = SlotLog(store, ManualClock(), SeededEntropy(), "somebody")
    forget(store, ArrowLedgerCodec(), log, gone, leave_none=True)
    compare(store, f"{gone} were forgotten")
    left = [seq for seq in (2, 3, 4, 5) if seq not in gone]
    at = position(store)
    if not left:
        with pytest.raises(NothingPublished, match=r"every snapshot of this store was forgotten"):
            choose_latest(store, at, "latest")
        return
    assert choose_latest(store, at, "latest").snapshot.id == newest(store, at).snapshot.id == left[-1]
    assert choose_latest(store, at, str(gone[0])).snapshot.id == gone[0], "by its number it can still be looked at"


# ---- more than one fault -------------------------------------------------------------------------------------------


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
