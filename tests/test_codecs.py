"""codecs: which codec reads what, and a store that holds segments of both."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from recovery.codec import call_of, chunk_digest, request_digest
from recovery.errors import ConfigError, Damaged, DigestMismatch, FormatNotUnderstood
from recovery.layout import segment_position, segment_stem
from recovery.ledger import Ledger
from recovery.model import Chunk, Opened, Record
from recovery.ports import Put
from recovery.read_ahead import divided
from recovery.reading import read_segment, read_transcripts
from recovery.records import Records
from recovery.staging import coordinates_of
from storage_backends.arrow_segments import ArrowSegmentCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec, codec_of_key, segment_codec
from storage_backends.memory import MemoryStore
from storage_backends.sums import crc_from_key
from storage_backends.testing.segments import RECORDS, many, plain
from storage_backends.zarr_segments import ZarrSegmentCodec

BOTH: tuple[CodecName, ...] = ("arrow", "zarr")


def digests(records: list[Record]) -> list[bytes]:
    """What stands for each record's content."""
    return [
        chunk_digest(r) if isinstance(r, Chunk) else request_digest(r.request) if isinstance(r, Opened) else b""
        for r in records
    ]


def test_a_codec_has_a_name_which_is_its_suffix() -> None:
    assert isinstance(segment_codec("arrow"), ArrowSegmentCodec) and isinstance(segment_codec("zarr"), ZarrSegmentCodec)
    for name in BOTH:
        assert segment_codec(name).suffix == name and segment_codec(name) is segment_codec(name)
        assert MixedSegmentCodec(name).suffix == name
    other: Any = "parquet"
    for make in (segment_codec, MixedSegmentCodec):
        with pytest.raises(ConfigError, match="'parquet' is no segment codec"):
            make(other)


def test_a_key_says_which_codec_reads_it() -> None:
    for name in BOTH:
        info = segment_codec(name).encode(many(1, 1), segment_stem(1, "w0.00000000", 3, "0a0a0a0a")).info
        assert codec_of_key(info.key) is segment_codec(name)
        at = segment_position(info.key)
        assert at is not None and at.flush == 3 and crc_from_key(info.key) == info.crc32c
    for key in ("", "arrow", "zarr", "seg/x-12345678", "seg/x.zarr.zip", "seg/x.json", "seg/x.ARROW", "seg.arrow/x"):
        with pytest.raises(FormatNotUnderstood, match="not known here") as caught:
            codec_of_key(key)
        assert caught.value.hint


@given(records=RECORDS)
def test_l3_both_encodings_are_the_same_thing(records: list[Record]) -> None:
    expected = list(map(plain, records))
    for name in BOTH:
        mixed = MixedSegmentCodec(name)
        segment = mixed.encode(records, "seg/x")
        for reader in (mixed, MixedSegmentCodec()):
            for info in (segment.info, None):
                found = reader.decode(segment.data, info)
                assert list(map(plain, found)) == expected and digests(found) == digests(records)
            assert reader.describe(segment.info.key, segment.data) == segment.info
        for number, batch in enumerate(segment.info.batches):
            part = segment.data[batch.offset : batch.offset + batch.length]
            assert list(map(plain, mixed.decode_batch(part, segment.info, number))) == expected[64 * number :][:64]


def test_transcoding_is_the_identity() -> None:
    arrow, zarr = segment_codec("arrow"), segment_codec("zarr")
    first = arrow.encode(many(150, 7), "seg/x")
    through = zarr.encode(arrow.decode(first.data, first.info), "seg/x")
    assert arrow.encode(zarr.decode(through.data, through.info), "seg/x") == first


def test_bytes_without_coordinates_are_known_by_how_they_begin() -> None:
    for data in (b"", b"A", b"PK", b"PK\x05\x06" + bytes(18), bytes(100)):
        with pytest.raises(Damaged, match="begins like none"):
            MixedSegmentCodec().decode(data, None)
    for data in (b"ARROW1", b"PK\x03\x04"):
        with pytest.raises(Damaged):
            MixedSegmentCodec().decode(data, None)


def test_a_segment_under_the_suffix_of_the_other_is_not_read() -> None:
    segment = segment_codec("zarr").encode(many(1, 1), "seg/x")
    key = segment.info.key.replace(".zarr", ".arrow")
    with pytest.raises(Damaged):
        MixedSegmentCodec().describe(key, segment.data)


