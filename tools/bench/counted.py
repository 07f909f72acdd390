"""A store that counts what goes through it.

Owns: calls, objects and bytes per verb, between two moments.
Does not know: the store behind it, why it is called.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from recovery.ports import Listed, ObjectStore, Put

NAMES_PER_LISTING = 1000
"""A bucket gives so many with one request."""


@dataclass(slots=True)
class Traffic:
    """What was asked of a store: requests by verb. `created` counts objects by the first part of their key."""

    calls: Counter[str] = field(default_factory=Counter)
    created: Counter[str] = field(default_factory=Counter)
    bytes_created: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0

    @property
    def n_objects(self) -> int:
        return sum(self.created.values())

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_created.values())


class CountedStore:
    """An ObjectStore. `take` gives the traffic since the last time."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._traffic = Traffic()

    def take(self) -> Traffic:
        taken, self._traffic = self._traffic, Traffic()
        return taken

    def _wrote(self, verb: str, key: str, data: bytes) -> None:
        kind = key.partition("/")[0]
        self._traffic.calls[verb] += 1
        self._traffic.created[kind] += 1
        self._traffic.bytes_created[kind] += len(data)

    def put_new(self, key: str, data: bytes) -> Put:
        self._wrote("put_new", key, data)
        return self._store.put_new(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._wrote("put", key, data)
        self._store.put(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._traffic.calls["get"] += 1
        data = self._store.get(key, start, end)
        self._traffic.bytes_read += len(data)
        return data

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        found = self._store.list(prefix, after)
        self._traffic.calls["list"] += max(1, -(-len(found) // NAMES_PER_LISTING))
        return found

    def delete(self, key: str) -> None:
        self._traffic.calls["delete"] += 1
        self._store.delete(key)
