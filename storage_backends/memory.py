"""MemoryStore: the five verbs over a dict, for tests and trials.

Owns: objects that live as long as the process.
Does not know: files, other processes.

Invariants:
1. Same contract as every store (storage_backends/testing/conformance.py); durable means: in this process.
2. One lock around each verb; an object's bytes are immutable, so they are handed out without a copy.
3. `named(name)` gives one store per name and process.
"""

from __future__ import annotations

import threading

from recovery.errors import ObjectMissing
from recovery.ports import Listed, Put
from storage_backends.keys import check_key, check_prefix, check_range

_Listing = list[Listed]


class MemoryStore:
    """An ObjectStore in memory."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._objects)} objects)"

    def put_new(self, key: str, data: bytes) -> Put:
        check_key(key)
        with self._lock:
            if key in self._objects:
                return Put.EXISTS
            self._objects[key] = bytes(data)
            return Put.CREATED

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        with self._lock:
            self._objects[key] = bytes(data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        check_range(start, end)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            raise ObjectMissing(f"{key} is not in this memory store")
        return data[start:end]

    def list(self, prefix: str, after: str = "") -> _Listing:
        check_prefix(prefix)
        with self._lock:
            found = [Listed(k, len(v)) for k, v in self._objects.items() if k.startswith(prefix) and k > after]
        return sorted(found)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)


_NAMED: dict[str, MemoryStore] = {}


def named(name: str) -> MemoryStore:
    """The store of this name in this process, made when it is first asked for."""
    return _NAMED.setdefault(name, MemoryStore())
