"""`snapshot-inspect list PARENT`: many stores in a folder or under a prefix, one row each, whatever is wrong with some.

Owns: which folders are stores, broken ones, and that a row's address works with other verbs.
Does not know: what a row of one store shows (test_inspect_documents.py).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import StoreUnavailable
from recovery.ports import ObjectStore
from snapshot_inspect import parents
from snapshot_inspect.parents import side_by_side
from storage_backends.s3 import S3Store
from storage_backends.testing.s3_proxy import PASS_ON, Answer, FaultProxy, Seen
from storage_backends.testing.servers import BUCKET, Server
from tests import inspect_stores as stores
from tests.inspect_stores import made
from tests.test_inspect_cli import environment, program
from tests.test_inspect_screens import VALIDATORS, Ran, corrupt_slot, newer_mark, run_both, run_once

pytest_plugins = ["storage_backends.testing.s3_fixtures"]

Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *words: run_once(capsys, *map(str, words))


def unfinished_import() -> ObjectStore:
    """A first slot that is an import's claim, and nothing else but the mark."""
    from recovery.log_reading import read_slot
    from recovery.origin import import_claim, origin_here
    from recovery.slots import SlotLog
    from tests.fakes import ManualClock, SeededEntropy

    store = made(stores.empty)
    whole = read_slot(made(stores.several), 5)
    assert whole is not None
    origin = origin_here(whole.slot, "5eed", 0)
    SlotLog(store, ManualClock(), SeededEntropy(), "host-a, import").claim(import_claim(origin))
    return store


def without_mark() -> ObjectStore:
    store = made(stores.several)
    store.delete("format.json")
    return store


MANY: dict[str, Callable[[], ObjectStore]] = {
    "a": lambda: made(stores.empty),
    "b 10": lambda: made(stores.crashed),
    "b 2": lambda: made(stores.several),
    "corrupt": corrupt_slot,
    "import": unfinished_import,
    "newer": newer_mark,
    "no-mark": without_mark,
}
EXPECTED = [
    ("a", None, 14, "no snapshot was published"),
    ("b 10", 5, 0, None),
    ("b 2", 5, 0, None),
    ("corrupt", 4, 1, "log slot 5 is not JSON"),
    ("import", None, 14, "an import into this store was not finished"),
    ("newer", None, 13, "version 2"),
    ("no-mark", None, 10, "no format.json"),
]


def rows_of(ran: Ran) -> list[tuple[Any, ...]]:
    for row in ran.documents:
        VALIDATORS["list"].validate(row)
    return [(row["name"], row["latest"], row["exit_code"], row["error"]) for row in ran.documents]


def check(found: list[tuple[Any, ...]], names: Iterable[str] = MANY) -> None:
    expected = [row for row in EXPECTED if row[0] in names]
    assert [row[:3] for row in found] == [row[:3] for row in expected]
    for (_, _, _, error), (name, _, _, says) in zip(found, expected, strict=True):
        assert (error is None) if says is None else (says in error), (name, error)


def test_a_folder_has_a_row_for_each_store_and_none_for_what_is_foreign(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken ones are rows with the reason; files, other folders and links to nothing are passed over."""
    for name, make in MANY.items():
        stores.on_disk(tmp_path / name, stores.objects_of(make()))
    (tmp_path / "other" / "log").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "lost+found").mkdir()
    os.symlink("nowhere", tmp_path / "link")
    ran = run("list", tmp_path, "--json")
    assert ran.code == 3 and ran.err == ""
    check(rows_of(ran))
    assert run_both(capsys, "list", str(tmp_path)).code == 3
    row = ran.documents[1]
    assert row["counts"]["open"] == 2 and row["counts"]["ended"] == 1 and row["counts"]["tokens"] == 11
    for row in ran.documents:
        code = run("latest", row["store"]).code
        assert code == row["exit_code"], row["name"]


def test_a_folder_that_may_not_be_looked_into_is_a_row(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system says it to whoever is not root; `lost+found` is nobody's store."""
    for name in ("mine", "secret", "lost+found"):
        stores.on_disk(tmp_path / name, stores.objects_of(made(stores.several)))
    real_lstat, real_open = os.lstat, os.open

    def lstat(path: Any, **named: Any) -> os.stat_result:
        if any(f"/{name}/" in str(path) for name in ("secret", "lost+found")):
            raise PermissionError(13, "Permission denied", path)
        return real_lstat(path, **named)

    def refuse(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith("/secret"):
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *more, **named)

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "open", refuse)
    ran = run("list", tmp_path, "--json")
    monkeypatch.undo()
    assert ran.code == 3
    (mine, secret) = rows_of(ran)
    assert mine == ("mine", 5, 0, None)
    assert secret[:3] == ("secret", None, 12) and "permission denied" in secret[3]


