"""What a writer that is gone left waiting in a staging, on its way into the store.

Owns: which of it is stored, and what is said of the rest.
Does not know: what a staging is made of, what a restore makes of a segment (adoption.py).

Invariants:
1. A segment is in the store, under the name it was staged as, before it is dropped; one that is not stored is left.
2. One that cannot be fetched costs its own records and those of its calls after it; the rest is taken all the same.
3. Whether a segment extends anything is decided by the ledger, as of any other: one that is salvaged twice, or late, or
   that was stored in another one too, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from recovery.errors import Damaged, RecoveryError, StoreUnavailable
from recovery.layout import segment_position
from recovery.ports import ObjectStore, Staging


@dataclass(slots=True)
class Salvaged:
    """`unreadable`: what was staged and could not be fetched as it was, each with why. `error`: why the staging gave
    nothing more, if it did not answer."""

    segments: int = 0
    nbytes: int = 0
    unreadable: list[tuple[str, RecoveryError]] = field(default_factory=list)
    error: RecoveryError | None = None

    def troubles(self) -> list[tuple[str, RecoveryError]]:
        """What was not taken, each with why."""
        return [*self.unreadable, *([("segments", self.error)] if self.error is not None else [])]


def anything(key: str) -> bool:
    return True


def salvage(staging: Staging, store: ObjectStore, prefix: str, wanted: Callable[[str], bool] = anything) -> Salvaged:
    """Store the segments that wait under `prefix`; those that are not `wanted` are dropped. Raises the store's errors.

    A staging that does not answer is no error here: what waits in it is generated again.
    """
    found = Salvaged()
    try:
        keys = [key for key in staging.staged(prefix) if segment_position(key) is not None]
    except StoreUnavailable as error:
        found.error = error
        return found
    done = []
    for key in keys:
        if wanted(key):
            try:
                data = staging.fetch(key)
            except Damaged as error:
                found.unreadable.append((key, error))
                continue
            except StoreUnavailable as error:
                found.error = error
                break
            store.put_new(key, data)
            found.segments += 1
            found.nbytes += len(data)
        done.append(key)
    try:
        if done:
            staging.drop(done)
    except StoreUnavailable as error:
        found.error = error
    return found
