"""`snapshot-inspect doctor`: places that keep their word, places that do not, and what a probe leaves behind.

Owns: stores that break one guarantee each.
Does not know: the table of all verbs and situations (test_inspect_screens.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import ObjectMissing, StoreUnavailable
from recovery.ports import Listed, ObjectStore, Put
from snapshot_inspect import doctor
from storage_backends.memory import MemoryStore, named
from storage_backends.testing.faults import PASS, FaultyStore, RaiseBefore, ReadOnlyStore
from storage_backends.testing.servers import BUCKET, Server
from tests import inspect_stores as stores
from tests.inspect_stores import made
from tests.test_inspect_screens import VALIDATORS, opened_as, run_once

pytest_plugins = ["storage_backends.testing.s3_fixtures"]


def _levels(document: dict[str, Any]) -> dict[str, str]:
    VALIDATORS["doctor"].validate(document)
    worst = {"ok": 0, "warn": 1, "fail": 2}
    found: dict[str, str] = {}
    for check in document["checks"]:
        found[check["check"]] = max(found.get(check["check"], "ok"), check["level"], key=worst.__getitem__)
        assert check["level"] == "ok" or check["hint"], check
    return found


def test_a_probe_of_a_folder_learns_everything_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    ran = run_once(capsys, "doctor", str(tmp_path / "s"), "--probe", "--json")
    (document,) = ran.documents
    assert ran.code == 0 and document["ok"] and document["probed"]
    assert set(_levels(document).values()) == {"ok"} and document["clock_ahead_s"] == 0.0
    assert document["puts"]["n"] == 20 and document["puts"]["per_second"] > 0
    after = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert after - before <= {"s/.tmp"}, "a local store's own folder for unfinished files"
    assert run_once(capsys, "verify", str(tmp_path / "s")).code == 0


def test_a_place_without_a_store_yet_can_be_probed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_once(capsys, "doctor", str(tmp_path)).code == 10
    ran = run_once(capsys, "doctor", str(tmp_path), "--probe")
    assert ran.code == 0 and "no store here yet" in ran.out and "this place does what a store needs" in ran.out
    assert run_once(capsys, "doctor", str(tmp_path / "none"), "--probe").code == 10


class Overwriting(MemoryStore):
    def put_new(self, key: str, data: bytes) -> Put:
        self.put(key, data)
        return Put.CREATED


class Forgetful(MemoryStore):
    """Lists nothing that was just written."""

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        return [] if prefix.startswith("probe/") else super().list(prefix, after)


class Keeping(MemoryStore):
    def delete(self, key: str) -> None:
        return


class Whole(MemoryStore):
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return super().get(key)


@pytest.mark.parametrize(
    ("kind", "says", "code"),
    [
        (Overwriting, {"create": "fail", "race": "fail"}, 1),
        (Forgetful, {"list-after-write": "fail"}, 1),
        (Keeping, {"delete": "warn"}, 0),
        (Whole, {"range": "warn"}, 0),
    ],
)
def test_what_a_place_does_not_keep_is_named(
    kind: type[MemoryStore], says: dict[str, str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    store = kind()
    opened_as(monkeypatch, store)
    ran = run_once(capsys, "doctor", "s", "--probe", "--json")
    (document,) = ran.documents
    assert ran.code == code and document["ok"] == (code == 0)
    assert {name: level for name, level in _levels(document).items() if level != "ok"} == says


def test_a_probe_that_may_not_write_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    store = made(stores.several)
    opened_as(monkeypatch, ReadOnlyStore(store))
    ran = run_once(capsys, "doctor", "s", "--probe")
    assert (ran.code, ran.out) == (12, "") and "may only be read" in ran.err
    assert run_once(capsys, "doctor", "s").code == 0


def test_whenever_a_probe_fails_it_leaves_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The back end answers once more after each failure, so that what was written can be removed."""

    def nth(n: int) -> Iterator[Any]:
        yield from [PASS] * n
        yield RaiseBefore(StoreUnavailable("no answer"))
        while True:
            yield PASS

    for n in range(3, 60, 4):
        store = made(stores.several)
        before = stores.objects_of(store)
        opened_as(monkeypatch, FaultyStore(store, nth(n)))
        code = run_once(capsys, "doctor", "s", "--probe").code
        assert code in (0, 20), n
        assert stores.objects_of(store) == before, n


def test_a_probe_that_is_interrupted_leaves_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    for n in (1, 9, 30, 50):
        store = Interrupted(n)
        opened_as(monkeypatch, store)
        assert run_once(capsys, "doctor", "s", "--probe").code == 130
        assert store.list("") == [], n


class Interrupted(MemoryStore):
    """Somebody types Ctrl-C while the n-th object is created."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self._left = n

    def put_new(self, key: str, data: bytes) -> Put:
        created = super().put_new(key, data)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return created


def test_clocks_are_compared(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """By the newest log entry, and by what the storage says of an object that was just written."""
    store: Any = made(stores.several)
    opened_as(monkeypatch, store)
    early = doctor.doctor("s", probe=False, now=lambda: stores.BEGIN_UTC - 4000)
    assert _levels(early)["clock"] == "warn"
    store.modified_utc = lambda key: 1e9
    late = doctor.doctor("s", probe=True, now=lambda: 1e9 + 7200)
    assert late["clock_ahead_s"] == -7200 and _levels(late)["clock"] == "warn" and late["ok"]
    assert any("2 h behind" in check["message"] for check in late["checks"])


@pytest.mark.usefixtures("s3_environment")
def test_a_probe_of_a_bucket(
    seaweedfs: Server,
    fresh_prefix: Callable[[], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the server whose creates are atomic also between threads; moto looks first and writes then."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs.url)
    address = f"s3://{BUCKET}/{fresh_prefix()}"
    ran = run_once(capsys, "doctor", address, "--probe", "--json")
    (document,) = ran.documents
    assert ran.code == 0 and document["ok"] and document["clock_ahead_s"] is not None
    assert set(_levels(document)) >= {"create", "race", "overwrite", "range", "list-after-write", "delete", "speed"}
    prefix = address.removeprefix(f"s3://{BUCKET}/")
    assert "Contents" not in seaweedfs.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)


def test_a_store_says_when_an_object_was_written(tmp_path: Path) -> None:
    store = stores.on_disk(tmp_path, {"log/a": b""})
    os.utime(tmp_path / "log" / "a", (5, 5))
    assert store.modified_utc("log/a") == 5.0
    for key in ("log/b", "none/a"):
        with pytest.raises(ObjectMissing):
            store.modified_utc(key)


def test_memory_can_be_probed_too(capsys: pytest.CaptureFixture[str]) -> None:
    store: ObjectStore = named("doctored")
    stores.empty(store)
    assert run_once(capsys, "doctor", "memory://doctored", "--probe").code == 0
    assert [item.key for item in store.list("")] == ["format.json"]
