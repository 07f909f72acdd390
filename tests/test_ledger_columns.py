"""recovery.ledger_columns: packed chunks and rows are the values that they were made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.ledger_columns import PACKED, ChunkRefs, LedgerRows, Names
from recovery.model import DROPPED, OPEN, CallId, ChunkRef, Identity, LedgerRow, PolicyVersion, RecordRef

U32 = st.integers(0, 2**32 - 1)
KEYS = [f"seg/e000001/w0.00000000/{n:08d}-00000000-00000000.arrow" for n in range(5)]
REFS = st.builds(
    ChunkRef,
    st.builds(RecordRef, st.sampled_from(KEYS), U32),
    U32,
    U32,
    st.binary(min_size=16, max_size=16),
    st.builds(PolicyVersion, st.sampled_from("ab"), st.integers(0, 2**64 - 1)),
)


@given(refs=st.lists(REFS, max_size=8), other=st.lists(REFS, max_size=3), cut=st.integers(0, 8))
def test_a_list_of_chunks_behaves_like_a_list(refs: list[ChunkRef], other: list[ChunkRef], cut: int) -> None:
    chunks = ChunkRefs(Names(), bytearray())
    for ref in refs:
        chunks.append(ref)
    assert chunks == refs and list(chunks) == refs and len(chunks) == len(refs)
    assert len(chunks.packed) == PACKED.itemsize * len(refs)
    assert chunks[cut:] == refs[cut:] and chunks[-2:] == refs[-2:]
    assert chunks.stop == (refs[-1].stop if refs else 0)
    assert chunks.stop_of(min(cut, len(refs))) == (refs[min(cut, len(refs)) - 1].stop if cut and refs else 0)
    chunks.splice(cut, 2, other)
    refs[cut : cut + 2] = other
    assert chunks == refs
    chunks.cut(cut)
    assert chunks == refs[:cut]
    with pytest.raises(IndexError):
        chunks[len(chunks)]


ROWS = st.lists(
    st.builds(
        LedgerRow,
        st.binary(min_size=16, max_size=16).map(CallId),
        U32,
        st.sampled_from([OPEN, DROPPED]),
        U32,
        st.integers(0, 3),
        st.lists(REFS, max_size=3).map(tuple),
        st.none()
        | st.builds(Identity, rollout=st.text(), turn=U32, request_digest=st.just(b""), source_digest=st.just(""),
                    restart_only=st.just(""), opened=st.builds(RecordRef, st.sampled_from(KEYS), U32)),
        st.none(),
        st.none() | st.just(()),
    ),
    max_size=6,
)  # fmt: skip


@given(rows=ROWS)
def test_rows_come_back_and_say_which_are_whole(rows: list[LedgerRow]) -> None:
    columns = LedgerRows.of(rows)
    assert columns == rows and list(columns) == rows and columns[1:] == rows[1:]
    assert [columns[at] for at in range(len(rows))] == rows
    assert columns.whole() == [
        row.state == DROPPED or (row.kept == 0 and row.identity is not None and row.history is not None) for row in rows
    ]
    keys = {c.at.segment for row in rows for c in row.chunks}
    keys |= {row.identity.opened.segment for row in rows if row.identity is not None}
    assert {columns.names.keys[number] for number in columns.segments()} == keys
    assert LedgerRows.of(columns) is columns and LedgerRows.of(rows, columns.names) == rows
    shared = Names(columns.names)
    assert LedgerRows.of(columns, shared).packed is columns.packed
    assert LedgerRows.of(columns, Names()) == rows, "other numbers of versions: packed anew"


def test_a_number_means_one_segment_and_a_segment_may_get_another() -> None:
    names = Names()
    names.bind("a", 7)
    assert (names.number("a"), names.number("b"), names.numbered) == (7, 8, 9)
    names.bind("a", 7)
    with pytest.raises(ValueError, match="number 8 is segment c and b"):
        names.bind("c", 8)
    names.bind("a", 3)
    assert names.number("a") == 3 and names.keys == {7: "a", 8: "b", 3: "a"} and names.numbered == 9
    names.forget(7)
    assert names.known("a") == 3
    names.forget(3)
    assert names.known("a") is None and names.number("a") == 9
    names.reserve(40)
    assert names.number("d") == 40


@pytest.mark.parametrize("field", [{"start": -1}, {"start": 1 << 32}, {"n_tokens": 1 << 32}])
def test_what_does_not_fit_is_refused(field: dict[str, int]) -> None:
    ref = ChunkRef(RecordRef(KEYS[0], 0), 0, 1, b"d" * 16, PolicyVersion("a", 0))
    with pytest.raises(ValueError, match="does not fit a ledger"):
        Names().pack(replace(ref, **field))
