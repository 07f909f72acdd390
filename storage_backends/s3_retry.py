"""Which request is made again, when, and how often.

Owns: the table of what is repeated, the pauses between, and counting both.
Does not know: what a request is, how its failure is told apart (s3_failures.py), what the caller gets (s3.py).

Invariants:
1. A repetition is the same request with the same bytes, signed anew.
2. What passes with time (busy, a conflict, a lost answer) is repeated until `retry_for_s` is over. A server that cannot
   be reached is tried UNREACHABLE_TRIES times. Credentials that are out of date are looked up anew once, and a request
   that came with a wrong time is made once more. Where none are found any more, somebody may be writing them at this
   moment: they are looked up anew until `retry_for_s` is over, and by every later request.
3. Pauses double from PAUSE_S to PAUSE_MAX_S, each shortened by a random share, so that writers do not come back
   together; a server that says when to come back is obeyed within that.
4. Time and chance are given from outside.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from storage_backends.s3_connection import Client, Work
from storage_backends.s3_failures import Failure, Kind, understand

T = TypeVar("T")

PAUSE_S = 0.1
PAUSE_MAX_S = 5.0
UNREACHABLE_TRIES = 4

_PASSES = frozenset({Kind.BUSY, Kind.CONFLICT, Kind.LOST, Kind.GARBLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Where time and chance come from."""

    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.SystemRandom().random


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """How the last of some tries failed. `lost`: whether one of them may have been done without being told so."""

    failure: Failure
    tries: int
    lost: bool


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """What a request gave, and how many tries it took."""

    value: T


def attempt(client: Client, work: Work[T], *, timeout_s: float, retry_for_s: float, pace: Pace) -> Done[T] | Failed:
    """Do `work`, again where that may help. Raises only what is no failure of a request."""
    began = pace.monotonic()
    tries = 0
    once_more = {Kind.SKEWED, Kind.EXPIRED}
    lost = False
    while True:
        generation = client.generation
        tries += 1
        try:
            client.count(requests=1)
            return Done(client.call(work, timeout_s))
        except Exception as error:
            failure = understand(error)
            if failure is None:
                raise
        kind = failure.kind
        lost = lost or kind is Kind.LOST
        client.count(busy=kind is Kind.BUSY, lost=kind is Kind.LOST)
        pause_s = _pause(tries, failure.retry_after_s, pace.chance())
        if kind in _PASSES:
            again = pace.monotonic() - began + pause_s < retry_for_s
        elif kind is Kind.UNREACHABLE:
            again = tries < UNREACHABLE_TRIES
        elif kind is Kind.NO_CREDENTIALS:
            client.renew(generation)  # or whoever comes next would go on without any
            again = client.worked and pace.monotonic() - began + pause_s < retry_for_s
        else:
            again = kind in once_more and (kind is not Kind.EXPIRED or client.renew(generation))
            once_more.discard(kind)
            pause_s = 0.0
        if not again:
            return Failed(failure=failure, tries=tries, lost=lost)
        client.count(retries=1, waited_s=pause_s)
        if pause_s:
            pace.sleep(pause_s)


def _pause(tries: int, retry_after_s: float, chance: float) -> float:
    most = min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(tries - 1, 16))
    return min(PAUSE_MAX_S, max(retry_after_s, most * (0.25 + 0.75 * chance)))
