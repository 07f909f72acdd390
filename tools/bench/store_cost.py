"""What snapshot k costs: bytes, objects and seconds, while the job grows and the new tokens stay the same.

Owns: the run of snapshots, on local disk and on S3, and with compaction, which is measured apart.
Does not know: where the tokens are from.

The new tokens of every snapshot are as many for every call. Decoding stands still while a snapshot is taken, so that
its seconds are its own: the cut, the segments of all workers, ledger, validation, publication, garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.corpus import Corpus
from bench.counted import Traffic
from bench.jobs import Job, Taken
from bench.measuring import Spread
from bench.report import Law, Report, ms_text, nbytes_text
from recovery.compaction import Limits
from recovery.model import Float32Array
from recovery.ports import ObjectStore

RATIO_MAX = 1.5
_UNITS = {"bytes": 1e3, "ms": 1e-3}
WORKERS = 2
PROMPT = 100


@dataclass(frozen=True, slots=True)
class Size:
    """Of one run."""

    calls: int
    snapshots: int
    tokens: int
    window: int


def measure(
    report: Report,
    corpus: Corpus,
    logprobs: Float32Array,
    size: Size,
    places: dict[str, Callable[[], ObjectStore]],
    rng: np.random.Generator,
) -> None:
    report.title(
        f"cost of snapshot k: {size.calls:,} live calls, {size.tokens} new tokens each, {WORKERS} workers, "
        f"{size.snapshots} snapshots"
    )
    rows: list[list[object]] = []
    for place, make in places.items():
        limits = Limits(pieces=3) if report.quick else Limits()  # few snapshots leave few pieces
        compact = limits if place.endswith("compacted") else None
        taken, rounds = _run(make(), corpus, logprobs, size, rng, compact=compact)
        rows += _rows(report, place, taken, size)
        if rounds:
            _show_compaction(report, place, rounds, taken)
    windows = f"median of {size.window}"
    header = ("", "snapshot 2", f"snapshot {size.snapshots}", "ratio", f"first, {windows}", f"last, {windows}", "ratio")
    report.table((*header, "largest of all"), rows)


def _run(
    store: ObjectStore,
    corpus: Corpus,
    logprobs: Float32Array,
    size: Size,
    rng: np.random.Generator,
    *,
    compact: Limits | None,
) -> tuple[list[Taken], list[tuple[float, Traffic]]]:
    job = Job(store, n_workers=WORKERS, compact=compact)
    taken: list[Taken] = []
    rounds: list[tuple[float, Traffic]] = []
    try:
        job.open(corpus.spans(rng, size.calls, PROMPT))
        for _ in range(size.snapshots):
            at = rng.integers(0, len(logprobs) - size.tokens, size.calls).tolist()
            for number, ids in enumerate(corpus.spans(rng, size.calls, size.tokens)):
                job.append(number, ids, logprobs[at[number] : at[number] + size.tokens])
            taken.append(job.snapshot())
            if (done := job.compact_now()) is not None:
                rounds.append(done)
        job.gives_back()
        if compact and not rounds:
            raise RuntimeError("nothing was compacted beside the snapshots")
    finally:
        job.close()
    return taken, rounds


def _rows(report: Report, place: str, taken: Sequence[Taken], size: Size) -> list[list[object]]:
    """Snapshot 1 opens all calls and is left out."""
    first, last = taken[1 : 1 + size.window], taken[-size.window :]
    rows: list[list[object]] = []
    for name, of, text, bounded in (
        ("bytes", lambda one: float(one.traffic.nbytes), nbytes_text, True),
        ("of it ledger", lambda one: float(one.traffic.bytes_created["ledger"]), nbytes_text, False),
        ("ms", lambda one: one.seconds, ms_text, True),
        ("processor ms", lambda one: one.processor_seconds, ms_text, False),
        ("objects", lambda one: float(one.traffic.n_objects), lambda n: f"{n:.0f}", False),
    ):
        at_first, at_last = Spread.of(list(map(of, first))), Spread.of(list(map(of, last)))
        most = max(map(of, taken[1:]))
        single, windows = of(taken[-1]) / of(taken[1]), at_last.median / at_first.median
        figure: dict[str, Any] = {
            "snapshot_2": of(taken[1]),
            "snapshot_last": of(taken[-1]),
            "first_window": at_first.as_json(),
            "last_window": at_last.as_json(),
            "ratio_of_singles": single,
            "ratio_of_windows": windows,
            "largest": most,
            "all": list(map(of, taken)),
        }
        report.figure("cost", f"{place}: {name}", figure)
        if bounded:
            unit = _UNITS[name]
            points = [(k, of(one) / unit) for k, one in enumerate(taken[1:], 2)]
            law = f"{'kB' if name == 'bytes' else name} of snapshot k"
            report.law(Law(law, "k", {place: points}, RATIO_MAX * at_first.median / unit))
        if bounded and not report.quick:
            report.bound(f"{name} of the last snapshots over the first, {place}", windows, RATIO_MAX)
        rows.append(
            [f"{place}: {name}", text(of(taken[1])), text(of(taken[-1])), f"{single:.2f}", text(at_first.median),
             text(at_last.median), f"{windows:.2f}", text(most)]
        )  # fmt: skip
    mean = np.mean([one.traffic.nbytes for one in last]) / np.mean([one.traffic.nbytes for one in first])
    report.figure("cost", f"{place}: mean bytes of last window over first", float(mean))
    report.bound(f"objects of any snapshot, {place}", max(one.traffic.n_objects for one in taken), 6 + WORKERS)
    return rows


def _show_compaction(report: Report, place: str, rounds: list[tuple[float, Traffic]], taken: Sequence[Taken]) -> None:
    written = sum(traffic.nbytes for _, traffic in rounds)
    read = sum(traffic.bytes_read for _, traffic in rounds)
    objects = sum(traffic.n_objects for _, traffic in rounds)
    stored = sum(one.traffic.bytes_created["seg"] for one in taken)
    report.figure(
        "cost",
        f"{place}: compaction",
        {
            "rounds": len(rounds),
            "seconds": Spread.of([seconds for seconds, _ in rounds]).as_json(),
            "objects": objects,
            "bytes_written": written,
            "bytes_read": read,
            "written_per_byte_stored": written / stored,
        },
    )
    report.note(
        f"{place}: beside the snapshots {len(rounds)} rounds of compaction read {nbytes_text(read)} and wrote "
        f"{nbytes_text(written)} in {objects} objects: {written / stored:.2f} bytes for each byte that flushes stored; "
        f"a round took {Spread.of([s for s, _ in rounds]).median:.2f} s"
    )
