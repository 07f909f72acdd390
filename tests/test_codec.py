"""recovery.codec against the constructions of docs/format.md, section 4, written out by hand."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import codec
from recovery.model import CallId, Chunk, PolicyVersion, Request
from recovery.records import Records

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
JSONS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)
OBJECTS = st.dictionaries(TEXTS, JSONS, max_size=4)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20)


def sha16(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def lp(data: bytes) -> bytes:
    return u64(len(data)) + data


def int32s(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def chunk_of(tokens: list[int], logprobs: list[float] | None = None, mask: list[bool] | None = None, **fields: Any):
    values: dict[str, Any] = {
        "call_id": CallId(b"0123456789abcdef"),
        "attempt": 0,
        "start": 0,
        "version": PolicyVersion("a", 0),
        **fields,
    }
    return Chunk(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        mask=np.asarray([True] * len(tokens) if mask is None else mask, np.bool_),
        **values,
    )


def request_of(prompt: list[int], sampling: dict[str, Any], extra: dict[str, Any], **fields: Any) -> Request:
    return Request(
        prompt_token_ids=np.asarray(prompt, np.int32),
        sampling=sampling,
        extra=extra,
        **{"rollout": "r", **fields},
    )


# ---- digests as the document has them --------------------------------------------------------------------------


@given(rollout=TEXTS, turn=st.integers(0, 2**63), digest=st.binary(min_size=16, max_size=16))
def test_call_id_is_as_documented(rollout: str, turn: int, digest: bytes) -> None:
    expected = sha16(b"prefix-recovery call 1\0" + lp(rollout.encode()) + u64(turn) + digest)
    assert codec.call_id(rollout, turn, digest) == expected


@given(prompt=st.lists(st.integers(0, 2**31 - 1), max_size=10), sampling=OBJECTS, extra=OBJECTS)
def test_request_digest_is_as_documented(prompt: list[int], sampling: dict, extra: dict) -> None:
    def text(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    expected = sha16(
        b"prefix-recovery request 1\0" + u64(len(prompt)) + int32s(prompt) + lp(text(sampling)) + lp(text(extra))
    )
    assert codec.request_digest(request_of(prompt, sampling, extra)) == expected


@given(
    tokens=TOKENS,
    start=st.integers(0, 2**40),
    lineage=TEXTS.filter(bool),
    number=st.integers(0, 2**63),
    data=st.data(),
)
def test_chunk_digest_is_as_documented(tokens: list[int], start: int, lineage: str, number: int, data: Any) -> None:
    n = len(tokens)
    logprobs = data.draw(st.none() | st.lists(st.floats(width=32), min_size=n, max_size=n))
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    if logprobs is not None and any(map(math.isnan, logprobs)):
        logprobs = [math.nan if math.isnan(value) else value for value in logprobs]
    chunk = chunk_of(tokens, logprobs, mask, start=start, version=PolicyVersion(lineage, number))
    floats = b"\0" if logprobs is None else b"\1" + struct.pack(f"<{n}f", *logprobs)
    expected = sha16(
        b"prefix-recovery chunk 1\0"
        + b"0123456789abcdef"
        + u64(start)
        + lp(lineage.encode())
        + u64(number)
        + u64(n)
        + int32s(tokens)
        + floats
        + bytes(mask)
    )
    assert codec.chunk_digest(chunk) == expected


NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H", "uint32": "I"}
NUMBERS |= {"uint64": "Q", "float16": "e", "float32": "f", "float64": "d", "bool": "?"}


def test_chunks_of_any_length_that_lie_end_to_end_have_the_digest_of_each() -> None:
    """Long ones are hashed in pieces, short ones are not; some have no logprobs."""
    rng = np.random.default_rng(5)
    chunks, expected = [], []
    for n in (1, 255, 510, 511, 512, 513, 2046, 2047, 2048, 5000):
        for has_logprobs in (False, True):
            tokens = rng.integers(-(2**31), 2**31, n).tolist()
            logprobs = rng.normal(size=n).astype(np.float32).tolist() if has_logprobs else None
            mask = (rng.random(n) < 0.5).tolist()
            chunk = chunk_of(tokens, logprobs, mask, start=7 * n, version=PolicyVersion("b", n))
            floats = b"" if logprobs is None else struct.pack(f"<{n}f", *logprobs)
            chunks.append(chunk)
            expected.append(
                sha16(
                    b"prefix-recovery chunk 1\0"
                    + chunk.call_id
                    + u64(7 * n)
                    + lp(b"b")
                    + u64(n)
                    + u64(n)
                    + int32s(tokens)
                    + (b"\1" if has_logprobs else b"\0")
                    + floats
                    + bytes(mask)
                )
            )
    assert [codec.chunk_digest(chunk) for chunk in chunks] == expected
    assert Records.of(chunks).digests.tolist() == expected


@given(
    names=st.lists(st.text("aZ9._-", min_size=1, max_size=3), unique=True, max_size=4),
    n=st.integers(1, 4),
    data=st.data(),
)
def test_wide_columns_are_part_of_a_chunk_digest_as_documented(names: list[str], n: int, data: Any) -> None:
    columns, part = {}, u64(len(names)) if names else b""
    for name in names:
        type_ = data.draw(st.sampled_from(sorted(NUMBERS)))
        width = data.draw(st.integers(0, 3))
        flat = data.draw(st.lists(st.integers(0, 1 if type_ == "bool" else 100), min_size=n * (width or 1)))
        flat = flat[: n * (width or 1)]
        columns[name] = np.array(flat, type_).reshape((n, width) if width else (n,))
    for name in sorted(names):
        values = columns[name]
        width = values.shape[1] if values.ndim == 2 else 0
        part += lp(name.encode()) + lp(values.dtype.name.encode()) + u64(width)
        part += struct.pack(f"<{values.size}{NUMBERS[values.dtype.name]}", *values.ravel().tolist())
    chunk = chunk_of(list(range(n)), columns=columns)
    before = b"prefix-recovery chunk 1\0" + chunk.call_id + u64(0) + lp(b"a") + u64(0) + u64(n)
    assert codec.chunk_digest(chunk) == sha16(before + int32s(list(range(n))) + b"\0" + b"\1" * n + part)


def test_a_true_is_one_byte_1_in_a_digest_whatever_byte_the_array_holds() -> None:
    plain, odd = np.array([True, False, True]), np.array([2, 0, 255], np.uint8).view(np.bool_)
    assert codec.chunk_digest(chunk_of([1, 2, 3], columns={"a": plain})) == codec.chunk_digest(
        chunk_of([1, 2, 3], columns={"a": odd})
    )


def test_every_part_of_a_wide_column_counts() -> None:
    values = np.arange(4, dtype=np.int32)
    variants: list[dict[str, np.ndarray]] = [
        {},
        {"a": values},
        {"b": values},
        {"a": values, "b": values},
        {"a": values.reshape(4, 1)},
        {"a": values.reshape(4, 1).repeat(2, axis=1)},
        {"a": values.view(np.uint32)},
        {"a": values.astype(np.int64)},
        {"a": values.view(np.float32)},
        {"a": values + 1},
        {"a": values.view(np.int8).reshape(4, 4)},
    ]
    digests = {codec.chunk_digest(chunk_of([1, 2, 3, 4], columns=columns)) for columns in variants}
    assert len(digests) == len(variants)


def test_digests_of_this_version_never_change() -> None:
    """Fixed values: a store written once is read for ever."""
    request = request_of([1, 2, 3], {"max_tokens": 32, "temperature": 0.0}, {})
    digest = codec.request_digest(request)
    assert digest.hex() == "bc1e3549e501e1a0859ab9177067a1e1"
    assert codec.call_id("p-17#0", 0, digest).hex() == "f9ca47650a233c7cde95bb90898cd336"
    assert codec.chunk_digest(chunk_of([4, 5], [-0.5, -0.25])).hex() == "e93e0727d7bde5317562505666e7d6c2"
    assert codec.fingerprint({"a": 1, "b": ["x"]}) == hashlib.sha256(b'{"a":1,"b":["x"]}').hexdigest()[:32]


# ---- what must and must not matter -----------------------------------------------------------------------------


def test_a_digest_is_over_content_not_over_memory_layout() -> None:
    plain = chunk_of([1, 2, 3], [-0.5, -1.0, -2.0])
    odd = Chunk(
        call_id=plain.call_id,
        attempt=9,  # the attempt is not content
        start=0,
        token_ids=np.asarray([1, 0, 2, 0, 3, 0], ">i4")[::2],
        logprobs=np.asarray([-0.5, -1.0, -2.0], ">f4"),
        mask=np.asarray([1, 1, 1], np.bool_),
        version=plain.version,
    )
    assert codec.chunk_digest(plain) == codec.chunk_digest(odd)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"start": 1}, {"start": 256}),
        ({"version": PolicyVersion("a", 11)}, {"version": PolicyVersion("a1", 1)}),
        ({"version": PolicyVersion("ab", 0)}, {"version": PolicyVersion("a", 0)}),
        ({"call_id": CallId(b"0" * 16)}, {"call_id": CallId(b"1" * 16)}),
        ({"mask": [True, False]}, {"mask": [False, True]}),
        ({"logprobs": None}, {"logprobs": [0.0, 0.0]}),
        ({"logprobs": [0.0, 0.0]}, {"logprobs": [-0.0, 0.0]}),  # L3: bit-exact
    ],
)
def test_every_part_of_a_chunk_counts(one: dict, other: dict) -> None:
    assert codec.chunk_digest(chunk_of([1, 2], **one)) != codec.chunk_digest(chunk_of([1, 2], **other))


@given(a=st.tuples(TEXTS, st.integers(0, 300)), b=st.tuples(TEXTS, st.integers(0, 300)))
def test_neighbouring_fields_of_a_call_id_cannot_run_into_each_other(a: tuple, b: tuple) -> None:
    ids = {codec.call_id(rollout, turn, bytes(16)) for rollout, turn in (a, b)}
    assert len(ids) == len({a, b})


@given(a=st.tuples(TOKENS, OBJECTS, OBJECTS), b=st.tuples(TOKENS, OBJECTS, OBJECTS))
def test_neighbouring_fields_of_a_request_cannot_run_into_each_other(a: tuple, b: tuple) -> None:
    same = codec.canonical_json(list(a)) == codec.canonical_json(list(b))
    assert (codec.request_digest(request_of(*a)) == codec.request_digest(request_of(*b))) == same


def test_what_moves_between_sampling_and_extra_is_another_request() -> None:
    assert codec.request_digest(request_of([1], {"x": 1}, {})) != codec.request_digest(request_of([1], {}, {"x": 1}))
    assert codec.request_digest(request_of([1, 2], {}, {})) != codec.request_digest(request_of([1], {}, {}))


def test_w9_equal_prompts_of_different_rollouts_are_different_calls() -> None:
    digest = codec.request_digest(request_of([1, 2], {}, {}))
    names = ["p#0", "p#1", "p#10", "q#0"]
    assert len({codec.call_id(rollout, turn, digest) for rollout in names for turn in (0, 1)}) == 8


def test_the_name_and_the_restart_mark_are_not_part_of_the_request_digest() -> None:
    one = request_of([1], {}, {}, rollout="a", turn=0)
    other = request_of([1], {}, {}, rollout="b", turn=3, restart_only="seed", source_digest="x")
    assert codec.request_digest(one) == codec.request_digest(other)


# ---- canonical JSON --------------------------------------------------------------------------------------------


@given(value=JSONS)
def test_canonical_json_survives_a_round_trip(value: Any) -> None:
    data = codec.canonical_json(value)
    assert codec.canonical_json(json.loads(data)) == data
    assert b"\n" not in data or "\n" in repr(value)


@given(value=st.dictionaries(st.integers(-1000, 1000), st.floats(0, 1), max_size=12))
def test_integer_keys_are_sorted_as_the_text_that_they_are_in_json(value: dict[int, float]) -> None:
    """A logit_bias has integer keys before it is stored and text afterwards; it is the same request."""
    before = request_of([1], {"logit_bias": value}, {})
    after = request_of([1], json.loads(json.dumps({"logit_bias": value})), {})
    assert codec.request_digest(before) == codec.request_digest(after)


def test_canonical_json_is_utf8_sorted_and_tight() -> None:
    value = {"b": (1, 2.0), "a": {"é": None, "z": True}, "\U0001f600": -0.0}
    assert codec.canonical_json(value) == '{"a":{"z":true,"é":null},"b":[1,2.0],"😀":-0.0}'.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {"a": [1, {"b": math.nan}]}])
def test_canonical_json_has_no_nan(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        codec.canonical_json(value)


@pytest.mark.parametrize("value", [{1, 2}, b"x", {(1, 2): 3}, {None: 1}, {True: 1}, {1.5: 1}, object()])
def test_canonical_json_refuses_what_json_lacks(value: Any) -> None:
    with pytest.raises(TypeError):
        codec.canonical_json(value)


def test_canonical_json_refuses_two_keys_that_become_one() -> None:
    with pytest.raises(ValueError, match="'1' in JSON"):
        codec.canonical_json({1: "a", "1": "b"})
