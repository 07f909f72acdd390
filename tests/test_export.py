"""`snapshot-inspect export`: one snapshot whole in one file, in either encoding, the same bytes each time.

Owns: what is in a file, and that nothing else is needed to read it.
Does not know: the file's own shape (test_archive.py), import (test_import.py), JSON lines (test_json_lines.py).

Invariants:
1. A file is read by the standard library's zipfile and by the independent reader, not only by what wrote it.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import StoreUnavailable
from recovery.model import PolicyVersion
from recovery.ports import ObjectStore
from snapshot_inspect import carrying, cli, live_records, progress
from storage_backends.archive import ArchiveStore
from storage_backends.codecs import CodecName
from storage_backends.memory import MemoryStore, named
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseBefore
from tests import inspect_stores as stores
from tests.carried_stores import content, rich
from tests.independent_reader import check_everything, read_store
from tests.inspect_stores import made
from tests.test_independent_reader import EXPECTED, NEWEST, STORE, check, independent
from tests.test_inspect_cli import environment, on_terminal, program
from tests.test_inspect_screens import VALIDATORS, Ran, opened_as, run_once

Export = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Export:
    """Exports a store; gives the file and what was said of it."""
    numbers = iter(range(1000))

    def work(store: ObjectStore, *words: str) -> tuple[Path, dict[str, Any]]:
        path = tmp_path / f"{next(numbers)}.zip"
        first, rest = [w for w in words if w.isdecimal()], [w for w in words if not w.isdecimal()]
        with monkeypatch.context() as patched:
            opened_as(patched, store)
            ran = run_once(capsys, "export", "STORE", *first, str(path), *rest, "--json")
        assert ran.code == 0, ran
        (document,) = ran.documents
        VALIDATORS["export"].validate(document)
        return path, document

    return work


MIXTURES = [("arrow", "arrow"), ("zarr", "zarr"), ("arrow", "zarr"), ("zarr", "arrow")]


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda codecs: "-".join(codecs))
@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_whatever_mixture_a_store_has_the_content_is_the_same(
    codec: str, mixture: tuple[CodecName, CodecName], export: Export
) -> None:
    """Calls, requests, chunks and their digests, wide columns, versions, logprobs bit by bit, ends, states."""
    store = made(lambda empty: rich(empty, *mixture))
    path, document = export(store, "--codec", codec)
    archive = ArchiveStore(str(path))
    assert content(archive) == content(store)
    segments = [item.key for item in archive.list("seg/")]
    assert segments and all(key.endswith(f".{codec}") for key in segments)
    assert document["codec"] == codec and document["counts"]["calls"] == 5
    assert cli.main(["verify", str(path), "--read-data"]) == 0


def test_without_a_choice_the_encoding_is_that_of_the_newest_segment(export: Export) -> None:
    for mixture in MIXTURES:
        _, document = export(made(lambda empty, mixture=mixture: rich(empty, *mixture)))
        assert document["codec"] == mixture[1]
    assert export(made(stores.empty_snapshot))[1]["codec"] == "arrow"


def test_the_same_snapshot_is_the_same_bytes_from_any_store_that_has_it(export: Export) -> None:
    """Twice, and whatever the encodings of the store are."""
    files = [
        export(made(lambda empty, mixture=mixture: rich(empty, *mixture)), "--codec", "arrow")[0].read_bytes()
        for mixture in (*MIXTURES, MIXTURES[0])
    ]
    assert len(set(files)) == 1
    store = made(rich)
    assert export(store, "5")[0].read_bytes() != export(store, "4")[0].read_bytes()


def test_a_file_is_a_minimal_store_and_others_read_it(export: Export, tmp_path: Path) -> None:
    """A golden store, unpacked by zipfile: the reader made from the format's page alone finds the same calls."""
    store = stores.copy_of(stores.on_disk(tmp_path / "golden", _files(STORE)))
    path, document = export(store, str(NEWEST))
    assert document["snapshot"] == NEWEST
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        file.extractall(tmp_path / "unpacked")
    assert names[:2] == ["format.json", "log/000000000001.json"] and names[-1] == "log/000000000002.json"
    kinds = [name.split("/")[0] for name in names]
    assert kinds == sorted(kinds, key=["format.json", "log", "seg", "ledger", "state"].index) or kinds[-1] == "log"
    assert [kind for kind in kinds if kind not in ("seg", "state")] == ["format.json", "log", "ledger", "log"]
    read = read_store(tmp_path / "unpacked")
    assert read["snapshots"] == [2] and check_everything(tmp_path / "unpacked") == ([2], [])
    check(independent(read["snapshot"]), EXPECTED["snapshots"][str(NEWEST)]["calls"])


