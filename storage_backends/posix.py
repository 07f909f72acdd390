"""What the operating system says, in this project's words; and the one atomic step of the local store.

Owns: the meaning of each errno, writing all of some bytes, and putting a finished file under its final name if that is
free.
Does not know: keys, temporary files' names, in which order a store does things.

Invariants:
1. `link_new` is one system call that either takes a free name or changes nothing; it never looks first.
2. A file system that has no such call is refused; there is no second-best.
3. Every error names the path and says what to do about it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    Damaged,
    RecoveryError,
    StoreFull,
    StoreUnavailable,
)
from recovery.ports import Put

_RENAME_NOREPLACE = 1

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
"""What link(2) says on file systems without hard links; EPERM also means other things."""

_NO_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})

_FULL = {
    errno.ENOSPC: ("no space is left", "free space on that disk; what was published is intact"),
    errno.EDQUOT: ("the disk quota is used up", "free space or raise the quota; what was published is intact"),
    errno.EFBIG: ("it is larger than a file may be", "raise the limit on the size of files (`ulimit -f`)"),
}
_REFUSED = {
    errno.EROFS: ("the file system is read-only", "mount it for writing, or name a store elsewhere"),
    errno.EACCES: ("permission denied", "see who owns it with `ls -ld`; run as that user, or change its mode"),
    errno.EPERM: ("operation not permitted", "see `ls -ld` and `lsattr -d`; run as its owner"),
}
_DAMAGED = {
    errno.ENOTDIR: ("a file stands where a folder has to be", "move away what does not belong to the store"),
    errno.EISDIR: ("a folder stands where a file has to be", "move away what does not belong to the store"),
    errno.ELOOP: ("a symbolic link is on the way", "put the real folder or file in the link's place"),
}
_CONFIG = {
    errno.ENAMETOOLONG: ("the name is too long for its file system", "choose a shorter path"),
    errno.EXDEV: ("it is on another file system than .tmp", "a store's folder has to lie on one file system"),
}
_UNAVAILABLE = {
    errno.EMFILE: ("this process has too many files open", "raise the limit (`ulimit -n`)"),
    errno.ENFILE: ("this machine has too many files open", "close some, or raise fs.file-max"),
    errno.ESTALE: ("the network file system lost it", "mount it again; the same call can then be repeated"),
}
_TABLES: tuple[tuple[type[RecoveryError], dict[int, tuple[str, str]]], ...] = (
    (StoreFull, _FULL),
    (CredentialsRefused, _REFUSED),
    (Damaged, _DAMAGED),
    (ConfigError, _CONFIG),
    (StoreUnavailable, _UNAVAILABLE),
)


def translate(error: OSError, doing: str, path: str) -> RecoveryError:
    """The project's error for what the system said while `doing` something to `path`."""
    for kind, table in _TABLES:
        if error.errno in table:
            text, hint = table[error.errno]
            return kind(f"cannot {doing} {path}: {text}", hint=hint)
    text = error.strerror or str(error)
    return StoreUnavailable(
        f"cannot {doing} {path}: {text}", hint="see `dmesg` for the disk; the same call can be repeated"
    )


@contextmanager
def told(doing: str, path: str) -> Iterator[None]:
    """Every OSError inside becomes one of the project's errors."""
    try:
        yield
    except OSError as error:
        raise translate(error, doing, path) from error


def write_all(fd: int, data: bytes) -> None:
    """All of `data`: one write may take less than it was given."""
    rest = memoryview(data)
    while rest:
        n = os.write(fd, rest)
        if n <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        rest = rest[n:]


def link_new(src_fd: int, src: str, dst_fd: int, dst: str) -> Put:
    """Give file `src` of folder `src_fd` the name `dst` in folder `dst_fd` if that name is free.

    `src` may or may not exist afterwards. Raises OSError; FileNotFoundError if `src` or the folder is gone.
    """
    try:
        os.link(src, dst, src_dir_fd=src_fd, dst_dir_fd=dst_fd, follow_symlinks=False)
    except FileExistsError:
        return _who_exists(src_fd, src, dst_fd, dst)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _rename_new(src_fd, src, dst_fd, dst)
    return Put.CREATED


def _who_exists(src_fd: int, src: str, dst_fd: int, dst: str) -> Put:
    """Tells a name that was taken from our own link whose answer was lost on the way (NFS repeats a link)."""
    try:
        theirs = os.lstat(dst, dir_fd=dst_fd)
        ours = os.lstat(src, dir_fd=src_fd)
    except FileNotFoundError:
        return Put.EXISTS
    if (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        return Put.CREATED
    if not stat.S_ISREG(theirs.st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(theirs.st_mode) else errno.ELOOP, "not a file")
    return Put.EXISTS


def _rename_new(src_fd: int, src: str, dst_fd: int, dst: str) -> Put:
    """link_new for file systems without hard links."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if renameat2 is not None:
        ctypes.set_errno(0)
        if renameat2(src_fd, os.fsencode(src), dst_fd, os.fsencode(dst), _RENAME_NOREPLACE) == 0:
            return Put.CREATED
        code = ctypes.get_errno()
    if code == errno.EEXIST:
        return _who_exists(src_fd, src, dst_fd, dst)
    if code in _NO_RENAME:
        raise ConfigError(
            f"cannot create {dst}: its file system can neither link nor rename without replacing",
            hint="a store needs a file system with hard links (ext4, xfs, btrfs, tmpfs, NFS); put it on one",
        )
    raise OSError(code, os.strerror(code))
