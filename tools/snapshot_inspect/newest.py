"""What a restore would take, what it would pass over and why, and what it would adopt on top.

Owns: the walk from the tail to the newest usable snapshot, by the log alone or with every check that a restore makes.
Does not know: the job's own fingerprint (a restore compares it as well), how the answer is shown.

Invariants:
1. The answer is that of recovery.restore.choose without a fingerprint; the tests compare the two.
2. Without `codecs` no ledger, state or segment is read. What the newest log entry says of itself is then only held
   against the names that are listed.
3. Adoption is tried on a ledger in memory by recovery.adoption itself, one segment at a time; nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from recovery import garbage
from recovery.adoption import adopt
from recovery.errors import (
    CannotRestore,
    CredentialsRefused,
    Damaged,
    FormatNotUnderstood,
    RecoveryError,
)
from recovery.layout import segments_of
from recovery.ledger import Counts, Ledger
from recovery.log import Slot, forgotten_by
from recovery.model import OPEN
from recovery.ports import LedgerCodec, Listed, ObjectStore, Put, SegmentCodec
from recovery.reading import missing_segments, read_transcripts
from recovery.snapshots import Loaded, Snapshot, load
from snapshot_inspect.statements import contradicted, unsupported
from snapshot_inspect.survey import Position, Unreadable, all_forgotten, nothing_published, walk

Codecs = tuple[SegmentCodec, LedgerCodec]


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A slot that is newer and cannot be used. `what`: `snapshot N`, `gc slot N`, …; `log slot N` if it is unknown."""

    seq: int
    what: str
    error: RecoveryError


@dataclass(slots=True)
class Adopted:
    """What a restore would take over from segments that no snapshot names."""

    segments: list[str] = field(default_factory=list)
    tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    unreadable: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Newest:
    """The answer.

    `vouched`: a later entry of the log names the hash of this one. `problems`: what contradicts the entry, and what it
    names and is not there. `forgotten`: newer snapshots that are not considered. `adoption` and `counts` (those of the
    ledger itself) are None if no ledger was read.
    """

    snapshot: Snapshot
    position: Position
    newer: list[Slot]
    passed_over: list[PassedOver]
    vouched: bool
    problems: list[str]
    forgotten: set[int]
    adoption: Adopted | None = None
    counts: Counts | None = None

    @property
    def exit_code(self) -> int:
        return Damaged.exit_code if self.passed_over or self.problems else 0


def newest(store: ObjectStore, at: Position, codecs: Codecs | None = None) -> Newest:
    """The snapshot that a restore would start from; with `codecs`, each one is checked as a restore checks it.

    Raises NothingPublished, FormatNotUnderstood where a restore would, or Damaged if no snapshot can be used.
    """
    newer: list[Slot] = []
    passed_over = [] if at.gap is None else [PassedOver(at.gap.seq, f"log slot {at.gap.seq}", at.gap.error)]
    collected: set[str] = set()
    forgotten: set[int] = set()
    adopts, vouched = True, False
    for found in walk(store, at.tail):
        if isinstance(found, Unreadable):
            vouched = False
            if isinstance(found.error, FormatNotUnderstood):
                raise found.error
            passed_over.append(PassedOver(found.seq, f"log slot {found.seq}", found.error))
            continue
        slot = found.slot
        what = f"snapshot {slot.seq}" if slot.kind == "snapshot" else f"{slot.kind} slot {slot.seq}"
        try:
            if slot.kind == "gc" and codecs is not None:
                collected |= garbage.intended(store, slot)
            elif slot.kind == "forget":
                forgotten |= forgotten_by(slot)
            elif slot.seq in forgotten:
                adopts = False
            elif slot.kind == "snapshot":
                snapshot = Snapshot.from_slot(slot)
                if codecs is None:
                    problems = list(unsupported(store, snapshot, vouched=vouched))
                    return Newest(snapshot, at, newer[::-1], passed_over, vouched, problems, forgotten)
                loaded = check(store, codecs, snapshot, collected)
                counts, problems = loaded.ledger.counts(), contradicted(loaded)
                adoption = _adoption(store, codecs[0], loaded, collected) if adopts else Adopted()
                log = (newer[::-1], passed_over, vouched)
                return Newest(snapshot, at, *log, problems, forgotten, adoption, counts)
        except CredentialsRefused:
            raise  # says nothing about the snapshot, and stops a restore too
        except (Damaged, CannotRestore) as error:
            adopts = adopts and slot.kind not in ("gc", "forget")
            passed_over.append(PassedOver(slot.seq, what, error))
        newer.append(slot)
        vouched = True
    raise _none(store, passed_over, forgotten)


