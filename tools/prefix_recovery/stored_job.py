"""Whether a run would be refused by what its store holds, and what of it the store has already: asked before anything
is claimed and any engine starts.

Owns: which snapshot is looked at, and the order of the checks.
Does not know: what a difference is (changes.py, vllm_hooks.opening), the engine.

Invariants:
1. Nothing is claimed and nothing is written.
2. Whatever is refused here, the run would refuse later, in the same words. What is damaged is left to the restore,
   which knows what to pass over.
3. A store in which nothing was published costs a look at its log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from prefix_recovery import changes
from prefix_recovery.job_here import JobHere
from recovery.adoption import adopt
from recovery.codec import fingerprint
from recovery.errors import Damaged, FormatNotUnderstood, NoStore
from recovery.ledger import Entry, Ledger
from recovery.log_reading import find_tail, kept_snapshots
from recovery.model import Request
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.reading import read_transcripts
from recovery.restore import Choice
from recovery.snapshots import Loaded, Snapshot, check_root, load
from snapshot_inspect.places import ledger_codec, segment_codec
from vllm_hooks.opening import refuse_foreign


@dataclass(frozen=True, slots=True)
class Held:
    """What a restore would find. `same`: calls with the prompt and sampling that are asked for now; `ended`: names of
    the calls whose whole answer is stored; `n_open`: calls of which a part is.
    """

    same: int
    ended: frozenset[str]
    n_open: int

    def answers(self, names: Collection[str]) -> bool:
        """Whether the store has every answer of these samples, and no call that anything could be decoded for."""
        return not self.n_open and self.ended.issuperset(names)


def check_stored(store: ObjectStore, choice: Choice, job: Callable[[], JobHere]) -> Held | None:
    """Raise what a run of `job` would be refused with; None if there is nothing to compare with.

    `job` is asked for only if there is: to find out what a job is takes a second or more.
    """
    if choice == "never":
        return None
    try:
        check_root(store)
    except NoStore:
        return None
    tail, ledgers, segments = find_tail(store), ledger_codec(), segment_codec()
    if next(kept_snapshots(store, tail), None) is None:
        return None
    here = job()
    refuse_foreign(store, ledgers, here.must, choice)
    loaded = _taken(store, ledgers, tail, choice, fingerprint(here.must))
    if loaded is None:
        return None
    if not isinstance(choice, int):
        epoch, flushed = loaded.snapshot.slot.epoch, loaded.flushed
        adopt(store, segments, loaded.ledger, epoch=epoch, flushed=flushed, collected=())
    found = refuse_changed(store, segments, loaded.ledger, here)
    ended = frozenset(entry.identity.rollout for entry in loaded.ledger if entry.ended is not None)
    return Held(found.same, ended, sum(entry.ended is None and entry.n_tokens > 0 for entry in loaded.ledger))


def begins_anew(store: ObjectStore, address: str) -> str:
    """What is said where a run finds no store; "" if there is one."""
    try:
        check_root(store)
    except NoStore:
        at = getattr(store, "endpoint", None)
        return f"no store at {address}{f' of {at}' if at else ''} yet: the run makes one and begins anew"
    return ""


def refuse_changed(store: ObjectStore, segments: SegmentCodec, ledger: Ledger, here: JobHere) -> changes.Compared:
    """Raise FingerprintMismatch if a call of `ledger` is not what the job asks for now."""
    found = changes.compared(ledger, here.source_digests)
    changes.refuse_changed(found, here.samples, here.requests, lambda entry: asked(store, segments, ledger, entry))
    return found


def asked(store: ObjectStore, segments: SegmentCodec, ledger: Ledger, entry: Entry) -> Request | None:
    """What a stored call was asked; None if that cannot be read."""
    try:
        return read_transcripts(store, segments, ledger, [entry], columns=False)[entry.call_id].request
    except (Damaged, FormatNotUnderstood):
        return None


def _taken(store: ObjectStore, ledgers: LedgerCodec, tail: int, choice: Choice, job: str) -> Loaded | None:
    """The newest snapshot of this job whose ledger can be read, or the one that was named."""
    for slot in kept_snapshots(store, tail):
        if (slot.seq == choice or not isinstance(choice, int)) and slot.body.get("fingerprint") == job:
            with suppress(Damaged, FormatNotUnderstood):
                return load(store, ledgers, Snapshot.from_slot(slot))
    return None
