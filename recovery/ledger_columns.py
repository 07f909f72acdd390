"""Rows of a ledger object column by column, with the coordinates of chunks packed into bytes.

Owns: how many chunks are held, handed on and compared without a Python object for each.
Does not know: what makes a row fit a call (ledger_rows.py), how columns are encoded (ports.LedgerCodec).

Invariants:
1. A packed chunk has PACKED.itemsize bytes; `segment` and `version` are numbers of its Names. A number of a segment
   or of a call means the same one in all objects of a ledger.
2. As sequences, ChunkRefs and LedgerRows equal the ChunkRefs and LedgerRows that they were made of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from recovery.errors import Damaged
from recovery.model import DROPPED, OPEN, CallId, ChunkRef, Identity, LedgerRow, PolicyVersion, RecordRef, Restore

PACKED = np.dtype(
    [
        ("segment", "<u4"),
        ("index", "<u4"),
        ("start", "<u4"),
        ("n_tokens", "<u4"),
        ("version", "<u4"),
        ("digest", "V16"),
    ]
)
NO_ID = CallId(bytes(16))
"""In the place of a call id that only its number stands for."""
_ONE = struct.Struct("<5I16s")
_SIZE = _ONE.size
assert PACKED.itemsize == _SIZE

PackedChunks = npt.NDArray[np.void]
"""Of dtype PACKED."""


class Names:
    """Numbers that stand for keys of segments and for calls, as ledger objects use them, and for policy versions."""

    __slots__ = ("_key_numbers", "_next", "_version_numbers", "calls", "keys", "versions")

    def __init__(self, of_versions: Names | None = None) -> None:
        """`of_versions`: share their numbers of versions and calls (not of segments: those are a ledger's own)."""
        self.calls: dict[int, CallId] = {} if of_versions is None else of_versions.calls
        """What objects that were read say; of no use any more when they are merged."""
        self.keys: dict[int, str] = {}
        self._key_numbers: dict[str, int] = {}
        self._next = 0
        self.versions: list[PolicyVersion] = [] if of_versions is None else of_versions.versions
        self._version_numbers: dict[PolicyVersion, int] = {} if of_versions is None else of_versions._version_numbers

    def number(self, key: str) -> int:
        """The number of a key; one that was never used, if it has none."""
        number = self._key_numbers.get(key)
        if number is None:
            number = self._next
            self.bind(key, number)
        return number

    def known(self, key: str) -> int | None:
        return self._key_numbers.get(key)

    def bind(self, key: str, number: int) -> None:
        """What an object says. Raises ValueError if an earlier one said another key.

        A key may have a second number, which then is the one: a segment was forgotten and is referred to again.
        """
        if self.keys.setdefault(number, key) != key:
            raise ValueError(f"number {number} is segment {key} and {self.keys[number]}")
        self._key_numbers[key] = number
        self._next = max(self._next, number + 1)

    @property
    def numbered(self) -> int:
        """All numbers that were given out are below this one."""
        return self._next

    def reserve(self, numbered: int) -> None:
        """Numbers below this one were given out, whether it is known to what or not."""
        self._next = max(self._next, numbered)

    def forget(self, number: int) -> None:
        """Nothing refers to it; it is not given out again."""
        key = self.keys.pop(number)
        if self._key_numbers[key] == number:
            del self._key_numbers[key]

    def version_number(self, version: PolicyVersion) -> int:
        number = self._version_numbers.get(version)
        if number is None:
            number = self._version_numbers[version] = len(self.versions)
            self.versions.append(version)
        return number

    def known_version(self, version: PolicyVersion) -> int:
        """Its number, -1 if it has none."""
        return self._version_numbers.get(version, -1)

    def pack(self, ref: ChunkRef) -> bytes:
        """Raises ValueError for a chunk that no ledger can hold."""
        try:
            return _ONE.pack(
                self.number(ref.at.segment),
                ref.at.index,
                ref.start,
                ref.n_tokens,
                self.version_number(ref.version),
                ref.digest,
            )
        except struct.error as error:
            raise ValueError(f"{ref} does not fit a ledger: {error}") from error


class ChunkRefs(Sequence[ChunkRef]):
    """Coordinates of chunks in order. `packed` may be extended by who owns it."""

    __slots__ = ("names", "packed")

    def __init__(self, names: Names, packed: bytearray) -> None:
        self.names = names
        self.packed = packed

    def __len__(self) -> int:
        return len(self.packed) // _SIZE

    @overload
    def __getitem__(self, index: int) -> ChunkRef: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ChunkRef]: ...

    def __getitem__(self, index: int | slice) -> ChunkRef | Sequence[ChunkRef]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index] * _SIZE
        segment, number, start, n_tokens, version, digest = _ONE.unpack_from(self.packed, at)
        names = self.names
        return ChunkRef(RecordRef(names.keys[segment], number), start, n_tokens, digest, names.versions[version])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def stop(self) -> int:
        """Tokens up to the end of the last chunk."""
        return self.stop_of(len(self))

    def stop_of(self, n_chunks: int) -> int:
        """Tokens up to the end of the first `n_chunks`."""
        if not n_chunks:
            return 0
        start, n_tokens = struct.unpack_from("<2I", self.packed, (n_chunks - 1) * _SIZE + 8)
        return int(start + n_tokens)

    def append(self, ref: ChunkRef) -> None:
        self.packed += self.names.pack(ref)

    def splice(self, first: int, n_chunks: int, refs: Sequence[ChunkRef]) -> None:
        """Put `refs` in the place of `n_chunks` from `first` on."""
        self.packed[first * _SIZE : (first + n_chunks) * _SIZE] = b"".join(map(self.names.pack, refs))

    def cut(self, n_chunks: int) -> None:
        """Keep the first `n_chunks`."""
        del self.packed[n_chunks * _SIZE :]

    def after(self, n_chunks: int) -> bytes:
        """What follows the first `n_chunks`, packed."""
        return bytes(self.packed[n_chunks * _SIZE :])


