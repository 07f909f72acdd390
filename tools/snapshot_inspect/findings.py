"""What can be wrong with an object, and whom it hurts.

Owns: the shape of a problem while it is looked for, and of a finding as it is told.
Does not know: how problems are found, how findings are shown.

Invariants:
1. A problem is about exactly one object and names it by its key.
2. Problems that differ only in the snapshot that they were found for are one finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from recovery.errors import DigestMismatch, FormatNotUnderstood, ObjectMissing, RecoveryError

MISSING, MISMATCH, MALFORMED, INCONSISTENT, NOT_UNDERSTOOD = (
    "missing",
    "mismatch",
    "malformed",
    "inconsistent",
    "not_understood",
)
"""Not there; other bytes than were written; bytes that mean nothing; two objects that contradict; a newer format."""


@dataclass(frozen=True, slots=True, order=True)
class Affected:
    """Tokens [start, stop) of a call, or its request (both None)."""

    rollout: str
    call_id: str
    start: int | None
    stop: int | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one object."""

    object: str
    kind: str
    message: str
    hint: str = ""
    affected: tuple[Affected, ...] = ()

    @classmethod
    def of(cls, object_key: str, error: RecoveryError, affected: Iterable[Affected] = ()) -> Problem:
        message = error.message if object_key in error.message else f"{object_key}: {error.message}"
        hint = "" if "snapshot-inspect verify" in error.hint else error.hint  # this is what it says
        return cls(object_key, kind_of(error), message, hint, tuple(affected))


@dataclass(slots=True)
class Finding:
    """A problem with the snapshots that need its object, oldest first."""

    problem: Problem
    snapshots: list[int] = field(default_factory=list)


def kind_of(error: RecoveryError) -> str:
    match error:
        case ObjectMissing():
            return MISSING
        case DigestMismatch():
            return MISMATCH
        case FormatNotUnderstood():
            return NOT_UNDERSTOOD
        case _:
            return MALFORMED


def merge(found: Iterable[tuple[Problem, int | None]]) -> list[Finding]:
    """Findings in the order of their objects (invariant 2)."""
    findings: dict[Problem, Finding] = {}
    for problem, snapshot in found:
        finding = findings.setdefault(problem, Finding(problem))
        if snapshot is not None and snapshot not in finding.snapshots:
            finding.snapshots.append(snapshot)
    for finding in findings.values():
        finding.snapshots.sort()
    return sorted(findings.values(), key=lambda item: (item.problem.object, item.problem.message))


def joined(ranges: Iterable[Affected]) -> tuple[Affected, ...]:
    """The same, with ranges of a call that touch made one."""
    result: list[Affected] = []
    for item in sorted(set(ranges), key=lambda a: (a.rollout, a.call_id, -1 if a.start is None else a.start)):
        last = result[-1] if result else None
        if last is not None and last.call_id == item.call_id and last.stop is not None and last.stop == item.start:
            result[-1] = Affected(item.rollout, item.call_id, last.start, item.stop)
        else:
            result.append(item)
    return tuple(result)
