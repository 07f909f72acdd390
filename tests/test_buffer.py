"""recovery.buffer: nothing is lost, doubled or relabelled, and a freeze copies nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.buffer import Rows, Run, TokenBuffer
from recovery.model import MAX_TOKENS_PER_CHUNK, PolicyVersion
from tests.fakes import V0, name

CALL = name("b")


@dataclass(frozen=True)
class Token:
    """The model's one token: what may never come apart."""

    id: int
    logprob: float | None
    version: PolicyVersion


VERSIONS = st.builds(PolicyVersion, st.sampled_from("ab"), st.integers(0, 2))
OUTPUTS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-50, 0, width=32)), max_size=5),
        st.booleans(),
        VERSIONS,
        st.booleans(),
    ),
    max_size=30,
)
"""(tokens, with logprobs?, version, freeze after it?)"""


def flat(runs: Iterable[Run]) -> list[Token]:
    tokens = []
    for run in runs:
        logprobs = run.logprobs if run.logprobs is not None else [None] * len(run.token_ids)
        tokens += [Token(i, lp, run.version) for i, lp in zip(run.token_ids, logprobs, strict=True)]
    return tokens


@given(start=st.integers(0, 100), outputs=OUTPUTS)
def test_any_history_gives_back_exactly_its_tokens(start: int, outputs: list) -> None:
    """Freezing between any two appends loses, doubles and reorders nothing."""
    buffer = TokenBuffer(CALL, 3, [7] * start, [-1.0] * start, [(0, V0)] * bool(start))
    model: list[Token] = []
    taken: list[Run] = []
    for tokens, with_logprobs, version, freeze in outputs:
        ids, lps = [t for t, _ in tokens], [lp for _, lp in tokens]
        buffer.append(ids, lps if with_logprobs else None, version)
        model += [Token(t, lp if with_logprobs else None, version) for t, lp in tokens]
        assert buffer.end == start + len(model)
        assert buffer.n_pending == len(model) - len(flat(taken))
        if freeze:
            taken += buffer.freeze()
            assert buffer.n_pending == 0
    taken += buffer.freeze()
    assert not buffer.freeze()
    assert flat(taken) == model
    at = start
    for run in taken:  # contiguous, never empty, one version and one attempt each
        assert (run.start, run.call_id, run.attempt) == (at, CALL, 3)
        assert len(run.token_ids) >= 1
        at += len(run.token_ids)
    assert at == start + len(model)
    begins = {at: token.version for at, token in enumerate([Token(7, -1.0, V0)] * start + model)}
    assert [begins[at] for at, _ in buffer.spans] == [version for _, version in buffer.spans]
    assert [at for at, _ in buffer.spans] == [at for at in begins if at == 0 or begins[at] != begins[at - 1]]


@given(outputs=OUTPUTS)
def test_a_run_becomes_the_chunk_it_is(outputs: list) -> None:
    buffer = TokenBuffer(CALL, 1)
    for tokens, with_logprobs, version, _ in outputs:
        buffer.append([t for t, _ in tokens], [lp for _, lp in tokens] if with_logprobs else None, version)
    for run in buffer.freeze():
        chunk = run.to_chunk()
        assert (chunk.call_id, chunk.attempt, chunk.start, chunk.version) == (CALL, 1, run.start, run.version)
        assert chunk.token_ids.dtype == np.int32 and chunk.token_ids.tolist() == run.token_ids.tolist()
        assert (chunk.logprobs is None) == (run.logprobs is None)
        if chunk.logprobs is not None:
            assert chunk.logprobs.dtype == np.float32 and chunk.logprobs.tolist() == list(run.logprobs)
        assert chunk.mask.all() and chunk.mask.shape == chunk.token_ids.shape


def test_freeze_copies_no_token_and_what_comes_later_does_not_touch_it() -> None:
    """Its cost cannot depend on the number of tokens."""
    buffer = TokenBuffer(CALL, 0)
    buffer.append([1, 2], [-0.5, -0.25], V0)
    buffer.append([3], [-1.0], V0)
    runs = buffer._runs
    frozen = buffer.freeze()
    assert frozen is runs
    assert frozen[0].of_ids is buffer.token_ids and frozen[0].of_logprobs is buffer.logprobs
    buffer.append([4], [-2.0], V0)
    assert (frozen[0].token_ids.tolist(), list(frozen[0].logprobs or ())) == ([1, 2, 3], [-0.5, -0.25, -1.0])
    assert [run.start for run in buffer.freeze()] == [3]


