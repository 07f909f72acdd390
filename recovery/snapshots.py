"""Snapshots as stored: the root's format mark, ledger objects with their ancestors, participants' states.

Owns: reading and writing of everything a snapshot references except segments, and object references.
Does not know: when a snapshot is taken (coordinator.py), which one a restore chooses (restore.py).

Invariants:
1. Length and sha256 of a referenced object are checked before it is parsed.
2. A reference is well formed, or Damaged: nothing mangled reaches a store as a key or a range.
3. Of a ledger exactly the objects are read that its newest one counts; one before them may be gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery import layout, log
from recovery.codec import canonical_json, sha256_hex
from recovery.errors import (
    Damaged,
    DigestMismatch,
    FormatNotUnderstood,
    NoStore,
    ObjectMissing,
)
from recovery.ledger import Ledger
from recovery.ledger_columns import LedgerRows, Names
from recovery.log import Slot
from recovery.model import BatchInfo, SegmentInfo, are_batches
from recovery.ports import Entropy, LedgerCodec, ObjectStore

FORMAT_KEY = "format.json"
FORMAT_VERSION = 1
WRITER = "prefix-recovery 0.1.0"

_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_OBJECT_BYTES = 4 << 30
MAX_JSON_BYTES, MAX_MARK_BYTES = 1 << 30, 64 << 10
"""A finished group of 64 samples of 40,000 tokens is a state of more than 64 MiB."""
DEPTH_MAX = 256
"""What a reader accepts; writers stay below (rotation.MAX_DEPTH)."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An immutable object with what its bytes must be."""

    key: str
    nbytes: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "nbytes": self.nbytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, value: Any, what: str) -> ObjectRef:
        if not isinstance(value, dict):
            raise Damaged(f"{what} does not reference an object")
        ref = cls(
            key=log.take(value, "key", str, what),
            nbytes=log.take(value, "nbytes", int, what),
            sha256=log.take(value, "sha256", str, what),
        )
        if layout.epoch_of(ref.key) is None or ref.nbytes < 0 or not _SHA256.fullmatch(ref.sha256):
            raise Damaged(f"{what} references what is no object of a store: {ref.key!r:.100}")
        return ref


@dataclass(frozen=True, slots=True)
class LedgerObject:
    """One object as read. In its header `segments` are SegmentInfo by number, `parent` is an ObjectRef or None."""

    ref: ObjectRef
    header: dict[str, Any]
    rows: LedgerRows


def make_root(store: ObjectStore, entropy: Entropy) -> None:
    """Mark an empty root as a store, or check the mark that is there."""
    mark = {
        "format": "prefix-recovery",
        "version": FORMAT_VERSION,
        "requires": [],
        "writer": WRITER,
        "store_id": entropy.hex(16),
    }
    try:
        check_root(store)
    except NoStore:
        store.put_new(FORMAT_KEY, canonical_json(mark))
        check_root(store)


def check_root(store: ObjectStore) -> dict[str, Any]:
    """The format mark. Raises NoStore or FormatNotUnderstood."""
    try:
        data = store.get(FORMAT_KEY, 0, MAX_MARK_BYTES)
    except ObjectMissing:
        raise NoStore(
            "there is no store here (no format.json)",
            hint="check the path; `prefix-recovery run CONFIG` makes a store",
        ) from None
    mark = log.parse_object(data, FORMAT_KEY)
    if mark.get("format") != "prefix-recovery" or mark.get("version") != FORMAT_VERSION:
        raise FormatNotUnderstood(
            f"the store has format {mark.get('format')!r} version {mark.get('version')!r}; "
            f"this program reads 'prefix-recovery' version {FORMAT_VERSION}",
            hint="upgrade prefix-recovery to the version that wrote the store",
        )
    return mark


def put_object(store: ObjectStore, key: str, data: bytes) -> ObjectRef:
    """Create an object under a random key and say what its bytes are."""
    store.put_new(key, data)
    return ObjectRef(key, len(data), sha256_hex(data))


def get_object(store: ObjectStore, ref: ObjectRef, most: int = MAX_OBJECT_BYTES) -> bytes:
    """The bytes of `ref`, checked. Raises ObjectMissing or DigestMismatch naming the key."""
    if ref.nbytes > most:
        raise Damaged(f"{ref.key} is said to have {ref.nbytes} bytes; at most {most} are allowed")
    data = store.get(ref.key, 0, ref.nbytes + 1)
    if len(data) != ref.nbytes:
        raise DigestMismatch(f"{ref.key} has {'more' if len(data) > ref.nbytes else len(data)} bytes, not {ref.nbytes}")
    if sha256_hex(data) != ref.sha256:
        raise DigestMismatch(f"{ref.key} does not have the recorded sha256")
    return data


