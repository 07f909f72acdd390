"""A clock that is moved by hand, randomness that can be replayed, and requests, for the tests of the core.

Owns: the doubles of recovery.ports.Clock and Entropy and of a coordinator's thread, and short ways to make
requests and records.
Does not know: stores, engines (fake_engine.py).
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recovery.coordinator import InOneThread
from recovery.model import CallId, Chunk, Ended, Opened, PolicyVersion, Request

V0 = PolicyVersion("a", 0)


class ManualClock:
    """Both times stand still unless moved."""

    def __init__(self, utc: float = 1_700_000_000.0) -> None:
        self.now = 100.0
        self.utc_now = utc

    def monotonic(self) -> float:
        return self.now

    def utc(self) -> float:
        return self.utc_now


class SeededEntropy:
    """The same hex digits for the same seed; no two calls of one object give the same."""

    def __init__(self, seed: object = 0) -> None:
        self._random = random.Random(str(seed))

    def hex(self, nbytes: int) -> str:
        return self._random.randbytes(nbytes).hex()


class UntilItHangs(InOneThread):
    """Gives a step up when it is known to hang, not when a time is over: a step that only is slow has its turn."""

    def __init__(self, hangs: Callable[[], bool]) -> None:
        super().__init__()
        self._hangs = hangs

    def _wait(self, thread: threading.Thread, timeout_s: float) -> None:
        while thread.is_alive() and not self._hangs():
            thread.join(0.005)


def name(rollout: str) -> CallId:
    """16 bytes that stand for a call, where its real id does not matter."""
    return CallId(hashlib.sha256(rollout.encode()).digest()[:16])


def request(rollout: str = "r0", prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Request:
    return Request(rollout=rollout, prompt_token_ids=np.asarray(prompt, dtype=np.int32), **fields)


def opened(rollout: str, attempt: int = 0, **fields: Any) -> Opened:
    return Opened(call_id=name(rollout), attempt=attempt, request=request(rollout, **fields))


def chunk(
    rollout: str, start: int, tokens: Sequence[int], attempt: int = 0, version: PolicyVersion = V0, **fields: Any
) -> Chunk:
    n = len(tokens)
    values = {
        "logprobs": np.asarray([-0.5 * (token % 7) for token in tokens], dtype=np.float32),
        "mask": np.ones(n, dtype=np.bool_),
        **fields,
    }
    return Chunk(
        call_id=name(rollout),
        attempt=attempt,
        start=start,
        token_ids=np.asarray(tokens, dtype=np.int32),
        version=version,
        **values,
    )


def ended(rollout: str, n_tokens: int, attempt: int = 0, reason: str = "length") -> Ended:
    return Ended(call_id=name(rollout), attempt=attempt, n_tokens=n_tokens, finish_reason=reason)
