"""Saving half-finished calls as it is done today, beside this project: bytes, objects and seconds in one run.

Owns: the other ways, each made as durable as a file can be made, and the run that does all of them in turn.
Does not know: where the tokens are from.

Every way saves the same calls at the same moments: each snapshot adds as many tokens to each call. Whole-state ways
write everything again each time (a temporary file, fsync, rename, fsync of the folder). "object per chunk" writes the
new chunk of each call as one file. "Zarr array per call" appends to two arrays per call; zarr-python does not sync, so
that it is the only way here that a power cut may undo. A restore reads everything back into arrays, which are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from bench import full_copies
from bench.corpus import Corpus
from bench.full_copies import Calls
from bench.jobs import Job, newest
from bench.measuring import Spread, timed
from bench.report import Report, ms_text, nbytes_text
from recovery.log_reading import find_tail
from recovery.model import Float32Array, Int32Array
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec

PROMPT = 100


class Way(Protocol):
    """One way to save calls in a folder."""

    def save(self, new: Calls, whole: Calls, k: int) -> None:
        """Snapshot k: `new` came since the last one, `whole` is everything."""

    def restore(self) -> Calls: ...


class ThisProject:
    """A job in the folder."""

    def __init__(self, folder: Path, prompts: list[Int32Array], write: CodecName) -> None:
        self._folder = folder
        self._job = Job(open_store(folder, create=True), write=write)
        self._job.open(prompts)

    def save(self, new: Calls, whole: Calls, k: int) -> None:
        for number, (ids, lps) in enumerate(new):
            self._job.append(number, ids, lps)
        self._job.snapshot()

    def restore(self) -> Calls:
        store = open_store(self._folder)
        chosen = newest(store, MixedSegmentCodec(), ArrowLedgerCodec(), find_tail(store))
        found = {each.request.rollout: each for each in chosen.transcripts.values()}
        return [(found[name].token_ids, found[name].logprobs) for name in sorted(found)]

    def close(self) -> None:
        self._job.close()


class WholeState:
    """Everything in one file, written again each time."""

    def __init__(self, folder: Path, write: Callable[[Calls], bytes], read: Callable[[bytes], Calls]) -> None:
        self._path = folder / "state"
        self._write = write
        self._read = read

    def save(self, new: Calls, whole: Calls, k: int) -> None:
        replace_durably(self._path, self._write(whole))

    def restore(self) -> Calls:
        return self._read(self._path.read_bytes())


class ObjectPerChunk:
    """The new tokens of each call as a file of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, new: Calls, whole: Calls, k: int) -> None:
        for number, (ids, lps) in enumerate(new):
            replace_durably(self._folder / f"{number:06d}-{k:06d}", ids.tobytes() + lps.tobytes())

    def restore(self) -> Calls:
        parts: dict[str, list[bytes]] = {}
        for path in sorted(self._folder.iterdir()):
            parts.setdefault(path.name[:6], []).append(path.read_bytes())
        return [
            tuple(  # type: ignore[misc]
                np.concatenate(
                    [np.frombuffer(data, dtype)[half * len(data) // 8 :][: len(data) // 8] for data in chunks]
                )
                for half, dtype in ((0, np.int32), (1, np.float32))
            )
            for chunks in parts.values()
        ]


class ZarrArrayPerCall:
    """Two arrays per call that grow."""

    def __init__(self, folder: Path, n_calls: int) -> None:
        import zarr

        group = zarr.open_group(str(folder), mode="w")
        self._folder = folder
        self._arrays = [
            tuple(
                group.create_array(f"{number:06d}-{name}", shape=(0,), chunks=(4096,), dtype=dtype)
                for name, dtype in (("ids", "int32"), ("lps", "float32"))
            )
            for number in range(n_calls)
        ]

    def save(self, new: Calls, whole: Calls, k: int) -> None:
        for arrays, call in zip(self._arrays, new, strict=True):
            for array, values in zip(arrays, call, strict=True):
                array.append(values)

    def restore(self) -> Calls:
        import zarr

        group = zarr.open_group(str(self._folder), mode="r")
        numbers = range(len(self._arrays))
        return [tuple(np.asarray(group[f"{n:06d}-{name}"][:]) for name in ("ids", "lps")) for n in numbers]  # type: ignore[misc, index]


def replace_durably(path: Path, data: bytes) -> None:
    """A whole file or the one before, also after a power cut."""
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, data) if len(data) < 1 << 20 else _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def measure(
    report: Report,
    corpus: Corpus,
    logprobs: Float32Array,
    *,
    calls: int,
    tokens: int,
    snapshots: int,
    restores: int,
    folder: Path,
    rng: np.random.Generator,
) -> None:
    report.title(f"beside today's ways: {calls} calls, {tokens} new tokens each, {snapshots} snapshots, local disk")
    prompts = corpus.spans(rng, calls, PROMPT)
    ways: dict[str, Way] = {
        "this project, Arrow": ThisProject(_made(folder / "arrow"), prompts, "arrow"),
        "this project, Zarr": ThisProject(_made(folder / "zarr"), prompts, "zarr"),
        "pickle of everything": WholeState(_made(folder / "pickle"), *full_copies.BYTES["pickle"]),
        "torch.save of everything": WholeState(_made(folder / "torch"), *full_copies.BYTES["torch.save"]),
        "JSON lines of everything": WholeState(_made(folder / "json"), *full_copies.BYTES["JSON lines"]),
        "object per call and chunk": ObjectPerChunk(_made(folder / "objects")),
        "Zarr array per call": ZarrArrayPerCall(_made(folder / "arrays"), calls),
    }
    places = dict(zip(ways, ("arrow", "zarr", "pickle", "torch", "json", "objects", "arrays"), strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    written: dict[str, list[int]] = {name: [] for name in ways}
    whole: Calls = [(np.empty(0, np.int32), np.empty(0, np.float32))] * calls
    for k in range(1, snapshots + 1):
        at = rng.integers(0, len(logprobs) - tokens, calls).tolist()
        texts = corpus.spans(rng, calls, tokens)
        new = [(ids, logprobs[first : first + tokens]) for ids, first in zip(texts, at, strict=True)]
        whole = [
            (np.concatenate([a, ids]), np.concatenate([b, lps])) for (a, b), (ids, lps) in zip(whole, new, strict=True)
        ]
        for number in rng.permutation(len(ways)).tolist():
            name = list(ways)[number]
            before = _files(folder / places[name])
            took, _ = timed(lambda name=name, new=new, whole=whole, k=k: ways[name].save(new, whole, k))  # type: ignore[misc]
            seconds[name].append(took)
            written[name].append(_changed(before, _files(folder / places[name])))
    rows: list[list[object]] = []
    for name, way in ways.items():
        times = []
        for _ in range(restores):
            took, _ = timed(way.restore)
            times.append(took)
        full_copies.check(name, way.restore(), whole)
        files = _files(folder / places[name])
        stored = sum(size for size, _ in files.values())
        half = snapshots // 2
        first, last = Spread.of(seconds[name][1 : 1 + half]), Spread.of(seconds[name][-half:])
        figure = {
            "snapshot_2_bytes": written[name][1],
            "snapshot_last_bytes": written[name][-1],
            "snapshot_seconds_first_half": first.as_json(),
            "snapshot_seconds_last_half": last.as_json(),
            "stored_bytes": stored,
            "objects": len(files),
            "restore_seconds": Spread.of(times).as_json(),
        }
        report.figure("ways", name, figure)
        rows.append(
            [name, nbytes_text(written[name][1]), nbytes_text(written[name][-1]), ms_text(first.median),
             ms_text(last.median), f"{len(files):,}", nbytes_text(stored), ms_text(Spread.of(times).median)]
        )  # fmt: skip
        if isinstance(way, ThisProject):
            way.close()
    report.table(
        ("way", "bytes, snapshot 2", f"snapshot {snapshots}", "ms, first half", "ms, last half", "objects", "stored",
         "restore ms"),
        rows,
    )  # fmt: skip


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            status = path.stat()
            found[str(path)] = (status.st_size, status.st_mtime_ns)
    return found


def _changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> int:
    """Bytes of the files that were made or written anew: what had to go to the disk."""
    return sum(status[0] for path, status in after.items() if before.get(path) != status)
