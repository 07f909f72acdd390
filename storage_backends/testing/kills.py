"""A process that dies at its k-th store call, for every k.

Owns: Killed, and KillingStore, which dies before or after a call or loses one answer.
Does not know: what the process was doing; the test restores and looks.

Invariants:
1. Calls are counted from 1. Fewer than `at` calls, or `at` 0: nothing happens.
2. After Killed no call of this store does anything but raise Killed: a dead process makes no calls.
3. Killed is a BaseException, so that code which survives errors does not survive it.
4. "lost": the call is applied, the caller learns nothing of it and lives on.

Usage: run once with `at=0`, read `n_calls`, then run once for every k from 1 to n_calls and every way to die.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

from recovery.errors import OutcomeUnknown, RecoveryError, StoreUnavailable
from recovery.ports import ObjectStore
from storage_backends.testing.faults import Verb, Wrapped

T = TypeVar("T")
How = Literal["before", "after", "lost"]
WAYS: tuple[How, ...] = ("before", "after", "lost")


class Killed(BaseException):
    """The process is dead; nothing but the test may catch this."""


class KillingStore(Wrapped):
    """Passes calls on until the `at`-th, then dies or loses the answer."""

    def __init__(self, inner: ObjectStore, at: int, how: How = "before") -> None:
        super().__init__(inner)
        self.at = at
        self.how = how
        self.n_calls = 0
        self.killed = False
        self._lock = threading.Lock()

    def _call(self, verb: Verb, key: str, apply: Callable[[], T]) -> T:
        with self._lock:
            if self.killed:
                raise Killed(f"{verb} of {key} by a dead process")
            self.n_calls += 1
            hit = self.n_calls == self.at
            self.killed = hit and self.how != "lost"
        if not hit:
            return apply()
        what = f"call {self.at}, {verb} of {key}"
        if self.how == "before":
            raise Killed(f"before {what}")
        with suppress(RecoveryError):  # an answer that nobody hears may be an error too
            apply()
        if self.how == "after":
            raise Killed(f"after {what}")
        kind = OutcomeUnknown if verb == "put_new" else StoreUnavailable
        raise kind(f"the answer to {what} was lost", hint="read back what is there")
