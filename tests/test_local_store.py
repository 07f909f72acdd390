"""LocalStore: the contract of every store; durability, crashes, full disks, foreign files; how a root is opened."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    Damaged,
    NoStore,
    ObjectMissing,
    OutcomeUnknown,
    RecoveryError,
    StoreFull,
    StoreUnavailable,
)
from recovery.ports import Listed, ObjectStore, Put
from storage_backends import open_store, temporaries
from storage_backends.local import LocalStore
from storage_backends.testing import writers
from storage_backends.testing.conformance import StoreConformance, in_threads
from storage_backends.testing.writers import DATA, POINTS, Point, start_at


class TestLocalStore(StoreConformance):
    def make_store(self, folder: Path) -> LocalStore:
        return LocalStore(folder)

    def raw_put(self, store: ObjectStore, key: str, data: bytes) -> None:
        assert isinstance(store, LocalStore)
        path = Path(store.root, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_get(self, store: ObjectStore, key: str) -> bytes | None:
        assert isinstance(store, LocalStore)
        path = Path(store.root, key)
        return path.read_bytes() if path.exists() else None

    def raw_keys(self, store: ObjectStore) -> set[str]:
        assert isinstance(store, LocalStore)
        root = Path(store.root)
        files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        assert not [name for name in files if name.startswith(".tmp/")], "an unfinished file was left"
        return files


class TestLocalStoreWithoutHardLinks(TestLocalStore):
    """The same on a file system whose link(2) is refused: rename without replacing takes its place."""

    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def link(*args: Any, **options: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", link)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def unfinished(root: Path | str) -> list[str]:
    folder = Path(root, ".tmp")
    return sorted(os.listdir(folder)) if folder.exists() else []


# ---- the order of system calls ------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the store asked the system for, in order, with paths relative to the root."""
    seen: list[str] = []
    root = os.path.realpath(tmp_path)

    def name_of(fd: int) -> str:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return "TEMP" if "/.tmp/" in path else os.path.relpath(path, root)

    def watch(verb: str) -> None:
        real = getattr(os, verb)

        def call(fd: int, *args: Any) -> Any:
            seen.append(f"{verb} {name_of(fd)}")
            return real(fd, *args)

        monkeypatch.setattr(os, verb, call)

    watch("write")
    watch("fsync")
    real_link, real_open = os.link, os.open

    def link(src: str, dst: str, **options: Any) -> None:
        seen.append(f"link {dst}")
        real_link(src, dst, **options)

    def open_file(path: Any, flags: int, *args: Any, **options: Any) -> int:
        assert not flags & os.O_TRUNC, "no file is ever truncated"
        assert not flags & os.O_CREAT or flags & os.O_EXCL, "every file that is written is new"
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os, "open", open_file)
    return seen


def test_a_create_is_written_synced_linked_and_its_folders_synced(store: LocalStore, calls: list[str]) -> None:
    store.put_new("a/b/c", b"data")
    assert calls == ["fsync .", "write TEMP", "fsync TEMP", "fsync .", "fsync a", "link c", "fsync a/b"]
    calls.clear()
    store.put_new("a/b/d", b"data")
    assert calls == ["write TEMP", "fsync TEMP", "link d", "fsync a/b"]
    calls.clear()
    assert store.put_new("a/b/d", b"other") is Put.EXISTS
    assert calls[-1] == "fsync a/b", "an object that another writer has just named is on disk before we say so"


def test_folders_that_another_process_made_are_synced_too(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    LocalStore(tmp_path).put_new("a/b/c", b"data")
    assert {"fsync .", "fsync a", "fsync a/b"} <= set(calls)


def test_short_writes_are_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:1000]))
    store.put_new("a", DATA[:5500])
    assert store.get("a") == DATA[:5500]


def test_readers_never_see_part_of_a_file(store: LocalStore) -> None:
    """A file that can be opened under its final name is whole, whatever moment it is opened at."""
    path = Path(store.root, "log", "big")
    data = DATA * 4
    running = [True]

    def work(index: int) -> None:
        if index == 0:
            try:
                for _ in range(25):
                    store.put_new("log/big", data)
                    store.delete("log/big")
            finally:
                running.clear()
        while running:
            try:
                assert path.read_bytes() == data
            except FileNotFoundError:
                continue

    in_threads(3, work)