def segment_as_json(number: int, info: SegmentInfo) -> dict[str, Any]:
    batches = [[b.offset, b.length, b.crc32c, b.n_records] for b in info.batches]
    value = {"number": number, "key": info.key, "nbytes": info.nbytes, "crc32c": info.crc32c, "batches": batches}
    return {**value, "wide": list(info.wide)} if info.wide else value


def _segment_from_json(value: Any, what: str) -> tuple[int, SegmentInfo]:
    what = f"{what}, a segment"
    if not isinstance(value, dict):
        raise Damaged(f"{what}: it is not described")
    batches = log.take(value, "batches", list, what)
    if not are_batches(batches):
        raise Damaged(f"{what}: a batch is not [offset, length, crc32c, n_records]")
    info = SegmentInfo(
        key=log.take(value, "key", str, what),
        nbytes=log.take(value, "nbytes", int, what),
        crc32c=log.take(value, "crc32c", int, what),
        batches=tuple(BatchInfo(*batch) for batch in batches),
        wide=_wide_types(value.get("wide", []), what),
    )
    if layout.segment_position(info.key) is None or not 0 <= info.nbytes <= MAX_OBJECT_BYTES or info.crc32c < 0:
        raise Damaged(f"{what}: {info.key!r:.100} of {info.nbytes} bytes is no segment of a store")
    return log.take(value, "number", int, what), info


def _wide_types(value: Any, what: str) -> tuple[str, ...]:
    """Which types there are is for the codec to judge."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Damaged(f"{what}: wide is no list of types")
    return tuple(value)


def read_ledger_object(store: ObjectStore, codec: LedgerCodec, ref: ObjectRef, names: Names) -> LedgerObject:
    """One object, whose rows use `names`. Raises Damaged, FormatNotUnderstood, or the store's errors."""
    try:
        header, rows = codec.decode(get_object(store, ref), names)
    except FormatNotUnderstood as error:
        raise FormatNotUnderstood(f"{ref.key}: {error.message}", hint=error.hint) from error
    header["segments"] = dict(_segment_from_json(value, ref.key) for value in header.get("segments", []))
    parent = header.get("parent")
    header["parent"] = None if parent is None else ObjectRef.from_json(parent, ref.key)
    log.take(header, "numbered", int, ref.key)
    if not 0 <= log.take(header, "depth", int, ref.key) <= DEPTH_MAX:
        raise Damaged(f"{ref.key} says that {header['depth']} objects belong to it; at most {DEPTH_MAX} are allowed")
    return LedgerObject(ref, header, rows)


def parent_of(item: LedgerObject, head: LedgerObject) -> ObjectRef:
    """The object before `item`, of which the ledger with the newest object `head` needs one more."""
    parent: ObjectRef | None = item.header["parent"]
    if parent is None:
        raise Damaged(f"{item.ref.key} has no parent; {head.ref.key} needs {head.header['depth']} objects before it")
    return parent


def read_ledger_objects(
    store: ObjectStore, codec: LedgerCodec, head: ObjectRef, first: Callable[[LedgerObject], None] | None = None
) -> list[LedgerObject]:
    """The objects of the ledger of which `head` is the newest, oldest first. Raises like `read_ledger_object`.

    `first` is shown the newest object before the others are read.
    """
    names = Names()
    found = [read_ledger_object(store, codec, head, names)]
    if first is not None:
        first(found[0])
    for _ in range(found[0].header["depth"]):
        found.append(read_ledger_object(store, codec, parent_of(found[-1], found[0]), names))
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot slot, read: enough to show it, not yet its ledger."""

    slot: Slot
    ledger: ObjectRef
    states: Mapping[str, ObjectRef]

    @property
    def id(self) -> int:
        return self.slot.seq

    @classmethod
    def from_slot(cls, slot: Slot) -> Snapshot:
        what = f"snapshot {slot.seq}"
        states = log.take(slot.body, "states", dict, what)
        refs = {name: ObjectRef.from_json(value, what) for name, value in states.items()}
        return cls(slot, ObjectRef.from_json(slot.body.get("ledger"), what), refs)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A snapshot with its ledger and states in memory, every reference checked."""

    snapshot: Snapshot
    ledger: Ledger
    objects: list[LedgerObject]
    states: Mapping[str, bytes]

    @property
    def flushed(self) -> Mapping[str, int]:
        return dict(self.objects[-1].header.get("flushed", {}))


def load(
    store: ObjectStore, codec: LedgerCodec, snapshot: Snapshot, first: Callable[[LedgerObject], None] | None = None
) -> Loaded:
    """Ledger and states of one snapshot. Raises Damaged and its kin where anything does not check.

    `first`: as of read_ledger_objects.
    """
    objects = read_ledger_objects(store, codec, snapshot.ledger, first)
    ledger = Ledger.from_objects((item.header, item.rows) for item in objects)
    states = {name: get_object(store, ref, MAX_JSON_BYTES) for name, ref in snapshot.states.items()}
    return Loaded(snapshot, ledger, objects, states)
