"""The verb `repair`: the hint written anew, and a newest snapshot that lost segments published again with what is left.

Owns: which snapshot is mended, what is done in which order, and what is said before and after.
Does not know: which records can be had (soundness.py), how a snapshot is published (recovery.publication).

Order, with --apply: 1. look, and tell what is lost; 2. claim: a job that runs is fenced from here; 3. look again, for
it may have gone on until then; 4. sound records of damaged segments are written into a new one; 5. each call is cut
back to what is left of it; 6. one publication, of cause `repair`; 7. the hint.

Invariants:
1. Nothing is ever deleted or overwritten but the hint. Without --apply nothing is written at all.
2. Nobody is fenced if there is no snapshot to mend.
3. What a restore would adopt is adopted here: of an older epoch nobody adopts it any more.
4. A ledger or a state that is damaged is not mended; then nothing is claimed, and it is said what a restore takes.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from recovery import garbage, log
from recovery.errors import Damaged, FormatNotUnderstood
from recovery.ledger import ChunkAt, OpenedAt
from recovery.log import Slot, forgotten_by
from recovery.model import SegmentInfo
from recovery.ports import ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.snapshots import Snapshot, load
from snapshot_inspect.carrying import Group, codec_of
from snapshot_inspect.live_records import live_records
from snapshot_inspect.newest import PassedOver, would_adopt
from snapshot_inspect.places import ledger_codec, open_place, segment_codec
from snapshot_inspect.progress import progress_on
from snapshot_inspect.repair_report import Findings, document_of, shown
from snapshot_inspect.soundness import damages, losses, to_move
from snapshot_inspect.survey import Unreadable, position, walk
from snapshot_inspect.texts import printable
from snapshot_inspect.verbs import Answer
from snapshot_inspect.writing import log_of, open_for_writing
from storage_backends.codecs import MixedSegmentCodec

TOLD_MAX = 12
"""Losses that are listed on stderr; all of them are in the document."""


def repair(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    sound: set[SegmentInfo] = set()
    found = look(place.store, sound)
    published: Slot | None = None
    claimed = args.apply and found.mend_snapshot
    if claimed:
        tell_losses(found)
        store, single_writer = open_for_writing(args.store)
        hint = found.at
        published, found = mend(store, found, sound, single_writer=single_writer)
        found.at = hint  # as it was before the claim of this repair
    elif args.apply and found.mend_hint:
        place.store.put(log.HINT_KEY, json.dumps({"tail": found.at.tail}).encode())
    document = document_of(place, found, published, applied=args.apply, claimed=claimed)
    code = Damaged.exit_code if document["problems"] or (document["needed"] and not args.apply) else 0
    return Answer(code, [document], lambda screen: shown(screen, document))


# ---- look ----------------------------------------------------------------------------------------------------------


def look(store: ObjectStore, sound: set[SegmentInfo], tail: int | None = None) -> Findings:
    """The newest snapshot and what is wrong with it. `sound` is added to: segments that need not be read again."""
    found = Findings(position(store))
    if found.at.gap is not None:
        found.problems.append(PassedOver(found.at.gap.seq, f"log slot {found.at.gap.seq}", found.at.gap.error))
    collected: set[str] = set()
    forgotten: set[int] = set()
    adopts = True
    for item in walk(store, found.at.tail if tail is None else tail):
        if isinstance(item, Unreadable):
            if isinstance(item.error, FormatNotUnderstood):
                raise item.error
            found.problems.append(PassedOver(item.seq, f"log slot {item.seq}", item.error))
            continue
        slot = item.slot
        try:
            if slot.kind == "gc":
                collected |= garbage.intended(store, slot)
            elif slot.kind == "forget":
                forgotten |= forgotten_by(slot)
            elif slot.kind == "snapshot" and slot.seq in forgotten:
                adopts = False
            elif slot.kind == "snapshot":
                _examine(store, slot, found, collected, sound, adopts=adopts)
                break
        except Damaged as error:
            adopts = False
            what = "snapshot" if slot.kind == "snapshot" else f"{slot.kind} slot"
            found.problems.append(PassedOver(slot.seq, f"{what} {slot.seq}", error))
            if slot.kind == "snapshot":
                break
    return found


def _examine(
    store: ObjectStore, slot: Slot, found: Findings, collected: set[str], sound: set[SegmentInfo], *, adopts: bool
) -> None:
    """Ledger, states, what would be adopted, and every segment. Raises Damaged for what cannot be mended."""
    found.snapshot = Snapshot.from_slot(slot)
    codec = segment_codec()
    loaded = load(store, ledger_codec(), found.snapshot)
    going = sorted(garbage.reached_from(found.snapshot, loaded.objects, loaded.ledger) & collected)
    if going:
        raise Damaged(f"a later garbage collection was about to delete {len(going)} of its objects, {going[0]} too")
    if adopts:
        found.adopted = would_adopt(
            store, codec, loaded.ledger, epoch=slot.epoch, flushed=loaded.flushed, collected=collected
        )
    found.loaded, found.counts = loaded, loaded.ledger.counts()
    found.damaged = damages(store, codec, loaded.ledger, sound, progress_on(sys.stderr, "repair"))
    sound.update(loaded.ledger.segment(key) for key in loaded.ledger.segments_in_use())
    sound.difference_update(damage.info for damage in found.damaged)
    found.lost = list(losses(loaded.ledger, found.damaged).values())


def tell_losses(found: Findings) -> None:
    """On stderr, before anything is written: what the new snapshot will not have."""
    for item in found.lost[:TOLD_MAX]:
        print(f"lost: {printable(str(item))}", file=sys.stderr)
    if len(found.lost) > TOLD_MAX:
        print(f"lost: of {len(found.lost) - TOLD_MAX} calls more", file=sys.stderr)


# ---- mend ----------------------------------------------------------------------------------------------------------


def mend(
    store: ObjectStore, before: Findings, sound: set[SegmentInfo], *, single_writer: bool
) -> tuple[Slot | None, Findings]:
    """Claim, look again, publish what is left. Returns the slot, None if there was nothing to mend any more.

    Raises Fenced if another one claimed meanwhile, Damaged if what was to be had is not there any more.
    """
    from vllm_hooks.opening import SystemEntropy

    entropy = SystemEntropy()
    slots = log_of(store, "repair", single_writer=single_writer)
    slots.claim()
    found = look(store, sound, slots.tail)
    if found.loaded is None or not found.mend_snapshot:
        return None, found
    if found.lost != before.lost:
        tell_losses(found)
    loaded = found.loaded
    segments = MixedSegmentCodec(codec_of(loaded.ledger))
    publication = Publication.on_top_of(store, segments, ledger_codec(), entropy, slots, loaded, keep_latest_k=1)
    group = _moved(store, segments, found, Group(store, segments, entropy, slots.epoch, "repair"))
    publication.flushed = {item.writer: item.flush for item in group.staged}
    _cut(publication, found)
    draft = publication.record(loaded.states)
    for error in publication.validate(draft, group.staged):
        raise error
    body = loaded.snapshot.slot.body
    slot = publication.publish(
        draft, cause="repair", fingerprint=str(body.get("fingerprint", "")), restored_from=loaded.snapshot.id
    )
    for note in slots.try_to_leave_hint():
        print(f"note: {printable(note)}", file=sys.stderr)
    return slot, found


def _moved(store: ObjectStore, codec: SegmentCodec, found: Findings, group: Group) -> Group:
    """What can be had of damaged segments and is kept, written anew; the ledger finds it there."""
    assert found.loaded is not None
    ledger = found.loaded.ledger
    lost = {item.call_id: item for item in found.lost}
    moved = [use for damage in found.damaged for use in to_move(damage, lost)]
    for damage in found.damaged:
        for use, record in live_records(store, codec, damage.info, to_move(damage, lost)):
            if isinstance(record, Exception):
                raise record
            group.add(use, record)
    group.finish()
    for staged in group.staged:
        ledger.describe(staged.info)
    for use in moved:
        at = group.moved[use.place]
        if isinstance(at, ChunkAt) and use.chunk is not None:
            reason = ledger.move(use.call_id, [use.chunk], [at.chunk])
        elif isinstance(at, OpenedAt):
            reason = ledger.move_request(use.call_id, use.place, at.identity.opened)
        assert not reason, reason
    return group


def _cut(publication: Publication, found: Findings) -> None:
    """Each call ends before what it lost: all that is kept of a damaged segment lies elsewhere by now."""
    for damage in found.damaged:
        publication.ledger.retract(damage.info.key, {use.call_id for use in damage.lost})
