"""A folder on disk, walked without leaving it.

Owns: descending from a root to a folder by descriptors, making folders durably, listing one folder.
Does not know: keys' meaning, how an object's file is written, temporary files.

Invariants:
1. No symbolic link below the root is followed: each component is opened by itself with O_NOFOLLOW. A link on the way
   is Damaged, naming the link and its target.
2. A folder that is asked for with `make` has its name on disk, whoever made it, before it is handed out.
3. The root is never made here: a disk that is not mounted is not a new, empty store.
4. No handle is kept between calls: safe in threads and after fork. The only state is the set of folders whose names
   are known to be on disk; it only grows.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from recovery.errors import Damaged, StoreUnavailable
from storage_backends.keys import is_component
from storage_backends.posix import told

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Tree:
    """Folders and files below `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._settled: set[str] = set()

    def path(self, key: str) -> str:
        return os.path.join(self.root, key)

    @contextmanager
    def folder(self, parts: list[str], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder `parts` below the root. Raises OSError, or Damaged for a link on the way."""
        fd = self._open_root()
        try:
            for depth in range(len(parts)):
                below, made = self._open_below(fd, parts[: depth + 1], make)
                above, fd = fd, below
                try:
                    if make:
                        self._settle(above, "/".join(parts[: depth + 1]), made)
                finally:
                    os.close(above)
            yield fd
        finally:
            os.close(fd)

    def open_file(self, folder_fd: int, name: str, path: str) -> int:
        """A descriptor for reading a file; never waits, whatever kind of file it is."""
        try:
            return os.open(name, _READ, dir_fd=folder_fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.mode_of(folder_fd, name, path)
            raise

    def mode_of(self, folder_fd: int, name: str, path: str) -> int:
        """What kind of file `name` is. Raises Damaged for a symbolic link, OSError if there is nothing."""
        mode = os.lstat(name, dir_fd=folder_fd).st_mode
        if stat.S_ISLNK(mode):
            target = os.readlink(name, dir_fd=folder_fd)
            raise Damaged(
                f"{path} is a symbolic link to {target}; a store holds only plain folders and files",
                hint=f"remove the link, or put what it stands for in its place: `ls -l {path}`",
            )
        return mode

    def entries(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Names in a folder that may be part of a key, with their status; none if it is gone or no folder."""
        with told("list", self.path(folder)):
            try:
                with self.folder(folder.split("/") if folder else []) as fd, os.scandir(fd) as entries:
                    for entry in entries:
                        if is_component(entry.name):
                            with suppress(FileNotFoundError):
                                yield entry.name, entry.stat(follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError, Damaged):
                return

    def _open_root(self) -> int:
        try:
            return os.open(self.root, _FOLDER)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreUnavailable(
                f"the store's folder {self.root} is gone", hint="is its disk mounted? was it moved or deleted?"
            ) from error

    def _open_below(self, fd: int, parts: list[str], make: bool) -> tuple[int, bool]:
        """The last folder of `parts`, in the folder `fd`, and whether it was made just now."""
        name, made = parts[-1], False
        if make:
            try:
                return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd), False
            except FileNotFoundError:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
                    made = True
            except NotADirectoryError:
                pass
        try:
            return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd), made
        except NotADirectoryError:
            self.mode_of(fd, name, self.path("/".join(parts)))
            raise

    def _settle(self, above_fd: int, folder: str, made: bool) -> None:
        if made or folder not in self._settled:
            os.fsync(above_fd)
            self._settled.add(folder)
