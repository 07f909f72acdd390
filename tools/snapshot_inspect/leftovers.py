"""What lies in a store beside what its snapshots need: adoptable, garbage, foreign.

Owns: the names of the format's objects (docs/format.md, section 3).
Does not know: whether a snapshot is sound; what adoption does (newest.py asks recovery.restore).

Invariants:
1. All of it is information. Nothing here is a problem, and nothing is deleted.
2. A key that the format does not name is foreign, wherever it lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from recovery import log
from recovery.ports import Listed
from recovery.snapshots import FORMAT_KEY
from snapshot_inspect.newest import Adopted

_OURS = re.compile(
    r"(?:ledger/e\d{6,}/[0-9a-f]{16}\.[a-z0-9]+"
    r"|seg/e\d{6,}/[a-z0-9._-]+\.[0-9a-f]{8}/\d{8,}-[0-9a-f]{8}-[0-9a-f]{8}\.[a-z0-9]+"
    r"|state/e\d{6,}/[a-z0-9._-]+-[0-9a-f]{16}\.json"
    r"|gc/e\d{6,}/[0-9a-f]{16}\.json)"
)


@dataclass(frozen=True, slots=True)
class Unreferenced:
    """An object of the store that no sound snapshot needs, and what becomes of it."""

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
    if key in (FORMAT_KEY, log.HINT_KEY) or log.seq_of_key(key) is not None:
        return False
    return _OURS.fullmatch(key) is None


def unreferenced(
    listed: Iterable[Listed], needed: set[str], adopted: Adopted, about_to_go: set[str]
) -> list[Unreferenced]:
    """Objects of the store (foreign ones are none) that are neither needed nor would be adopted."""
    bad = dict(adopted.passed_over)
    taken = set(adopted.segments)
    result = []
    for item in listed:
        key = item.key
        if "/" not in key or key.startswith(log.PREFIX) or key in needed or key in taken or is_foreign(key):
            continue
        if key in bad:
            why = f"a restore cannot adopt it: {bad[key]}"
        elif key in about_to_go:
            why = "named in a gc slot: deleted after one more snapshot"
        else:
            why = "no sound snapshot needs it: a later run collects it"
        result.append(Unreferenced(key, item.nbytes, why))
    return result
