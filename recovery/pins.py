"""Snapshots that are never collected, and how one is chosen beside a running job.

Owns: the object and the log entry of a pin, and what a collector leaves alone because of them (docs/format.md,
invariant 11.7).
Does not know: whether a snapshot is sound (who pins it has verified it), when garbage is collected.

A pin is made in two steps: an object, so that one listing shows every pin, and then a slot. Slots are in one order, and
who writes one knows all before it. So a pin either comes before the slot that names something of its snapshot as
garbage, and that one is then written without it; or after it, and is refused.

Invariants:
1. A pin slot is written only after its object is there, and only if no slot before it has condemned the snapshot.
2. What a collector names is decided after the last slot before its own was read, and without anything that a snapshot
   reaches whose pin's object is listed then.
3. What a pinned snapshot reaches has to be known for that: if one cannot be read, nothing is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from recovery import garbage, layout
from recovery.codec import canonical_json
from recovery.errors import ConfigError, Damaged, FormatNotUnderstood, NothingPublished, RecoveryError
from recovery.log import Slot, forgotten_by
from recovery.log_reading import read_slot, walk_back
from recovery.ports import Clock, Entropy, LedgerCodec, ObjectStore
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot


def listed(store: ObjectStore) -> dict[int, list[str]]:
    """Keys of all pins, by snapshot."""
    found: dict[int, list[str]] = defaultdict(list)
    for item in store.list(layout.PINS):
        if (snapshot := layout.pinned_by(item.key)) is not None:
            found[snapshot].append(item.key)
    return dict(found)


class Pinned:
    """What a collector leaves alone. Ledgers of pinned snapshots are read once; they never change."""

    def __init__(self, store: ObjectStore, ledgers: LedgerCodec) -> None:
        self._store = store
        self._ledgers = ledgers
        self._reached: dict[int, set[str]] = {}

    def reached(self) -> set[str]:
        """Keys of everything that the snapshots pinned now reach. Raises Damaged, naming the pin to remove."""
        snapshots = listed(self._store)
        self._reached = {seq: self._reached.get(seq) or self._read(seq) for seq in snapshots}
        return set().union(*self._reached.values())

    def _read(self, seq: int) -> set[str]:
        try:
            read = read_slot(self._store, seq)
            if read is None or read.slot.kind != "snapshot":
                return set()  # no snapshot has this number: it pins nothing
            return garbage.reached_by(self._store, self._ledgers, Snapshot.from_slot(read.slot))
        except (Damaged, FormatNotUnderstood) as error:
            raise Damaged(
                f"snapshot {seq} is pinned and cannot be read, so that nothing is collected: {error.message}",
                hint=f"put it back from a copy of the store, or give it up: prefix-recovery pin --remove STORE {seq}",
            ) from error


def pin(
    store: ObjectStore, clock: Clock, entropy: Entropy, owner: str, snapshot: int, reached: Collection[str]
) -> tuple[str, Slot]:
    """Pin a snapshot that reaches these keys. Returns the pin's key and slot.

    Raises NothingPublished if it is too late, and whatever keeps it from being known. Killed in the middle it may leave
    an object that has no slot: that one keeps the snapshot from being collected if nothing has condemned it yet.
    """
    key = layout.pin_key(snapshot, entropy.hex(8))
    document = {"snapshot": snapshot, "owner": owner, "utc": round(clock.utc(), 3)}
    store.put_new(key, canonical_json(document))
    log = SlotLog(store, clock, entropy, owner)
    seen = snapshot

    def body() -> Mapping[str, Any]:
        nonlocal seen
        refuse_if_condemned(store, snapshot, reached, above=seen, tail=log.tail)
        seen = log.tail
        return {"snapshot": snapshot, "pin": key}

    try:
        log.join()
        slot = log.append_if("pin", body)
    except (ConfigError, NothingPublished, Damaged):
        store.delete(key)
        raise
    assert slot is not None
    return key, slot


def refuse_if_condemned(store: ObjectStore, snapshot: int, reached: Collection[str], *, above: int, tail: int) -> None:
    """Raise NothingPublished if a slot in (above, tail] forgets the snapshot or names what it reaches as garbage."""
    wanted = set(reached)
    for seq, read in zip(range(tail, above, -1), walk_back(store, tail), strict=False):
        if isinstance(read, RecoveryError):
            raise Damaged(
                f"it cannot be told whether snapshot {snapshot} may be pinned: log slot {seq}: {read.message}",
                hint="look: snapshot-inspect verify STORE",
            )
        if read.slot.kind == "gc" and (going := sorted(wanted & garbage.intended(store, read.slot))):
            raise NothingPublished(
                f"it is too late to pin snapshot {snapshot}: slot {seq} says that {len(going)} of its objects are "
                f"about to be deleted, {going[0]} among them",
                hint="pin a newer one: snapshot-inspect list STORE",
            )
        if read.slot.kind == "forget" and snapshot in forgotten_by(read.slot):
            raise NothingPublished(
                f"snapshot {snapshot} was forgotten by slot {seq}", hint="pin another one: snapshot-inspect list STORE"
            )


def unpin(store: ObjectStore, snapshot: int) -> list[str]:
    """Remove every pin of a snapshot. Returns their keys."""
    keys = listed(store).get(snapshot, [])
    for key in keys:
        store.delete(key)
    return keys
