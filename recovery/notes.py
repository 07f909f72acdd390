"""Notes that this program reads back and that no digest vouches for: a lock's, a cached grade, the tail hint.

Owns: the JSON object in a note, and a whole number in that, whatever has become of either.
Does not know: which notes there are, what is done without one.

Invariants:
1. Nothing that a note can hold raises. What is not what it should be is None.
2. A number is one that JSON writes as a whole one, within its bounds: no float, however round, and no truth value.
"""

from __future__ import annotations

import json
import math
from typing import Any


def object_in(note: bytes | str) -> dict[str, Any] | None:
    """The JSON object that a note is."""
    try:
        found = json.loads(note)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def whole(value: Any, low: int, high: float = math.inf) -> int | None:
    """A member of such an object, if it is a number of [low, high]."""
    return value if type(value) is int and low <= value <= high else None
