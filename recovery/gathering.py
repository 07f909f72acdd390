"""Which records of which segments make up which calls, and that they are the ones that the ledger means.

Owns: the transcripts of many calls, found record by record as segments come in.
Does not know: the store, how a segment is decoded (its records were checked against their own digests there).

Invariants:
1. A part is taken from a record only if kind, call, position, length, version and digest are those of the ledger.
2. What is compared is whole columns; no Python object is made per token, and none per chunk before its transcript is
   asked for.
3. Transcripts are views of the memory of their segments; of a part of one of which less than a quarter is wanted they
   hold a copy of that. So all of them together keep at most four times the memory of their prompts and tokens alive,
   until the last of them is let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recovery.errors import DigestMismatch
from recovery.ledger import Entry, Ledger
from recovery.ledger_columns import PACKED, PackedChunks, unpacked
from recovery.model import Array, CallId, Request
from recovery.records import CHUNK, OPENED, SIXTEEN, Records, no_columns
from recovery.transcripts import PLACE, Held, Placed, Transcript, as_rows

_KNOWN = -1
"""In the place of the number of a segment: what lies there need not be read."""

_WHOLE = np.dtype(f"V{PACKED.itemsize}")


class Transcripts(Mapping[CallId, Transcript]):
    """Everything that these calls consist of, checked and in memory. A transcript is made when it is asked for."""

    def __init__(
        self,
        entries: Sequence[Entry],
        requests: Sequence[Request],
        request_digests: Array,
        chunks: PackedChunks,
        bounds: Array,
        placed: Placed,
        last_token_ids: Array,
    ) -> None:
        self._entries = entries
        self._requests = requests
        self._numbers = {entry.call_id: number for number, entry in enumerate(entries)}
        self._request_digests = request_digests
        self._chunks = chunks
        self._bounds = bounds
        self._placed = placed
        self._last_token_ids = last_token_ids

    @classmethod
    def none(cls) -> Transcripts:
        """Those of no call."""
        return Gathering(Ledger(), [], columns=False).transcripts()

    def lend(self, other: Gathering) -> None:
        """Give `other` what these calls have in common with its own, each chunk and request that is the same."""
        theirs, mine = other.numbers_of(self._numbers)
        same = self._request_digests[mine] == other.request_digests[theirs]
        other.take_requests(theirs[same], [self._requests[number] for number in mine[same].tolist()])
        counts = np.minimum(np.diff(self._bounds)[mine], np.diff(other.bounds)[theirs])
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        here = np.repeat(self._bounds[mine], counts) + within
        there = np.repeat(other.bounds[theirs], counts) + within
        same = self._chunks.view(_WHOLE)[here] == other.chunks.view(_WHOLE)[there]
        other.take_placed(there[same], here[same], self._placed, self._last_token_ids)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[CallId]:
        return iter(self._numbers)

    def __getitem__(self, call_id: CallId) -> Transcript:
        number = self._numbers[call_id]
        first, last = self._bounds[number : number + 2].tolist()
        return Transcript(self._requests[number], self._placed, range(first, last))

    def ends(self) -> Iterator[tuple[Entry, Request, int, int | None]]:
        """Of each call its request, how many tokens it has, and the last of them: what a plan depends on."""
        n_chunks = np.diff(self._bounds)
        lasts = np.full(len(self), -1, np.int64)
        lasts[n_chunks > 0] = self._bounds[1:][n_chunks > 0] - 1
        starts, n_tokens = self._placed.places.T[:2]
        stops = np.append(starts + n_tokens, 0)[lasts]
        tokens = np.append(self._last_token_ids, 0)[lasts]
        for entry, request, n, token in zip(
            self._entries, self._requests, stops.tolist(), tokens.tolist(), strict=True
        ):
            yield entry, request, n, token if n else None


class Gathering:
    """Fed with the records of every segment that `segments` names, it gives the transcripts of `entries`.

    `known`: transcripts of the same ledger as it was before, of which nothing is read again that did not change.
    """

    def __init__(
        self, ledger: Ledger, entries: Sequence[Entry], *, columns: bool, known: Transcripts | None = None
    ) -> None:
        names = ledger.names
        self._names = names
        self._entries = entries
        self.chunks: PackedChunks = unpacked(b"".join([entry.chunks.packed for entry in entries]))
        counts = np.array([len(entry.chunks) for entry in entries], np.int64)
        self.bounds = np.concatenate([[0], np.cumsum(counts)])
        self._owner = np.repeat(np.arange(len(entries)), counts)
        self._call_ids = np.frombuffer(b"".join([entry.call_id for entry in entries]), SIXTEEN)
        self.request_digests = np.frombuffer(b"".join([entry.identity.request_digest for entry in entries]), SIXTEEN)
        self._opened_at = np.array([entry.identity.opened.index for entry in entries], np.int64)
        self._opened_in = np.array([names.number(entry.identity.opened.segment) for entry in entries], np.int64)
        self._by_segment = np.argsort(self.chunks["segment"], kind="stable")
        self._numbers = self.chunks["segment"][self._by_segment]
        self._requests: list[Request | None] = [None] * len(entries)
        self._wants_columns = columns
        self._places = np.zeros(len(self.chunks), PLACE)
        for name in ("start", "n_tokens", "version"):
            self._places[name] = self.chunks[name]
        self._last_token_ids = np.zeros(len(self.chunks), np.int64)
        self._held: list[Held] = []
        self._wide: dict[int, Mapping[str, Array]] = {}
        if known:
            known.lend(self)

    @property
    def segments(self) -> list[str]:
        """Keys of what has to be read, in the order of their numbers."""
        numbers = np.union1d(self._opened_in, self._numbers).tolist()
        return [self._names.keys[number] for number in numbers if number != _KNOWN]

    # ---- what is known already ---------------------------------------------------------------------------------

    def numbers_of(self, others: Mapping[CallId, int]) -> tuple[Array, Array]:
        """The numbers of the calls that are in both, here and there."""
        both = [(at, others[e.call_id]) for at, e in enumerate(self._entries) if e.call_id in others]
        here, there = np.array(both, np.int64).reshape(-1, 2).T
        return here, there

    def take_requests(self, owners: Array, requests: Sequence[Request]) -> None:
        for owner, request in zip(owners.tolist(), requests, strict=True):
            self._requests[owner] = request
        self._opened_in[owners] = _KNOWN

    def take_placed(self, mine: Array, theirs: Array, placed: Placed, last_token_ids: Array) -> None:
        """Chunks that lie as `placed` says, where they have the numbers `theirs`."""
        assert not self._held and placed.versions is self._names.versions, "numbers are those of one ledger"
        as_rows(self._places)[mine] = placed.places[theirs]
        self._last_token_ids[mine] = last_token_ids[theirs]
        self._held += placed.held
        if placed.wide and self._wants_columns:
            pairs = zip(mine.tolist(), theirs.tolist(), strict=True)
            self._wide.update((here, placed.wide[there]) for here, there in pairs if there in placed.wide)
        unknown = np.ones(len(self.chunks), np.bool_)
        unknown[mine] = False
        self._by_segment = self._by_segment[unknown[self._by_segment]]
        self._numbers = self.chunks["segment"][self._by_segment]

    # ---- what is read ------------------------------------------------------------------------------------------

    def _in(self, key: str) -> tuple[Array, Array]:
        """Which calls have their request in this segment, and which chunks lie there."""
        number = self._names.number(key)
        first, last = np.searchsorted(self._numbers, [number, number + 1])
        return np.flatnonzero(self._opened_in == number), self._by_segment[first:last]

    def wanted(self, key: str) -> Array:
        """The numbers of the records of this segment that will be taken."""
        owners, chunks = self._in(key)
        return np.concatenate([self._opened_at[owners], self.chunks["index"][chunks].astype(np.int64)])

    def take(self, key: str, parts: Sequence[Records]) -> None:
        """Take what `entries` have in this segment, all of it. Raises DigestMismatch, naming call and tokens."""
        owners, chunks = self._in(key)
        requests_at, chunks_at = self._opened_at[owners], self.chunks["index"][chunks].astype(np.int64)
        within = _Within(key, first=0, n_records=sum(map(len, parts)))
        within.check(requests_at, requests_at < within.n_records, lambda at: self._request_of(int(owners[at])))
        within.check(chunks_at, chunks_at < within.n_records, lambda at: self._tokens(int(chunks[at])))
        for records in parts:
            here = [(at >= within.first) & (at < within.first + len(records)) for at in (requests_at, chunks_at)]
            self._take(within, records, owners[here[0]], chunks[here[1]])
            within.first += len(records)

    def _take(self, within: _Within, records: Records, owners: Array, chunks: Array) -> None:
        requests_at = self._opened_at[owners] - within.first
        chunks_at = self.chunks["index"][chunks].astype(np.int64) - within.first
        self._check_requests(within, records, owners, requests_at)
        self._check_chunks(within, records, chunks, chunks_at)
        wanted = records.n_tokens[np.append(requests_at, chunks_at)].sum()
        copies = 4 * wanted < len(records.token_ids)  # invariant 3
        self._take_requests(records, owners, requests_at, copies)
        self._take_chunks(records, chunks, chunks_at, copies)

    def _check_requests(self, within: _Within, records: Records, owners: Array, index: Array) -> None:
        right = (
            (records.kinds[index] == OPENED)
            & (records.call_ids[index] == self._call_ids[owners])
            & (records.digests[index] == self.request_digests[owners])
        )
        within.check(index, right, lambda at: self._request_of(int(owners[at])))

    def _request_of(self, owner: int) -> str:
        entry = self._entries[owner]
        return f"the request of call {entry.call_id.hex()} ({entry.identity.rollout})"

    def _check_chunks(self, within: _Within, records: Records, mine: Array, index: Array) -> None:
        chunks, owners = self.chunks[mine], self._owner[mine]
        numbers = np.array([*map(self._names.known_version, records.versions), -1], np.int64)
        right = (
            (records.kinds[index] == CHUNK)
            & (records.call_ids[index] == self._call_ids[owners])
            & (records.starts[index] == chunks["start"])
            & (records.n_tokens[index] == chunks["n_tokens"])
            & (numbers[records.version_at[index]] == chunks["version"])
            & (records.digests[index] == chunks["digest"])
        )
        within.check(index, right, lambda at: self._tokens(int(mine[at])))

    def _tokens(self, chunk: int) -> str:
        entry, row = self._entries[self._owner[chunk]], self.chunks[chunk]
        start = int(row["start"])
        return (
            f"tokens {start} to {start + int(row['n_tokens'])} of call {entry.call_id.hex()} ({entry.identity.rollout})"
        )

    def _take_requests(self, records: Records, owners: Array, index: Array, copies: bool) -> None:
        for owner, at in zip(owners.tolist(), index.tolist(), strict=True):
            request = records.requests[at]
            if copies:
                request = replace(request, prompt_token_ids=request.prompt_token_ids.copy())
            self._requests[owner] = request

    def _take_chunks(self, records: Records, mine: Array, index: Array, copies: bool) -> None:
        ends = records.token_at[index + 1]
        self._last_token_ids[mine] = records.token_ids[ends - 1]
        logprob_ends = records.logprob_at[index + 1]
        absent = records.logprob_at[index] == logprob_ends
        held = Held(records.token_ids, records.logprobs, records.mask)
        at = records.token_at[index], records.logprob_at[index], records.mask_at[index]
        if copies:
            held, at = _only(held, at, (ends, logprob_ends, records.mask_at[index + 1]))
        self._places["token_at"][mine] = at[0]
        self._places["logprob_at"][mine] = np.where(absent, -1, at[1])
        self._places["mask_at"][mine] = at[2]
        self._places["held"][mine] = len(self._held)
        self._held.append(held)
        if self._wants_columns and records.columns is not no_columns:
            for chunk, at in zip(mine.tolist(), index.tolist(), strict=True):
                if wide := records.columns(at):
                    self._wide[chunk] = {name: values.copy() for name, values in wide.items()} if copies else wide

    def transcripts(self) -> Transcripts:
        """After every segment was taken."""
        requests = [request for request in self._requests if request is not None]
        assert len(requests) == len(self._entries)
        return Transcripts(
            self._entries,
            requests,
            self.request_digests,
            self.chunks,
            self.bounds,
            Placed(as_rows(self._places), self._held, self._names.versions, self._wide),
            self._last_token_ids,
        )


@dataclass(slots=True)
class _Within:
    """Names records of a segment in a message. `first`: the number of the first one of the part that is looked at."""

    key: str
    first: int
    n_records: int

    def check(self, index: Array, right: Array, name: Callable[[int], str]) -> None:
        """Invariant 1. `right` tells of each record `index` whether it is the one that `name` names."""
        if right.all():
            return
        at = int(np.argmin(right))
        number = self.first + int(index[at])
        if number >= self.n_records:
            raise DigestMismatch(f"{self.key} has {self.n_records} records; {name(at)} should be record {number}")
        raise DigestMismatch(f"{self.key}: record {number} is not {name(at)}")


def _only(held: Held, begins: Sequence[Array], ends: Sequence[Array]) -> tuple[Held, tuple[Array, Array, Array]]:
    """A copy of these chunks alone, end to end, and where each begins in it."""
    arrays = [_copied(*column) for column in zip(held, begins, ends, strict=True)]
    first, second, third = (np.cumsum(end - begin) - (end - begin) for begin, end in zip(begins, ends, strict=True))
    return Held(*arrays), (first, second, third)


def _copied(values: Array, begins: Array, ends: Array) -> Any:
    parts = [values[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return np.concatenate([values[:0], *parts])
