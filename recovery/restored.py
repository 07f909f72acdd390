"""What a restore brings back.

Owns: the open calls with their plans, and what is said of a restore as a whole.
Does not know: the store, how a snapshot is chosen (restore.py), how a plan is made (resume.py).

Invariants:
1. A plan is made for each open call, of a request and tokens that were read and checked; a call that cannot be planned
   is found here and not when somebody asks for it.
2. What a call holds of its tokens does not change when the ledger goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from recovery import resume
from recovery.errors import RecoveryError
from recovery.gathering import Transcripts
from recovery.ledger import Entry
from recovery.resume import Plans, ResumePlan, StopRules
from recovery.transcripts import Transcript

_GOES_ON = (
    "WARNING: what was passed over is not used, and what it had is generated again -> snapshot-inspect verify "
    "--read-data STORE says more; with `restore: strict` a start that would pass something over stops instead"
)


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A snapshot or segment that could not be used, and why."""

    what: str
    reason: str


class PassedOverWarning(UserWarning):
    """A process goes on without something that was stored: a newer snapshot, a later segment."""


class RestoredCall(NamedTuple):
    """An open call brought back: `n_tokens` so far, and what to do with it. All its tokens are in memory."""

    entry: Entry
    n_tokens: int
    plan: ResumePlan
    transcripts: Transcripts

    @property
    def transcript(self) -> Transcript:
        """Put together anew each time."""
        return self.transcripts[self.entry.call_id]


@dataclass(slots=True)
class Restored:
    """What a restore found. `snapshot`: the id it started from; `published`: the id of the snapshot it published.

    `uncollected`: why garbage was left for later, if it was; nothing else depends on it.
    """

    snapshot: int | None
    published: int | None
    passed_over: list[PassedOver]
    adopted_segments: int
    adopted_tokens: int
    rejected: dict[str, int]
    calls: list[RestoredCall]
    states: Mapping[str, bytes]
    uncollected: RecoveryError | None = None

    def passed_over_lines(self) -> list[str]:
        """For whoever runs the job: what was passed over, each with its reason, and what to do. Empty: nothing was."""
        told = [f"passed over {item.what}: {item.reason}" for item in self.passed_over]
        return [*told, _GOES_ON] if told else []

    @property
    def tokens_reused(self) -> int:
        """Tokens of open calls that need not be generated again."""
        return sum(call.n_tokens for call in self.calls if not isinstance(call.plan, resume.Restart))

    @property
    def tokens_thrown_away(self) -> int:
        """Tokens of open calls that were saved and have to be generated again."""
        return sum(call.n_tokens for call in self.calls if isinstance(call.plan, resume.Restart))


@contextmanager
def without_collections() -> Iterator[None]:
    """What is read makes some objects for each call and lets go of none: to look for cycles meanwhile finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@without_collections()
def planned(transcripts: Transcripts, stop: StopRules) -> list[RestoredCall]:
    """What becomes of each of these calls; the ledger does not know of it yet."""
    plan = Plans(stop).plan
    return [
        RestoredCall(entry, n_tokens, plan(request, n_tokens, last), transcripts)
        for entry, request, n_tokens, last in transcripts.ends()
    ]
