"""Portable files: the objects of one minimal store in one zip file (docs/format.md, section 14).

Owns: the two stores over such a file, one to read it and one to write it, and every check of the file's own shape.
Does not know: which objects there are, what is in them, how a file gets its name.

Invariants:
1. Only what `ArchiveWriter` writes is read: all of a file but the data of its entries is looked at when it is opened,
   and what does not follow from its directory is Damaged. So no entry is compressed, doubled, hidden or overlapping.
2. Nothing is allocated in proportion to a number that was read: all numbers are compared with the file's length first.
3. An entry has no other place than its key; nothing is ever extracted. A name that is no key is refused.
4. An object that is read whole has the crc32 of its header, or is DigestMismatch; nothing else protects some of them.
5. The file that was opened is the one that is read, whatever happens to its name. Safe in threads and after fork.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from weakref import finalize

from recovery.errors import ConfigError, Damaged, DigestMismatch, ObjectMissing
from recovery.ports import Listed, Put
from storage_backends import zip_shape
from storage_backends.keys import KEY_BYTES_MAX, check_key, check_prefix, check_range, is_key
from storage_backends.posix import told, write_all
from storage_backends.zip_shape import CENTRAL, ELSEWHERE, END, END_64, EXTRA_64, LOCATOR_64, MAGIC, Located

_Listing = list[Listed]
DIRECTORY_BYTES_MAX, PIECE_BYTES = 64 << 20, 1 << 20
_MADE_BY = "copy it anew, or export it anew from the store that it is of (snapshot-inspect export --help)"


class _Objects:
    """What both have: objects by key in an open file."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path
        self._entries: dict[str, Located] = {}

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        entry = self._entries.get(key)
        if entry is None:
            raise ObjectMissing(f"{self.path} has no {key}")
        stop = entry.nbytes if end is None else min(end, entry.nbytes)
        data = _read_at(self._fd, entry.begin + start, max(0, stop - start), self.path)
        if (start, stop) == (0, entry.nbytes) and zlib.crc32(data) != entry.crc32:
            raise self._changed(key)
        return data

    def _changed(self, key: str) -> DigestMismatch:
        return DigestMismatch(
            f"{self.path}: {key} does not have the crc32 that the file states", hint="was it copied whole? " + _MADE_BY
        )

    def list(self, prefix: str, after: str = "") -> _Listing:
        check_prefix(prefix)
        found = [Listed(e.name, e.nbytes) for e in self._entries.values() if e.name.startswith(prefix)]
        return sorted(item for item in found if item.key > after)


