"""What waits to be saved, told to the operator: at once, then ever more rarely, and when it is over.

Owns: when a line is said, and its words: what waits, why, what goes on meanwhile, what to do.
Does not know: what fails (vllm_hooks.trouble, row_writer.py), clocks, terminals.

Invariants:
1. While nothing changes, the pauses between two lines of one kind double from FIRST_PAUSE_S to LONGEST_PAUSE_S.
2. Another kind of error is said at once: what to do about it is another thing.
3. What was said to wait is said to be over, once it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recovery.errors import RecoveryError
from vllm_hooks.trouble import Kind, Trouble

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0

_FAILS: dict[Kind, str] = {
    "tokens": "captured tokens cannot be stored",
    "staging": "captured tokens cannot wait in the queue",
    "snapshots": "no snapshot can be published",
    "garbage": "garbage in the store cannot be deleted",
    "compaction": "old segments cannot be joined",
    "rows": "finished rows cannot be appended",
}
_OVER: dict[Kind, str] = {
    "tokens": "captured tokens are stored again",
    "staging": "captured tokens wait in the queue again",
    "snapshots": "snapshots are published again",
    "garbage": "garbage is deleted again",
    "compaction": "old segments are joined again",
    "rows": "the finished rows were appended",
}


@dataclass(slots=True)
class _Standing:
    """A trouble that was told."""

    since: float
    next_at: float
    pause_s: float
    error: type[RecoveryError]
    tries: int


class Notices:
    """Given what stands in the way now, the lines to say now."""

    def __init__(self) -> None:
        self._standing: dict[Kind, _Standing] = {}

    def lines(self, now: float, troubles: Iterable[Trouble]) -> list[str]:
        present = {trouble.kind: trouble for trouble in troubles}
        said = [line for trouble in present.values() if (line := self._told(now, trouble))]
        for kind in [kind for kind in self._standing if kind not in present]:
            over = self._standing.pop(kind)
            said.append(f"{_OVER[kind]}, after {now - over.since:.0f} s and {_tries(over.tries)}; nothing was lost")
        return said

    def _told(self, now: float, trouble: Trouble) -> str:
        standing = self._standing.get(trouble.kind)
        if standing is None or standing.error is not type(trouble.error):
            since = now if standing is None else standing.since
            standing = _Standing(since, now, FIRST_PAUSE_S, type(trouble.error), 0)
            self._standing[trouble.kind] = standing
        standing.tries = max(standing.tries, trouble.tries)
        if now < standing.next_at:
            return ""
        standing.next_at = now + standing.pause_s
        standing.pause_s = min(LONGEST_PAUSE_S, 2 * standing.pause_s)
        return notice(trouble, now - standing.since)


def notice(trouble: Trouble, age_s: float) -> str:
    """One line: what fails and for how long, why, what waits and what goes on, what to do."""
    lasting = f" (for {age_s:.0f} s, {_tries(trouble.tries)})" if age_s >= 1 else ""
    todo = f" -> {trouble.error.hint}" if trouble.error.hint else ""
    return f"{_FAILS[trouble.kind]}{lasting}: {trouble.error.message}. {_meanwhile(trouble)}{todo}"


def _meanwhile(trouble: Trouble) -> str:
    n, stands = trouble.waiting, trouble.stands
    match trouble.kind:
        case "tokens":
            what = f"{n} record{'s wait' if n != 1 else ' waits'} in memory, and the rows of calls that end now"
            return f"{what}; decoding goes on; tried again every second"
        case "staging":
            return "They go to the store; tried again after the next snapshot"
        case "rows":
            what = f"{n} finished row{'s wait' if n != 1 else ' waits'} in memory"
            return f"{what}; decoding goes on until too many wait; tried again every few seconds"
        case "snapshots":
            keeps = f"snapshot {stands} stands" if stands is not None else "the one of the restore stands"
            return f"{keeps}; decoding goes on; tried again with the next one"
        case "garbage":
            return "Nothing depends on it but room; tried again after the next snapshot"
        case "compaction":
            return "Nothing depends on it but the number of objects; tried again some snapshots later"


def _tries(n: int) -> str:
    return f"{n} failed tr{'ies' if n != 1 else 'y'}"
