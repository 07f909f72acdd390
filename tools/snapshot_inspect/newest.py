"""What a restore would take, what it would pass over and why, and what it would adopt on top.

Owns: the walk from the tail to the newest usable snapshot, by the log alone or with every check that a restore makes.
Does not know: the job's own fingerprint (a restore compares it as well), how the answer is shown.

Invariants:
1. The answer is that of recovery.restore.choose without a fingerprint; the tests compare the two.
2. Without `check` no ledger, state or segment is read.
3. Adoption is tried on a ledger in memory by recovery.restore.adopt itself, one segment at a time; nothing is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from recovery.errors import CannotRestore, Damaged, FormatNotUnderstood, ObjectMissing, RecoveryError
from recovery.ledger import Ledger
from recovery.log import Slot
from recovery.model import OPEN
from recovery.ports import LedgerCodec, Listed, ObjectStore, Put, SegmentCodec
from recovery.reading import missing_segments, read_transcripts
from recovery.restore import adopt
from recovery.snapshots import Loaded, ObjectRef, Snapshot, get_object, load
from snapshot_inspect.survey import Position, Unreadable, check_reference, nothing_published, snapshot_of, walk


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A snapshot or a slot that is newer and cannot be used."""

    seq: int
    what: str
    error: Damaged | CannotRestore


@dataclass(slots=True)
class Adopted:
    """What a restore would take over from segments that no snapshot names."""

    segments: list[str] = field(default_factory=list)
    tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    passed_over: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Newest:
    """The answer. `adoption` is None if it was not asked for."""

    snapshot: Snapshot
    position: Position
    newer: list[Slot]
    passed_over: list[PassedOver]
    adoption: Adopted | None = None


def newest(store: ObjectStore, at: Position, codecs: tuple[SegmentCodec, LedgerCodec] | None = None) -> Newest:
    """The snapshot that a restore would start from; with `codecs`, each one is checked as a restore checks it.

    Raises NothingPublished, FormatNotUnderstood where a restore would, or Damaged if no snapshot can be used.
    """
    newer: list[Slot] = []
    passed_over = [] if at.gap is None else [_slot_passed_over(at.gap)]
    collected: set[str] = set()
    for found in walk(store, at.tail):
        if isinstance(found, Unreadable):
            if isinstance(found.error, FormatNotUnderstood):
                raise found.error
            passed_over.append(_slot_passed_over(found))
            continue
        slot = found.slot
        if slot.kind == "snapshot":
            try:
                snapshot = snapshot_of(slot)
                loaded = None if codecs is None else check(store, *codecs, snapshot)
            except (Damaged, CannotRestore) as error:
                passed_over.append(PassedOver(slot.seq, f"snapshot {slot.seq}", error))
            else:
                adoption = None
                if codecs is not None and loaded is not None:
                    adoption = would_adopt(
                        store,
                        codecs[0],
                        loaded.ledger,
                        epoch=max([slot.epoch, *(later.epoch for later in newer)]),
                        from_epoch=slot.epoch,
                        flushed=loaded.flushed,
                        collected=collected,
                    )
                return Newest(snapshot, at, newer[::-1], passed_over, adoption)
        elif slot.kind == "gc" and codecs is not None:
            with suppress(Damaged):  # a restore takes such a list for one that was collected itself
                collected |= set(victims(store, slot) or ())
        newer.append(slot)
    raise _none(passed_over)


def _slot_passed_over(found: Unreadable) -> PassedOver:
    return PassedOver(found.seq, f"log slot {found.seq}", found.error)


def _none(passed_over: list[PassedOver]) -> RecoveryError:
    refused = [item.error for item in passed_over if isinstance(item.error, CannotRestore)]
    if refused:
        return refused[-1]
    if not passed_over:
        return nothing_published()
    reasons = "; ".join(f"{item.what}: {item.error.message}" for item in passed_over)
    return Damaged(
        f"no snapshot of this store can be restored: {reasons}",
        hint="look: snapshot-inspect verify --read-data STORE",
    )


def check(store: ObjectStore, segments: SegmentCodec, ledgers: LedgerCodec, snapshot: Snapshot) -> Loaded:
    """Everything that a restore reads before it takes a snapshot. Raises Damaged or FormatNotUnderstood."""
    loaded = load(store, ledgers, snapshot)
    ledger = loaded.ledger
    wrong = missing_segments(store, {key: ledger.segment(key) for key in ledger.segments_in_use()})
    if wrong:
        raise wrong[0]
    read_transcripts(store, segments, ledger, (entry for entry in ledger if entry.state == OPEN))
    return loaded


def victims(store: ObjectStore, slot: Slot) -> list[str] | None:
    """Keys that a gc slot names; None if its list is gone. Raises Damaged if the list is not what was written."""
    what = f"gc slot {slot.seq}"
    ref = ObjectRef.from_json(slot.body.get("victims"), what)
    check_reference(ref, what)
    try:
        data = get_object(store, ref)
    except ObjectMissing:
        return None
    try:
        keys = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{ref.key} is not JSON: {error}") from error
    if not isinstance(keys, list):
        raise Damaged(f"{ref.key} is not a list of keys")
    return [str(key) for key in keys]


def would_adopt(
    store: ObjectStore,
    codec: SegmentCodec,
    ledger: Ledger,
    *,
    epoch: int,
    from_epoch: int = 1,
    flushed: Mapping[str, int] | None = None,
    collected: set[str],
) -> Adopted:
    """What the next restore adds to `ledger`, which is changed here; `epoch` is the one that the log has reached."""
    adopted = Adopted()
    for item in store.list("seg/"):
        found = adopt(
            _OnlyOne(store, item),
            codec,
            ledger,
            below_epoch=epoch + 1,
            from_epoch=from_epoch,
            flushed=flushed or {},
            collected=collected,
        )
        if found.segments:
            adopted.segments.append(item.key)
        adopted.tokens += found.tokens
        adopted.rejected.update(found.rejected)
        adopted.passed_over += [(item.key, passed.reason) for passed in found.passed_over]
    return adopted


class _OnlyOne:
    """A store of which one segment is listed and read: what recovery.restore.adopt is told is about that one."""

    def __init__(self, inner: ObjectStore, item: Listed) -> None:
        self._inner = inner
        self._item = item

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        return [self._item] if self._item.key.startswith(prefix) and self._item.key > after else []

    def put_new(self, key: str, data: bytes) -> Put:
        raise AssertionError("inspecting writes nothing")

    def put(self, key: str, data: bytes) -> None:
        raise AssertionError("inspecting writes nothing")

    def delete(self, key: str) -> None:
        raise AssertionError("inspecting writes nothing")
