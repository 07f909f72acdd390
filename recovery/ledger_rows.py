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
from recovery.ledger_columns import PACKED, ChunkRefs, LedgerRows, Names
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


@dataclass(slots=True)
class Change:
    """What a row must say about a call: how many of the chunks that were published stay, and what else is new."""

    kept: int
    identity: bool = False
    history: bool = False


_EVERYTHING = Change(0, identity=True, history=True)


def rows_of(
    entries: Mapping[CallId, Entry], changes: Mapping[CallId, Change], whole: Iterable[CallId], names: Names
) -> LedgerRows:
    """Rows that say `changes`, and everything about the calls in `whole`."""
    told: dict[CallId, Change] = {**changes, **dict.fromkeys(whole, _EVERYTHING)}
    rows = LedgerRows(names)
    packed = []
    for call_id, change in told.items():
        entry = entries.get(call_id)
        if entry is None:
            rows.add(call_id, 0, DROPPED, 0, 0, 0, None, None, None)
            continue
        kept = change.kept
        packed.append(entry.chunks.after(kept))
        rows.add(
            call_id, entry.attempt, entry.state, entry.n_tokens, kept, len(entry.chunks) - kept,
            entry.identity if change.identity else None, entry.ended, entry.history if change.history else None,
        )  # fmt: skip
    rows.packed = b"".join(packed)
    return rows


def merge(entries: dict[CallId, Entry], rows: LedgerRows, unsettled: set[CallId]) -> None:
    """Apply the rows of one ledger object to what the earlier ones said.

    `unsettled` are calls of which no whole row has come yet. Raises Damaged; then `entries` are of no further use.
    """
    _check_chunks(rows)
    names, packed = rows.names, rows.packed
    bounds = rows.bounds * PACKED.itemsize
    columns = zip(
        rows.call_ids, rows.attempts, rows.states, rows.n_tokens, rows.kept, rows.identities, rows.ended,
        rows.histories, bounds[:-1].tolist(), bounds[1:].tolist(),
        strict=True,
    )  # fmt: skip
    for call_id, attempt, state, n_tokens, kept, identity, ended, history, first, last in columns:
        old = entries.get(call_id)
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
        new = packed[first:last]
        if old is None:
            if kept or identity is None or history is None:
                unsettled.add(call_id)  # invariant 2
                continue
            unsettled.discard(call_id)
            old = entries[call_id] = Entry(call_id, attempt, identity, ChunkRefs(names, bytearray()))
        chunks = old.chunks
        if kept != len(chunks):
            if kept > len(chunks):
                raise Damaged(f"call {call_id.hex()}: {kept} chunks should have been kept, there are {len(chunks)}")
            chunks.cut(kept)
        end = chunks.stop
        if new:
            begin = int.from_bytes(new[8:12], "little")
            if begin != end:
                raise Damaged(f"call {call_id.hex()}: a chunk starts at {begin} where {end} is next")
            chunks.packed += new
            end = chunks.stop
        if end != n_tokens:
            raise Damaged(f"call {call_id.hex()}: {end} tokens are listed, {n_tokens} stated")
        old.attempt, old.state, old.n_tokens, old.ended = attempt, state, n_tokens, ended
        if identity is not None:
            old.identity = identity
        if history is not None:
            old.history = history


def _check_chunks(rows: LedgerRows) -> None:
    """The chunks of each row follow one another, and none is empty."""
    chunks = rows.chunks
    stops = chunks["start"].astype(np.int64) + chunks["n_tokens"]
    follows = np.ones(len(chunks), np.bool_)
    follows[1:] = chunks["start"][1:] == stops[:-1]
    bounds = rows.bounds
    follows[bounds[:-1][bounds[:-1] < len(chunks)]] = True  # the first of a row: that depends on what it continues
    wrong = np.flatnonzero(~follows | (chunks["n_tokens"] < 1))
    if wrong.size:
        at = int(wrong[0])
        call_id = rows.call_ids[int(np.searchsorted(bounds, at, "right")) - 1]
        where = stops[at - 1] if at and not follows[at] else chunks["start"][at]
        raise Damaged(f"call {call_id.hex()}: a chunk starts at {chunks['start'][at]} where {where} is next")
