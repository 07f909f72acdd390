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
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from recovery.errors import CredentialsRefused, Damaged, ObjectMissing, StoreUnavailable
from recovery.ports import ObjectStore
from snapshot_inspect import cli, places
from snapshot_inspect.texts import error_text, filled
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseBefore, ReadOnlyStore
from tests import inspect_stores as stores
from tests.inspect_stores import made

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
    "explain": ("explain", "STORE"),
    "plan": ("plan", "STORE"),
    "diff": ("diff", "STORE", "latest"),
    "stats": ("stats", "STORE"),
    "holds": ("holds", "STORE"),
    "report": ("report", "STORE"),
    "doctor": ("doctor", "STORE"),
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


WRITING = ("export", "forget", "import", "prune", "repair")
"""Verbs that are not in the table: each has a file of tests of its own."""

VALIDATORS = {verb: validator(verb) for verb in {*(words[0] for words in VERBS.values()), *WRITING}}


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


def run_both(capsys: pytest.CaptureFixture[str], *argv: str) -> Ran:
    """Runs a command in plain and in JSON form: same exit code, same stderr. Returns the plain one."""
    plain = run_once(capsys, *argv)
    as_json = run_once(capsys, *argv, "--json")
    assert (as_json.code, as_json.err) == (plain.code, plain.err)
    for document in as_json.documents:
        VALIDATORS[argv[0]].validate(document)
    assert bool(as_json.out) == bool(plain.out) or argv[0] in ("calls", "list")
    return plain


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *argv: run_both(capsys, *argv)


def run_once(capsys: pytest.CaptureFixture[str], *argv: str) -> Ran:
    capsys.readouterr()
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return Ran(code, captured.out, captured.err)


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


def damaged_mark() -> MemoryStore:
    store = made(stores.several)
    stores.replace(store, "format.json", store.get("format.json")[:-1])
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
        {
            **all_of(14, NOTHING),
            "verify": (0, "no snapshot was published yet"),
            "data": (0, "no problem found"),
            "holds": (0, "nobody has claimed this store yet"),
            "doctor": (0, "nothing that was looked at is wrong"),
        },
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
            "plan": (1, f"passed over  snapshot 5: KEY {SUM}"),
            "diff": (1, INSTEAD),
            "stats": (1, "in snapshot 4, "),
            "report": (1, "1 problem found: snapshot-inspect verify "),
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
            "explain": (0, SKIPPED),
            "plan": (1, "passed over  log slot 5: log slot 5 is not JSON"),
            "diff": (0, SKIPPED),
            "stats": (1, "1 problem found: snapshot-inspect verify "),
            "report": (1, "1 problem found: snapshot-inspect verify "),
            "holds": (1, "unreadable  log slot 5 is not JSON"),
            "doctor": (1, "fail  read              log slot 5 is not JSON"),
        },
    ),
    "newer format": (newer_mark, all_of(13, TWO_VERSIONS)),
    "damaged mark": (damaged_mark, all_of(1, "format.json is not JSON")),
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
            "explain": (0, f"note: log slot 5 cannot be used: {UNKNOWN}"),
            "plan": (13, f"error: {UNKNOWN}\n  upgrade prefix-recovery"),
            "diff": (0, f"note: log slot 5 cannot be used: {UNKNOWN}"),
            "stats": (13, "1 problem found: snapshot-inspect verify "),
            "report": (13, "1 problem found: snapshot-inspect verify "),
            "holds": (13, f"unreadable  {UNKNOWN}"),
            "doctor": (13, f"error: {UNKNOWN}\n  upgrade prefix-recovery"),
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
            "plan": (1, "passed over  snapshot 5: KEY: "),
            "diff": (13, "version 2; this program reads 'prefix-recovery/ledger' version 1"),
            "stats": (13, "in snapshot 4, "),
            "report": (13, "1 problem found: snapshot-inspect verify "),
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
    assert code < 10 or "error: " in ran.err, "a code that stands for an error is never all that is said of it"


@pytest.mark.parametrize("verb", VERBS)
def test_f4_a_slot_of_an_unknown_kind_in_mid_log_is_said(
    verb: str, run: Run, disk: Callable[[ObjectStore], str]
) -> None:
    store = made(stores.several)
    slots = [store.get(f"log/{seq:012d}.json") for seq in range(1, 6)]
    slots[2] = slots[2].replace(b'"kind":"snapshot"', b'"kind":"merge"')
    for at in (3, 4):
        entry = json.loads(slots[at])
        slots[at] = json.dumps({**entry, "prev": hashlib.sha256(slots[at - 1]).hexdigest()}).encode()
    for seq, data in enumerate(slots, 1):
        stores.replace(store, f"log/{seq:012d}.json", data)
    root = disk(store)
    ran = run(*(root if word == "STORE" else word for word in VERBS[verb]))
    assert ran.code in (0, 1, 2, 13, 14), ran
    assert ran.code < 10 or re.search("^error: .*log slot 3 is of the unknown kind 'merge'", ran.err, re.M), ran
    if verb in ("list", "verify", "data", "holds"):
        assert ran.code == 13 and ran.out


def test_the_text_of_an_error_shows_no_escaped_line_ends() -> None:
    """What is quoted (the many lines of a YAML parser) is set in, and begins no line of ours."""
    assert error_text("a\nerror: b\n\n  c\x1b", "d\ne") == "error: a\n  error: b\n    c\\x1b\n  d\n  e"
    assert str(Damaged("what", hint="how")) == "what (how)"


def test_a_hint_names_what_was_typed_and_leaves_longer_words_alone() -> None:
    hint = "set AWS_PROFILE, or: snapshot-inspect import FILE STORE"
    assert filled(filled(hint, "FILE", "a b"), "STORE", r"\1") == (
        "set AWS_PROFILE, or: snapshot-inspect import 'a b' '\\1'"
    )


@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_mark_says_what_to_do(verb: str, run: Run, disk: Callable[[ObjectStore], str]) -> None:
    ran = run(*(disk(damaged_mark()) if word == "STORE" else word for word in VERBS[verb]))
    assert (ran.code, ran.out) == (1, "") and "put format.json back from a copy of the store" in ran.err


@pytest.mark.parametrize("verb", VERBS)
def test_there_is_no_store(verb: str, run: Run, tmp_path: Path) -> None:
    """A path that does not exist, a folder that holds none, one with a job's config in it, a file, no config."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.yaml").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    for name, what, hint in (
        ("missing", "store at", "`prefix-recovery run CONFIG` makes a store"),
        ("folder", "store at", "`prefix-recovery run CONFIG` makes a store"),
        ("job", "store at", "" if verb == "list" else f"give the job's config: {tmp_path / 'job' / 'job.yaml'}"),
        ("file", "store at", "give the store's own folder or address, or the config of its job"),
        ("job.yaml", "file", "give a job's config, or a store's folder or address"),
    ):
        ran = run(*(str(tmp_path / name) if word == "STORE" else word for word in VERBS[verb]))
        assert (ran.code, ran.out) == (10, ""), ran
        assert ran.err.startswith(f"error: there is no {what} {tmp_path / name}") and hint in ran.err, ran


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
    assert run_once(capsys, *VERBS[verb]).code == 0
    for n in range(counting.count()):
        opened_as(monkeypatch, FaultyStore(made(stores.several), _nth(n)))
        ran = run_once(capsys, *VERBS[verb], "--json")
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
