"""Which model call of which turn a call is, and whose answer led to it.

Owns: the value, and where a request carries it.
Does not know: policy lineages (those are of weights), tools, who counts turns.

Invariants:
1. The lineage is part of a request's digest, and so of the call's id: the same prompt in another place of the
   trajectory, or after another answer, is another call.
2. A request without one is the first model call of its turn, with no parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recovery.model import CallId

LINEAGE = "lineage"
"""Key of a request's `extra`."""

NO_PARENT = CallId(bytes(16))
CALLS_PER_TURN_MAX = 1 << 32


@dataclass(frozen=True, slots=True)
class Lineage:
    """`parent` is NO_PARENT for the first call of a rollout."""

    model_call: int = 0
    parent: CallId = NO_PARENT

    def __post_init__(self) -> None:
        if not 0 <= self.model_call < CALLS_PER_TURN_MAX or len(self.parent) != 16:
            raise ValueError(f"a lineage needs a number below {CALLS_PER_TURN_MAX} and a call id, not {self!r}")

    def as_extra(self) -> dict[str, Any]:
        """For the `extra` of a request: nothing where there is nothing to say."""
        if self == Lineage():
            return {}
        return {LINEAGE: {"call": self.model_call, "parent": None if self.parent == NO_PARENT else self.parent.hex()}}


def lineage_of(extra: Mapping[str, Any]) -> Lineage:
    """What the `extra` of a request says; what is none of ours says nothing."""
    match extra.get(LINEAGE):
        case {"call": int(number), "parent": None} if 0 <= number < CALLS_PER_TURN_MAX:
            return Lineage(number)
        case {"call": int(number), "parent": str(text)} if 0 <= number < CALLS_PER_TURN_MAX and len(text) == 32:
            try:
                return Lineage(number, CallId(bytes.fromhex(text)))
            except ValueError:
                return Lineage()
    return Lineage()
