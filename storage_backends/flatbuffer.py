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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RECORD_BATCH = 3
_BUFFERS_MAX = 256
_UINT8, _UINT16, _INT32, _UINT32, _INT64 = (
    struct.Struct(layout).unpack_from for layout in ("<B", "<H", "<i", "<I", "<q")
)
_Unpack = Callable[[bytes | memoryview, int], tuple[Any, ...]]


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


def _number(unpack: _Unpack, data: bytes | memoryview, at: int) -> int:
    if at < 0:
        raise ValueError("a position lies before the bytes")
    number: int = unpack(data, at)[0]
    return number


def _field(data: bytes, table: int, slot: int) -> int:
    """Position of a table's field, or 0 if it is absent."""
    vtable = table - _number(_INT32, data, table)
    entry = 4 + 2 * slot
    if entry + 2 > _number(_UINT16, data, vtable):
        return 0
    distance = _number(_UINT16, data, vtable + entry)
    return table + distance if distance else 0


def _follow(data: bytes, at: int) -> int:
    return at + _number(_UINT32, data, at)


def message_shape(metadata: bytes) -> MessageShape:
    """What a message's metadata say about the message."""
    table = _follow(metadata, 0)
    kind, header, body = (_field(metadata, table, slot) for slot in (1, 2, 3))
    if not kind or not header:
        raise ValueError("the message has no header")
    nbytes = _number(_INT64, metadata, body) if body else 0
    if nbytes < 0:
        raise ValueError("the message has a body of negative length")
    return MessageShape(_number(_UINT8, metadata, kind), _follow(metadata, header), nbytes)


def batch_shape(metadata: bytes, message: MessageShape, body: memoryview) -> BatchShape:
    """What a batch's metadata, of that shape, and the prefixes in its body say about the memory it takes."""
    if message.kind != RECORD_BATCH:
        raise ValueError("the message is no record batch")
    rows, buffers, compression = (_field(metadata, message.header_at, slot) for slot in (0, 2, 3))
    n_rows = _number(_INT64, metadata, rows) if rows else 0
    if not buffers:
        return BatchShape(n_rows, 0)
    vector = _follow(metadata, buffers)
    count = _number(_UINT32, metadata, vector)
    if count > _BUFFERS_MAX:
        raise ValueError(f"the batch has {count} buffers")
    numbers = struct.unpack_from(f"<{2 * count}q", metadata, vector + 4)
    nbytes, end = 0, len(body)
    for offset, length in zip(numbers[::2], numbers[1::2], strict=True):
        if offset < 0 or length < 0 or offset + length > end:
            raise ValueError("a buffer lies outside the batch")
        if not compression or not length:
            nbytes += length
            continue
        if length < 8:
            raise ValueError("a compressed buffer is too short")
        claimed = _INT64(body, offset)[0]
        if claimed < -1:
            raise ValueError("a compressed buffer claims a negative length")
        nbytes += length - 8 if claimed == -1 else claimed  # -1 marks one that is stored as it is
    return BatchShape(n_rows, nbytes)
