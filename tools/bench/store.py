"""`bench store`: the store's cost, size, restore speed, and today's ways beside it, in one run.

Owns: which parts are run, in which sizes, where their stores lie, and the servers for those on S3.
Does not know: how a part measures.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import store_cost, store_objects, store_restore, store_sizes, store_ways
from bench.corpus import Corpus, load_corpus, model_logprobs
from bench.measuring import settle
from bench.report import Report
from recovery.ports import ObjectStore
from storage_backends import open_store
from storage_backends.testing import servers

ABOUT = "cost, size and restore speed of the store, and today's ways beside it"
PARTS = ("cost", "size", "restore", "ways", "objects")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    characters: int | None
    logprobs: int
    cost: store_cost.Size
    cost_on_s3: store_cost.Size
    size_tokens: int
    restore_calls: int
    restore_chunks: tuple[int, ...]
    restore_rounds: int
    way_calls: int
    way_snapshots: int
    way_restores: int
    object_calls: int
    object_chunks: int


FULL = Sizes(
    characters=None,
    logprobs=1 << 20,
    cost=store_cost.Size(calls=1000, snapshots=200, tokens=64, window=10),
    cost_on_s3=store_cost.Size(calls=1000, snapshots=200, tokens=64, window=10),
    size_tokens=1 << 19,
    restore_calls=10_000,
    restore_chunks=(256, 256, 256, 232),
    restore_rounds=7,
    way_calls=256,
    way_snapshots=16,
    way_restores=3,
    object_calls=2000,
    object_chunks=50,
)
QUICK = Sizes(
    characters=150_000,
    logprobs=1 << 12,
    cost=store_cost.Size(calls=20, snapshots=8, tokens=16, window=2),
    cost_on_s3=store_cost.Size(calls=20, snapshots=4, tokens=16, window=1),
    size_tokens=1 << 13,
    restore_calls=20,
    restore_chunks=(32, 32, 32, 32),
    restore_rounds=1,
    way_calls=4,
    way_snapshots=3,
    way_restores=1,
    object_calls=20,
    object_chunks=5,
)


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    """Do these parts, with stores in `folder` (default: a temporary one)."""
    sizes = QUICK if report.quick else FULL
    rng = np.random.default_rng(report.seed)
    corpus = load_corpus(sizes.characters)
    logprobs = model_logprobs(rng, sizes.logprobs)
    _introduce(report, corpus, logprobs)
    for library in ("torch", "zarr", "pyarrow.parquet", "s3fs"):
        importlib.import_module(library)
    settle()
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder) as place:
        root = Path(place)
        if "cost" in parts:
            _cost(report, corpus, logprobs, sizes, root, rng)
        if "size" in parts:
            _size(report, corpus, logprobs, sizes)
        if "restore" in parts:
            store_restore.measure(
                report, corpus, logprobs, calls=sizes.restore_calls, chunks=sizes.restore_chunks,
                rounds=report.rounds or sizes.restore_rounds, folder=root / "restore", rng=rng,
            )  # fmt: skip
        if "ways" in parts:
            store_ways.measure(
                report, corpus, logprobs, calls=sizes.way_calls, tokens=sizes.cost.tokens,
                snapshots=sizes.way_snapshots, restores=sizes.way_restores, folder=root / "ways", rng=rng,
            )  # fmt: skip
        if "objects" in parts:
            store_objects.measure(
                report, corpus, logprobs, calls=sizes.object_calls, chunks=sizes.object_chunks,
                store=open_store(root / "objects", create=True), rng=rng,
            )  # fmt: skip


def _introduce(report: Report, corpus: Corpus, logprobs: np.ndarray) -> None:
    shares = ((logprobs == 0).mean(), (logprobs > -0.01).mean(), float(logprobs.mean()))
    report.figure("data", "tokens", len(corpus))
    report.figure("data", "distinct_tokens", len(np.unique(corpus.token_ids)))
    report.figure("data", "sha256_of_ids", corpus.sha256)
    report.figure("data", "logprobs_zero_nearly_zero_mean", [float(value) for value in shares])
    machine = report.machine
    report.note(f"{machine['cores']} cores, {machine['processor']}; load before: {machine['load_before']:.1f}")
    report.note(
        f"seed {report.seed}; {len(corpus):,} tokens of {corpus.n_characters:,} characters of natural text on this "
        f"machine; logprobs modelled: {shares[0]:.0%} are 0, {shares[1]:.0%} above -0.01, mean {shares[2]:.2f}"
    )


def _cost(
    report: Report, corpus: Corpus, logprobs: np.ndarray, sizes: Sizes, root: Path, rng: np.random.Generator
) -> None:
    local: dict[str, Callable[[], ObjectStore]] = {
        "local": lambda: open_store(root / "cost", create=True),
        "local, compacted": lambda: open_store(root / "cost-compacted", create=True),
    }
    store_cost.measure(report, corpus, logprobs, sizes.cost, local, rng)
    with _bucket() as open_bucket:
        store_cost.measure(report, corpus, logprobs, sizes.cost_on_s3, {"S3 (moto)": open_bucket}, rng)


@contextmanager
def _bucket() -> Iterator[Callable[[], ObjectStore]]:
    server = servers.start_moto()
    try:
        server.make_bucket(servers.BUCKET)
        options = {"endpoint_url": server.url, "key": servers.KEY, "secret": servers.SECRET, "region": servers.REGION}
        yield lambda: open_store(f"s3://{servers.BUCKET}/cost", create=True, **options)
    finally:
        server.stop()


def _size(report: Report, corpus: Corpus, logprobs: np.ndarray, sizes: Sizes) -> None:
    n = min(sizes.size_tokens, len(corpus), len(logprobs))
    what = "natural text, modelled logprobs"
    store_sizes.measure(report, corpus.token_ids[:n], logprobs[:n], (64, 256, 1024), what, bounded=256)
