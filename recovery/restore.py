"""From a store to a running job: claim, choose, adopt, plan, publish.

Owns: which snapshot a restore takes, what it passes over and why, and the plan of every open call.
Does not know: what is adoptable (adoption.py), what is garbage (garbage.py), the engine, the caller's prompts, the
event loop.

Order (docs/format.md, sections 11 and 12): 1. the epoch was claimed (the zombie is fenced); 2. the newest compatible
snapshot that verifies; 3. adoption of flushed, unpublished segments; 4. a plan for each open call; 5. one publication,
before anything is redispatched, also when there is nothing to carry on; 6. garbage.

Invariants:
1. A crash at any point leaves a store that the next restore reads to the same calls: nothing is deleted before step 5.
2. Only what was flushed on top of the chosen snapshot is adopted; an explicit id adopts nothing.
3. Whatever is passed over is named with its reason; `strict` refuses instead, and so does an explicit id that fails.
   What was forgotten is not passed over: it is not there.
4. A snapshot that references what a later garbage collection was about to delete is passed over: its objects may
   vanish.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recovery import garbage, resume
from recovery.adoption import Adoption, adopt
from recovery.codec import canonical_json, fingerprint
from recovery.errors import (
    CannotRestore,
    CredentialsRefused,
    Damaged,
    Fenced,
    FingerprintMismatch,
    NothingPublished,
    RecoveryError,
)
from recovery.gathering import Gathering, Transcripts
from recovery.ledger import Ledger
from recovery.log import Slot, forgotten_by
from recovery.log_reading import walk_back
from recovery.model import OPEN
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.read_ahead import ReadAhead
from recovery.reading import gathered, missing_segments, read_transcripts
from recovery.restored import PassedOver, Restored, RestoredCall, planned, without_collections
from recovery.resume import StopRules
from recovery.snapshots import LedgerObject, Loaded, Snapshot, load

DELETES_PER_RESTORE = 256
"""So that a great deal of garbage does not keep a job from starting; the rest goes with its first snapshots."""

_LIST = "list them: snapshot-inspect list STORE"

Choice = Literal["auto", "never", "strict"] | int


@dataclass(slots=True)
class Chosen:
    """The snapshot a restore starts from (None: an empty ledger) and what was passed over on the way.

    `collected`: keys that garbage collections after it were about to delete; `forgotten`: snapshots that forget slots
    after it name; `adopts`: False if not all of this is known, or if a snapshot after it was forgotten.
    """

    loaded: Loaded | None
    transcripts: Transcripts
    passed_over: list[PassedOver] = field(default_factory=list)
    collected: set[str] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    adopts: bool = True


def compatibility_record(must: Mapping[str, Any], recorded: Mapping[str, Any]) -> bytes:
    """The state `job`: docs/format.md, section 10."""
    return canonical_json({"must": dict(must), "recorded": dict(recorded)})


def differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Dotted fields that differ, as `field: stored -> present`."""
    names = sorted(set(stored) | set(present))
    return [
        f"{name}: {stored.get(name)!r} in the store, {present.get(name)!r} here"
        for name in names
        if stored.get(name) != present.get(name)
    ]


def check_fingerprint(loaded: Loaded, must: Mapping[str, Any]) -> None:
    """Raise FingerprintMismatch, naming the fields, unless the snapshot belongs to this job."""
    if loaded.snapshot.slot.body.get("fingerprint") == fingerprint(must):
        return
    stored: Mapping[str, Any] = {}
    if "job" in loaded.states:
        try:
            stored = json.loads(loaded.states["job"])["must"]
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"state 'job' of snapshot {loaded.snapshot.id} is malformed: {error}") from error
    fields = differences(stored, json.loads(canonical_json(dict(must))))
    raise FingerprintMismatch(
        f"snapshot {loaded.snapshot.id} belongs to another job: " + "; ".join(fields or ["fingerprint differs"]),
        hint="use the model, tokenizer and prompts that the store was made with, or give this job its own store",
    )


def anything(states: Mapping[str, bytes]) -> None:
    """Every snapshot's states will do."""


