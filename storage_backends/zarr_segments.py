"""ZarrSegmentCodec: records to one Zarr v3 group in one zip file and back (docs/format.md, section 9.1).

Owns: the order of entries in a segment, the coordinates of its batches, and which checks come first.
Does not know: what a record's columns are (zarr_columns.py), how arrays and chunks are encoded (zarr_arrays.py), how
a batch is divided into chunks (zarr_batches.py), how a zip file is framed (zarr_zip.py), where a segment is stored.

Invariants:
1. The same records give the same bytes.
2. A batch can be read from its own bytes alone; its coordinates and crc32c are those of exactly these bytes.
3. Records are made from columns by the code that also reads the Arrow segment: one identity, the same refusals.
4. The entries are exactly those that the documents and the ranges ask for, in one order. None is looked up by a name
   that was read, so that a path leads nowhere, and a chunk that is missing is not read as zeros.
5. Where coordinates are given, length and crc32c are checked before the zip file is opened.
6. Mangled bytes give Damaged, DigestMismatch or FormatNotUnderstood, and nothing else.

zarr itself is not needed to read or write: the tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from recovery.errors import Damaged
from recovery.model import BatchInfo, Record, SegmentInfo
from recovery.ports import EncodedSegment, SegmentPart
from recovery.records import Records
from storage_backends import arrow_wide, zarr_arrays, zarr_batches, zarr_zip
from storage_backends.arrow_columns import Array
from storage_backends.arrow_records import from_batch, to_arrays
from storage_backends.sums import check_bytes, crc32c, crc_from_key
from storage_backends.zarr_arrays import RECORDS_PER_BATCH, Layout
from storage_backends.zarr_batches import Run
from storage_backends.zarr_columns import from_columns, to_columns

RAW_BYTES_PER_BATCH = 384 << 20
"""Batches have fewer records if one would hold more, so that zarr_batches.BATCH_BYTES_MAX is never near; the largest
chunk fits beside the usual ones."""

NBYTES_ALWAYS, RATIO_MAX = 1 << 30, 256
"""A segment may decompress to NBYTES_ALWAYS, and to more only in this proportion to its own length."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch of an open segment: bytes [begin, stop) of it."""

    begin: int
    stop: int
    n_records: int
    runs: Mapping[str, Run]


class ZarrSegmentCodec:
    """A SegmentCodec. `records_per_batch` is for tests: what is read does not depend on it."""

    suffix = "zarr"

    def __init__(self, records_per_batch: int = RECORDS_PER_BATCH) -> None:
        if not 1 <= records_per_batch <= RECORDS_PER_BATCH:
            raise ValueError(f"a batch holds 1 to {RECORDS_PER_BATCH} records, not {records_per_batch}")
        self._records_per_batch = records_per_batch

    def encode(self, records: Sequence[Record], key_stem: str) -> EncodedSegment:
        whole = Records.of(records)
        per_batch = _per_batch(whole, self._records_per_batch)
        parts = [slice(at, min(at + per_batch, len(whole))) for at in range(0, len(whole), per_batch)]
        types = arrow_wide.types_of(whole)
        batches = [to_columns(to_arrays(whole, part, types), types) for part in parts]
        layout = zarr_batches.layout_of(batches, per_batch, types)
        named = zarr_arrays.documents(layout)
        bounds = [len(named)]
        for chunks in zarr_batches.write_batches(batches, layout):
            named += chunks
            bounds.append(len(named))
        data, entries = zarr_zip.write(named)
        infos = tuple(
            _info(data, entries[first].offset, entries[stop - 1].stop, part.stop - part.start)
            for first, stop, part in zip(bounds, bounds[1:], parts, strict=False)
        )
        if layout.nbytes > _nbytes_max(data):
            raise ValueError(f"a segment of {layout.nbytes} bytes in {len(data)} could not be read again")
        total = crc32c(data)
        key = f"{key_stem}-{total:08x}.{self.suffix}"
        return EncodedSegment(data, SegmentInfo(key=key, nbytes=len(data), crc32c=total, batches=infos, wide=types))

    def describe(self, key: str, data: bytes) -> SegmentInfo:
        """Coordinates of a segment that was listed, not recorded: its key carries the sum of its bytes."""
        what = f"segment {key}"
        total = crc_from_key(key)
        check_bytes(data, nbytes=len(data), crc32c=total, what=what)
        layout, batches = _open(data, what)
        infos = tuple(_info(data, batch.begin, batch.stop, batch.n_records) for batch in batches)
        return SegmentInfo(key=key, nbytes=len(data), crc32c=total, batches=infos, wide=layout.types)

    def decode(self, data: bytes, info: SegmentInfo | None) -> Records:
        return Records.joined([part.unpack()(None) for part in self.parts(data, info)])

    def parts(self, data: bytes, info: SegmentInfo | None) -> Sequence[SegmentPart]:
        what = "a segment" if info is None else f"segment {info.key}"
        if info is not None:
            check_bytes(data, nbytes=info.nbytes, crc32c=info.crc32c, what=what)
        layout, batches = _open(data, what)
        if info is not None:
            told = [(batch.offset, batch.length, batch.n_records) for batch in info.batches]
            found = [(batch.begin, batch.stop - batch.begin, batch.n_records) for batch in batches]
            if told != found or layout.types != info.wide:
                raise Damaged(f"{what} is not divided into batches, or has not the wide columns, as recorded")
        return [SegmentPart(batch.n_records, partial(_unpacked, batch, layout, what)) for batch in batches]

    def decode_batch(self, data: bytes, info: SegmentInfo, batch: int) -> Records:
        if not 0 <= batch < len(info.batches):
            raise ValueError(f"segment {info.key} has {len(info.batches)} batches, no batch {batch}")
        told = info.batches[batch]
        what = f"batch {batch} of segment {info.key}"
        check_bytes(data, nbytes=told.length, crc32c=told.crc32c, what=what)
        arrow_wide.check_types(info.wide, what)
        runs = zarr_batches.runs_of(zarr_zip.read_run(data, what), batch, info.wide, what)
        columns = zarr_batches.read_columns(runs, told.n_records, None, what)
        return from_batch(from_columns(columns, info.wide, what), what)


