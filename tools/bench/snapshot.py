"""`bench snapshot`: what snapshot k costs for k up to 500, against a full copy of the same state at the same k.

Owns: the run of snapshots, the full copies beside it, and the slopes of both.
Does not know: how a copy is encoded (full_copies.py); what 200 snapshots cost more closely (store_cost.py).

Every snapshot adds as many tokens to each call. This project's way is run through, with compaction beside it; a full
copy does not depend on what was saved before, so that it is made at COPIES moments only, right after our snapshot of
the same state. Slopes are those of least squares over the total of tokens: what a snapshot costs more for each token
that was saved earlier. A way that grows by nothing has none.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.corpus import Corpus, load_corpus, model_logprobs
from bench.full_copies import BYTES, FOLDERS, Calls, check
from bench.jobs import Job
from bench.measuring import settle, timed
from bench.report import Law, Report, ms_text, nbytes_text
from recovery.compaction import Limits
from recovery.model import Float32Array
from recovery.ports import ObjectStore
from storage_backends import open_store
from storage_backends.testing import servers

ABOUT = "cost of snapshot k up to 500 against full copies of the same state, on disk and in a bucket"
PARTS = ("local", "s3")
OURS = "this project"
PROMPT, SHARE_MAX = 100, 0.01


@dataclass(frozen=True, slots=True)
class Size:
    """Of one run: full copies are made at `copies` snapshots."""

    calls: int
    snapshots: int
    tokens: int
    copies: int
    characters: int | None


FULL = Size(calls=200, snapshots=500, tokens=64, copies=8, characters=None)
QUICK = Size(calls=8, snapshots=12, tokens=16, copies=3, characters=100_000)


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    size = QUICK if report.quick else FULL
    rng = np.random.default_rng(report.seed)
    corpus, logprobs = load_corpus(size.characters), model_logprobs(rng, 1 << (12 if report.quick else 20))
    settle()
    with tempfile.TemporaryDirectory(prefix="bench-snapshot-", dir=folder) as name:
        root = Path(name)
        if "local" in parts:
            store = open_store(root / "ours", create=True)
            _Run(report, "local disk", size, corpus, logprobs, rng).go(store, root / "copies", store, folders=True)
        if "s3" in parts:
            with _bucket(root / "seaweedfs") as opened:
                ours, copies = opened("ours"), opened("copies")
                _Run(report, "S3 (SeaweedFS)", size, corpus, logprobs, rng).go(ours, root, copies, folders=False)


@contextmanager
def _bucket(folder: Path) -> Iterator[Callable[[str], ObjectStore]]:
    folder.mkdir()
    server = servers.start_seaweedfs(folder)
    try:
        server.make_bucket(servers.BUCKET)
        options = {"endpoint_url": server.url, "key": servers.KEY, "secret": servers.SECRET, "region": servers.REGION}
        yield lambda name: open_store(f"s3://{servers.BUCKET}/{name}", create=True, **options)
    finally:
        server.stop()


class _Run:
    """All ways at one place."""

    def __init__(
        self, report: Report, place: str, size: Size, corpus: Corpus, logprobs: Float32Array, rng: np.random.Generator
    ) -> None:
        self._report, self._place, self._size = report, place, size
        self._corpus, self._logprobs, self._rng = corpus, logprobs, rng
        self._points: dict[str, list[tuple[int, int, float, int]]] = {}
        """By way: total tokens, bytes, seconds, objects of each snapshot."""

    def go(self, ours: ObjectStore, folder: Path, copies: ObjectStore, *, folders: bool) -> None:
        size = self._size
        self._report.title(
            f"{size.snapshots} snapshots of {size.calls} calls, {size.tokens} new tokens each, {self._place}; "
            f"full copies at {size.copies} of them"
        )
        at = set(np.linspace(2, size.snapshots, size.copies).astype(int).tolist())
        limits = Limits(pieces=3) if self._report.quick else Limits()  # few snapshots leave few pieces
        job = Job(ours, n_workers=2, compact=limits)
        job.open(self._corpus.spans(self._rng, size.calls, PROMPT))
        few = [(np.arange(9, dtype=np.int32), np.zeros(9, np.float32))]
        self._copy(few, 0, copies, folder, 0, folders=folders)  # a library's first time is not counted
        self._points.clear()
        whole: Calls = [(np.empty(0, np.int32), np.empty(0, np.float32))] * size.calls
        compacted = 0
        for k in range(1, size.snapshots + 1):
            whole = self._decode(job, whole)
            taken = job.snapshot()
            total = k * size.calls * size.tokens
            if k > 1:  # the first one opens all calls
                point = (total, taken.traffic.nbytes, taken.seconds, taken.traffic.n_objects)
                self._points.setdefault(OURS, []).append(point)
            if (round_ := job.compact_now()) is not None:
                compacted += round_[1].nbytes
            if k in at:
                self._copy(whole, total, copies, folder, k, folders=folders)
        job.gives_back()
        job.close()
        if not compacted:
            raise RuntimeError("nothing was compacted beside the snapshots")
        self._say(compacted)

    def _decode(self, job: Job, whole: Calls) -> Calls:
        size, grown = self._size, []
        at = self._rng.integers(0, len(self._logprobs) - size.tokens, size.calls).tolist()
        for number, ids in enumerate(self._corpus.spans(self._rng, size.calls, size.tokens)):
            logprobs = self._logprobs[at[number] : at[number] + size.tokens]
            job.append(number, ids, logprobs)
            grown.append((np.concatenate([whole[number][0], ids]), np.concatenate([whole[number][1], logprobs])))
        return grown

    def _copy(self, whole: Calls, total: int, store: ObjectStore, folder: Path, k: int, *, folders: bool) -> None:
        for name, (encode, decode) in BYTES.items():
            key = f"copy/{name.split()[0].replace('.', '-').lower()}-{k:06d}"
            seconds, _ = timed(lambda key=key, encode=encode: store.put_new(key, encode(whole)))  # type: ignore[misc]
            data = store.get(key)
            check(name, decode(data), whole)
            self._points.setdefault(name, []).append((total, len(data), seconds, 1))
            store.delete(key)
        for name, (save, load) in FOLDERS.items() if folders else ():
            place = folder / name.split()[0]
            place.mkdir(parents=True)
            seconds, _ = timed(lambda place=place, save=save: save(whole, place))  # type: ignore[misc]
            check(name, load(place, whole), whole)
            files = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
            self._points.setdefault(name, []).append((total, sum(files), seconds, len(files)))
            shutil.rmtree(place)

    def _say(self, compacted: int) -> None:
        report, place, size = self._report, self._place, self._size
        rows: list[list[object]] = []
        slopes: dict[str, tuple[float, float]] = {}
        for name, points in self._points.items():
            totals, nbytes, seconds, objects = (np.array(column, float) for column in zip(*points, strict=True))
            slopes[name] = (_slope(totals, nbytes), _slope(totals, seconds))
            figure = {
                "bytes": [points[0][1], points[-1][1]],
                "seconds": [points[0][2], points[-1][2]],
                "objects": [points[0][3], points[-1][3]],
                "slope_bytes_per_token": slopes[name][0],
                "slope_seconds_per_token": slopes[name][1],
                "all": points,
            }
            report.figure(place, name, figure)
            last = np.median(seconds[-5:]) if name == OURS else seconds[-1]
            first = np.median(seconds[:5]) if name == OURS else seconds[0]
            rows.append(
                [name, nbytes_text(nbytes[0]), nbytes_text(nbytes[-1]), ms_text(float(first)), ms_text(float(last)),
                 f"{objects[-1]:.0f}", f"{slopes[name][0]:.4f}", f"{1e9 * slopes[name][1]:.2f}"]
            )  # fmt: skip
        report.table(
            ("", "bytes, snapshot 2", f"snapshot {size.snapshots}", "ms, first", "ms, last", "objects",
             "bytes for each earlier token", "ns for each earlier token"),
            rows,
        )  # fmt: skip
        report.figure(place, "compaction, bytes written beside the snapshots", compacted)
        report.note(f"compaction wrote {nbytes_text(compacted)} beside the snapshots")
        if not report.quick:
            cheapest = [min(slope[what] for name, slope in slopes.items() if name != OURS) for what in (0, 1)]
            for what, unit in enumerate(("bytes", "time")):
                label = f"slope of {unit} over that of the cheapest full copy, {place}"
                share = max(0.0, slopes[OURS][what]) / cheapest[what] if cheapest[what] > 0 else float("inf")
                report.bound(label, share, SHARE_MAX)
        per_snapshot = size.calls * size.tokens
        for title, column, scale in (("MB of snapshot k", 1, 1e6), ("s of snapshot k", 2, 1.0)):
            series = {
                way: [(float(point[0] // per_snapshot), point[column] / scale) for point in points]
                for way, points in self._points.items()
            }
            report.law(Law(f"{title}, {place}", "k", series, log=True))


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.polyfit(x, y, 1)[0])
