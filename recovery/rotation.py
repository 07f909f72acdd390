"""In which order things are said again, so that a bounded number of ledger objects says everything.

Owns: which object said each thing last, and what is due to be said again with the next one.
Does not know: what the things are (ledger_writer.py), objects.

Invariants:
1. Things are said again oldest first, with each object about 1/ROTATION of them by size. Something large is due when
   the shares of several objects add up to it, not before (but for rule 2): what an object says again stays near its
   share.
2. After an object was written nothing was last said more than MAX_DEPTH objects before it.
3. Only `said` changes anything, but for forgetting what is gone: an object that was never published counts for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

ROTATION, MAX_DEPTH = 64, 128
MIN_SHARE = 32
"""What is smaller than this together is said with every object."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Due(Generic[K]):
    """What to say again; `credit`: what is left of the share, for the next object."""

    things: tuple[K, ...]
    credit: int


class Rotation(Generic[K]):
    """Things by the object that said them last. `size` gives the size of one; 0: it is gone."""

    def __init__(self, size: Callable[[K], int]) -> None:
        self._size = size
        self._said: OrderedDict[K, int] = OrderedDict()
        self._credit = 0

    def __contains__(self, thing: K) -> bool:
        return thing in self._said

    def due(self, total: int, ordinal: int) -> Due[K]:
        """What object `ordinal` has to say again, when all things together have the size `total`."""
        share = min(total, self._credit + max(MIN_SHARE, -(-total // ROTATION)))
        due: list[K] = []
        gone: list[K] = []
        for thing, last in self._said.items():
            size = self._size(thing)
            if size > share and last > ordinal - MAX_DEPTH:
                break
            (due if size else gone).append(thing)
            share = max(0, share - size)
        for thing in gone:
            del self._said[thing]
        return Due(tuple(due), share)

    def oldest(self, but: Container[K]) -> int | None:
        """The first object that is needed for what is there, other than `but`."""
        found = (last for thing, last in self._said.items() if thing not in but and self._size(thing))
        return next(found, None)

    def said(self, things: Iterable[K], ordinal: int, credit: int = 0) -> None:
        """Object `ordinal` says these, and is published."""
        for thing in things:
            self._said[thing] = ordinal
            self._said.move_to_end(thing)
        self._credit = credit
