"""Saving everything again each time, as it is done today: calls to bytes or files, and back.

Owns: the encodings.
Does not know: when a copy is made, where it is put, what it is compared with.

A call is its token ids and its logprobs. Every encoding is lossless.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recovery.model import Float32Array, Int32Array

Call = tuple[Int32Array, Float32Array]
Calls = list[Call]


def json_lines(calls: Calls) -> bytes:
    return "\n".join(json.dumps({"ids": ids.tolist(), "lps": lps.tolist()}) for ids, lps in calls).encode()


def from_json_lines(data: bytes) -> Calls:
    rows = [json.loads(line) for line in data.splitlines()]
    return [(np.array(row["ids"], np.int32), np.array(row["lps"], np.float32)) for row in rows]


def torch_save(calls: Calls) -> bytes:
    import torch

    sink = io.BytesIO()
    torch.save([tuple(torch.from_numpy(np.array(values)) for values in call) for call in calls], sink)
    return sink.getvalue()


def torch_load(data: bytes) -> Calls:
    import torch

    loaded: list[Any] = torch.load(io.BytesIO(data), weights_only=True)
    return [(ids.numpy(), lps.numpy()) for ids, lps in loaded]


BYTES: Mapping[str, tuple[Callable[[Calls], bytes], Callable[[bytes], Calls]]] = {
    "pickle": (pickle.dumps, pickle.loads),
    "torch.save": (torch_save, torch_load),
    "JSON lines": (json_lines, from_json_lines),
}
"""Those that are one object: to bytes, and back."""


def distributed_save(calls: Calls, folder: Path) -> None:
    """torch.distributed.checkpoint, in one process."""
    import torch
    from torch.distributed import checkpoint

    state = {f"{n:06d}-{k}": torch.from_numpy(np.array(v)) for n, call in enumerate(calls) for k, v in enumerate(call)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is distributed
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)


def distributed_load(folder: Path, like: Calls) -> Calls:
    import torch
    from torch.distributed import checkpoint

    kinds = (torch.int32, torch.float32)
    state = {
        f"{n:06d}-{k}": torch.empty(len(values), dtype=kinds[k])
        for n, call in enumerate(like)
        for k, values in enumerate(call)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return [(state[f"{n:06d}-0"].numpy(), state[f"{n:06d}-1"].numpy()) for n in range(len(like))]


def zarr_save(calls: Calls, folder: Path) -> None:
    """A group with two arrays for each call."""
    import zarr

    group = zarr.open_group(str(folder), mode="w")
    for number, call in enumerate(calls):
        for name, values in zip(("ids", "lps"), call, strict=True):
            group.create_array(f"{number:06d}-{name}", data=values, chunks=(4096,))


def zarr_load(folder: Path, like: Calls) -> Calls:
    import zarr

    group = zarr.open_group(str(folder), mode="r")
    return [
        (np.asarray(group[f"{n:06d}-ids"][:]), np.asarray(group[f"{n:06d}-lps"][:]))  # type: ignore[index]
        for n in range(len(like))
    ]


FOLDERS: Mapping[str, tuple[Callable[[Calls, Path], None], Callable[[Path, Calls], Calls]]] = {
    "torch.distributed": (distributed_save, distributed_load),
    "Zarr array per call": (zarr_save, zarr_load),
}
"""Those that are a folder of files: to it, and back (told how long the calls are)."""


def check(name: str, found: Calls, wanted: Calls) -> None:
    """Raises RuntimeError if a way does not give back what was saved."""
    for (ids, lps), (all_ids, all_lps) in zip(found, wanted, strict=True):
        if ids.tobytes() != all_ids.tobytes() or lps.tobytes() != all_lps.tobytes():
            raise RuntimeError(f"{name} does not give back what was saved")
