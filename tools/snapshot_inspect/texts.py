"""Numbers, times and names as people read them.

Owns: every rule by which a value becomes one line of text.
Does not know: tables, documents.

Invariants:
1. A text is one line and holds nothing that a terminal acts upon, whatever a store's names hold.
2. Times are UTC. A time that cannot be one is `unknown`.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEPS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def printable(text: str) -> str:
    """`text` with control characters, line ends, lone surrogates and the like written as escapes."""
    return "".join(_escaped(c) if unicodedata.category(c) in _UNPRINTABLE else c for c in text)


def printable_lines(text: str) -> str:
    """The same of each line of `text`."""
    return "\n".join(map(printable, text.split("\n")))


def filled(hint: str, word: str, stands_for: str) -> str:
    """A hint with what `word` stands for in this command, quoted for a shell; AWS_PROFILE names no FILE."""
    return re.sub(rf"\b{word}\b", lambda _: shlex.quote(stands_for), hint)


def error_text(message: str, hint: str) -> str:
    """What is said of an error on stderr. Further lines are set in, so that what is quoted begins no line of ours."""
    first, *rest = [line for line in message.split("\n") if line.strip()] or [""]
    return "\n".join(
        [f"error: {printable(first)}", *(f"  {printable(line)}" for line in [*rest, *hint.split("\n")] if line)]
    )


_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode()


def nbytes_text(nbytes: float) -> str:
    """Decimal units, three digits at most before the unit."""
    value, unit = float(nbytes), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """The two largest units: `4 d 3 h`, `12 s`."""
    left, parts = round(abs(seconds)), []
    for size, unit in _STEPS:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts) or "0 s"


def utc_text(seconds: float) -> str | None:
    """ISO 8601 with milliseconds; None for what is no time of this era."""
    if not math.isfinite(seconds):
        return None
    try:
        at = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_text(utc: str | None, age_s: float | None) -> str:
    """`2026-01-01 00:00:00Z (3 min ago)`."""
    if utc is None or age_s is None:
        return "unknown"
    return f"{utc[:10]} {utc[11:19]}Z ({age_text(age_s)})"


def age_text(age_s: float | None) -> str:
    if age_s is None:
        return "unknown"
    return f"{seconds_text(age_s)} ago" if age_s > -0.5 else f"{seconds_text(age_s)} ahead of this clock"


def origin_text(origin: Mapping[str, Any]) -> str:
    """Where a snapshot was taken."""
    return f"taken as snapshot {origin['snapshot']} of store {origin['store_id'] or 'unknown'}"


def count_text(n: int | None, one: str, many: str = "") -> str:
    """`1 call`, `3 calls`, `? calls`."""
    return f"{'?' if n is None else n} {one if n == 1 else many or one + 's'}"
