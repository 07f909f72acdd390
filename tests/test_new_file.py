"""snapshot_inspect.new_file: a name for a whole file, or nothing; nothing written over unasked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recovery.errors import ConfigError, CredentialsRefused, StoreFull
from snapshot_inspect import new_file as module
from snapshot_inspect.new_file import new_file
from storage_backends import temporaries


def write(path: Path, data: bytes, *, replace: bool = False) -> None:
    with new_file(str(path), replace=replace) as fd:
        os.write(fd, data)


def test_the_name_is_there_when_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with new_file(str(path), replace=False) as fd:
        os.write(fd, b"1")
        assert not path.exists() and len(list(tmp_path.iterdir())) == 1
        assert os.pread(fd, 5, 0) == b"1", "it can be read back meanwhile"
    assert path.read_bytes() == b"1" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_c10_what_a_killed_writer_left_goes_with_the_next_file_and_nothing_else_does(tmp_path: Path) -> None:
    """A file of a writer that lives stays, and so does what only looks like one."""
    dead = temporaries.new_name(module.UNFINISHED).replace(f".{os.getpid()}.", ".2147483646.")
    alive = temporaries.new_name(module.UNFINISHED)
    others = [temporaries.new_name(), dead.removeprefix("."), ".export-notes", "x" + dead]
    for name in (dead, alive, *others):
        (tmp_path / name).write_bytes(b"?")
    write(tmp_path / "x", b"1")
    assert sorted(os.listdir(tmp_path)) == sorted([alive, *others, "x"])


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("error", [ConfigError("no"), KeyboardInterrupt()])
def test_what_fails_leaves_what_was_there(tmp_path: Path, replace: bool, error: BaseException) -> None:
    path = tmp_path / "x"
    if replace:
        path.write_bytes(b"old")
    with pytest.raises(type(error)), new_file(str(path), replace=replace) as fd:
        os.write(fd, b"new")
        raise error
    assert [item.read_bytes() for item in tmp_path.iterdir()] == ([b"old"] if replace else [])


def test_an_existing_name_is_refused_also_if_it_appears_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(ConfigError, match="is there already"):
        write(path, b"new")
    other = tmp_path / "y"
    with pytest.raises(ConfigError, match="is there already"), new_file(str(other), replace=False) as fd:
        os.write(fd, b"new")
        other.write_bytes(b"theirs")
    assert other.read_bytes() == b"theirs" and sorted(tmp_path.iterdir()) == [path, other]
    write(path, b"new", replace=True)
    assert path.read_bytes() == b"new"


def test_only_plain_files_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        for replace in (False, True):
            with pytest.raises(ConfigError, match=r"is a folder|is no plain file"):
                write(tmp_path / name, b"", replace=replace)
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write(tmp_path / "link", b"new", replace=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"new"
    with pytest.raises(ConfigError, match="there is no folder for"):
        write(tmp_path / "missing" / "x", b"")


@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
def test_f1_no_room_at_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "x"

    def full(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, step, full)
    with pytest.raises(StoreFull, match="no space is left"):
        write(path, b"1", replace=step == "replace")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it to whoever is not root."""
    real = os.open

    def refused(path: str, flags: int, *more: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *more, **named)

    monkeypatch.setattr(module.os, "open", refused)
    with pytest.raises(CredentialsRefused, match="permission denied"):
        write(tmp_path / "x", b"1")


@pytest.mark.parametrize("name", ["n" * 256, "a\0b", "n" * 5000])
def test_what_cannot_be_a_name_is_refused_as_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a file"):
        write(tmp_path / name, b"new")


@pytest.mark.parametrize("inside", ["format.json", "log/000000000001.json", "seg/new.zip", ".tmp/x", "new.zip"])
def test_nothing_is_written_into_a_store(tmp_path: Path, inside: str) -> None:
    """Forced or not: what lies there is an object, and what is new would be taken for one."""
    for key in ("format.json", "log/000000000001.json"):
        (tmp_path / "s" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "s" / key).write_bytes(b"{}")
    (tmp_path / "s/seg").mkdir()
    (tmp_path / "s/.tmp").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "s" / inside)
    for path in (tmp_path / "s" / inside, tmp_path / "link"):
        with pytest.raises(ConfigError, match="would lie in the store"):
            write(path, b"new", replace=True)
    assert (tmp_path / "s/format.json").read_bytes() == b"{}" and not list((tmp_path / "s").rglob(".export-*"))
