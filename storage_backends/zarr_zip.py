"""Zip files of one exact shape: stored entries one after the other, then the directory that follows from them.

Owns: writing such a file in memory; taking it, or any run of its entries, apart again with every byte accounted for.
Does not know: which entries there are, Zarr, the bytes of headers and directory (zip_shape.py).

Invariants:
1. The same entries give the same bytes (zip_shape.py); no position is so large that there are extra fields.
2. Only what `write` writes is read: an entry whose header is not the one that its name and data give, or a directory
   that is not the one that the entries give, is Damaged. So there are no hidden, doubled or overlapping entries.
3. Nothing is copied or allocated in proportion to a number that was read.
4. An entry has no other place than its name: nothing is ever extracted to a file system.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from recovery.errors import Damaged, DigestMismatch
from storage_backends import zip_shape
from storage_backends.zip_shape import LOCAL, MAGIC, Located

FILE_BYTES_MAX = (1 << 32) - 2
"""A position of 2**32 - 1 would stand for one that is written elsewhere."""

NAME_BYTES_MAX = 255


class Entry(NamedTuple):
    """One entry: where its header begins in the file, and its bytes."""

    name: str
    offset: int
    crc32: int
    data: bytes | memoryview

    @property
    def stop(self) -> int:
        return self.offset + LOCAL.size + len(self.name) + len(self.data)


def write(named: Iterable[tuple[str, bytes]]) -> tuple[bytes, list[Entry]]:
    """A file of these entries in this order. Raises ValueError if it would be too large to be read again."""
    entries: list[Entry] = []
    parts: list[bytes] = []
    at = 0
    for name, data in named:
        entry = Entry(name, at, zlib.crc32(data), data)
        at = entry.stop
        if at > FILE_BYTES_MAX:
            raise ValueError(f"a zip file of more than {FILE_BYTES_MAX} bytes could not be read again")
        entries.append(entry)
        parts += [_header(entry), data]
    whole = b"".join([*parts, _directory(entries)])
    if len(whole) > FILE_BYTES_MAX:
        raise ValueError(f"a zip file of {len(whole)} bytes could not be read again")
    return whole, entries


def read(data: bytes, what: str) -> list[Entry]:
    """The entries of a whole file."""
    if len(data) > FILE_BYTES_MAX:
        raise Damaged(f"{what} has {len(data)} bytes; at most {FILE_BYTES_MAX} are allowed")
    entries = _entries(data, what)
    stop = entries[-1].stop if entries else 0
    if data[stop:] != _directory(entries):
        raise Damaged(f"{what} is not a whole zip file: what follows its entries is not their directory")
    return entries


def read_run(data: bytes, what: str) -> list[Entry]:
    """The entries of a part of a file that has nothing but entries in it; offsets are those in the part."""
    entries = _entries(data, what)
    if (entries[-1].stop if entries else 0) != len(data):
        raise Damaged(f"{what} does not end where its last entry ends")
    return entries


def _entries(data: bytes, what: str) -> list[Entry]:
    """Entries from the first byte on, up to the first byte that begins none."""
    view = memoryview(data)
    entries: list[Entry] = []
    at = 0
    while data.startswith(MAGIC, at):
        entries.append(_entry(view, at, what))
        at = entries[-1].stop
    return entries


def _entry(view: memoryview, at: int, what: str) -> Entry:
    if at + LOCAL.size > len(view):
        raise Damaged(f"{what} ends inside the header of an entry")
    *_, crc32, nbytes, _, name_nbytes, _ = LOCAL.unpack_from(view, at)
    first = at + LOCAL.size + name_nbytes
    if name_nbytes > NAME_BYTES_MAX or first + nbytes > len(view):
        raise Damaged(f"{what}: the entry at byte {at} is longer than the file")
    try:
        name = str(view[at + LOCAL.size : first], "ascii")
    except UnicodeDecodeError as error:
        raise Damaged(f"{what}: the entry at byte {at} has no readable name") from error
    entry = Entry(name, at, crc32, view[first : first + nbytes])
    if view[at:first] != _header(entry):
        raise Damaged(f"{what}: entry {name!r:.100} is not a stored one without anything special")
    if zlib.crc32(entry.data) != crc32:
        raise DigestMismatch(f"{what}: entry {name!r:.100} does not have the crc32 that its header states")
    return entry


def _header(entry: Entry) -> bytes:
    return zip_shape.header(entry.name, entry.crc32, len(entry.data))


def _directory(entries: Sequence[Entry]) -> bytes:
    return zip_shape.directory([Located(e.name, e.offset, e.crc32, len(e.data)) for e in entries])
