"""What the documents of single verbs say: `list`, `latest`, `show`, and a fault as each of them tells it.

Owns: order and choice of snapshots, folders of stores, notes, odd values (C3, C11, N4, W13).
Does not know: the table of all verbs and situations (test_inspect_screens.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore, named
from storage_backends.testing.faults import CountingStore
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy
from tests.inspect_stores import made
from tests.test_inspect_screens import (
    SCHEMAS,
    VALIDATORS,
    VERBS,
    Run,
    corrupt_slot,
    newer_mark,
    opened_as,
    run_both,
    run_once,
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *argv: run_both(capsys, *argv)


@pytest.fixture
def disk(tmp_path: Path) -> Callable[[ObjectStore], str]:
    """Puts a store's objects into a folder and returns its path."""
    return lambda store: stores.on_disk(tmp_path / "run 17", stores.objects_of(store)).root


# ---- list ----------------------------------------------------------------------------------------------------------


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    return run_once(capsys, *argv, "--json").documents


def test_ids_are_numbers_in_order(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """N4: 9, 10, 100, 1000."""
    store = MemoryStore()
    stores.empty(store)
    log = SlotLog(store, ManualClock(), SeededEntropy(), "host-a pid 1")
    log.claim()
    ref = {"key": "ledger/e000001/00000000000000aa.arrow", "nbytes": 1, "sha256": "0" * 64}
    store.put_new(str(ref["key"]), b"?")
    while log.tail < 1001:
        kind = "snapshot" if log.tail + 1 in (9, 10, 100, 1000) else "gc"
        log.append(kind, {"victims": ref, "count": 1} if kind == "gc" else {"ledger": ref, "states": {}})
    opened_as(monkeypatch, store)
    assert [row["id"] for row in _json(capsys, "list", "s")] == [9, 10, 100, 1000]
    assert [row["id"] for row in _json(capsys, "list", "s", "--last", "2")] == [100, 1000]
    (document,) = _json(capsys, "latest", "s")
    assert document["id"] == 1000 and [slot["seq"] for slot in document["newer"]] == [1001]
    counting = CountingStore(store)
    opened_as(monkeypatch, counting)
    _json(capsys, "latest", "s")
    assert counting.count() < 12 and counting.nbytes("get") < 1_000_000
    assert not any(call.verb == "get" and call.key.startswith(("ledger/", "seg/", "state/")) for call in counting.log)
    counting.log.clear()
    _json(capsys, "show", "s", "9")
    assert counting.count("get") < 20, "an exact id is found without walking the log"
    for text, says in (("100", 100), ("1000", 1000), ("000000000009", 9)):
        (document,) = _json(capsys, "show", "s", text)
        assert document["id"] == says
    ran = run_once(capsys, "show", "s", "1")
    assert ran.code == 2 and "1 could be any of 3 snapshots: 10, 100, 1000" in ran.err
    ran = run_once(capsys, "show", "s", "7")
    assert ran.code == 2 and "there is no snapshot 7\n  list them: snapshot-inspect list s" in ran.err
    ran = run_once(capsys, "show", "s", "newest")
    assert ran.code == 2 and "'newest' is no snapshot" in ran.err


def test_unique_digits_are_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened_as(monkeypatch, made(stores.collected))
    assert [document["id"] for document in _json(capsys, "show", "s", "30")] == [30]
    (document,) = _json(capsys, "verify", "s", "--snapshot", "latest")
    assert [status["id"] for status in document["snapshots"]] == [30]
    assert {row["snapshot"] for row in _json(capsys, "calls", "s", "29")} == {29}
    ran = run_once(capsys, "calls", "s", "4")
    assert ran.code == 1 and "snapshot 4: " in ran.err, "a snapshot that was collected has no calls to show"


def test_a_folder_of_stores_is_listed(run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, make in (("b 2", stores.several), ("b 10", stores.crashed), ("a", stores.empty)):
        stores.on_disk(tmp_path / name, stores.objects_of(made(make)))
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_bytes(b"")
    assert run("list", str(tmp_path)).code == 0
    rows = _json(capsys, "list", str(tmp_path))
    assert [(row["name"], row["latest"], row["exit_code"]) for row in rows] == [
        ("a", None, 14),
        ("b 10", 5, 0),
        ("b 2", 5, 0),
    ]
    for row in rows[1:]:
        assert run_once(capsys, "latest", row["store"]).code == 0, (
            "the address of a row is an argument for the other verbs"
        )
    stores.on_disk(tmp_path / "c", stores.objects_of(newer_mark()))
    stores.on_disk(tmp_path / "d", stores.objects_of(corrupt_slot()))
    ran = run("list", str(tmp_path))
    assert ran.code == 3 and "version 2; this program reads" in ran.out and "log slot 5 is not JSON" in ran.out


def test_what_is_listed_says_whether_its_ledger_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_as(monkeypatch, made(stores.collected))
    rows = _json(capsys, "list", "s")
    assert [row["id"] for row in rows if not row["ledger_present"]] == [
        id_ for id_ in (r["id"] for r in rows) if id_ <= 24
    ]


# ---- what a document says ------------------------------------------------------------------------------------------


def test_latest_says_what_is_newer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = made(stores.collected)
    SlotLog(store, ManualClock(), SeededEntropy("other"), "host-b pid 9").claim()
    opened_as(monkeypatch, store)
    (document,) = _json(capsys, "latest", "s")
    assert document["id"] == 30 and document["tail"] == 32 and document["checked"] is False
    assert [(slot["seq"], slot["kind"], slot["owner"]) for slot in document["newer"]] == [
        (31, "gc", "host-a pid 1"),
        (32, "epoch", "host-b pid 9"),
    ]
    assert "newer slots  31 gc, 32 epoch" in run_once(capsys, "latest", "s").out


def test_a_dangling_hint_is_a_note(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    """C11."""
    store = made(stores.several)
    store.put("hint", b'{"tail": 99}')
    for verb in ("latest", "verify"):
        ran = run(verb, disk(store))
        assert ran.code == 0
        assert "note" in ran.out and "hint points to slot 99, which does not exist: nobody trusts it" in ran.out


def test_a_gap_in_the_log_is_told_by_every_verb(
    run: Run, disk: Callable[[ObjectStore], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """C11: what is missing, and what to do."""
    store = made(stores.several)
    store.delete("log/000000000004.json")
    for hint in (3, 5):
        store.put("hint", json.dumps({"tail": hint}).encode())
        folder = disk(store)
        for words in (("list",), ("latest",), ("latest", "--check"), ("verify",)):
            ran = run(words[0], folder, *words[1:])
            if words[0] == "latest":
                assert ran.code == 0, "what lies below the newest snapshot is of no interest to a restore"
                continue
            assert ran.code == 1 and "log slot 4 (log/000000000004.json) is missing" in ran.out, (hint, words)
        ids = [row["id"] for row in run_once(capsys, "list", folder, "--json").documents]
        assert ids == [2, 3, 4, 5], "also what lies above the gap"
        assert "hint     slots are never deleted: put it back from a copy of the store" in run("verify", folder).out


def test_a_missing_segment_after_publication(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    """C3, W13: latest resolves, verify names it, and what a restore falls back to is said, with the reason."""
    store = made(stores.several)
    key = [item.key for item in store.list("seg/")][2]
    store.delete(key)
    folder = disk(store)
    assert run("latest", folder).code == 0
    ran = run("verify", folder)
    assert ran.code == 1 and f"segment {key} is missing" in ran.out
    assert "affects  tokens 6 to 7 of p-1" in ran.out and "in       snapshot 5" in ran.out
    ran = run("latest", folder, "--check")
    assert ran.code == 1
    assert "snapshot     4\n" in ran.out and f"passed over  snapshot 5: segment {key} is missing" in ran.out


def test_no_snapshot_at_all_can_be_restored(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    store = made(stores.several)
    for item in store.list("ledger/"):
        store.delete(item.key)
    ran = run("latest", disk(store), "--check")
    assert ran.code == 1 and "error: no snapshot of this store can be restored: snapshot 5: " in ran.err
    assert "look: snapshot-inspect verify --read-data '" in ran.err, "the hint can be pasted, with the path quoted"
    ran = run("latest", disk(store))
    assert ran.code == 1 and re.search(r"^problem +snapshot 5: ledger/\S+ is missing$", ran.out, re.MULTILINE)
    assert re.search(r"^damaged +2, 3, 4, 5$", run("verify", disk(store)).out, re.MULTILINE)


def test_a_job_record_that_cannot_be_read(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    store = made(stores.several)
    (item,) = store.list("state/")
    store.delete(item.key)
    ran = run("show", disk(store), "latest")
    assert ran.code == 1 and item.key in ran.out.split("problem")[1]


def test_show_says_what_changed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened_as(monkeypatch, made(stores.several))
    (document,) = _json(capsys, "show", "s", "4")
    assert document["previous"] == 3 and document["latest"] == 5
    assert document["since_previous"] == {"calls": 0, "ended": 1, "tokens": 5, "segments": 1}
    assert document["job"] == {"must": stores.MUST, "recorded": stores.RECORDED}
    assert document["utc"] == "2026-01-01T00:02:00.000Z"
    (document,) = _json(capsys, "show", "s", "2")
    assert document["previous"] is None and document["since_previous"] is None


def test_odd_times_and_figures_in_a_slot_are_null(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = made(stores.several)
    tail = "log/000000000005.json"
    entry = json.loads(store.get(tail))
    opened_as(monkeypatch, store)
    for utc in (1e999, -1e18, "noon", None, 1e11):
        entry["utc"] = utc
        entry["body"] |= {"cause": 7, "fingerprint": [], "depth": "deep", "counts": {"calls": True}}
        stores.replace(store, tail, json.dumps(entry).encode())
        for words in (("latest", "s"), ("list", "s"), ("show", "s", "latest")):
            for document in _json(capsys, *words):
                VALIDATORS[words[0]].validate(document)
        (document,) = _json(capsys, "latest", "s")
        assert document["counts"]["calls"] is None and document["cause"] is None
        assert run_once(capsys, "latest", "s").code == 0


def test_the_shared_parts_of_the_schemas_are_the_same_everywhere() -> None:
    seen: dict[str, Any] = {}
    for path in SCHEMAS.glob("*.json"):
        if path.stem not in VALIDATORS:
            continue
        for name, definition in json.loads(path.read_text())["$defs"].items():
            assert seen.setdefault(name, definition) == definition, f"{path.name}: {name}"


def test_an_address_that_is_none(run: Run) -> None:
    for address, says in (("gs://bucket/x", "gs"), ("memory://", "needs a name"), ("", "no address")):
        for verb in VERBS:
            ran = run(*(address if word == "STORE" else word for word in VERBS[verb]))
            assert ran.code in (2, 10, 20) and says in ran.err


def test_a_store_in_memory_is_named_by_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    stores.several(named("inspected")).close()
    (document,) = _json(capsys, "latest", "memory://inspected")
    assert (document["store"], document["id"]) == ("memory://inspected", 5)
