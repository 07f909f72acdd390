"""Canonical encodings and content digests: what makes two encodings the same thing.

Owns: the byte strings that are hashed (docs/format.md, section 4) and canonical JSON.
Does not know: Arrow, Zarr, files, which object a digest is stored in.

Invariants:
1. A digest is over logical content; it does not depend on a library, a compression or the machine's byte order.
2. Every variable-length part is preceded by its length, so that no two contents give one byte string.
3. Canonical JSON has sorted keys, no white space, no NaN: equal values give equal bytes.

Source of the construction: length-prefixed hashing with a domain string, as in RFC 9162 section 2 and TUF.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from recovery.model import Array, CallId, Chunk, Int32Array, Request

_CHUNK = b"prefix-recovery chunk 1\0"
_REQUEST = b"prefix-recovery request 1\0"
_CALL = b"prefix-recovery call 1\0"


def canonical_json(value: Any) -> bytes:
    """UTF-8 bytes of `value`. Raises ValueError for NaN and infinities, TypeError for what JSON lacks.

    An integer key is its decimal text before keys are sorted, so that a value and what it is after a round trip
    through JSON (a logit_bias {9: 1.0, 10: 1.0}) have the same bytes.
    """
    text = json.dumps(
        _with_text_keys(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_with_text_keys(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    texts: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str) and type(key) is not int:
            raise TypeError(f"a key of JSON is text or an integer, not {key!r}")
        if str(key) in texts:
            raise ValueError(f"two keys are {str(key)!r} in JSON")
        texts[str(key)] = _with_text_keys(item)
    return texts


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprint(must: Mapping[str, Any]) -> str:
    """32 hex digits that stand for the fields of which a difference refuses a restore."""
    return sha256_hex(canonical_json(must))[:32]


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _lp(text: bytes) -> bytes:
    return _u64(len(text)) + text


def _le_int32(values: Int32Array) -> bytes:
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def _le_values(values: Array) -> bytes:
    """Row by row, little-endian; a bool is 0 or 1, whatever byte the array holds for true."""
    plain = np.dtype("u1") if values.dtype == np.bool_ else values.dtype.newbyteorder("<")
    return np.ascontiguousarray(values, dtype=plain).tobytes()


def chunk_digest(chunk: Chunk) -> bytes:
    """16 bytes over call, position, version, tokens, logprobs, mask and wide columns; not over the attempt."""
    state = hashlib.sha256(_CHUNK)
    state.update(chunk.call_id)
    state.update(_u64(chunk.start))
    state.update(_lp(chunk.version.lineage.encode()))
    state.update(_u64(chunk.version.number))
    state.update(_u64(chunk.token_ids.shape[0]))
    state.update(_le_int32(chunk.token_ids))
    if chunk.logprobs is None:
        state.update(b"\0")
    else:
        state.update(b"\1" + np.ascontiguousarray(chunk.logprobs, dtype="<f4").tobytes())
    state.update(np.ascontiguousarray(chunk.mask, dtype="u1").tobytes())
    if chunk.columns:
        columns = chunk.wide()
        state.update(_u64(len(columns)))
        for name, type_, width in columns:
            state.update(_lp(name.encode()) + _lp(type_.encode()) + _u64(width))
            state.update(_le_values(chunk.columns[name]))
    return state.digest()[:16]


def request_digest(request: Request) -> bytes:
    """16 bytes over everything that the caller asks for: prompt ids, sampling, extra.

    Not over the seed that admission gave the call: the same request is the same call with whatever seed it was drawn.
    """
    extra = {name: value for name, value in request.extra.items() if name != "draws"}
    state = hashlib.sha256(_REQUEST)
    state.update(_u64(request.prompt_token_ids.shape[0]))
    state.update(_le_int32(request.prompt_token_ids))
    state.update(_lp(canonical_json(dict(request.sampling))))
    state.update(_lp(canonical_json(extra)))
    return state.digest()[:16]


def call_id(rollout: str, turn: int, digest: bytes) -> CallId:
    """The name of a call: the same request under the same name is the same call in every process."""
    state = hashlib.sha256(_CALL)
    state.update(_lp(rollout.encode()) + _u64(turn) + digest)
    return CallId(state.digest()[:16])
