"""One call of the ledger as a row of a base or delta, and back.

Owns: what a row says of a change, and every check that makes a row fit the call it continues (docs/format.md,
section 8).
Does not know: the other calls, the counts (ledger.py), how a row is encoded (ports.LedgerCodec).

Invariants:
1. merged(what the parent holds, row_of(call)) is the call.
2. A row that does not fit is Damaged, naming the call; nothing was changed by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recovery.errors import Damaged
from recovery.model import DROPPED, ENDED, OPEN, CallId, ChunkRef, Identity, LedgerRow, Restore
from recovery.segment_table import SegmentTable


@dataclass(slots=True)
class Entry:
    """One call. Read freely; only Ledger changes it."""

    call_id: CallId
    attempt: int
    identity: Identity
    state: int = OPEN
    n_tokens: int = 0
    chunks: list[ChunkRef] = field(default_factory=list)
    ended: tuple[str, int | str | None] | None = None
    history: tuple[Restore, ...] = ()


@dataclass(slots=True)
class Change:
    """What a delta must say about a call: how many of the parent's chunks stay, and what else is new."""

    kept: int
    identity: bool = False
    history: bool = False


def row_of(call_id: CallId, entry: Entry | None, change: Change) -> LedgerRow:
    """The row that says `change`; without an entry: that the call was dropped."""
    if entry is None:
        return LedgerRow(call_id, 0, DROPPED, 0, 0, (), None, None, None)
    return LedgerRow(
        call_id=call_id,
        attempt=entry.attempt,
        state=entry.state,
        n_tokens=entry.n_tokens,
        kept=change.kept,
        chunks=tuple(entry.chunks[change.kept :]),
        identity=entry.identity if change.identity else None,
        ended=entry.ended,
        history=entry.history if change.history else None,
    )


def mentioned(rows: Iterable[LedgerRow]) -> Iterator[str]:
    """Keys of the segments that rows refer to."""
    for row in rows:
        if row.identity is not None:
            yield row.identity.opened.segment
        for chunk in row.chunks:
            yield chunk.at.segment


def merged(old: Entry | None, row: LedgerRow, segments: SegmentTable) -> Entry | None:
    """The call after `row`, None if it is dropped. `old` is what the parent holds, and is left as it is."""
    where = f"call {row.call_id.hex()}"
    if row.state not in (OPEN, ENDED, DROPPED):
        raise Damaged(f"{where}: {row.state} is no state of a call")
    if row.kept > (len(old.chunks) if old is not None else 0):
        n = len(old.chunks) if old is not None else 0
        raise Damaged(f"{where}: {row.kept} chunks should have been kept, the parent lists {n}")
    if row.state == DROPPED:
        if row.kept or row.chunks:
            raise Damaged(f"{where} is dropped and has chunks")
        return None
    identity = row.identity or (old.identity if old is not None else None)
    if identity is None:
        raise Damaged(f"{where}: a delta changes a call that no ancestor has")
    chunks = [*(old.chunks[: row.kept] if old is not None else ()), *row.chunks]
    _check_chunks(chunks, row, where)
    for at in (identity.opened, *(chunk.at for chunk in row.chunks)):
        if not segments.is_known(at.segment):
            raise Damaged(f"{where}: segment {at.segment} is not described")
    if (row.state == ENDED) != (row.ended is not None):
        raise Damaged(f"{where}: its state and its end do not fit each other")
    history = row.history if row.history is not None else (old.history if old is not None else ())
    return Entry(row.call_id, row.attempt, identity, row.state, row.n_tokens, chunks, row.ended, history)


def _check_chunks(chunks: list[ChunkRef], row: LedgerRow, where: str) -> None:
    """The new chunks follow those kept, and the total is the stated one; the kept ones were checked by the parent."""
    end = chunks[row.kept - 1].stop if row.kept else 0
    for chunk in chunks[row.kept :]:
        if chunk.start != end or chunk.n_tokens < 1:
            raise Damaged(f"{where}: a chunk starts at {chunk.start} where {end} is next")
        end = chunk.stop
    if end != row.n_tokens:
        raise Damaged(f"{where}: {end} tokens are listed, {row.n_tokens} stated")
