"""The nouns: calls, requests, chunks, terminals, segments, as frozen values.

Owns: the shape of what is captured and stored, and the checks that make a value well formed.
Does not know: how a value is encoded (codec.py, storage_backends), where it lies, or who fills it.

Invariants:
1. A chunk is a contiguous run [start, start + n) of ONE call and ONE attempt under ONE policy version.
2. token_ids, logprobs and mask of a chunk have the same length n >= 1; logprobs may be absent as a whole.
3. `call_id` is a pure function of (rollout, turn, request digest): the same request under the same name is
   the same call in every process.
4. A call is terminal only with one of FINISH_REASONS. An abort, an error or a silent end is a cut.
5. A wide column of a chunk has one row per token, a type out of WIDE_TYPES, and a size that is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple, NewType

import numpy as np
import numpy.typing as npt

CallId = NewType("CallId", bytes)
"""16 bytes; see codec.call_id."""

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

FINISH_REASONS = frozenset({"stop", "length", "repetition"})
"""The only ways a call ends; anything else leaves it resumable."""

MAX_TOKENS_PER_CHUNK = 1 << 20
"""Bound on n, checked before anything is allocated for an untrusted segment."""

WIDE_TYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
"""What a wide column may hold, in the order in which a store lists them."""

COLUMNS_PER_CHUNK_MAX = 256
COLUMN_WIDTH_MAX = 4096
COLUMN_BYTES_PER_CHUNK_MAX = 1 << 28

_COLUMN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TYPE_NAMES = {np.dtype(name): name for name in WIDE_TYPES}
_ITEM_NBYTES = {name: np.dtype(name).itemsize for name in WIDE_TYPES}


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Which weights sampled a token: a number within one lineage of the trainer."""

    lineage: str = "a"
    number: int = 0

    def __post_init__(self) -> None:
        if not self.lineage or self.number < 0:
            raise ValueError(f"policy version needs a lineage and a number >= 0, not {self!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a call was asked to do: everything that rebuilds its first engine input.

    `prompt_token_ids`: int32, shape (prompt,). `sampling`: the vLLM SamplingParams fields that differ from
    their defaults, JSON-able. `rollout` is the caller's name for the sample (unique within a store), `turn`
    counts the model calls of one rollout. `restart_only` names the field because of which the call is never
    resumed in the middle (empty: it is resumable). `source_digest` identifies the caller's own input row.
    """

    rollout: str
    turn: int = 0
    prompt_token_ids: Int32Array
    sampling: Mapping[str, Any] = field(default_factory=dict)
    restart_only: str = ""
    source_digest: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class WideColumn(NamedTuple):
    """What a wide column is, but for its values: shape (tokens,) at width 0, else (tokens, width)."""

    name: str
    type: str
    width: int

    @property
    def per_token(self) -> int:
        """Values of one token."""
        return self.width or 1

    @property
    def row_nbytes(self) -> int:
        return _ITEM_NBYTES[self.type] * self.per_token

    def shape(self, n_tokens: int) -> tuple[int, ...]:
        return (n_tokens, self.width) if self.width else (n_tokens,)


def check_wide(columns: tuple[WideColumn, ...], n_tokens: int) -> None:
    """Raises ValueError unless a chunk of so many tokens may have these columns, which are ordered by name."""
    if len(columns) > COLUMNS_PER_CHUNK_MAX:
        raise ValueError(f"a chunk has at most {COLUMNS_PER_CHUNK_MAX} wide columns, not {len(columns)}")
    for name, type_, width in columns:
        if not _COLUMN_NAME.fullmatch(name):
            raise ValueError(f"a wide column's name is 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r:.80}")
        if type_ not in _ITEM_NBYTES:
            raise ValueError(f"wide column {name} is of type {type_!r:.40}; it may be {', '.join(WIDE_TYPES)}")
        if not 0 <= width <= COLUMN_WIDTH_MAX:
            raise ValueError(f"wide column {name} has {width} values a token; at most {COLUMN_WIDTH_MAX} are allowed")
    if any(one.name >= other.name for one, other in pairwise(columns)):
        raise ValueError("wide columns have to be in the order of their names, no name twice")
    nbytes = n_tokens * sum(column.row_nbytes for column in columns)
    if nbytes > COLUMN_BYTES_PER_CHUNK_MAX:
        raise ValueError(
            f"the wide columns of a chunk have {nbytes} bytes; at most {COLUMN_BYTES_PER_CHUNK_MAX} are allowed"
        )


def wide_columns(arrays: Mapping[str, Array], n_tokens: int) -> tuple[WideColumn, ...]:
    """What `arrays` are as the wide columns of a chunk of so many tokens, by name.

    Raises TypeError or ValueError if they cannot be that; nothing is converted.
    """
    columns = []
    for name in sorted(arrays):
        values = arrays[name]
        if not isinstance(values, np.ndarray) or values.dtype not in _TYPE_NAMES:
            found = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
            raise TypeError(f"wide column {name!r:.80} is {found}; it has to be an array of {', '.join(WIDE_TYPES)}")
        if values.ndim not in (1, 2) or values.shape[0] != n_tokens or 0 in values.shape[1:]:
            raise ValueError(f"wide column {name!r:.80} has the shape {values.shape}; the chunk has {n_tokens} tokens")
        columns.append(WideColumn(name, _TYPE_NAMES[values.dtype], values.shape[1] if values.ndim == 2 else 0))
    found_columns = tuple(columns)
    check_wide(found_columns, n_tokens)
    return found_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A frozen run of one call's tokens. `logprobs`: natural log of the behaviour policy, as sampled.

    `columns`: wide columns by name, each an array of shape (tokens,) or (tokens, k).
    """

    call_id: CallId
    attempt: int
    start: int
    token_ids: Int32Array
    logprobs: Float32Array | None
    mask: BoolArray
    version: PolicyVersion
    columns: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.token_ids.shape[0]
        if not 1 <= n <= MAX_TOKENS_PER_CHUNK:
            raise ValueError(f"a chunk holds 1 to {MAX_TOKENS_PER_CHUNK} tokens, not {n}")
        if self.start < 0 or self.attempt < 0:
            raise ValueError("a chunk's start and attempt are not negative")
        if self.mask.shape != (n,) or (self.logprobs is not None and self.logprobs.shape != (n,)):
            raise ValueError("token_ids, logprobs and mask of a chunk differ in length")
        if self.columns:
            self.wide()

    @property
    def stop(self) -> int:
        return self.start + int(self.token_ids.shape[0])

    def wide(self) -> tuple[WideColumn, ...]:
        """What the wide columns are, by name."""
        return wide_columns(self.columns, self.token_ids.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The record that a call exists: written once per attempt, before its first chunk."""

    call_id: CallId
    attempt: int
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The record that a call is terminal after exactly `n_tokens` tokens."""

    call_id: CallId
    attempt: int
    n_tokens: int
    finish_reason: str
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"{self.finish_reason!r} does not end a call; only {sorted(FINISH_REASONS)} do")


Record = Opened | Chunk | Ended
"""What a segment holds, in the order in which it was captured."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """One separately readable part of a segment: bytes [offset, offset + length), their crc32c, its records."""

    offset: int
    length: int
    crc32c: int
    n_records: int


def are_batches(value: Sequence[Any]) -> bool:
    """Whether each is a list of four integers that are not negative, as a BatchInfo has them; there are many."""
    if not (set(map(type, value)) <= {list} and set(map(len, value)) <= {4}):
        return False
    numbers = list(chain.from_iterable(value))
    return set(map(type, numbers)) <= {int} and min(numbers, default=0) >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """Coordinates of one segment object; no token travels with it.

    `wide`: the types of its wide columns, in the order of WIDE_TYPES; with them a batch can be read alone.
    """

    key: str
    nbytes: int
    crc32c: int
    batches: tuple[BatchInfo, ...]
    wide: tuple[str, ...] = ()

    @property
    def n_records(self) -> int:
        return sum(batch.n_records for batch in self.batches)


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Where one record lies: segment key and its running number in that segment."""

    segment: str
    index: int


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """Where one chunk lies and what it must contain."""

    at: RecordRef
    start: int
    n_tokens: int
    digest: bytes
    version: PolicyVersion

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens


class Identity(NamedTuple):
    """What never changes about a call in the ledger; `opened` is where its Request lies.

    `model_call` and `parent`: recovery.lineage.
    """

    rollout: str
    turn: int
    request_digest: bytes
    source_digest: str
    restart_only: str
    opened: RecordRef
    model_call: int = 0
    parent: CallId = CallId(bytes(16))


@dataclass(frozen=True, slots=True)
class Resumed:
    """A restore that carried the call on after `at` tokens."""

    at: int
    snapshot: int
    exactness: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """A restore that threw `at` tokens away and began the call again."""

    at: int
    snapshot: int
    reason: str


Restore = Resumed | Restarted

OPEN, ENDED, DROPPED = 0, 1, 2
"""States of a ledger row, as stored."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One row of a ledger object: a call, or what changed of it since the parent object.

    `kept` of the parent's chunks stay, `chunks` follow them. `identity` and `history` are None in a delta
    when they did not change. `ended` is (finish_reason, stop_reason) if and only if `state` is ENDED.
    """

    call_id: CallId
    attempt: int
    state: int
    n_tokens: int
    kept: int
    chunks: tuple[ChunkRef, ...]
    identity: Identity | None
    ended: tuple[str, int | str | None] | None
    history: tuple[Restore, ...] | None
