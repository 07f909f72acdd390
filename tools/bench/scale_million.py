"""What the coordinator does for very many live calls, all of which change before every snapshot.

Owns: the run of snapshots, and which of their seconds are the coordinator's.
Does not know: how the coordinator goes about it.

The coordinator's part of a snapshot is everything but cut and staging, which are the workers' and happen on their
machines; its store is in memory, so that the seconds are those of its own work on one core.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from bench.jobs import Life, Taken
from bench.measuring import Spread, settle
from bench.prices import dollars
from bench.report import Law, Report, nbytes_text
from bench.simulated import Fleet, is_as_decoded
from recovery.restored import Restored
from storage_backends.memory import MemoryStore

OF_WORKERS = ("cut", "stage")
CHECKING = "validate"
SECONDS_MAX, LEDGER_NBYTES_MAX = 5.0, 64.0


@dataclass(frozen=True, slots=True)
class Size:
    """Of one run."""

    workers: int
    calls: int
    snapshots: int
    tokens: int


def measure(report: Report, size: Size) -> None:
    report.title(
        f"{size.calls:,} live calls of {size.workers:,} workers, {size.snapshots} snapshots, all of them changed "
        f"before each by {size.tokens} tokens"
    )
    store = MemoryStore()
    life = Life(store, lambda seat: Fleet(seat, size.workers))
    life.workers.open(range(size.calls), [1 << 30] * size.calls)
    taken: list[Taken] = []
    for _ in range(size.snapshots):
        settle()  # a collection of garbage would look through millions of calls, wherever it happens to fall
        life.workers.decode(size.tokens)
        taken.append(life.snapshot())
    entries = life.publication.ledger.counts()
    objects = len(store.list(""))
    seconds, restored, as_decoded, ledger_nbytes = _restore(store, size)
    _say(report, size, taken, objects)
    report.figure(
        "million",
        "restore",
        {"seconds": seconds, "calls": size.calls, "as_decoded": as_decoded, "ledger_bytes": ledger_nbytes},
    )
    report.figure("million", "in the ledger", {"calls": entries.calls, "chunks": entries.chunks})
    report.note(
        f"restored in {seconds:.1f} s, claim and publication included, {nbytes_text(ledger_nbytes)} of it ledger; "
        f"{as_decoded:,} of {size.calls:,} calls are what was decoded"
    )
    report.bound("calls that a restore does not give back as decoded", size.calls - as_decoded, 0)
    report.bound("segments that it had to adopt", restored.adopted_segments, 0)


def _restore(store: MemoryStore, size: Size) -> tuple[float, Restored, int, int]:
    settle()
    began = time.perf_counter()
    life = Life(store, lambda seat: Fleet(seat, size.workers))
    seconds = time.perf_counter() - began
    whole = size.snapshots * size.tokens
    good = sum(len(one.transcript.token_ids) == whole and is_as_decoded(one) for one in life.restored.calls)
    ledger = sum(store.get(key, 0).__len__() for key in life.publication.reached() if key.startswith("ledger/"))
    return seconds, life.restored, good, ledger


def _say(report: Report, size: Size, taken: list[Taken], objects: int) -> None:
    own = [one.seconds - sum(one.steps.get(step, 0.0) for step in OF_WORKERS) for one in taken]
    checking = [one.steps[CHECKING] for one in taken]
    books = [whole - part for whole, part in zip(own, checking, strict=True)]
    ledger = [one.traffic.bytes_created["ledger"] / size.calls for one in taken]
    price = [dollars(one.traffic.calls) for one in taken]
    rows: list[list[object]] = []
    for name, values, form in (
        ("coordinator, s", own, "{:.2f}"),
        ("of it checking what was stored, s", checking, "{:.2f}"),
        ("of it the rest, s", books, "{:.2f}"),
        ("ledger, bytes a changed call", ledger, "{:.1f}"),
        ("objects created", [float(one.traffic.n_objects) for one in taken], "{:.0f}"),
        ("requests", [float(sum(one.traffic.calls.values())) for one in taken], "{:.0f}"),
        ("list price of the requests, $", price, "{:.4f}"),
    ):
        spread = Spread.of(values[1:])  # the first one opens all calls
        report.figure("million", name, {"first": values[0], **spread.as_json(), "all": values})
        rows.append([name, *map(form.format, (values[0], spread.median, spread.low, spread.high, values[-1]))])
    report.table(("", "snapshot 1", "median of the others", "least", "most", f"snapshot {len(taken)}"), rows)
    calls = sum((one.traffic.calls for one in taken), Counter())
    report.figure("million", "requests", dict(calls))
    report.figure("million", "objects in the store", objects)
    if not report.quick:
        per_call = sum(ledger) / len(ledger)
        report.bound("ledger bytes a changed call and snapshot, over all snapshots", per_call, LEDGER_NBYTES_MAX)
        report.bound("seconds of the coordinator, a million calls", Spread.of(own[1:]).median, SECONDS_MAX)
        report.bound("the same without reading back", Spread.of(books[1:]).median, SECONDS_MAX)
    numbers = range(1, len(taken) + 1)
    series = {"all": own, "reading back": checking, "the rest": books}
    report.law(
        Law(
            f"coordinator, s, of snapshot k ({size.calls:,} calls)", "k",
            {name: list(zip(numbers, values, strict=True)) for name, values in series.items()}, SECONDS_MAX,
        )
    )  # fmt: skip
    report.law(
        Law("ledger, bytes a changed call", "k", {"ledger": list(zip(numbers, ledger, strict=True))}, LEDGER_NBYTES_MAX)
    )
