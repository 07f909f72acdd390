"""Snapshots that are never collected, and how one is chosen beside a running job.

Owns: the object and the log entry of a pin, and what a collector leaves alone because of them (docs/format.md,
invariant 11.7).
Does not know: whether a snapshot is sound (who pins it has verified it), when garbage is collected.

A pin is made in two steps: an object, which is there as long as the pin is, and then a slot. Slots are in one order,
and who writes one knows all before it. So a pin either comes before the slot that names something of its snapshot as
garbage, and that one is then written without it; or after it, and is refused. A slot with a list of garbage also says
which pins it knew, so that a new collector reads the log no further back than to the last of them. A listing shows the
objects too, those of pins in the making among them; it may be late, and nothing depends on it.

Invariants:
1. A pin slot is written only after its object is there, and only if no slot before it has condemned the snapshot.
2. What a collector names is decided when every slot before its own is known, and without anything that a snapshot
   reaches which has a pin whose object is there.
3. What a pinned snapshot reaches has to be known for that: if one cannot be read, nothing is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from recovery import garbage, layout
from recovery.codec import canonical_json
from recovery.errors import (
    ConfigError,
    Damaged,
    FormatNotUnderstood,
    NothingPublished,
    ObjectMissing,
    RecoveryError,
)
from recovery.log import Slot, forgotten_by
from recovery.log_reading import find_tail, read_slot, walk_back
from recovery.ports import Clock, Entropy, LedgerCodec, ObjectStore
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot


def listed(store: ObjectStore) -> dict[int, list[str]]:
    """Keys of all pins, by snapshot, as a listing shows them."""
    found: dict[int, list[str]] = defaultdict(list)
    for item in store.list(layout.PINS):
        if (snapshot := layout.pinned_by(item.key)) is not None:
            found[snapshot].append(item.key)
    return dict(found)


def in_log(store: ObjectStore, tail: int) -> set[str]:
    """Keys in the pin slots up to `tail`, as far as a list of garbage does not say which were there already.

    A slot that cannot be read may have been one: its pin is found by listing alone.
    """
    found: set[str] = set()
    for read in walk_back(store, tail):
        if isinstance(read, RecoveryError):
            continue
        if read.slot.kind == "pin" and isinstance(key := read.slot.body.get("pin"), str):
            found.add(key)
        if read.slot.kind == "gc" and isinstance(keys := read.slot.body.get("pins"), list):
            return found | {key for key in keys if isinstance(key, str)}
    return found


def is_there(store: ObjectStore, key: str) -> bool:
    """Whether a pin is still held. What is no pin's key never was."""
    if layout.pinned_by(key) is None:
        return False
    try:
        store.get(key, 0, 1)
    except ObjectMissing:
        return False
    return True


class Pinned:
    """What the collector with this place in the log leaves alone. Ledgers are read once; they never change."""

    def __init__(self, store: ObjectStore, ledgers: LedgerCodec, log: SlotLog) -> None:
        self._store = store
        self._ledgers = ledgers
        self._log = log
        self._known: set[str] | None = None
        self._reached: dict[int, set[str]] = {}

    def look(self) -> tuple[list[str], set[str]]:
        """The pins that are there now, and everything that their snapshots reach.

        Raises Damaged, naming the pin to remove, if that cannot be known.
        """
        if self._known is None:
            self._known = in_log(self._store, self._log.tail)
        listed_keys = {key for keys in listed(self._store).values() for key in keys}
        unlisted = (self._known | set(self._log.pins)) - listed_keys
        self._known = listed_keys | {key for key in unlisted if is_there(self._store, key)}
        snapshots = {seq for seq in map(layout.pinned_by, self._known) if seq is not None}
        self._reached = {seq: self._reached.get(seq) or self._read(seq) for seq in snapshots}
        return sorted(self._known), set().union(*self._reached.values())

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
    if not is_there(store, key):
        raise NothingPublished(
            f"snapshot {snapshot} is not pinned: its pins were removed while this one was made", hint="pin it again"
        )
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
    """Remove every pin of a snapshot, listed or only in the log. Returns their keys."""
    unlisted = (key for key in in_log(store, find_tail(store)) if layout.pinned_by(key) == snapshot)
    keys = sorted({*listed(store).get(snapshot, []), *(key for key in unlisted if is_there(store, key))})
    for key in keys:
        store.delete(key)
    return keys
