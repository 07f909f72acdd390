"""`snapshot-inspect import`: a store out of a file, from which a job goes on as from the original; or nothing at all.

Owns: what is the same after an import, what is refused and left untouched, and every way in which one can be broken
off.
Does not know: the shape of files (test_archive.py), what goes into one (test_export.py).

Invariants:
1. A refused or interrupted import leaves nothing that a restore could take.
2. Stores of others, and servers, are real ones: local disk, moto, SeaweedFS.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import ConfigError, Fenced, NothingPublished, StoreFull
from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from snapshot_inspect import cli, importing, survey
from snapshot_inspect.importing import check_empty
from snapshot_inspect.places import GLANCE
from storage_backends import open_store
from storage_backends.archive import ArchiveStore
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.kills import WAYS, How, Killed, KillingStore
from storage_backends.testing.s3_proxy import FaultProxy
from storage_backends.testing.servers import BUCKET, Server
from tests import inspect_stores as stores
from tests.carried_stores import INTERRUPTED_RECORDING, carried_to_the_end, content, newest, rich
from tests.fakes import ManualClock, SeededEntropy
from tests.inspect_stores import made
from tests.test_archive import archive
from tests.test_inspect_cli import environment, program
from tests.test_inspect_screens import VALIDATORS, Ran, run_once
from vllm_hooks.opening import refuse_foreign

pytest_plugins = ["storage_backends.testing.s3_fixtures"]

Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *words: run_once(capsys, *map(str, words))


def exported(store: ObjectStore, path: Path, *words: str) -> Path:
    """A portable file of a store's newest snapshot."""
    root = path.parent / f"{path.name}.store"
    stores.on_disk(root, stores.objects_of(store))
    assert cli.main(["export", str(root), str(path), *words]) == 0
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return exported(made(rich), tmp_path / "a.zip")


def objects_in(path: Path) -> dict[str, bytes]:
    return stores.objects_of(ArchiveStore(str(path)))


# ---- the same afterwards -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["arrow", "zarr", None])
def test_the_store_has_the_snapshot_and_says_where_it_was_taken(
    codec: str | None, file: Path, run: Run, tmp_path: Path
) -> None:
    original = LocalStore(tmp_path / "a.zip.store")
    ran = run("import", file, tmp_path / "b", *([] if codec is None else ["--codec", codec]), "--json")
    assert ran.code == 0 and ran.err == "", ran
    (document,) = ran.documents
    VALIDATORS["import"].validate(document)
    store = LocalStore(tmp_path / "b")
    assert content(store) == content(original)
    assert document["codec"] == (codec or "arrow") and document["snapshot"] == 2 and document["unfinished"] == 0
    assert all(item.key.endswith(f".{codec or 'arrow'}") for item in store.list("seg/"))
    assert run("verify", tmp_path / "b", "--read-data").code == 0
    (shown,) = run("show", tmp_path / "b", "latest", "--json").documents
    assert shown["cause"] == "import" and shown["origin"]["snapshot"] == 9
    assert json.loads(store.get("hint")) == {"tail": 2}


def test_an_export_of_an_import_is_the_same_file(file: Path, run: Run, tmp_path: Path) -> None:
    """Also by way of the other encoding: nothing is lost, added or put in another order."""
    assert run("import", file, tmp_path / "b", "--codec", "zarr").code == 0
    assert run("export", tmp_path / "b", tmp_path / "z.zip").code == 0
    assert run("import", tmp_path / "z.zip", tmp_path / "c", "--codec", "arrow").code == 0
    assert run("export", tmp_path / "c", tmp_path / "c.zip").code == 0
    assert (tmp_path / "c.zip").read_bytes() == file.read_bytes() != (tmp_path / "z.zip").read_bytes()


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_a_job_goes_on_from_it_exactly_as_from_the_original(codec: str, run: Run, tmp_path: Path) -> None:
    """Same calls, plans, attempts and tokens; the same content after both were carried to the end."""
    original = made(rich)
    file = exported(original, tmp_path / "a.zip")
    assert run("import", file, tmp_path / "b", "--codec", codec).code == 0
    copy = LocalStore(tmp_path / "b")
    theirs, theirs_in_the_end = carried_to_the_end(original, 3)
    ours, ours_in_the_end = carried_to_the_end(copy, 3)
    assert ours == theirs and len(ours) == 3
    assert _without_places_of_restores(ours_in_the_end) == _without_places_of_restores(theirs_in_the_end)
    assert run("verify", tmp_path / "b", "--read-data").code == 0