def _none(store: ObjectStore, passed_over: list[PassedOver], forgotten: Collection[int]) -> RecoveryError:
    refused = [item.error for item in passed_over if isinstance(item.error, CannotRestore)]
    if refused:
        return refused[0]
    if not passed_over:
        return all_forgotten(forgotten) if forgotten else nothing_published(store)
    reasons = "; ".join(f"{item.what}: {item.error.message}" for item in passed_over)
    return Damaged(
        f"no snapshot of this store can be restored: {reasons}",
        hint="look: snapshot-inspect verify --read-data STORE",
    )


def check(store: ObjectStore, codecs: Codecs, snapshot: Snapshot, collected: Collection[str]) -> Loaded:
    """Everything that a restore reads before it takes a snapshot. Raises Damaged or FormatNotUnderstood."""
    segments, ledgers = codecs
    loaded = load(store, ledgers, snapshot)
    ledger = loaded.ledger
    going = sorted(garbage.reached_from(snapshot, loaded.objects, ledger).intersection(collected))
    if going:
        raise Damaged(
            f"a later garbage collection was about to delete {len(going)} of its objects, {going[0]} among them"
        )
    wrong = missing_segments(store, {key: ledger.segment(key) for key in ledger.segments_in_use()})
    if wrong:
        raise wrong[0]
    read_transcripts(store, segments, ledger, (entry for entry in ledger if entry.state == OPEN), columns=False)
    return loaded


def _adoption(store: ObjectStore, codec: SegmentCodec, loaded: Loaded, collected: Collection[str]) -> Adopted:
    epoch, flushed = loaded.snapshot.slot.epoch, loaded.flushed
    return would_adopt(store, codec, loaded.ledger, epoch=epoch, flushed=flushed, collected=collected)


def would_adopt(
    store: ObjectStore,
    codec: SegmentCodec,
    ledger: Ledger,
    *,
    epoch: int,
    flushed: Mapping[str, int],
    collected: Collection[str],
) -> Adopted:
    """What a restore adds to `ledger`, that of a snapshot of `epoch`; `ledger` is changed here."""
    adopted = Adopted()
    for item in store.list(segments_of(epoch)):
        found = adopt(_OnlyOne(store, item), codec, ledger, epoch=epoch, flushed=flushed, collected=collected)
        if found.segments:
            adopted.segments.append(item.key)
        adopted.tokens += found.tokens
        adopted.rejected.update(found.rejected)
        adopted.unreadable += [(key, error.message) for key, error in found.unreadable]
    return adopted


def intended_after(store: ObjectStore, tail: int, snapshot_id: int) -> set[str]:
    """What the gc slots after a snapshot were about to delete. Raises Damaged if that cannot be known."""
    keys: set[str] = set()
    for found in walk(store, tail):
        if isinstance(found, Unreadable):
            raise found.error
        if found.slot.seq <= snapshot_id:
            break
        if found.slot.kind == "gc":
            keys |= garbage.intended(store, found.slot)
    return keys


class _OnlyOne:
    """A store of which one segment is listed: what recovery.adoption says of it is then about that one."""

    def __init__(self, inner: ObjectStore, item: Listed) -> None:
        self._inner = inner
        self._item = item

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        return [self._item] if self._item.key.startswith(prefix) and self._item.key > after else []

    def put_new(self, key: str, data: bytes) -> Put:
        raise AssertionError("inspecting writes nothing")

    def put(self, key: str, data: bytes) -> None:
        raise AssertionError("inspecting writes nothing")

    def delete(self, key: str) -> None:
        raise AssertionError("inspecting writes nothing")
