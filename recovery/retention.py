"""What may be deleted, and when: intents first, deletions one snapshot later.

Owns: the queue of objects that newer snapshots no longer reach.
Does not know: the store, the log; publication.py writes the intents and deletes.

Invariants:
1. A key is intended only when none of the `keep_latest_k` newest snapshots reaches it (counted in snapshots that this
   coordinator published; one that it does not know of can only make keys wait longer).
2. A key is deleted only after its intent was published and one more snapshot after that.
3. A key is deleted once by one coordinator; what a crash leaves is found by the next restore (`take_over`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What to do after a publication: delete now, and publish an intent for the rest."""

    delete: tuple[str, ...]
    intend: tuple[str, ...]


class Retention:
    """Counts publications; never looks at a clock."""

    def __init__(self, keep_latest_k: int) -> None:
        if keep_latest_k < 1:
            raise ValueError("at least one snapshot is kept")
        self._keep = keep_latest_k
        self._ordinal = 0
        self._dropped: deque[tuple[int, str]] = deque()
        self._intended: tuple[str, ...] = ()
        self._offered: tuple[str, ...] = ()

    def drop(self, keys: Iterable[str]) -> None:
        """The next published snapshot is the first that does not reach these keys."""
        self._dropped.extend((self._ordinal + 1, key) for key in keys)

    def take_over(self, intended: Iterable[str], unreached: Iterable[str]) -> None:
        """What a restore found, after it published: keys that published intents name, and others that are due.

        Deleting the former and intending the latter is the work of the next `published`, which counts the restore's
        own snapshot.
        """
        known = dict.fromkeys((*self._intended, *intended))
        self._intended = tuple(known)
        self._offered = tuple(dict.fromkeys((*self._offered, *(key for key in unreached if key not in known))))

    def published(self) -> Work:
        """A snapshot was published. Deletes what was intended before it."""
        self._ordinal += 1
        delete, self._intended = self._intended, ()
        due = dict.fromkeys(self._offered)
        while self._dropped and self._dropped[0][0] + self._keep - 1 <= self._ordinal:
            due[self._dropped.popleft()[1]] = None
        self._offered = tuple(due)
        return Work(delete, self._offered)

    def postpone(self, keys: Iterable[str]) -> None:
        """Keys that `published` gave to delete and that were not deleted: they are given again."""
        self._intended = (*keys, *self._intended)

    def intended(self, keys: Iterable[str]) -> None:
        """The intent for these of what `published` asked for is in the log; the others are offered again."""
        named = dict.fromkeys(keys)
        self._intended = (*self._intended, *named)
        self._offered = tuple(key for key in self._offered if key not in named)
