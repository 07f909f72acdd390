"""The slots of a long log, several requests at a time.

Owns: which slots are asked for before somebody wants them.
Does not know: what is in a slot, in which order they are checked (survey.py).

A log of a thousand entries in a bucket is a thousand answers of some ten milliseconds each; one after the other they
take longer than who is paged at night wants to wait.

Invariants:
1. What a slot's request gave or raised is given or raised when that slot is asked for, and not before.
2. A short log is read without threads: nothing is asked for that may not be wanted.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from recovery.log_reading import Read, read_slot
from recovery.ports import ObjectStore

FROM_SLOTS = 64
"""Shorter logs are read one slot after the other."""

AT_ONCE, WINDOW = 16, 48


class Slots:
    """Slots from `top` downwards. Used as a context manager."""

    def __init__(self, store: ObjectStore, top: int, *, ahead: bool) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="slots") if ahead and top >= FROM_SLOTS else None
        self._asked: dict[int, Future[Read | None]] = {}
        self._next = top

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def read(self, seq: int) -> Read | None:
        """As recovery.log_reading.read_slot. `seq` never grows from call to call."""
        if self._pool is None:
            return read_slot(self._store, seq)
        self._next = min(self._next, seq)
        while self._next > max(0, seq - WINDOW):
            self._asked[self._next] = self._pool.submit(read_slot, self._store, self._next)
            self._next -= 1
        for passed in [n for n in self._asked if n > seq]:
            del self._asked[passed]
        return self._asked.pop(seq).result()
