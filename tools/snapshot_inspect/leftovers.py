"""What lies in a store beside what its snapshots need: adoptable, garbage, foreign.

Owns: what becomes of each such object.
Does not know: whether a snapshot is sound; what adoption does (newest.py asks recovery.adoption).

Invariants:
1. All of it is information. Nothing here is a problem, and nothing is deleted.
2. A key that the format does not name is foreign, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from recovery import layout, log
from recovery.ports import Listed
from recovery.snapshots import FORMAT_KEY
from snapshot_inspect.newest import Adopted


@dataclass(frozen=True, slots=True)
class Unreferenced:
    """An object of the store that no snapshot refers to, and what becomes of it."""

    key: str
    nbytes: int
    why: str


@dataclass(slots=True)
class Leftovers:
    """`unfinished`: files in a local store's .tmp."""

    adoption: Adopted = field(default_factory=Adopted)
    unreferenced: list[Unreferenced] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unfinished: int = 0


def is_foreign(key: str) -> bool:
    marks = key in (FORMAT_KEY, log.HINT_KEY) or log.seq_of_key(key) is not None
    return not marks and layout.epoch_of(key) is None and layout.pinned_by(key) is None


def unreferenced(
    listed: Iterable[Listed], needed: Collection[str], adopted: Adopted, about_to_go: Collection[str]
) -> Iterator[Unreferenced]:
    """Objects of the store (foreign ones are none) that are neither needed nor would be adopted."""
    unreadable = dict(adopted.unreadable)
    taken = set(adopted.segments)
    for item in listed:
        key = item.key
        if layout.epoch_of(key) is None or key in needed or key in taken:
            continue
        if key in unreadable:
            why = f"a restore cannot adopt it: {unreadable[key]}"
        elif key in about_to_go:
            why = "named in a gc slot: deleted after one more snapshot"
        else:
            why = "no snapshot refers to it: a later run collects it"
        yield Unreferenced(key, item.nbytes, why)
