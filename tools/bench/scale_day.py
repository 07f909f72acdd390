"""A day of a snapshot a minute with everything that goes wrong in one, as fast as it can be computed.

Owns: what fails how often, the calls that come and go, and what is compared after every crash.
Does not know: how the coordinator, the log or retention react.

Each minute every live call gets its tokens, a snapshot is tried, and compaction does the round that it asked for.
Calls end after a number of tokens that is drawn log-normally, and new ones take their place; an ended call leaves the
ledger DROPPED_AFTER minutes later, as a trainer drops what it has trained on. FAILURES is the distribution; who dies,
dies at a store call drawn at random, and the next minute another coordinator claims, restores and goes on. One that
cannot reach the store meanwhile tries again a minute later.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.jobs import Life
from bench.measuring import Spread, settle
from bench.prices import dollars, dollars_a_month
from bench.report import Law, Report, nbytes_text
from bench.scale_million import LEDGER_NBYTES_MAX, OF_WORKERS
from bench.simulated import Fleet, is_as_decoded, number_of
from recovery.compaction import Limits
from recovery.errors import OutcomeUnknown, Retry, SnapshotAbandoned, StoreUnavailable
from recovery.layout import SEGMENTS
from recovery.model import ENDED, CallId
from recovery.ports import ObjectStore, Put
from recovery.protocol import Verdict
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore, RaiseAfter, RaiseBefore, Step, Verb, Wrapped

FAILURES = {
    "the coordinator is killed, per minute": 1 / 120,
    "a worker is lost, per worker and minute": 1 / 1440,
    "a participant does not get ready, per minute": 0.01,
    "a cut misses its deadline, per minute": 0.01,
    "a store call fails before it is done, each": 0.001,
    "a store call is done and its answer is lost, each": 0.001,
    "a segment does not read back, each": 0.0005,
}
DROPPED_AFTER = 30
LENGTHS = (5.5, 1.0)
"""Mean and deviation of the logarithm of a call's tokens: the mean is 400, one of a hundred calls has 2,500."""
KILL_WITHIN = 60
"""Store calls after which the coordinator dies, at most."""


class Killed(BaseException):
    """The process is gone: nobody catches this."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of one run; `tokens` of each call and minute. All fails `failures` times as often as FAILURES says."""

    workers: int
    calls: int
    minutes: int
    tokens: int
    failures: float


class Flipping(Wrapped):
    """Stores some segments with a byte changed, when `draws` says so; never two in a row."""

    def __init__(self, inner: ObjectStore, draws: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._draws, self._last = draws, False

    def put_new(self, key: str, data: bytes) -> Put:
        self._last = key.startswith(SEGMENTS) and not self._last and self._draws()
        return self.inner.put_new(key, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:] if self._last else data)


@dataclass(slots=True)
class Seen:
    """What was counted."""

    failures: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    unreached: int = 0
    published: int = 0
    abandoned: int = 0
    seconds: list[float] = field(default_factory=list)
    restores: list[float] = field(default_factory=list)
    ledger_per_change: list[float] = field(default_factory=list)
    ledger_nbytes: list[int] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    compactions: int = 0
    behind: int = 0
    lost: int = 0
    other: int = 0
    ended: set[int] = field(default_factory=set)
    ended_twice: int = 0


