"""`snapshot-inspect repair`: what is left of a damaged newest snapshot is published again, and nothing else is touched.

Owns: what is kept and what is lost of every damage, what cannot be mended, fencing, and every way to be broken off.
Does not know: how damage is found elsewhere (test_inspect_verify.py).

Invariants:
1. What has to be left is computed here from bytes: a record is there if the bytes of its batch are those that were
   written; of a call is kept what comes before the first record that is not.
2. Whatever happens, no object that was there is gone or changed, but for the hint.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import CredentialsRefused, Damaged, Fenced, OutcomeUnknown, RecoveryError, StoreUnavailable
from recovery.model import OPEN
from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from snapshot_inspect import repair as module
from snapshot_inspect.repair import look, mend
from snapshot_inspect.repair_report import Findings
from storage_backends.codecs import CodecName
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseBefore, ReadOnlyStore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests import inspect_stores as stores
from tests.carried_stores import INTERRUPTED_RECORDING, by_name, content, newest, rich
from tests.fakes import ManualClock, SeededEntropy
from tests.inspect_stores import keys, made
from tests.test_export import large
from tests.test_inspect_cli import environment, program
from tests.test_inspect_screens import VALIDATORS, Ran, opened_as, run_both, run_once

Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *words: run_once(capsys, *map(str, words))


def repaired(store: ObjectStore) -> Findings:
    """Look and mend, as the verb with --apply does. The store may be one that counts or dies."""
    sound: set[Any] = set()
    found = look(store, sound)
    assert found.mend_snapshot
    slot, _ = mend(store, found, sound, single_writer=False)
    assert slot is not None
    return found


# ---- what is left, computed from bytes -------------------------------------------------------------------------------


class Whole:
    """A store before it is damaged: its objects, and the content of its newest snapshot."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = stores.copy_of(store)
        self.objects = stores.objects_of(store)
        self.loaded = newest(store)
        self.content = content(store)

    def left_of(self, after: dict[str, bytes]) -> dict[str, Any]:
        """The content once `after` is all there is (invariant 1)."""
        intact: dict[tuple[str, int], bool] = {}
        for key in self.loaded.ledger.segments_in_use():
            index = 0
            for batch in self.loaded.ledger.segment(key).batches:
                part = slice(batch.offset, batch.offset + batch.length)
                for _ in range(batch.n_records):
                    intact[key, index] = after.get(key, b"")[part] == self.objects[key][part]
                    index += 1
        calls = []
        for entry, (identity, more, state, chunks) in zip(by_name(self.loaded), self.content["calls"], strict=True):
            opened = entry.identity.opened
            if not intact[opened.segment, opened.index]:
                continue
            kept = []
            for ref, chunk in zip(entry.chunks, chunks, strict=True):
                if not intact[ref.at.segment, ref.at.index]:
                    break
                kept.append(chunk)
            call_id, attempt, was, n_tokens, ended, history = state
            if len(kept) < len(chunks):
                was, n_tokens, ended = OPEN, sum(chunk[1] for chunk in kept), None
            calls.append((identity, more, (call_id, attempt, was, n_tokens, ended, history), kept))
        return {**self.content, "calls": calls}


def damaged_ways(store: ObjectStore, key: str, seed: int) -> Iterator[bytes | None]:
    """Gone; cut off in each batch, after it and before the end; a bit turned in each batch, before and after them."""
    data, info = store.get(key), newest(store).ledger.segment(key)
    rng = random.Random(seed)
    yield None
    for batch in info.batches:
        stop = batch.offset + batch.length
        yield data[: batch.offset + rng.randrange(batch.length)]
        yield data[:stop]
        yield stores.flip(data, rng.randrange(batch.offset, stop))
    yield data[:-1]
    yield data + b"\0"
    yield stores.flip(data, 3)
    yield stores.flip(data, len(data) - 2)


def replaced(store: ObjectStore, key: str, data: bytes | None) -> MemoryStore:
    copy = stores.copy_of(store)
    copy.delete(key)
    if data is not None:
        copy.put_new(key, data)
    return copy


