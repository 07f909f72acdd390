"""The rules of the numbered log: what a slot is, who won it, and who may write the next one.

Owns: the slot's encoding, the outcome of a create, the succession rules (docs/format.md, section 6).
Does not know: a store, a clock, randomness; slots.py and log_reading.py apply these rules to an ObjectStore.

Invariants:
1. Slot n + 1 names the SHA-256 of slot n; numbers are dense from 1, and slot 1 is a claim.
2. Epochs never decrease along the log; a claim raises the epoch, every other slot carries the latest claim's.
3. A create has succeeded if and only if the slot holds the writer's own nonce: EXISTS alone proves nothing.
4. What a reader would refuse for its length is not encoded.

Source: epoch-fenced create-if-absent logs, as in SlateDB RFC 0001 and Delta's log store; the read-back by nonce
is Icechunk design note 017.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from recovery.codec import canonical_json, sha256_hex
from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood, InputError

T = TypeVar("T")

GENESIS = "0" * 64
MAX_SLOT_BYTES = 4 << 20
"""A snapshot's slot names each state, in less than 200 bytes, and each incarnation of a worker, in less than 40."""
PREFIX = "log/"
HINT_KEY = "hint"
KINDS = frozenset({"epoch", "snapshot", "gc", "pin", "forget"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One entry of the log. `utc` (seconds) and `owner` are for people; nothing is decided by them.

    `single_writer`: the writer relied on being the only one, so that nobody may write beside it.
    """

    seq: int
    epoch: int
    kind: str
    nonce: str
    prev: str
    owner: str
    utc: float
    body: Mapping[str, Any] = field(default_factory=dict)
    single_writer: bool = False


class Outcome(Enum):
    """What a writer learns by reading back the slot it tried to create."""

    COMMITTED = "committed"
    LOST = "lost"
    FENCED = "fenced"


def slot_key(seq: int) -> str:
    return f"{PREFIX}{seq:012d}.json"


def seq_of_key(key: str) -> int | None:
    """The slot number of a key under `log/`, or None if it is not a slot's key."""
    stem = key.removeprefix(PREFIX).removesuffix(".json")
    if len(stem) >= 12 and stem.isascii() and stem.isdigit() and key == slot_key(int(stem)):
        return int(stem)
    return None


def encode(slot: Slot) -> bytes:
    """Raises InputError if it says more than a slot can hold."""
    data = canonical_json(
        {
            "seq": slot.seq,
            "epoch": slot.epoch,
            "kind": slot.kind,
            "nonce": slot.nonce,
            "prev": slot.prev,
            "owner": slot.owner,
            "utc": slot.utc,
            "requires": [],
            "body": dict(slot.body),
            **({"single_writer": True} if slot.single_writer else {}),
        }
    )
    if len(data) > MAX_SLOT_BYTES:
        raise InputError(
            f"log slot {slot.seq} ({slot.kind}) would have {len(data)} bytes; at most {MAX_SLOT_BYTES} can be read",
            hint="a slot names each participant's state, each worker, each pin or each snapshot to forget: have fewer",
        )
    return data


def check_requires(document: Mapping[str, Any], what: str) -> None:
    """Raise FormatNotUnderstood if `document` requires a feature; this version knows none."""
    requires = document.get("requires", [])
    if not isinstance(requires, list):
        raise Damaged(f"{what}: `requires` is not a list")
    if requires:
        raise FormatNotUnderstood(
            f"{what} requires {', '.join(map(str, requires))}, which this version does not know",
            hint="upgrade prefix-recovery to the version that wrote the store, or a later one",
        )


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object, checked for `requires`. Raises Damaged if `data` is not one."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} is not JSON: {error}", hint="run: snapshot-inspect verify STORE") from error
    if not isinstance(document, dict):
        raise Damaged(f"{what} is not a JSON object", hint="run: snapshot-inspect verify STORE")
    check_requires(document, what)
    return document


def decode(data: bytes, seq: int) -> Slot:
    """Raises Damaged or FormatNotUnderstood; `seq` is the number that the key says."""
    what = f"log slot {seq}"
    if len(data) > MAX_SLOT_BYTES:
        raise Damaged(f"{what} has {len(data)} bytes; at most {MAX_SLOT_BYTES} are allowed")
    document = parse_object(data, what)
    slot = Slot(
        seq=take(document, "seq", int, what),
        epoch=take(document, "epoch", int, what),
        kind=take(document, "kind", str, what),
        nonce=take(document, "nonce", str, what),
        prev=take(document, "prev", str, what),
        owner=take(document, "owner", str, what),
        utc=_seconds(document.get("utc")),
        body=take(document, "body", dict, what),
        single_writer=document.get("single_writer") is True,
    )
    if slot.seq != seq:
        raise Damaged(f"{what} says that it is slot {slot.seq}")
    if slot.epoch < 1:
        raise Damaged(f"{what} claims epoch {slot.epoch}; the first epoch is 1")
    if slot.kind not in KINDS:
        raise FormatNotUnderstood(f"{what} is of the unknown kind {slot.kind!r}", hint="upgrade prefix-recovery")
    return slot


def take(document: Mapping[str, Any], name: str, kind: type[T], what: str) -> T:
    """Field `name`, which has to be of exactly this type (a bool is no int). Raises Damaged."""
    value = document.get(name)
    if type(value) is not kind:
        raise Damaged(f"{what} lacks or mangles a field: {name} is not of type {kind.__name__}")
    return value


def _seconds(value: Any) -> float:
    """For people only, so that nonsense is no reason to refuse a slot."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e12 else 0.0


def check_first(slot: Slot) -> None:
    """Raise Damaged unless `slot` may be the first one."""
    if slot.prev != GENESIS or slot.kind != "epoch":
        raise Damaged(f"log slot {slot.seq} is the first one and must be a claim that follows nothing")


def check_successor(earlier: Slot, earlier_bytes: bytes, later: Slot) -> None:
    """Raise DigestMismatch or Damaged unless `later` may follow `earlier`."""
    if later.seq != earlier.seq + 1:
        raise Damaged(f"log slot {later.seq} does not follow slot {earlier.seq}")
    if later.prev != sha256_hex(earlier_bytes):
        raise DigestMismatch(f"log slot {earlier.seq} is not the one that slot {later.seq} was written after")
    if later.epoch < earlier.epoch or (later.kind == "epoch") != (later.epoch > earlier.epoch):
        raise Damaged(f"log slot {later.seq} ({later.kind}, epoch {later.epoch}) follows epoch {earlier.epoch}")


def forgotten_by(slot: Slot) -> frozenset[int]:
    """The snapshots that a `forget` slot takes out of consideration. Raises Damaged."""
    what = f"log slot {slot.seq}"
    snapshots = take(slot.body, "snapshots", list, what)
    if not all(type(seq) is int and 0 < seq < slot.seq for seq in snapshots):
        raise Damaged(f"{what} forgets what no snapshot before it can be")
    return frozenset(snapshots)


def classify(mine: Slot, found: Slot) -> Outcome:
    """Who owns a slot that `mine` was written for and `found` was read from."""
    if found.nonce == mine.nonce:
        return Outcome.COMMITTED
    return Outcome.FENCED if mine.kind != "epoch" and found.epoch > mine.epoch else Outcome.LOST