def _without_places_of_restores(found: dict[str, Any]) -> Any:
    """The number of the snapshot that the last restore published is that of its own log."""
    calls = [
        (identity, more, [*state[:-1], [(type(event), event.at) for event in state[-1]]], chunks)
        for identity, more, state, chunks in found["calls"]
    ]
    return calls, found["states"], found["fingerprint"]


def test_with_adopt_a_job_goes_on_as_from_the_crashed_original(run: Run, tmp_path: Path) -> None:
    original = made(stores.crashed)
    file = exported(original, tmp_path / "a.zip", "--adopt")
    assert run("import", file, tmp_path / "b").code == 0
    theirs, _ = carried_to_the_end(original, 2)
    ours, _ = carried_to_the_end(LocalStore(tmp_path / "b"), 2)
    assert ours == theirs and len(ours["p-1"][1][2]) > 0


def test_garbage_collection_goes_on_in_it(file: Path, run: Run, tmp_path: Path) -> None:
    assert run("import", file, tmp_path / "b").code == 0
    store = LocalStore(tmp_path / "b")
    job = stores.Job(store, 3, keep=1)
    live = job.carry_on()
    for turn in range(16):
        stores.say(live["p-1"], turn)
        job.snapshot()
    job.close()
    assert (
        not store.list("ledger/e000001/")
        and store.list("seg/e000001/")
        and run("verify", tmp_path / "b", "--read-data").code == 0
    )


def test_a_snapshot_without_calls(run: Run, tmp_path: Path) -> None:
    file = exported(made(stores.empty_snapshot), tmp_path / "a.zip")
    assert run("import", file, tmp_path / "b").code == 0
    assert content(LocalStore(tmp_path / "b"))["calls"] == []


# ---- S3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
@pytest.mark.usefixtures("s3_environment")
def test_from_disk_to_s3_and_back(
    kind: str,
    request: pytest.FixtureRequest,
    fresh_prefix: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    file: Path,
    run: Run,
    tmp_path: Path,
) -> None:
    server: Server = request.getfixturevalue(kind)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    url = f"s3://{BUCKET}/{fresh_prefix()}"
    ran = run("import", file, url, "--codec", "zarr")
    assert ran.code == 0, ran
    assert run("verify", url, "--read-data").code == 0
    assert run("export", url, tmp_path / "back.zip", "--codec", "arrow").code == 0
    assert (tmp_path / "back.zip").read_bytes() == file.read_bytes()
    ran = run("import", file, url)
    assert ran.code == 2 and "is not empty: it is a store, which has snapshot 2" in ran.err
    assert run("import", tmp_path / "back.zip", tmp_path / "b").code == 0
    assert content(LocalStore(tmp_path / "b")) == content(LocalStore(tmp_path / "a.zip.store"))


