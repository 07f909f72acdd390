"""ArrowSegmentCodec: records to one Arrow IPC file and back (docs/format.md, section 9).

Owns: the columns of a segment, and every check between a column and a record.
Does not know: where a segment is stored, which records extend which call, how a file is framed (arrow_file.py).

Invariants:
1. A batch can be read from its own bytes alone; its coordinates and crc32c are those of exactly these bytes.
2. No Python object is made per token, and none per chunk before it is asked for. Arrays of a decoded chunk are
   read-only views of the memory of its segment, which one view keeps alive.
3. Content decides: each chunk's and each request's digest is computed again when it is read, so that a segment that
   decodes is what was captured, in whatever batches it was written.
4. Where coordinates are given, length and crc32c are checked before Arrow sees a byte.
5. Mangled bytes give Damaged, DigestMismatch or FormatNotUnderstood, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from recovery.model import BatchInfo, Record, SegmentInfo
from recovery.ports import EncodedSegment, SegmentPart
from recovery.records import Records
from storage_backends import arrow_file, arrow_wide, strict_json
from storage_backends.arrow_columns import Array
from storage_backends.arrow_records import from_batch, schema_fields, to_arrays
from storage_backends.sums import check_bytes, crc32c, crc_from_key

RECORDS_PER_BATCH = 64
RAW_BYTES_PER_BATCH = 64 << 20
"""A batch is closed when it holds this much, so that arrow_file.BATCH_BYTES_MAX is never near."""

FORMAT = "prefix-recovery/segment"


@lru_cache(maxsize=64)
def schema_of(types: tuple[str, ...] = ()) -> pa.Schema:
    """The schema of a segment with wide columns of these types."""
    header = {"format": FORMAT, "version": arrow_file.VERSION, "requires": [arrow_wide.FEATURE] if types else []}
    return pa.schema(schema_fields(types), metadata={arrow_file.METADATA_KEY: strict_json.dump(header).encode()})


class ArrowSegmentCodec:
    """A SegmentCodec. `records_per_batch` is for tests: what is read does not depend on it."""

    suffix = "arrow"

    def __init__(self, records_per_batch: int = RECORDS_PER_BATCH) -> None:
        if not 1 <= records_per_batch <= RECORDS_PER_BATCH:
            raise ValueError(f"a batch holds 1 to {RECORDS_PER_BATCH} records, not {records_per_batch}")
        self._records_per_batch = records_per_batch

    def encode(self, records: Sequence[Record], key_stem: str) -> EncodedSegment:
        columns = Records.of(records)
        types = arrow_wide.types_of(columns)
        schema = schema_of(types)
        parts = _split(columns, self._records_per_batch)
        batches = (pa.RecordBatch.from_arrays(to_arrays(columns, part, types), schema=schema) for part in parts)
        data, frames = arrow_file.write(schema, batches)
        infos = tuple(
            BatchInfo(frame.offset, frame.length, crc32c(_bytes_of(data, frame)), part.stop - part.start)
            for frame, part in zip(frames.batches, parts, strict=True)
        )
        total = crc32c(data)
        key = f"{key_stem}-{total:08x}.{self.suffix}"
        return EncodedSegment(data, SegmentInfo(key=key, nbytes=len(data), crc32c=total, batches=infos, wide=types))

    def describe(self, key: str, data: bytes) -> SegmentInfo:
        """Coordinates of a segment that was listed, not recorded: its key carries the sum of its bytes."""
        what = f"segment {key}"
        total = crc_from_key(key)
        check_bytes(data, nbytes=len(data), crc32c=total, what=what)
        parts = arrow_file.split(data, what)
        types = _types_of_file(data, parts, what)
        groups = arrow_file.groups(data, parts, RECORDS_PER_BATCH, what)
        for group in groups:
            arrow_file.read_group(data, parts.schema, group, what)
        lengths = [n for group in groups for n in group.lengths]
        infos = tuple(
            BatchInfo(frame.offset, frame.length, crc32c(_bytes_of(data, frame)), n_records)
            for frame, n_records in zip(parts.batches, lengths, strict=True)
        )
        return SegmentInfo(key=key, nbytes=len(data), crc32c=total, batches=infos, wide=types)

    def decode(self, data: bytes, info: SegmentInfo | None) -> Records:
        return Records.joined([part.unpack()(None) for part in self.parts(data, info)])

    def parts(self, data: bytes, info: SegmentInfo | None) -> Sequence[SegmentPart]:
        what = "a segment" if info is None else f"segment {info.key}"
        if info is not None:
            check_bytes(data, nbytes=info.nbytes, crc32c=info.crc32c, what=what)
        parts = arrow_file.split(data, what)
        types = _types_of_file(data, parts, what)
        groups = arrow_file.groups(data, parts, RECORDS_PER_BATCH, what)
        if info is not None:
            told = [(batch.offset, batch.length, batch.n_records) for batch in info.batches]
            lengths = [n for group in groups for n in group.lengths]
            found = [(f.offset, f.length, n) for f, n in zip(parts.batches, lengths, strict=True)]
            if told != found or types != info.wide:
                raise Damaged(f"{what} is not divided into batches, or has not the wide columns, as recorded")
        return [
            SegmentPart(sum(group.lengths), partial(_unpacked, data, parts.schema, group, what)) for group in groups
        ]

    def decode_batch(self, data: bytes, info: SegmentInfo, batch: int) -> Records:
        if not 0 <= batch < len(info.batches):
            raise ValueError(f"segment {info.key} has {len(info.batches)} batches, no batch {batch}")
        told = info.batches[batch]
        what = f"batch {batch} of segment {info.key}"
        check_bytes(data, nbytes=told.length, crc32c=told.crc32c, what=what)
        arrow_wide.check_types(info.wide, what)
        found = arrow_file.read_message(data, schema_of(info.wide), RECORDS_PER_BATCH, what)
        if found.num_rows != told.n_records:
            raise Damaged(f"{what} has {found.num_rows} records where {told.n_records} were written")
        return from_batch(found, what)


def _unpacked(
    data: bytes, schema: arrow_file.Frame, group: arrow_file.Group, what: str
) -> Callable[[Array | None], Records]:
    return partial(from_batch, arrow_file.read_group(data, schema, group, what), what)


def _types_of_file(data: bytes, parts: arrow_file.Parts, what: str) -> tuple[str, ...]:
    """The types of its wide columns, after the check that its columns are those of the format."""
    schema, header = arrow_file.read_schema(data, parts.schema, FORMAT, what, (arrow_wide.FEATURE,))
    types = arrow_wide.types_in(schema)
    if bool(types) != bool(header.get("requires")):
        raise Damaged(f"{what} does not require what its columns are")
    arrow_file.check_columns(schema, schema_of(types), what)
    return types


def _bytes_of(data: bytes, frame: arrow_file.Frame) -> bytes:
    return data[frame.offset : frame.offset + frame.length]


def _split(records: Records, at_most: int) -> list[slice]:
    """Consecutive parts of at most so many records and so many bytes."""
    ends = np.cumsum(records.raw_nbytes())
    parts: list[slice] = []
    first = 0
    while first < len(records):
        before = int(ends[first - 1]) if first else 0
        enough = int(np.searchsorted(ends, before + RAW_BYTES_PER_BATCH, "right"))
        last = min(len(records), first + at_most, max(first + 1, enough))
        parts.append(slice(first, last))
        first = last
    return parts
