"""crc32c: the sum that is checked before a parser sees a byte.

Owns: computing it, comparing it, reading it out of a segment's key.
Does not know: content digests (recovery.codec), in which object a sum is recorded.

Invariants:
1. A length is compared before a sum, and both before anything is parsed.
2. The sum is the Castagnoli CRC: crc32c(b"123456789") == 0xE3069283.
"""

from __future__ import annotations

import re

import google_crc32c

from recovery.errors import Damaged, DigestMismatch

_IN_KEY = re.compile(r"-([0-9a-f]{8})\.[a-z0-9]+")


def crc32c(data: bytes, before: int = 0) -> int:
    """Castagnoli CRC of a byte string, an unsigned 32-bit integer. `before`: that of what stands before it."""
    return int(google_crc32c.extend(before, data))


_crc32c = crc32c


def check_bytes(data: bytes, *, nbytes: int, crc32c: int, what: str) -> None:
    """Raises DigestMismatch, naming `what`, unless `data` has this length and this sum."""
    if len(data) != nbytes:
        raise DigestMismatch(
            f"{what} has {len(data)} bytes where {nbytes} were written",
            hint="`snapshot-inspect verify` shows what else is damaged",
        )
    found = _crc32c(data)
    if found != crc32c:
        raise DigestMismatch(
            f"{what}: its bytes have crc32c {found:08x}, written were bytes with {crc32c:08x}",
            hint="`snapshot-inspect verify` shows what else is damaged",
        )


def crc_from_key(key: str) -> int:
    """The sum that a segment's key ends with. Raises Damaged if it ends with none."""
    match = _IN_KEY.fullmatch(key, max(0, key.rfind("-")))
    if match is None:
        raise Damaged(f"{key} does not end with -<crc32c, 8 hex digits>.<suffix>, so it is no segment's key")
    return int(match[1], 16)
