"""Arrow IPC files taken apart message by message, with every size bounded before Arrow allocates.

Owns: writing a file and saying where its batches lie; finding them again; reading them safely, several at a time.
Does not know: columns' meaning, records, ledgers.

Invariants:
1. A file is: magic, schema message, batch messages, end mark, footer. Exactly the messages that were measured are
   what Arrow is given; the footer is for other readers.
2. Before Arrow decompresses a batch, the sum of what its buffers claim to become is at most BATCH_BYTES_MAX.
3. Batches are used, and joined, only after `validate(full=True)`; without it some mangled batches abort the process.
4. Whatever the bytes are, only Damaged and FormatNotUnderstood are raised. MemoryError is let through: after rule 2
   it means that this machine is short of memory, not that the store is damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from recovery.errors import Damaged, FormatNotUnderstood
from storage_backends import strict_json
from storage_backends.flatbuffer import BatchShape, MessageShape, batch_shape, message_shape

METADATA_KEY = b"prefix-recovery"
VERSION = 1
FILE_BYTES_MAX = 4 << 30
HEADER_BYTES_MAX = 64 << 20
BATCH_BYTES_MAX = 1 << 30
"""Largest decompressed size of one batch; writers stay far below."""
GROUP_BYTES = 12 << 20
"""Decompressed, so much of a file is taken apart at a time: little enough to stay in a processor's cache meanwhile, and
so that threads that read several files decompress one while they check another."""

UPGRADE = "read it with the version of prefix-recovery that wrote it, or a newer one"
_MAGIC = b"ARROW1"
_MANGLED = (ValueError, TypeError, LookupError, ArithmeticError, OSError, NotImplementedError, struct.error)
"""What Arrow and struct raise for bytes that they cannot make sense of (Arrow's own errors are among them)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a file: bytes [offset, offset + length), of which the metadata come first, and what these say."""

    offset: int
    length: int
    message: MessageShape


@dataclass(frozen=True, slots=True)
class Parts:
    """The messages of a file."""

    schema: Frame
    batches: tuple[Frame, ...]


def write(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[bytes, Parts]:
    """One file of these batches, zstd level 3, and where they lie in it."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=3), use_threads=False)
    header = (schema.metadata or {}).get(METADATA_KEY, b"")
    if len(header) > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {len(header)} bytes could not be read again")
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            if batch.nbytes > BATCH_BYTES_MAX:
                raise ValueError(f"a batch of {batch.nbytes} bytes could not be read again")
            writer.write_batch(batch)
    data = sink.getvalue().to_pybytes()
    return data, split(data, "a file just written")


def claimed_nbytes(data: bytes, parts: Parts) -> int:
    """What the batches of a file that was just written claim to become."""
    shapes = (_measured(data, frame, 1 << 62, "a file just written") for frame in parts.batches)
    return sum(shape.nbytes for shape in shapes)


def split(data: bytes, what: str) -> Parts:
    """Find the messages of a file."""
    if len(data) > FILE_BYTES_MAX:
        raise Damaged(f"{what} has {len(data)} bytes; at most {FILE_BYTES_MAX} are allowed")
    try:
        return _split(data, what)
    except _MANGLED as error:
        raise Damaged(f"{what} is not a whole Arrow file: {error}") from error


def _split(data: bytes, what: str) -> Parts:
    if data[:8] != _MAGIC + b"\0\0" or data[-6:] != _MAGIC or len(data) < 24:
        raise Damaged(f"{what} does not begin and end like an Arrow file")
    end = len(data) - 10 - struct.unpack_from("<I", data, len(data) - 10)[0]
    frames: list[Frame] = []
    at = 8
    while at < end:
        frame = _frame(data, at, end)
        at += 8 if frame is None else frame.length
        if frame is None:
            break
        frames.append(frame)
    if at != end or not frames:
        raise Damaged(f"{what} does not end where its footer begins")
    return Parts(frames[0], tuple(frames[1:]))


def _frame(data: bytes, at: int, end: int) -> Frame | None:
    """The message at `at`; None at the end mark."""
    mark, nbytes = struct.unpack_from("<Ii", data, at)
    if mark != 0xFFFFFFFF:
        raise ValueError(f"no message begins at byte {at}")
    if nbytes == 0:
        return None
    stop = at + 8 + nbytes
    if nbytes < 0 or stop > end:
        raise ValueError(f"the message at byte {at} is longer than the file")
    message = message_shape(data[at + 8 : stop])
    stop += message.body_nbytes
    if stop > end:
        raise ValueError(f"the message at byte {at} is longer than the file")
    return Frame(at, stop - at, message)


def read_schema(
    data: bytes, frame: Frame, kind: str, what: str, known: Sequence[str] = ()
) -> tuple[pa.Schema, dict[str, Any]]:
    """Schema and header of a file. Raises FormatNotUnderstood unless the header is of this kind and version."""
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data).slice(frame.offset, frame.length))
        metadata = schema.metadata or {}
        text = metadata.get(METADATA_KEY, b"")
        if len(text) > HEADER_BYTES_MAX:
            raise Damaged(f"{what} has a header of {len(text)} bytes; at most {HEADER_BYTES_MAX} are allowed")
        header = strict_json.parse(text.decode() or "{}", f"the header of {what}")
    except _MANGLED as error:
        raise Damaged(f"{what} has no readable schema: {error}") from error
    check_header(header, kind, what, known)
    return schema, header


def check_header(header: Mapping[str, Any], kind: str, what: str, known: Sequence[str] = ()) -> None:
    """Raises FormatNotUnderstood or Damaged unless format, version and requires are those of a `kind` read here.

    `known`: what it may require.
    """
    name, version, requires = header.get("format"), header.get("version"), header.get("requires", [])
    if name != kind or type(version) is not int or not 1 <= version <= VERSION:
        raise FormatNotUnderstood(
            f"{what} has format {name!r:.60} version {version!r:.20}; this program reads {kind!r} version {VERSION}",
            hint=UPGRADE,
        )
    if not isinstance(requires, list):
        raise Damaged(f"the header of {what}: requires is no list")
    for name in requires:
        if name not in known:
            raise FormatNotUnderstood(f"{what} requires {name!r:.60}, which is not known here", hint=UPGRADE)


def check_columns(found: pa.Schema, wanted: pa.Schema, what: str) -> None:
    """Raises FormatNotUnderstood unless names and types are these, in this order; names inside of lists do not matter.

    Sums are checked before: these are the bytes that were written, by another build of this program.
    """
    try:
        same = found.names == wanted.names and all(map(_same_type, found.types, wanted.types))
    except _MANGLED:  # a name that is not UTF-8
        same = False
    if not same:
        raise FormatNotUnderstood(f"{what} does not have the columns of format version {VERSION}", hint=UPGRADE)


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and _same_type(found.value_type, wanted.value_type)
    if pa.types.is_struct(wanted):
        ours = [wanted.field(i) for i in range(wanted.num_fields)]
        theirs = [found.field(i) for i in range(found.num_fields)] if pa.types.is_struct(found) else []
        return [f.name for f in theirs] == [f.name for f in ours] and all(
            _same_type(a.type, b.type) for a, b in zip(theirs, ours, strict=True)
        )
    return bool(found == wanted)


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive batches of a file that are read together, and how many rows each has."""

    frames: tuple[Frame, ...]
    lengths: tuple[int, ...]


def groups(data: bytes, parts: Parts, rows_max: int, what: str, nbytes_max: int | None = None) -> list[Group]:
    """The batches of a file, all of which are measured, some to a group.

    What is done with a batch costs much the same however many rows it has: as many are joined as claim to become
    GROUP_BYTES together, at least one. `nbytes_max`: what all of the file may claim to become.
    """
    shapes = [_measured(data, frame, rows_max, what) for frame in parts.batches]
    claimed = sum(shape.nbytes for shape in shapes)
    if nbytes_max is not None and claimed > nbytes_max:
        raise Damaged(f"{what} claims {claimed} bytes in {len(data)}; at most {nbytes_max} are allowed")
    stretches = _stretches([shape.nbytes for shape in shapes], GROUP_BYTES)
    return [
        Group(parts.batches[first:last], tuple(shape.n_rows for shape in shapes[first:last]))
        for first, last in stretches
    ]


def _stretches(nbytes: Sequence[int], at_most: int) -> Iterator[tuple[int, int]]:
    first = total = 0
    for at, size in enumerate(nbytes):
        if at > first and total + size > at_most:
            yield first, at
            first = at
            total = 0
        total += size
    if first < len(nbytes):
        yield first, len(nbytes)


def read_group(data: bytes, schema: Frame, group: Group, what: str) -> pa.RecordBatch:
    """Measured batches, validated, as one, in one call of Arrow: between calls a thread would wait for the interpreter.

    The messages of a file are those of a stream; read as such, they are exactly the ones measured (invariant 1).
    """
    begin, end = group.frames[0].offset, group.frames[-1].offset + group.frames[-1].length
    if begin == schema.offset + schema.length:
        stream = pa.py_buffer(data)[schema.offset : end]
    else:
        whole = memoryview(data)
        stream = pa.py_buffer(b"".join((whole[schema.offset : schema.offset + schema.length], whole[begin:end])))
    try:
        with pa.ipc.open_stream(stream, options=pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            table = reader.read_all()
        table.validate(full=True)
        if table.num_rows != sum(group.lengths):
            raise ValueError(f"it has {table.num_rows} rows where {sum(group.lengths)} are claimed")
    except _MANGLED as error:
        raise Damaged(f"{what} has a batch that cannot be read: {error}") from error
    return _joined(table)


def _joined(table: pa.Table) -> pa.RecordBatch:
    whole = table.combine_chunks().to_batches()
    if whole:
        return whole[0]
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in table.schema], schema=table.schema)


def _measured(data: bytes, frame: Frame, rows_max: int, what: str) -> BatchShape:
    try:
        stop = frame.offset + frame.length
        body = stop - frame.message.body_nbytes
        shape = batch_shape(data[frame.offset + 8 : body], frame.message, memoryview(data)[body:stop])
        _check_batch(shape, rows_max)
    except _MANGLED as error:
        raise Damaged(f"{what} has a batch at byte {frame.offset} that cannot be read: {error}") from error
    return shape


def read_message(message: bytes, schema: pa.Schema, rows_max: int, what: str) -> pa.RecordBatch:
    """The batch that one message is, validated."""
    begin = schema.serialize().to_pybytes()
    data = begin + message
    try:
        first, second = _frame(data, 0, len(begin)), _frame(data, len(begin), len(data))
        if first is None or second is None or second.length != len(message):
            raise ValueError("it is no whole message")
    except _MANGLED as error:
        raise Damaged(f"{what} has a batch that cannot be read: {error}") from error
    parts = Parts(first, (second,))
    (group,) = groups(data, parts, rows_max, what)
    return read_group(data, first, group, what)


def _check_batch(shape: BatchShape, rows_max: int) -> None:
    if not 0 <= shape.n_rows <= rows_max:
        raise ValueError(f"it claims {shape.n_rows} rows; at most {rows_max} are allowed")
    if shape.nbytes > BATCH_BYTES_MAX:
        raise ValueError(f"it claims {shape.nbytes} bytes; at most {BATCH_BYTES_MAX} are allowed")
