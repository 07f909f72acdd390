"""ZarrSegmentCodec: the contract of every segment codec, and what it writes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from recovery.codec import chunk_digest
from recovery.errors import Damaged, DigestMismatch
from recovery.model import Chunk, Opened
from storage_backends import zarr_arrays, zarr_batches, zarr_segments, zarr_zip
from storage_backends.arrow_segments import ArrowSegmentCodec
from storage_backends.testing.conformance import SegmentConformance
from storage_backends.testing.segments import many, plain
from storage_backends.zarr_segments import ZarrSegmentCodec

CODEC = ZarrSegmentCodec()


class TestZarrSegments(SegmentConformance):
    codec = "storage_backends.zarr_segments:ZarrSegmentCodec"


def test_entries_are_documents_and_then_the_chunks_of_each_batch() -> None:
    segment = CODEC.encode(many(100, 3), "seg/x")
    entries = zarr_zip.read(segment.data, "x")
    names = [entry.name for entry in entries]
    arrays = zarr_arrays.array_names(())
    assert arrays == sorted(arrays)
    assert names[:18] == ["zarr.json", *(f"{name}/zarr.json" for name in arrays)]
    first = [f"{name}/c/0" + "/0" * (name.endswith("_range") or name in ("call_id", "digest")) for name in arrays]
    assert names[18:35] == first
    assert len(names) == 18 + 2 * 17 and len(set(names)) == len(names)
    for number, batch in enumerate(segment.info.batches):
        inside = [e for e in entries if batch.offset <= e.offset < batch.offset + batch.length]
        assert {e.name.split("/")[2] for e in inside} == {str(number)} and len(inside) == 17


def test_the_same_records_give_the_same_bytes() -> None:
    assert CODEC.encode(many(100, 3), "seg/x") == ZarrSegmentCodec().encode(many(100, 3), "seg/x")


def test_described_is_what_was_encoded() -> None:
    for records in (many(200, 5), many(1, 1), []):
        segment = CODEC.encode(records, "seg/e000001/w0.00000000/00000001-00000000")
        assert CODEC.describe(segment.info.key, segment.data) == segment.info
    with pytest.raises(DigestMismatch):
        CODEC.describe(segment.info.key, segment.data[:-1])
    with pytest.raises(Damaged, match="no segment's key"):
        CODEC.describe("seg/x.zarr", segment.data)


def test_digests_are_those_of_the_arrow_segment() -> None:
    records = many(70, 5)
    zarr, arrow = (codec.decode(codec.encode(records, "s").data, None) for codec in (CODEC, ArrowSegmentCodec()))
    assert list(map(plain, zarr)) == list(map(plain, arrow))
    assert [chunk_digest(r) for r in zarr if isinstance(r, Chunk)] == [
        chunk_digest(r) for r in arrow if isinstance(r, Chunk)
    ]


def test_decoded_arrays_are_read_only() -> None:
    big = dataclasses.replace(many(1, 1)[1], token_ids=np.arange(70_000, dtype=np.int32), mask=np.ones(70_000, "?"))
    for record in CODEC.decode(CODEC.encode([*many(64, 100), big], "seg/x").data, None):
        if isinstance(record, Chunk):
            assert not record.token_ids.flags.writeable and not record.mask.flags.writeable
            assert record.logprobs is None or not record.logprobs.flags.writeable
        elif isinstance(record, Opened):
            assert not record.request.prompt_token_ids.flags.writeable


def test_long_runs_of_values_are_several_chunks_and_short_ones_are_not_padded_to_them() -> None:
    rng = np.random.default_rng(0)
    sizes = [1 << 20, 3, 1, zarr_arrays.CHUNK_VALUES_MAX, zarr_arrays.CHUNK_VALUES_MAX + 1, 7]
    records = [
        dataclasses.replace(
            many(1, 1)[1],
            token_ids=rng.integers(0, 9, n, dtype=np.int32),
            logprobs=rng.random(n, dtype=np.float32) if n % 2 else None,
            mask=rng.random(n) < 0.5,
        )
        for n in sizes
    ]
    for per_batch in (1, 2, 64):
        codec = ZarrSegmentCodec(per_batch)
        segment = codec.encode(records, "seg/x")
        assert list(map(plain, CODEC.decode(segment.data, segment.info))) == list(map(plain, records))
        for number, batch in enumerate(segment.info.batches):
            part = segment.data[batch.offset : batch.offset + batch.length]
            found = CODEC.decode_batch(part, segment.info, number)
            assert list(map(plain, found)) == list(map(plain, records[number * per_batch : (number + 1) * per_batch]))
    names = [entry.name for entry in zarr_zip.read(CODEC.encode(records, "seg/x").data, "x")]
    assert sum(name.startswith("token_ids/c/") for name in names) == 16 + 3


def test_padding_is_bounded_when_batches_differ_much_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_batches, "PADDING_ALWAYS", 1000)
    one = many(1, 1)[1]
    long = dataclasses.replace(one, token_ids=np.arange(20_000, dtype=np.int32), mask=np.ones(20_000, "?"))
    records = [long, *[one] * 400]
    codec = ZarrSegmentCodec(1)
    data = codec.encode(records, "seg/x").data
    assert list(map(plain, CODEC.decode(data, None))) == list(map(plain, records))
    documents = {
        entry.name: bytes(entry.data) for entry in zarr_zip.read(data, "x") if entry.name.endswith("zarr.json")
    }
    (length,) = json.loads(documents["token_ids/zarr.json"])["shape"]
    assert 20_400 <= length < 2 * 20_400 + 1000


def test_a_batch_of_too_many_tokens_becomes_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_segments, "RAW_BYTES_PER_BATCH", 5 * (16 * 20 + 256))
    segment = CODEC.encode(many(30, 20), "seg/x")
    assert {batch.n_records for batch in segment.info.batches} == {4}
    assert list(map(plain, CODEC.decode(segment.data, segment.info))) == list(map(plain, many(30, 20)))
    monkeypatch.setattr(zarr_batches, "BATCH_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="could not be read again"):
        CODEC.encode(many(30, 20), "seg/x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", np.zeros(6, np.int64)),
        ("logprobs", np.zeros(6, np.float64)),
        ("start", 1 << 32),
        ("attempt", 1 << 32),
    ],
)
def test_what_would_change_on_the_way_is_refused_at_once(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        CODEC.encode([dataclasses.replace(many(2, 6)[2], **{name: value})], "seg/x")
