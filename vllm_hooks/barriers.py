"""What new and finished requests of one session may have to wait for. Runs on the event loop.

Owns: the admission gate and the fence, as events that coroutines wait for.
Does not know: who holds them, and for what.

Invariants:
1. A request that waits for the gate looks again after every wake-up: a hold acquired meanwhile is seen (A16).
2. While the fence is up terminal results wait; nothing else does.
3. `open_all` lets everybody through for good, to see why the session ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from recovery.admission.holds import AdmissionGate, Hold, HoldKind


class Barriers:
    """Open until `hold` or `raise_fence`."""

    def __init__(self) -> None:
        self.gate = AdmissionGate()
        self._gate_open = asyncio.Event()
        self._fence_down = asyncio.Event()
        self._gate_open.set()
        self._fence_down.set()

    @property
    def open(self) -> bool:
        return self.gate.open and self._gate_open.is_set() and self._fence_down.is_set()

    def hold(self, kind: HoldKind, owner: str, reason: str, utc: float) -> Hold:
        """Close admission for one more owner."""
        hold = self.gate.acquire(kind, owner, reason, utc)
        self._gate_open.clear()
        return hold

    def release(self, hold: Hold) -> None:
        """Give one claim back; admission reopens with the last one."""
        self.gate.release(hold)
        if self.gate.open:
            self._gate_open.set()

    def raise_fence(self) -> None:
        self._fence_down.clear()

    def lower_fence(self) -> None:
        self._fence_down.set()

    def open_all(self) -> None:
        """The session has failed or was stopped."""
        self._gate_open.set()
        self._fence_down.set()

    async def pass_gate(self, check: Callable[[], None]) -> None:
        """Wait until admission is open. `check` raises if there is no point in waiting."""
        while not self.gate.open:
            check()
            await self._gate_open.wait()
        check()

    async def pass_fence(self) -> None:
        await self._fence_down.wait()
