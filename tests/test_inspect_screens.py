"""Every verb on every kind of store: exit code, message, and JSON that keeps its schema (F4, C11, N4, W13).

Owns: the table of verbs and situations, and the form of every document.
Does not know: how a fault is found (test_inspect_verify.py), terminals (test_inspect_cli.py).

Invariants:
1. A document has no field that its schema does not declare; the schema allows more, so that fields can be added.
2. With --json stdout holds whole lines of JSON, or nothing.
3. Nothing is ever written.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from recovery.errors import CredentialsRefused, ObjectMissing, StoreUnavailable
from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from snapshot_inspect import cli, places
from storage_backends.memory import MemoryStore, named
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseBefore, ReadOnlyStore
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy

SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"
VERBS: dict[str, tuple[str, ...]] = {
    "list": ("list", "STORE"),
    "show": ("show", "STORE", "latest"),
    "latest": ("latest", "STORE"),
    "check": ("latest", "STORE", "--check"),
    "verify": ("verify", "STORE"),
    "data": ("verify", "STORE", "--read-data"),
    "calls": ("calls", "STORE"),
    "cat": ("cat", "STORE", "p-1"),
}


def _strict(schema: Any) -> Any:
    """The schema, with undeclared fields refused."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _strict(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
    return closed


def validator(verb: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{verb}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(_strict(copy.deepcopy(schema)))


VALIDATORS = {verb: validator(verb) for verb in ("list", "show", "latest", "verify", "calls", "cat")}


@dataclass(frozen=True)
class Ran:
    """One command: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in plain and in JSON form: same exit code, same stderr; returns both outputs by form."""

    def run(*argv: str) -> Ran:
        plain = _run(capsys, *argv)
        as_json = _run(capsys, *argv, "--json")
        assert (as_json.code, as_json.err) == (plain.code, plain.err)
        for document in as_json.documents:
            VALIDATORS[argv[0]].validate(document)
        assert bool(as_json.out) == bool(plain.out) or argv[0] in ("calls", "list")
        return plain

    return run


def _run(capsys: pytest.CaptureFixture[str], *argv: str) -> Ran:
    capsys.readouterr()
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)


def made(make: Callable[[ObjectStore], Any]) -> MemoryStore:
    store = MemoryStore()
    job = make(store)
    if job is not None:
        job.close()
    return store


@pytest.fixture
def disk(tmp_path: Path) -> Callable[[ObjectStore], str]:
    """Puts a store's objects into a folder and returns its path."""

    def put(store: ObjectStore) -> str:
        stores.on_disk(tmp_path / "run 17", stores.objects_of(store))
        return str(tmp_path / "run 17")

    return put


# ---- situations ----------------------------------------------------------------------------------------------------


def _ledger_key(store: ObjectStore, seq: int = 5) -> str:
    try:
        return str(json.loads(store.get(f"log/{seq:012d}.json"))["body"]["ledger"]["key"])
    except (ObjectMissing, ValueError, KeyError):
        return "no ledger"


def corrupt_newest() -> MemoryStore:
    """A flipped bit in the newest ledger object."""
    store = made(stores.several)
    key = _ledger_key(store)
    stores.replace(store, key, stores.flip(store.get(key), 2000))
    return store


def corrupt_slot() -> MemoryStore:
    """The newest slot is cut off."""
    store = made(stores.several)
    stores.replace(store, "log/000000000005.json", store.get("log/000000000005.json")[:100])
    return store


def newer_mark() -> MemoryStore:
    store = made(stores.several)
    stores.replace(store, "format.json", store.get("format.json").replace(b'"version":1', b'"version":2'))
    return store


def requires() -> MemoryStore:
    store = made(stores.several)
    entry = json.loads(store.get("log/000000000005.json"))
    stores.replace(store, "log/000000000005.json", json.dumps({**entry, "requires": ["sharded-log"]}).encode())
    return store


def with_foreign_files() -> MemoryStore:
    store = made(stores.several)
    for key in ("notes.txt", "log/000000000005.json.backup", "seg/e000001/a.tmp", "ledger/readme", ".ds_store"):
        store.put_new(key, b"\xff?")
    return store


def all_of(code: int, says: str) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(VERBS, (code, says))


