"""The records of one segment column by column: what can be checked or copied at once is not made into objects first.

Owns: records as arrays, the digests of all of them, and single records out of the arrays.
Does not know: how columns are encoded, which call wants which record.

Invariants:
1. As a sequence, Records equals the records that it was made of; a chunk is made when it is asked for, of views.
2. `digests` are those of codec.py over what the columns hold; who decoded them has compared them with the stored ones.
3. No Python object is made per token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from recovery.codec import chunk_digests, chunk_heads, request_digest, wide_content
from recovery.model import (
    Array,
    BoolArray,
    CallId,
    Chunk,
    Ended,
    Float32Array,
    Int32Array,
    Opened,
    PolicyVersion,
    Record,
    Request,
    WideColumn,
    wide_columns,
)

OPENED, CHUNK, ENDED = 0, 1, 2
"""Kinds, as stored."""

SIXTEEN = np.dtype("V16")
Positions = npt.NDArray[np.int64]
NoColumns: Mapping[str, Array] = {}


def no_columns(index: int) -> Mapping[str, Array]:
    """The wide columns of every record where there are none."""
    return NoColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records(Sequence[Record]):
    """Record i has the values i of the first arrays, and the values [x_at[i], x_at[i + 1]) of the others.

    `starts` of an ended record is its number of tokens; `token_ids` of an opened one is its prompt. `versions` are
    numbered by `version_at`, which is -1 for a record that is no chunk. `requests` are those of opened records, `ends`
    finish and stop reason of ended ones. `columns` gives the wide columns of a chunk. `digests` of an ended record is
    zeros, and so is that of a chunk that nobody wanted of a decoder.
    """

    kinds: Array
    call_ids: Array
    attempts: Array
    starts: Array
    token_ids: Int32Array
    token_at: Positions
    logprobs: Float32Array
    logprob_at: Positions
    mask: BoolArray
    mask_at: Positions
    versions: Sequence[PolicyVersion]
    version_at: Array
    requests: Mapping[int, Request]
    ends: Mapping[int, tuple[str, int | str | None]]
    digests: Array
    columns: Callable[[int], Mapping[str, Array]] = no_columns

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        call_id, attempt, start = CallId(self.call_ids[at].tobytes()), int(self.attempts[at]), int(self.starts[at])
        if (request := self.requests.get(at)) is not None:
            return Opened(call_id=call_id, attempt=attempt, request=request)
        if (end := self.ends.get(at)) is not None:
            return Ended(call_id=call_id, attempt=attempt, n_tokens=start, finish_reason=end[0], stop_reason=end[1])
        first, last = self.logprob_at[at : at + 2]
        return Chunk(
            call_id=call_id,
            attempt=attempt,
            start=start,
            token_ids=self.token_ids[self.token_at[at] : self.token_at[at + 1]],
            logprobs=self.logprobs[first:last] if last > first else None,
            mask=self.mask[self.mask_at[at] : self.mask_at[at + 1]],
            version=self.versions[self.version_at[at]],
            columns=self.columns(at),
        )

    def __iter__(self) -> Iterator[Record]:
        return (self[at] for at in range(len(self)))

    def with_columns(self) -> Iterator[int]:
        """Which records have wide columns."""
        if self.columns is not no_columns:
            yield from (at for at in range(len(self)) if self.columns(at))

    def wide(self, index: int) -> tuple[WideColumn, ...]:
        """What the wide columns of a record are."""
        arrays = self.columns(index)
        return wide_columns(arrays, int(self.token_at[index + 1] - self.token_at[index])) if arrays else ()

    def raw_nbytes(self) -> Array:
        """`raw_nbytes` of each record."""
        nbytes = _PER_RECORD + np.where(self.kinds == CHUNK, _PER_TOKEN, _PER_PROMPT_TOKEN) * self.n_tokens
        for at in self.with_columns():
            nbytes[at] += sum(values.nbytes for values in self.columns(at).values())
        return nbytes

    @property
    def n_tokens(self) -> Array:
        """Tokens of each chunk, of each prompt, none of an ended record."""
        return np.diff(self.token_at)

    @classmethod
    def of(cls, records: Sequence[Record]) -> Records:
        """`records` as columns, with their digests computed.

        Raises ValueError or TypeError for a record that cannot be stored.
        """
        if isinstance(records, Records):
            return records
        chunks = [record if isinstance(record, Chunk) else None for record in records]
        tokens = [_tokens(record) for record in records]
        logprobs = [_NO_LOGPROBS if c is None or c.logprobs is None else c.logprobs for c in chunks]
        masks = [_NO_MASK if c is None else c.mask for c in chunks]
        versions: dict[PolicyVersion, int] = {}
        wide = {at: c.columns for at, c in enumerate(chunks) if c is not None and c.columns}
        columns: dict[str, Any] = {
            "call_ids": _sixteens([record.call_id for record in records], "a call id"),
            "starts": _int64([_start(record) for record in records], "a position"),
            "token_ids": _joined([_NO_TOKENS, *tokens], np.int32),
            "token_at": _positions(tokens),
            "logprobs": _joined([_NO_LOGPROBS, *logprobs], np.float32),
            "logprob_at": _positions(logprobs),
            "mask": _joined([_NO_MASK, *masks], np.bool_),
            "mask_at": _positions(masks),
            "version_at": np.array(
                [-1 if c is None else versions.setdefault(c.version, len(versions)) for c in chunks], np.int64
            ),
            "versions": list(versions),
            "columns": (lambda at: wide.get(at, NoColumns)) if wide else no_columns,
        }
        requests = {at: record.request for at, record in enumerate(records) if isinstance(record, Opened)}
        ends = {at: (r.finish_reason, r.stop_reason) for at, r in enumerate(records) if isinstance(r, Ended)}
        return cls(
            kinds=np.array([_KINDS[type(record)] for record in records], np.uint8),
            attempts=_int64([record.attempt for record in records], "an attempt"),
            requests=requests,
            ends=ends,
            digests=digests({at: request_digest(request) for at, request in requests.items()}, **columns),
            **columns,
        )

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """The records of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of([])
        firsts = np.cumsum([0, *map(len, parts)]).tolist()
        versions: dict[PolicyVersion, int] = {}
        version_at = [_renumbered(part, versions) for part in parts]
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("kinds", "call_ids", "attempts", "starts", "token_ids", "logprobs", "mask", "digests")
        }
        for values in arrays.values():
            values.flags.writeable = False
        positions: dict[str, Any] = {
            name: _end_to_end([getattr(part, name) for part in parts]) for name in ("token_at", "logprob_at", "mask_at")
        }
        requests: dict[int, Request] = {}
        ends: dict[int, tuple[str, int | str | None]] = {}
        for first, part in zip(firsts, parts, strict=False):
            requests.update((first + at, request) for at, request in part.requests.items())
            ends.update((first + at, end) for at, end in part.ends.items())

        def columns(at: int) -> Mapping[str, Array]:
            number = bisect_right(firsts, at) - 1
            return parts[number].columns(at - firsts[number])

        bare = all(part.columns is no_columns for part in parts)
        return cls(
            **arrays,
            **positions,
            versions=list(versions),
            version_at=np.concatenate(version_at),
            requests=requests,
            ends=ends,
            columns=no_columns if bare else columns,
        )


