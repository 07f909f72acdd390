"""Segments that were flushed and that no snapshot names yet: which of them a restore takes over.

Owns: what is adoptable (docs/format.md, invariant 11.4) and how it extends the ledger.
Does not know: how the snapshot was chosen, what becomes of the calls.

Invariants:
1. Only segments of the chosen snapshot's own epoch are adopted. Every epoch publishes before it dispatches anything, so
   that what a later epoch flushed extends a later snapshot, and never this one.
2. Nothing is adopted that the snapshot accounts for, that a garbage collection was about to delete, or that compaction
   wrote: that holds nothing new.
3. A record extends the ledger under the ledger's own rules or not at all; what is not used is counted with its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from recovery.errors import CredentialsRefused, Damaged, FormatNotUnderstood, RecoveryError
from recovery.layout import segment_position, segments_of
from recovery.ledger import ChunkAt, Ledger
from recovery.model import Record, SegmentInfo
from recovery.ports import Listed, ObjectStore, SegmentCodec
from recovery.records import Records
from recovery.snapshots import MAX_OBJECT_BYTES
from recovery.staging import coordinates_of

UNREADABLE = (Damaged, FormatNotUnderstood)
"""What is wrong with a segment itself: it is left, and whoever reads the rest goes on."""


@dataclass(slots=True)
class Adoption:
    """What was taken over. `unreadable`: segments that should have been, each with what is wrong."""

    segments: int = 0
    tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    unreadable: list[tuple[str, RecoveryError]] = field(default_factory=list)


def adopt(
    store: ObjectStore,
    codec: SegmentCodec,
    ledger: Ledger,
    *,
    epoch: int,
    flushed: Mapping[str, int],
    collected: Collection[str],
) -> Adoption:
    """Extend `ledger`, that of a snapshot of `epoch`, by every adoptable segment, in flush order per writer."""
    adoption = Adoption()
    for item in _flushed(store, epoch):
        key = item.key
        at = segment_position(key)
        if at is None or not at.extends(epoch, flushed):
            continue
        if key in collected or ledger.knows_segment(key):
            continue
        try:
            info, records = read_flushed(store, codec, item)
        except UNREADABLE as error:
            adoption.unreadable.append((key, error))
            continue
        _apply(ledger, info, records, adoption)
    return adoption


def read_flushed(store: ObjectStore, codec: SegmentCodec, item: Listed) -> tuple[SegmentInfo, Records]:
    """A listed segment that no ledger describes. Raises one of UNREADABLE, or the store's errors."""
    if item.nbytes > MAX_OBJECT_BYTES:  # before it is read: nothing but its own word says how large it may be
        raise Damaged(f"segment {item.key} has {item.nbytes} bytes; at most {MAX_OBJECT_BYTES} are allowed")
    data = store.get(item.key)
    info = codec.describe(item.key, data)
    return info, codec.decode(data, info)


def _flushed(store: ObjectStore, epoch: int) -> list[Listed]:
    try:
        return store.list(segments_of(epoch))
    except CredentialsRefused as error:
        by_id = "a restore of one snapshot by its id needs no list, and adopts nothing (restore: ID)"
        raise CredentialsRefused(error.message, hint=f"{error.hint}; {by_id}") from error


def _apply(ledger: Ledger, info: SegmentInfo, records: Sequence[Record], adoption: Adoption) -> None:
    ledger.describe(info)
    used = False
    for at in coordinates_of(records, info.key):
        reason = ledger.apply(at)
        if reason:
            adoption.rejected[reason] = adoption.rejected.get(reason, 0) + 1
            continue
        used = True
        if isinstance(at, ChunkAt):
            adoption.tokens += at.chunk.n_tokens
    adoption.segments += used
