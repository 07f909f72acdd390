"""A staging that believes nothing: segments as rows of any queue or table, checked on the way in and on the way out.

Owns: what is checked, and what is said of what does not pass.
Does not know: what keeps the rows (transfer_queue.py; here a dict), what is in a segment.

A Rows may overwrite in silence, list keys that have no row, lose rows, give another row's bytes, and fail to answer:
none of that gets past CheckedStaging. What remains of it is StoreUnavailable, ObjectMissing or DigestMismatch.

Invariants:
1. A key is that of a segment: it ends with the crc32c of its bytes, and bytes that it does not fit are never handed
   out. So a row can be overwritten by nothing but itself, unseen.
2. What `stage` returned from was read back, byte for byte.
3. A key that is listed is a claim. `fetch` tells.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from recovery.errors import Damaged, DigestMismatch, ObjectMissing
from storage_backends.keys import check_key, check_prefix, is_key
from storage_backends.sums import crc32c, crc_from_key


class Rows(Protocol):
    """What a CheckedStaging keeps its segments in. Every verb may raise StoreUnavailable, and nothing else."""

    def put(self, key: str, data: bytes) -> None:
        """Keep a row; what was there under the key may be gone."""

    def get(self, key: str) -> bytes | None:
        """The row, or None."""

    def keys(self) -> Sequence[str]:
        """In any order; perhaps some that have no row."""

    def clear(self, keys: Sequence[str]) -> None:
        """Forget rows, there or not."""


class CheckedStaging:
    """recovery.ports.Staging over any Rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def stage(self, key: str, data: bytes) -> None:
        check_key(key)
        _check(key, data, "what is to be staged as")
        self._rows.put(key, data)
        back = self._rows.get(key)
        if back is None:
            raise ObjectMissing(f"{key} was staged, and is not there", hint=_MEANWHILE)
        if back != data:
            raise DigestMismatch(f"{key} was staged, and reads back as something else", hint=_MEANWHILE)

    def staged(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        return sorted({key for key in self._rows.keys() if key.startswith(prefix) and _is_segment(key)})  # noqa: SIM118

    def fetch(self, key: str) -> bytes:
        check_key(key)
        data = self._rows.get(key)
        if data is None:
            raise ObjectMissing(f"{key} is not staged (any more)", hint=_LOST)
        _check(key, data, "what is staged as")
        return data

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        if keys:
            self._rows.clear(keys)


class MemoryRows:
    """Rows that live as long as the process: for tests and trials."""

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._rows[key] = bytes(data)

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._rows.get(key)

    def keys(self) -> Sequence[str]:
        with self._lock:
            return list(self._rows)

    def clear(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._rows.pop(key, None)


_MEANWHILE = "it goes to the store instead; look whether another job uses the same staging"
_LOST = "the tokens in it are generated again"


def _check(key: str, data: bytes, what: str) -> None:
    found = crc32c(data)
    if found != crc_from_key(key):
        raise DigestMismatch(f"{what} {key} has crc32c {found:08x}", hint=_LOST)


def _is_segment(key: str) -> bool:
    try:
        crc_from_key(key)
    except Damaged:
        return False
    return is_key(key)
