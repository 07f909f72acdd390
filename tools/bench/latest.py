"""`bench latest`: what `snapshot-inspect latest` costs on a long log of a large job in a bucket.

Owns: a store with a thousand log entries and a hundred thousand calls, and the time and bytes of one look at it.
Does not know: how the inspector finds its answer.

Time is that of the verb in a process that has everything imported; bytes are bodies, and 230 of XML for each name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.jobs import Job
from bench.measuring import Spread
from bench.report import Report, nbytes_text
from recovery.log_reading import find_tail
from recovery.ports import Listed
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from snapshot_inspect import cli, places
from storage_backends import open_store
from storage_backends.memory import MemoryStore
from storage_backends.testing import servers
from storage_backends.testing.faults import Wrapped
from vllm_hooks.opening import SystemClock, SystemEntropy

ABOUT = "what `snapshot-inspect latest` costs on a long log in a bucket"
PARTS = ("latest",)
ENTRIES, CALLS, LOOKS = 1000, 100_000, 7
NAME_NBYTES, ANSWER_NBYTES = 230, 500


class Answers(Wrapped):
    """Counts what is sent for each answer."""

    nbytes = 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self.inner.get(key, start, end)
        self.nbytes += ANSWER_NBYTES + len(data)
        return data

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        found = self.inner.list(prefix, after)
        self.nbytes += ANSWER_NBYTES + sum(NAME_NBYTES + len(item.key) for item in found)
        return found


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    """The store is in memory first, and then in a bucket of moto's."""
    entries, calls = (20, 50) if report.quick else (ENTRIES, CALLS)
    report.title(f"snapshot-inspect latest: {entries:,} log entries, {calls:,} calls, in a bucket (moto)")
    made = _made(entries, calls)
    server = servers.start_moto()
    before = places.open_store
    try:
        server.make_bucket(servers.BUCKET)
        options = {"endpoint_url": server.url, "key": servers.KEY, "secret": servers.SECRET, "region": servers.REGION}
        seen = Answers(open_store(f"s3://{servers.BUCKET}/latest", create=True, **options))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda item: seen.put_new(item.key, made.get(item.key)), made.list("")))
        places.open_store = lambda address, **more: seen
        seconds = [_look(calls) for _ in range(2 if report.quick else report.rounds or LOOKS)]
        seen.nbytes = 0
        _look(calls)
    finally:
        places.open_store = before
        server.stop()
    took = Spread.of(seconds[1:])  # the first one connects
    report.figure("latest", "seconds", took.as_json())
    report.figure("latest", "bytes", seen.nbytes)
    report.note(f"{took.median:.2f} s ({took.low:.2f} to {took.high:.2f}), {nbytes_text(seen.nbytes)}")
    report.bound("seconds of latest", took.median, 2)
    report.bound("bytes of latest", seen.nbytes, 1_000_000)


def _made(entries: int, calls: int) -> MemoryStore:
    """Claims of many lives, and one that has all the calls."""
    store, entropy = MemoryStore(), SystemEntropy()
    make_root(store, entropy)
    for _ in range(entries - 8):
        SlotLog(store, SystemClock(), entropy, "bench").claim()
    job = Job(store)
    try:
        job.open([np.asarray([3, 4], np.int32)] * calls)
        for number in range(calls):
            job.append(number, np.asarray([5], np.int32), np.zeros(1, np.float32))
        while find_tail(store, trust_hint=False) < entries:
            job.snapshot()
            job.append(0, np.asarray([6], np.int32), np.zeros(1, np.float32))
        job.flush()
    finally:
        job.close()
    return store


def _look(calls: int) -> float:
    said, began = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(said):
        code = cli.main(["latest", "s3://bench/latest", "--json"])
    took = time.perf_counter() - began
    document = json.loads(said.getvalue())
    assert code == os.EX_OK and document["counts"]["calls"] == calls and document["unpublished"]["segments"] > 0
    return took
