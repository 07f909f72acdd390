"""What garbage collection has taken or is about to take: told apart from damage by the lists that it published first.

Owns: the lists of all gc slots, and the question whether an old snapshot may lack an object.
Does not know: which objects are missing.

A list is garbage itself some snapshots later. What a list that was collected had named is not known any more; it is
taken to have named whatever a snapshot of its time lacks.

Invariants:
1. The newest snapshot before a gc slot keeps all of its objects, and nothing is deleted before the next one after it.
2. A list may be missing only if a later list names it, or if a later list is missing and could have named it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from recovery import garbage
from recovery.errors import Damaged
from recovery.layout import GARBAGE
from recovery.log import Slot, slot_key
from recovery.ports import ObjectStore
from recovery.snapshots import ObjectRef
from snapshot_inspect.findings import MISSING, Problem

_UNKNOWN = "what it named is not known: a restore may adopt what is deleted next. Verify again after the next snapshot"


class Collected:
    """Reads the lists of these slots of the log, in any order."""

    def __init__(self, store: ObjectStore, slots: Iterable[Slot]) -> None:
        self.problems: list[Problem] = []
        self.lists: set[str] = set()
        self._present = {item.key for item in store.list(GARBAGE)}
        self._named: dict[str, list[int]] = defaultdict(list)
        self._unknown: list[int] = []
        self._snapshots: list[int] = []
        for slot in sorted(slots, key=lambda slot: -slot.seq):
            if slot.kind == "snapshot":
                self._snapshots.append(slot.seq)
            elif slot.kind == "gc":
                self._read(store, slot)
        self._snapshots.reverse()

    def _read(self, store: ObjectStore, slot: Slot) -> None:
        key = slot_key(slot.seq)
        try:
            key = ObjectRef.from_json(slot.body.get("victims"), f"gc slot {slot.seq}").key
            names = garbage.intended(store, slot)
        except Damaged as error:
            self.problems.append(Problem.of(key, error))
            return
        self.lists.add(key)
        if key in self._present:
            for name in names:
                self._named[name].append(slot.seq)
            return
        if key not in self._named and not self._unknown:
            message = f"{key} is missing: what garbage collection was about to delete at slot {slot.seq}"
            self.problems.append(Problem(key, MISSING, message, _UNKNOWN))
        self._unknown.append(slot.seq)

    def named_after(self, seq: int) -> set[str]:
        """What the gc slots above `seq` name."""
        return {key for key, slots in self._named.items() if slots[0] > seq}

    def may_lack(self, snapshot: int, key: str) -> bool:
        """Whether garbage collection had the right to delete `key` although `snapshot` needs it (invariant 1)."""
        newest = self._snapshots[-1] if self._snapshots else 0
        return any(seq < newest for seq in (*self._rightly(snapshot, key), *self._in_time(snapshot, self._unknown)))

    def may_intend(self, snapshot: int, key: str) -> bool:
        """Whether every list after `snapshot` that names `key` had the right to."""
        return len(self._rightly(snapshot, key)) == sum(seq > snapshot for seq in self._named.get(key, ()))

    def _rightly(self, snapshot: int, key: str) -> list[int]:
        return self._in_time(snapshot, self._named.get(key, ()))

    def _in_time(self, snapshot: int, slots: Iterable[int]) -> list[int]:
        """Those gc slots before which another snapshot followed this one."""
        at = bisect_right(self._snapshots, snapshot)
        return [seq for seq in slots if at < len(self._snapshots) and self._snapshots[at] < seq]
