"""Rows on their way to the output: one thread appends them, in groups, and outlasts a disk or store that fails.

Owns: the queue of rows, the thread that looks at the log and writes the output, trying again.
Does not know: what a row is, how it is appended, what is said while it waits (waiting.py).

Invariants:
1. A group is appended whole or tried again whole; rows keep their order.
2. What passes (no room, no answer, credentials that ran out) is tried again for as long as the run lives; anything
   else, being fenced above all, ends it.
3. The thread may hang with the store; nobody waits for it longer than asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from recovery.errors import CredentialsRefused, RecoveryError, Retry
from vllm_hooks.trouble import Trouble

T = TypeVar("T")
Row = dict[str, Any]

THREAD = "rows"
"""Name of the thread that may hang with the store; the command line ends the process in spite of it."""

PAUSE_S = 1.0
LONGEST_PAUSE_S = 5.0


class RowWriter:
    """`append` is called in the thread, `appended` on the loop with the number of rows that are in the output now."""

    def __init__(self, append: Callable[[Sequence[Row]], None], appended: Callable[[int], None]) -> None:
        self._append = append
        self._appended = appended
        self._rows: asyncio.Queue[Row | None] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._failing: Trouble | None = None
        self._group: list[Row] = []

    @property
    def trouble(self) -> Trouble | None:
        """Why rows wait, if they do for another reason than that they are many."""
        failing = self._failing
        if failing is None:
            return None
        return Trouble("rows", failing.tries, failing.error, self.n_waiting)

    @property
    def n_waiting(self) -> int:
        """Rows that were put and are not known to be in the output."""
        return len(self._group) + self._rows.qsize()

    def put(self, row: Row) -> None:
        self._rows.put_nowait(row)

    def put_last(self) -> None:
        """No row comes after those that were put."""
        self._rows.put_nowait(None)

    async def run(self) -> None:
        """Append what is put, until `put_last`. Raises what ends the run."""
        ending = False
        while not ending:
            rows = [await self._rows.get()]
            while not self._rows.empty():
                rows.append(self._rows.get_nowait())
            ending = rows[-1] is None
            self._group = [row for row in rows if row is not None]
            if self._group:
                await self._append_group()
                self._appended(len(self._group))
                self._group = []

    async def _append_group(self) -> None:
        pause_s = PAUSE_S
        while True:
            try:
                await self.in_thread(self._append, self._group)
            except (Retry, CredentialsRefused) as error:
                self._failing = self._failed_again(error)
            else:
                self._failing = None
                return
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _failed_again(self, error: RecoveryError) -> Trouble:
        return Trouble("rows", self._failing.tries + 1 if self._failing is not None else 1, error)

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do `work` in the thread of the rows."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        """Take no more work. Does not wait."""
        self._thread.shutdown(wait=False)
