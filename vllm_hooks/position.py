"""Where in a trajectory a request stands.

Owns: what that adds to a request.
Does not know: the engine, who counts turns (trajectory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from recovery.calls import LiveCall
from recovery.lineage import NO_PARENT, Lineage
from recovery.model import CallId, Request
from recovery.trajectories import Place


@dataclass(slots=True)
class Position:
    """Model call `place.model_call` of turn `place.turn` of `rollout`, made after the answer of `parent`.

    `call`: what it became, once it was admitted; None before, and for a prompt that cannot be captured.
    """

    rollout: str
    place: Place
    parent: CallId = NO_PARENT
    call: LiveCall | None = None

    def request(self, request: Request) -> Request:
        """The same request, at this position."""
        extra = {**request.extra, **Lineage(self.place.model_call, self.parent).as_extra()}
        return replace(request, rollout=self.rollout, turn=self.place.turn, extra=extra)