def choose(
    store: ObjectStore,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    tail: int,
    choice: Choice,
    must: Mapping[str, Any] | None,
    compatible: Callable[[Mapping[str, bytes]], None] = anything,
) -> Chosen:
    """The newest snapshot at or below `tail` that is compatible and verifies; see invariants 2 and 3.

    `must`: what the job's fingerprint is of; None takes any job's.
    `compatible` raises CannotRestore, or Damaged, for participants' states with which this process cannot go on.
    """
    chosen = Chosen(None, Transcripts.none())
    if choice == "never":
        return chosen
    refused: CannotRestore | None = None
    for seq, read in zip(range(tail, 0, -1), walk_back(store, tail), strict=True):
        try:
            if isinstance(read, RecoveryError):
                raise read
            if read.slot.kind == "gc":
                chosen.collected |= garbage.intended(store, read.slot)
            if read.slot.kind == "forget":
                chosen.forgotten |= forgotten_by(read.slot)
            if seq in chosen.forgotten:
                chosen.adopts = False
                if seq == choice:
                    raise NothingPublished(f"snapshot {seq} was forgotten", hint=_LIST)
                continue
            if read.slot.kind == "snapshot" and (seq == choice or not isinstance(choice, int)):
                loaded, transcripts = _verify(store, segments, ledgers, read.slot, must, chosen.collected)
                compatible(loaded.states)
                chosen.loaded, chosen.transcripts = loaded, transcripts
                return chosen
        except CredentialsRefused:
            raise  # says nothing about the snapshot: an older one must not be taken for it
        except (Damaged, CannotRestore) as error:
            if choice in ("strict", seq):
                raise
            if isinstance(error, CannotRestore):
                refused = refused or error
            what = "log slot" if isinstance(read, RecoveryError) else read.slot.kind
            chosen.adopts = chosen.adopts and what not in ("gc", "forget")
            chosen.passed_over.append(PassedOver(f"{what} {seq}", error.message))
    reasons = "; ".join(f"{item.what}: {item.reason}" for item in chosen.passed_over)
    if isinstance(choice, int):
        passed = f" (passed over: {reasons})" if reasons else ""
        raise NothingPublished(f"there is no snapshot {choice}{passed}", hint=_LIST)
    if refused is not None:
        raise refused
    if reasons:
        raise Damaged(
            f"no snapshot of this store can be restored: {reasons}",
            hint="look: snapshot-inspect verify --read-data STORE; to begin anew set restore: never",
        )
    if chosen.forgotten:
        raise NothingPublished(
            f"every snapshot of this store was forgotten ({len(chosen.forgotten)})",
            hint="to begin anew set restore: never",
        )
    return chosen


@without_collections()
def _verify(
    store: ObjectStore,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    slot: Slot,
    must: Mapping[str, Any] | None,
    collected: set[str],
) -> tuple[Loaded, Transcripts]:
    with ReadAhead(store, segments) as ahead:
        return _verified(store, ledgers, slot, must, collected, ahead)


def _verified(
    store: ObjectStore,
    ledgers: LedgerCodec,
    slot: Slot,
    must: Mapping[str, Any] | None,
    collected: set[str],
    ahead: ReadAhead,
) -> tuple[Loaded, Transcripts]:
    snapshot = Snapshot.from_slot(slot)

    def first(newest: LedgerObject) -> None:
        """Segments that open calls grew into last are read while the rest of the ledger is."""
        if must is None or slot.body.get("fingerprint") == fingerprint(must):
            segments, numbers = newest.header["segments"], newest.rows.open_segments()
            ahead.expect(info for number, info in segments.items() if number in numbers)

    loaded = load(store, ledgers, snapshot, first)
    if must is not None:
        check_fingerprint(loaded, must)
    ledger = loaded.ledger
    reached = garbage.reached_from(snapshot, loaded.objects, ledger)
    if going := sorted(collected & reached):
        raise Damaged(
            f"{len(going)} objects of snapshot {slot.seq} were about to be deleted by a later garbage collection, "
            f"{going[0]} among them"
        )
    wrong = missing_segments(store, {key: ledger.segment(key) for key in ledger.segments_in_use()})
    if wrong:
        raise wrong[0]
    gathering = Gathering(ledger, [entry for entry in ledger if entry.state == OPEN], columns=True)
    return loaded, gathered(ahead, ledger, gathering)