def unpacked(packed: bytes) -> PackedChunks:
    return np.frombuffer(packed, PACKED)


@dataclass(slots=True, eq=False)
class LedgerRows(Sequence[LedgerRow]):
    """Rows in order, as lists of equal length; `packed` has the chunks of all rows, one row after the other.

    `numbers` are those of the calls, 0 for none. `by_number`: where a call id is NO_ID, `resolve` puts it in.
    """

    names: Names = field(default_factory=Names)
    call_ids: list[CallId] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    n_tokens: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    n_chunks: list[int] = field(default_factory=list)
    packed: bytes = b""
    identities: list[Identity | None] = field(default_factory=list)
    ended: list[tuple[str, int | str | None] | None] = field(default_factory=list)
    histories: list[tuple[Restore, ...] | None] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    by_number: bool = False

    @classmethod
    def of(cls, rows: Iterable[LedgerRow], names: Names | None = None) -> LedgerRows:
        """`rows` as columns. Columns keep their numbers: if `names` share those of versions, nothing is copied."""
        if isinstance(rows, LedgerRows) and (names is None or names.versions is rows.names.versions):
            return rows if names in (None, rows.names) else replace(rows, names=names)
        made = cls(names or Names())
        packed: list[bytes] = []
        for row in rows:
            made.add(
                row.call_id, row.attempt, row.state, row.n_tokens, row.kept, len(row.chunks),
                row.identity, row.ended, row.history,
            )  # fmt: skip
            packed += map(made.names.pack, row.chunks)
        made.packed = b"".join(packed)
        return made

    def add(
        self,
        call_id: CallId,
        attempt: int,
        state: int,
        n_tokens: int,
        kept: int,
        n_chunks: int,
        identity: Identity | None,
        ended: tuple[str, int | str | None] | None,
        history: tuple[Restore, ...] | None,
        number: int = 0,
    ) -> None:
        """One row, but for its chunks: those of all rows become `packed` together."""
        self.call_ids.append(call_id)
        self.attempts.append(attempt)
        self.states.append(state)
        self.n_tokens.append(n_tokens)
        self.kept.append(kept)
        self.n_chunks.append(n_chunks)
        self.identities.append(identity)
        self.ended.append(ended)
        self.histories.append(history)
        self.numbers.append(number)

    def __len__(self) -> int:
        return len(self.call_ids)

    @overload
    def __getitem__(self, index: int) -> LedgerRow: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[LedgerRow]: ...

    def __getitem__(self, index: int | slice) -> LedgerRow | Sequence[LedgerRow]:
        rows = self._rows(range(len(self))[index] if isinstance(index, slice) else [range(len(self))[index]])
        return list(rows) if isinstance(index, slice) else next(rows)

    def __iter__(self) -> Iterator[LedgerRow]:
        return self._rows(range(len(self)))

    def _rows(self, numbers: Iterable[int]) -> Iterator[LedgerRow]:
        chunks = ChunkRefs(self.names, bytearray(self.packed))
        bounds = self.bounds.tolist()
        for at in numbers:
            yield LedgerRow(
                self.call_ids[at],
                self.attempts[at],
                self.states[at],
                self.n_tokens[at],
                self.kept[at],
                tuple(chunks[bounds[at] : bounds[at + 1]]),
                self.identities[at],
                self.ended[at],
                self.histories[at],
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def chunks(self) -> PackedChunks:
        return unpacked(self.packed)

    @property
    def bounds(self) -> npt.NDArray[np.int64]:
        """Where the chunks of each row begin, and where those of the last end."""
        bounds = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.n_chunks, out=bounds[1:])
        return bounds

    def whole(self) -> list[bool]:
        """Which rows say all there is to say about their call, so that no earlier row of it is needed."""
        columns: Any = zip(self.states, self.kept, self.identities, self.histories, strict=True)
        return [
            state == DROPPED or not (kept or identity is None or history is None)
            for state, kept, identity, history in columns
        ]

    def open_segments(self) -> set[int]:
        """Numbers of the segments in which the rows of open calls list chunks."""
        is_open = np.repeat(np.array(self.states, np.uint8) == OPEN, self.n_chunks)
        return set(np.unique(self.chunks["segment"][is_open]).tolist())

    def shortest_ids(self) -> list[CallId]:
        """The call ids, where a row has to have one: it is whole, or its call has no number."""
        rows = zip(self.call_ids, self.numbers, self.whole(), strict=True)
        return [call_id if is_whole or not number else NO_ID for call_id, number, is_whole in rows]

    def bind(self) -> None:
        """Tell `names` which calls the numbers mean. Raises ValueError if another object says otherwise."""
        calls = self.names.calls
        for number, call_id in zip(self.numbers, self.call_ids, strict=True):
            if number and call_id != NO_ID and calls.setdefault(number, call_id) != call_id:
                raise ValueError(f"number {number} is call {call_id.hex()} and {calls[number].hex()}")

    def resolve(self) -> None:
        """Put in the call ids that all objects of the ledger together say. Raises Damaged if none says one."""
        if not self.by_number:
            return
        calls = self.names.calls
        try:
            self.call_ids = [
                calls[number] if call_id == NO_ID else call_id
                for call_id, number in zip(self.call_ids, self.numbers, strict=True)
            ]
        except KeyError as error:
            raise Damaged(f"no object of this ledger says which call has the number {error.args[0]}") from error
        self.by_number = False

    def segments(self) -> set[int]:
        """Numbers of the segments that the rows mention."""
        found = set(np.unique(self.chunks["segment"]).tolist())
        return found | {self.names.number(i.opened.segment) for i in self.identities if i is not None}