def raw_nbytes(record: Record) -> int:
    """An upper bound of what a record takes in a batch, but for its texts."""
    match record:
        case Chunk():
            wide = sum(values.nbytes for values in record.columns.values())
            return _PER_RECORD + _PER_TOKEN * int(record.token_ids.shape[0]) + wide
        case Opened():
            return _PER_RECORD + _PER_PROMPT_TOKEN * int(record.request.prompt_token_ids.shape[0])
        case _:
            return _PER_RECORD


_PER_RECORD, _PER_TOKEN, _PER_PROMPT_TOKEN = 256, 16, 4


def _renumbered(part: Records, versions: dict[PolicyVersion, int]) -> Array:
    numbers = [versions.setdefault(version, len(versions)) for version in part.versions]
    return np.array([*numbers, -1], np.int64)[part.version_at]


def _end_to_end(positions: Sequence[Positions]) -> Positions:
    """Positions in the arrays of several parts as positions in the arrays that these make together."""
    ends = np.cumsum([0, *(int(one[-1]) for one in positions)])
    return np.concatenate([*(one[:-1] + end for one, end in zip(positions, ends, strict=False)), ends[-1:]])


def digests(
    request_digests: Mapping[int, bytes],
    *,
    call_ids: Array,
    starts: Array,
    token_ids: Int32Array,
    token_at: Positions,
    logprobs: Float32Array,
    logprob_at: Positions,
    mask: BoolArray,
    mask_at: Positions,
    versions: Sequence[PolicyVersion],
    version_at: Array,
    columns: Callable[[int], Mapping[str, Array]],
    wanted: Array | None = None,
) -> Array:
    """The digests of Records with these columns; those of requests are given, that of an ended record is zeros.

    `wanted`: the chunks of which it is asked; those of the others are zeros.
    """
    found = np.zeros(len(version_at), SIXTEEN)
    found[list(request_digests)] = np.frombuffer(b"".join(request_digests.values()), SIXTEEN)
    rows = np.flatnonzero(version_at >= 0) if wanted is None else wanted[version_at[wanted] >= 0]
    numbers = rows.tolist()
    n_tokens = np.diff(token_at)[rows]
    heads = _heads(call_ids[rows], starts[rows], n_tokens, versions, version_at[rows])
    computed = chunk_digests(
        heads,
        (token_ids, token_at[rows], token_at[rows + 1]),
        (logprobs, logprob_at[rows], logprob_at[rows + 1]),
        (mask, mask_at[rows], mask_at[rows + 1]),
        None if columns is no_columns else lambda at: wide_content(columns(numbers[at]), int(n_tokens[at])),
    )
    found[rows] = computed
    found.flags.writeable = False
    return found