# ---- F1: full and failing disks -------------------------------------------------------------------------------------


def fail(monkeypatch: pytest.MonkeyPatch, verb: str, code: int, *, kind: Callable[[int], bool], after: int = 0) -> None:
    """Make os.<verb> fail with `code` on descriptors of this kind, after so many calls that work."""
    real = getattr(os, verb)
    left = [after]

    def call(fd: Any, *args: Any, **options: Any) -> Any:
        if verb == "link" or kind(os.fstat(fd).st_mode):
            if left[0] == 0:
                if verb == "close":
                    real(fd)
                raise OSError(code, os.strerror(code))
            left[0] -= 1
        return real(fd, *args, **options)

    monkeypatch.setattr(os, verb, call)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, StoreFull),
        (errno.EDQUOT, StoreFull),
        (errno.EFBIG, StoreFull),
        (errno.EROFS, CredentialsRefused),
        (errno.EACCES, CredentialsRefused),
        (errno.EIO, StoreUnavailable),
        (errno.ESTALE, StoreUnavailable),
    ],
)
@pytest.mark.parametrize("verb", ["write", "fsync", "close", "link"])
def test_f1_a_failure_at_each_step_leaves_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, verb: str, code: int, expected: type[RecoveryError]
) -> None:
    store.put_new("log/before", b"intact")
    with monkeypatch.context() as patch:
        fail(patch, verb, code, kind=stat.S_ISREG)
        with pytest.raises(expected) as caught:
            store.put_new("log/new", DATA)
    assert os.path.join(store.root, "log/new") in caught.value.message
    assert caught.value.hint
    assert store.list("") == [Listed("log/before", 6)]
    assert unfinished(store.root) == []
    assert store.put_new("log/new", DATA) is Put.CREATED


def test_f1_disk_full_in_the_middle_of_the_bytes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        real = os.write
        patch.setattr(os, "write", lambda fd, data: real(fd, data[:4096]))
        fail(patch, "write", errno.ENOSPC, kind=stat.S_ISREG, after=3)
        with pytest.raises(StoreFull, match="no space is left"):
            store.put_new("a", DATA)
    assert unfinished(store.root) == [] and store.list("") == []


