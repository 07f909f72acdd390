"""The log, as a reader finds it: its tail, its slots, its snapshots, and ids as people type them.

Owns: reading slots with every error kept beside its slot, what the hint says, the choice of one snapshot.
Does not know: ledgers, segments, whether a snapshot is sound.

Invariants:
1. The slots are read newest first and by the rules of recovery.log_reading: an entry that the next one does not name
   is not used. Other than there, a slot that is not understood does not end the walk; whoever walks decides.
2. The tail is the one that a claim finds: by a listing of the whole log, whatever the hint says.
3. The log alone is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from recovery import log, notes
from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    Damaged,
    FormatNotUnderstood,
    NotFoundOrRefused,
    NothingPublished,
    ObjectMissing,
)
from recovery.log import Slot
from recovery.log_reading import Read, find_tail, listed_tail, slot_exists
from recovery.origin import refuse_unfinished_import
from recovery.ports import ObjectStore
from recovery.snapshots import Snapshot
from snapshot_inspect.ahead import Slots
from snapshot_inspect.places import in_the_way
from storage_backends.keys import is_key

_PUT_BACK = "slots are never deleted: put it back from a copy of the store"
_MOVE_AWAY = "move it away, and put the slot back if a copy of the store has it; until then nothing can be published"


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
    """Where the log ends. `beyond`: slots above a missing number; `blocked`: why the next one cannot be made."""

    tail: int
    hint: Hint
    beyond: tuple[int, ...] = ()
    blocked: Unreadable | None = None

    @property
    def top(self) -> int:
        """The largest slot number that there is, beyond a gap too."""
        return self.beyond[-1] if self.beyond else self.tail

    @property
    def gap(self) -> Unreadable | None:
        """What stands in the way of a slot above the tail."""
        if self.blocked is not None or not self.beyond:
            return self.blocked
        first = self.tail + 1
        return Unreadable(first, _missing(first, self.beyond[0] - 1, f", and slots up to {self.beyond[-1]} exist"))


def position(store: ObjectStore) -> Position:
    """The tail that a claim finds, and whether the log goes on behind it."""
    while True:
        tail = _tail(store)
        try:
            listed = [log.seq_of_key(item.key) for item in store.list(log.PREFIX, log.slot_key(tail + 1))]
        except CredentialsRefused:  # who may not list sees no further than the log is dense
            listed = []
        beyond = sorted(seq for seq in listed if seq is not None)
        if not beyond or not _exists(store, tail + 1):  # else: a job that is running got on meanwhile
            return Position(tail, _hint(store, tail), tuple(beyond), _blocked(store, tail + 1))


def _tail(store: ObjectStore) -> int:
    try:
        return find_tail(store, trust_hint=False)
    except Damaged:  # a link has the name of the slot after it: see _blocked
        return listed_tail(store)


def _exists(store: ObjectStore, seq: int) -> bool:
    try:
        return slot_exists(store, seq)
    except Damaged:
        return False


def _blocked(store: ObjectStore, seq: int) -> Unreadable | None:
    """What lies where slot `seq` belongs and is no object: a listing passes over it, and nobody can create the slot."""
    what = in_the_way(store, log.slot_key(seq))
    if not what:
        return None
    return Unreadable(seq, Damaged(f"{log.slot_key(seq)} is {what}, not a file", hint=_MOVE_AWAY))


def _hint(store: ObjectStore, tail: int) -> Hint:
    try:
        note = notes.object_in(store.get(log.HINT_KEY, 0, 4096)) or {}
    except (ObjectMissing, NotFoundOrRefused):
        return Hint("absent", None)
    said = notes.whole(note.get("tail"), 1)
    if said is None:
        return Hint("garbage", None)
    if said <= tail:
        return Hint("current" if said == tail else "behind", said)
    key = log.slot_key(said)
    return Hint("current" if is_key(key) and _exists(store, said) else "dangling", said)


def walk(store: ObjectStore, top: int, *, whole: bool = False) -> Iterator[Found]:
    """Slots from `top` down to 1 (invariant 1); slots that are missing in a row are one entry, the lowest of them.

    `whole`: all of them are wanted, so that a long log is asked for ahead.
    """
    later: Slot | None = None
    seq = top
    with Slots(store, top, ahead=whole) as slots:
        while seq > 0:
            try:
                read = slots.read(seq)
                if read is not None and later is not None:
                    log.check_successor(read.slot, read.data, later)
                if read is not None and seq == 1:
                    log.check_first(read.slot)
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


def snapshots(
    store: ObjectStore, top: int, *, whole: bool = False, forgotten: set[int] | None = None
) -> Iterator[Snapshot | Unreadable]:
    """Snapshots, newest first, and every slot that cannot be used.

    What forget slots name is added to `forgotten` before the snapshots that it names come.
    """
    for found in walk(store, top, whole=whole):
        if isinstance(found, Unreadable):
            yield found
            continue
        try:
            if found.slot.kind == "snapshot":
                yield Snapshot.from_slot(found.slot)
            elif found.slot.kind == "forget" and forgotten is not None:
                forgotten |= log.forgotten_by(found.slot)
        except Damaged as error:
            yield Unreadable(found.slot.seq, error)


@dataclass(frozen=True, slots=True)
class Choice:
    """The snapshot that was meant by `latest`, a number or its first digits; `skipped`: newer slots, not usable."""

    snapshot: Snapshot
    skipped: tuple[Unreadable, ...] = ()


def choose(store: ObjectStore, at: Position, text: str) -> Choice:
    """The snapshot that people mean by `text`: `latest`, its number, or digits that only one number begins with.

    `latest` is the newest that was not forgotten; by its number a forgotten one is found too.

    Raises NothingPublished if there is no snapshot at all, ConfigError if `text` names none or several, and the error
    of the slot if exactly that one cannot be used.
    """
    if text != "latest" and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{text!r} is no snapshot", hint="a snapshot is named by its number, or by `latest`")
    number = int(text) if text != "latest" and len(text) < 100 else 0  # int() refuses thousands of digits
    if (exact := _numbered(store, at.tail, number)) is not None:
        return Choice(exact)
    if text == "latest":
        return _latest(store, at)
    ids: list[Snapshot] = []
    skipped = [] if at.gap is None else [at.gap]
    for found in snapshots(store, at.tail):
        if isinstance(found, Unreadable):
            skipped.append(found)
        else:
            ids.append(found)
    if not ids:
        raise skipped[0].error if skipped else nothing_published(store)
    begins = [snapshot for snapshot in ids if str(snapshot.id).startswith(text)]
    if len(begins) == 1:
        return Choice(begins[0])
    hint = "list them: snapshot-inspect list STORE"
    if begins:
        names = ", ".join(str(snapshot.id) for snapshot in begins[::-1][:8])
        raise ConfigError(f"{text} could be any of {len(begins)} snapshots: {names}", hint=hint)
    raise ConfigError(f"there is no snapshot {text}", hint=hint)


def _latest(store: ObjectStore, at: Position) -> Choice:
    """The newest snapshot that can be read and was not forgotten."""
    skipped = [] if at.gap is None else [at.gap]
    forgotten: set[int] = set()
    for found in snapshots(store, at.tail, forgotten=forgotten):
        if isinstance(found, Unreadable):
            skipped.append(found)
        elif found.id not in forgotten:
            return Choice(found, tuple(skipped))
    if skipped:
        raise skipped[0].error
    raise all_forgotten(forgotten) if forgotten else nothing_published(store)


def _numbered(store: ObjectStore, tail: int, seq: int) -> Snapshot | None:
    """Snapshot `seq`, looked at together with the slot after it; None if that slot is none or no snapshot."""
    if not 1 <= seq <= tail:
        return None
    for found in walk(store, min(seq + 1, tail)):
        if isinstance(found, Unreadable):
            if found.seq == seq:
                raise found.error
        elif found.slot.seq == seq:
            return Snapshot.from_slot(found.slot) if found.slot.kind == "snapshot" else None
    return None


def is_forgotten(store: ObjectStore, top: int, seq: int) -> bool:
    """Whether a slot after snapshot `seq` forgets it."""
    forgotten: set[int] = set()
    for item in snapshots(store, top, forgotten=forgotten):
        if isinstance(item, Snapshot) and item.id <= seq:
            break
    return seq in forgotten


def all_forgotten(forgotten: Collection[int]) -> NothingPublished:
    """What to say of a log in which every snapshot was forgotten."""
    return NothingPublished(
        f"every snapshot of this store was forgotten ({len(forgotten)})", hint="list them: snapshot-inspect list STORE"
    )


def nothing_published(store: ObjectStore) -> NothingPublished:
    """What to say of a log without snapshots."""
    try:
        refuse_unfinished_import(store)
    except NothingPublished as error:
        return error
    return NothingPublished(
        "no snapshot was published in this store yet",
        hint="`prefix-recovery run CONFIG` publishes one; what it stored before that: snapshot-inspect verify STORE",
    )
