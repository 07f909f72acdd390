"""One call of the ledger, as rows of ledger objects say it, and back.

Owns: what a row says of a change, and every check that makes a row fit the call it continues (docs/format.md,
section 8).
Does not know: the counts and who is published (ledger.py), how rows are encoded (ports.LedgerCodec).

Invariants:
1. Merging `rows_of(changes)` into what the earlier objects say gives the calls as they are.
2. A whole row needs no earlier one; a row that is not whole and whose call is not known is left to a later whole row.
3. A row that does not fit is Damaged, naming the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from recovery.errors import Damaged
from recovery.ledger_columns import PACKED, ChunkRefs, LedgerRows, Names, unpacked
from recovery.model import DROPPED, ENDED, OPEN, CallId, Identity, Restore


@dataclass(slots=True)
class Entry:
    """One call. Read freely; only Ledger changes it."""

    call_id: CallId
    attempt: int
    identity: Identity
    chunks: ChunkRefs
    state: int = OPEN
    n_tokens: int = 0
    ended: tuple[str, int | str | None] | None = None
    history: tuple[Restore, ...] = ()
    number: int = 0

    def segments(self) -> set[int]:
        """Numbers of those that its request and its chunks lie in."""
        opened_in = self.chunks.names.number(self.identity.opened.segment)
        return {opened_in, *unpacked(bytes(self.chunks.packed))["segment"].tolist()}


class Changes:
    """What rows must say about calls: how many of the chunks that were published stay, and what else is new.

    Numbers and sets instead of an object for each call: of those the collector of garbage would look through millions.
    """

    __slots__ = ("histories", "identities", "kept")

    def __init__(self) -> None:
        self.kept: dict[CallId, int] = {}
        """Every call that changed."""
        self.identities: set[CallId] = set()
        self.histories: set[CallId] = set()

    def change(self, entry: Entry) -> None:
        """What comes after the chunks that it has now is new."""
        self.kept.setdefault(entry.call_id, len(entry.chunks))

    def cut(self, entry: Entry, kept: int) -> None:
        """What comes after its first `kept` chunks is new."""
        self.kept[entry.call_id] = min(kept, self.kept.get(entry.call_id, kept))

    def begin(self, call_id: CallId) -> None:
        """All of it is new."""
        self.kept[call_id] = 0
        self.identities.add(call_id)
        self.histories.add(call_id)

    def clear(self) -> None:
        for one in (self.kept, self.identities, self.histories):
            one.clear()


def rows_of(
    entries: Mapping[CallId, Entry],
    changes: Changes,
    whole: Iterable[CallId],
    names: Names,
    dropped_numbers: Mapping[CallId, int],
) -> LedgerRows:
    """Rows that say `changes`, and everything about the calls in `whole`. `dropped_numbers`: of calls that are gone."""
    wholly = set(whole)
    told = {**changes.kept, **dict.fromkeys(wholly, 0)}
    dropped = [call_id for call_id in told if call_id not in entries]
    for call_id in dropped:
        del told[call_id]
    call_ids, kept, found = list(told), list(told.values()), [entries[call_id] for call_id in told]
    packed = [entry.chunks.after(first) for entry, first in zip(found, kept, strict=True)]
    identities, histories = changes.identities | wholly, changes.histories | wholly
    rows = LedgerRows(
        names,
        call_ids,
        [entry.attempt for entry in found],
        [entry.state for entry in found],
        [entry.n_tokens for entry in found],
        kept,
        [len(chunks) // PACKED.itemsize for chunks in packed],
        b"".join(packed),
        [entry.identity if entry.call_id in identities else None for entry in found],
        [entry.ended for entry in found],
        [entry.history if entry.call_id in histories else None for entry in found],
        [entry.number for entry in found],
    )
    for call_id in dropped:
        rows.add(call_id, 0, DROPPED, 0, 0, 0, None, None, None, dropped_numbers.get(call_id, 0))
    return rows


def merge(entries: dict[CallId, Entry], rows: LedgerRows, unsettled: set[CallId]) -> None:
    """Apply the rows of one ledger object to what the earlier ones said.

    `unsettled` are calls of which no whole row has come yet. Raises Damaged; then `entries` are of no further use.
    """
    begins, ends = _check_chunks(rows)
    names, packed = rows.names, rows.packed
    bounds = rows.bounds * PACKED.itemsize
    columns = zip(
        rows.call_ids, rows.attempts, rows.states, rows.n_tokens, rows.kept, rows.identities, rows.ended,
        rows.histories, rows.numbers, bounds[:-1].tolist(), bounds[1:].tolist(), begins, ends,
        strict=True,
    )  # fmt: skip
    for call_id, attempt, state, n_tokens, kept, identity, ended, history, number, first, last, begin, end in columns:
        old = entries.get(call_id)
        if state != OPEN or ended is not None:
            if state == DROPPED:
                if kept or first != last:
                    raise Damaged(f"call {call_id.hex()} is dropped and has chunks")
                entries.pop(call_id, None)
                unsettled.discard(call_id)
                continue
            if state not in (OPEN, ENDED):
                raise Damaged(f"call {call_id.hex()}: {state} is no state of a call")
            if (state == ENDED) != (ended is not None):
                raise Damaged(f"call {call_id.hex()}: its state and its end do not fit each other")
        if old is None:
            if kept or identity is None or history is None:
                unsettled.add(call_id)  # invariant 2
                continue
            unsettled.discard(call_id)
            old = entries[call_id] = Entry(call_id, attempt, identity, ChunkRefs(names, bytearray()), number=number)
        at, known = old.n_tokens, old.chunks.packed
        if kept * PACKED.itemsize != len(known):
            n = len(old.chunks)
            if kept > n:
                raise Damaged(f"call {call_id.hex()}: {kept} chunks should have been kept, there are {n}")
            old.chunks.cut(kept)
            at = old.chunks.stop
        if first != last:
            if begin != at:
                raise Damaged(f"call {call_id.hex()}: a chunk starts at {begin} where {at} is next")
            known += packed[first:last]
            at = end
        if at != n_tokens:
            raise Damaged(f"call {call_id.hex()}: {at} tokens are listed, {n_tokens} stated")
        old.attempt, old.state, old.n_tokens, old.ended = attempt, state, n_tokens, ended
        if identity is not None:
            old.identity = identity
        if history is not None:
            old.history = history


def _check_chunks(rows: LedgerRows) -> tuple[list[int], list[int]]:
    """The chunks of each row follow one another, and none is empty. Returns where those of each row begin and end."""
    chunks, bounds = rows.chunks, rows.bounds
    starts = chunks["start"].astype(np.int64)
    stops = starts + chunks["n_tokens"]
    follows = np.ones(len(chunks), np.bool_)
    follows[1:] = starts[1:] == stops[:-1]
    follows[bounds[:-1][bounds[:-1] < len(chunks)]] = True  # the first of a row: that depends on what it continues
    wrong = np.flatnonzero(~follows | (chunks["n_tokens"] < 1))
    if wrong.size:
        at = int(wrong[0])
        call_id = rows.call_ids[int(np.searchsorted(bounds, at, "right")) - 1]
        where = starts[at] if follows[at] else stops[at - 1]
        raise Damaged(f"call {call_id.hex()}: a chunk starts at {starts[at]} where {where} is next")
    if not len(chunks):
        return [0] * len(rows), [0] * len(rows)
    return starts[np.minimum(bounds[:-1], len(chunks) - 1)].tolist(), stops[bounds[1:] - 1].tolist()
