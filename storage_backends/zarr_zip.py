"""Zip files of one exact shape: stored entries one after the other, then the directory that follows from them.

Owns: writing such a file; taking it, or any run of its entries, apart again with every byte accounted for.
Does not know: which entries there are, Zarr.

Invariants:
1. The same entries give the same bytes: nothing is compressed, every date is 1980-01-01, there are no extra fields.
2. Only what `write` writes is read: an entry whose header is not the one that its name and data give, or a directory
   that is not the one that the entries give, is Damaged. So there are no hidden, doubled or overlapping entries.
3. Nothing is copied or allocated in proportion to a number that was read.
4. An entry has no other place than its name: nothing is ever extracted to a file system.

Source of the layout: PKWARE APPNOTE 6.3.10, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from recovery.errors import Damaged, DigestMismatch

FILE_BYTES_MAX = (1 << 32) - 2
"""A position of 2**32 - 1 would stand for one that is written elsewhere."""

NAME_BYTES_MAX = 255
MAGIC = b"PK\x03\x04"

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_NEEDS, _STORED, _TIME, _DATE = 20, 0, 0, 0x21
_MANY = 0xFFFF
"""So many entries, and more, are counted in a record of their own."""


class Entry(NamedTuple):
    """One entry: where its header begins in the file, and its bytes."""

    name: str
    offset: int
    crc32: int
    data: bytes | memoryview

    @property
    def stop(self) -> int:
        return self.offset + _LOCAL.size + len(self.name) + len(self.data)


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
    if at + _LOCAL.size > len(view):
        raise Damaged(f"{what} ends inside the header of an entry")
    *_, crc32, nbytes, _, name_nbytes, _ = _LOCAL.unpack_from(view, at)
    first = at + _LOCAL.size + name_nbytes
    if name_nbytes > NAME_BYTES_MAX or first + nbytes > len(view):
        raise Damaged(f"{what}: the entry at byte {at} is longer than the file")
    try:
        name = str(view[at + _LOCAL.size : first], "ascii")
    except UnicodeDecodeError as error:
        raise Damaged(f"{what}: the entry at byte {at} has no readable name") from error
    entry = Entry(name, at, crc32, view[first : first + nbytes])
    if view[at:first] != _header(entry):
        raise Damaged(f"{what}: entry {name!r:.100} is not a stored one without anything special")
    if zlib.crc32(entry.data) != crc32:
        raise DigestMismatch(f"{what}: entry {name!r:.100} does not have the crc32 that its header states")
    return entry


def _header(entry: Entry) -> bytes:
    nbytes, name = len(entry.data), entry.name.encode("ascii")
    fixed = _LOCAL.pack(MAGIC, _NEEDS, 0, _STORED, _TIME, _DATE, entry.crc32, nbytes, nbytes, len(name), 0)
    return fixed + name


def _directory(entries: Sequence[Entry]) -> bytes:
    """Everything that follows the entries of a file."""
    parts: list[bytes] = []
    for entry in entries:
        nbytes, name = len(entry.data), entry.name.encode("ascii")
        sizes = (entry.crc32, nbytes, nbytes, len(name))
        made = _CENTRAL.pack(
            b"PK\x01\x02", _NEEDS, _NEEDS, 0, _STORED, _TIME, _DATE, *sizes, 0, 0, 0, 0, 0, entry.offset
        )
        parts += [made, name]
    begin = entries[-1].stop if entries else 0
    count, nbytes = len(entries), sum(map(len, parts))
    if count >= _MANY:
        rest = _END_64.size - 12
        parts.append(_END_64.pack(b"PK\x06\x06", rest, _NEEDS, _NEEDS, 0, 0, count, count, nbytes, begin))
        parts.append(_LOCATOR_64.pack(b"PK\x06\x07", 0, begin + nbytes, 1))
    told = min(count, _MANY)
    parts.append(_END.pack(b"PK\x05\x06", 0, 0, told, told, nbytes, begin, 0))
    return b"".join(parts)
