"""LocalStore: the five verbs over a folder, durable and atomic on any POSIX file system.

Owns: the order of system calls that makes a create atomic and durable.
Does not know: what is stored, who else uses the folder, how a folder is reached (tree.py).

A create: a temporary file in `.tmp/`, all bytes, fsync, close, link to the final name, fsync of the name's folder.

Invariants:
1. A final name is only ever given to a complete and synced file; no final file is opened for writing.
2. When a write verb returns, the object and every folder above it are on disk. What failed before the final name was
   given leaves nothing; what failed after it is OutcomeUnknown.
3. `list` passes over links, special files, `.tmp` and every name that cannot be part of a key, and over folders that
   vanish under it. Nothing foreign is ever opened or deleted.
4. A temporary file that a sweep took by mistake is written again (temporaries.py, invariant 4).
5. A root that is gone is StoreUnavailable, never an empty store.
6. Safe in threads and after fork (tree.py, invariant 4).

Source of the recipe: link(2) as the exclusive create that also holds on NFS; fsync of the folder as in Litestream.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from recovery.errors import ObjectMissing, OutcomeUnknown, StoreUnavailable
from recovery.ports import Listed, Put
from storage_backends import temporaries
from storage_backends.keys import KEY_BYTES_MAX, TEMPORARY, check_key, check_prefix, check_range
from storage_backends.posix import link_new, told, write_all
from storage_backends.tree import Tree

_Listing = list[Listed]
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 4


class LocalStore:
    """An ObjectStore in folder `root`, which exists."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self._tree = Tree(self.root)

    def __repr__(self) -> str:
        return f"LocalStore({self.root!r})"

    def put_new(self, key: str, data: bytes) -> Put:
        parts = check_key(key)
        path = self._tree.path(key)
        with told("create", path):
            for _ in range(_ATTEMPTS):
                with self._temporary(data) as (src_fd, src), self._tree.folder(parts[:-1], make=True) as fd:
                    try:
                        outcome = link_new(src_fd, src, fd, parts[-1])
                    except FileNotFoundError:
                        continue
                    _sync_named(fd, path)
                    return outcome
        raise StoreUnavailable(
            f"cannot create {path}: its temporary file disappeared {_ATTEMPTS} times",
            hint=f"find out what deletes files in {self._tree.path(TEMPORARY)}",
        )

    def put(self, key: str, data: bytes) -> None:
        parts = check_key(key)
        with (
            told("write", self._tree.path(key)),
            self._temporary(data) as (src_fd, src),
            self._tree.folder(parts[:-1], make=True) as fd,
        ):
            os.replace(src, parts[-1], src_dir_fd=src_fd, dst_dir_fd=fd)
            os.fsync(fd)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        parts = check_key(key)
        check_range(start, end)
        path = self._tree.path(key)
        with told("read", path):
            try:
                with self._tree.folder(parts[:-1]) as folder:
                    fd = self._tree.open_file(folder, parts[-1], path)
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectMissing(
                    f"{path} does not exist", hint="`snapshot-inspect verify` shows what else is missing"
                ) from None
            try:
                return _read(fd, start, end, path)
            finally:
                os.close(fd)

    def list(self, prefix: str, after: str = "") -> _Listing:
        todo = [check_prefix(prefix)]
        found: list[Listed] = []
        while todo:
            folder = todo.pop()
            above = f"{folder}/" if folder else ""
            for name, status in self._tree.entries(folder):
                key = above + name
                if len(key) > KEY_BYTES_MAX or key == TEMPORARY:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    below = key + "/"
                    may_match = below.startswith(prefix) or prefix.startswith(below)
                    if may_match and (below > after or after.startswith(below)):
                        todo.append(key)
                elif stat.S_ISREG(status.st_mode) and key.startswith(prefix) and key > after:
                    found.append(Listed(key, status.st_size))
        found.sort()
        return found

    def delete(self, key: str) -> None:
        parts = check_key(key)
        path = self._tree.path(key)
        with told("delete", path):
            try:
                with self._tree.folder(parts[:-1]) as fd:
                    if stat.S_ISREG(self._tree.mode_of(fd, parts[-1], path)):
                        os.unlink(parts[-1], dir_fd=fd)
            except (FileNotFoundError, NotADirectoryError):
                return

    def modified_utc(self, key: str) -> float:
        """When the file system says that `key` was written. Raises ObjectMissing."""
        parts = check_key(key)
        path = self._tree.path(key)
        with told("read", path):
            try:
                with self._tree.folder(parts[:-1]) as fd:
                    return os.stat(parts[-1], dir_fd=fd, follow_symlinks=False).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                raise ObjectMissing(f"there is no object {key}") from None

    def sweep_temporaries(self) -> int:
        """Remove unfinished files whose writers are gone. Returns how many were removed."""
        with told("sweep", self._tree.path(TEMPORARY)):
            try:
                with self._tree.folder([TEMPORARY]) as fd:
                    return temporaries.sweep(fd)
            except FileNotFoundError:
                return 0

    def abandoned_temporaries(self) -> _Listing:
        """Unfinished files whose writers are gone: what `sweep_temporaries` would remove. No object is among them."""
        with told("list", self._tree.path(TEMPORARY)):
            try:
                with self._tree.folder([TEMPORARY]) as fd:
                    found = [(name, _size(name, fd)) for name in temporaries.abandoned(fd)]
            except FileNotFoundError:
                return []
        return [Listed(f"{TEMPORARY}/{name}", nbytes) for name, nbytes in sorted(found) if nbytes is not None]

    @contextmanager
    def _temporary(self, data: bytes) -> Iterator[tuple[int, str]]:
        """A complete, synced file in `.tmp`, as (folder, name); removed at the end whatever happens."""
        with self._tree.folder([TEMPORARY], make=True) as folder:
            name = temporaries.new_name()
            try:
                fd = os.open(name, _NEW_FILE, 0o666, dir_fd=folder)
                try:
                    write_all(fd, data)
                    os.fsync(fd)
                except BaseException:
                    with suppress(OSError):
                        os.close(fd)
                    raise
                os.close(fd)
                yield folder, name
            finally:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)


def _sync_named(fd: int, path: str) -> None:
    """Sync the folder of a name that is given already: from here on a failure leaves the outcome open."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise OutcomeUnknown(
            f"{path} has its name, but its folder could not be synced: {error.strerror}",
            hint="see `dmesg` for the disk; read the object back before deciding",
        ) from error


def _read(fd: int, start: int, end: int | None, path: str) -> bytes:
    """Bytes [start, end) of a file, as far as it reaches."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ObjectMissing(f"{path} is no file")
    stop = status.st_size if end is None else min(end, status.st_size)
    pieces = []
    while start < stop:
        piece = os.pread(fd, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _size(name: str, folder_fd: int) -> int | None:
    """None if the file is gone by now."""
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
