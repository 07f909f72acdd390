"""How far a restore is, for who waits for it.

Owns: a store whose reads are told, and how much a restore may have to read.
Does not know: how progress is shown.

Invariants:
1. The five verbs are passed on as they are; what is told changes nothing.
2. What is expected is a bound: a restore reads the segments of unfinished calls, and the log knows only all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from recovery.log_reading import kept_snapshots
from recovery.ports import Listed, ObjectStore, Put
from recovery.snapshots import Snapshot


class Reading(Protocol):
    """Told in the thread that restores."""

    def expect(self, nbytes: int) -> None:
        """At most so much is going to be read, as far as the log says."""

    def read(self, nbytes: int) -> None:
        """One object, or a part of one, was read."""


@dataclass(frozen=True, slots=True)
class WatchedStore:
    """A store that tells what was read from it."""

    inner: ObjectStore
    reading: Reading

    def put_new(self, key: str, data: bytes) -> Put:
        return self.inner.put_new(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self.inner.get(key, start, end)
        self.reading.read(len(data))
        return data

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        return self.inner.list(prefix, after)

    def delete(self, key: str) -> None:
        self.inner.delete(key)


def watched(store: ObjectStore, tail: int, reading: Reading | None) -> ObjectStore:
    """The store to restore from: the same, or one that tells `reading`."""
    if reading is None:
        return store
    newest = next(kept_snapshots(store, tail), None)
    if newest is not None:
        counts = newest.body.get("counts")
        stated = counts.get("nbytes") if isinstance(counts, dict) else None
        if type(stated) is int:
            reading.expect(stated + Snapshot.from_slot(newest).ledger.nbytes)
    return WatchedStore(store, reading)
