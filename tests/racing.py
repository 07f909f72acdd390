"""Two coordinator processes on one store, one of which is stopped (SIGSTOP) and woken again: what comes of it.

A round: `left` takes snapshots and is stopped, at any moment or exactly between the create of a slot and its answer.
`right` takes the store over. In some rounds `right` is stopped in its turn while it claims, and `left` goes on. Then
both run. `left` has to end fenced; `right` is told to end and brings the job to its end. Nothing waits by the clock but
the random moments at which a process is stopped.

Owns: the rounds, what is checked of each, the figures. The same seed gives the same plan of a round; the moments depend
on the machine.
Does not know: what a coordinator does (racer.py), pytest.

Checked: every acknowledged snapshot is in the log once, under its owner, and could be restored when it was acknowledged
unless it was superseded by then; slots are dense and chained; no append was written twice; what the kept snapshots
reference is there and whole; the answers are those of a job that nothing happened to; `left` exits 11.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recovery.log import Slot
from recovery.ports import ObjectStore
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.s3 import S3Store
from storage_backends.s3_options import parse_address
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import FaultProxy, Hold
from storage_backends.testing.servers import BUCKET, KEY, REGION, SECRET
from tests.fake_engine import Life, reference_answers
from tests.log_stores import all_slots
from tests.racer import PROMPTS

LONGEST_S = 120.0
WAYS = ("moment", "before", "after")
"""When `left` is stopped: whenever it is, before a slot is created, or after it while the answer is on its way."""

REFERENCE = reference_answers(PROMPTS)


@dataclass
class Place:
    """Where rounds are played: fresh stores of one kind. `server`: the address of an S3 server; empty: on disk."""

    name: str
    folder: Path
    server: str = ""
    n_stores: int = 0

    def fresh(self) -> str:
        """The address of a store that nobody has."""
        self.n_stores += 1
        name = f"race-{os.getpid()}-{self.n_stores}"
        return f"s3://{BUCKET}/{name}" if self.server else str(self.folder / name)

    def environment(self, endpoint: str) -> dict[str, str]:
        if not self.server:
            return {}
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @functools.cached_property
    def _base(self) -> S3Store:
        return S3Store(BUCKET, endpoint_url=self.server, key=KEY, secret=SECRET, region=REGION)

    def store(self, url: str) -> ObjectStore:
        """The store, without a proxy before it."""
        return self._base.under(parse_address(url)[1]) if self.server else open_store(url)


class Process:
    """A racer, the lines it has said, and the ways to stop and wake it."""

    def __init__(self, name: str, arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.racer", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                cwd=Path(__file__).parents[1],
            )
        self._log = log
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The next line for which it holds. Raises AssertionError if the process ends or is silent before."""
        deadline = time.monotonic() + LONGEST_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{self.name} did not come to {what}: {self.said[-3:]}") from None
            if line is None:
                raise AssertionError(f"{self.name} ended before {what}: {self.said[-3:]}\n{self._log.read_text()}")
            self.said.append(json.loads(line))
            if holds(self.said[-1]):
                return self.said[-1]

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def acks(self, n: int) -> None:
        for _ in range(n):
            self.until(lambda line: "ack" in line, "a snapshot")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.stopped()

    def stopped(self) -> None:
        """Wait until it is stopped."""
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None and found.si_code == os.CLD_STOPPED, f"{self.name} ended: {self._log.read_text()}"

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def ended(self) -> int:
        """Its exit code, once it has said everything."""
        while True:
            line = self._lines.get(timeout=LONGEST_S)
            if line is None:
                break
            self.said.append(json.loads(line))
        return self.process.wait(LONGEST_S)

    def all_of(self, name: str) -> list[Any]:
        return [line[name] for line in self.said if name in line]


@dataclass
class Figures:
    """Over many rounds. `ways` counts how `left` was stopped, by place; `problems` is empty if all went well."""

    rounds: int = 0
    acknowledged: int = 0
    checked: int = 0
    superseded: int = 0
    fenced: int = 0
    abandoned: int = 0
    deleted: int = 0
    overtaken: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ways = ", ".join(f"{n} {way}" for way, n in sorted(self.ways.items()))
        return (
            f"{self.rounds} rounds ({ways}): {self.acknowledged} snapshots acknowledged, {self.fenced} zombies fenced, "
            f"{self.overtaken} claims overtaken, {self.abandoned} attempts abandoned, {self.deleted} objects deleted; "
            f"{self.checked} restored when acknowledged, {self.superseded} superseded by then; "
            f"{len(self.problems)} problems"
        )