@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
@pytest.mark.usefixtures("s3_environment")
def test_a_prefix_of_a_bucket_has_a_row_for_each_store(
    kind: str,
    request: pytest.FixtureRequest,
    fresh_prefix: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    server: Server = request.getfixturevalue(kind)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    parent = S3Store(BUCKET, fresh_prefix())
    names = ["b 10", "corrupt", "import", "no-mark"] if kind == "moto" else ["a", "b 2", "newer"]
    for name in names:
        inner = parent.under(f"{parent.prefix}/{name}")
        for key, data in stores.objects_of(MANY[name]()).items():
            inner.put_new(key, data)
    parent.put_new("other/readme", b"?")
    parent.put_new("file", b"?")
    ran = run("list", parent.url, "--json")
    assert ran.code == 3, ran
    check(rows_of(ran), names)
    assert run("latest", ran.documents[0]["store"]).code == (0 if kind == "moto" else 14)
    ran = run("latest", parent.url)
    assert ran.code == 10 and f"is no store, but a folder with {len(names)} of them ({names[0]}, " in ran.err
    assert f"list them: snapshot-inspect list {parent.url}" in ran.err
    nothing = run("list", f"{parent.url}/other")
    assert nothing.code == 10 and "there is no store at" in nothing.err


@pytest.mark.usefixtures("s3_environment")
def test_one_store_that_may_not_be_read_is_one_row(
    moto: Server, proxy: FaultProxy, fresh_prefix: Callable[[], str], monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """S6: the keys of the others are readable; one denied store does not cost the list."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    parent = S3Store(BUCKET, fresh_prefix(), endpoint_url=moto.url)
    for name in ("mine", "theirs"):
        for key, data in stores.objects_of(made(stores.one_snapshot)).items():
            parent.under(f"{parent.prefix}/{name}").put_new(key, data)

    def denied(seen: Seen) -> Any:
        at_theirs = "/theirs/" in seen.path or any("/theirs/" in p for p in seen.query.get("prefix", []))
        return Answer(403, "AccessDenied") if at_theirs else PASS_ON

    proxy.plan = denied
    ran = run("list", parent.url, "--json")
    (mine, theirs) = rows_of(ran)
    assert ran.code == 3 and mine[:3] == ("mine", 3, 0)
    assert theirs[:3] == ("theirs", None, 12) and theirs[3]


def test_work_side_by_side_keeps_its_order_and_ends_with_the_first_error() -> None:
    assert side_by_side(lambda n: n * n, range(50)) == [n * n for n in range(50)]

    def fails(n: int) -> int:
        if n == 3:
            raise StoreUnavailable("no answer")
        return n

    with pytest.raises(StoreUnavailable):
        side_by_side(fails, range(1000))


def test_a_store_that_fails_in_an_unforeseen_way_is_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program error is not hidden in a table."""
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    monkeypatch.setattr(parents, "_is_marked", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        parents.below(stores.LocalStore(tmp_path))


def test_in_a_pipe_there_is_a_plain_row_for_each(tmp_path: Path) -> None:
    for name in ("x", "y"):
        stores.on_disk(tmp_path / name, stores.objects_of(made(stores.several)))
    done = subprocess.run(program("list", str(tmp_path)), capture_output=True, env=environment(), timeout=240)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and [line.split()[0] for line in lines] == ["store", "x", "y"]
