"""From a store to a running job: claim, choose, adopt, plan, publish.

Owns: which snapshot a restore takes, what it passes over and why, which unpublished segments it adopts, and the plan of
every open call.
Does not know: the engine, the caller's prompts, the event loop.

Order (docs/format.md, sections 11 and 12): 1. the epoch was claimed (the zombie is fenced); 2. the newest compatible snapshot
that verifies; 3. adoption of flushed, unpublished segments; 4. a plan for each open call; 5. one publication, before
anything is redispatched.

Invariants:
1. A crash at any point leaves a store that the next restore reads to the same calls: nothing is deleted here.
2. Nothing older than the chosen snapshot's epoch is adopted; an explicit older id adopts nothing.
3. Whatever is passed over is named with its reason; `strict` refuses instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from recovery import resume
from recovery.codec import canonical_json, fingerprint
from recovery.errors import CannotRestore, Damaged, FingerprintMismatch, NothingPublished, RecoveryError
from recovery.ledger import ChunkAt, Entry, Ledger
from recovery.log import Slot
from recovery.model import OPEN, CallId, SegmentInfo
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.reading import Transcript, missing_segments, read_segment, read_transcripts
from recovery.resume import ResumePlan, StopRules
from recovery.slots import walk_back
from recovery.snapshots import Loaded, ObjectRef, Snapshot, get_object, load, read_ledger_objects
from recovery.staging import coordinates_of

Choice = Literal["auto", "never", "strict"] | int


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A snapshot or segment that could not be used, and why."""

    what: str
    reason: str


@dataclass(slots=True)
class Chosen:
    """The snapshot a restore starts from (None: an empty ledger) and what was passed over on the way."""

    loaded: Loaded | None
    transcripts: dict[CallId, Transcript]
    passed_over: list[PassedOver] = field(default_factory=list)
    collected: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RestoredCall:
    """An open call brought back: its tokens so far and what to do with it."""

    entry: Entry
    transcript: Transcript
    plan: ResumePlan


@dataclass(slots=True)
class Restored:
    """What a restore found. `snapshot`: the id it started from; `published`: the adoption's id, if one was needed."""

    snapshot: int | None
    published: int | None
    passed_over: list[PassedOver]
    adopted_segments: int
    adopted_tokens: int
    rejected: dict[str, int]
    calls: list[RestoredCall]
    states: Mapping[str, bytes]

    @property
    def tokens_reused(self) -> int:
        """Tokens of open calls that need not be generated again."""
        return sum(len(c.transcript.token_ids) for c in self.calls if not isinstance(c.plan, resume.Restart))


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
    fields = differences(stored, must)
    raise FingerprintMismatch(
        f"snapshot {loaded.snapshot.id} belongs to another job: " + "; ".join(fields or ["fingerprint differs"]),
        hint="use the model, tokenizer and prompts that the store was made with, or give this job its own store",
    )


def choose(
    store: ObjectStore,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    tail: int,
    choice: Choice,
    must: Mapping[str, Any],
) -> Chosen:
    """The newest snapshot at or below `tail` that is compatible and verifies; see invariants 2 and 3."""
    chosen = Chosen(None, {})
    if choice == "never":
        return chosen
    refused: CannotRestore | None = None
    for read in walk_back(store, tail):
        if isinstance(read, RecoveryError):
            _pass_over(chosen, choice, "a log slot", read)
            continue
        slot = read.slot
        if slot.kind == "gc":
            chosen.collected |= _victims(store, slot)
        if slot.kind != "snapshot" or (isinstance(choice, int) and slot.seq != choice):
            continue
        try:
            loaded, transcripts = _verify(store, segments, ledgers, slot, must)
        except (Damaged, CannotRestore) as error:
            if isinstance(error, CannotRestore):
                refused = error
            _pass_over(chosen, choice, f"snapshot {slot.seq}", error)
            continue
        chosen.loaded, chosen.transcripts = loaded, transcripts
        return chosen
    if isinstance(choice, int):
        raise NothingPublished(f"there is no snapshot {choice}", hint="list them: snapshot-inspect list STORE")
    if refused is not None:
        raise refused
    if any(item.what.startswith("snapshot") for item in chosen.passed_over):
        reasons = "; ".join(f"{item.what}: {item.reason}" for item in chosen.passed_over)
        raise Damaged(
            f"no snapshot of this store can be restored: {reasons}",
            hint="look: snapshot-inspect verify --read-data STORE; to begin anew set restore: never",
        )
    return chosen