def test_f1_disk_full_while_overwriting_keeps_the_old(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("hint", b"old")
    with monkeypatch.context() as patch:
        fail(patch, "fsync", errno.ENOSPC, kind=stat.S_ISREG)
        with pytest.raises(StoreFull):
            store.put("hint", b"new")
    assert store.get("hint") == b"old" and unfinished(store.root) == []


def test_f1_a_failed_sync_of_the_folder_leaves_the_outcome_open(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_new("log/before", b"")
    with monkeypatch.context() as patch:
        fail(patch, "fsync", errno.EIO, kind=stat.S_ISDIR)
        with pytest.raises(OutcomeUnknown, match="log/new"):
            store.put_new("log/new", b"whole")
    assert store.get("log/new") == b"whole" and unfinished(store.root) == []


def test_f1_the_first_error_wins_when_cleaning_up_fails_too(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail(patch, "write", errno.ENOSPC, kind=stat.S_ISREG)

        def unlink(*args: Any, **options: Any) -> None:
            raise OSError(errno.EIO, "unlink fails")

        patch.setattr(os, "unlink", unlink)
        with pytest.raises(StoreFull):
            store.put_new("a", b"x")
    assert len(unfinished(store.root)) == 1 and store.list("") == []


def check_full(report: dict[str, Any], sizes: Callable[[int], int]) -> None:
    assert report["error"] == "StoreFull", report
    assert report["created"], report
    assert report["listed"] == {key: sizes(n) for n, key in enumerate(report["created"])}
    assert report["unfinished"] == []
    assert report["again"] == "created"


def test_f1_a_real_limit_on_file_size(tmp_path: Path) -> None:
    """RLIMIT_FSIZE gives a short write and then EFBIG."""
    process = writers.start("fill", str(tmp_path), "1000", "100000")
    out, err = process.communicate()
    assert process.returncode == 0, err
    report = json.loads(out)
    check_full(report, lambda n: 1000 << n)
    assert len(report["created"]) == 7 and "ulimit -f" in report["message"]


def test_f1_a_real_full_disk(tmp_path: Path) -> None:
    """A tmpfs of half a MiB in a mount namespace of its own; where no mount is permitted, a limit on file size."""
    script = 'mount -t tmpfs -o size=512k tmpfs "$1" && shift && exec "$@"'
    for namespace in (["unshare", "-m"], ["unshare", "-rm"]):
        prefix = [*namespace, "sh", "-c", script, "sh", str(tmp_path)]
        if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
            continue
        process = writers.start("fill", str(tmp_path), "65536", "0", prefix=prefix)
        out, err = process.communicate()
        assert process.returncode == 0, err
        report = json.loads(out)
        check_full(report, lambda n: 65536)
        assert "no space is left" in report["message"]
        return
    test_f1_a_real_limit_on_file_size(tmp_path)


# ---- crashes, C10 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_c10_kill_9_in_mid_write_leaves_no_partial_object(tmp_path: Path, point: Point) -> None:
    store = LocalStore(tmp_path)
    whole = [Listed("log/x", len(DATA))] if point == "linked" else []
    process = start_at("stall", str(tmp_path), "log/x", point)
    try:
        assert store.list("") == whole
        assert len(unfinished(tmp_path)) == 1
        assert store.sweep_temporaries() == 0, "its writer lives"
        assert store.put_new("log/y", b"others go on") is Put.CREATED
    finally:
        process.kill()
        process.communicate()
    assert store.list("") == [*whole, Listed("log/y", 12)]
    assert len(unfinished(tmp_path)) == 1
    open_store(str(tmp_path), create=True)
    assert unfinished(tmp_path) == []
    assert store.put_new("log/x", DATA) is (Put.EXISTS if whole else Put.CREATED)
    assert store.get("log/x") == DATA


def test_c10_a_zombie_is_dead(tmp_path: Path) -> None:
    process = start_at("stall", str(tmp_path), "log/x", "synced")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert LocalStore(tmp_path).sweep_temporaries() == 1
    process.communicate()


def leave(root: Path, name: str, *, age_s: float = 0) -> Path:
    path = root / ".tmp" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(1 << 16))
    if age_s:
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return path


def test_c10_a_hundred_crashes_leave_bounded_bytes(tmp_path: Path) -> None:
    """Each run opens the store and dies in mid-write: a few for real, the others as files that such runs leave."""
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    for number in range(100):
        if number % 30 == 0:
            process = writers.start("crash", str(tmp_path), f"log/{number}", "half-written")
            process.communicate()
            assert process.returncode == 3
        else:
            open_store(str(tmp_path), create=True)
            leave(tmp_path, f"{temporaries.host()}.{dead.stdout.strip()}.{number + 1}.{number:016x}")
        assert len(unfinished(tmp_path)) == 1, "no more than what the last run left"
        assert LocalStore(tmp_path).list("") == []
    open_store(str(tmp_path), create=True)
    assert unfinished(tmp_path) == []


def test_c10_crashes_on_other_machines_are_bounded_by_number_and_age(tmp_path: Path) -> None:
    for number in range(100):
        leave(tmp_path, f"node-{number}.77.123456.{number:016x}", age_s=1000 - number)
    store = LocalStore(tmp_path)
    assert store.sweep_temporaries() == 100 - temporaries.OTHERS_MAX
    assert unfinished(tmp_path) == sorted(f"node-{n}.77.123456.{n:016x}" for n in range(36, 100)), "the newest stay"
    for path in (tmp_path / ".tmp").iterdir():
        os.utime(path, (path.stat().st_mtime - temporaries.AGE_S,) * 2)
    assert store.sweep_temporaries() == temporaries.OTHERS_MAX
    assert unfinished(tmp_path) == []


def test_c10_the_sweep_keeps_what_is_foreign_or_alive(tmp_path: Path) -> None:
    mine = leave(tmp_path, temporaries.new_name(), age_s=10**7)
    other = leave(tmp_path, "node-1.77.123456.00000000000000aa", age_s=3600)
    foreign = leave(tmp_path, "notes.txt", age_s=10**7)
    pid = os.getpid()
    reused = leave(tmp_path, f"{temporaries.host()}.{pid}.{temporaries.start_time(pid) - 1}.00000000000000ab")
    (tmp_path / ".tmp" / "a-folder").mkdir()
    assert LocalStore(tmp_path).sweep_temporaries() == 1
    assert not reused.exists(), "another process has its number now"
    assert mine.exists() and other.exists() and foreign.exists()
    assert LocalStore(tmp_path).list("") == []


def test_c10_a_sweep_of_nothing(tmp_path: Path) -> None:
    assert LocalStore(tmp_path).sweep_temporaries() == 0


@pytest.fixture
def lossy_link(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """os.link finds its temporary file deleted as often as the number in this list says."""
    times, real = [0], os.link

    def link(src: str, dst: str, *, src_dir_fd: int, **options: Any) -> None:
        if times[0]:
            times[0] -= 1
            os.unlink(src, dir_fd=src_dir_fd)
        real(src, dst, src_dir_fd=src_dir_fd, **options)

    monkeypatch.setattr(os, "link", link)
    return times


def test_c10_a_temporary_file_swept_by_mistake_is_written_again(store: LocalStore, lossy_link: list[int]) -> None:
    lossy_link[0] = 2
    assert store.put_new("a", DATA) is Put.CREATED
    assert store.get("a") == DATA
    lossy_link[0] = 100
    with pytest.raises(StoreUnavailable, match="disappeared"):
        store.put_new("b", DATA)
    assert store.list("") == [Listed("a", len(DATA))]


# ---- races and processes --------------------------------------------------------------------------------------------


def test_race_of_processes_has_one_winner_per_key(tmp_path: Path) -> None:
    n_keys = 60
    processes = [start_at("race", str(tmp_path), str(n_keys)) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [json.loads(process.communicate()[0]) for process in processes]
    assert sorted(number for part in won for number in part) == list(range(n_keys))
    store = LocalStore(tmp_path)
    for process, numbers in zip(processes, won, strict=True):
        assert all(store.get(f"race/{n:04d}") == str(process.pid).encode() * 1000 for n in numbers)


def test_two_stores_on_one_root_are_one_store(tmp_path: Path) -> None:
    one, two = LocalStore(tmp_path), LocalStore(str(tmp_path) + "/./")
    assert one.put_new("a/b", b"1") is Put.CREATED
    assert two.put_new("a/b", b"2") is Put.EXISTS
    two.delete("a/b")
    assert one.list("") == []
    shutil.rmtree(tmp_path / "a")
    assert one.put_new("a/b", b"3") is Put.CREATED, "a folder that was removed is made again"


def test_s4_a_store_is_used_on_both_sides_of_a_fork(store: LocalStore) -> None:
    store.put_new("a/parent", b"1")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if store.put_new("a/child", b"2") is Put.CREATED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [item.key for item in store.list("a/")] == ["a/child", "a/parent"]


def test_an_answer_of_link_that_nfs_lost_is_recognised(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise FileExistsError(errno.EEXIST, "the server had done it already")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        assert store.put_new("a", b"1") is Put.CREATED
    assert store.put_new("a", b"2") is Put.EXISTS
    assert store.get("a") == b"1"


def test_f7_a_file_system_that_cannot_create_exclusively_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*args: Any, **options: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    class NoRename:
        def __init__(self, *args: Any, **options: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        patch.setattr(ctypes, "CDLL", NoRename)
        with pytest.raises(ConfigError, match="neither link nor rename"):
            store.put_new("a", b"1")
    assert store.list("") == [] and unfinished(store.root) == []


# ---- N1, C11: what does not belong to the store ---------------------------------------------------------------------


@pytest.fixture
def outside() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "secret").write_bytes(b"secret")
        yield Path(folder)


def test_n1_foreign_names_are_passed_over_and_stay(store: LocalStore, outside: Path) -> None:
    root = Path(store.root)
    store.put_new("snap/x", b"ours")
    foreign = [".DS_Store", "x (copy)", "snap/x (copy)", "snap/X", "lost+found/a", "lost+found/b/c", "Log/a", "é"]
    for name in foreign:
        (root / name).parent.mkdir(exist_ok=True, parents=True)
        (root / name).write_bytes(b"foreign")
    (root / "snap" / "link").symlink_to(outside / "secret")
    (root / "linked").symlink_to(outside)
    os.mkfifo(root / "snap" / "fifo")
    (root / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"foreign")
    assert store.list("") == [Listed("snap/x", 4)]
    assert store.list("linked/") == [] == store.list("snap/link")
    with pytest.raises(ObjectMissing):
        store.get("snap/fifo")
    store.delete("snap/fifo")
    store.delete("snap")
    store.delete("snap/x")
    store.sweep_temporaries()
    assert all((root / name).read_bytes() == b"foreign" for name in foreign)
    assert (root / "snap" / "fifo").exists() and (outside / "secret").read_bytes() == b"secret"


def test_c11_a_link_out_of_the_root_is_refused(store: LocalStore, outside: Path) -> None:
    root = Path(store.root)
    (root / "seg").symlink_to(outside)
    (root / "hint").symlink_to(outside / "secret")
    for key, link, target in (("seg/secret", "seg", outside), ("hint", "hint", outside / "secret")):
        for call in (lambda key=key: store.get(key), lambda key=key: store.delete(key)):
            with pytest.raises(Damaged) as caught:
                call()
            assert f"{root / link} is a symbolic link to {target}" in caught.value.message
            assert "remove the link" in caught.value.hint
        with pytest.raises(Damaged):
            store.put_new(key, b"x")
    with pytest.raises(Damaged):
        store.put_new("seg/new", b"x")
    with pytest.raises(Damaged):
        store.put("seg/new", b"x")
    assert sorted(os.listdir(outside)) == ["secret"] and (outside / "secret").read_bytes() == b"secret"
    assert unfinished(root) == []


def test_c11_a_dangling_link_in_the_tree_is_named(store: LocalStore) -> None:
    Path(store.root, "log").symlink_to("nowhere")
    with pytest.raises(Damaged, match="log is a symbolic link to nowhere"):
        store.get("log/000000000001.json")


def test_files_and_folders_in_each_others_place(store: LocalStore) -> None:
    store.put_new("a", b"file")
    store.put_new("b/c", b"file")
    with pytest.raises(Damaged, match="a file stands where a folder has to be"):
        store.put_new("a/x", b"")
    for write in (store.put_new, store.put):
        with pytest.raises(Damaged, match="a folder stands where a file has to be"):
            write("b", b"")
    assert [item.key for item in store.list("")] == ["a", "b/c"] and unfinished(store.root) == []


def test_list_goes_on_when_a_folder_vanishes(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a/1", "b/1", "b/c/1", "d/1"):
        store.put_new(key, b"")
    real = store._tree.entries

    def entries(folder: str) -> list[Any]:
        found = list(real(folder))
        if folder == "":
            shutil.rmtree(Path(store.root, "b"))
        return found

    monkeypatch.setattr(store._tree, "entries", entries)
    assert [item.key for item in store.list("")] == ["a/1", "d/1"]


def test_a_root_that_is_gone_is_not_an_empty_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    for call in (
        lambda: store.list(""),
        lambda: store.get("a"),
        lambda: store.put_new("a", b""),
        lambda: store.put("a", b""),
        lambda: store.delete("a"),
        store.sweep_temporaries,
    ):
        with pytest.raises(StoreUnavailable, match="is gone"):
            call()
    assert not (tmp_path / "root").exists()


# ---- open_store -----------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_no_store_and_the_hint_says_what_makes_one(tmp_path: Path) -> None:
    for path in (tmp_path / "no", tmp_path / "no" / "such"):
        with pytest.raises(NoStore) as caught:
            open_store(str(path))
        assert str(tmp_path / "no") in caught.value.message
        assert "prefix-recovery run" in caught.value.hint
    assert os.listdir(tmp_path) == []


def test_create_makes_the_folder_and_those_above(tmp_path: Path) -> None:
    assert open_store(str(tmp_path / "a" / "b" / "c"), create=True).put_new("x", b"1") is Put.CREATED
    assert open_store(tmp_path / "a" / "b" / "c").get("x") == b"1"
    open_store(str(tmp_path / "a" / "b" / "c"), create=True)


def test_a_file_in_the_place_of_a_root_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file, file / "below"):
        with pytest.raises(NoStore, match="file is a file, not a folder"):
            open_store(str(path))
        with pytest.raises(ConfigError, match="file is a file, not a folder"):
            open_store(str(path), create=True)


def test_c11_a_dangling_link_as_root_is_named_with_its_target(tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(NoStore, match=r"latest is a symbolic link to .*gone, which does not exist") as caught:
        open_store(str(link))
    with pytest.raises(ConfigError, match=r"latest is a symbolic link to .*gone"):
        open_store(str(link), create=True)
    assert {NoStore.exit_code, ConfigError.exit_code, Damaged.exit_code} == {10, 2, 1} and caught.value.hint


def test_a_link_to_a_folder_is_a_fine_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    open_store(str(tmp_path / "link")).put_new("a", b"1")
    assert open_store(str(tmp_path / "real")).get("a") == b"1"


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Root may do everything; be nobody for a moment. Others already are what they are."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def forbidden() -> Iterator[Path]:
    # Not under TMPDIR: that may be closed to the ordinary user as a whole, and then its path is what is refused.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "closed").mkdir(mode=0o700)
    (folder / "closed" / "a").write_bytes(b"x")
    (folder / "closed").chmod(0o000)
    (folder / "readable").mkdir(mode=0o555)
    yield folder
    (folder / "closed").chmod(0o700)
    shutil.rmtree(folder)


def test_what_is_not_permitted_is_said_so(store: LocalStore, forbidden: Path, ordinary_user: None) -> None:
    for create in (False, True):
        with pytest.raises(CredentialsRefused, match="closed: permission denied") as caught:
            open_store(str(forbidden / "closed"), create=create)
        assert "ls -ld" in caught.value.hint
    with pytest.raises(CredentialsRefused, match="readable"):
        open_store(str(forbidden / "readable" / "new"), create=True)
    with pytest.raises(CredentialsRefused, match="permission denied"):
        open_store(str(forbidden / "readable")).put_new("a", b"")
    assert open_store(str(forbidden / "readable")).list("") == []
    with pytest.raises(CredentialsRefused, match="closed"):
        LocalStore(forbidden).list("")


@pytest.mark.parametrize(
    "name", ["a b", "a+b", "a%2Fb", "a#b", "a:b", "a?b", "🙂", "\u00e9", "e\u0301", "x" * 255, "s3"]
)
def test_n6_roots_of_any_name_are_taken_literally(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    open_store(str(path), create=True).put_new("k", b"1")
    assert os.listdir(tmp_path) == [name]
    assert open_store(path.as_uri()).get("k") == b"1", "a file address is decoded"
    assert open_store("file://localhost" + path.as_uri()[7:]).get("k") == b"1"


def test_a_path_may_be_relative_or_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    relative = open_store("run", create=True)
    open_store("~/run", create=True).put_new("k", b"1")
    monkeypatch.chdir("/")
    relative.put_new("k", b"1")
    assert (tmp_path / "run" / "k").exists() and (tmp_path / "home" / "run" / "k").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gs://bucket/run", "gs:// are not supported"),
        ("s3:/bucket", "neither an address nor clearly a path"),
        ("file:/a/x", "neither an address nor clearly a path"),
        ("file://host/x", "'host' is read as a machine's name"),
        ("memory://", "needs a name"),
        ("", "no address"),
        ("a\0b", "no address"),
    ],
)
def test_other_addresses_are_refused_by_name(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_store(url, create=True)
    assert caught.value.hint


def test_importing_the_package_loads_no_storage_system() -> None:
    heavy = ["pyarrow", "zarr", "fsspec", "hypothesis", "pytest", "google_crc32c", "storage_backends.local"]
    script = f"import sys, storage_backends; sys.exit(str([m for m in {heavy} if m in sys.modules] or ''))"
    done = subprocess.run([sys.executable, "-c", script], env=writers.environment(), capture_output=True, text=True)
    assert done.stderr.strip() == ""
