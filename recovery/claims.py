"""Who held a store, and who took it over: the claims of a log.

Owns: finding the latest claims without reading the whole log.
Does not know: what lies between two claims, whether a holder still lives (nobody can).

Invariants:
1. Epochs never decrease along the log, so that a claim is found by bisection: the first slot of its epoch.
2. Nothing is written, nothing is decided by what is found: it is for people.
"""

from __future__ import annotations

from recovery.errors import ObjectMissing
from recovery.log import Slot
from recovery.log_reading import read_slot
from recovery.ports import ObjectStore


def latest_claims(store: ObjectStore, tail: int, most: int) -> list[Slot]:
    """At most so many claims up to slot `tail`, newest first: each one fenced the next of the list.

    Raises Damaged where a slot on the way cannot be read, and the store's errors.
    """
    claims: list[Slot] = []
    while tail and len(claims) < most:
        claim = _first_of_epoch(store, tail)
        claims.append(claim)
        tail = claim.seq - 1
    return claims


def _first_of_epoch(store: ObjectStore, last: int) -> Slot:
    """The first slot that has the epoch of slot `last`."""
    found = _slot(store, last)
    low, high = 0, last  # slot `low` is of an earlier epoch (0: none is), `found` is slot `high`
    while high - low > 1:
        middle = (low + high) // 2
        slot = _slot(store, middle)
        if slot.epoch == found.epoch:
            high, found = middle, slot
        else:
            low = middle
    return found


def _slot(store: ObjectStore, seq: int) -> Slot:
    read = read_slot(store, seq)
    if read is None:
        raise ObjectMissing(f"log slot {seq} is missing", hint="run: snapshot-inspect verify STORE")
    return read.slot
