"""What engines and their coordinator say to each other, and how it goes wrong.

Owns: the values that travel between them. Coordinates and counts alone: no token is in any of them.
Does not know: Ray, how anything is sent.

Invariants:
1. What a coordinator asks carries its epoch; what a worker answers, or claims, is bound to the epoch that it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from recovery.calls import Stored
from recovery.ledger import Ledger
from recovery.model import CallId

WorkerId = str
"""One incarnation of one worker, such as `w1-3fa9c2d1`: also the beginning of the names of its segments' writers."""

Ask = Callable[..., "Future[Any]"]
"""How a coordinator asks one worker: `ask(step, epoch, *arguments)`. The future raises what the worker did, or Gone."""


class Gone(Exception):
    """Whoever was asked has no process any more, or has another one by now. The text is Ray's, of several lines.

    `low_on_memory`: Ray ended it, since its machine ran low on memory.
    """

    def __init__(self, text: str, *, low_on_memory: bool = False) -> None:
        super().__init__(text)
        self.low_on_memory = low_on_memory

    @property
    def why(self) -> str:
        """In few words, for a log."""
        return "Ray ended it, since its machine ran low on memory" if self.low_on_memory else "its process is gone"


class NotAMember(Exception):
    """The coordinator does not know this worker (any more): join again."""


@dataclass(frozen=True, slots=True)
class Joining:
    """`calls`: those that live in the worker, by their attempt. `must`, `recorded`: what its engine is
    (fingerprint.py); `grade`: how exactly its self-test saw it resume."""

    worker: WorkerId
    calls: Mapping[CallId, int]
    must: Mapping[str, Any]
    recorded: Mapping[str, Any]
    grade: str


@dataclass(frozen=True, slots=True)
class Joined:
    """`stored`: what the ledger has of the worker's calls, which hand over the rest again. `superseded`: those of them
    that another worker carries on by now."""

    epoch: int
    stored: Stored
    superseded: frozenset[CallId]


@dataclass(frozen=True, slots=True)
class Claimed:
    """Who claims a call begins it at `attempt` (`part` is None), or carries it on: `part` has its coordinates."""

    attempt: int
    part: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """What a worker had captured since its start, and how long its loop stood still for the cut."""

    n_captured: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """What became of a worker's calls when it was found gone: how many were open, and how many tokens of them are
    stored. `n_waiting`: segments that waited in a staging and are in the store now; `error`: why there may be more."""

    n_calls: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    n_waiting: int = 0
    error: str = ""


@dataclass(slots=True)
class Figures:
    """What a coordinator has counted, for the one who runs the job. `waits`: for `go_on`; `passed_over`: what it has to
    say of the snapshots that it could not begin with."""

    epoch: int
    snapshots: int = 0
    snapshots_abandoned: int = 0
    last_snapshot: int | None = None
    last_error: str = ""
    rejected: dict[str, int] = field(default_factory=dict)
    workers: tuple[WorkerId, ...] = ()
    waits: bool = False
    passed_over: tuple[str, ...] = ()


class Superseded(Exception):
    """The call is another worker's by now."""


class Refused(Exception):
    """The engine does not take this request; nothing else is wrong."""
