"""The few numbers of an Arrow IPC message that tell how much memory reading it will take.

Owns: enough of the flatbuffer encoding to find them, and Arrow's prefix of a compressed buffer.
Does not know: columns, types; Arrow reads those itself, from the same bytes.

Invariants:
1. Every position is checked to lie inside the bytes; what does not fit is ValueError or struct.error.
2. Nothing is allocated in proportion to a number that was read.

Layout: Arrow format `Message.fbs`; a table begins with the distance back to its vtable, whose entries after the first
two are the positions of its fields, 0 for one that is absent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

RECORD_BATCH = 3
_BUFFERS_MAX = 256
_CLAIM = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class MessageShape:
    """Kind of a message's header (RECORD_BATCH or another), where that table is, and the length of its body."""

    kind: int
    header_at: int
    body_nbytes: int


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Rows that a batch claims to have, and bytes that its buffers claim to become."""

    n_rows: int
    nbytes: int


def _number(layout: str, data: bytes | memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("a position lies before the bytes")
    return int(struct.unpack_from(layout, data, at)[0])


def _field(data: bytes, table: int, slot: int) -> int:
    """Position of a table's field, or 0 if it is absent."""
    vtable = table - _number("<i", data, table)
    entry = 4 + 2 * slot
    if entry + 2 > _number("<H", data, vtable):
        return 0
    distance = _number("<H", data, vtable + entry)
    return table + distance if distance else 0


def _follow(data: bytes, at: int) -> int:
    return at + _number("<I", data, at)


def message_shape(metadata: bytes) -> MessageShape:
    """What a message's metadata say about the message."""
    table = _follow(metadata, 0)
    kind, header, body = (_field(metadata, table, slot) for slot in (1, 2, 3))
    if not kind or not header:
        raise ValueError("the message has no header")
    nbytes = _number("<q", metadata, body) if body else 0
    if nbytes < 0:
        raise ValueError("the message has a body of negative length")
    return MessageShape(_number("<B", metadata, kind), _follow(metadata, header), nbytes)


def batch_shape(metadata: bytes, body: memoryview) -> BatchShape:
    """What a batch's metadata and the prefixes in its body say about the memory it takes."""
    message = message_shape(metadata)
    if message.kind != RECORD_BATCH:
        raise ValueError("the message is no record batch")
    rows, buffers, compression = (_field(metadata, message.header_at, slot) for slot in (0, 2, 3))
    n_rows = _number("<q", metadata, rows) if rows else 0
    if not buffers:
        return BatchShape(n_rows, 0)
    vector = _follow(metadata, buffers)
    count = _number("<I", metadata, vector)
    if count > _BUFFERS_MAX:
        raise ValueError(f"the batch has {count} buffers")
    numbers = struct.unpack_from(f"<{2 * count}q", metadata, vector + 4)
    nbytes = 0
    for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
        if offset < 0 or length < 0 or offset + length > len(body):
            raise ValueError("a buffer lies outside the batch")
        nbytes += _becomes(body, offset, length) if compression else length
    return BatchShape(n_rows, nbytes)


def _becomes(body: memoryview, offset: int, length: int) -> int:
    """How long a compressed buffer says it is when decompressed; -1 marks one that is stored as it is."""
    if length == 0:
        return 0
    if length < 8:
        raise ValueError("a compressed buffer is too short")
    claimed: int = _CLAIM.unpack_from(body, offset)[0]
    if claimed < -1:
        raise ValueError("a compressed buffer claims a negative length")
    return length - 8 if claimed == -1 else claimed
