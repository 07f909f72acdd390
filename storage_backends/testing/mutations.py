"""Mangled bytes for decoders, tried in a process of their own so that an abort is seen as one.

Owns: seeded mutations of a sample, and the verdict on what a codec did with each.
Does not know: the encoding.

Invariants:
1. The same seed gives the same mutations.
2. A decoder may return records or raise Damaged (or a kind of it) or FormatNotUnderstood. Anything else, a crash or
   more than MEMORY_BYTES_MAX of memory is a failure; the mutation's number is printed before it is tried.

Usage: python -m storage_backends.testing.mutations MODULE:CODEC SAMPLE [--records N] [--wide T] [--seed S] [--count C]
With --records the sample is one batch of N records, with wide columns of the types T, and `decode_batch` is tried; else
`decode`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.model import BatchInfo, SegmentInfo
from storage_backends.sums import crc32c

MEMORY_BYTES_MAX = 6 << 30
_EXTREMES = (0, 1, -1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63)


def mutations(sample: bytes, seed: int, count: int) -> Iterator[bytes]:
    """`count` mangled forms of `sample`."""
    for number in range(count):
        yield _mutation(sample, random.Random(f"{seed}/{number}"))


def _mutation(sample: bytes, rng: random.Random) -> bytes:
    data = bytearray(sample)
    at = rng.randrange(len(data))
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 4:
            del data[at:]
        case 5:
            width = rng.choice((8, 64, 512))
            data[at : at + width] = bytes(len(data[at : at + width]))
        case 6 | 7:
            width = rng.choice((4, 8))
            at -= at % 4
            value = rng.choice(_EXTREMES) & ((1 << 8 * width) - 1)
            data[at : at + width] = value.to_bytes(width, "little")[: len(data[at : at + width])]
        case 8:
            del data[at : at + rng.choice((1, 8, 64))]
        case _:
            data[at:at] = data[at : at + rng.choice((1, 8, 64))]
    return bytes(data)


def verdict(decode: Callable[[bytes], Any], data: bytes) -> str:
    """What became of it: "decoded", or the name of the error; other errors are let through."""
    try:
        decode(data)
    except (Damaged, FormatNotUnderstood) as error:
        return type(error).__name__
    return "decoded"


def try_in_process(
    codec: str, sample: Path, *, records: int = 0, wide: Sequence[str] = (), seed: int, count: int
) -> dict[str, int]:
    """Run this module over `sample`. Returns how often each verdict came; AssertionError if the process failed."""
    options = {"records": records, "wide": ",".join(wide), "seed": seed, "count": count}
    command = [sys.executable, "-m", __name__, codec, str(sample)]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"exit {done.returncode} at mutation {lines[-1:]}: {done.stderr[-4000:]}"
    tally: dict[str, int] = json.loads(lines[-1])
    return tally


def _decoder(name: str, records: int, wide: tuple[str, ...]) -> Callable[[bytes], Any]:
    module, _, attribute = name.partition(":")
    codec = getattr(importlib.import_module(module), attribute)()
    if records:

        def decode_one(data: bytes) -> Any:
            batch = BatchInfo(0, len(data), crc32c(data), records)
            info = SegmentInfo(
                key="seg/mangled.arrow", nbytes=len(data), crc32c=batch.crc32c, batches=(batch,), wide=wide
            )
            return codec.decode_batch(data, info, 0)

        return decode_one
    if hasattr(codec, "decode_batch"):
        return lambda data: codec.decode(data, None)
    return lambda data: codec.decode(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("codec")
    parser.add_argument("sample", type=Path)
    parser.add_argument("--records", type=int, default=0)
    parser.add_argument("--wide", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decode = _decoder(arguments.codec, arguments.records, tuple(filter(None, arguments.wide.split(","))))
    sample = arguments.sample.read_bytes()
    assert verdict(decode, sample) == "decoded", "the sample itself does not decode"
    tally: Counter[str] = Counter()
    for number, data in enumerate(mutations(sample, arguments.seed, arguments.count)):
        print(number, flush=True)
        tally[verdict(decode, data)] += 1
    print(json.dumps(tally))


if __name__ == "__main__":
    main()