@pytest.mark.usefixtures("s3_environment")
def test_f7_a_back_end_without_conditional_create_is_refused_unless_asked_for(
    moto: Server,
    proxy: FaultProxy,
    fresh_prefix: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    file: Path,
    run: Run,
    tmp_path: Path,
) -> None:
    """F7: it ignores If-None-Match, or answers 501: refused by name and nothing written; single-writer by choice."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    for plan, says in (
        (faults.ignoring_conditions, "silently ignores the condition of a create"),
        (faults.refusing_conditions, "refuses conditional create altogether"),
    ):
        proxy.plan = plan
        prefix = fresh_prefix()
        url = f"s3://{BUCKET}/{prefix}"
        ran = run("import", file, url)
        assert ran.code == 2 and says in ran.err and "--single-writer" in ran.err, ran
        assert "Contents" not in moto.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        ran = run("import", file, url, "--single-writer")
        assert ran.code == 0, ran
        assert run("import", file, url, "--single-writer").code == 2, "what is there is never overwritten"
        assert run("export", url, tmp_path / f"{prefix}.zip").code == 0
        assert (tmp_path / f"{prefix}.zip").read_bytes() == file.read_bytes()


def test_single_writer_is_for_servers_only(file: Path, run: Run, tmp_path: Path) -> None:
    ran = run("import", file, tmp_path / "b", "--single-writer")
    assert ran.code == 2 and "only stores on s3:// have options" in ran.err


# ---- into an empty root only ---------------------------------------------------------------------------------------


def _write(root: Path, name: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"?")


@pytest.mark.parametrize(
    ("fill", "says"),
    [
        (lambda root: stores.several(LocalStore(root)).close(), "it is a store, which has snapshot 5"),
        (lambda root: SlotLog(LocalStore(root), ManualClock(), SeededEntropy(), "host-b").claim(), "claimed by host-b"),
        (lambda root: _write(root, "notes.txt"), "notes.txt lies there"),
        (lambda root: _write(root, "My File"), "My File lies there"),
        (lambda root: _write(root, "seg/readme"), "seg/readme lies there"),
        (lambda root: _write(root, "state/e000001/job-0000000000000000.json"), "it holds state/e000001/job-"),
        (lambda root: _write(root, "log/000000000001.json"), "log slot 1 is not JSON"),
    ],
)
def test_anything_else_is_refused_by_name_and_left_as_it_was(
    fill: Callable[[Path], Any], says: str, file: Path, run: Run, tmp_path: Path
) -> None:
    root = tmp_path / "b"
    root.mkdir()
    fill(root)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    ran = run("import", file, root)
    assert ran.code == 2 and f"{root} is not empty: " in ran.err and says in ran.err, ran
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_n1_a_huge_folder_is_refused_after_a_glance(
    file: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's folder is listed to its end to find that it is not empty; a store that an import left may be large."""
    root = tmp_path / "b"
    for name in [f"Photo {number}" for number in range(GLANCE)] + ["deep/x"]:
        _write(root, name)
    monkeypatch.setattr(LocalStore, "list", lambda *_: pytest.fail("listed whole"))
    ran = run("import", file, root)
    assert ran.code == 2 and re.search(f"{root} is not empty: Photo [0-9]+ lies there, among more than [0-9]+", ran.err)


@pytest.mark.usefixtures("s3_environment")
def test_n1_a_huge_prefix_is_refused_after_one_page_of_its_list(
    moto: Server, fresh_prefix: Callable[[], str], file: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = fresh_prefix()
    for number in range(6):
        moto.client.put_object(Bucket=BUCKET, Key=f"{prefix}/Photo {number}", Body=b"?")
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.url)
    monkeypatch.setattr("storage_backends.s3.PAGE_KEYS", 5)
    monkeypatch.setattr("storage_backends.s3.S3Store.list", lambda *_: pytest.fail("listed whole"))
    ran = run("import", file, f"s3://{BUCKET}/{prefix}")
    assert ran.code == 2 and "is not empty: Photo 0 lies there, among more than 5 others" in ran.err, ran


