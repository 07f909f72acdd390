"""C1 for real: a process whose store is slow is killed with SIGKILL at every moment of a publication.

The case has 1 s per object and a kill at every 50 ms; here it is a fiftieth of the one and a seventh of the other, so
that kills still fall between any two writes and into the middle of each. test_kill_points.py has every store call,
without a process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery.ports import ObjectStore
from storage_backends.local import LocalStore
from storage_backends.testing.faults import Wrapped
from tests.fake_engine import Life, Prompt, reference_answers

PER_OBJECT_S, EVERY_S = 0.02, 0.007
PROMPTS = (Prompt("p0", (12, 7), 900), Prompt("p1", (5, 10), 900), Prompt("p2", (9, 9), 3))
"""The first two go on for hundreds of tokens."""


class Slow(Wrapped):
    """Half of an object's time passes before it is there, half after it."""

    slow = False

    def _call(self, verb: Any, key: str, apply: Callable[[], Any]) -> Any:
        pause_s = PER_OBJECT_S / 2 if self.slow and verb in ("put_new", "put", "delete") else 0
        time.sleep(pause_s)
        result = apply()
        time.sleep(pause_s)
        return result


def publish(store: ObjectStore, number: int, begun: int, done: int) -> None:
    """In a process of its own: restore, work, and take a snapshot on a store that has become slow."""
    slow = Slow(store)
    life = Life(slow, number, prompts=PROMPTS, keep_latest_k=1)
    life.dispatch()
    life.decode(2)
    slow.slow = True
    os.write(begun, b"x")
    life.snapshot()
    os.write(done, b"x")


def killed_after(root: Path, number: int, after_s: float) -> bool:
    """Start a process that publishes, kill it so long after it began. Whether it was done before that."""
    (begun_r, begun_w), (done_r, done_w) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            publish(LocalStore(root), number, begun_w, done_w)
        finally:
            os._exit(1)
    os.close(begun_w), os.close(done_w)
    try:
        assert os.read(begun_r, 1) == b"x", "the process did not come to its publication"
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return os.read(done_r, 1) == b"x"
    finally:
        os.close(begun_r), os.close(done_r)


def test_c1_a_loadable_snapshot_exists_at_each_moment_of_a_slow_publication(tmp_path: Path) -> None:
    """C1: kills at growing times into the publication, until it is done before the kill; then a few more."""
    before = Life(LocalStore(tmp_path), 1, prompts=PROMPTS, keep_latest_k=1)
    newest, tokens = before.restored.published, 0
    n_done = number = 0
    while n_done < 3:
        number += 1
        done = killed_after(tmp_path, 2 * number, EVERY_S * number)
        n_done += done
        again = Life(LocalStore(tmp_path), 2 * number + 1, prompts=PROMPTS, keep_latest_k=1)
        assert again.restored.passed_over == [], "each snapshot that is there can be loaded"
        assert again.restored.snapshot is not None and newest is not None and again.restored.snapshot > newest
        kept = sum(entry.n_tokens for entry in again.publication.ledger)
        assert kept >= tokens, "nothing that was published is lost"
        assert kept > tokens or not done, "what was acknowledged is there"
        newest, tokens = again.restored.published, kept
    print(f"{number} kills in the first {1000 * EVERY_S * number:.0f} ms of a publication")
    assert number > 10
    last = Life(LocalStore(tmp_path), 10**6, prompts=PROMPTS[2:], keep_latest_k=1)
    assert last.run_to_end()["p2"] == reference_answers(PROMPTS[2:])["p2"]