@dataclass(frozen=True)
class Plan:
    """One round, drawn."""

    seed: int
    way: str
    at: int
    keep: int
    codec: str
    lead: int
    """Snapshots of `right` before `left` is woken."""
    stops_right: str
    """Empty, or how `right` is stopped in its claim while `left` goes on."""

    @property
    def least(self) -> int:
        """Snapshots that are acknowledged in any case.

        By `left`: its restore, `at` more (without the one before whose slot it is held), and one more where it goes on
        before anything is claimed. By `right`: its restore, its lead, one after the end of `left`, and its last.
        """
        left = 1 + self.at - (self.way == "before") + (self.way != "moment" and self.stops_right == "before")
        return left + 1 + (0 if self.stops_right else self.lead) + 1 + 1

    @classmethod
    def drawn(cls, chance: random.Random, way: str = "") -> Plan:
        return cls(
            seed=chance.randrange(1 << 30),
            way=way or chance.choice(WAYS),
            at=chance.randint(1, 5),
            keep=chance.choice([1, 1, 2]),
            codec=chance.choice(["arrow", "zarr"]),
            lead=chance.choice([0, 0, 1, 3]),
            stops_right=chance.choice(["", "", "before", "after"]),
        )


def play(place: Place, plan: Plan, figures: Figures) -> None:
    """One round. Raises AssertionError, naming the plan, if something does not hold."""
    url = place.fresh()
    with ExitStack() as ends:
        left = ends.enter_context(_racer(place, url, plan, 1, plan.way, plan.at + 2))
        right = ends.enter_context(_racer(place, url, plan, 2, plan.stops_right, 1))
        for racer in (left, right):
            racer.process.until(lambda line: "ready" in line, "its start")
        try:
            _run(plan, left, right)
            figures.rounds += 1
            figures.ways[f"{place.name} {plan.way}"] += 1
            figures.overtaken += bool(plan.stops_right)
            _check(place, url, plan, left.process, right.process, figures)
        except BaseException as error:
            error.add_note(f"{place.name}, {plan}, {url}")
            raise


class _Racer:
    """A process with what holds it at a slot."""

    def __init__(self, process: Process, hold: Hold | None) -> None:
        self.process = process
        self.hold = hold

    def stop_at_slot(self) -> None:
        """Wait until it stands at its slot, and stop it there."""
        if self.hold is None:
            self.process.stopped()
            return
        assert self.hold.reached.wait(LONGEST_S), f"{self.process.name} did not come to its slot"
        self.process.stop()
        if self.hold.answered:
            self.hold.event.set()  # the answer lies in its socket

    def wake(self) -> None:
        if self.hold is not None:
            self.hold.event.set()
        self.process.wake()


@contextmanager
def _racer(place: Place, url: str, plan: Plan, number: int, way: str, at: int) -> Iterator[_Racer]:
    """A process that gets ready; at its `at`-th slot it will be held `way` (before, after)."""
    arguments = [url, str(number), f"{plan.seed} {number}", str(plan.keep), plan.codec]
    hold = None
    with ExitStack() as ends:
        endpoint = ""
        if place.server:
            proxy = ends.enter_context(FaultProxy(place.server))
            endpoint = proxy.url
            if way in ("before", "after"):
                hold = Hold(answered=way == "after")
                seen = faults.of("PutObject", key="/log/")
                proxy.plan = faults.when(seen, *[faults.PASS_ON] * (at - 1), hold)
        elif way in ("before", "after"):
            arguments += [way, str(at)]
        name = "left" if number == 1 else "right"
        log = place.folder / f"{url.rsplit('/', 1)[1]}.{name}.log"
        process = Process(name, arguments, place.environment(endpoint), log)
        try:
            yield _Racer(process, hold)
        finally:
            process.process.kill()
            process.process.communicate()


