"""Time for tests of what waits: it passes only by waiting, and nobody waits for it.

Owns: the clock, and what was waited.
Does not know: who waits, and for what.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from storage_backends.s3_retry import Pace


@dataclass
class Waits:
    """`pauses`: every wait, in order. Chance is always one half."""

    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    @property
    def pace(self) -> Pace:
        return Pace(sleep=self.sleep, monotonic=lambda: self.now, chance=lambda: 0.5)
