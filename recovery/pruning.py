"""Deletes at once what a job would delete in time: what no kept and no pinned snapshot reaches.

Owns: the order of a prune.
Does not know: what garbage is (garbage.py), when it may be deleted (retention.py); it is a restore that carries no call
on, and one snapshot more.

Invariants:
1. Nothing is deleted that a restore before or after would need: the snapshot that is gone on from is verified first,
   what was flushed on top of it is adopted, and both are published before anything is named.
2. Names are in the log, and a further snapshot too, before anything is deleted: as ever.
3. Interrupted anywhere it leaves a store that a job, or another prune, goes on with.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.errors import NothingPublished
from recovery.log_reading import Read, find_tail, walk_back
from recovery.ports import Entropy, LedgerCodec, ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.restore import choose, restore
from recovery.restored import Restored
from recovery.slots import SlotLog


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune published: its epoch and snapshots, the first of which `restored` tells more about."""

    epoch: int
    snapshots: tuple[int, ...]
    restored: Restored


def prune(
    store: ObjectStore,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    entropy: Entropy,
    log: SlotLog,
    *,
    keep_latest_k: int,
) -> Pruned:
    """Claim the store with `log` and delete its garbage.

    Where a snapshot had to be passed over, only what was named for deletion before is deleted: somebody may want to
    look at the rest. Raises NothingPublished, with nothing claimed, if the store has no snapshot; Fenced; and what
    keeps garbage from being collected.
    """
    slots = walk_back(store, find_tail(store, trust_hint=False))
    if not any(isinstance(read, Read) and read.slot.kind == "snapshot" for read in slots):
        raise NothingPublished("no snapshot was published in this store", hint="look: snapshot-inspect verify STORE")
    log.claim()
    chosen = choose(store, segments, ledgers, log.tail, "auto", None)
    assert chosen.loaded is not None, "there is a snapshot, and `auto` takes one or raises"
    publication = Publication.on_top_of(
        store, segments, ledgers, entropy, log, chosen.loaded, keep_latest_k=keep_latest_k
    )
    fingerprint, states = str(chosen.loaded.snapshot.slot.body.get("fingerprint", "")), chosen.loaded.states
    restored = restore(
        publication,
        store,
        segments,
        ledgers,
        chosen,
        choice="auto",
        keep_latest_k=keep_latest_k,
        stop=None,
        states=lambda found: states,
        fingerprint_hex=fingerprint,
        exactness="",
    )
    if restored.uncollected is not None:
        raise restored.uncollected
    assert restored.published is not None
    draft = publication.record(states)
    publication.validate(draft, ())
    slot = publication.publish(draft, cause="final", fingerprint=fingerprint, restored_from=None)
    publication.collect()
    return Pruned(log.epoch, (restored.published, slot.seq), restored)
