"""StoredAt: as a sequence it is the coordinates one by one, and a ledger takes all of them as it would take each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recovery.coordinates import ChunkAt, EndedAt, OpenedAt, StoredAt
from recovery.ledger import Ledger
from recovery.model import BatchInfo, Ended, PolicyVersion, Record, SegmentInfo
from recovery.staging import coordinates_of
from tests.fakes import chunk, name, opened

RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["opened", "chunk", "ended"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 1),
        st.sampled_from([0, 2, 4]),
        st.integers(0, 1),
    ),
    max_size=12,
)


def _record(kind: str, rollout: str, attempt: int, start: int, version: int) -> Record:
    if kind == "opened":
        return opened(rollout, attempt)
    if kind == "chunk":
        return chunk(rollout, start, [7, 8], attempt, PolicyVersion("a", version))
    return Ended(call_id=name(rollout), attempt=attempt, n_tokens=start, finish_reason="stop", stop_reason=None)


def _info(key: str) -> SegmentInfo:
    return SegmentInfo(key=key, nbytes=10, crc32c=1, batches=(BatchInfo(0, 10, 1, 1),))


def _state(ledger: Ledger) -> Any:
    entries = {e.call_id: (e.attempt, e.state, e.n_tokens, list(e.chunks), e.identity, e.ended) for e in ledger}
    return entries, ledger.counts(), sorted(ledger.segments_in_use()), sorted(map(repr, ledger.rows()))


@given(segments=st.lists(RECORDS, max_size=4))
def test_all_at_once_is_one_by_one(segments: list[list[Any]]) -> None:
    whole, single = Ledger(), Ledger()
    for number, drawn in enumerate(segments):
        key = f"seg/e000001/w.00000000/{number + 1:08d}-00000000-00000000.x"
        stored = coordinates_of([_record(*one) for one in drawn], key)
        for ledger in (whole, single):
            ledger.describe(_info(key))
        reasons = [single.apply(at) for at in stored]
        ended, rejected = whole.apply_all(stored)
        taken = zip(stored, reasons, strict=True)
        assert ended == [at.call_id for at, reason in taken if isinstance(at, EndedAt) and not reason]
        assert sorted(rejected.elements()) == sorted(filter(None, reasons))
        assert _state(whole) == _state(single)
        if number % 2:
            whole.published()
            single.published()


def test_it_is_the_sequence_of_its_records() -> None:
    stored = coordinates_of([opened("a"), chunk("a", 0, [1, 2]), _record("ended", "a", 0, 2, 0)], "seg/x")
    assert [type(at) for at in stored] == [OpenedAt, ChunkAt, EndedAt] and len(stored) == 3
    assert stored == list(stored) and stored[1:] == list(stored)[1:] and stored[-1] == stored[2]
    assert stored == coordinates_of([opened("a"), chunk("a", 0, [1, 2]), _record("ended", "a", 0, 2, 0)], "seg/x")


def test_any_difference_is_one() -> None:
    records = [opened("a"), chunk("a", 0, [1, 2]), _record("ended", "a", 0, 2, 0)]
    stored = coordinates_of(records, "seg/x")
    others: list[StoredAt] = [
        coordinates_of(records, "seg/y"),
        coordinates_of(records[:2], "seg/x"),
        coordinates_of([records[0], chunk("a", 0, [1, 3]), records[2]], "seg/x"),
        coordinates_of([records[0], chunk("a", 0, [1, 2], 0, PolicyVersion("b", 0)), records[2]], "seg/x"),
        coordinates_of([records[0], chunk("a", 0, [1, 2], 1), records[2]], "seg/x"),
        replace(stored, starts=np.array([0, 1, 2])),
        replace(stored, others={}),
    ]
    assert all(stored != other for other in others) and stored != 3