def _files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_only_what_the_snapshot_refers_to_goes_along(export: Export) -> None:
    """No superseded attempt, no dropped call, no terminal record, nothing of other snapshots; in few objects."""
    store = made(stores.collected)
    path, _ = export(store)
    archive = ArchiveStore(str(path))
    assert len(archive.list("seg/")) == 1 < len(store.list("seg/"))
    assert len(archive.list("")) == 6
    assert sum(item.nbytes for item in archive.list("seg/")) < sum(item.nbytes for item in store.list("seg/")) / 4


def test_the_slot_says_where_the_snapshot_was_taken(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    store = made(rich)
    path, document = export(store, "8")
    mark = json.loads(store.get("format.json"))
    body = json.loads(ArchiveStore(str(path)).get("log/000000000002.json"))["body"]
    origin = {"store_id": mark["store_id"], "snapshot": 8, "epoch": 2, "cause": "final", "owner": "host-a pid 2"}
    assert body["origin"] == {**origin, "utc": 1767229260.0, "adopted": 0} and body["cause"] == "export"
    assert document["origin"] == {**origin, "utc": "2026-01-01T01:01:00.000Z", "adopted": 0}
    (shown,) = run_once(capsys, "show", str(path), "latest", "--json").documents
    assert shown["origin"] == document["origin"] and shown["utc"] == "2026-01-01T01:01:00.000Z"
    assert "taken as snapshot 8 of store" in run_once(capsys, "latest", str(path)).out


def test_every_reading_verb_reads_a_file(export: Export, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = export(made(rich))
    for words in (["list"], ["show", "2"], ["latest", "--check"], ["verify"], ["calls"], ["cat", "p-2"], ["stats"]):
        ran = run_once(capsys, words[0], str(path), *words[1:])
        assert ran.code == 0 and ran.out, ran


# ---- what was flushed after the snapshot ---------------------------------------------------------------------------


def test_what_no_snapshot_names_is_told_and_goes_along_when_asked(export: Export) -> None:
    store = made(stores.crashed)
    path, document = export(store)
    assert "2 segments were flushed after this snapshot" in document["notes"][0]
    assert document["adopted"] == {"segments": 0, "tokens": 0} and document["counts"]["tokens"] == 11
    more, document = export(store, "--adopt")
    assert document["notes"] == [] and document["adopted"] == {"segments": 2, "tokens": 3}
    assert document["counts"]["tokens"] == 14 and document["origin"]["adopted"] == 3
    restored = stores.Job(store, 2, keep=8)
    restored.close()
    theirs, ours = content(store), content(ArchiveStore(str(more)))
    assert [call[3] for call in ours["calls"]] == [call[3] for call in theirs["calls"]], "what a restore adopts"
    assert path.read_bytes() != more.read_bytes()


def test_an_older_snapshot_adopts_nothing(
    export: Export, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = made(stores.crashed)
    assert export(store, "4")[1]["notes"] == []
    opened_as(monkeypatch, store)
    ran = run_once(capsys, "export", "STORE", "4", str(tmp_path / "x.zip"), "--adopt")
    assert ran.code == 2 and "--adopt adds to the latest snapshot, not to 4" in ran.err


# ---- size ----------------------------------------------------------------------------------------------------------


def large(n_calls: int, rounds: int, tokens: int, codec: CodecName = "arrow") -> MemoryStore:
    """Many flushes: of each segment one batch or more, calls that go on for long."""
    store = MemoryStore()
    job = stores.Job(store, keep=8, codec=codec)
    calls = [job.open(f"p-{n}", sampling={"max_tokens": 1 << 20}) for n in range(n_calls)]
    for turn in range(rounds):
        for n, call in enumerate(calls):
            ids = [(turn * 7919 + n * 104729 + i * 31) % 150_000 for i in range(tokens)]
            call.append(ids, [-((i * 37 + n) % 1000) / 512 for i in ids], PolicyVersion("a", turn // 4))
        job.snapshot()
    job.close()
    return store


def test_memory_does_not_grow_with_the_tokens_of_the_store(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 256 kB, segments read batch by batch: 6 MB of tokens more take what their coordinates take."""
    monkeypatch.setattr(carrying, "GROUP_BYTES", 256 << 10)
    monkeypatch.setattr(live_records, "WHOLE_BYTES_MAX", 0)
    peaks = []
    for rounds in (4, 16):
        store = large(40, rounds, 1500)
        tracemalloc.start()
        path, document = export(store)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert document["counts"]["tokens"] == 40 * rounds * 1500
        assert len(ArchiveStore(str(path)).list("seg/")) >= rounds
        assert content(ArchiveStore(str(path))) == content(store)
    assert peaks[1] < peaks[0] + (1 << 20), peaks


def test_large_segments_are_read_by_batches_and_only_those_that_are_needed(
    export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = large(150, 2, 20)
    monkeypatch.setattr(live_records, "WHOLE_BYTES_MAX", 0)
    counting = CountingStore(store)
    path, _ = export(counting, "3")
    reads = [call for call in counting.log if call.verb == "get" and call.key.startswith("seg/")]
    first = store.list("seg/")[0]
    assert {call.key for call in reads} == {first.key} and len(reads) == 5, "300 records in batches of 64"
    assert all(call.nbytes < first.nbytes / 2 for call in reads)
    assert content(ArchiveStore(str(path))) == content(store, 3)


# ---- what cannot be exported ---------------------------------------------------------------------------------------


def test_a_bar_on_a_terminal_and_lines_in_a_log(tmp_path: Path) -> None:
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    code, out = on_terminal("export", str(tmp_path / "s"), str(tmp_path / "x.zip"))
    assert code == 0 and "export: reading segments" in out
    now = [0.0]
    stream = io.StringIO()
    lines = progress.Lines(stream, lambda: now[0], verb="export", things="calls")
    lines.begin(3, 3000)
    now[0] = 20.0
    lines.advance(1000)
    assert stream.getvalue() == "export: 1 of 3 calls, 1.0 kB of 3.0 kB, 50 B/s, 40 s left\n"


def run_export(capsys: pytest.CaptureFixture[str], store: str, *words: str) -> Ran:
    ran = run_once(capsys, "export", store, *words)
    assert ran.out == "" or ran.code == 0
    return ran


@pytest.mark.parametrize("codec", ["arrow", "zarr"])
def test_damage_is_named_with_segment_call_and_tokens_and_leaves_no_file(
    codec: CodecName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = made(lambda empty: stores.several(empty, codec))
    key = stores.keys(store, "seg/")[1]
    root, out = tmp_path / "store", tmp_path / "out"
    out.mkdir()
    stores.on_disk(root, stores.objects_of(store))
    for mangled in (None, b"", store.get(key)[:-9], stores.flip(store.get(key), len(store.get(key)) // 2)):
        (root / key).unlink(missing_ok=True)
        if mangled is not None:
            (root / key).write_bytes(mangled)
        ran = run_export(capsys, str(root), str(out / "x.zip"))
        if ran.code == 0:  # the flipped byte is in no batch that is needed
            (out / "x.zip").unlink()
            continue
        assert ran.code == 1 and key in ran.err and "tokens 3 to 5 of call" in ran.err and "(p-1)" in ran.err, ran
        assert list(out.iterdir()) == []
        assert run_export(capsys, str(root), "3", str(out / "3.zip")).code == 0, "an older snapshot is sound"
        (out / "3.zip").unlink()


def test_a_slot_that_lies_about_its_job_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = made(stores.several)
    entry = json.loads(store.get("log/000000000005.json"))
    entry["body"]["fingerprint"] = "0" * 32
    stores.replace(store, "log/000000000005.json", json.dumps(entry).encode())
    stores.on_disk(tmp_path / "s", stores.objects_of(store))
    ran = run_export(capsys, str(tmp_path / "s"), str(tmp_path / "x.zip"))
    assert ran.code == 1 and "does not have the fingerprint of its job" in ran.err
    assert not (tmp_path / "x.zip").exists()


SITUATIONS = [
    (stores.empty, 14, "no snapshot was published in this store yet"),
    (lambda store: stores.with_newer(store), 13, "upgrade prefix-recovery"),
]


@pytest.mark.parametrize(("make", "code", "says"), SITUATIONS)
def test_every_situation_has_its_exit_code(
    make: Callable[[ObjectStore], Any], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.on_disk(tmp_path / "s", stores.objects_of(made(make)))
    ran = run_export(capsys, str(tmp_path / "s"), str(tmp_path / "x.zip"))
    assert ran.code == code and says in ran.err
    ran = run_export(capsys, str(tmp_path / "none"), str(tmp_path / "x.zip"))
    assert ran.code == 10
    ran = run_export(capsys, str(tmp_path / "s"), "17", str(tmp_path / "x.zip"))
    assert ran.code in (2, code) and ran.err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "there is no file to export to"),
        (["latest"], "there is no file to export to; ./latest is a file of that name"),
        (["5"], "there is no file to export to; ./5 is a file of that name"),
        (["-"], "is not written to stdout"),
        (["a", "b", "c"], "at most an ID before"),
        (["nonsense", "x.zip"], "'nonsense' is no snapshot"),
        (["9" * 5000, "x.zip"], "there is no snapshot 999"),
        (["x.zip", "--tokenizer", "d"], "--tokenizer is for --jsonl"),
        (["--jsonl", "x", "--codec", "zarr"], "--codec is for portable files"),
        (["5", "6", "--jsonl", "x"], "at most an ID before"),
    ],
)
def test_usage(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    ran = run_export(capsys, str(tmp_path / "s"), *words)
    assert ran.code == 2 and says in ran.err, ran
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores.on_disk(tmp_path / "s", stores.objects_of(made(stores.several)))
    path = tmp_path / "x.zip"
    path.write_bytes(b"mine")
    ran = run_export(capsys, str(tmp_path / "s"), str(path))
    assert ran.code == 2 and "is there already" in ran.err and "--force" in ran.err and path.read_bytes() == b"mine"
    assert run_export(capsys, str(tmp_path / "s"), str(path), "--force").code == 0
    assert content(ArchiveStore(str(path)))["calls"]


def test_a_store_in_memory_is_exported_by_its_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores.several(named("exported")).close()
    ran = run_export(capsys, "memory://exported", str(tmp_path / "x.zip"))
    assert ran.code == 0 and "3 calls (2 open, 1 ended)" in ran.out


def test_the_back_end_fails_at_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = made(stores.crashed)
    counting = CountingStore(store)
    opened_as(monkeypatch, counting)
    out = tmp_path / "out"
    out.mkdir()
    assert run_export(capsys, "STORE", str(tmp_path / "x.zip"), "--adopt").code == 0
    assert counting.count("put", "put_new", "delete") == 0, "the store is only read"
    for n in range(counting.count()):
        opened_as(monkeypatch, FaultyStore(store, iter([*[PASS] * n, RaiseBefore(StoreUnavailable("no answer"))])))
        ran = run_export(capsys, "STORE", str(out / "x.zip"), "--adopt")
        assert (ran.code, ran.err) == (20, "error: no answer\n") and list(out.iterdir()) == [], n


INTERRUPTED = """
import os, signal, sys
from snapshot_inspect import carrying
add = carrying.Group.add
def interrupted(self, use, record):
    os.kill(os.getpid(), signal.SIGINT)
    add(self, use, record)
carrying.Group.add = interrupted
from snapshot_inspect.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_interrupting_leaves_no_file(tmp_path: Path) -> None:
    root, out = tmp_path / "s", tmp_path / "out"
    out.mkdir()
    stores.on_disk(root, stores.objects_of(made(stores.several)))
    argv = [sys.executable, "-c", INTERRUPTED, "export", str(root), str(out / "x.zip"), "--json"]
    done = subprocess.run(argv, capture_output=True, env=environment(), timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")
    assert list(out.iterdir()) == []


def test_killing_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    root, out = tmp_path / "s", tmp_path / "out"
    out.mkdir()
    stores.on_disk(root, stores.objects_of(made(stores.several)))
    killed = INTERRUPTED.replace("SIGINT", "SIGKILL")
    argv = [sys.executable, "-c", killed, "export", str(root), str(out / "x.zip")]
    assert subprocess.run(argv, capture_output=True, env=environment(), timeout=240).returncode == -signal.SIGKILL
    assert [path.name.startswith(".export-") for path in out.iterdir()] == [True]
    done = subprocess.run(program("export", str(root), str(out / "x.zip")), env=environment(), timeout=240)
    assert done.returncode == 0 and os.listdir(out) == ["x.zip"], "what the killed one left is gone"
