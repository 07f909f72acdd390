"""A participant in several parts that move between owners: whose word counts, and when all of it is of one cut.

Owns: the owner of each shard, as an epoch that only grows, and the receipts of the cut under way.
Does not know: who the owners are, how they are asked, what a state means, time.

Invariants:
1. Who takes a shard over gets an epoch above every earlier one of that shard; from then on no older owner's receipt
   counts.
2. A receipt counts for the cut that it names, if that one is under way, and for no other; the first one of an owner
   stands.
3. A shard that changes hands during a cut has lost its receipt: what its new owner has is asked for again.
4. A cut is whole if every shard has a receipt of its present owner. What is merged are these, and nothing older.
5. What is refused is refused with its reason, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the owner `epoch` of `shard` had at `cut`."""

    shard: str
    epoch: int
    cut: int
    state: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A receipt that does not count, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Shards that the cut still needs, with the epoch of the owner to ask."""

    shards: Mapping[str, int]


class Shards:
    """`names` are all there are; none has an owner yet. `epochs`: the highest of each that a restore knows."""

    def __init__(self, names: Iterable[str], epochs: Mapping[str, int] | None = None) -> None:
        known = epochs or {}
        self._epochs = {name: known.get(name, 0) for name in sorted(names)}
        self._owned: set[str] = set()
        self._receipts: dict[str, Receipt] = {}
        self.cut: int | None = None
        """The cut under way."""
        self._newest_cut = 0

    @property
    def epochs(self) -> dict[str, int]:
        """The highest epoch of each shard."""
        return dict(self._epochs)

    def claim(self, shard: str) -> int:
        """Take a shard over. Returns the epoch of the new owner. KeyError for one that there is not."""
        self._epochs[shard] += 1
        self._owned.add(shard)
        self._receipts.pop(shard, None)
        return self._epochs[shard]

    def release(self, shard: str, epoch: int) -> bool:
        """The owner gives it up; False if it is the owner no more."""
        if shard not in self._owned or self._epochs[shard] != epoch:
            return False
        self._owned.discard(shard)
        self._receipts.pop(shard, None)
        return True

    def begin(self) -> int:
        """Begin a cut; one that was under way is over, and its receipts count no more. Returns its number."""
        self._newest_cut += 1
        self.cut, self._receipts = self._newest_cut, {}
        return self.cut

    def receive(self, receipt: Receipt) -> Refused | None:
        """Take a receipt of the cut under way. None if it counts."""
        reason = self._against(receipt)
        if reason:
            return Refused(reason)
        self._receipts[receipt.shard] = receipt
        return None

    def _against(self, receipt: Receipt) -> str:
        epoch = self._epochs.get(receipt.shard)
        if epoch is None:
            return f"there is no shard {receipt.shard!r}"
        if self.cut is None or receipt.cut != self.cut:
            return f"it is of cut {receipt.cut}; {self.cut or 'none'} is under way"
        if receipt.epoch != epoch or receipt.shard not in self._owned:
            return f"it is of owner {receipt.epoch} of shard {receipt.shard!r}; the newest is {epoch}"
        if receipt.shard in self._receipts:
            return f"shard {receipt.shard!r} has one of this cut already"
        return ""

    def missing(self) -> Missing | None:
        """What the cut under way still needs; None if it is whole, or there is none."""
        if self.cut is None:
            return None
        wanted = {name: epoch for name, epoch in self._epochs.items() if name not in self._receipts}
        return Missing(wanted) if wanted else None

    def merge(self) -> dict[str, Receipt] | Missing:
        """End the cut: its receipts, by shard. Missing, and nothing has changed, if it is not whole."""
        missing = self.missing()
        if missing is not None:
            return missing
        merged, self._receipts, self.cut = self._receipts, {}, None
        return {name: merged[name] for name in sorted(merged)}

    def abandon(self) -> dict[str, Receipt]:
        """End the cut without a result. Returns the receipts that counted: their owners still stand still."""
        given, self._receipts, self.cut = self._receipts, {}, None
        return given
