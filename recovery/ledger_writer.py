"""Writes ledger objects: what changed, and in turn everything else again.

Owns: what each object says, on top of which one it is written, and how many of those before it are still needed.
Does not know: how rows come about (ledger.py), how they are encoded, when a snapshot is taken.

Invariants:
1. The newest object and the `depth` before it say every call whole and describe every segment that is in use.
2. An object says what changed and about 1/ROTATION of the rest: what is written per snapshot has no peaks, and a
   restore reads at most MAX_DEPTH + 1 objects (rotation.py).
3. An object counts only after `published`: one that was written in vain is not built upon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from recovery import layout
from recovery.ledger import Ledger
from recovery.model import CallId
from recovery.ports import Entropy, LedgerCodec, ObjectStore
from recovery.rotation import Rotation
from recovery.snapshots import FORMAT_VERSION, LedgerObject, ObjectRef, put_object, segment_as_json


@dataclass(frozen=True, slots=True)
class PendingLedger:
    """A written ledger object that no slot names yet, and what it says whole."""

    ref: ObjectRef
    depth: int
    calls: Sequence[CallId]
    segments: Sequence[int]
    credits: tuple[int, int] = field(default=(0, 0))


class LedgerWriter:
    """Writes the objects of one coordinator's ledger, each on top of the last published one."""

    def __init__(self, store: ObjectStore, codec: LedgerCodec, entropy: Entropy, epoch: int, ledger: Ledger) -> None:
        self._store = store
        self._codec = codec
        self._entropy = entropy
        self._epoch = epoch
        self._ledger = ledger
        self.head: ObjectRef | None = None
        self.depth = 0
        self._ordinal = 0
        self._calls: Rotation[CallId] = Rotation(self._size_of_call)
        self._segments: Rotation[int] = Rotation(ledger.segments.is_used)

    def _size_of_call(self, call_id: CallId) -> int:
        entry = self._ledger.get(call_id)
        return 0 if entry is None else 1 + len(entry.chunks)

    def adopt(self, objects: Sequence[LedgerObject]) -> None:
        """Write on top of these, oldest first: the objects of the snapshot that was restored."""
        for item in objects:
            self._ordinal += 1
            self._calls.said(compress(item.rows.call_ids, item.rows.whole()), self._ordinal)
            self._segments.said(item.header["segments"], self._ordinal)
        self.head = objects[-1].ref if objects else None
        self.depth = max(0, len(objects) - 1)

    def write(self, flushed: Mapping[str, int]) -> PendingLedger:
        """Write what changed and what is due. It counts as the head only after `published`."""
        ledger, ordinal = self._ledger, self._ordinal + 1
        due = self._calls.due(len(ledger) + ledger.n_chunks, ordinal)
        due_segments = self._segments.due(len(ledger.segments), ordinal)
        rows = ledger.rows(due.things)
        calls = list(compress(rows.call_ids, rows.whole()))
        new = (number for number in sorted(rows.segments()) if number not in self._segments)
        segments = list(dict.fromkeys((*new, *due_segments.things)))
        oldest = (self._calls.oldest(set(calls)), self._segments.oldest(set(segments)))
        depth = ordinal - min((one for one in oldest if one is not None), default=ordinal)
        header = {
            "format": "prefix-recovery/ledger",
            "version": FORMAT_VERSION,
            "requires": [],
            "depth": depth,
            "parent": None if self.head is None or not depth else self.head.as_json(),
            "segments": [segment_as_json(number, ledger.segments.info(number)) for number in segments],
            "numbered": ledger.names.numbered,
            "calls_numbered": ledger.call_numbers.numbered,
            "flushed": dict(flushed),
        }
        key = layout.ledger_key(self._epoch, self._entropy.hex(8), self._codec.suffix)
        ref = put_object(self._store, key, self._codec.encode(header, rows))
        return PendingLedger(ref, depth, calls, segments, (due.credit, due_segments.credit))

    def published(self, pending: PendingLedger) -> None:
        """The slot that names `pending` is committed."""
        self._ordinal += 1
        self.head, self.depth = pending.ref, pending.depth
        self._calls.said(pending.calls, self._ordinal, pending.credits[0])
        self._segments.said(pending.segments, self._ordinal, pending.credits[1])