class Day:
    """The driver of a job: it opens calls, counts what ended, and begins a new life where the old one died."""

    def __init__(self, size: Size, rng: np.random.Generator) -> None:
        self._size, self._rng, self._times = size, rng, size.failures
        self.memory = MemoryStore()
        self.seen = Seen()
        self._store = FaultyStore(Flipping(self.memory, self._flips), self._step)
        self._fuse: int | None = None
        self._quiet = True
        self._next = 0
        self._known: dict[int, tuple[int, int]] = {}
        self._drops: deque[tuple[int, list[CallId]]] = deque()
        self._lengths: dict[int, int] = {}
        self._life: Life[Fleet] | None = None

    def run(self) -> None:
        for minute in range(self._size.minutes):
            self._quiet = False
            try:
                self._minute(minute)
            except Killed:
                self.seen.kills += 1
                self._life = None
            except Retry:
                self.seen.unreached += 1
        self._quiet, self._fuse = True, None
        self._begin()

    def _minute(self, minute: int) -> None:
        if self._draw("the coordinator is killed, per minute"):
            self._fuse = int(self._rng.integers(KILL_WITHIN))
        life = self._life or self._begin()
        fleet = life.workers
        for number in range(len(fleet.workers)):
            if self._draw("a worker is lost, per worker and minute"):
                fleet.lose(number)
        self._fill_up(life)
        fleet.decode(self._size.tokens)
        self._drop(life, minute)
        life.store.take()
        attempt = life.attempt()
        traffic = life.store.take()
        self.seen.calls += traffic.calls
        if attempt.verdict is Verdict.PUBLISHED:
            self._published(life, minute, attempt.ended)
            own = sum(seconds for step, seconds in attempt.seconds.items() if step not in OF_WORKERS)
            self.seen.seconds.append(own)
            self.seen.ledger_nbytes.append(traffic.bytes_created["ledger"])
            self.seen.ledger_per_change.append(traffic.bytes_created["ledger"] / max(1, self._size.calls))
        else:
            self.seen.abandoned += 1
        self.seen.compactions += life.compact_now() is not None
        self.seen.calls += life.store.take().calls
        if minute % 10 == 9:
            listed = self.memory.list("")
            self.seen.objects.append(len(listed))
            self.seen.stored.append(sum(item.nbytes for item in listed))

    # ---- calls come and go ---------------------------------------------------------------------------------------

    def _fill_up(self, life: Life[Fleet]) -> None:
        live = sum(map(len, life.workers.workers))
        numbers = range(self._next, self._next + self._size.calls - live)
        self._next += len(numbers)
        life.workers.open(numbers, [self._length(number) for number in numbers])

    def _length(self, number: int) -> int:
        if number not in self._lengths:
            self._lengths[number] = max(1, int(self._rng.lognormal(*LENGTHS)))
        return self._lengths[number]

    def _published(self, life: Life[Fleet], minute: int, ended: tuple[CallId, ...]) -> None:
        """Remember what was acknowledged."""
        self.seen.published += 1
        ledger = life.publication.ledger
        self.seen.behind += life.workers.behind(ledger)
        self._count_ended([number_of(entry.identity.rollout) for entry in map(ledger.get, ended) if entry is not None])
        self._drops.append((minute, list(ended)))
        self._known = {number_of(e.identity.rollout): (e.attempt, e.n_tokens) for e in ledger}

    def _count_ended(self, numbers: list[int]) -> None:
        self.seen.ended_twice += len(self.seen.ended.intersection(numbers))
        self.seen.ended.update(numbers)

    def _drop(self, life: Life[Fleet], minute: int) -> None:
        ledger = life.publication.ledger
        while self._drops and self._drops[0][0] + DROPPED_AFTER <= minute:
            for call_id in self._drops.popleft()[1]:
                if ledger.get(call_id) is not None:
                    with life.publication.lock:
                        ledger.drop(call_id)

    # ---- lives ---------------------------------------------------------------------------------------------------

    def _begin(self) -> Life[Fleet]:
        """Claim, restore, and compare with what was acknowledged."""
        began = time.perf_counter()
        fleet = lambda seat: Fleet(seat, self._size.workers, self._mishap)  # noqa: E731
        life = Life(self._store, fleet, compact=Limits())
        if life.restored.snapshot is not None:
            self.seen.restores.append(time.perf_counter() - began)
        self.seen.calls += life.store.take().calls
        self._compare(life)
        resumed = [call for call in life.restored.calls if call.entry.state != ENDED]
        numbers = [number_of(call.entry.identity.rollout) for call in resumed]
        life.workers.carry_on(resumed, [self._length(number) for number in numbers])
        self._open_again(life)
        self._life = life
        return life

    def _compare(self, life: Life[Fleet]) -> None:
        ledger = life.publication.ledger
        found = {number_of(e.identity.rollout): (e.attempt, e.n_tokens, e.state) for e in ledger}
        for number, (attempt, n_tokens) in self._known.items():
            now = found.get(number)
            dropped = now is None and number in self.seen.ended
            if not dropped and (now is None or (now[0] == attempt + 1 and now[1] < n_tokens)):
                self.seen.lost += 1
        self.seen.other += sum(not is_as_decoded(call) for call in life.restored.calls)
        fresh = [number for number, (_, _, state) in found.items() if state == ENDED and number not in self.seen.ended]
        self._count_ended(fresh)
        by_number = {number_of(e.identity.rollout): e.call_id for e in ledger if e.state == ENDED}
        self._drops = deque([(0, list(by_number.values()))])

    def _open_again(self, life: Life[Fleet]) -> None:
        """What was begun and is neither in the ledger nor ended was never acknowledged: it begins anew."""
        there = {number_of(entry.identity.rollout) for entry in life.publication.ledger}
        numbers = [n for n in range(self._next) if n not in there and n not in self.seen.ended]
        life.workers.open(numbers, [self._length(number) for number in numbers])

    # ---- what goes wrong -------------------------------------------------------------------------------------------

    def _draw(self, failure: str) -> bool:
        happens = bool(self._rng.random() < self._times * FAILURES[failure])
        self.seen.failures[failure] += happens
        return happens

    def _mishap(self, step: str) -> None:
        failure = "a cut misses its deadline" if step == "cut" else "a participant does not get ready"
        if not self._quiet and self._draw(f"{failure}, per minute"):
            raise SnapshotAbandoned(f"simulated: {step}")

    def _flips(self) -> bool:
        return not self._quiet and self._draw("a segment does not read back, each")

    def _step(self, verb: Verb, key: str) -> Step:
        if self._quiet:
            return PASS
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self._fuse = None
                return RaiseBefore(Killed()) if self._rng.random() < 0.5 else RaiseAfter(Killed())
        if self._draw("a store call fails before it is done, each"):
            return RaiseBefore(StoreUnavailable("simulated"))
        if self._draw("a store call is done and its answer is lost, each"):
            return RaiseAfter(OutcomeUnknown("simulated") if verb == "put_new" else StoreUnavailable("simulated"))
        return PASS