_NO_TOKENS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_NO_MASK = np.empty(0, np.bool_)
_KINDS = {Opened: OPENED, Chunk: CHUNK, Ended: ENDED}


def _tokens(record: Record) -> Int32Array:
    match record:
        case Chunk():
            return record.token_ids
        case Opened():
            return record.request.prompt_token_ids
        case _:
            return _NO_TOKENS


def _start(record: Record) -> int:
    match record:
        case Chunk():
            return record.start
        case Ended():
            return record.n_tokens
        case _:
            return 0


def _joined(arrays: list[Any], dtype: Any) -> Array:
    """One array; TypeError if an element could change on the way (int64 token ids, float64 logprobs)."""
    return np.concatenate(arrays, dtype=dtype, casting="safe")


def _positions(arrays: Sequence[Array]) -> Positions:
    positions = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([one.shape[0] for one in arrays], out=positions[1:])
    return positions


def _heads(
    call_ids: Array, starts: Array, n_tokens: Array, versions: Sequence[PolicyVersion], version_at: Array
) -> list[bytes]:
    """What is hashed first of each chunk."""
    found: list[bytes] = [b""] * len(version_at)
    keys = np.ascontiguousarray(call_ids).view(np.uint8).reshape(-1, 16)
    for number, version in enumerate(versions):
        rows = np.flatnonzero(version_at == number)
        heads = chunk_heads(keys[rows], starts[rows], n_tokens[rows], version)
        for row, head in zip(rows.tolist(), heads.view(f"V{heads.shape[1]}")[:, 0].tolist(), strict=True):
            found[row] = head
    return found


def _int64(values: list[int], name: str) -> Array:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:
        raise ValueError(f"{name} does not fit 32 bits") from error


def _sixteens(values: Sequence[bytes], name: str) -> Array:
    if not all(len(value) == 16 for value in values):
        raise ValueError(f"{name} has to have 16 bytes")
    return np.frombuffer(b"".join(values), SIXTEEN)
