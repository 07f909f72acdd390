"""The one shape of zip files here: stored entries one after the other, then the directory that follows from them.

Owns: the bytes of an entry's header and of everything behind the entries, for given names, positions and sums.
Does not know: which entries there are (in zarr_zip.py those of a segment, in archive.py the objects of a portable
file), how a file is read.

Invariants:
1. The same entries give the same bytes: nothing is compressed, every date is 1980-01-01, there are no comments.
2. A number that does not fit 32 bits, or a count that does not fit 16, is in Zip64 records, which are there only then.

Source of the layout: PKWARE APPNOTE 6.3.10, sections 4.3.7, 4.3.12, 4.3.14 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAGIC = b"PK\x03\x04"
ELSEWHERE = (1 << 32) - 1
"""A length or position that is written in a Zip64 record instead."""

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END_64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR_64 = struct.Struct("<4sIQI")
EXTRA_64 = struct.Struct("<2HQ")
CENTRAL_MAGIC, END_MAGIC, END_64_MAGIC, LOCATOR_64_MAGIC = b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"

_NEEDS, _NEEDS_64, _STORED, _TIME, _DATE = 20, 45, 0, 0, 0x21
_MANY = 0xFFFF
"""So many entries, and more, are counted in a record of their own."""


class Located(NamedTuple):
    """One entry by what the directory says of it: `nbytes` of data behind a header at `offset`."""

    name: str
    offset: int
    crc32: int
    nbytes: int

    @property
    def begin(self) -> int:
        """Where its data begin."""
        return self.offset + LOCAL.size + len(self.name)

    @property
    def stop(self) -> int:
        return self.begin + self.nbytes


def header(name: str, crc32: int, nbytes: int) -> bytes:
    """What stands before the data of an entry. `nbytes` is below ELSEWHERE."""
    encoded = name.encode("ascii")
    fixed = LOCAL.pack(MAGIC, _NEEDS, 0, _STORED, _TIME, _DATE, crc32, nbytes, nbytes, len(encoded), 0)
    return fixed + encoded


def directory(entries: Sequence[Located]) -> bytes:
    """Everything that follows the entries of a file."""
    parts = list(_central(entries))
    begin = entries[-1].stop if entries else 0
    count, nbytes = len(entries), sum(map(len, parts))
    if count >= _MANY or begin >= ELSEWHERE or nbytes >= ELSEWHERE:
        rest = END_64.size - 12
        parts.append(END_64.pack(END_64_MAGIC, rest, _NEEDS, _NEEDS, 0, 0, count, count, nbytes, begin))
        parts.append(LOCATOR_64.pack(LOCATOR_64_MAGIC, 0, begin + nbytes, 1))
    told = min(count, _MANY)
    parts.append(END.pack(END_MAGIC, 0, 0, told, told, min(nbytes, ELSEWHERE), min(begin, ELSEWHERE), 0))
    return b"".join(parts)


def _central(entries: Iterable[Located]) -> Iterable[bytes]:
    for name, offset, crc32, nbytes in entries:
        encoded = name.encode("ascii")
        far = offset >= ELSEWHERE
        needs, extra = (_NEEDS_64, EXTRA_64.pack(1, 8, offset)) if far else (_NEEDS, b"")
        sizes = (crc32, nbytes, nbytes, len(encoded), len(extra))
        at = min(offset, ELSEWHERE)
        yield CENTRAL.pack(CENTRAL_MAGIC, needs, needs, 0, _STORED, _TIME, _DATE, *sizes, 0, 0, 0, 0, at)
        yield encoded + extra
