"""How long a restore takes, beside decoding the same bytes with pyarrow alone.

Owns: a store of many long calls as flushes leave it and as compaction does, the restore, the baseline.
Does not know: where the tokens are from.

Restore: open_store, find the newest snapshot, read and check its ledger, read and check every segment, find the records
of every call in them and check that they are those of the ledger, plan every call. Nothing is read after it.
With inputs: the same, and of every call the transcript is put together, and its prompt and tokens are joined to the
engine's first input, an array of its own.
Baseline: read the files of the same segments, open each with pyarrow.ipc.open_file and read all batches, which
decompresses every column; nothing is checked, no call is put together. It keeps the batches until it is done, as the
restore keeps its transcripts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.corpus import Corpus
from bench.jobs import SAMPLING, STOP, Job, newest
from bench.measuring import Spread, paired, ratios, timed
from bench.report import Report, ms_text, nbytes_text
from recovery import resume
from recovery.compaction import Limits
from recovery.log_reading import find_tail
from recovery.model import Float32Array, Int32Array
from recovery.restored import RestoredCall, planned
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import MixedSegmentCodec

PROMPT = 100


def measure(
    report: Report,
    corpus: Corpus,
    logprobs: Float32Array,
    *,
    calls: int,
    chunks: tuple[int, ...],
    rounds: int,
    folder: Path,
    rng: np.random.Generator,
) -> None:
    report.title(f"restore of {calls:,} calls of {sum(chunks):,} tokens")
    job = fill(folder, corpus, logprobs, calls, chunks, rng)
    rows: list[list[object]] = []
    for name in ("as flushed", "compacted"):
        if name == "compacted":
            _compact(job)
        rows.append(_measure_one(report, name, folder, job, rounds, rng))
    job.close()
    report.table(
        ("chunks", "per call", "segments", "stored", "restore ms", "with inputs", "pyarrow ms", "1 thread ms",
         "over pyarrow", "over the faster", "with inputs", "processor time"),
        rows,
    )  # fmt: skip
    seconds, _ = timed(lambda: Job(open_store(folder)).close())
    report.figure("restore", "with claim and publication, seconds", seconds)
    report.note(
        f"a whole restart, with the claim and the snapshot that is published before any dispatch: {seconds:.2f} s"
    )


def fill(
    folder: Path,
    corpus: Corpus,
    logprobs: Float32Array,
    calls: int,
    chunks: tuple[int, ...],
    rng: np.random.Generator,
) -> Job:
    """All calls live at once, flushed and snapshotted after each stretch of tokens."""
    job = Job(open_store(folder, create=True), compact=Limits(pieces=2))
    job.open(corpus.spans(rng, calls, PROMPT))
    texts = corpus.spans(rng, calls, sum(chunks))
    at = rng.integers(0, len(logprobs) - sum(chunks), calls).tolist()
    first = 0
    for length in chunks:
        for number, ids in enumerate(texts):
            begin = at[number] + first
            job.append(number, ids[first : first + length], logprobs[begin : begin + length])
        job.flush()
        job.snapshot()
        first += length
    job.gives_back()
    return job


def _compact(job: Job) -> None:
    """Rounds and snapshots until nothing is left to do."""
    while job.compact_now() is not None:
        job.snapshot()
    assert job.compactor is not None
    counters = job.compactor.counters
    if counters.failures or not counters.rounds:
        raise RuntimeError(f"compaction failed, or never ran: {counters.error}")
    job.gives_back()


def _measure_one(
    report: Report, name: str, folder: Path, job: Job, rounds: int, rng: np.random.Generator
) -> list[object]:
    ledger = job.publication.ledger
    keys = sorted(ledger.segments_in_use())
    counts = ledger.counts()
    ways: dict[str, Callable[[], object]] = {
        "restore": lambda: restored(folder),
        "with inputs": lambda: with_inputs(folder),
        "pyarrow": lambda: decode(folder, keys, threads=True),
        "pyarrow, one thread": lambda: decode(folder, keys, threads=False),
    }
    same_work(restored(folder), decode(folder, keys, threads=True))
    wall, processor = paired(ways, rounds, rng)
    faster = [min(pair) for pair in zip(wall["pyarrow"], wall["pyarrow, one thread"], strict=True)]
    over_default, over_faster = ratios(wall["restore"], wall["pyarrow"]), ratios(wall["restore"], faster)
    inputs = ratios(wall["with inputs"], wall["pyarrow"])
    busy = ratios(processor["restore"], processor["pyarrow, one thread"])
    report.figure(
        "restore",
        name,
        {
            "chunks_per_call": counts.chunks / counts.calls,
            "segments": counts.segments,
            "bytes": counts.nbytes,
            "seconds": {way: Spread.of(times).as_json() for way, times in wall.items()},
            "over_pyarrow": over_default.as_json(),
            "over_the_faster_pyarrow": over_faster.as_json(),
            "with_inputs_over_pyarrow": inputs.as_json(),
            "processor_seconds_over_one_thread": busy.as_json(),
        },
    )
    if not report.quick:
        report.bound(f"restore over pyarrow, {name}", over_default.median, 2.0)
        report.bound(f"restore with all first engine inputs over pyarrow, {name}", inputs.median, 2.0)
        report.bound(f"restore over the faster of pyarrow with and without threads, {name}", over_faster.median, 2.0)
    medians = [ms_text(Spread.of(wall[way]).median) for way in ways]
    spreads = [
        f"{each.median:.2f} ({each.low:.2f} to {each.high:.2f})" for each in (over_default, over_faster, inputs, busy)
    ]
    return [
        name,
        f"{counts.chunks / counts.calls:.1f}",
        counts.segments,
        nbytes_text(counts.nbytes),
        *medians,
        *spreads,
    ]


def restored(folder: Path) -> list[RestoredCall]:
    """What a restart does before it publishes anything: every open call in memory, checked and planned."""
    store = open_store(folder)
    chosen = newest(store, MixedSegmentCodec(), ArrowLedgerCodec(), find_tail(store))
    calls = planned(chosen.transcripts, STOP)
    assert calls and all(isinstance(call.plan, resume.Resume) for call in calls), SAMPLING
    return calls


def with_inputs(folder: Path) -> list[tuple[RestoredCall, Int32Array]]:
    """The same, and the first engine input of every call made: its prompt and its tokens, in an array of its own."""
    made = []
    for call in restored(folder):
        transcript = call.transcript
        made.append((call, np.concatenate([transcript.request.prompt_token_ids, transcript.token_ids])))
    return made


def same_work(calls: list[RestoredCall], batches: list[pa.RecordBatch]) -> None:
    """Raises RuntimeError unless the baseline decoded at least every token that the restore brought back."""
    of_restore = sum(call.n_tokens for call in calls)
    of_baseline = sum(len(batch.column("token_ids").flatten()) for batch in batches)
    if not 0 < of_restore <= of_baseline:
        raise RuntimeError(f"the restore brought back {of_restore} tokens, pyarrow alone decoded {of_baseline}")


def decode(folder: Path, keys: list[str], *, threads: bool) -> list[pa.RecordBatch]:
    options = pa.ipc.IpcReadOptions(use_threads=threads)
    batches = []
    for key in keys:
        reader = pa.ipc.open_file(pa.BufferReader((folder / key).read_bytes()), options=options)
        batches += [reader.get_batch(number) for number in range(reader.num_record_batches)]
    return batches
