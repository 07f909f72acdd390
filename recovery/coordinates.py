"""What the ledger needs to know of one stored record: where it lies, and what it is, without its tokens.

Owns: the values that go from who stores a segment to the ledger.
Does not know: how they come about (staging.py), what they do to a call (ledger.py).

Invariants:
1. No token is in them: whoever stores a segment hands on where a record lies, its length, version and digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.model import CallId, ChunkRef, Identity


@dataclass(frozen=True, slots=True)
class OpenedAt:
    """Coordinates of an `Opened` record."""

    call_id: CallId
    attempt: int
    identity: Identity


@dataclass(frozen=True, slots=True)
class ChunkAt:
    """Coordinates of a chunk."""

    call_id: CallId
    attempt: int
    chunk: ChunkRef


@dataclass(frozen=True, slots=True)
class EndedAt:
    """An `Ended` record; it is small enough to be its own coordinates."""

    call_id: CallId
    attempt: int
    n_tokens: int
    finish_reason: str
    stop_reason: int | str | None


Coordinates = OpenedAt | ChunkAt | EndedAt
