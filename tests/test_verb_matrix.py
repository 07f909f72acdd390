"""Verbs that write, or carry a snapshot, in every situation: the exact exit code, and what to type next.

Owns: export, import, repair, prune, forget, doctor --probe and pin; dry, and with --apply. The verbs that only read are
in test_inspect_screens.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prefix_recovery import cli as prefix_recovery
from recovery.errors import CredentialsRefused, RecoveryError, StoreUnavailable
from recovery.ports import ObjectStore
from snapshot_inspect import cli as inspect
from snapshot_inspect import importing, places, writing
from storage_backends import open_store
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import FaultyStore, RaiseBefore, ReadOnlyStore
from tests import inspect_stores as stores
from tests.inspect_stores import made
from tests.test_inspect_screens import corrupt_newest, newer_mark

VERBS: dict[str, tuple[str, ...]] = {
    "export": ("export", "STORE", "one.zip"),
    "export lines": ("export", "STORE", "--jsonl", "one.jsonl"),
    "import": ("import", "FILE", "STORE"),
    "repair": ("repair", "STORE"),
    "repair --apply": ("repair", "--apply", "STORE"),
    "prune": ("prune", "STORE"),
    "prune --apply": ("prune", "--apply", "STORE"),
    "forget": ("forget", "STORE", "LAST"),
    "forget --apply": ("forget", "--apply", "STORE", "LAST"),
    "doctor --probe": ("doctor", "--probe", "STORE"),
    "pin": ("pin", "STORE", "latest"),
    "pins": ("pin", "STORE"),
}
WRITE = {"repair --apply", "prune --apply", "forget --apply", "doctor --probe", "pin"}
REFUSED = CredentialsRefused("PutObject of s3://b/x: access denied", hint="allow s3:PutObject")
AWAY = StoreUnavailable("cannot reach http://x:9", hint="check the address, then run again")
DRY = "not written: add --apply"
NOTHING = "no snapshot was published in this store"

Situation = tuple[Callable[[], ObjectStore | None], dict[str, tuple[int, str]]]


def all_of(code: int, says: str) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(VERBS, (code, says))


def failing(error: RecoveryError) -> ObjectStore:
    return FaultyStore(made(stores.several), lambda verb, key: RaiseBefore(error))


TAKEN = (2, "import into a new folder, or under a new prefix")
FINE = {
    **all_of(0, ""),
    "import": TAKEN,
    "repair": (0, "nothing to repair"),
    "repair --apply": (0, "nothing to repair"),
    "prune": (0, DRY),
    "forget": (0, DRY),
}
REFUSES_WRITES = {verb: (12, "use a store that may be written") for verb in WRITE - {"repair --apply"}}
SITUATIONS: dict[str, Situation] = {
    "no store": (lambda: None, {**all_of(10, "`prefix-recovery run CONFIG` makes a store"), "import": (0, "")}),
    "empty": (
        lambda: made(stores.empty),
        {
            **all_of(14, NOTHING),
            "import": (0, "snapshot  2"),
            "repair": (0, "nothing to repair"),
            "repair --apply": (0, "nothing to repair"),
            "doctor --probe": (0, "this place does what a store needs"),
            "pins": (0, ""),
        },
    ),
    "one snapshot": (lambda: made(stores.one_snapshot), FINE),
    "several": (lambda: made(stores.several), FINE),
    "corrupt newest": (
        corrupt_newest,
        {
            **FINE,
            **dict.fromkeys(("export", "export lines"), (1, "snapshot-inspect latest --check")),
            "repair": (1, "not repaired"),
            "repair --apply": (1, "not repaired"),
            "prune": (1, DRY),
            "prune --apply": (3, "forget STORE ID"),
            "pin": (1, "pin another one: snapshot-inspect list"),
        },
    ),
    "newer format": (
        newer_mark,
        {**all_of(13, "upgrade prefix-recovery to the version that wrote the store"), "import": TAKEN},
    ),
    "wrong credentials": (lambda: failing(REFUSED), all_of(12, "allow s3:PutObject")),
    "unreachable": (lambda: failing(AWAY), all_of(20, "check the address, then run again")),
    "read-only": (lambda: ReadOnlyStore(made(stores.several)), {**FINE, **REFUSES_WRITES}),
}


def _exported(folder: Path) -> str:
    stores.on_disk(folder / "elsewhere", stores.objects_of(made(stores.one_snapshot)))
    return "elsewhere"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_exit_code_and_what_to_type(
    situation: str,
    verb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, expected = SITUATIONS[situation]
    store = make()
    monkeypatch.chdir(tmp_path)
    inspect.main(["export", _exported(tmp_path), "one-snapshot.zip"])
    capsys.readouterr()
    if store is not None:
        Path("run-1").mkdir()

        def opened(address: str, **options: object) -> ObjectStore:
            return store if str(address).endswith("run-1") else open_store(address, **options)  # type: ignore[arg-type]

        for module in (places, writing, importing):
            monkeypatch.setattr(module, "open_store", opened)
    last = "3" if situation == "one snapshot" else "5"
    words = [{"STORE": "run-1", "LAST": last, "FILE": "one-snapshot.zip"}.get(word, word) for word in VERBS[verb]]
    before = stores.objects_of(store) if isinstance(store, MemoryStore) else {}
    code = (prefix_recovery.main if words[0] == "pin" else inspect.main)(words)
    printed = capsys.readouterr()
    wanted, says = expected[verb]
    assert code == wanted, printed
    assert says in printed.out + printed.err, printed
    if code >= 10:
        what, _, hint = printed.err.partition("\n  ")
        assert what and hint.strip(), "an error names what to do next"
    if verb not in {*WRITE, "import"} and isinstance(store, MemoryStore):
        assert stores.objects_of(store) == before, "nothing is written"
