"""Which records of a snapshot's segments can still be had, down to single batches.

Owns: the verdict on each segment, and what is left of each call.
Does not know: what is done about it (repair.py).

Invariants:
1. A segment is sound if it is as it was written, as an object, and every record that a ledger means is there and right:
   then a restore reads it. Else it is damaged, and each record of it is had or lost by itself.
2. Of a call is kept what lies before its first lost chunk; without its request nothing is kept.
3. What is not understood is not damage: FormatNotUnderstood is raised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recovery.errors import Damaged, FormatNotUnderstood, ObjectMissing
from recovery.ledger import Entry, Ledger
from recovery.model import ENDED, CallId, SegmentInfo
from recovery.ports import ObjectStore, SegmentCodec
from snapshot_inspect.lineages import Use, uses_of
from snapshot_inspect.live_records import in_order, live_records
from snapshot_inspect.progress import Progress
from storage_backends.sums import crc32c

PIECE_BYTES = 64 << 20


@dataclass(slots=True)
class Damage:
    """One damaged segment: why, and which of its records are lost; the others can be had."""

    info: SegmentInfo
    reason: str
    had: list[Use] = field(default_factory=list)
    lost: list[Use] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loss:
    """What a call lost: the tokens from `start` on, or all of it with its request (None)."""

    rollout: str
    call_id: CallId
    start: int | None
    n_tokens: int
    ended: bool

    @property
    def n_lost(self) -> int:
        return self.n_tokens - (self.start or 0)

    def __str__(self) -> str:
        what = "the request" if self.start is None else f"tokens {self.start} to {self.n_tokens}"
        return f"{what} of {self.rollout} ({self.call_id.hex()})"


def damages(
    store: ObjectStore, codec: SegmentCodec, ledger: Ledger, sound: Collection[SegmentInfo], progress: Progress
) -> list[Damage]:
    """Every damaged segment of a ledger. `sound`: segments that were found so before; they are not read again."""
    uses = uses_of(ledger)
    todo = [info for info in in_order(ledger, uses) if info not in sound]
    found = []
    with progress:
        progress.begin(len(todo), sum(info.nbytes for info in todo))
        for info in todo:
            if (damage := _damage(store, codec, info, uses[info.key])) is not None:
                found.append(damage)
            progress.advance(info.nbytes)
    return found


def _damage(store: ObjectStore, codec: SegmentCodec, info: SegmentInfo, uses: list[Use]) -> Damage | None:
    damage = Damage(info, _of_object(store, info))
    for use, record in live_records(store, codec, info, uses):
        if isinstance(record, FormatNotUnderstood):
            raise record
        if isinstance(record, Damaged):
            damage.lost.append(use)
            damage.reason = damage.reason or record.message
        else:
            damage.had.append(use)
    return damage if damage.reason else None


def _of_object(store: ObjectStore, info: SegmentInfo) -> str:
    """What is wrong with a segment as an object: gone, of another length, of another sum."""
    nbytes = total = 0
    try:
        while nbytes <= info.nbytes:
            piece = store.get(info.key, nbytes, min(nbytes + PIECE_BYTES, info.nbytes + 1))
            nbytes, total = nbytes + len(piece), crc32c(piece, total)
            if not piece:
                break
    except ObjectMissing:
        return f"segment {info.key} is missing"
    except Damaged as error:
        return error.message if info.key in error.message else f"segment {info.key}: {error.message}"
    if nbytes != info.nbytes:
        return f"segment {info.key} has {'more' if nbytes > info.nbytes else nbytes} bytes, not {info.nbytes}"
    return "" if total == info.crc32c else f"segment {info.key} does not have the crc32c that was recorded"


def losses(ledger: Ledger, damaged: list[Damage]) -> dict[CallId, Loss]:
    """The calls that lost something (invariant 2)."""
    starts: dict[CallId, int | None] = {}
    for damage in damaged:
        for use in damage.lost:
            if use.chunk is None:
                starts[use.call_id] = None
            elif (first := starts.setdefault(use.call_id, use.chunk.start)) is not None:
                starts[use.call_id] = min(first, use.chunk.start)
    return {entry.call_id: _loss(entry, starts[entry.call_id]) for entry in ledger if entry.call_id in starts}


def _loss(entry: Entry, start: int | None) -> Loss:
    return Loss(entry.identity.rollout, entry.call_id, start, entry.n_tokens, entry.state == ENDED)


def to_move(damage: Damage, lost: Mapping[CallId, Loss]) -> list[Use]:
    """Records of a damaged segment that are part of what is kept, in order."""
    return [use for use in damage.had if _is_kept(use, lost.get(use.call_id))]


def _is_kept(use: Use, of: Loss | None) -> bool:
    if of is None:
        return True
    if of.start is None:
        return False
    return use.chunk is None or use.chunk.start < of.start
