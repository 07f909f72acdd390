"""recovery.records: records as columns are the records that they were made of, with the digests of codec.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.codec import chunk_digest, request_digest
from recovery.model import Chunk, Ended, Opened, Record
from recovery.records import Records, raw_nbytes
from storage_backends.testing.segments import RECORDS, many, plain


def digest(record: Record) -> bytes:
    match record:
        case Chunk():
            return chunk_digest(record)
        case Opened():
            return request_digest(record.request)
        case Ended():
            return bytes(16)


@given(parts=st.lists(RECORDS, max_size=4))
def test_columns_are_the_records_alone_and_joined(parts: list[list[Record]]) -> None:
    made = [Records.of(part) for part in parts]
    whole = [record for part in parts for record in part]
    for records, wanted in [*zip(made, parts, strict=True), (Records.joined(made), whole)]:
        assert list(map(plain, records)) == list(map(plain, wanted)) and len(records) == len(wanted)
        assert records.digests.tolist() == [digest(record) for record in wanted]
        assert records.raw_nbytes().tolist() == [raw_nbytes(record) for record in wanted]
        assert list(records.with_columns()) == [
            at for at, record in enumerate(wanted) if isinstance(record, Chunk) and record.columns
        ]
        assert [plain(record) for record in records[1:3]] == [plain(record) for record in wanted[1:3]]
        assert Records.of(records) is records


def test_what_cannot_be_stored_is_refused_at_once() -> None:
    good = many(1, 4)[1]
    assert isinstance(good, Chunk)
    for fields, error in (
        ({"token_ids": np.arange(4, dtype=np.int64)}, TypeError),
        ({"logprobs": np.zeros(4, np.float64)}, TypeError),
        ({"call_id": b"short"}, ValueError),
        ({"start": 1 << 70}, ValueError),
    ):
        with pytest.raises(error):
            Records.of([dataclasses.replace(good, **fields)])


def test_indices_are_those_of_a_sequence() -> None:
    records = Records.of(many(3, 2))
    assert plain(records[-1]) == plain(records[len(records) - 1])
    with pytest.raises(IndexError):
        records[len(records)]