def _run(plan: Plan, left: _Racer, right: _Racer) -> None:
    chance = random.Random(plan.seed)
    left.process.tell()
    left.process.until(lambda line: "restored" in line, "its restore")
    if plan.way == "moment":
        left.process.acks(plan.at)
        time.sleep(chance.uniform(0, 0.1))  # no race is won by this: it only spreads the moments
        left.process.stop()
    else:
        left.stop_at_slot()
    right.process.tell()
    if plan.stops_right:
        right.stop_at_slot()
        left.wake()
        if plan.stops_right == "before":
            left.process.acks(1)  # nothing was claimed yet, so it goes on
        right.wake()
        right.process.until(lambda line: "restored" in line, "its restore")
    else:
        right.process.until(lambda line: "restored" in line, "its restore")
        right.process.acks(plan.lead)
        left.wake()
    code = left.process.ended()
    assert code == 11, f"left ended with {code}: {left.process.said[-3:]}"
    right.process.acks(1)
    right.process.tell()
    code = right.process.ended()
    assert code == 0, f"right ended with {code}: {right.process.said[-3:]}"


def _check(place: Place, url: str, plan: Plan, left: Process, right: Process, figures: Figures) -> None:
    store = place.store(url)
    slots = {slot.seq: slot for slot in all_slots(store)}
    snapshots = [slot for slot in slots.values() if slot.kind == "snapshot"]
    assert len({slot.nonce for slot in slots.values()}) == len(slots)
    assert len({slot.body["ledger"]["key"] for slot in snapshots}) == len(snapshots), "an append was written twice"
    told: dict[int, str] = {}
    for process, owner in ((left, "life 1"), (right, "life 2")):
        acknowledged = [*process.all_of("restored"), *process.all_of("ack")]
        assert acknowledged == sorted(set(acknowledged)), f"{process.name} was told of ids out of order: C4"
        for seq in acknowledged:
            assert seq not in told, f"{told[seq]} and {owner} were both told that slot {seq} is theirs"
            told[seq] = owner
            slot = slots.get(seq)
            assert slot is not None and slot.kind == "snapshot", f"acknowledged snapshot {seq} is lost"
            assert slot.owner == owner
        _check_each_ack(process, snapshots, plan.keep, figures)
    assert [slot.owner for slot in slots.values() if slot.kind == "epoch"] == ["life 1", "life 2"]
    assert left.all_of("fenced") and "slot" in left.all_of("fenced")[0]
    assert {name: tuple(ids) for name, ids in right.all_of("done")[0].items()} == REFERENCE
    heir = Life(
        store,
        3,
        prompts=PROMPTS,
        keep_latest_k=plan.keep,
        segments=MixedSegmentCodec(),
        ledgers=ArrowLedgerCodec(rows_per_batch=2),
    )
    assert heir.restored.snapshot == snapshots[-1].seq and heir.restored.passed_over == []
    assert heir.answers() == REFERENCE
    heir.close()
    figures.acknowledged += len(told)
    figures.fenced += 1
    figures.abandoned += len(left.all_of("abandoned")) + len(right.all_of("abandoned"))
    figures.deleted += sum(left.all_of("deleted")) + sum(right.all_of("deleted"))


def _check_each_ack(process: Process, snapshots: list[Slot], keep: int, figures: Figures) -> None:
    """What could not be restored when it was acknowledged was superseded: `keep` newer snapshots are in the log."""
    for line in process.said:
        if "wrong" not in line:
            continue
        newer = sum(slot.seq > line["ack"] for slot in snapshots)
        if line["wrong"] is None:
            figures.checked += 1
            continue
        figures.superseded += 1
        assert process.name == "left" and newer >= keep, f"snapshot {line['ack']} of {process.name}: {line['wrong']}"


def race(places: list[Place], seed: int, rounds: int, deadline: float | None = None) -> Figures:
    """So many rounds, over the places in turn. A round that fails is a problem, and ends the race."""
    figures = Figures()
    chance = random.Random(seed)
    for number in range(rounds):
        if deadline is not None and time.monotonic() > deadline:
            break
        place, plan = places[number % len(places)], Plan.drawn(chance)
        try:
            play(place, plan, figures)
        except AssertionError as error:
            figures.problems.append("\n".join((f"round {number + 1}: {error}", *getattr(error, "__notes__", ()))))
            break
        if (number + 1) % 10 == 0:
            print(f"  {figures}", flush=True)
    return figures