def check(store: MemoryStore, whole: Whole) -> None:
    """Mend `store`, which is damaged, and hold the new snapshot against what has to be left."""
    after = stores.objects_of(store)
    found = repaired(store)
    wanted = whole.left_of(after)
    assert content(store) == wanted
    slot = newest(store).snapshot.slot
    assert slot.body["cause"] == "repair" and slot.body["restored_from"] == whole.loaded.snapshot.id
    gone = {call[0][0] for call in whole.content["calls"]} - {call[0][0] for call in wanted["calls"]}
    assert {item.rollout for item in found.lost if item.start is None} == gone
    now = stores.objects_of(store)
    assert all(now[key] == data for key, data in after.items() if key != "hint")
    assert look(store, set()).damaged == []


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_each_call_keeps_its_longest_sound_prefix_whatever_is_damaged(codec: CodecName) -> None:
    whole = Whole(made(lambda empty: rich(empty, codec, codec)))
    for n, key in enumerate(sorted(whole.loaded.ledger.segments_in_use())):
        ways = list(damaged_ways(whole.store, key, 1))
        for data in ways[n % 2 :: 2] if codec == "arrow" else ways[n % 4 :: 4]:
            check(replaced(whole.store, key, data), whole)


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_only_the_damaged_batches_of_a_segment_are_lost(codec: CodecName) -> None:
    """90 calls in two flushes of some batches each; the sound batches are written anew."""
    whole = Whole(large(90, 2, 3, codec))
    for key in keys(whole.store, "seg/"):
        for data in list(damaged_ways(whole.store, key, 2))[1::4]:
            check(replaced(whole.store, key, data), whole)
    key = keys(whole.store, "seg/")[0]
    info = whole.loaded.ledger.segment(key)
    store = replaced(whole.store, key, stores.flip(whole.objects[key], info.batches[1].offset + 70))
    (damage,) = repaired(store).damaged
    assert (len(damage.lost), len(damage.had)) == (64, 116) and content(store)["calls"]


def test_several_segments_at_once() -> None:
    whole = Whole(made(lambda empty: rich(empty, "zarr", "arrow")))
    segments = sorted(whole.loaded.ledger.segments_in_use())
    rng = random.Random(7)
    for _ in range(8):
        store = stores.copy_of(whole.store)
        for key in rng.sample(segments, 2):
            store = replaced(store, key, rng.choice(list(damaged_ways(whole.store, key, rng.randrange(99)))))
        check(store, whole)


# ---- everything else is kept -----------------------------------------------------------------------------------------


def test_what_a_restore_would_adopt_is_adopted() -> None:
    """A repair claims a new epoch, and what was flushed in the old one would be lost with it."""
    store = made(stores.crashed)
    key = keys(store, "seg/")[1]
    store.delete(key)
    found = repaired(store)
    assert len(found.adopted.segments) == 2
    calls = {call[0][0]: call for call in content(store)["calls"]}
    assert set(calls) == {"p-1", "p-2", "p-10", "p-3"}, "p-3 was in no snapshot"
    assert (calls["p-1"][2][3], calls["p-2"][2][2:5]) == (3, (OPEN, 2, None))


def test_a_job_goes_on_from_it_and_its_output_is_that_of_no_damage() -> None:
    """Calls that lost nothing are as they were; the others begin where they were cut."""
    store = made(rich)
    store.delete(keys(store, "seg/")[1])
    repaired(store)
    before = {call[0][0]: call for call in content(store)["calls"]}
    job = stores.Job(store, 4, keep=8)
    assert job.restored.snapshot == newest(store).snapshot.slot.body["restored_from"]
    live = job.carry_on()
    assert set(live) == {"p-1", "p-2", "p-3", "p-10"} and list(live["p-1"].transcript_ids) == [7, 8, 9]
    assert [len(live[name].transcript_ids) for name in ("p-2", "p-10")] == [0, 0], "sampled, or only ever begun again"
    for call in live.values():
        stores.say(call, 60, 2)
        call.end("stop", 2)
    job.snapshot("final")
    job.close()
    after = {call[0][0]: call for call in content(store)["calls"]}
    assert all(call[2][4] is not None for call in after.values())
    assert after["p-1"][3][:1] == before["p-1"][3][:1]


def test_states_and_fingerprint_stay_and_nothing_new_is_written_of_them() -> None:
    store = made(stores.several)
    states = keys(store, "state/")
    store.delete(keys(store, "seg/")[2])
    repaired(store)
    assert keys(store, "state/") == states


