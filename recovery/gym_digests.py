"""The sums of the token-capture rows of NeMo Gym (staging schema 2), made of plain values.

Owns: the bytes that are summed.
Does not know: calls, what a row means (gym_rows.py), that library. A test holds the two against each other, on that
library's own golden vectors and on rows of ours.

Invariant:
1. Every number is big-endian with 8 bytes, every text and list begins with its length; a float is its float32, but in
   `extras` its double.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SCHEMA_VERSION = DIGEST_VERSION = 2
EXTRAS_VERSION = 1


def _u64(number: int) -> bytes:
    return struct.pack(">Q", number)


def _sized(data: bytes) -> bytes:
    return _u64(len(data)) + data


def _text(text: str) -> bytes:
    return _sized(text.encode())


def _ids(token_ids: Sequence[int]) -> bytes:
    return _u64(len(token_ids)) + np.asarray(token_ids, np.uint64).astype(">u8").tobytes()


def _floats(values: Sequence[float]) -> bytes:
    return _u64(len(values)) + np.asarray(values, np.float32).astype(">f4").tobytes()


def _hex(domain: str, data: bytes) -> str:
    return hashlib.sha256(f"nemo-gym-staging-{domain}".encode() + data).hexdigest()


def prefix_digest(token_ids: Sequence[int]) -> str:
    """Of all tokens up to the end of a row: `cumulative_hash`."""
    return _hex("prefix-v2", _ids(token_ids))


def chain_digest(parent: str | None, delta: Sequence[int]) -> str:
    """Of a row's tokens after those of its parent, of which this is the sum: `chain_hash`."""
    before = b"\0" if parent is None else b"\1" + bytes.fromhex(parent)
    return _hex("chain-v1", before + _ids(delta))


def extras_digest(extras: Mapping[str, Any] | None) -> str:
    """Of what a row carries beside its tokens. Raises TypeError for what cannot be there."""
    return _hex("extras-v1", bytes([EXTRAS_VERSION]) + _extra(None if extras is None else dict(extras)))


def _extra(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        case bool():
            return b"B\1" if value else b"B\0"
        case int():
            return b"I" + struct.pack(">q", value)
        case float():
            return b"F" + struct.pack(">d", value)
        case str():
            return b"S" + _text(value)
        case list():
            return b"L" + _u64(len(value)) + b"".join(map(_extra, value))
        case dict():
            items = sorted((key.encode(), item) for key, item in value.items())
            return b"D" + _u64(len(items)) + b"".join(_sized(key) + _extra(item) for key, item in items)
    raise TypeError(f"{type(value).__name__} cannot be in the extras of a row")


def row_digest(row: Mapping[str, Any]) -> str:
    """Of a whole row but `digest` and `extras`: `digest`."""
    parent = row["parent_call_id"]
    parts = [
        bytes([row["schema_version"], row["digest_version"], row["extras_digest_version"]]),
        _text(row["rollout_id"]),
        _text(row["model_call_id"]),
        b"\0" if parent is None else b"\1" + _text(parent),
        _text(row["mode"]),
        *(_u64(row[name]) for name in ("prev_len", "delta_len", "cum_len", "weight_version")),
        _sized(_ids(row["token_ids_delta"])),
        _sized(_floats(row["token_mask_delta"])),
        _sized(_floats(row["generation_log_probs_delta"])),
        bytes.fromhex(row["extras_digest"]),
        b"\1" + bytes.fromhex(row["chain_hash"]),
        b"\1" + bytes.fromhex(row["cumulative_hash"]),
    ]
    return _hex("call-v2", b"".join(parts))
