"""The coordinator's thread: when a snapshot is taken, and that only one is.

Owns: the interval, requests for a snapshot, the last one at the end.
Does not know: what a snapshot is (recovery.coordinator), the event loop.

Invariants:
1. Only this thread calls `Coordinator.take` and `look`.
2. After Fenced, or once `may_take` says no, none is taken any more.
3. An interval in which nothing was captured and no participant has news leaves no snapshot: log entries are for ever.
   It looks whether somebody else has taken the store, so that who is fenced knows it after an interval, idle or not.
4. A program error in a snapshot is handed to `on_error` and ends the thread; it is never swallowed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from recovery.coordinator import Attempt, Coordinator
from recovery.protocol import Verdict

JOIN_SLACK_S = 5.0
"""Beyond a snapshot's own deadline: the undo steps of an abandoned one."""


class SnapshotLoop:
    """Takes a snapshot every `interval_s` seconds and whenever one is asked for."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        interval_s: float,
        may_take: Callable[[], bool],
        has_news: Callable[[], bool],
        on_attempt: Callable[[Attempt], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._coordinator = coordinator
        self._interval_s = interval_s
        self._may_take = may_take
        self._has_news = has_news
        self._on_attempt = on_attempt
        self._on_error = on_error
        self._wake = threading.Condition()
        self._wanted: str | None = None
        self._stopping = self._last_wanted = False
        self._last_timeout_s: float | None = None
        self._last: Attempt | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self, cause: str) -> None:
        """Ask for a snapshot soon; returns at once."""
        with self._wake:
            self._wanted = cause
            self._wake.notify_all()

    def finish(self, *, last: bool, timeout_s: float | None, wait_s: float) -> Attempt | None:
        """Stop; take a last snapshot first if wanted and possible. Blocks at most `wait_s` plus slack.

        Returns the last attempt, None if none was made.
        """
        with self._wake:
            self._stopping, self._last_wanted, self._last_timeout_s = True, last, timeout_s
            self._wake.notify_all()
        self._thread.join(wait_s + JOIN_SLACK_S)
        return self._last

    @property
    def rejected(self) -> Mapping[str, int]:
        """Records that were stored and did not fit the ledger, by reason."""
        return self._coordinator.rejected

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while True:
                cause = self._wait()
                if not self._may_take():
                    return
                if cause is None:
                    if self._last_wanted:
                        self._last = self._take("final", self._last_timeout_s)
                    return
                if cause == "interval" and not self._has_news():
                    attempt = self._coordinator.look()
                    if attempt is None:
                        continue
                    self._on_attempt(attempt)
                else:
                    attempt = self._take(cause)
                if attempt.verdict is Verdict.FENCED:
                    return
        except Exception as error:
            self._on_error(error)
            raise

    def _wait(self) -> str | None:
        """The cause of the next snapshot, None when it is time to stop."""
        with self._wake:
            if self._wanted is None and not self._stopping:
                self._wake.wait(self._interval_s)
            cause, self._wanted = self._wanted or "interval", None
            return None if self._stopping else cause

    def _take(self, cause: str, timeout_s: float | None = None) -> Attempt:
        attempt = self._coordinator.take(cause, timeout_s)
        self._on_attempt(attempt)
        return attempt
