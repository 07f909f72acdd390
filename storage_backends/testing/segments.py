"""What every segment codec has to pass: subclass SegmentConformance, name the codec, run pytest.

Owns: the contract of ports.SegmentCodec as tests, and hypothesis strategies for records.
Does not know: any encoding.

Invariants:
1. Comparison is of bits: NaN payloads, negative zero and denormals count.
2. What could abort the process is tried in another process (mutations.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.codec import call_id, request_digest
from recovery.errors import Damaged, DigestMismatch
from recovery.model import CallId, Chunk, Ended, Opened, PolicyVersion, Record, Request
from recovery.ports import SegmentCodec
from storage_backends.sums import crc32c
from storage_backends.testing.mutations import try_in_process

U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LOGPROB_BITS = st.one_of(
    U32, st.sampled_from([0x7FC00000, 0x7F800001, 0xFFC12345, 0xFF800000, 0x80000000, 0x00000001, 0, 0xBF800000])
)
"""float32 by its bits: NaNs with payloads, -inf, -0.0, 1e-45, 0, -1 and anything else."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
JSON_OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    tokens = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=30))
    n = len(tokens)
    bits = draw(st.none() | st.lists(LOGPROB_BITS, min_size=n, max_size=n))
    return Chunk(
        call_id=CallId(draw(st.binary(min_size=16, max_size=16))),
        attempt=draw(U32),
        start=draw(U32),
        token_ids=np.array(tokens, np.int32),
        logprobs=None if bits is None else np.array(bits, np.uint32).view(np.float32),
        mask=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_),
        version=PolicyVersion(draw(TEXT.filter(bool)), draw(st.integers(0, 2**64 - 1))),
    )


@st.composite
def opened(draw: st.DrawFn) -> Opened:
    request = Request(
        rollout=draw(TEXT),
        turn=draw(st.integers(0, 1000)),
        prompt_token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=20)), np.int32),
        sampling=draw(JSON_OBJECTS),
        restart_only=draw(TEXT),
        source_digest=draw(TEXT),
        extra=draw(JSON_OBJECTS),
    )
    name = call_id(request.rollout, request.turn, request_digest(request))
    return Opened(call_id=name, attempt=draw(U32), request=request)


@st.composite
def ended(draw: st.DrawFn) -> Ended:
    return Ended(
        call_id=CallId(draw(st.binary(min_size=16, max_size=16))),
        attempt=draw(U32),
        n_tokens=draw(U32),
        finish_reason=draw(st.sampled_from(["stop", "length", "repetition"])),
        stop_reason=draw(st.none() | st.integers(-(2**31), 2**31) | TEXT),
    )


RECORDS = st.lists(st.one_of(chunks(), opened(), ended()), max_size=12)


