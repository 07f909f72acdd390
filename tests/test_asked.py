"""recovery.asked: which values of a caller are kept with a call, as what, and by which name the others are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import math
from collections import OrderedDict, UserDict, deque
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.asked import DEPTH_MAX, checked, plain, prompt_ids
from recovery.codec import asked_content, call_of, canonical_json
from recovery.config import CheckpointingConfig
from recovery.errors import InputError
from recovery.model import Request
from recovery.resume import StopRules
from vllm_hooks.session import RecoverySession

STOP = StopRules((), 4096)


class Level(enum.Enum):
    HIGH = "high"
    FIVE = 5
    NAN = math.nan


class Number(enum.IntEnum):
    SEVEN = 7


class Word(str):
    __slots__ = ()


@dataclasses.dataclass
class Detection:
    size: Any = 3
    _ours: Any = None


def nested(levels: int, item: Any = 1) -> Any:
    for level in range(levels):
        item = [item] if level % 2 else {"a": item}
    return item


SAME = [
    (np.float32(0.7), float(np.float32(0.7))),
    (np.float16(0.5), 0.5),
    (np.float64(0.1), 0.1),
    (np.longdouble(0.25), 0.25),
    (np.int64(9), 9),
    (np.uint64((1 << 64) - 1), (1 << 64) - 1),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (np.array([1.5, 2.0], np.float32), [1.5, 2.0]),
    (np.array(3), 3),
    (np.array([[1, 2]]), [[1, 2]]),
    (Level.HIGH, "high"),
    (Number.SEVEN, 7),
    ({"level": Level.FIVE}, {"level": 5}),
    ({9: 1.0, np.int64(10): 2}, {"9": 1.0, "10": 2}),
    ((1, (2,)), [1, [2]]),
    (range(3), [0, 1, 2]),
    (deque(["a"]), ["a"]),
    ({"b", "a"}, ["a", "b"]),
    (frozenset({3, 1, 2.5}), [1, 2.5, 3]),
    ({1, "a"}, ["a", 1]),
    ({(2, 1), (1, 2)}, [[1, 2], [2, 1]]),
    (OrderedDict(a=1), {"a": 1}),
    (MappingProxyType({"a": [None]}), {"a": [None]}),
    (UserDict(a=1), {"a": 1}),
    (Word("w"), "w"),
    (Detection(np.int8(4)), {"size": 4}),
    (-0.0, -0.0),
    ((1 << 64) - 1, (1 << 64) - 1),
    (-(1 << 63), -(1 << 63)),
]


@pytest.mark.parametrize(("value", "kept"), SAME, ids=[type(value).__name__ for value, _ in SAME])
def test_what_json_has_an_exact_word_for_is_that(value: Any, kept: Any) -> None:
    found = plain(value, ("sampling", "x"))
    assert found == kept and type(found) is type(kept)
    assert json.loads(canonical_json([found])) == [found]


REFUSED = [
    (math.nan, "x is nan"),
    (math.inf, "x is inf"),
    (np.float32("nan"), "x is nan"),
    ({"a": [0, -math.inf]}, "x.a.1 is -inf"),
    (np.array([1.0, np.nan]), "x.1 is nan"),
    ({9: math.nan}, "x.9 is nan"),
    ({"a": Level.NAN}, "x.a is nan"),
    (b"ab", "x is bytes"),
    ([bytearray(b"ab")], "x.0 is bytearray"),
    (np.bytes_(b"a"), "x is a numpy bytes_"),
    (np.datetime64("2026-01-01"), "x is a numpy datetime64"),
    (np.longdouble("0.1") if np.longdouble("0.1") != 0.1 else math.nan, "x is"),
    (1j, "x is a complex"),
    ("\ud800", "x is '\\\\ud800', which holds half of a surrogate pair"),
    (["a", "b\udfff"], "x.1 is .*half of a surrogate"),
    ({"\ud800": 1}, "half of a surrogate"),
    ({1: "a", "1": "b"}, "x is an object whose key '1' comes twice"),
    ({True: 1}, "x is an object with the key True"),
    ({1.5: 1}, "x is an object with the key 1.5"),
    ({None: 1}, "x is an object with the key None"),
    ({b"a": 1}, "x is an object with the key b'a'"),
    (1 << 64, "x is an integer of 65 bits"),
    (-(1 << 63) - 1, "x is an integer of 64 bits"),
    (10**5000, "x is an integer of"),
    (object(), "x is a object"),
    (len, "x is a builtin_function_or_method"),
    (Detection, "x is a type"),
    (Detection(math.nan), "x.size is nan"),
    ({math.nan}, r"x.\? is nan"),
    (nested(10_000), "levels deep"),
]


@pytest.mark.parametrize(("value", "why"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_the_rest_is_refused_by_its_name(value: Any, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        plain({"deep": [value]}, ("sampling",)) if "levels" in why else plain(value, ("sampling", "x"))
    assert str(caught.value).startswith("sampling.")
    str(caught.value).encode()


def test_how_deep_it_may_be_and_one_that_is_in_itself() -> None:
    deepest = nested(DEPTH_MAX)
    assert json.loads(canonical_json(plain(deepest, ("x",)))) == deepest
    with pytest.raises(InputError, match="levels deep"):
        plain(nested(DEPTH_MAX + 1), ("x",))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="levels deep"):
        plain(endless, ("x",))


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.floats(width=32).map(np.float32), st.binary(max_size=3),
    st.text(st.characters(), max_size=4), st.text(st.characters(categories=["Cs", "Ll"]), max_size=4),
    st.integers(-(2**63), 2**63 - 1).map(np.int64), st.sampled_from(list(Level)), st.complex_numbers(),
)  # fmt: skip
keys = st.one_of(st.text(max_size=3), st.integers(0, 9), st.sampled_from("0123456789"), st.floats(), st.none())
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(st.one_of(st.integers(), st.text(max_size=2), st.floats()), max_size=4),
        st.lists(st.floats(width=32), max_size=3).map(lambda items: np.array(items, np.float32)),
    ),
    max_leaves=12,
)


def says(value: Any) -> Any:
    """What JSON says of it, made by the standard library alone; raises if it has no exact word for it."""

    def other(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return item.tolist()
        if isinstance(item, np.float32):
            return float(item)
        if isinstance(item, np.int64):
            return int(item)
        if isinstance(item, enum.Enum):
            return item.value
        if isinstance(item, set):
            return "a set"
        raise TypeError(type(item))

    text = json.dumps(value, default=other, allow_nan=False, ensure_ascii=False)
    text.encode()
    return json.loads(text)


def without_sets(value: Any, like: Any) -> Any:
    if isinstance(like, set):
        assert isinstance(value, list) and len(value) == len(like)
        return "a set"
    if isinstance(like, list | tuple):
        return [without_sets(item, other) for item, other in zip(value, like, strict=True)]
    if isinstance(like, dict):
        return {str(key): without_sets(value[str(key)], item) for key, item in like.items()}
    return value


@given(value=anything)
def test_anything_at_all_is_itself_after_a_round_trip_or_is_refused(value: Any) -> None:
    try:
        kept = plain(value, ("sampling", "x"))
    except InputError as error:
        assert error.message.startswith("sampling.x")
        return
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    assert plain(kept, ("x",)) == kept and canonical_json([plain(kept, ("x",))]) == canonical_json([kept])
    assert without_sets(kept, value) == says(value)


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([1, 2.5], "prompt_token_ids.1 is 2.5"),
        ([1, 2**31], "prompt_token_ids.1 is 2147483648"),
        ([2**70], "prompt_token_ids.0 is 1180591620717411303424"),
        (["a"], "prompt_token_ids.0 is 'a'"),
        ([1, None], "prompt_token_ids.1 is None"),
        ([True], "prompt_token_ids.0 is True"),
        ([[1, 2], [3]], "prompt_token_ids is list"),
        ([[1, 2]], "prompt_token_ids is list"),
        (5, "prompt_token_ids is int"),
        ("12", "prompt_token_ids is str"),
        (b"12", "prompt_token_ids is bytes"),
        (np.array([1.0]), "prompt_token_ids.0 is "),
        (np.array([2**40]), "prompt_token_ids.0 is "),
    ],
)
def test_what_would_become_other_ids_is_refused(ids: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        prompt_ids(ids)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), 2]])
def test_ids_are_int32_in_the_end(ids: Any) -> None:
    found = prompt_ids(ids)
    assert found.dtype == np.int32 and found.tolist() == [1, 2]
    assert prompt_ids([]).dtype == np.int32 and prompt_ids(found) is found


def request(**fields: Any) -> Request:
    asked: dict[str, Any] = {
        "rollout": "r", "prompt_token_ids": np.arange(3, dtype=np.int32), "sampling": {"temperature": 0.0},
    }  # fmt: skip
    return Request(**{**asked, **fields})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rollout": "r\ud800"}, "rollout is .*half of a surrogate"),
        ({"rollout": 7}, "rollout of a request is 7"),
        ({"rollout": None}, "rollout of a request is None"),
        ({"source_digest": "\udcff"}, "source_digest is"),
        ({"sampling": {"stop": ["\ud800"]}}, "sampling.stop.0 is"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature is nan"),
        ({"extra": {"lora_request": {"name": "a\ud800", "digest": "0"}}}, "extra.lora_request.name is"),
        ({"prompt_token_ids": np.array([1.5])}, "prompt_token_ids"),
    ],
)
def test_everything_in_a_request_s_identity_is_looked_at(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        checked(request(**fields))


def test_equal_requests_are_one_call_whatever_their_numbers_are_made_of() -> None:
    plainly = request(sampling={"temperature": 0.5, "seed": 7, "logit_bias": {"9": 1.0}, "stop": ["a", "b"]})
    other = request(
        sampling={"temperature": np.float32(0.5), "seed": np.int64(7), "logit_bias": {9: 1.0}, "stop": {"b", "a"}},
        prompt_token_ids=[0, 1, 2],
    )
    assert call_of(checked(other)) == call_of(checked(plainly)) == call_of(plainly)
    assert asked_content(checked(other).sampling, {}) == asked_content(plainly.sampling, {})


@pytest.mark.parametrize("placed", [False, True])
def test_a_request_that_is_refused_costs_nothing_and_the_mended_one_has_its_call(tmp_path: Path, placed: bool) -> None:
    store = str(tmp_path / "store")
    good = request(sampling={"temperature": 0.0, "max_tokens": 8})
    wrong = [request(sampling={"temperature": math.nan}), request(sampling={"stop": ["\ud800"], "temperature": 0.0})]

    async def life(kept: list[int]) -> list[int]:
        config = CheckpointingConfig(enabled=True, store=store, snapshot_interval_s=3600.0)
        session = await asyncio.to_thread(RecoverySession.open, config)
        session.start()
        try:
            for one in wrong:
                with pytest.raises(InputError, match="sampling"):
                    await session.admit(one, STOP, placed=placed)
            call = await session.admit(good, STOP, placed=placed)
            assert list(call.transcript_ids) == kept
            session.captured(call, [5, 6], [-0.5, -0.5])
            for one in wrong:
                with pytest.raises(InputError, match="sampling"):
                    await session.admit(one, STOP, placed=placed)
            assert session.counters.calls_diverged == 0
            tokens = list(call.transcript_ids)
            session.left(call, placed=placed)
            return tokens
        finally:
            await session.stop(timeout_s=60.0)

    assert asyncio.run(life([])) == [5, 6]
    assert asyncio.run(life([5, 6])) == [5, 6, 5, 6]
