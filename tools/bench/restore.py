"""`bench restore`: how a restore grows with the number of calls, beside decoding the same bytes with pyarrow alone.

Owns: the numbers of calls.
Does not know: what is timed (store_restore.py says it, to the step).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench.corpus import load_corpus, model_logprobs
from bench.measuring import Spread, paired, ratios, settle
from bench.report import Law, Report, nbytes_text
from bench.store_restore import decode, fill, restored, same_work, with_inputs
from storage_backends import open_store

ABOUT = "seconds from opening a store to calls that can go on, for 1,000 to 100,000 calls, beside pyarrow alone"
PARTS = ("law",)
WAYS = ("restore", "with all inputs", "pyarrow", "pyarrow, one thread")
CALLS, CHUNKS = {1_000: 15, 10_000: 7, 100_000: 3}, (256, 256, 256, 232)
"""Rounds by calls; tokens of each of a call's chunks."""
CALLS_QUICK, CHUNKS_QUICK = {10: 1, 20: 1}, (16, 16)


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    rng = np.random.default_rng(report.seed)
    sizes, chunks = (CALLS_QUICK, CHUNKS_QUICK) if report.quick else (CALLS, CHUNKS)
    corpus = load_corpus(100_000 if report.quick else None)
    logprobs = model_logprobs(rng, 1 << (12 if report.quick else 20))
    settle()
    report.title(f"restore of calls of {sum(chunks):,} tokens, flushed in {len(chunks)} chunks")
    series: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="bench-restore-", dir=folder) as place:
        for calls, rounds in sizes.items():
            store = Path(place) / str(calls)
            fill(store, corpus, logprobs, calls, chunks, rng).close()
            keys = sorted(item.key for item in open_store(store).list("seg/"))
            same_work(restored(store), decode(store, keys, threads=True))
            ways: tuple[Callable[[], object], ...] = (
                partial(restored, store),
                partial(with_inputs, store),
                partial(decode, store, keys, threads=True),
                partial(decode, store, keys, threads=False),
            )
            wall, _ = paired(dict(zip(WAYS, ways, strict=True)), report.rounds or rounds, rng)
            seconds = {way: Spread.of(times) for way, times in wall.items()}
            for way, spread in seconds.items():
                series[way].append((calls, spread.median))
            nbytes = sum(item.nbytes for item in open_store(store).list("seg/"))
            over = [ratios(wall[way], wall["pyarrow"]) for way in WAYS[:2]]
            report.figure(
                "calls",
                f"{calls}",
                {
                    "tokens": calls * sum(chunks),
                    "bytes": nbytes,
                    "seconds": {way: spread.as_json() for way, spread in seconds.items()},
                    "tokens_per_second": calls * sum(chunks) / seconds["restore"].median,
                    "over_pyarrow": over[0].as_json(),
                    "with_inputs_over_pyarrow": over[1].as_json(),
                },
            )
            rows.append(
                [
                    f"{calls:,}",
                    nbytes_text(nbytes),
                    *(f"{seconds[way].median:.3f}" for way in WAYS),
                    f"{calls * sum(chunks) / seconds['restore'].median / 1e6:.1f}",
                    *(f"{each.median:.2f} ({each.low:.2f} to {each.high:.2f})" for each in over),
                ]
            )
            shutil.rmtree(store)
    report.table(("calls", "stored", *WAYS, "Mtokens/s", "over pyarrow", "with all inputs"), rows)
    report.law(Law("seconds of a restore", "calls", series, log=True))
