"""What cannot be saved at the moment.

Owns: the value, and reading it off what a stager and a coordinator have counted.
Does not know: when it is told and in which words (prefix_recovery.waiting).

Invariant:
1. A trouble stands until the same thing succeeds, and then it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from recovery.compactor import CompactionCounters
from recovery.coordinator import Attempt
from recovery.errors import RecoveryError
from recovery.protocol import Verdict
from recovery.staging import StagingCounters

Kind = Literal["tokens", "staging", "snapshots", "garbage", "compaction", "rows"]
"""Captured tokens, snapshots, deletions and old segments in the store; tokens in a staging; rows in an output."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """`tries`: failures in a row; `waiting`: how many records or rows wait in memory; `stands`: the latest snapshot."""

    kind: Kind
    tries: int
    error: RecoveryError
    waiting: int = 0
    stands: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} cannot be stored ({self.tries} tries): {self.error}"


@dataclass(slots=True)
class RecentAttempts:
    """How many snapshots in a row were abandoned, or left garbage, and why the last of them."""

    abandoned: int = 0
    error: RecoveryError | None = None
    uncollected: int = 0
    garbage_error: RecoveryError | None = None
    stands: int | None = None

    def note(self, attempt: Attempt) -> None:
        if attempt.verdict is not Verdict.PUBLISHED:
            self.abandoned, self.error = self.abandoned + 1, attempt.error
            return
        self.abandoned, self.error, self.stands = 0, None, attempt.snapshot
        self.uncollected = 0 if attempt.error is None else self.uncollected + 1
        self.garbage_error = attempt.error


def troubles_of(
    staging: StagingCounters, attempts: RecentAttempts, compaction: CompactionCounters
) -> Iterator[Trouble]:
    if staging.error is not None:
        yield Trouble("tokens", staging.failures_in_a_row, staging.error, staging.backlog_records)
    if staging.staging_error is not None:
        yield Trouble("staging", staging.staging_failures, staging.staging_error)
    if attempts.error is not None:
        yield Trouble("snapshots", attempts.abandoned, attempts.error, stands=attempts.stands)
    if attempts.garbage_error is not None:
        yield Trouble("garbage", attempts.uncollected, attempts.garbage_error, stands=attempts.stands)
    if compaction.error is not None:
        yield Trouble("compaction", compaction.failures_in_a_row, compaction.error, stands=attempts.stands)