def _unpacked(batch: _Batch, layout: Layout, what: str) -> Callable[[Array | None], Records]:
    columns = zarr_batches.read_columns(batch.runs, batch.n_records, layout, what)
    return partial(from_batch, from_columns(columns, layout.types, what), what)


def _open(data: bytes, what: str) -> tuple[Layout, list[_Batch]]:
    """Shapes and batches of a segment. No chunk is decompressed, but it is known that no chunk is missing."""
    entries = zarr_zip.read(data, what)
    types = zarr_arrays.types_in({entry.name for entry in entries})
    names = zarr_arrays.document_names(types)
    if not entries or entries[0].name != names[0]:
        raise Damaged(f"{what} does not begin with {names[0]}")
    zarr_arrays.check_group(entries[0].data, types, what)
    if [entry.name for entry in entries[: len(names)]] != names:
        raise Damaged(f"{what} does not have the arrays of its format")
    layout = zarr_arrays.read_layout({entry.name: entry.data for entry in entries[: len(names)]}, types, what)
    if layout.nbytes > _nbytes_max(data):
        raise Damaged(f"{what} claims {layout.nbytes} bytes; at most {_nbytes_max(data)} are allowed")
    batches = []
    for number, part in enumerate(zarr_batches.split(entries[len(names) :], layout, what)):
        runs = zarr_batches.runs_of(part, number, types, what)
        batches.append(_Batch(part[0].offset, part[-1].stop, layout.records_of(number), runs))
    zarr_batches.check_all([batch.runs for batch in batches], layout, what)
    return layout, batches


def _nbytes_max(data: bytes) -> int:
    return NBYTES_ALWAYS + RATIO_MAX * len(data)


def _info(data: bytes, begin: int, stop: int, n_records: int) -> BatchInfo:
    return BatchInfo(begin, stop - begin, crc32c(data[begin:stop]), n_records)


def _per_batch(records: Records, at_most: int) -> int:
    """How many records every batch but the last has: at most so many, and never too many bytes."""
    ends = np.concatenate([[0], np.cumsum(records.raw_nbytes())])
    per_batch = max(1, min(at_most, len(records)))
    while per_batch > 1 and np.diff(ends[[*range(0, len(records), per_batch), -1]]).max() > RAW_BYTES_PER_BATCH:
        per_batch //= 2
    return per_batch
