"""Snapshots that no restore shall consider any more, and the log entry that says so.

Owns: what may be forgotten, and the slot that does it (docs/format.md, invariant 11.8).
Does not know: why; what becomes of their objects (garbage.py).

Invariants:
1. The slot is written under a claim of its own: a coordinator whose ledger goes back to what is forgotten publishes
   nothing more.
2. A pinned snapshot is not forgotten. Pins and forgets are slots of one log, so that only one of two that meet is
   written.
3. Unless it is asked for, a snapshot is left that a restore can take: garbage collection may have condemned the older
   ones until the claim. That is looked at after the claim, which ends it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from recovery import garbage, pins
from recovery.errors import ConfigError, Damaged, FormatNotUnderstood, RecoveryError
from recovery.log import Slot, forgotten_by
from recovery.log_reading import walk_back
from recovery.ports import LedgerCodec, ObjectStore
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot


def forget(
    store: ObjectStore, ledgers: LedgerCodec, log: SlotLog, snapshots: Collection[int], *, leave_none: bool = False
) -> Slot | None:
    """Claim the store with `log` and forget these. Returns the slot, None if all were forgotten already.

    Raises ConfigError for what is no snapshot or is pinned and, without `leave_none`, if no snapshot were left that a
    restore could take; Fenced if another coordinator claimed the store meanwhile.
    """
    log.claim()

    def body() -> Mapping[str, Any] | None:
        wanted = left_to_forget(store, log.tail, snapshots)
        if wanted and not leave_none and what_is_left(store, ledgers, log.tail, wanted) is None:
            raise ConfigError(
                "no snapshot would be left that a restore could take",
                hint="forget fewer, or all of them with --leave-none: a run then begins anew, with restore: never",
            )
        return {"snapshots": wanted} if wanted else None

    slot = log.append_if("forget", body)
    log.leave_hint()
    return slot


def left_to_forget(store: ObjectStore, tail: int, snapshots: Collection[int]) -> list[int]:
    """Those that are not forgotten already, in order. Raises ConfigError for what cannot be forgotten."""
    left = set(snapshots)
    known: set[int] = set()
    forgotten: set[int] = set()
    held: dict[str, int] = {}
    for seq, read in zip(range(tail, min(snapshots, default=1) - 1, -1), walk_back(store, tail), strict=False):
        if isinstance(read, RecoveryError):
            if seq in left:
                raise ConfigError(f"{seq} cannot be forgotten: {read.message}", hint="a restore passes over it anyway")
            continue
        if read.slot.kind == "forget":
            try:
                forgotten |= forgotten_by(read.slot)
            except Damaged:
                continue  # what it forgot is forgotten again
        elif read.slot.kind == "pin":
            held[str(read.slot.body.get("pin"))] = int(read.slot.body.get("snapshot", 0))
        elif read.slot.kind == "snapshot":
            known.add(seq)
    hint = "list them: snapshot-inspect list STORE"
    if strangers := sorted(left - known):
        raise ConfigError(f"there is no snapshot {strangers[0]}", hint=hint)
    kept = pins.listed(store).keys() | {seq for key, seq in held.items() if pins.is_there(store, key)}
    if pinned := sorted(left & kept):
        raise ConfigError(
            f"snapshot {pinned[0]} is pinned",
            hint=f"if it is to be forgotten all the same: prefix-recovery pin --remove STORE {pinned[0]}",
        )
    return sorted(left - forgotten)


def what_is_left(store: ObjectStore, ledgers: LedgerCodec, tail: int, snapshots: Collection[int]) -> int | None:
    """The newest snapshot beside these that is readable, not forgotten and not condemned by garbage collection."""
    forgotten = set(snapshots)
    collected: set[str] = set()
    for read in walk_back(store, tail):
        if isinstance(read, RecoveryError):
            continue
        slot = read.slot
        try:
            if slot.kind == "gc":
                collected |= garbage.intended(store, slot)
            elif slot.kind == "forget":
                forgotten |= forgotten_by(slot)
            elif slot.kind == "snapshot" and slot.seq not in forgotten:
                reached = garbage.reached_by(store, ledgers, Snapshot.from_slot(slot))
                if not collected & reached:
                    return slot.seq
        except (Damaged, FormatNotUnderstood):
            continue
    return None
