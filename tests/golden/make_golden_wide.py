"""Writes the golden stores with wide columns: one job, once with Arrow segments and once with Zarr segments.

    python -m tests.golden.make_golden_wide FOLDER CODEC      makes FOLDER and FOLDER.sha256

What a reader must return is the same for both, expected-wide.json beside the folder: made with the first, compared with
by the second. Like all golden stores they are written once and never again; a folder that is there is refused.

Owns: a small job of two lives in which wide columns come, go, change and are adopted.
Does not know: any reader, any encoding.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from recovery.ports import ObjectStore
from storage_backends.codecs import CodecName
from storage_backends.memory import MemoryStore
from tests.golden.make_golden import A1, EOS, INF, NAN, Life, as_text, expectation, files_of, write_store

TOP_IDS = np.arange(40, dtype=np.int32).reshape(8, 5) * 7919 % 151_643
TOP_LOGPROBS = np.resize(np.array([NAN, -INF, -0.0, 1e-45, -0.25, -1.5, 0.0], np.float32), 40).reshape(8, 5)
BITS = {
    "float16": np.array([0x7E00, 0x7C01, 0xFC00, 0x8000, 0x0001, 0x3C00], np.uint16),
    "float32": np.array([0x7FC00000, 0x7F800001, 0xFFC12345, 0xFF800000, 0x80000000, 1], np.uint32),
    "float64": np.array([0x7FF8000000000000, 0x7FF0000000000001, 0xFFF0000000000000, 1 << 63, 1, 0], np.uint64),
}


def every_type() -> dict[str, np.ndarray]:
    """Two tokens with a column of each type, at its limits."""
    columns: dict[str, np.ndarray] = {name: bits.view(name).reshape(2, 3) for name, bits in BITS.items()}
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        bounds = np.iinfo(name)
        columns[name] = np.array([bounds.min, bounds.max], name)
    columns["bool"] = np.array([[True], [False]])
    return columns


def golden_wide(store: ObjectStore, codec: CodecName) -> Life:
    first = _first_life(store, codec)
    life = Life(store, first, codec=codec)
    plain, every = ("p-1", 0), ("every type", 0)
    life.say(plain, [30, 31], version=A1, columns={"top_ids": TOP_IDS[:2], "top_logprobs": TOP_LOGPROBS[:2]})
    life.say(plain, [EOS], version=A1)
    life.end(plain, "stop", None)
    life.say(every, [32], version=A1, columns={"entropy": np.array([0.5], np.float32)})
    life.snapshot("final")
    life.close()
    return life


def _first_life(store: ObjectStore, codec: CodecName) -> Life:
    life = Life(store, codec=codec)
    plain, bare, every = life.open("p-1"), life.open("without"), life.open("every type")
    for at in range(0, 4, 2):  # two chunks that are joined
        columns = {"top_ids": TOP_IDS[at : at + 2], "top_logprobs": TOP_LOGPROBS[at : at + 2]}
        life.say(plain, [7 + at, 8 + at], logprobs=[-0.25, -0.5], columns=columns)
    life.say(bare, [5, 6, 7])
    life.say(every, [8, 9], columns=every_type())
    life.snapshot()
    life.say(plain, [11], columns={"top_logprobs": TOP_LOGPROBS[4:5]})  # top_ids was not captured
    life.say(plain, [12, 13], version=A1, columns={"top_ids": TOP_IDS[5:7, :2], "top_logprobs": TOP_LOGPROBS[5:7]})
    other_type = np.array([1 << 40], np.int64)
    life.say(every, [10], columns={"int32": other_type, "A.z_-9": np.array([[True, False]])})
    many = life.open("many", prompt=range(200, 210))
    for step in range(70):  # two batches, of which each has other columns
        life.say(many, [step], columns={"step": np.array([[step]], np.uint8)} if step < 5 or step > 65 else None)
    life.snapshot()
    life.say(bare, [20, 21])  # a segment without wide columns, and the snapshot's other ones with them
    life.snapshot("request")
    # The crash: one flush that no snapshot names.
    life.say(plain, [14], version=A1, columns={"top_ids": TOP_IDS[7:], "top_logprobs": TOP_LOGPROBS[7:]})
    life.flush()
    life.close()
    return life


def main(folder: Path, codec: Any) -> None:
    store = MemoryStore()
    life = golden_wide(store, codec)
    expected = (as_text(expectation(life, store, whole=None)) + "\n").encode()
    path = folder.parent / "expected-wide.json"
    if path.exists() and path.read_bytes() != expected:
        raise SystemExit(f"{path} says something else: both stores have to hold the same")
    write_store(folder, files_of(store))
    path.write_bytes(expected)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