def measure(report: Report, size: Size) -> None:
    hours = size.minutes / 60
    report.title(f"{hours:g} hours, a snapshot a minute, {size.calls:,} live calls of {size.workers} workers")
    settle()
    day = Day(size, np.random.default_rng(report.seed))
    began = time.perf_counter()
    day.run()
    seen = day.seen
    report.figure("day", "seconds of the simulation", time.perf_counter() - began)
    rows = [[failure, f"{FAILURES[failure]:.2g}", seen.failures[failure]] for failure in FAILURES]
    report.figure("day", "failures", {"probability": FAILURES, "happened": dict(seen.failures)})
    report.table(("what fails", "probability", "times"), rows)
    changed = size.minutes * size.calls
    ledger = sum(seen.ledger_nbytes) / changed
    price = dollars(seen.calls)
    figures: dict[str, Any] = {
        "snapshots published": seen.published,
        "snapshots abandoned": seen.abandoned,
        "lives": seen.kills + 1,
        "begun in vain": seen.unreached,
        "rounds of compaction": seen.compactions,
        "calls ended": len(seen.ended),
        "coordinator, s": Spread.of(seen.seconds).as_json(),
        "restore, s": Spread.of(seen.restores).as_json(),
        "ledger, bytes a changed call": ledger,
        "objects in the store": Spread.of(seen.objects).as_json(),
        "bytes in the store": Spread.of(seen.stored).as_json(),
        "requests": dict(seen.calls),
        "list price of the requests, $": price,
        "list price of what is stored, $ a month": dollars_a_month(max(seen.stored)),
    }
    for name, value in figures.items():
        report.figure("day", name, value)
    requests = ", ".join(f"{n:,} {verb}" for verb, n in seen.calls.items())
    report.table(
        ("", ""),
        [
            ["snapshots published, abandoned", f"{seen.published:,}, {seen.abandoned:,}"],
            ["rounds of compaction", f"{seen.compactions:,}"],
            ["kills survived, begun in vain", f"{seen.kills}, {seen.unreached}"],
            ["calls ended", f"{len(seen.ended):,}"],
            ["coordinator, s a snapshot", Spread.of(seen.seconds).text(2)],
            ["restore, s", Spread.of(seen.restores).text(2)],
            ["ledger, bytes a changed call", f"{ledger:.1f}"],
            ["objects in the store", Spread.of(seen.objects).text(0)],
            ["bytes in the store", f"at most {nbytes_text(max(seen.stored))}"],
            ["requests", requests],
            ["their list price", f"{price:.2f} $"],
        ],
    )
    report.bound("calls of which a published snapshot lacks what was stored before it", seen.behind, 0)
    report.bound("acknowledged calls that a restore lost", seen.lost, 0)
    report.bound("restored calls that are not what was decoded", seen.other, 0)
    report.bound("calls that ended twice", seen.ended_twice, 0)
    if not report.quick:
        if not (seen.kills and seen.restores and seen.compactions):
            raise RuntimeError(f"a day without a restore or a compaction shows nothing of them: {figures}")
        report.bound("ledger bytes a changed call and minute, over the day", ledger, LEDGER_NBYTES_MAX)
    numbers = range(1, len(seen.stored) + 1)
    nbytes = [(k / 6, n / 1e6) for k, n in zip(numbers, seen.stored, strict=True)]
    objects = [(k / 6, float(n)) for k, n in zip(numbers, seen.objects, strict=True)]
    report.law(Law("MB in the store", "hours", {"stored": nbytes}))
    report.law(Law("objects in the store", "hours", {"objects": objects}))