@pytest.mark.parametrize("wrong", [2**31, "7", None, 1.5])
@pytest.mark.parametrize("n", [1, 3])
def test_a_token_that_is_none_changes_nothing(wrong: object, n: int) -> None:
    buffer = TokenBuffer(CALL, 0)
    buffer.append([1], [-0.5], V0)
    ids: list[Any] = [5, 6, wrong][-n:]
    for given_ids, logprobs in ((ids, [-1.0] * n), ([5, 6, 7][-n:], [-1.0, -1.0, "x"][-n:])):
        with pytest.raises((TypeError, OverflowError)):
            buffer.append(given_ids, logprobs, PolicyVersion("other", 1))
        assert (buffer.end, buffer.n_pending, buffer.spans) == (1, 1, [(0, V0)])
        assert (buffer.token_ids.tolist(), buffer.logprobs.tolist()) == ([1], [-0.5])
    buffer.append([2], [-0.25], V0)
    assert flat(buffer.freeze()) == [Token(1, -0.5, V0), Token(2, -0.25, V0)]


@given(outputs=OUTPUTS, data=st.data())
def test_what_is_appended_again_is_stored_again_and_added_once(outputs: list, data: st.DataObject) -> None:
    buffer = TokenBuffer(CALL, 0)
    model: list[Token] = []
    for tokens, with_logprobs, version, _ in outputs:
        ids, lps = [t for t, _ in tokens], [lp for _, lp in tokens]
        buffer.append(ids, lps if with_logprobs else None, version)
        model += [Token(t, lp if with_logprobs else None, version) for t, lp in tokens]
    spans = list(buffer.spans)
    first = data.draw(st.integers(0, len(model)))
    buffer.rewind(first)
    for token in model[first:]:
        buffer.append([token.id], None if token.logprob is None else [token.logprob], token.version)
    assert flat(buffer.freeze()) == model[first:]
    assert buffer.token_ids.tolist() == [token.id for token in model] and buffer.spans == spans
    buffer.append([9], [-9.0], V0)
    assert flat(buffer.freeze()) == [Token(9, -9.0, V0)] and buffer.end == len(model) + 1


def test_what_does_not_fit_changes_nothing() -> None:
    buffer = TokenBuffer(CALL, 0)
    buffer.append([1], [-0.5], V0)
    for ids, logprobs in (([1, 2], [-0.5]), ([1], [])):
        with pytest.raises(ValueError, match="logprobs"):
            buffer.append(ids, logprobs, V0)
    with pytest.raises(ValueError, match="fit in a chunk"):
        buffer.append([0] * (MAX_TOKENS_PER_CHUNK + 1), None, V0)
    assert (buffer.end, buffer.n_pending) == (1, 1)
    assert flat(buffer.freeze()) == [Token(1, -0.5, V0)]


def test_a_run_is_never_longer_than_a_chunk_may_be() -> None:
    buffer = TokenBuffer(CALL, 0)
    buffer.append([7] * (MAX_TOKENS_PER_CHUNK - 1), None, V0)
    buffer.append([8, 9], None, V0)
    assert [(run.start, len(run.token_ids)) for run in buffer.freeze()] == [
        (0, MAX_TOKENS_PER_CHUNK - 1),
        (MAX_TOKENS_PER_CHUNK - 1, 2),
    ]


# ---- wide columns ----------------------------------------------------------------------------------------------------

KINDS: list[dict[str, tuple[str, tuple[int, ...]]]] = [
    {},
    {"ids": ("int32", (3,)), "lps": ("float32", (3,))},
    {"ids": ("int32", (3,)), "lps": ("float16", (3,))},
    {"ids": ("int32", (2,)), "lps": ("float32", (3,))},
    {"ids": ("int32", ()), "b": ("bool", (1,))},
]
"""Sets of columns, by name: type and the shape of a row."""

WIDE_OUTPUTS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(KINDS), VERSIONS, st.booleans(), st.integers(0, 2**32)), max_size=25
)


def rows_for(kind: dict[str, tuple[str, tuple[int, ...]]], n: int, seed: int) -> dict[str, np.ndarray]:
    """Any bits; strided, so that a buffer that kept the memory instead of the values would be found out."""
    rng = np.random.default_rng(seed)
    columns = {}
    for name_, (type_, shape) in kind.items():
        dtype = np.dtype(type_)
        raw = rng.integers(0, 256, (2 * n, *(shape or (1,)), dtype.itemsize), np.uint8)
        values = raw[..., 0] > 127 if type_ == "bool" else raw.view(dtype)[..., 0]
        columns[name_] = values[::2].reshape(n, *shape) if shape else values[::2, 0]
    return columns