class ArchiveStore(_Objects):
    """An ObjectStore that is read only, over the portable file at `path`."""

    def __init__(self, path: str) -> None:
        with told("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            finalize(self, os.close, fd)
            status = os.fstat(fd)
        super().__init__(fd, path)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is no file", hint=_MADE_BY)
        self._entries = {entry.name: entry for entry in _taken_apart(fd, status.st_size, path)}

    def __repr__(self) -> str:
        return f"ArchiveStore({self.path!r})"

    def check(self) -> None:
        """Read every byte of the file. Raises DigestMismatch, naming the object that is not as it was written."""
        for entry in self._entries.values():
            crc32 = 0
            for at in range(entry.begin, entry.stop, PIECE_BYTES):
                crc32 = zlib.crc32(_read_at(self._fd, at, min(PIECE_BYTES, entry.stop - at), self.path), crc32)
            if crc32 != entry.crc32:
                raise self._changed(entry.name)

    def put_new(self, key: str, data: bytes) -> Put:
        raise self._unchangeable()

    def put(self, key: str, data: bytes) -> None:
        raise self._unchangeable()

    def delete(self, key: str) -> None:
        raise self._unchangeable()

    def _unchangeable(self) -> ConfigError:
        hint = "make a store of it: snapshot-inspect import FILE STORE"
        return ConfigError(f"{self.path} is a portable file, and those are never changed", hint=hint)


class ArchiveWriter(_Objects):
    """An ObjectStore that only grows, over an empty file open for reading and writing. `finish` completes the file."""

    def __init__(self, fd: int, path: str) -> None:
        super().__init__(fd, path)
        self._sha256 = hashlib.sha256()
        self.nbytes = 0

    def put_new(self, key: str, data: bytes) -> Put:
        check_key(key)
        if key in self._entries:
            return Put.EXISTS
        if len(data) >= ELSEWHERE:
            raise ConfigError(f"{key} has {len(data)} bytes; a portable file holds objects below {ELSEWHERE}")
        entry = Located(key, self.nbytes, zlib.crc32(data), len(data))
        self._append(zip_shape.header(key, entry.crc32, entry.nbytes))
        self._append(data)
        self._entries[key] = entry
        return Put.CREATED

    def put(self, key: str, data: bytes) -> None:
        raise ConfigError(f"{key}: nothing in a portable file is overwritten")

    def delete(self, key: str) -> None:
        raise ConfigError(f"{key}: nothing in a portable file is deleted")

    def finish(self) -> str:
        """Write the directory. Returns the sha256 of the whole file."""
        self._append(zip_shape.directory(list(self._entries.values())))
        return self._sha256.hexdigest()

    def _append(self, data: bytes) -> None:
        with told("write", self.path):
            write_all(self._fd, data)
        self._sha256.update(data)
        self.nbytes += len(data)


def is_archive(path: str) -> bool:
    """Whether there is a file that begins like a portable one. Says nothing about what cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


# ---- taking a file apart -------------------------------------------------------------------------------------------


def _taken_apart(fd: int, nbytes: int, path: str) -> list[Located]:
    """The entries of a file, every byte but their data accounted for."""
    begin, directory = _directory_of(fd, nbytes, path)
    entries = list(_central(directory, begin, path))
    _check_names(entries, path)
    at = 0
    for entry in entries:
        if entry.offset != at or entry.stop > begin:
            raise _no_archive(path, f"{entry.name!r:.200} does not begin where the one before it ends")
        at = entry.stop
    if at != begin or zip_shape.directory(entries) != directory:
        raise _no_archive(path, "its directory is not the one that follows from its entries")
    for entry in entries:
        wanted = zip_shape.header(entry.name, entry.crc32, entry.nbytes)
        if _read_at(fd, entry.offset, len(wanted), path) != wanted:
            raise _no_archive(path, f"{entry.name!r:.200} is not headed as its directory says")
    return entries


def _directory_of(fd: int, nbytes: int, path: str) -> tuple[int, bytes]:
    """Where the directory begins, and all from there to the end of the file."""
    tail = _read_at(fd, max(0, nbytes - END.size), min(nbytes, END.size), path)
    if len(tail) < END.size or not tail.startswith(zip_shape.END_MAGIC):
        raise _no_archive(path, "it does not end like one; was it copied whole?")
    begin = int(END.unpack(tail)[6])
    far = END_64.size + LOCATOR_64.size + END.size
    if nbytes >= far:
        record = _read_at(fd, nbytes - far, END_64.size, path)
        if record.startswith(zip_shape.END_64_MAGIC):
            begin = int(END_64.unpack(record)[9])
    if not 0 <= begin < nbytes or nbytes - begin > DIRECTORY_BYTES_MAX:
        raise _no_archive(path, f"its directory would have {nbytes - begin} bytes")
    return begin, _read_at(fd, begin, nbytes - begin, path)


def _central(directory: bytes, begin: int, path: str) -> Iterator[Located]:
    at = 0
    while directory.startswith(zip_shape.CENTRAL_MAGIC, at):
        if at + CENTRAL.size > len(directory):
            raise _no_archive(path, "its directory is cut off")
        fields = CENTRAL.unpack_from(directory, at)
        crc32, nbytes, _, name_nbytes, extra_nbytes, offset = *fields[7:12], fields[16]
        name = directory[at + CENTRAL.size : at + CENTRAL.size + name_nbytes]
        at += CENTRAL.size + name_nbytes
        if offset == ELSEWHERE and extra_nbytes == EXTRA_64.size and at + EXTRA_64.size <= len(directory):
            offset = EXTRA_64.unpack_from(directory, at)[2]
        at += extra_nbytes
        if not 0 < name_nbytes <= KEY_BYTES_MAX or offset + nbytes > begin:
            raise _no_archive(path, "an entry of its directory is larger than the file")
        yield Located(name.decode("latin-1"), offset, crc32, nbytes)


def _check_names(entries: Iterable[Located], path: str) -> None:
    names = set()
    for entry in entries:
        if not is_key(entry.name):
            raise _no_archive(path, f"{entry.name!r:.200} is no name of an object")
        if entry.name in names:
            raise _no_archive(path, f"{entry.name} is in it twice")
        names.add(entry.name)


def _no_archive(path: str, why: str) -> Damaged:
    return Damaged(f"{path} is no whole portable file: {why}", hint=_MADE_BY)


def _read_at(fd: int, at: int, nbytes: int, path: str) -> bytes:
    pieces = []
    with told("read", path):
        while nbytes > 0:
            piece = os.pread(fd, nbytes, at)
            if not piece:
                raise _no_archive(path, f"it ends at byte {at}")
            pieces.append(piece)
            at, nbytes = at + len(piece), nbytes - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
