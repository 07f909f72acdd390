"""C1 for real: a process whose store is slow is killed with SIGKILL at every moment of a publication.

The case has 1 s per object and a kill at every 50 ms; here a store asks before and after each write whether it may go
on, and the kill comes while it waits for that or, every other time, just when it may: between any two writes and into
the middle of each, however busy the machine is. test_kill_points.py has every store call, without a process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery.ports import ObjectStore
from storage_backends.local import LocalStore
from storage_backends.testing.faults import Wrapped
from tests.fake_engine import Life, Prompt, reference_answers

PROMPTS = (Prompt("p0", (12, 7), 900), Prompt("p1", (5, 10), 900), Prompt("p2", (9, 9), 3))
"""The first two go on for hundreds of tokens."""


class Slow(Wrapped):
    """Asks through `ask`, before and after each write, and waits for an answer from `may`."""

    asks = False

    def __init__(self, inner: ObjectStore, ask: int, may: int) -> None:
        super().__init__(inner)
        self._ask, self._may = ask, may

    def _call(self, verb: Any, key: str, apply: Callable[[], Any]) -> Any:
        slow = self.asks and verb in ("put_new", "put", "delete")
        self._wait(slow)
        result = apply()
        self._wait(slow)
        return result

    def _wait(self, slow: bool) -> None:
        if slow:
            os.write(self._ask, b"?")
            os.read(self._may, 1)


def publish(store: ObjectStore, number: int, ask: int, may: int) -> None:
    """In a process of its own: restore, work, and take a snapshot on a store that has become slow."""
    slow = Slow(store, ask, may)
    life = Life(slow, number, prompts=PROMPTS, keep_latest_k=1)
    life.dispatch()
    life.decode(2)
    slow.asks = True
    life.snapshot()
    os.write(ask, b".")


def killed_at(root: Path, number: int, at: int) -> bool:
    """Start a process that publishes, kill it where it asks for the `at`-th time. Whether it was done before that."""
    (said, ask), (may, answer) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            publish(LocalStore(root), number, ask, may)
        finally:
            os._exit(1)
    os.close(ask), os.close(may)
    with os.fdopen(said, "rb", buffering=0) as asked, os.fdopen(answer, "wb", buffering=0) as answers:
        for n in range(1, at + 1):
            seen = asked.read(1)
            assert seen, "the process did not come so far"
            if seen == b".":
                break
            if n < at or at % 2:
                answers.write(b"!")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return (seen + asked.read()).endswith(b".")


def test_c1_a_loadable_snapshot_exists_at_each_moment_of_a_slow_publication(tmp_path: Path) -> None:
    """C1: kills at each moment of a publication in turn, until it is done before the kill; then a few more."""
    before = Life(LocalStore(tmp_path), 1, prompts=PROMPTS, keep_latest_k=1)
    newest, tokens = before.restored.published, 0
    n_done = number = 0
    while n_done < 3:
        number += 1
        done = killed_at(tmp_path, 2 * number, number)
        n_done += done
        again = Life(LocalStore(tmp_path), 2 * number + 1, prompts=PROMPTS, keep_latest_k=1)
        assert again.restored.passed_over == [], "each snapshot that is there can be loaded"
        assert again.restored.snapshot is not None and newest is not None and again.restored.snapshot > newest
        kept = sum(entry.n_tokens for entry in again.publication.ledger)
        assert kept >= tokens, "nothing that was published is lost"
        assert kept > tokens or not done, "what was acknowledged is there"
        newest, tokens = again.restored.published, kept
    assert number > 8, "the least there is to write: a segment, a ledger, a slot, a hint"
    last = Life(LocalStore(tmp_path), 10**6, prompts=PROMPTS[2:], keep_latest_k=1)
    assert last.run_to_end()["p2"] == reference_answers(PROMPTS[2:])["p2"]
