"""What was flushed since a snapshot, told by names alone.

Owns: which part of a listing has to be asked for, and which names in it are of flushes that no snapshot accounts for.
Does not know: what is in those segments, whether a restore takes them over (newest.py).

Invariants:
1. What `flushed_since` lists grows with what was flushed since, not with the store: a name that the snapshot accounts
   for is passed over before it is sent. A further writer whose name comes before all known ones is therefore not
   found. Where the ledger was read, `unpublished` looks at every name of the epoch.
2. Nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from recovery.errors import CredentialsRefused
from recovery.layout import segment_position, segments_of
from recovery.ledger import Ledger
from recovery.log import Slot
from recovery.ports import Listed, ObjectStore

_LAST = "\x7f"
"""Behind every name of a flush."""


def flushed_since(store: ObjectStore, slot: Slot) -> list[Listed] | None:
    """Segments of the snapshot's epoch that it does not account for; None if it does not say, or may not be listed."""
    flushed = _flushed(slot)
    if flushed is None:
        return None
    folder = segments_of(slot.epoch)
    try:
        found = [item for asked in _asked(folder, flushed) for item in store.list(*asked)]
    except CredentialsRefused:
        return None
    return [item for item in found if _extends(item.key, slot.epoch, flushed)]


def unpublished(store: ObjectStore, ledger: Ledger, epoch: int, flushed: Mapping[str, int]) -> list[str]:
    """Segments that a restore of a snapshot of `epoch`, whose ledger was read, looks at to adopt them."""
    keys = [item.key for item in store.list(segments_of(epoch))]
    return [key for key in keys if _extends(key, epoch, flushed) and not ledger.knows_segment(key)]


def _flushed(slot: Slot) -> Mapping[str, int] | None:
    stated = slot.body.get("flushed")
    if not isinstance(stated, dict) or not all(type(flush) is int and flush >= 0 for flush in stated.values()):
        return None
    return stated


def _asked(folder: str, flushed: Mapping[str, int]) -> list[tuple[str, str]]:
    """(prefix, after) of the listings: the rest of each known writer, and what comes behind all of them."""
    if not flushed:
        return [(folder, "")]
    writers = sorted(flushed)
    last = f"{folder}{writers[-1]}/{flushed[writers[-1]]:08d}{_LAST}"
    known = [(f"{folder}{name}/", f"{folder}{name}/{flushed[name]:08d}{_LAST}") for name in writers[:-1]]
    return [*known, (folder, last)]


def _extends(key: str, epoch: int, flushed: Mapping[str, int]) -> bool:
    at = segment_position(key)
    return at is not None and at.extends(epoch, flushed)