FINE = all_of(0, "")
NOTHING = "error: no snapshot was published in this store yet\n  `prefix-recovery run CONFIG` publishes one"
TWO_VERSIONS = (
    "error: the store has format 'prefix-recovery' version 2; this program reads 'prefix-recovery' version 1\n"
    "  upgrade prefix-recovery"
)
SUM = "does not have the recorded sha256"
INSTEAD = "what a restore takes instead: snapshot-inspect latest --check "
SKIPPED = "note: log slot 5 cannot be used: log slot 5 is not JSON"
UNKNOWN = "log slot 5 requires sharded-log, which this version does not know"

# KEY stands for the ledger object of snapshot 5.
SITUATIONS: dict[str, tuple[Callable[[], MemoryStore], dict[str, tuple[int, str]]]] = {
    "empty": (
        lambda: made(stores.empty),
        {**all_of(14, NOTHING), "verify": (0, "no snapshot was published yet"), "data": (0, "no problem found")},
    ),
    "one snapshot": (lambda: made(stores.one_snapshot), FINE),
    "several": (lambda: made(stores.several), FINE),
    "crashed": (lambda: made(stores.crashed), FINE),
    "carried on": (lambda: made(stores.carried_on), FINE),
    "collected": (lambda: made(stores.collected), {**FINE, "cat": (2, "there is no call 'p-1' in this snapshot")}),
    "corrupt newest": (
        corrupt_newest,
        {
            **FINE,
            "check": (1, f"passed over  snapshot 5: KEY {SUM}"),
            "verify": (1, "1 problem found"),
            "data": (1, f"problem  KEY {SUM}\nin       snapshot 5"),
            "calls": (1, f"error: snapshot 5: KEY {SUM}\n  {INSTEAD}"),
            "cat": (1, INSTEAD),
        },
    ),
    "corrupt slot": (
        corrupt_slot,
        {
            "list": (1, "damaged: log slot 5 is not JSON"),
            "show": (0, SKIPPED),
            "latest": (1, "passed over  log slot 5: log slot 5 is not JSON"),
            "check": (1, "passed over  log slot 5: log slot 5 is not JSON"),
            "verify": (1, "problem  log/000000000005.json: log slot 5 is not JSON"),
            "data": (1, "1 problem found"),
            "calls": (0, SKIPPED),
            "cat": (0, SKIPPED),
        },
    ),
    "newer format": (newer_mark, all_of(13, TWO_VERSIONS)),
    "newer slot": (
        requires,
        {
            "list": (13, f"not understood: {UNKNOWN}"),
            "show": (0, f"note: log slot 5 cannot be used: {UNKNOWN}"),
            "latest": (13, f"error: {UNKNOWN}\n  upgrade prefix-recovery"),
            "check": (13, f"error: {UNKNOWN}\n  upgrade prefix-recovery"),
            "verify": (13, "1 problem found"),
            "data": (13, f"problem  log/000000000005.json: {UNKNOWN}\nhint     upgrade prefix-recovery"),
            "calls": (0, f"note: log slot 5 cannot be used: {UNKNOWN}"),
            "cat": (0, f"note: log slot 5 cannot be used: {UNKNOWN}"),
        },
    ),
    "newer ledger": (
        lambda: stores.with_newer_ledger(made(stores.several)),
        {
            **FINE,
            "check": (1, "passed over  snapshot 5: KEY: "),
            "verify": (13, "not understood  5"),
            "data": (13, "version 2; this program reads 'prefix-recovery/ledger' version 1"),
            "calls": (13, "version 2; this program reads 'prefix-recovery/ledger' version 1"),
            "cat": (13, "version 2; this program reads 'prefix-recovery/ledger' version 1"),
        },
    ),
    "foreign files": (
        with_foreign_files,
        {**FINE, "verify": (0, "5 files, not part of the store: .ds_store, ledger/readme"), "data": (0, "notes.txt")},
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_in_every_situation(verb: str, situation: str, run: Run, disk: Callable[[ObjectStore], str]) -> None:
    make, expected = SITUATIONS[situation]
    store = make()
    ran = run(*(disk(store) if word == "STORE" else word for word in VERBS[verb]))
    code, says = expected[verb]
    assert ran.code == code, ran
    assert says.replace("KEY", _ledger_key(store)) in ran.out + ran.err
    assert bool(ran.err) == ((ran.err.startswith(("error: ", "note: ")) and code != 0) or "note: " in ran.err)


@pytest.mark.parametrize("verb", VERBS)
def test_there_is_no_store(verb: str, run: Run, tmp_path: Path) -> None:
    """A path that does not exist, a folder that holds none, a file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    make = "`prefix-recovery run CONFIG` makes a store"
    for name in ("missing", "folder", "file"):
        ran = run(*(str(tmp_path / name) if word == "STORE" else word for word in VERBS[verb]))
        assert (ran.code, ran.out) == (10, ""), ran
        assert (
            ran.err.startswith("error: there is no store at ") and str(tmp_path / name) in ran.err and make in ran.err
        )


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "list"])
def test_a_folder_of_stores_is_no_store_and_says_so(verb: str, run: Run, disk: Callable[[ObjectStore], str]) -> None:
    parent = str(Path(disk(made(stores.one_snapshot))).parent)
    ran = run(*(parent if word == "STORE" else word for word in VERBS[verb]))
    assert ran.code == 10
    assert "is no store, but a folder with 1 of them (run 17)" in ran.err
    assert f"list them: snapshot-inspect list {parent}" in ran.err


def opened_as(monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> None:
    monkeypatch.setattr(places, "open_store", lambda address: store)


@pytest.mark.parametrize("verb", VERBS)
def test_without_permission(verb: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    error = CredentialsRefused(
        "cannot read s3://bucket/x: access denied", hint="see who you are: aws sts get-caller-identity"
    )
    opened_as(monkeypatch, FaultyStore(made(stores.several), lambda verb, key: RaiseBefore(error)))
    ran = run(*VERBS[verb])
    assert (ran.code, ran.out) == (12, "")
    assert ran.err == f"error: {error.message}\n  {error.hint}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_the_back_end_fails_at_each_call(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call it is that fails, nothing is printed and nothing is taken for damage."""
    counting = CountingStore(made(stores.several))
    opened_as(monkeypatch, counting)
    assert _run(capsys, *VERBS[verb]).code == 0
    for n in range(counting.count()):
        opened_as(monkeypatch, FaultyStore(made(stores.several), _nth(n)))
        ran = _run(capsys, *VERBS[verb], "--json")
        assert (ran.code, ran.out, ran.err) == (20, "", "error: no answer\n"), f"call {n}"


def _nth(n: int) -> Iterator[Any]:
    yield from [PASS] * n
    yield RaiseBefore(StoreUnavailable("no answer"))


@pytest.mark.parametrize("verb", VERBS)
def test_reading_writes_nothing(verb: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store that refuses writes, and by counting calls."""
    store = made(stores.crashed)
    before = stores.objects_of(store)
    counting = CountingStore(ReadOnlyStore(store))
    opened_as(monkeypatch, counting)
    assert run(*VERBS[verb]).code == 0
    assert counting.count("put", "put_new", "delete") == 0
    assert stores.objects_of(store) == before


def test_reading_needs_no_write_permission_on_disk(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    folder = disk(made(stores.crashed))
    before = {str(path) for path in Path(folder).rglob("*")}
    for path in [*Path(folder).rglob("*"), Path(folder)]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    for words in VERBS.values():
        assert run(*(folder if word == "STORE" else word for word in words)).code == 0
    assert {str(path) for path in Path(folder).rglob("*")} == before
    for path in [Path(folder), *Path(folder).rglob("*")]:
        path.chmod(0o700)


# ---- list ----------------------------------------------------------------------------------------------------------


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    return _run(capsys, *argv, "--json").documents


def test_ids_are_numbers_in_order(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """N4: 9, 10, 100, 1000."""
    store = MemoryStore()
    stores.empty(store)
    log = SlotLog(store, ManualClock(), SeededEntropy(), "host-a pid 1")
    log.claim()
    ref = {"key": "ledger/e000001/00000000000000aa.arrow", "nbytes": 1, "sha256": "0" * 64}
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
    assert not any(call.key.startswith(("ledger/", "seg/", "state/")) for call in counting.log)
    counting.log.clear()
    _json(capsys, "show", "s", "9")
    assert counting.count("get") < 20, "an exact id is found without walking the log"
    for text, says in (("100", 100), ("1000", 1000), ("000000000009", 9)):
        (document,) = _json(capsys, "show", "s", text)
        assert document["id"] == says
    ran = _run(capsys, "show", "s", "1")
    assert ran.code == 2 and "1 could be any of 3 snapshots: 10, 100, 1000" in ran.err
    ran = _run(capsys, "show", "s", "7")
    assert ran.code == 2 and "there is no snapshot 7\n  list them: snapshot-inspect list s" in ran.err
    ran = _run(capsys, "show", "s", "newest")
    assert ran.code == 2 and "'newest' is no snapshot" in ran.err


def test_unique_digits_are_enough(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened_as(monkeypatch, made(stores.collected))
    assert [document["id"] for document in _json(capsys, "show", "s", "43")] == [43]
    (document,) = _json(capsys, "verify", "s", "--snapshot", "latest")
    assert [status["id"] for status in document["snapshots"]] == [43]
    assert {row["snapshot"] for row in _json(capsys, "calls", "s", "35")} == {35}
    ran = _run(capsys, "calls", "s", "4")
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
        assert _run(capsys, "latest", row["store"]).code == 0, "the address of a row is an argument for the other verbs"
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
        id_ for id_ in (r["id"] for r in rows) if id_ <= 20
    ]


# ---- what a document says ------------------------------------------------------------------------------------------


def test_latest_says_what_is_newer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = made(stores.collected)
    SlotLog(store, ManualClock(), SeededEntropy("other"), "host-b pid 9").claim()
    opened_as(monkeypatch, store)
    (document,) = _json(capsys, "latest", "s")
    assert document["id"] == 43 and document["tail"] == 45 and document["checked"] is False
    assert [(slot["seq"], slot["kind"], slot["owner"]) for slot in document["newer"]] == [
        (44, "gc", "host-a pid 1"),
        (45, "epoch", "host-b pid 9"),
    ]
    assert "newer slots  44 gc, 45 epoch" in _run(capsys, "latest", "s").out


def test_a_dangling_hint_is_a_note(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    """C11."""
    store = made(stores.several)
    store.put("hint", b'{"tail": 99}')
    for verb in ("latest", "verify"):
        ran = run(verb, disk(store))
        assert ran.code == 0
        assert "note" in ran.out and "hint points to slot 99, which does not exist: nobody trusts it" in ran.out


def test_a_gap_in_the_log_is_told_by_every_verb(run: Run, disk: Callable[[ObjectStore], str]) -> None:
    """C11: what is missing, and what to do."""
    store = made(stores.several)
    store.delete("log/000000000004.json")
    for hint in (3, 5):
        store.put("hint", json.dumps({"tail": hint}).encode())
        folder = disk(store)
        for words in (("list",), ("latest",), ("latest", "--check"), ("verify",)):
            ran = run(words[0], folder, *words[1:])
            if words[0] == "latest" and hint == 5:
                assert ran.code == 0, "what lies below the newest snapshot is of no interest to a restore"
                continue
            assert ran.code == 1 and "log slot 4 (log/000000000004.json) is missing" in ran.out, (hint, words)
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
    assert run("latest", disk(store)).code == 0
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
        assert _run(capsys, "latest", "s").code == 0


def test_the_shared_parts_of_the_schemas_are_the_same_everywhere() -> None:
    seen: dict[str, Any] = {}
    for path in SCHEMAS.glob("*.json"):
        if path.stem not in VALIDATORS:
            continue
        for name, definition in json.loads(path.read_text())["$defs"].items():
            assert seen.setdefault(name, definition) == definition, f"{path.name}: {name}"


def test_an_address_that_is_none(run: Run) -> None:
    for address, says in (("s3://bucket/x", "s3"), ("memory://", "needs a name"), ("", "no address")):
        for verb in VERBS:
            ran = run(*(address if word == "STORE" else word for word in VERBS[verb]))
            assert ran.code in (2, 10, 20) and says in ran.err


def test_a_store_in_memory_is_named_by_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    stores.several(named("inspected")).close()
    (document,) = _json(capsys, "latest", "memory://inspected")
    assert (document["store"], document["id"]) == ("memory://inspected", 5)
