"""Where a snapshot was taken, if that was in another store; and stores of which an import was not finished.

Owns: the record `origin` of docs/format.md, section 14, and the mark that an import's claim bears.
Does not know: how a snapshot gets from one store to another (the inspector does that).

Invariants:
1. An origin that is passed on is passed on unchanged; one that is mangled is none.
2. A log that holds nothing but claims of imports holds nothing to restore, and is never taken for that of a new job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recovery.errors import NothingPublished
from recovery.log import Slot
from recovery.log_reading import Read, find_tail, walk_back
from recovery.ports import ObjectStore

TEXT_MAX = 200
_TEXTS, _NUMBERS = ("store_id", "cause", "owner"), ("snapshot", "epoch", "adopted")


def origin_of(slot: Slot) -> dict[str, Any] | None:
    """The origin that a snapshot's slot states, if it does."""
    stated = slot.body.get("origin")
    if not isinstance(stated, dict):
        return None
    texts = {name: stated.get(name) for name in _TEXTS}
    numbers = {name: stated.get(name) for name in _NUMBERS}
    utc: Any = stated.get("utc")
    fits = all(isinstance(text, str) and _plain(text) == text for text in texts.values())
    fits &= all(type(number) is int and 0 <= number < 1 << 63 for number in numbers.values())
    if not fits or type(utc) not in (int, float) or not abs(utc) < 1e12:
        return None
    return {**texts, **numbers, "utc": float(utc)}


def origin_here(slot: Slot, store_id: Any, adopted: int) -> dict[str, Any]:
    """The origin of a snapshot that was taken in this store. `adopted`: tokens that were added to it since."""
    return {
        "store_id": _plain(store_id),
        "snapshot": slot.seq,
        "epoch": slot.epoch,
        "cause": _plain(slot.body.get("cause")),
        "owner": _plain(slot.owner),
        "utc": slot.utc,
        "adopted": adopted,
    }


def _plain(text: Any) -> str:
    """Text for people, as it can be written: no halves of surrogate pairs, not endless."""
    return text.encode("utf-8", "replace").decode()[:TEXT_MAX] if isinstance(text, str) else ""


def import_claim(origin: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the claim of an import."""
    return {"import": dict(origin)}


def is_import_claim(slot: Slot) -> bool:
    return slot.kind == "epoch" and isinstance(slot.body.get("import"), dict)


def unfinished_import(store: ObjectStore) -> Slot | None:
    """The newest claim of an import, if the log holds nothing but such claims (invariant 2)."""
    newest: Slot | None = None
    for read in walk_back(store, find_tail(store, trust_hint=False)):
        if not isinstance(read, Read) or not is_import_claim(read.slot):
            return None
        newest = newest or read.slot
    return newest


def refuse_unfinished_import(store: ObjectStore) -> None:
    """Raises NothingPublished if all that is in the store is an import that was not finished."""
    claim = unfinished_import(store)
    if claim is not None:
        raise NothingPublished(
            f"an import into this store was not finished (slot {claim.seq}, {claim.owner or 'unknown owner'}): "
            "it holds nothing to restore",
            hint="do it again: snapshot-inspect import FILE STORE; or remove the store, or begin anew in another one",
        )
