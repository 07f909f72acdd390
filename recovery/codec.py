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

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from recovery.model import Array, CallId, Chunk, Int32Array, PolicyVersion, Request, wide_columns

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
    return sha256(data).hexdigest()


def fingerprint(must: Mapping[str, Any]) -> str:
    """32 hex digits that stand for the fields of which a difference refuses a restore."""
    return sha256_hex(canonical_json(must))[:32]


_U64 = struct.Struct("<Q").pack


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
    n_tokens = chunk.token_ids.shape[0]
    call_ids = np.frombuffer(chunk.call_id, np.uint8).reshape(1, -1)
    head = chunk_heads(call_ids, np.array([chunk.start]), np.array([n_tokens]), chunk.version).tobytes()
    logprobs = np.empty(0, np.float32) if chunk.logprobs is None else chunk.logprobs
    ids, lps, mask = map(_one_stretch, (chunk.token_ids, logprobs, chunk.mask))
    found = chunk_digests([head], ids, lps, mask, lambda _: wide_content(chunk.columns, n_tokens))
    return found.tobytes()


Stretches = tuple[Array, Array, Array]
"""Values of many chunks, and where those of each begin and end."""


def _one_stretch(values: Array) -> Stretches:
    return values, np.zeros(1, np.int64), np.array([len(values)])


def chunk_digests(
    heads: Sequence[bytes],
    token_ids: Stretches,
    logprobs: Stretches,
    mask: Stretches,
    wide: Callable[[int], bytes] | None,
) -> Array:
    """The digests of many chunks, 16 bytes each.

    `heads` are their chunk_heads(), `wide` gives the wide_content() of one. A chunk without logprobs has none.
    """
    ids, *id_edges = _bytes_of(*token_ids, "<i4")
    lps, *lp_edges = _bytes_of(*logprobs, "<f4")
    bits, *bit_edges = _bytes_of(*mask, "u1")
    found: list[bytes] = []
    edges = zip(heads, *id_edges, *lp_edges, *bit_edges, strict=True)
    for at, (head, first, last, lp_first, lp_last, bit_first, bit_last) in enumerate(edges):
        state = sha256(head)
        update = state.update
        flag = b"\1" if lp_first != lp_last else b"\0"
        if wide is None and bit_last - bit_first <= _HELD // 4:
            update(ids[first:last])
            update(flag)
            update(lps[lp_first:lp_last])
            update(bits[bit_first:bit_last])
        else:
            parts = (ids[first:last], flag, lps[lp_first:lp_last], bits[bit_first:bit_last])
            for part in parts if wide is None else (*parts, wide(at)):
                for piece in range(0, len(part), _HELD):
                    update(part[piece : piece + _HELD])
        found.append(state.digest())
    whole = np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32)
    return np.ascontiguousarray(whole[:, :16]).view("V16")[:, 0]


_HELD = 2047
"""hashlib lets other threads have the interpreter while it hashes more bytes than this at a time; two that hash chunks
would hand it to and fro for each of them, which takes longer than to hash it."""


def _bytes_of(values: Array, begins: Array, ends: Array, dtype: str) -> tuple[memoryview, list[int], list[int]]:
    size = np.dtype(dtype).itemsize
    plain = np.ascontiguousarray(values, dtype).view(np.uint8).data
    return plain, (size * begins).tolist(), (size * ends).tolist()


def chunk_heads(call_ids: Array, starts: Array, n_tokens: Array, version: PolicyVersion) -> Array:
    """What is hashed of chunks of one version before their tokens, a row each. `call_ids`: bytes, a row each."""
    told = _lp(version.lineage.encode()) + _u64(version.number)
    parts = (
        np.frombuffer(_CHUNK, np.uint8),
        call_ids,
        starts.astype("<u8").view(np.uint8).reshape(-1, 8),
        np.frombuffer(told, np.uint8),
        n_tokens.astype("<u8").view(np.uint8).reshape(-1, 8),
    )
    return np.concatenate([np.broadcast_to(part, (len(starts), part.shape[-1])) for part in parts], axis=1)


def wide_content(columns: Mapping[str, Array], n_tokens: int) -> bytes:
    """What of a chunk's wide columns is hashed."""
    if not columns:
        return b""
    wide = wide_columns(columns, n_tokens)
    parts = [_u64(len(wide))]
    for name, type_, width in wide:
        parts += [_lp(name.encode()), _lp(type_.encode()), _u64(width), _le_values(columns[name])]
    return b"".join(parts)


def request_digest(request: Request) -> bytes:
    """16 bytes over everything that the caller asks for: prompt ids, sampling, extra.

    Not over the seed that admission gave the call: the same request is the same call with whatever seed it was drawn.
    """
    return request_digest_of(_le_int32(request.prompt_token_ids), asked_content(request.sampling, request.extra))


def asked_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a request's `extra` that its caller asked for."""
    return {name: value for name, value in extra.items() if name != "draws"}


def asked_content(sampling: Mapping[str, Any], extra: Mapping[str, Any]) -> bytes:
    """What of a request is hashed after its prompt."""
    return _lp(canonical_json(dict(sampling))) + _lp(canonical_json(asked_of(extra)))


def request_digest_of(prompt_token_ids: bytes | memoryview, asked: bytes) -> bytes:
    """The digest of a request from its parts: little-endian ids and asked_content()."""
    n = _U64(len(prompt_token_ids) // 4)
    return sha256(b"".join((_REQUEST, n, prompt_token_ids, asked))).digest()[:16]


def call_id(rollout: str, turn: int, digest: bytes) -> CallId:
    """The name of a call: the same request under the same name is the same call in every process."""
    state = sha256(_CALL)
    state.update(_lp(rollout.encode()) + _u64(turn) + digest)
    return CallId(state.digest()[:16])


def call_of(request: Request) -> CallId:
    """The name of the call that a request is."""
    return call_id(request.rollout, request.turn, request_digest(request))
