"""A call's request and tokens, put together from the records of segments.

Owns: which record of which segment makes which part of which call, and that it is the one that the ledger means.
Does not know: the store, how a segment is decoded (its records were checked against their own digests there).

Invariants:
1. A part is taken from a record only if kind, call, position, length, version and digest are those of the ledger.
2. What is compared or copied is whole columns and stretches of tokens; no Python object is made per token, and no
   record object per chunk.
3. A transcript's arrays are its own or those of a few neighbours (SLAB_TOKENS): keeping one does not keep all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recovery.errors import DigestMismatch
from recovery.ledger import Entry, Ledger
from recovery.ledger_columns import unpacked
from recovery.model import (
    Array,
    BoolArray,
    CallId,
    Chunk,
    Float32Array,
    Int32Array,
    PolicyVersion,
    Request,
)
from recovery.records import CHUNK, OPENED, SIXTEEN, Records, no_columns

SLAB_TOKENS = 1 << 16


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


def assemble(request: Request, chunks: Sequence[Chunk]) -> Transcript:
    """Contiguous chunks of one call, in order, as one transcript."""
    n_tokens = chunks[-1].stop if chunks else 0
    slab = _Slab.of(n_tokens)
    spans: list[tuple[int, int, PolicyVersion]] = []
    for chunk in chunks:
        begin = spans.pop()[0] if spans and spans[-1][2] == chunk.version else chunk.start
        spans.append((begin, chunk.stop, chunk.version))
        slab.token_ids[chunk.start : chunk.stop] = chunk.token_ids
        slab.logprobs[chunk.start : chunk.stop] = np.nan if chunk.logprobs is None else chunk.logprobs
        slab.mask[chunk.start : chunk.stop] = chunk.mask
    columns = joined_columns((chunk.start, chunk.columns) for chunk in chunks)
    return Transcript(request, slab.token_ids, slab.logprobs, tuple(spans), columns, slab.mask)


class _Slab(NamedTuple):
    """The tokens of one or some calls, end to end, and the same memory as bytes."""

    token_ids: Int32Array
    logprobs: Float32Array
    mask: BoolArray
    token_bytes: memoryview
    logprob_bytes: memoryview

    @classmethod
    def of(cls, n_tokens: int) -> _Slab:
        token_ids, logprobs = np.empty(n_tokens, np.int32), np.empty(n_tokens, np.float32)
        return cls(token_ids, logprobs, np.ones(n_tokens, np.bool_), _bytes(token_ids), _bytes(logprobs))


def _bytes(values: Array) -> memoryview:
    return np.ascontiguousarray(values).view(np.uint8).data


def _check(key: str, n_records: int, index: Array, right: Array, name: Callable[[int], str]) -> None:
    """Invariant 1. `right` tells of each record `index` whether it is the one that `name` names."""
    if right.all():
        return
    at = int(np.argmin(right))
    if index[at] >= n_records:
        raise DigestMismatch(f"{key} has {n_records} records; {name(at)} should be record {index[at]}")
    raise DigestMismatch(f"{key}: record {index[at]} is not {name(at)}")


def _in_bytes(*positions: Array) -> Iterator[tuple[int, ...]]:
    """Positions of tokens, together, as positions of bytes."""
    return zip(*((4 * one).tolist() for one in positions), strict=True)


class Gathering:
    """Fed with the records of every segment that `segments` names, it gives the transcripts of `entries`."""

    def __init__(self, ledger: Ledger, entries: Sequence[Entry], *, columns: bool) -> None:
        names = ledger.names
        self._names = names
        self._entries = entries
        self._chunks = unpacked(b"".join([entry.chunks.packed for entry in entries]))
        counts = np.array([len(entry.chunks) for entry in entries], np.int64)
        self._owner = np.repeat(np.arange(len(entries)), counts)
        self._call_ids = np.frombuffer(b"".join([entry.call_id for entry in entries]), SIXTEEN)
        self._request_digests = np.frombuffer(b"".join([entry.identity.request_digest for entry in entries]), SIXTEEN)
        self._opened_at = np.array([entry.identity.opened.index for entry in entries], np.int64)
        self._opened_in = np.array([names.number(entry.identity.opened.segment) for entry in entries], np.int64)
        self._by_segment = np.argsort(self._chunks["segment"], kind="stable")
        self._numbers = self._chunks["segment"][self._by_segment]
        self._requests: list[Request | None] = [None] * len(entries)
        self._wants_columns = columns
        self._wide: dict[int, list[tuple[int, Mapping[str, Array]]]] = {}
        self._lay_out(np.array([entry.n_tokens for entry in entries], np.int64))

    def _lay_out(self, n_tokens: Array) -> None:
        """Calls that begin within SLAB_TOKENS lie in one slab."""
        first = np.cumsum(n_tokens) - n_tokens
        _, begins, self._slab_of = np.unique(first // SLAB_TOKENS, return_index=True, return_inverse=True)
        self._in_slab = first - first[begins][self._slab_of]
        sizes = np.add.reduceat(n_tokens, begins) if len(begins) else n_tokens
        self._slabs = [_Slab.of(size) for size in sizes.tolist()]

    @property
    def segments(self) -> list[str]:
        """Keys of what has to be read, in the order of their numbers."""
        numbers = np.union1d(self._opened_in, self._numbers).tolist()
        return [self._names.keys[number] for number in numbers]

    def take(self, key: str, records: Records) -> None:
        """Take what `entries` have in this segment. Raises DigestMismatch, naming call and tokens."""
        number = self._names.number(key)
        self._take_requests(key, records, np.flatnonzero(self._opened_in == number))
        first, last = np.searchsorted(self._numbers, [number, number + 1])
        self._take_chunks(key, records, self._by_segment[first:last])

    def _take_requests(self, key: str, records: Records, owners: Array) -> None:
        index = self._opened_at[owners]

        def check(right: Array) -> None:
            _check(key, len(records), index, right, lambda at: self._request_of(int(owners[at])))

        check(index < len(records))
        check(
            (records.kinds[index] == OPENED)
            & (records.call_ids[index] == self._call_ids[owners])
            & (records.digests[index] == self._request_digests[owners])
        )
        for owner, at in zip(owners.tolist(), index.tolist(), strict=True):
            self._requests[owner] = records.requests[at]

    def _request_of(self, owner: int) -> str:
        entry = self._entries[owner]
        return f"the request of call {entry.call_id.hex()} ({entry.identity.rollout})"

    def _take_chunks(self, key: str, records: Records, mine: Array) -> None:
        chunks, owners = self._chunks[mine], self._owner[mine]
        index = chunks["index"].astype(np.int64)

        def check(right: Array) -> None:
            _check(key, len(records), index, right, lambda at: self._tokens(int(mine[at])))

        check(index < len(records))
        numbers = np.array([*map(self._names.known_version, records.versions), -1], np.int64)
        check(
            (records.kinds[index] == CHUNK)
            & (records.call_ids[index] == self._call_ids[owners])
            & (records.starts[index] == chunks["start"])
            & (records.n_tokens[index] == chunks["n_tokens"])
            & (numbers[records.version_at[index]] == chunks["version"])
            & (records.digests[index] == chunks["digest"])
        )
        self._copy(records, index, chunks, owners)
        if self._wants_columns and records.columns is not no_columns:
            for owner, start, at in zip(owners.tolist(), chunks["start"].tolist(), index.tolist(), strict=True):
                self._wide.setdefault(owner, []).append((start, records.columns(at)))

    def _tokens(self, chunk: int) -> str:
        entry, row = self._entries[self._owner[chunk]], self._chunks[chunk]
        start = int(row["start"])
        return (
            f"tokens {start} to {start + int(row['n_tokens'])} of call {entry.call_id.hex()} ({entry.identity.rollout})"
        )

    def _copy(self, records: Records, index: Array, chunks: Array, owners: Array) -> None:
        slabs = [self._slabs[number] for number in self._slab_of[owners].tolist()]
        to = self._in_slab[owners] + chunks["start"]
        n = chunks["n_tokens"].astype(np.int64)
        tokens, begins = _bytes(records.token_ids), records.token_at[index]
        for slab, (first, last, begin, end) in zip(slabs, _in_bytes(to, to + n, begins, begins + n), strict=True):
            slab.token_bytes[first:last] = tokens[begin:end]
        logprobs, begins, ends = _bytes(records.logprobs), records.logprob_at[index], records.logprob_at[index + 1]
        for slab, (first, last, begin, end) in zip(slabs, _in_bytes(to, to + n, begins, ends), strict=True):
            if begin != end:
                slab.logprob_bytes[first:last] = logprobs[begin:end]
            else:
                slab.logprobs[first // 4 : last // 4] = np.nan
        if not records.mask.all():
            for slab, first, size, at in zip(
                slabs, to.tolist(), n.tolist(), records.mask_at[index].tolist(), strict=True
            ):
                slab.mask[first : first + size] = records.mask[at : at + size]

    def transcripts(self) -> dict[CallId, Transcript]:
        """After every segment was taken."""
        spans = self._version_spans()
        found: dict[CallId, Transcript] = {}
        slab_of, in_slab = self._slab_of.tolist(), self._in_slab.tolist()
        for owner, (entry, request) in enumerate(zip(self._entries, self._requests, strict=True)):
            assert request is not None
            slab, first = self._slabs[slab_of[owner]], in_slab[owner]
            own = slice(first, first + entry.n_tokens)
            wide = self._wide.get(owner)
            columns = {} if wide is None else joined_columns(sorted(wide, key=lambda piece: piece[0]))
            found[entry.call_id] = Transcript(
                request, slab.token_ids[own], slab.logprobs[own], spans[owner], columns, slab.mask[own]
            )
        return found

    def _version_spans(self) -> list[tuple[tuple[int, int, PolicyVersion], ...]]:
        """Of each call: where its versions begin and end."""
        chunks, owner = self._chunks, self._owner
        begins = np.ones(len(chunks), np.bool_)
        begins[1:] = (owner[1:] != owner[:-1]) | (chunks["version"][1:] != chunks["version"][:-1])
        firsts = np.flatnonzero(begins)
        stops = chunks["start"].astype(np.int64) + chunks["n_tokens"]
        ends = stops[np.append(firsts[1:], len(chunks)) - 1] if len(firsts) else stops
        spans: list[tuple[tuple[int, int, PolicyVersion], ...]] = [()] * len(self._entries)
        cells = (owner[firsts], chunks["start"][firsts], ends, chunks["version"][firsts])
        for at, start, end, version in zip(*(cell.tolist() for cell in cells), strict=True):
            spans[at] = (*spans[at], (start, end, self._names.versions[version]))
        return spans


def joined_columns(pieces: Iterable[tuple[int, Mapping[str, Array]]]) -> dict[str, tuple[ColumnRun, ...]]:
    """`pieces`: the start of each chunk of a call and its wide columns, in order."""
    runs: dict[str, list[list[tuple[int, Array]]]] = {}
    for start, columns in pieces:
        for name in sorted(columns):
            values, known = columns[name], runs.setdefault(name, [])
            if known and _goes_on(*known[-1][-1], start, values):
                known[-1].append((start, values))
            else:
                known.append([(start, values)])
    return {
        name: tuple(ColumnRun(run[0][0], np.concatenate([values for _, values in run])) for run in runs[name])
        for name in sorted(runs)
    }


def _goes_on(start: int, values: Array, next_start: int, next_values: Array) -> bool:
    """Whether the second stretch of a column is joined to the first."""
    same = values.dtype == next_values.dtype and values.shape[1:] == next_values.shape[1:]
    return same and start + values.shape[0] == next_start
