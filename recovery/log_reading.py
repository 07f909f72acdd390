"""The log as a reader finds it: a slot by its number, the tail, the way back from it.

Owns: reading slots, and what it means when one is not there or may not be read.
Does not know: who writes slots (slots.py), what a snapshot contains.

Invariants:
1. The hint is advice, and a list may be late: the tail is where no further slot can be read.
2. A place may refuse to say that a slot is not there (NotFoundOrRefused: S3 without the permission to list). Numbers
   are dense and one permission holds for all of them, so who can read the slot before it knows that it is not there;
   whether a claim is right about that is decided by its create, as ever.
3. A slot that cannot be trusted is given as the error that says why, never left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from recovery import log, notes
from recovery.errors import CredentialsRefused, Damaged, NotFoundOrRefused, ObjectMissing
from recovery.log import Slot
from recovery.ports import ObjectStore


@dataclass(frozen=True, slots=True)
class Read:
    """A slot with the bytes it was decoded from."""

    slot: Slot
    data: bytes


def read_slot(store: ObjectStore, seq: int) -> Read | None:
    """Slot `seq`, or None if it does not exist. Raises Damaged, FormatNotUnderstood and the store's errors."""
    data = _get(store, seq, log.MAX_SLOT_BYTES + 1)
    return None if data is None else Read(log.decode(data, seq), data)


def slot_exists(store: ObjectStore, seq: int) -> bool:
    return _get(store, seq, 1) is not None


def _get(store: ObjectStore, seq: int, most: int) -> bytes | None:
    """The first bytes of slot `seq`, None if there is no such slot (invariant 2)."""
    try:
        return store.get(log.slot_key(seq), 0, most)
    except ObjectMissing:
        return None
    except NotFoundOrRefused:
        if seq > 1 and _is_readable(store, seq - 1):
            return None
        raise


def _is_readable(store: ObjectStore, seq: int) -> bool:
    try:
        store.get(log.slot_key(seq), 0, 1)
    except (ObjectMissing, NotFoundOrRefused):
        return False
    return True


def find_tail(store: ObjectStore, *, trust_hint: bool = True) -> int:
    """The largest existing slot number, 0 for an empty log. The hint only saves a listing.

    Without the hint a slot that was lost in the middle cannot hide those behind it: who is about to write looks so,
    unless it may not list.
    """
    tail = _hinted(store) if trust_hint else None
    if tail is None or not _is_readable(store, tail):
        try:
            tail = listed_tail(store)
        except CredentialsRefused:
            tail = _probed_tail(store)
    while slot_exists(store, tail + 1):
        tail += 1
    return tail


def _probed_tail(store: ObjectStore) -> int:
    """A slot of which the next one is not there, found by reading alone. Raises if none is readable."""
    low = _hinted(store) or 1
    if not _is_readable(store, low):
        low = 1
        store.get(log.slot_key(low), 0, 1)
    step = 1
    while _is_readable(store, low + step):
        low, step = low + step, step * 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _is_readable(store, middle) else (low, middle)
    return low


def listed_tail(store: ObjectStore) -> int:
    """The largest listed number that is a slot: it follows another, or it reads as one. A stray file is neither."""
    numbers = {n for n in (log.seq_of_key(item.key) for item in store.list(log.PREFIX)) if n}
    for number in sorted(numbers, reverse=True):
        if number == 1 or number - 1 in numbers:
            return number
        try:
            read_slot(store, number)
        except Damaged:
            continue
        return number
    return 0


def _hinted(store: ObjectStore) -> int | None:
    """What the hint says, if it is there and could be true."""
    try:
        note = notes.object_in(store.get(log.HINT_KEY, 0, 4096)) or {}
    except (ObjectMissing, NotFoundOrRefused):
        return None
    return notes.whole(note.get("tail"), 1, 10**12 - 1)


def walk_back(store: ObjectStore, tail: int) -> Iterator[Read | Damaged]:
    """Slots from `tail` down to 1. A slot that cannot be trusted is yielded as the error that says why."""
    later: Slot | None = None
    for seq in range(tail, 0, -1):
        try:
            read = read_slot(store, seq)
            if read is None:
                raise ObjectMissing(f"log slot {seq} is missing", hint="run: snapshot-inspect verify STORE")
            if later is not None:
                log.check_successor(read.slot, read.data, later)
            if seq == 1:
                log.check_first(read.slot)
        except Damaged as error:
            later = None
            yield error
            continue
        later = read.slot
        yield read


def kept_snapshots(store: ObjectStore, tail: int) -> Iterator[Slot]:
    """Slots of snapshots that no `forget` names, newest first. What cannot be read is left out; a restore tells it."""
    forgotten: set[int] = set()
    for read in walk_back(store, tail):
        if not isinstance(read, Read):
            continue
        if read.slot.kind == "forget":
            with suppress(Damaged):
                forgotten |= log.forgotten_by(read.slot)
        elif read.slot.kind == "snapshot" and read.slot.seq not in forgotten:
            yield read.slot
