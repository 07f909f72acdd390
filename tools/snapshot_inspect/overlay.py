"""A store that is written to in memory only: what a deleting verb would do, by doing it.

Owns: the objects that were written over a real store, and the keys that were deleted from it.
Does not know: what is done with it. The verbs that write run on an Overlay without --apply, on a Recorder with it.

Invariants:
1. Nothing of an Overlay reaches the store below it.
2. Seen through an Overlay, the store is as if all of it had been done.
3. `deleted` holds each object that was there before and is deleted, with its size.
"""

from __future__ import annotations

from recovery.errors import ObjectMissing
from recovery.ports import Listed, ObjectStore, Put

_Listing = list[Listed]


class Recorder:
    """Passes everything on, and remembers what was deleted."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self._sizes = {item.key: item.nbytes for item in inner.list("")}
        self.deleted: dict[str, int] = {}

    def put_new(self, key: str, data: bytes) -> Put:
        return self.inner.put_new(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self.inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> _Listing:
        return self.inner.list(prefix, after)

    def delete(self, key: str) -> None:
        self.inner.delete(key)
        self._note(key)

    def _note(self, key: str) -> None:
        if key in self._sizes:
            self.deleted[key] = self._sizes.pop(key)


class Overlay(Recorder):
    """The same with `inner` left as it is."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._written: dict[str, bytes] = {}

    def put_new(self, key: str, data: bytes) -> Put:
        if key in self._written or (key not in self.deleted and self._exists(key)):
            return Put.EXISTS
        self._written[key] = data
        return Put.CREATED

    def put(self, key: str, data: bytes) -> None:
        self._written[key] = data

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if key in self._written:
            return self._written[key][start:end]
        if key in self.deleted:
            raise ObjectMissing(f"{key} would be deleted by now")
        return self.inner.get(key, start, end)

    def list(self, prefix: str, after: str = "") -> _Listing:
        found = {item.key: item for item in self.inner.list(prefix, after) if item.key not in self.deleted}
        for key, data in self._written.items():
            if key.startswith(prefix) and key > after:
                found[key] = Listed(key, len(data))
        return [found[key] for key in sorted(found)]

    def delete(self, key: str) -> None:
        self._written.pop(key, None)
        self._note(key)

    def _exists(self, key: str) -> bool:
        try:
            self.inner.get(key, 0, 1)
        except ObjectMissing:
            return False
        return True
