"""A file that has its name only when it is whole.

Owns: where it is written meanwhile, the order of syncs, and that nothing is ever written over unasked.
Does not know: what is in it.

Invariants:
1. The name is given, in one step, to a complete and synced file; whatever fails before leaves what was there.
2. Without `replace` an existing name is refused, also one that appears in the meantime.
3. Only a plain file is ever replaced, never a folder or a device; what a link leads to is replaced, not the link.
4. Nothing is written into a store's folder: what lies there is an object, or would be taken for one.
5. What a killed process left of such a file goes with the next one that is written into the same folder.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from recovery.errors import ConfigError
from recovery.log import PREFIX
from recovery.ports import Put
from recovery.snapshots import FORMAT_KEY
from storage_backends import temporaries
from storage_backends.posix import link_new, told

UNFINISHED = ".export-"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def new_file(path: str, *, replace: bool) -> Iterator[int]:
    """A descriptor to write (and read back) what becomes the file at `path` when the block ends without an error."""
    target = _real(path)
    _check(path, target, replace)
    folder, name = os.path.split(target)
    temporary = temporaries.new_name(UNFINISHED)
    with told("write", path):
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            temporaries.sweep(folder_fd, UNFINISHED)
            fd = os.open(temporary, _NEW, 0o666, dir_fd=folder_fd)
            try:
                yield fd
                os.fsync(fd)
                if replace:
                    os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
                elif link_new(folder_fd, temporary, folder_fd, name) is Put.EXISTS:
                    raise _exists(path)
                os.fsync(folder_fd)
            finally:
                os.close(fd)
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except (OSError, ValueError) as error:  # a NUL in it
        raise ConfigError(f"{path!r:.300} is no name for a file: {error}", hint="name another file") from error


def _check(path: str, target: str, replace: bool) -> None:
    _check_folder(path, os.path.dirname(target))
    try:
        mode = os.lstat(target).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path!r:.300} is no name for a file: {why}", hint="name another file") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no plain file"
        raise ConfigError(f"{path} is {what}", hint="name a file that is not there yet")
    if not replace:
        raise _exists(path)


def _check_folder(path: str, folder: str) -> None:
    if not os.path.isdir(folder):
        raise ConfigError(f"there is no folder for {path}", hint=f"make it: mkdir -p {shlex.quote(folder)}")
    above = folder
    while True:
        if os.path.isfile(os.path.join(above, FORMAT_KEY)) and os.path.isdir(os.path.join(above, PREFIX)):
            raise ConfigError(f"{path} would lie in the store {above}", hint="name a file outside of it")
        if above == os.path.dirname(above):
            return
        above = os.path.dirname(above)


def _exists(path: str) -> ConfigError:
    return ConfigError(f"{path} is there already", hint="name another file, or replace it with --force")