def restore(
    publication: Publication,
    store: ObjectStore,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    chosen: Chosen,
    *,
    choice: Choice,
    keep_latest_k: int,
    stop: StopRules | None,
    states: Callable[[Restored], Mapping[str, bytes]],
    fingerprint_hex: str,
    exactness: str,
) -> Restored:
    """Steps 3 to 5 on the publication's ledger, which already is the chosen snapshot's.

    `states` gives the participants' states to publish with the adoption. Without `stop` nobody is about to carry the
    calls on, and none is planned. Raises Fenced and the store's errors.
    """
    ledger, loaded = publication.ledger, chosen.loaded
    adoption = Adoption()
    if loaded is not None and chosen.adopts and not isinstance(choice, int):
        epoch, flushed = loaded.snapshot.slot.epoch, loaded.flushed
        adoption = adopt(store, segments, ledger, epoch=epoch, flushed=flushed, collected=chosen.collected)
    if choice == "strict" and adoption.unreadable:
        raise adoption.unreadable[0][1]
    restored = Restored(
        snapshot=loaded.snapshot.id if loaded else None,
        published=None,
        passed_over=[
            *chosen.passed_over,
            *(PassedOver(f"segment {key}", error.message) for key, error in adoption.unreadable),
        ],
        adopted_segments=adoption.segments,
        adopted_tokens=adoption.tokens,
        rejected=adoption.rejected,
        calls=[],
        states=loaded.states if loaded else {},
    )
    snapshot_id = publication.log.tail + 1
    if stop is not None:
        transcripts = chosen.transcripts
        with without_collections():
            if adoption.segments:
                open_calls = (entry for entry in ledger if entry.state == OPEN)
                transcripts = read_transcripts(store, segments, ledger, open_calls, known=transcripts)
            restored.calls = planned(transcripts, stop)
            for call in restored.calls:
                carry_out(ledger, call, snapshot_id, exactness)
    restored.published = _publish(publication, states(restored), snapshot_id, fingerprint_hex, restored.snapshot)
    restored.uncollected = _collect(store, publication, ledgers, chosen, keep_latest_k)
    return restored


def _publish(
    publication: Publication, states: Mapping[str, bytes], expected: int, fingerprint_hex: str, origin: int | None
) -> int:
    """Publish the adoption. Its id is in the histories of the calls already: a guest's slot may take that number."""
    while True:
        draft = publication.record(states)
        publication.validate(draft, ())
        slot = publication.publish_as(
            expected, draft, cause="adoption", fingerprint=fingerprint_hex, restored_from=origin
        )
        if slot is not None:
            return slot.seq
        now = publication.log.tail + 1
        publication.ledger.renumber(expected, now)
        expected = now


def _collect(
    store: ObjectStore, publication: Publication, ledgers: LedgerCodec, chosen: Chosen, keep_latest_k: int
) -> RecoveryError | None:
    """What earlier coordinators left: a crash loop must not fill the store. Raises only Fenced."""
    log = publication.log
    try:
        if not chosen.passed_over:
            known = {log.tail: publication.reached()}
            unreached = garbage.unreached(store, ledgers, log.tail, log.epoch, keep_latest_k, known)
            publication.retention.take_over(sorted(chosen.collected), unreached)
        budget = iter(range(DELETES_PER_RESTORE))
        publication.collect(lambda: next(budget, None) is not None)
    except Fenced:
        raise
    except RecoveryError as error:
        return error
    return None


def carry_out(ledger: Ledger, call: RestoredCall, snapshot_id: int, exactness: str) -> None:
    """What the plan of a call does to the ledger."""
    call_id, plan = call.entry.call_id, call.plan
    match plan:
        case resume.Finish():
            ledger.finish(call_id, plan.finish_reason, plan.stop_reason)
        case resume.Resume():
            ledger.resume(call_id, snapshot_id, "statistical" if plan.difference else exactness)
        case resume.Restart():
            ledger.restart(call_id, snapshot_id, plan.reason)