def plain(value: Any) -> Any:
    """`value` as something that can be compared by `==`, down to the bits of its arrays."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        return (type(value), *(plain(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


def many(n_chunks: int, n_tokens: int, *, seed: int = 1) -> list[Record]:
    """One call as it is captured: opened, chunks in order, ended."""
    rng = np.random.default_rng(seed)
    request = Request(
        rollout="p-1/é 🙂", turn=2, prompt_token_ids=np.arange(9, dtype=np.int32), sampling={"temperature": 0.7, "n": 1}
    )
    name = call_id(request.rollout, request.turn, request_digest(request))
    records: list[Record] = [Opened(call_id=name, attempt=3, request=request)]
    for number in range(n_chunks):
        records.append(
            Chunk(
                call_id=name,
                attempt=3,
                start=number * n_tokens,
                token_ids=rng.integers(0, 150_000, n_tokens, dtype=np.int32),
                logprobs=-rng.random(n_tokens, dtype=np.float32) if number % 5 else None,
                mask=rng.random(n_tokens) < 0.9,
                version=PolicyVersion("a", number // 10),
            )
        )
    total = n_chunks * n_tokens
    return [*records, Ended(call_id=name, attempt=3, n_tokens=total, finish_reason="stop", stop_reason=7)]


class SegmentConformance:
    """The contract of ports.SegmentCodec."""

    codec: ClassVar[str]
    """`module:Class` of the codec; the class takes `records_per_batch` and can be made without arguments."""

    n_mutations: ClassVar[int] = 3000

    def make_codec(self, **options: int) -> SegmentCodec:
        module, _, name = self.codec.partition(":")
        made: SegmentCodec = getattr(importlib.import_module(module), name)(**options)
        return made

    def check_round_trip(self, records: list[Record], **options: int) -> None:
        """Whole and batch by batch, `records` come back as they were."""
        codec = self.make_codec(**options)
        segment = codec.encode(records, "seg/e000001/w0.00000000/00000001-00000000")
        info = segment.info
        assert info.key == f"seg/e000001/w0.00000000/00000001-00000000-{info.crc32c:08x}.{codec.suffix}"
        assert (info.nbytes, info.crc32c) == (len(segment.data), crc32c(segment.data))
        expected = [plain(record) for record in records]
        assert [plain(record) for record in codec.decode(segment.data, info)] == expected
        assert [plain(record) for record in codec.decode(segment.data, None)] == expected
        found: list[Any] = []
        for number, batch in enumerate(info.batches):
            part = segment.data[batch.offset : batch.offset + batch.length]
            assert crc32c(part) == batch.crc32c
            assert 1 <= batch.n_records <= 64
            found += map(plain, codec.decode_batch(part, info, number))
        assert found == expected
        assert info.n_records == len(records)

    @settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])
    @given(records=RECORDS, records_per_batch=st.sampled_from([1, 2, 7, 64]))
    def test_l3_whatever_is_captured_comes_back_bit_for_bit(
        self, records: list[Record], records_per_batch: int
    ) -> None:
        self.check_round_trip(records, records_per_batch=records_per_batch)

    def test_l3_nan_inf_negative_zero_and_denormals(self) -> None:
        values = np.array([np.nan, -np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45, -0.25], np.float32)
        tokens, mask = np.arange(8, dtype=np.int32), np.ones(8, np.bool_)
        self.check_round_trip([dataclasses.replace(_chunk(), token_ids=tokens, logprobs=values, mask=mask)])

    def test_empty_segment(self) -> None:
        self.check_round_trip([])

    def test_more_records_than_fit_one_batch(self) -> None:
        records = many(200, 5)
        self.check_round_trip(records)
        assert len(self.make_codec().encode(records, "seg/x").info.batches) == 4

    @pytest.mark.parametrize("mask", ["1", "0", "10", "01", "1011", "0" * 40, "1" * 39 + "0", "01" * 50])
    def test_mask_runs(self, mask: str) -> None:
        flags = np.array([bit == "1" for bit in mask], np.bool_)
        chunk = dataclasses.replace(_chunk(), token_ids=np.arange(len(mask), dtype=np.int32), logprobs=None, mask=flags)
        self.check_round_trip([chunk, _chunk(), chunk])

    def test_n6_rollout_names_of_any_script(self) -> None:
        names = ["a b", "+", "%2F", "#", ":", "🙂", "\u00e9", "e\u0301", "x" * 255, "..", "", "\0", "日本", "\u202e"]
        records: list[Record] = []
        for name in names:
            request = Request(rollout=name, prompt_token_ids=np.zeros(0, np.int32), extra={name: [name]})
            digest = request_digest(request)
            records.append(Opened(call_id=call_id(name, 0, digest), attempt=0, request=request))
        self.check_round_trip(records)
        assert len({record.call_id for record in records}) == len(names)

    def test_what_is_read_does_not_depend_on_the_batches(self) -> None:
        records = many(150, 7)
        decoded = []
        for size in (1, 3, 64):
            codec = self.make_codec(records_per_batch=size)
            segment = codec.encode(records, "seg/x")
            decoded.append([plain(record) for record in codec.decode(segment.data, segment.info)])
        assert decoded[0] == decoded[1] == decoded[2] == [plain(record) for record in records]

    def test_a_codec_decodes_what_was_written_with_other_batches(self) -> None:
        segment = self.make_codec(records_per_batch=5).encode(many(20, 3), "seg/x")
        assert len(self.make_codec().decode(segment.data, segment.info)) == 22

    def test_every_flipped_bit_is_found_before_parsing(self) -> None:
        codec = self.make_codec()
        segment = codec.encode(many(3, 20), "seg/x")
        for bit in range(8 * len(segment.data)):
            mangled = bytearray(segment.data)
            mangled[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DigestMismatch, match="crc32c"):
                codec.decode(bytes(mangled), segment.info)

    def test_every_flipped_bit_of_a_batch_is_found_before_parsing(self) -> None:
        codec = self.make_codec(records_per_batch=4)
        segment = codec.encode(many(6, 5), "seg/x")
        batch = segment.info.batches[1]
        part = segment.data[batch.offset : batch.offset + batch.length]
        for bit in range(8 * len(part)):
            mangled = bytearray(part)
            mangled[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DigestMismatch, match="crc32c"):
                codec.decode_batch(bytes(mangled), segment.info, 1)

    def test_truncation_and_growth_are_found_before_parsing(self) -> None:
        codec = self.make_codec()
        segment = codec.encode(many(3, 20), "seg/x")
        for data in (b"", segment.data[:-1], segment.data[:100], segment.data + b"\0"):
            with pytest.raises(DigestMismatch, match="bytes"):
                codec.decode(data, segment.info)

    def test_coordinates_of_other_batches_are_refused(self) -> None:
        codec = self.make_codec(records_per_batch=4)
        segment = codec.encode(many(6, 5), "seg/x")
        info = dataclasses.replace(segment.info, batches=segment.info.batches[:-1])
        with pytest.raises(Damaged, match="batches"):
            codec.decode(segment.data, info)

    def test_mangled_bytes_never_crash_a_reader_that_skips_the_sum(self, tmp_path: Path) -> None:
        segment = self.make_codec(records_per_batch=8).encode(many(20, 12), "seg/x")
        sample = tmp_path / "sample"
        sample.write_bytes(segment.data)
        seed = random.Random(20260101).randrange(1 << 30)
        tally = try_in_process(self.codec, sample, seed=seed, count=self.n_mutations)
        assert sum(tally.values()) == self.n_mutations
        assert tally["Damaged"] + tally["DigestMismatch"] > self.n_mutations // 2

    def test_mangled_batches_never_crash_a_reader_that_skips_the_sum(self, tmp_path: Path) -> None:
        info = (segment := self.make_codec().encode(many(20, 12), "seg/x")).info
        sample = tmp_path / "sample"
        sample.write_bytes(segment.data[info.batches[0].offset :][: info.batches[0].length])
        count = self.n_mutations // 2
        tally = try_in_process(self.codec, sample, records=info.n_records, seed=2, count=count)
        assert sum(tally.values()) == count
        assert tally["Damaged"] + tally["DigestMismatch"] > count // 2


def _chunk() -> Chunk:
    chunk = many(2, 6)[2]
    assert isinstance(chunk, Chunk)
    return chunk