# ---- the verb --------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A store on disk whose newest snapshot lost a segment."""
    store = made(stores.several)
    root = tmp_path / "store"
    stores.on_disk(root, stores.objects_of(store))
    (root / keys(store, "seg/")[1]).unlink()
    return root


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_without_apply_it_says_what_would_be_lost_and_writes_nothing(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(damaged)
    ran = run_both(capsys, "repair", str(damaged))
    assert ran.code == 1 and ran.err == "" and everything(damaged) == before
    for says in (
        "lost      tokens 3 to 7 of p-1 (e191d69e1ad9d497263f1ad491cc0d0c)\n",
        "lost      tokens 2 to 4 of p-2 (ebab98c236e1321ba118a58c76282ec7), which had ended\n",
        "kept      5 tokens; 6 lost",
        "a job that runs on this store is fenced: it stops with exit code 11",
        "not written: add --apply",
    ):
        assert says in ran.out, ran.out
    (document,) = run_once(capsys, "repair", str(damaged), "--json").documents
    assert document["damaged"][0]["lost"] == 3 and document["published"] is None
    assert document["lost"][0] == {
        "rollout": "p-1",
        "call_id": "e191d69e1ad9d497263f1ad491cc0d0c",
        "start": 3,
        "stop": 7,
        "was": "open",
    }


def test_with_apply_losses_are_told_first_and_all_verbs_are_content_afterwards(damaged: Path, run: Run) -> None:
    ran = run("repair", damaged, "--apply")
    assert ran.code == 0 and ran.out.endswith("\nrepaired\n"), ran
    assert ran.err == (
        "lost: tokens 3 to 7 of p-1 (e191d69e1ad9d497263f1ad491cc0d0c)\n"
        "lost: tokens 2 to 4 of p-2 (ebab98c236e1321ba118a58c76282ec7)\n"
    )
    assert "snapshot  7, published in the place of 5" in ran.out
    ran = run("latest", damaged, "--check")
    assert ran.code == 0 and "cause        repair (restored from 5)" in ran.out
    assert run("repair", damaged).code == 0 and "nothing to repair" in run("repair", damaged, "--apply").out
    assert json.loads((damaged / "hint").read_bytes()) == {"tail": 7}
    (document,) = run("verify", damaged, "--read-data", "--snapshot", "latest", "--json").documents
    assert document["ok"] is True


def test_json_says_the_same(damaged: Path, run: Run) -> None:
    ran = run("repair", damaged, "--apply", "--json")
    (document,) = ran.documents
    VALIDATORS["repair"].validate(document)
    assert (ran.code, document["published"], document["applied"], document["problems"]) == (0, 7, True, [])
    (document,) = run("repair", damaged, "--json").documents
    VALIDATORS["repair"].validate(document)
    assert document["needed"] is False


@pytest.mark.parametrize(
    ("hint", "state"),
    [(b'{"tail": 3}', "behind"), (b'{"tail": 99}', "dangling"), (b"\xff", "garbage"), (b"", "garbage")],
)
def test_a_stale_or_damaged_hint_is_written_anew_and_nobody_is_fenced(
    hint: bytes, state: str, tmp_path: Path, run: Run
) -> None:
    """C11."""
    store = made(stores.several)
    store.put("hint", hint)
    root = tmp_path / "store"
    stores.on_disk(root, stores.objects_of(store))
    ran = run("repair", root)
    assert ran.code == 1 and f"hint      {state}: stale" in ran.out and (root / "hint").read_bytes() == hint
    ran = run("repair", root, "--apply")
    assert ran.code == 0 and f"hint      {state}: written anew" in ran.out
    assert json.loads((root / "hint").read_bytes()) == {"tail": 5} and len(list((root / "log").iterdir())) == 5
    assert run("repair", root).code == 0


def test_nothing_to_do(run: Run, tmp_path: Path) -> None:
    for n, make in enumerate((stores.several, stores.collected, stores.crashed, stores.empty, stores.empty_snapshot)):
        root = tmp_path / str(n)
        stores.on_disk(root, stores.objects_of(made(make)))
        before = everything(root)
        for more in ((), ("--apply",)):
            ran = run("repair", root, *more)
            assert ran.code == 0 and "nothing to repair" in ran.out, ran
        assert everything(root) == before


def test_reading_needs_no_permission_to_write(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    store = made(stores.several)
    store.delete(keys(store, "seg/")[1])
    counting = CountingStore(ReadOnlyStore(store))
    opened_as(monkeypatch, counting)
    assert run("repair", "s").code == 1 and counting.count("put", "put_new", "delete") == 0


@pytest.mark.parametrize(
    ("error", "code"), [(StoreUnavailable("no answer"), 20), (CredentialsRefused("access denied"), 12)]
)
def test_the_back_end_fails_at_each_call(
    error: RecoveryError, code: int, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Whichever call it is that fails, it is not taken for damage.

    Nothing is printed, or (where it is a list that may not be had) the same as ever.
    """
    store = made(stores.several)
    store.delete(keys(store, "seg/")[1])
    counting = CountingStore(store)
    opened_as(monkeypatch, counting)
    sound = run("repair", "s", "--json")
    assert sound.code == 1
    for n in range(counting.count()):
        plan = iter([*[PASS] * n, RaiseBefore(error)])
        opened_as(monkeypatch, FaultyStore(store, plan))
        ran = run("repair", "s", "--json")
        assert (ran.code, ran.out) == (code, "") or (code == 12 and ran == sound), (n, ran)


# ---- what cannot be mended -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ledger/", "state/"])
def test_a_damaged_ledger_or_state_is_not_mended_and_the_fallback_is_told(kind: str, run: Run, tmp_path: Path) -> None:
    """W13: what a restore takes instead; nothing is claimed."""
    store = made(stores.several)
    body = json.loads(store.get("log/000000000005.json"))["body"]
    key = body["ledger"]["key"] if kind == "ledger/" else body["states"]["job"]["key"]
    for mangled in (None, b"x", stores.flip(store.get(key), 20)):
        root = tmp_path / "store"
        stores.on_disk(root, stores.objects_of(replaced(store, key, mangled)))
        before = everything(root)
        ran = run("repair", root, "--apply")
        fallback = "snapshot 4" if kind == "ledger/" else "nothing"
        assert ran.code == 1 and f"problem   snapshot 5: {key}" in ran.out.replace(f"{root}/", ""), ran
        assert f"this cannot be mended; a restore takes {fallback}" in ran.out and "not repaired" in ran.out
        assert everything(root) == before


def test_a_slot_that_cannot_be_read_stays_and_is_told(run: Run, tmp_path: Path) -> None:
    store = made(stores.several)
    root = tmp_path / "store"
    stores.on_disk(root, stores.objects_of(replaced(store, "log/000000000005.json", b"{")))
    ran = run("repair", root, "--apply")
    assert ran.code == 1 and "problem   log slot 5: log slot 5 is not JSON" in ran.out
    assert "a restore takes snapshot 4" in ran.out and len(list((root / "log").iterdir())) == 5
    (root / keys(store, "seg/")[0]).unlink()
    ran = run("repair", root, "--apply")
    assert ran.code == 0 and "log slot 5 stays as it is, and nothing needs it any more" in ran.out, ran
    assert run("latest", root, "--check").code == 0


def test_what_is_not_understood_is_not_damage(run: Run, tmp_path: Path) -> None:
    """F4: a newer version's ledger or segment is never mended away."""
    store = stores.with_newer_ledger(made(stores.several))
    root = tmp_path / "store"
    stores.on_disk(root, stores.objects_of(store))
    before = everything(root)
    ran = run("repair", root, "--apply")
    assert ran.code == 13 and "version 2" in ran.err and everything(root) == before


@pytest.mark.parametrize(("make", "code"), [(lambda root: None, 10), (lambda root: root.mkdir(), 10)])
def test_no_store(make: Callable[[Path], Any], code: int, run: Run, tmp_path: Path) -> None:
    make(tmp_path / "s")
    for more in ((), ("--apply",)):
        assert run("repair", tmp_path / "s", *more).code == code


def test_a_portable_file_cannot_be_mended(run: Run, tmp_path: Path) -> None:
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    assert run("export", tmp_path / "s", tmp_path / "x.zip").code == 0
    assert run("repair", tmp_path / "x.zip").code == 0
    data = (tmp_path / "x.zip").read_bytes()
    at = data.index(b"ARROW1") + 500
    (tmp_path / "x.zip").write_bytes(stores.flip(data, at))
    before = (tmp_path / "x.zip").read_bytes()
    assert run("repair", tmp_path / "x.zip").code == 1
    ran = run("repair", tmp_path / "x.zip", "--apply")
    assert ran.code == 2 and "is a portable file" in ran.err and (tmp_path / "x.zip").read_bytes() == before


# ---- others ----------------------------------------------------------------------------------------------------------


def test_a_job_that_runs_is_fenced(damaged: Path, run: Run) -> None:
    job = stores.Job.__new__(stores.Job)
    log = SlotLog(LocalStore(damaged), ManualClock(), SeededEntropy(), "the job")
    log.claim()
    assert run("repair", damaged, "--apply").code == 0
    with pytest.raises(Fenced):
        log.append("snapshot", {})
    del job


def test_who_loses_the_race_exits_with_11_and_publishes_nothing(
    damaged: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = module._moved

    def slowly(*arguments: Any) -> Any:
        SlotLog(LocalStore(damaged), ManualClock(), SeededEntropy(), "another run").claim()
        return moved(*arguments)

    monkeypatch.setattr(module, "_moved", slowly)
    ran = run("repair", damaged, "--apply")
    assert ran.code == 11 and "was written by another run" in ran.err
    assert newest(LocalStore(damaged)).snapshot.id == 5


def test_a_job_that_goes_on_until_the_claim_is_looked_at_again(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """It drops the damaged calls and publishes; the repair finds nothing to mend any more, and says so."""
    store = MemoryStore()
    job = stores.several(store)
    store.delete(keys(store, "seg/")[2])
    opened_as(monkeypatch, store)

    def opened(address: str) -> tuple[ObjectStore, bool]:
        for name in ("p-1", "p-10"):
            job.publication.ledger.drop(job.calls[name].call_id)
        stores.say(job.open("p-9"), 1)
        job.snapshot()
        job.close()
        return store, False

    monkeypatch.setattr(module, "open_for_writing", opened)
    ran = run("repair", "s", "--apply")
    assert ran.code == 0 and "its newest snapshot needs no repair" in ran.out, ran
    assert newest(store).snapshot.id == 6


# ---- broken off ------------------------------------------------------------------------------------------------------


def test_killed_at_every_call_from_its_first_write_on_the_store_is_as_before_or_repaired() -> None:
    """After it, and with its answer lost; another repair then does the rest."""
    whole = made(lambda empty: stores.crashed(empty, "arrow"))
    key = keys(whole, "seg/")[1]
    wounded = replaced(whole, key, None)
    counting = CountingStore(stores.copy_of(wounded))
    repaired(counting)
    wanted = content(counting.inner)
    first = next(n for n, call in enumerate(counting.log, 1) if call.verb == "put_new")
    outcomes = set()
    for at in range(first, counting.count() + 1):
        for how in WAYS[1:]:  # before a call is after the one before it
            store = stores.copy_of(wounded)
            try:
                repaired(KillingStore(store, at, how))
            except (Killed, Damaged, OutcomeUnknown, StoreUnavailable) as error:
                outcomes.add(type(error).__name__)
            now = stores.objects_of(store)
            assert all(now[k] == data for k, data in stores.objects_of(wounded).items() if k != "hint")
            if newest(store).snapshot.slot.body["cause"] != "repair":
                repaired(store)
                outcomes.add("again")
            assert content(store) == wanted, (at, how)
    assert {"Killed", "again"} <= outcomes


def test_interrupting_is_safe(damaged: Path) -> None:
    argv = [sys.executable, "-c", INTERRUPTED_RECORDING, "repair", str(damaged), "--apply", "--json"]
    done = subprocess.run(argv, capture_output=True, env=environment(), timeout=240)
    assert (done.returncode, done.stdout) == (130, b"") and done.stderr.endswith(b"\ninterrupted\n")
    again = program("repair", str(damaged), "--apply")
    assert subprocess.run(again, capture_output=True, env=environment(), timeout=240).returncode == 0
