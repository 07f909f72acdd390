"""From coordinates back to tokens: the checked read path of the core.

Owns: reading segments for a set of calls, each segment once, every byte checked before it is parsed and every chunk
against the digest that the ledger holds.
Does not know: which calls are wanted or why.

Invariants:
1. Nothing unchecked is returned: crc32c of the object, then the chunk's digest as the ledger recorded it.
2. An error names the segment, the call and the token range.
3. That a segment is missing is never concluded from a listing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from recovery.codec import chunk_digest, request_digest
from recovery.errors import CredentialsRefused, Damaged, DigestMismatch, ObjectMissing
from recovery.layout import SEGMENTS
from recovery.ledger import Entry, Ledger
from recovery.model import (
    Array,
    BoolArray,
    CallId,
    Chunk,
    ChunkRef,
    Float32Array,
    Int32Array,
    Opened,
    PolicyVersion,
    Record,
    RecordRef,
    Request,
    SegmentInfo,
)
from recovery.ports import ObjectStore, SegmentCodec


@dataclass(frozen=True, slots=True)
class ColumnRun:
    """The values of one wide column for the tokens [start, start + len(values))."""

    start: int
    values: Array

    @property
    def stop(self) -> int:
        return self.start + int(self.values.shape[0])


@dataclass(frozen=True, slots=True)
class Transcript:
    """A call's request and all its stored tokens. `logprobs` is NaN where none was captured.

    `version_spans`: (start, end, version), contiguous over the tokens. `columns`: the wide columns by name, each in
    the longest runs that can be joined, in order; one that every chunk has, of one type and width, is one run over all
    tokens. Where there is no run the column was not captured: nothing is made up for it.
    """

    request: Request
    token_ids: Int32Array
    logprobs: Float32Array
    version_spans: tuple[tuple[int, int, PolicyVersion], ...]
    columns: Mapping[str, tuple[ColumnRun, ...]]
    mask: BoolArray


def read_segment(store: ObjectStore, codec: SegmentCodec, info: SegmentInfo) -> list[Record]:
    """All records of a segment, checked. Raises ObjectMissing, DigestMismatch or another Damaged."""
    data = store.get(info.key, 0, info.nbytes + 1)
    return codec.decode(data, info)


def read_transcripts(
    store: ObjectStore, codec: SegmentCodec, ledger: Ledger, entries: Iterable[Entry], *, columns: bool = True
) -> dict[CallId, Transcript]:
    """Requests and tokens of `entries`. Raises Damaged (or kin) at the first thing that does not check.

    `columns`: whether wide columns are wanted; they may be many times the size of the rest.
    """
    wanted: dict[str, list[tuple[Entry, ChunkRef | None]]] = defaultdict(list)
    entries = list(entries)
    for entry in entries:
        wanted[entry.identity.opened.segment].append((entry, None))
        for chunk in entry.chunks:
            wanted[chunk.at.segment].append((entry, chunk))
    requests: dict[CallId, Request] = {}
    chunks: dict[CallId, dict[int, Chunk]] = defaultdict(dict)
    for key, uses in wanted.items():
        records = read_segment(store, codec, ledger.segment(key))
        for entry, ref in uses:
            if ref is None:
                requests[entry.call_id] = _request(records, entry, entry.identity.opened)
            else:
                chunks[entry.call_id][ref.start] = _chunk(records, entry, ref)
    return {
        entry.call_id: assemble(
            requests[entry.call_id], [chunks[entry.call_id][c.start] for c in entry.chunks], columns=columns
        )
        for entry in entries
    }


def assemble(request: Request, chunks: list[Chunk], *, columns: bool = True) -> Transcript:
    """Contiguous chunks of one call, in order, as one transcript."""
    spans: list[tuple[int, int, PolicyVersion]] = []
    for chunk in chunks:
        if spans and spans[-1][2] == chunk.version:
            spans[-1] = (spans[-1][0], chunk.stop, chunk.version)
        else:
            spans.append((chunk.start, chunk.stop, chunk.version))
    ids = [chunk.token_ids for chunk in chunks]
    lps = [
        np.full(len(chunk.token_ids), np.nan, np.float32) if chunk.logprobs is None else chunk.logprobs
        for chunk in chunks
    ]
    return Transcript(
        request=request,
        token_ids=np.concatenate(ids) if ids else np.zeros(0, np.int32),
        logprobs=np.concatenate(lps) if lps else np.zeros(0, np.float32),
        version_spans=tuple(spans),
        columns=_joined_columns(chunks) if columns else {},
        mask=np.concatenate([chunk.mask for chunk in chunks]) if chunks else np.zeros(0, np.bool_),
    )


def _joined_columns(chunks: list[Chunk]) -> dict[str, tuple[ColumnRun, ...]]:
    runs: dict[str, list[list[tuple[int, Array]]]] = {}
    for chunk in chunks:
        for name in sorted(chunk.columns):
            values, known = chunk.columns[name], runs.setdefault(name, [])
            if known and _goes_on(*known[-1][-1], chunk.start, values):
                known[-1].append((chunk.start, values))
            else:
                known.append([(chunk.start, values)])
    return {
        name: tuple(ColumnRun(run[0][0], np.concatenate([values for _, values in run])) for run in runs[name])
        for name in sorted(runs)
    }


def _goes_on(start: int, values: Array, next_start: int, next_values: Array) -> bool:
    """Whether the second stretch of a column is joined to the first."""
    same = values.dtype == next_values.dtype and values.shape[1:] == next_values.shape[1:]
    return same and start + values.shape[0] == next_start


def _record(records: list[Record], at: RecordRef, where: str) -> Record:
    if at.index >= len(records):
        raise DigestMismatch(f"{at.segment} has {len(records)} records; {where} should be record {at.index}")
    return records[at.index]


def _request(records: list[Record], entry: Entry, at: RecordRef) -> Request:
    where = f"the request of call {entry.call_id.hex()} ({entry.identity.rollout})"
    record = _record(records, at, where)
    if (
        not isinstance(record, Opened)
        or record.call_id != entry.call_id
        or request_digest(record.request) != entry.identity.request_digest
    ):
        raise DigestMismatch(f"{at.segment}: record {at.index} is not {where}")
    return record.request


def _chunk(records: list[Record], entry: Entry, ref: ChunkRef) -> Chunk:
    where = f"tokens {ref.start} to {ref.stop} of call {entry.call_id.hex()} ({entry.identity.rollout})"
    record = _record(records, ref.at, where)
    if (
        not isinstance(record, Chunk)
        or (record.call_id, record.start, record.stop) != (entry.call_id, ref.start, ref.stop)
        or record.version != ref.version
        or chunk_digest(record) != ref.digest
    ):
        raise DigestMismatch(f"{ref.at.segment}: record {ref.at.index} is not {where}")
    return record


def missing_segments(store: ObjectStore, infos: Mapping[str, SegmentInfo]) -> list[Damaged]:
    """Segments that are absent or have another length, without reading them.

    One listing tells most; one that is late (NFS) or not allowed (S3) proves nothing, so what it does not show is asked
    for by its last byte. Raises CredentialsRefused where that does not tell either.
    """
    try:
        present = {item.key: item.nbytes for item in store.list(SEGMENTS)}
    except CredentialsRefused:
        present = {}
    wrong: list[Damaged] = []
    for key, info in infos.items():
        if present.get(key) == info.nbytes:
            continue
        found = by_last_byte(store, key, info.nbytes)
        if isinstance(found, ObjectMissing):
            wrong.append(ObjectMissing(f"segment {key} is missing"))
        elif found is not None:
            has = f"{present[key]} bytes, not {info.nbytes}" if key in present else found.message
            wrong.append(DigestMismatch(f"segment {key} has {has}"))
    return wrong


def by_last_byte(store: ObjectStore, key: str, nbytes: int) -> Damaged | None:
    """What is wrong with an object that should have `nbytes`, seen without reading or listing it."""
    try:
        found = len(store.get(key, max(0, nbytes - 1), nbytes + 1))
    except ObjectMissing as error:
        return error
    if found == min(1, nbytes):
        return None
    return DigestMismatch(f"{'more' if found else 'fewer'} than {nbytes} bytes")