def _pass_over(chosen: Chosen, choice: Choice, what: str, error: RecoveryError) -> None:
    if choice == "strict" or isinstance(choice, int):
        raise error
    chosen.passed_over.append(PassedOver(what, error.message))


def _victims(store: ObjectStore, slot: Slot) -> set[str]:
    """Keys that a garbage collection was about to delete: never adopted again."""
    try:
        data = get_object(store, ObjectRef.from_json(slot.body.get("victims"), f"gc slot {slot.seq}"))
        return {str(key) for key in json.loads(data)}
    except (Damaged, ValueError):
        # The list itself was collected: everything it names was deleted long before.
        return set()


def _verify(
    store: ObjectStore, segments: SegmentCodec, ledgers: LedgerCodec, slot: Slot, must: Mapping[str, Any]
) -> tuple[Loaded, dict[CallId, Transcript]]:
    loaded = load(store, ledgers, Snapshot.from_slot(slot))
    check_fingerprint(loaded, must)
    ledger = loaded.ledger
    wrong = missing_segments(store, {key: ledger.segment(key) for key in ledger.segments_in_use()})
    if wrong:
        raise wrong[0]
    return loaded, read_transcripts(store, segments, ledger, (e for e in ledger if e.state == OPEN))


@dataclass(slots=True)
class Adoption:
    """What was taken over from segments that no snapshot had named."""

    segments: int = 0
    tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)
    passed_over: list[PassedOver] = field(default_factory=list)


def adopt(
    store: ObjectStore,
    codec: SegmentCodec,
    ledger: Ledger,
    *,
    below_epoch: int,
    from_epoch: int,
    flushed: Mapping[str, int],
    collected: set[str],
) -> Adoption:
    """Extend `ledger` by every adoptable segment (docs/format.md, invariant 11.4)."""
    adoption = Adoption()
    for key in sorted(item.key for item in store.list("seg/")):
        at = segment_position(key)
        if at is None or key in collected or ledger.knows_segment(key):
            continue
        epoch, writer, flush = at
        if not from_epoch <= epoch < below_epoch or (epoch == from_epoch and flush <= flushed.get(writer, 0)):
            continue
        try:
            info = codec.describe(key, store.get(key))
            records = read_segment(store, codec, info)
        except Damaged as error:
            adoption.passed_over.append(PassedOver(f"segment {key}", error.message))
            continue
        _apply(ledger, info, records, adoption)
    return adoption


def _apply(ledger: Ledger, info: SegmentInfo, records: list[Any], adoption: Adoption) -> None:
    ledger.describe(info)
    used = False
    for at in coordinates_of(records, info.key):
        reason = ledger.apply(at)
        if reason:
            adoption.rejected[reason] = adoption.rejected.get(reason, 0) + 1
            continue
        used = True
        if isinstance(at, ChunkAt):
            adoption.tokens += at.chunk.n_tokens
    adoption.segments += used


def segment_position(key: str) -> tuple[int, str, int] | None:
    """(epoch, writer, flush) of a segment's key, or None for a foreign name."""
    parts = key.split("/")
    if len(parts) != 4 or parts[0] != "seg" or not parts[1].startswith("e") or not parts[1][1:].isdigit():
        return None
    flush = parts[3].split("-")[0]
    return (int(parts[1][1:]), parts[2], int(flush)) if flush.isdigit() else None


