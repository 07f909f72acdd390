"""What no kept snapshot reaches, as a restore finds it in the store.

Owns: which objects of earlier epochs are garbage, and which keys a published intent names.
Does not know: when garbage is deleted (retention.py, publication.py), the chosen snapshot.

Invariants:
1. Only objects of ours (layout.py) of an epoch below the collector's are named: what a live writer may still want to
   reference is of its own epoch.
2. Where a kept snapshot cannot be read, what it reaches is not known, and nothing is named.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from recovery import layout
from recovery.errors import Damaged, FormatNotUnderstood, NotFoundOrRefused, ObjectMissing, RecoveryError
from recovery.ledger import Ledger
from recovery.log import Slot, forgotten_by
from recovery.log_reading import walk_back
from recovery.ports import LedgerCodec, ObjectStore
from recovery.snapshots import MAX_JSON_BYTES, LedgerObject, ObjectRef, Snapshot, get_object, read_ledger_objects


def reached_by(store: ObjectStore, ledgers: LedgerCodec, snapshot: Snapshot) -> set[str]:
    """Keys of everything that a snapshot references. Raises Damaged or FormatNotUnderstood."""
    objects = read_ledger_objects(store, ledgers, snapshot.ledger)
    return reached_from(snapshot, objects, Ledger.from_objects((item.header, item.rows) for item in objects))


def reached_from(snapshot: Snapshot, objects: Iterable[LedgerObject], ledger: Ledger) -> set[str]:
    """The same for a snapshot that was read."""
    others = {item.ref.key for item in objects} | {ref.key for ref in snapshot.states.values()}
    return others | ledger.segments_in_use()


def unreached(
    store: ObjectStore,
    ledgers: LedgerCodec,
    tail: int,
    epoch: int,
    keep_latest_k: int,
    known: Mapping[int, Collection[str]],
) -> list[str]:
    """Objects of epochs below `epoch` that none of the newest snapshots at or below slot `tail` reaches, pins aside.

    `known` gives, by id, what those snapshots reach that need not be read again.
    """
    reached: set[str] = set()
    forgotten: set[int] = set()
    kept = 0
    for read in walk_back(store, tail):
        if isinstance(read, RecoveryError):
            return []
        try:
            if read.slot.kind == "forget":
                forgotten |= forgotten_by(read.slot)
            if read.slot.kind != "snapshot" or read.slot.seq in forgotten:
                continue
            reached.update(known.get(read.slot.seq) or reached_by(store, ledgers, Snapshot.from_slot(read.slot)))
        except (Damaged, FormatNotUnderstood):
            return []
        kept += 1
        if kept == keep_latest_k:
            break
    listed = [item.key for prefix in layout.PREFIXES for item in store.list(prefix)]
    return [key for key in listed if key not in reached and _is_below(key, epoch)]


def _is_below(key: str, epoch: int) -> bool:
    written = layout.epoch_of(key)
    return written is not None and written < epoch


def intended(store: ObjectStore, slot: Slot) -> set[str]:
    """Keys that a gc slot says are about to be deleted. Raises Damaged if its list is unreadable.

    A list that is not there any more was garbage itself, and goes after everything that it names. Its slot could be
    read, so that NotFoundOrRefused says the same.
    """
    what = f"the list of gc slot {slot.seq}"
    ref = ObjectRef.from_json(slot.body.get("victims"), what)
    try:
        keys = json.loads(get_object(store, ref, MAX_JSON_BYTES))
    except (ObjectMissing, NotFoundOrRefused):
        return set()
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} is not JSON: {error}") from error
    if not isinstance(keys, list) or not all(isinstance(key, str) and layout.epoch_of(key) for key in keys):
        raise Damaged(f"{what} does not name objects of a store")
    return set(keys)
