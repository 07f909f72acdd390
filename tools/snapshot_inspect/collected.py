"""What garbage collection has taken: told apart from damage by the lists that it published first.

Owns: the lists of all gc slots, and the question whether an old snapshot may lack an object.
Does not know: which objects are missing.

A list is garbage itself some snapshots later. What a list that was collected had named is not known any more; it is
taken to have named whatever a snapshot of its time lacks.

Invariants:
1. The newest snapshot before a gc slot keeps all of its objects, and nothing is deleted before the next one after it.
2. A list may be missing only if a later list names it, or a later list is missing with right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from recovery.errors import Damaged
from recovery.log import Slot, slot_key
from recovery.ports import ObjectStore
from recovery.snapshots import ObjectRef
from snapshot_inspect.findings import MISSING, Problem
from snapshot_inspect.newest import victims


class Collected:
    """Reads the lists of these slots of the log, in any order."""

    def __init__(self, store: ObjectStore, slots: Iterable[Slot]) -> None:
        self.problems: list[Problem] = []
        self.lists: set[str] = set()
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
        try:
            key = ObjectRef.from_json(slot.body.get("victims"), f"gc slot {slot.seq}").key
            names = victims(store, slot)
        except (Damaged, OverflowError) as error:
            shown = error if isinstance(error, Damaged) else Damaged(f"gc slot {slot.seq}: {error}")
            self.problems.append(Problem.of(_list_key(slot), shown))
            return
        self.lists.add(key)
        if names is not None:
            for name in names:
                self._named[name].append(slot.seq)
        elif key in self._named or self._unknown:
            self._unknown.append(slot.seq)
        else:
            message = f"{key} is missing: the list of what garbage collection was about to delete at slot {slot.seq}"
            self.problems.append(
                Problem(key, MISSING, message, "a restore may adopt what is deleted next; verify again")
            )

    def named_after(self, seq: int) -> set[str]:
        """What the gc slots above `seq` name: never adopted by a restore of a snapshot there."""
        return {key for key, slots in self._named.items() if max(slots) > seq}

    def may_lack(self, snapshot: int, key: str) -> bool:
        """Whether garbage collection had the right to delete `key` although `snapshot` needs it."""
        at = bisect_right(self._snapshots, snapshot)
        if at >= len(self._snapshots):
            return False
        next_one, newest = self._snapshots[at], self._snapshots[-1]
        slots = [*self._named.get(key, ()), *self._unknown]
        return any(next_one < seq < newest for seq in slots)


def _list_key(slot: Slot) -> str:
    reference = slot.body.get("victims")
    key = reference.get("key") if isinstance(reference, dict) else None
    return key if isinstance(key, str) else slot_key(slot.seq)