@given(outputs=WIDE_OUTPUTS)
def test_l3_any_history_gives_back_exactly_its_wide_rows(outputs: list) -> None:
    """Token by token or in runs, with columns that come, go and change, and freezes in between."""
    buffer = TokenBuffer(CALL, 0)
    model: list[dict[str, tuple[str, tuple[int, ...], bytes]]] = []
    taken: list[Run] = []
    for n, kind, version, freeze, seed in outputs:
        columns = rows_for(kind, n, seed)
        buffer.append(list(range(n)), None, version, columns)
        for i in range(n):
            model.append({name_: (v.dtype.name, v.shape[1:], v[i].tobytes()) for name_, v in columns.items()})
        for values in columns.values():
            values[...] = 0  # the caller may use its arrays again
        if freeze:
            taken += buffer.freeze()
    taken += buffer.freeze()
    found = []
    for run in taken:
        chunk = run.to_chunk()
        assert {v.shape[0] for v in chunk.columns.values()} <= {len(run.token_ids)}
        for i in range(len(run.token_ids)):
            found.append({c: (v.dtype.name, v.shape[1:], v[i].tobytes()) for c, v in chunk.columns.items()})
    assert found == model


def test_rows_that_are_alike_make_one_run_however_they_come() -> None:
    buffer = TokenBuffer(CALL, 0)
    ids = np.arange(20, dtype=np.int32).reshape(10, 2)
    for i in range(4):
        buffer.append([i], [-1.0], V0, {"top": ids[i : i + 1]})
    buffer.append(list(range(4, 10)), [-1.0] * 6, V0, {"top": ids[4:]})
    (run,) = buffer.freeze()
    assert run.to_chunk().columns["top"].tolist() == ids.tolist()


def test_freeze_hands_over_the_very_bytes_of_wide_columns() -> None:
    buffer = TokenBuffer(CALL, 0)
    buffer.append([1], None, V0, {"top": np.ones((1, 3), np.float32)})
    (held,) = buffer._runs[0].columns
    (frozen,) = buffer.freeze()
    assert frozen.columns[0] is held
    buffer.append([2], None, V0, {"top": np.zeros((1, 3), np.float32)})
    values = frozen.to_chunk().columns["top"]
    assert values.tolist() == [[1, 1, 1]] and np.shares_memory(values, np.frombuffer(held, np.float32))


@pytest.mark.parametrize(
    "columns",
    [
        {"top": np.zeros((2, 3), np.float32)},
        {"top": np.zeros((0, 3), np.float32)},
        {"top": np.zeros((1, 3), np.complex64)},
        {"top": [[1.0, 2.0, 3.0]]},
        {"top": np.zeros((1, 4097), np.float32)},
        {"top top": np.zeros((1, 3), np.float32)},
        {"top": np.zeros((1, 3), np.float32), "other": np.zeros(2, np.int8)},
    ],
)
def test_wide_rows_that_do_not_fit_change_nothing(columns: dict) -> None:
    buffer = TokenBuffer(CALL, 0)
    fitting = {"top": np.ones((1, 3), np.float32)}
    buffer.append([1], None, V0, fitting)
    with pytest.raises((TypeError, ValueError), match="wide column"):
        buffer.append([2], None, V0, columns)
    assert (buffer.end, buffer.n_pending) == (1, 1)
    (run,) = buffer.freeze()
    assert run.to_chunk().columns["top"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_rows_of_other_tokens_change_nothing(n: int) -> None:
    buffer = TokenBuffer(CALL, 0)
    with pytest.raises(ValueError, match="rows of wide columns"):
        buffer.append([1, 2], None, V0, Rows.of({"rank": np.zeros(n, np.int32)}, n))
    assert (buffer.end, buffer.freeze()) == (0, ())


def test_a_run_never_has_more_wide_bytes_than_a_chunk_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("recovery.buffer", "recovery.model"):
        monkeypatch.setattr(f"{module}.COLUMN_BYTES_PER_CHUNK_MAX", 1000)
    buffer = TokenBuffer(CALL, 0)
    block = {"hidden": np.ones((3, 10), np.float32)}
    for _ in range(9):
        buffer.append([7] * 3, None, V0, block)
    assert [len(run.token_ids) for run in buffer.freeze()] == [24, 3]
    with pytest.raises(ValueError, match="bytes"):
        buffer.append([7] * 26, None, V0, {"hidden": np.ones((26, 10), np.float32)})
    assert buffer.n_pending == 0
