"""The log, as a reader finds it: its tail, its slots, its snapshots, and ids as people type them.

Owns: reading slots with every error kept beside its slot, what the hint says, the choice of one snapshot.
Does not know: ledgers, segments, whether a snapshot is sound.

Invariants:
1. The slots are read newest first and by the rules of recovery.slots: an entry that the next one does not name is not
   used. Other than there, a slot that is not understood does not end the walk; whoever walks decides.
2. The log alone is read.
3. A reference is handed out only if it can be one: a key, a length, a sum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from recovery import log
from recovery.errors import ConfigError, Damaged, FormatNotUnderstood, NothingPublished, ObjectMissing
from recovery.log import Slot
from recovery.ports import ObjectStore
from recovery.slots import Read, find_tail, read_slot, slot_exists
from recovery.snapshots import ObjectRef, Snapshot
from storage_backends.keys import is_key

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PUT_BACK = "slots are never deleted: put it back from a copy of the store; `snapshot-inspect verify STORE` says more"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A slot that a restore cannot use. `error` says why."""

    seq: int
    error: Damaged | FormatNotUnderstood


Found = Read | Unreadable


@dataclass(frozen=True, slots=True)
class Hint:
    """What the object `hint` says. `state`: absent, current, behind, dangling (no such slot) or garbage."""

    state: str
    tail: int | None

    @property
    def note(self) -> str:
        """What to tell people; empty if there is nothing to tell."""
        points = {
            "dangling": f"hint points to slot {self.tail}, which does not exist",
            "garbage": "hint is not what a coordinator writes",
        }.get(self.state, "")
        return points and f"{points}: nobody trusts it, and the next snapshot writes it anew"


@dataclass(frozen=True, slots=True)
class Position:
    """Where the log ends. `beyond`: slots above a number that is missing."""

    tail: int
    hint: Hint
    beyond: tuple[int, ...] = ()

    @property
    def gap(self) -> Unreadable | None:
        if not self.beyond:
            return None
        first = self.tail + 1
        return Unreadable(first, _missing(first, self.beyond[0] - 1, f", and slots up to {self.beyond[-1]} exist"))


def position(store: ObjectStore) -> Position:
    """The tail that a restore finds, and whether the log goes on behind it."""
    while True:
        tail = find_tail(store)
        listed = (log.seq_of_key(item.key) for item in store.list(log.PREFIX, log.slot_key(tail + 1)))
        beyond = sorted(seq for seq in listed if seq is not None)
        if not beyond or not slot_exists(store, tail + 1):  # else: a job that is running got on meanwhile
            return Position(tail, _hint(store, tail), tuple(beyond))


def _hint(store: ObjectStore, tail: int) -> Hint:
    try:
        said = json.loads(store.get(log.HINT_KEY, 0, 4096))["tail"]
    except ObjectMissing:
        return Hint("absent", None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Hint("garbage", None)
    if type(said) is not int or said < 1:
        return Hint("garbage", None)
    if said <= tail:
        return Hint("current" if said == tail else "behind", said)
    key = log.slot_key(said)
    return Hint("current" if is_key(key) and slot_exists(store, said) else "dangling", said)


def walk(store: ObjectStore, top: int) -> Iterator[Found]:
    """Slots from `top` down to 1 (invariant 1); slots that are missing in a row are one entry, the lowest of them."""
    later: Slot | None = None
    seq = top
    while seq > 0:
        try:
            read = read_slot(store, seq)
            if read is not None and later is not None:
                log.check_successor(read.slot, read.data, later)
        except (Damaged, FormatNotUnderstood) as error:
            later = None
            yield Unreadable(seq, error)
        else:
            later = None if read is None else read.slot
            if read is not None:
                yield read
            else:
                last, seq = seq, _next_below(store, seq) + 1
                yield Unreadable(seq, _missing(seq, last))
        seq -= 1


def _next_below(store: ObjectStore, seq: int) -> int:
    listed = (log.seq_of_key(item.key) for item in store.list(log.PREFIX))
    return max((n for n in listed if n is not None and n < seq), default=0)


def _missing(first: int, last: int, beyond: str = "") -> ObjectMissing:
    which = f"slot {first} ({log.slot_key(first)}) is" if first == last else f"slots {first} to {last} are"
    return ObjectMissing(f"log {which} missing{beyond}", hint=_PUT_BACK)


def snapshot_of(slot: Slot) -> Snapshot:
    """The snapshot that a slot is. Raises Damaged where its references cannot be any (invariant 3)."""
    try:
        snapshot = Snapshot.from_slot(slot)
    except OverflowError as error:
        raise Damaged(f"snapshot {slot.seq} does not reference an object: {error}") from error
    for ref in (snapshot.ledger, *snapshot.states.values()):
        check_reference(ref, f"snapshot {slot.seq}")
    return snapshot


def check_reference(ref: ObjectRef, what: str) -> None:
    if not is_key(ref.key) or ref.nbytes < 0 or not _SHA256.fullmatch(ref.sha256):
        raise Damaged(f"{what} references {ref.key!r:.100} of {ref.nbytes} bytes, which can be no object")


def snapshots(store: ObjectStore, top: int) -> Iterator[Snapshot | Unreadable]:
    """Snapshots, newest first, and every slot that cannot be used."""
    for found in walk(store, top):
        if isinstance(found, Unreadable):
            yield found
        elif found.slot.kind == "snapshot":
            try:
                yield snapshot_of(found.slot)
            except Damaged as error:
                yield Unreadable(found.slot.seq, error)


def choose(store: ObjectStore, tail: int, text: str) -> Snapshot:
    """The snapshot that people mean by `text`: `latest`, its number, or digits that only one number begins with.

    Raises NothingPublished if there is no snapshot at all, ConfigError if `text` names none or several, and the error
    of the slot if exactly that one cannot be used.
    """
    if text != "latest" and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{text!r} is no snapshot", hint="a snapshot is named by its number, or by `latest`")
    if text != "latest" and (exact := _numbered(store, tail, int(text))) is not None:
        return exact
    begins: list[Snapshot] = []
    skipped: list[Unreadable] = []
    n = 0
    for found in snapshots(store, tail):
        if isinstance(found, Unreadable):
            skipped.append(found)
            continue
        if text == "latest":
            return found
        n += 1
        if str(found.id).startswith(text):
            begins.append(found)
    if n == 0:
        raise skipped[0].error if skipped else nothing_published()
    if len(begins) == 1:
        return begins[0]
    hint = "list them: snapshot-inspect list STORE"
    if begins:
        ids = ", ".join(str(snapshot.id) for snapshot in begins[::-1][:8])
        raise ConfigError(f"{text} could be any of {len(begins)} snapshots: {ids}", hint=hint)
    raise ConfigError(f"there is no snapshot {text}", hint=hint)


def _numbered(store: ObjectStore, tail: int, seq: int) -> Snapshot | None:
    """Snapshot `seq`, looked at together with the slot after it; None if that slot is none or no snapshot."""
    if not 1 <= seq <= tail:
        return None
    for found in walk(store, min(seq + 1, tail)):
        if isinstance(found, Unreadable):
            if found.seq == seq:
                raise found.error
        elif found.slot.seq == seq:
            return snapshot_of(found.slot) if found.slot.kind == "snapshot" else None
    return None


def nothing_published() -> NothingPublished:
    return NothingPublished(
        "no snapshot was published in this store yet",
        hint="`prefix-recovery run CONFIG` publishes one; what it stored before that: snapshot-inspect verify STORE",
    )