@pytest.mark.parametrize("write", BOTH)
def test_a_store_may_hold_segments_of_both(write: CodecName) -> None:
    store, ledger, expected = MemoryStore(), Ledger(), {}
    for flush in range(6):
        renamed = [_of_call(record, flush) for record in many(40 + flush, 9, seed=flush)[:-1]]
        half = len(renamed) // 2
        for part, records in enumerate((renamed[:half], renamed[half:])):
            codec = segment_codec(BOTH[(flush + part) % 2])
            segment = codec.encode(records, segment_stem(1, "w0.00000000", 2 * flush + part, "00000000"))
            assert store.put_new(segment.info.key, segment.data) is Put.CREATED
            ledger.describe(segment.info)
            assert not any(map(ledger.apply, coordinates_of(records, segment.info.key)))
        expected[renamed[0].call_id] = [r for r in renamed if isinstance(r, Chunk)]
    assert {key.rpartition(".")[2] for key in ledger.segments_in_use()} == set(BOTH)
    mixed = MixedSegmentCodec(write)
    transcripts = read_transcripts(store, mixed, ledger, ledger)
    assert len(transcripts) == 6
    for call, chunks in expected.items():
        tokens = [token for chunk in chunks for token in chunk.token_ids.tolist()]
        assert transcripts[call].token_ids.tolist() == tokens

    key = min(key for key in ledger.segments_in_use() if key.endswith("zarr"))
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.put_new(key, bytes(data))
    with pytest.raises(DigestMismatch, match="crc32c"):
        read_segment(store, mixed, ledger.segment(key))


def _of_call(record: Record, number: int) -> Any:
    first = many(1, 1)[0]
    assert isinstance(first, Opened)
    request = dataclasses.replace(first.request, rollout=f"r{number}")
    name = call_of(request)
    if isinstance(record, Opened):
        return dataclasses.replace(record, call_id=name, request=request)
    return dataclasses.replace(record, call_id=name)


def test_no_library_is_loaded_before_it_is_needed() -> None:
    script = (
        "import sys, storage_backends.codecs as c; assert not {'pyarrow', 'zarr', 'numcodecs'} & set(sys.modules);"
        "m = c.MixedSegmentCodec('arrow'); assert 'storage_backends.zarr_segments' not in sys.modules;"
        "d = c.segment_codec('zarr').encode([], 'seg/x').data; assert len(m.decode(d, None)) == 0;"
        "assert not {'zarr', 'numcodecs'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_zarr_segments_need_no_zarr() -> None:
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('zarr', 'numcodecs', 'donfig')));"
        "from storage_backends.codecs import MixedSegmentCodec as M;"
        "from storage_backends.testing.segments import many_wide, plain;"
        "records = many_wide(70, 5); s = M('zarr').encode(records, 'seg/x');"
        "assert list(map(plain, M().decode(s.data, s.info))) == list(map(plain, records))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("write", BOTH)
def test_a_chunk_is_hashed_if_it_is_wanted(write: CodecName) -> None:
    """A segment in which one chunk is not what its digest says, though its bytes are those that were written."""
    codec, records = segment_codec(write), Records.of(many(150, 9))
    digests = records.digests.copy()
    bad = 100
    digests[bad] = b"x" * 16
    segment = codec.encode(dataclasses.replace(records, digests=digests), segment_stem(1, "w0.00000000", 1, "00000000"))

    def made(wanted: Sequence[int]) -> Records:
        parts = codec.parts(segment.data, segment.info)
        own = divided(np.array(wanted), [part.n_records for part in parts])
        return Records.joined([part.unpack()(numbers) for part, numbers in zip(parts, own, strict=True)])

    for wanted in ([bad], [149, bad, 0]):
        with pytest.raises(DigestMismatch, match="the content does not have the recorded digest"):
            made(wanted)
    with pytest.raises(DigestMismatch, match="the content does not have the recorded digest"):
        [part.unpack()(None) for part in codec.parts(segment.data, segment.info)]
    wanted = [3, 148, 7, bad - 1, bad + 1]
    found = made(wanted)
    assert found.digests[wanted].tolist() == records.digests[wanted].tolist()
    assert found.digests[bad].tobytes() == bytes(16), "nobody takes it for the chunk that a ledger means"


@pytest.mark.parametrize("write", BOTH)
def test_f3_every_flipped_byte_is_found_whatever_is_wanted(write: CodecName) -> None:
    """Of one call of many: the bytes of the others are not hashed, but no byte of the object goes unchecked."""
    store, ledger = MemoryStore(), Ledger()
    records = [*many(3, 5), *(_of_call(record, 1) for record in many(12, 5, seed=1))]
    segment = segment_codec(write).encode(records, segment_stem(1, "w0.00000000", 1, "00000000"))
    store.put_new(segment.info.key, segment.data)
    ledger.describe(segment.info)
    for at in coordinates_of(records, segment.info.key):
        ledger.apply(at)
    entry = next(iter(ledger))
    assert read_transcripts(store, MixedSegmentCodec(), ledger, [entry])
    for at in range(len(segment.data)):
        flipped = bytearray(segment.data)
        flipped[at] ^= 1 << at % 8
        store.put(segment.info.key, bytes(flipped))
        with pytest.raises(DigestMismatch):
            read_transcripts(store, MixedSegmentCodec(), ledger, [entry])
