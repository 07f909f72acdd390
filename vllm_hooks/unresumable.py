"""Requests that cannot be resumed exactly: refused, or accepted with one warning per kind. Named, never silent.

Owns: the policy `unresumable`, what configuration adds to what may be resumed, and the counts of what was let through.
Does not know: which requests those are (recovery.resume_table, surface.py).

Invariants:
1. With `refuse` no such request reaches the engine; with `restart` every one is counted by the name of its field.
2. One warning per kind, however many requests there are.
"""

from __future__ import annotations

import dataclasses
import warnings

from recovery import resume_table
from recovery.config import CheckpointingConfig
from recovery.errors import InputError
from recovery.model import Request
from recovery.resume import StopRules


class Unresumable:
    """`uncaptured` and `restart_only` count requests by field name."""

    def __init__(self, config: CheckpointingConfig) -> None:
        self._policy = config.unresumable
        self._draws = config.draws
        self._whole_calls = config.gym.mode == "turn"
        self.uncaptured: dict[str, int] = {}
        self.restart_only: dict[str, int] = {}

    def rules(self, stop: StopRules) -> StopRules:
        """What may be resumed on an engine with these rules, as configured."""
        unused = resume_table.GENERATOR_DRAWS if self._draws == "position" else resume_table.POSITION_DRAWS
        added = {resume_table.REDRAW} if self._policy == "redraw" else set()
        abilities = stop.abilities - {unused} | added
        return dataclasses.replace(stop, abilities=abilities, whole_calls=self._whole_calls)

    def pass_through(self, request_id: str, kind: str) -> None:
        """A request of which nothing can be stored in this version. Raises InputError if it is refused."""
        self._note(request_id, kind, self.uncaptured, "is not captured")

    def admit(self, request: Request) -> None:
        """A request about to be captured. Raises InputError if it is restart-only and refused."""
        if request.restart_only:
            self._note(request.rollout, request.restart_only, self.restart_only, "starts again after a crash")

    def _note(self, request_id: str, kind: str, counts: dict[str, int], what: str) -> None:
        if self._policy == "refuse":
            raise InputError(
                f"request {request_id!r} is refused because of {kind}: {resume_table.why(kind)}",
                hint=f"{resume_table.row(kind).do or 'leave the field out'}, or set unresumable: restart",
            )
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] == 1:
            warnings.warn(f"a request with {kind} {what}: {resume_table.why(kind)}", stacklevel=3)