def restore(
    publication: Publication,
    store: ObjectStore,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    chosen: Chosen,
    *,
    choice: Choice,
    keep_latest_k: int,
    stop: StopRules,
    states: Callable[[Restored], Mapping[str, bytes]],
    fingerprint_hex: str,
    exactness: str,
) -> Restored:
    """Steps 3 to 5 on the publication's ledger, which already is the chosen snapshot's.

    `states` gives the participants' states to publish with the adoption. Raises Fenced and the store's errors.
    """
    ledger, epoch, loaded = publication.ledger, publication.log.epoch, chosen.loaded
    adoption = Adoption()
    if choice != "never" and not isinstance(choice, int):
        adoption = adopt(
            store,
            segments,
            ledger,
            below_epoch=epoch,
            from_epoch=loaded.snapshot.slot.epoch if loaded else 1,
            flushed=loaded.flushed if loaded else {},
            collected=chosen.collected,
        )
    restored = Restored(
        snapshot=loaded.snapshot.id if loaded else None,
        published=None,
        passed_over=[*chosen.passed_over, *adoption.passed_over],
        adopted_segments=adoption.segments,
        adopted_tokens=adoption.tokens,
        rejected=adoption.rejected,
        calls=[],
        states=loaded.states if loaded else {},
    )
    open_entries = [entry for entry in ledger if entry.state == OPEN]
    if adoption.segments:
        transcripts = read_transcripts(store, segments, ledger, open_entries)
    else:
        transcripts = chosen.transcripts
    snapshot_id = publication.log.tail + 1
    for entry in open_entries:
        call = _plan(ledger, entry, transcripts[entry.call_id], stop, snapshot_id, exactness)
        restored.calls.append(call)
    if len(ledger):
        draft = publication.record(states(restored))
        publication.validate(draft, ())
        slot = publication.publish(
            draft, cause="adoption", fingerprint=fingerprint_hex, restored_from=restored.snapshot
        )
        restored.published = slot.seq
        if not restored.passed_over:
            publication.retention.drop(unreachable(store, publication, ledgers, keep_latest_k))
    return restored


def unreachable(store: ObjectStore, publication: Publication, ledgers: LedgerCodec, keep_latest_k: int) -> list[str]:
    """Objects of earlier epochs that none of the `keep_latest_k` newest snapshots reaches.

    Called right after an adoption was published, when every snapshot on the way was found sound: what a snapshot that
    cannot be read reaches is not known, and then nothing is collected.
    """
    reached: set[str] = set()
    kept = 0
    for read in walk_back(store, publication.log.tail):
        if isinstance(read, RecoveryError):
            return []
        if read.slot.kind == "snapshot":
            snapshot = Snapshot.from_slot(read.slot)
            objects = read_ledger_objects(store, ledgers, snapshot.ledger)
            reached |= {item.ref.key for item in objects} | {ref.key for ref in snapshot.states.values()}
            reached |= Ledger.from_objects((item.header, item.rows) for item in objects).segments_in_use()
            kept += 1
            if kept == keep_latest_k:
                break
    listed = [item.key for prefix in ("seg/", "ledger/", "state/", "gc/") for item in store.list(prefix)]
    return [key for key in listed if key not in reached and _epoch_of(key) < publication.log.epoch]


def _epoch_of(key: str) -> int:
    folder = key.split("/")[1]
    return int(folder[1:]) if folder.startswith("e") and folder[1:].isdigit() else 1 << 62


def _plan(
    ledger: Ledger, entry: Entry, transcript: Transcript, stop: StopRules, snapshot_id: int, exactness: str
) -> RestoredCall:
    n = len(transcript.token_ids)
    plan = resume.plan(transcript.request, n, int(transcript.token_ids[-1]) if n else None, stop)
    match plan:
        case resume.Finish():
            ledger.finish(entry.call_id, plan.finish_reason, plan.stop_reason)
        case resume.Resume():
            ledger.resume(entry.call_id, snapshot_id, exactness)
        case resume.Restart():
            ledger.restart(entry.call_id, snapshot_id, plan.reason)
    return RestoredCall(entry, transcript, plan)
