"""Engines to measure with, each in a process of its own.

Owns: the process, its model, and the lines of JSON that are said to it.
Does not know: what a round does (engine_process.py), what is compared with what.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Process = subprocess.Popen[str]


@contextmanager
def tiny_model(folder: Path | None) -> Iterator[str]:
    """The tests' model of a few thousand weights, in a temporary folder."""
    from prefix_recovery.tiny import make_tiny_llama

    with tempfile.TemporaryDirectory(prefix="bench-model-", dir=folder) as name:
        yield str(make_tiny_llama(Path(name) / "tiny"))


@contextmanager
def real_model(folder: Path | None) -> Iterator[str]:
    """SmolLM2 of 135M weights, as `prefix-recovery model smollm2` makes it."""
    from prefix_recovery import smollm2

    with tempfile.TemporaryDirectory(prefix="bench-model-", dir=folder) as name:
        path = Path(name) / "smollm2"
        smollm2.make_smollm2(path)
        yield str(path)


@contextmanager
def started(
    model: str,
    *,
    plug_in: bool = True,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[Process]:
    """An engine that waits for rounds."""
    given = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 128 << 20, "seed": 0, **arguments}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "bench.engine_process",
            json.dumps({"model": model, "arguments": given, "plug_in": plug_in}),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        _answer(process)
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def ask(process: Process, **work: Any) -> dict[str, Any]:
    """One round; what it found."""
    assert process.stdin is not None
    print(json.dumps(work), file=process.stdin, flush=True)
    return _answer(process)


def _answer(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the engine ended with code {process.wait()}; what it said is above")
    found: dict[str, Any] = json.loads(line)
    return found
