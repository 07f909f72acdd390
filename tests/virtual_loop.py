"""An event loop of virtual time: when nobody is ready it jumps to the next timer; a wait for nothing is an error.

Owns: time and the detection of a deadlock.
Does not know: threads (nothing in it may wait for one).
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class Stuck(AssertionError):
    """Everybody waits and no timer will ever wake them."""


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everybody waits, and nobody will wake them")
        self.loop.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(main: Any) -> Any:
    """Run a coroutine on a loop of its own; nothing may be left running behind it."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        result = loop.run_until_complete(main)
        left = [task for task in asyncio.all_tasks(loop) if not task.done()]
        assert not left, f"left running: {left}"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        asyncio.set_event_loop(None)
        loop.close()
