"""One ledger made durable and visible: record, validate, publish, collect.

Owns: the write order (segments are there already: ledger and states, read back, then the slot), and what a slot says.
Does not know: holds, fences, deadlines (coordinator.py), how the ledger came to be (restore.py, coordinator.py).

Invariants (docs/format.md, section 11):
1. The slot is created last, after everything it references was read back and checked.
2. A failure at any call leaves the last published snapshot and this ledger's changes as they were: the next attempt
   contains them.
3. Deletion follows retention.py and never precedes the publication of its intent, which spares what is pinned.
4. The ledger is changed by one thread at a time, under `lock`; others read an excerpt of it. Nothing waits for a store
   under the lock.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from recovery import layout
from recovery.codec import canonical_json, sha256_hex
from recovery.errors import Damaged, DigestMismatch, RecoveryError, SnapshotAbandoned
from recovery.ledger import Ledger
from recovery.ledger_writer import LedgerWriter, PendingLedger
from recovery.log import Slot
from recovery.model import CallId
from recovery.pins import Pinned
from recovery.ports import Entropy, LedgerCodec, ObjectStore, SegmentCodec
from recovery.retention import Retention
from recovery.slots import SlotLog
from recovery.snapshots import MAX_JSON_BYTES, Loaded, ObjectRef, get_object, put_object
from recovery.staging import Staged, coordinates_of

WORTH_A_SLOT = 16
"""Every snapshot leaves a ledger object behind, and slots are for ever."""

VICTIMS_MAX = 1 << 16
"""One list of victims names so many at most: one that is too long to be read (docs/format.md, section 13) would
condemn nothing, and keep restores from adopting. The rest is offered again with the next snapshot."""

StoreAgain = Callable[[Staged], Staged | None]
"""Stores the same records once more, under another name; None if nobody has them any more."""


def _never(staged: Staged) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Draft:
    """Written, not yet published."""

    ledger: PendingLedger
    states: Mapping[str, ObjectRef]
    nbytes: int
    flushed: Mapping[str, int]


class Publication:
    """Publishes the ledger of one coordinator, again and again."""

    def __init__(
        self,
        store: ObjectStore,
        segments: SegmentCodec,
        ledgers: LedgerCodec,
        entropy: Entropy,
        log: SlotLog,
        ledger: Ledger,
        *,
        keep_latest_k: int,
    ) -> None:
        self._store = store
        self._segments = segments
        self._entropy = entropy
        self.log = log
        self.ledger = ledger
        self.lock = threading.Lock()
        self.retracted: set[CallId] = set()
        """Calls of which `validate` took something back; whoever tells them empties it."""
        self.writer = LedgerWriter(store, ledgers, entropy, log.epoch, ledger)
        self.retention = Retention(keep_latest_k)
        self._pinned = Pinned(store, ledgers, log)
        self.flushed: dict[str, int] = {}
        self._states: dict[str, ObjectRef] = {}
        self._chain: list[str] = []
        self._reached: set[str] = set()
        self._strays: list[str] = []
        """Stored segments that no published snapshot ever had, nor will: all that they hold came too late."""

    @classmethod
    def on_top_of(
        cls,
        store: ObjectStore,
        segments: SegmentCodec,
        ledgers: LedgerCodec,
        entropy: Entropy,
        log: SlotLog,
        loaded: Loaded | None,
        *,
        keep_latest_k: int,
    ) -> Publication:
        """Publishes on top of a snapshot of this store that was loaded, or of nothing."""
        ledger = loaded.ledger if loaded is not None else Ledger()
        publication = cls(store, segments, ledgers, entropy, log, ledger, keep_latest_k=keep_latest_k)
        if loaded is not None:
            publication.writer.adopt(loaded.objects)
            publication.start_from([item.ref.key for item in loaded.objects], loaded.snapshot.states)
        return publication

    def start_from(self, chain: list[str], states: Mapping[str, ObjectRef]) -> None:
        """The keys of the ledger objects and states that the restored snapshot already has."""
        self._chain = list(chain)
        self._states = dict(states)
        self._reached = self.ledger.segments_in_use() | {ref.key for ref in states.values()}

    def reached(self) -> set[str]:
        """Keys of everything that the last published snapshot references."""
        return self._reached | set(self._chain)

    def excerpt(self, call_ids: Iterable[CallId]) -> Ledger:
        """These calls as the ledger has them now. From any thread."""
        with self.lock:
            return self.ledger.excerpt(call_ids)

    def record(self, states: Mapping[str, bytes]) -> Draft:
        """Write the ledger object and those states that changed."""
        for name, data in states.items():
            if len(data) > MAX_JSON_BYTES:
                raise SnapshotAbandoned(
                    f"the state {name!r} has {len(data)} bytes; at most {MAX_JSON_BYTES} can be read again",
                    hint="have who gives it keep less: snapshots go on when it does",
                )
        flushed = dict(self.flushed)
        pending = self.writer.write(flushed)
        refs: dict[str, ObjectRef] = {}
        for name, data in states.items():
            known = self._states.get(name)
            if known is None or known.sha256 != sha256_hex(data):
                key = layout.state_key(self.log.epoch, name, self._entropy.hex(8))
                known = put_object(self._store, key, data)
            refs[name] = known
        fresh = [ref.nbytes for name, ref in refs.items() if self._states.get(name) != ref]
        return Draft(pending, refs, pending.ref.nbytes + sum(fresh), flushed)

    def validate(self, draft: Draft, fresh: Iterable[Staged], again: StoreAgain = _never) -> list[RecoveryError]:
        """Read back what the draft is the first to reference. Returns what is wrong with segments; then it is void.

        In the place of a bad segment goes what `again` makes of it, if that reads back; else it is retracted from the
        ledger: its calls lose their newest chunks (`retracted`).
        A segment that the ledger does not refer to (its records did not fit, or it was replaced) is not looked at.
        Raises Damaged if the ledger object or a state does not read back.
        """
        wrong: list[RecoveryError] = []
        for staged in fresh:
            if not self.ledger.knows_segment(staged.info.key):
                self._strays.append(staged.info.key)
                continue
            try:
                self._check_segment(staged)
            except Damaged as error:
                wrong.append(error)
                self._replace(staged, again)
        get_object(self._store, draft.ledger.ref)
        for name, ref in draft.states.items():
            if self._states.get(name) != ref:
                get_object(self._store, ref)
        return wrong

    def _replace(self, bad: Staged, again: StoreAgain) -> None:
        copy = again(bad)
        try:
            if copy is not None:
                self._check_segment(copy)
        except Damaged:
            copy = None
        call_ids = set(bad.coordinates.call_ids)
        with self.lock:
            if copy is not None:
                self.ledger.describe(copy.info)
                self.ledger.move_segment(bad.info.key, copy.coordinates)
            else:
                self.retracted |= call_ids
                self.ledger.retract(bad.info.key, call_ids)

    def _check_segment(self, staged: Staged) -> None:
        info = staged.info
        data = self._store.get(info.key, 0, info.nbytes + 1)
        if staged.checked:
            if hashlib.sha256(data).digest() != staged.checked:
                raise DigestMismatch(f"{info.key} does not read back as it was written")
            return
        records = self._segments.decode(data, info)
        if coordinates_of(records, info.key) != staged.coordinates:
            raise DigestMismatch(f"{info.key} does not hold the records that were written")

    def publish(
        self,
        draft: Draft,
        *,
        cause: str,
        fingerprint: str,
        restored_from: int | None,
        origin: Mapping[str, Any] | None = None,
    ) -> Slot:
        """The commit point. Raises Fenced, OutcomeUnknown or another Retry; then nothing was acknowledged.

        `origin`: where the snapshot was taken, if that was in another store (origin.py).
        """
        slot = self.publish_as(
            None, draft, cause=cause, fingerprint=fingerprint, restored_from=restored_from, origin=origin
        )
        assert slot is not None
        return slot

    def publish_as(
        self,
        seq: int | None,
        draft: Draft,
        *,
        cause: str,
        fingerprint: str,
        restored_from: int | None,
        origin: Mapping[str, Any] | None = None,
    ) -> Slot | None:
        """The same as slot `seq` or not at all: None if another slot has that number."""
        body = {
            "cause": cause,
            "restored_from": restored_from,
            "fingerprint": fingerprint,
            "ledger": draft.ledger.ref.as_json(),
            "depth": draft.ledger.depth,
            "states": {name: ref.as_json() for name, ref in draft.states.items()},
            "counts": asdict(self.ledger.counts()),
            "bytes_written": draft.nbytes,
            "flushed": draft.flushed,
            **({} if origin is None else {"origin": dict(origin)}),
        }
        slot = self.log.append_if("snapshot", lambda: body if seq in (None, self.log.tail + 1) else None)
        if slot is not None:
            self._acknowledge(draft)
        return slot

    def _acknowledge(self, draft: Draft) -> None:
        self.writer.published(draft.ledger)
        self.ledger.published()
        reached = self.ledger.segments_in_use() | {ref.key for ref in draft.states.values()}
        dropped = self._reached - reached
        dropped.update(key for key in self._strays if not self.ledger.knows_segment(key))
        self._reached, self._strays = reached, []
        self._chain.append(draft.ledger.ref.key)
        needed = draft.ledger.depth + 1
        dropped.update(self._chain[:-needed])
        self._chain = self._chain[-needed:]
        self._states = dict(draft.states)
        # Counted as dropped by the snapshot that was just published: `collect` comes after this.
        self.retention.drop(sorted(dropped))

    def collect(self, go_on: Callable[[], bool] = lambda: True) -> int:
        """After a publication: leave the hint, delete what was intended earlier, intend what is due.

        `go_on` is asked before each deletion; what it stops is deleted by a later collection. Returns the number of
        objects deleted. A failure here costs nothing but garbage; it is raised for counting.
        """
        self.log.leave_hint()
        work = self.retention.published()
        n_deleted, error = self._delete(work.delete, go_on)
        if _is_worth_a_slot(work.intend):
            self._intend(work.intend)
        if error is not None:
            raise error
        return n_deleted

    def _intend(self, keys: Iterable[str]) -> None:
        """Publish the intent to delete these, but for what is pinned by then (pins.py, invariant 2)."""
        named: list[str] = []
        victims: ObjectRef | None = None

        def body() -> Mapping[str, Any] | None:
            nonlocal named, victims
            pins, spared = self._pinned.look()
            named = [key for key in keys if key not in spared][:VICTIMS_MAX]
            if not _is_worth_a_slot(named):
                return None
            key = layout.garbage_key(self.log.epoch, self._entropy.hex(8))
            victims = put_object(self._store, key, canonical_json(named))
            return {"victims": victims.as_json(), "count": len(named), "pins": pins}

        if self.log.append_if("gc", body) is not None and victims is not None:
            self.retention.intended(named)
            self.retention.drop([victims.key])

    def _delete(self, keys: tuple[str, ...], go_on: Callable[[], bool]) -> tuple[int, RecoveryError | None]:
        """Delete these. The first that cannot be deleted ends it, and comes last the next time."""
        n = 0
        try:
            for key in keys:
                if not go_on():
                    break
                self._store.delete(key)
                n += 1
        except RecoveryError as error:
            self.retention.postpone((*keys[n + 1 :], keys[n]))
            return n, error
        self.retention.postpone(keys[n:])
        return n, None


def _is_worth_a_slot(keys: Collection[str]) -> bool:
    """Small objects are not, until there are many: they go with the next real intent."""
    small = (layout.GARBAGE, layout.LEDGERS)
    return len(keys) >= WORTH_A_SLOT or any(not key.startswith(small) for key in keys)