def test_a_root_that_is_only_marked_is_taken(file: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    make_root(LocalStore(tmp_path / "b"), SeededEntropy())
    assert run("import", file, tmp_path / "b").code == 0


def test_nobody_is_fenced_by_an_import(file: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that begins between the look and the claim goes on; the import gives up."""
    root = tmp_path / "b"
    root.mkdir()
    jobs: list[stores.Job] = []

    def a_job_begins(store: ObjectStore, address: str) -> Any:
        found = check_empty(store, address)
        jobs.append(stores.Job(LocalStore(root)))
        return found

    monkeypatch.setattr(importing, "check_empty", a_job_begins)
    ran = run("import", file, root)
    assert ran.code == 11 and "slot 1 was written by host-a pid 1" in ran.err
    assert "this one had not claimed it yet" in ran.err and "epoch 0" not in ran.err
    stores.say(jobs[0].open("p-1"), 1)
    assert jobs[0].snapshot() == 3
    jobs[0].close()


# ---- broken off ----------------------------------------------------------------------------------------------------


def import_into(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, file: Path) -> int:
    monkeypatch.setattr(importing, "open_store", lambda url, **options: store)
    return cli.main(["import", str(file), "memory://x"])


def test_killed_at_every_call_there_is_nothing_to_restore_and_the_same_command_finishes_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After it, and with its answer lost: either the snapshot is there whole, or there is none."""
    original = made(stores.carried_on)
    file = exported(original, tmp_path / "a.zip")
    whole = content(original)
    counting = KillingStore(MemoryStore(), 0)
    assert import_into(monkeypatch, counting, file) == 0
    outcomes = set()
    for at in range(1, counting.n_calls + 1):
        for how in WAYS[1:]:  # before a call is after the one before it
            store = MemoryStore()
            outcomes.add(_broken_off(monkeypatch, KillingStore(store, at, how), file))
            position = survey.position(store)
            if any(found.slot.kind == "snapshot" for found in survey.walk(store, position.tail)):  # type: ignore[union-attr]
                assert content(store) == whole, (at, how)
                continue
            outcomes.add("nothing")
            if position.tail:
                with pytest.raises(NothingPublished, match="an import into this store was not finished"):
                    refuse_foreign(store, importing.ledger_codec(), stores.MUST, "auto")
            assert import_into(monkeypatch, store, file) == 0, (at, how)
            assert content(store) == whole, (at, how)
            outcomes.add("again")
    assert {"killed", "nothing", "again"} <= outcomes
    capsys.readouterr()


def _broken_off(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, file: Path) -> How | str:
    try:
        import_into(monkeypatch, store, file)
    except Killed:
        return "killed"
    return "lived"


def test_an_import_that_was_not_finished_is_told_by_every_verb_and_collected_by_the_next_run(
    file: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "b") if (tmp_path / "b").mkdir() is None else None
    assert store is not None
    killing = KillingStore(store, 0)
    import_into(monkeypatch, killing, file)
    for path in sorted((tmp_path / "b").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(Killed):
        import_into(monkeypatch, KillingStore(store, killing.n_calls - 2), file)
    monkeypatch.undo()
    for words in (["latest"], ["list"], ["show", "latest"], ["calls"]):
        ran = run(words[0], tmp_path / "b", *words[1:])
        assert ran.code == 14 and "an import into this store was not finished" in ran.err, ran
        assert "do it again: snapshot-inspect import FILE " in ran.err
    left = [item.key for item in store.list("seg/")]
    assert left
    ran = run("import", file, tmp_path / "b")
    assert ran.code == 0 and "note" in ran.out and "not finished" in ran.out
    assert newest(store).snapshot.id == 3 and content(store) == content(LocalStore(tmp_path / "a.zip.store"))
    job = stores.Job(store, 3, keep=1)
    live = job.carry_on()
    for turn in range(4):
        stores.say(live["p-1"], turn)
        job.snapshot()
    job.close()
    assert not set(left) & {item.key for item in store.list("seg/")}, "garbage as any other"


def test_a_second_import_fences_the_first_one_and_both_end_well(
    file: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one hangs before its last slot; the second begins over; the first one then loses."""
    root = tmp_path / "b"
    carry = importing.carry

    def hangs(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(importing, "carry", carry)
        assert run("import", file, root).code == 0
        return carry(*arguments, **named)

    monkeypatch.setattr(importing, "carry", hangs)
    ran = run("import", file, root)
    assert ran.code == 11 and "took over this store" in ran.err
    assert content(LocalStore(root)) == content(LocalStore(tmp_path / "a.zip.store"))
    assert run("verify", root).code == 0


def test_interrupting_is_safe(file: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", INTERRUPTED_RECORDING, "import", str(file), str(tmp_path / "b"), "--json"]
    done = subprocess.run(argv, capture_output=True, env=environment(), timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")
    done = subprocess.run(program("latest", str(tmp_path / "b")), capture_output=True, env=environment(), timeout=240)
    assert done.returncode == 14
    again = program("import", str(file), str(tmp_path / "b"))
    assert subprocess.run(again, capture_output=True, env=environment(), timeout=240).returncode == 0
    assert content(LocalStore(tmp_path / "b")) == content(LocalStore(tmp_path / "a.zip.store"))


# ---- files of others -----------------------------------------------------------------------------------------------


def refused(run: Run, file: Path, tmp_path: Path) -> Ran:
    """An import that is refused, and left nothing that could be restored."""
    target = tmp_path / "refused"
    ran = run("import", file, target)
    assert ran.code != 0 and ran.out == "" and ran.err.startswith("error: "), ran
    assert run("latest", target).code in (10, 14)
    if target.is_dir():
        for path in sorted(target.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        target.rmdir()
    return ran


def test_what_is_no_portable_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    ran = refused(run, tmp_path / "none", tmp_path)
    assert ran.code == 10 and str(tmp_path / "none") in ran.err
    ran = refused(run, tmp_path / "text", tmp_path)
    assert ran.code == 2 and f"{tmp_path / 'text'} is no portable file" in ran.err
    assert "made by `snapshot-inspect export`" in ran.err and "no store at" not in ran.err
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    ran = refused(run, tmp_path / "s", tmp_path)
    assert ran.code == 2 and f"make one: snapshot-inspect export {tmp_path / 's'} " in ran.err
    empty = archive(tmp_path / "e.zip", {"x": b"1"})
    assert refused(run, empty, tmp_path).code == 10
    mark = b'{"format":"prefix-recovery","version":2}'
    newer = archive(tmp_path / "n.zip", {"format.json": mark})
    assert refused(run, newer, tmp_path).code == 13
    nothing = archive(tmp_path / "m.zip", {"format.json": mark.replace(b"2", b"1")})
    assert refused(run, nothing, tmp_path).code == 14


def test_every_truncation_and_every_flip_is_refused(file: Path, run: Run, tmp_path: Path) -> None:
    data = file.read_bytes()
    other = tmp_path / "other.zip"
    for stop in range(0, len(data), 997):
        other.write_bytes(data[:stop])
        refused(run, other, tmp_path)
    for at in range(3, len(data), 211):
        other.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        refused(run, other, tmp_path)


def test_every_missing_and_every_exchanged_object_is_refused(file: Path, run: Run, tmp_path: Path) -> None:
    objects = objects_in(file)
    other = tmp_path / "other.zip"
    for key in objects:
        refused(run, archive(other, {name: data for name, data in objects.items() if name != key}), tmp_path)
        if not key.startswith(("log/", "format")):
            refused(run, archive(other, {**objects, key: objects[key][:-1]}), tmp_path)
            refused(run, archive(other, {**objects, key: objects[key] + b"\0"}), tmp_path)


def _forged(objects: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    tail = max(key for key in objects if key.startswith("log/"))
    slot = json.loads(objects[tail])
    change(slot["body"])
    return {**objects, tail: json.dumps(slot).encode()}


def _state(body: dict[str, Any], name: str) -> None:
    body["states"][name] = body["states"].pop("job")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body["counts"].update(tokens=5), "states tokens 5; its ledger"),
        (lambda body: body.update(depth=3), "states depth 3"),
        (lambda body: body.update(fingerprint="0" * 32), "does not have the fingerprint of its job"),
        (lambda body: body["ledger"].update(key="../../etc/passwd"), "references what is no object of a store"),
        (lambda body: body["ledger"].update(nbytes=1 << 60), "at most"),
        (lambda body: body["ledger"].update(sha256="0" * 64), "does not have the recorded sha256"),
        (lambda body: _state(body, "../../x"), "has a state of the name '../../x', which cannot be one"),
        (lambda body: _state(body, "é" * 300), "which cannot be one"),
    ],
)
def test_a_forged_slot_is_refused(
    change: Callable[[dict[str, Any]], None], says: str, file: Path, run: Run, tmp_path: Path
) -> None:
    """The sums of the zip file are right; what the slot says is not."""
    ran = refused(run, archive(tmp_path / "f.zip", _forged(objects_in(file), change)), tmp_path)
    assert ran.code == 1 and says in ran.err, ran


def test_texts_that_cannot_be_written_again_do_no_harm(file: Path, run: Run, tmp_path: Path) -> None:
    """Halves of surrogate pairs in owner and origin, endless text, odd numbers."""
    for n, change in enumerate(
        [
            {"owner": "\ud800" * 5, "utc": 1e300},
            {"store_id": "x" * 60_000},
            {"snapshot": -1, "epoch": True, "utc": "noon"},
            {"cause": ["a"], "adopted": 1 << 70},
        ]
    ):
        objects = _forged(objects_in(file), lambda body, change=change: body["origin"].update(change))  # type: ignore[misc]
        tail = max(key for key in objects if key.startswith("log/"))
        slot = json.loads(objects[tail])
        objects[tail] = json.dumps({**slot, "owner": "\udfff\x1b[2J"}).encode()
        ran = run("import", archive(tmp_path / f"{n}.zip", objects), tmp_path / f"b{n}", "--json")
        assert ran.code == 0, ran
        VALIDATORS["import"].validate(ran.documents[0])
        assert run("verify", tmp_path / f"b{n}").code == 0


def test_a_ledger_that_would_become_too_large_is_refused_before_it_is_decompressed(
    file: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage_backends import arrow_ledger

    monkeypatch.setattr(arrow_ledger, "NBYTES_ALWAYS", 0)
    monkeypatch.setattr(arrow_ledger, "RATIO_MAX", 0)
    ran = refused(run, file, tmp_path)
    assert ran.code == 1 and "at most 0 are allowed" in ran.err


def test_a_segment_that_is_not_what_the_ledger_says_is_refused(file: Path, run: Run, tmp_path: Path) -> None:
    """A sound segment of another store under this one's name: the sums that the ledger has are of other bytes."""
    objects = objects_in(file)
    other = objects_in(exported(made(stores.several), tmp_path / "o.zip"))
    (mine,) = [key for key in objects if key.startswith("seg/")]
    (theirs,) = [key for key in other if key.startswith("seg/")]
    ran = refused(run, archive(tmp_path / "f.zip", {**objects, mine: other[theirs]}), tmp_path)
    assert ran.code == 1 and mine in ran.err and "of call" in ran.err


def test_foreign_objects_in_a_file_are_not_taken_over(file: Path, run: Run, tmp_path: Path) -> None:
    """Nothing but what the snapshot refers to reaches the store."""
    objects = {**objects_in(file), "evil.sh": b"#!/bin/sh", "seg/e000001/readme": b"?", "gc/x": b"?"}
    assert run("import", archive(tmp_path / "f.zip", objects), tmp_path / "b").code == 0
    keys = [item.key for item in LocalStore(tmp_path / "b").list("")]
    assert not {"evil.sh", "seg/e000001/readme", "gc/x"} & set(keys) and len(keys) == 7


def test_no_byte_of_a_segment_or_ledger_is_written_as_it_came(file: Path, run: Run, tmp_path: Path) -> None:
    """Objects are encoded anew, under keys of the import's own."""
    assert run("import", file, tmp_path / "b").code == 0
    ours = stores.objects_of(LocalStore(tmp_path / "b"))
    theirs = objects_in(file)
    assert {key for key in ours if key.startswith(("seg/", "ledger/", "state/"))}.isdisjoint(theirs)
    sums = {hashlib.sha256(data).hexdigest() for key, data in theirs.items() if key.startswith(("log/", "ledger/"))}
    assert sums.isdisjoint(hashlib.sha256(data).hexdigest() for data in ours.values())


# ---- the claim -----------------------------------------------------------------------------------------------------


def test_a_claim_behind_a_slot_is_only_made_there() -> None:
    store = MemoryStore()
    stores.empty(store)
    first = SlotLog(store, ManualClock(), SeededEntropy("1"), "first")
    assert first.claim({"import": {}}, follows=0) == 1
    second = SlotLog(store, ManualClock(), SeededEntropy("2"), "second")
    with pytest.raises(Fenced, match="slot 1 was written by first"):
        second.claim(follows=0)
    assert first.append("snapshot", {}).seq == 2, "nobody was fenced"
    third = SlotLog(store, ManualClock(), SeededEntropy("3"), "third")
    assert third.claim(follows=2) == 2
    with pytest.raises(Fenced):
        first.append("snapshot", {})


def test_a_portable_file_is_no_store_to_write_to(file: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match="is a portable file, not a store"):
        open_store(str(file), create=True)
    assert run("import", file, file).code == 2
    assert os.path.getsize(file) > 1000


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_file_is_said_of_the_file(file: Path, run: Run, tmp_path: Path) -> None:
    """The store that is to be made is not there, and nothing can be looked up in it."""
    data, new = file.read_bytes(), tmp_path / "new"
    objects = objects_in(file)
    segment = next(key for key in objects if key.startswith("seg/"))
    less = archive(tmp_path / "less.zip", {key: value for key, value in objects.items() if key != segment})
    for broken in (data[:-9], data[:300] + bytes([data[300] ^ 1]) + data[301:], less.read_bytes()):
        file.write_bytes(broken)
        ran = run("import", file, new)
        assert ran.code == 1 and str(new) not in ran.err and str(file) in ran.err


def test_a_hint_that_cannot_be_written_is_a_note(file: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """The snapshot is published: to say that the import failed would have it done again."""

    class Full(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise StoreFull(f"cannot write {key}: no space is left")

    store = Full()
    monkeypatch.setattr(importing, "_opened", lambda address, single_writer: store)
    ran = run("import", file, "memory://full")
    assert ran.code == 0 and "the hint was not written, and nothing depends on it: cannot write hint" in ran.out
    assert content(store) == content(ArchiveStore(str(file)))
