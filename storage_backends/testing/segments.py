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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.codec import call_id, request_digest
from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood
from recovery.model import WIDE_TYPES, Array, CallId, Chunk, Ended, Opened, PolicyVersion, Record, Request
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


COLUMN_NAMES = st.text("abzABZ09._-", min_size=1, max_size=4)


@st.composite
def wide(draw: st.DrawFn, n_tokens: int) -> dict[str, Array]:
    """Wide columns of any type, their values any bits."""
    found = {}
    for name in draw(st.just([]) | st.lists(COLUMN_NAMES, unique=True, max_size=4)):
        shape = (n_tokens, *draw(st.just([]) | st.lists(st.integers(1, 5), min_size=1, max_size=1)))
        dtype = np.dtype(draw(st.sampled_from(WIDE_TYPES)))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8) & rng.choice(np.array([255, 128, 0], np.uint8))
        found[name] = (bits[..., 0] > 127) if dtype == np.bool_ else bits.view(dtype).reshape(shape)
    return found


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
        columns=draw(wide(n)),
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
    if isinstance(value, Mapping) and any(isinstance(item, np.ndarray) for item in value.values()):
        return {name: plain(item) for name, item in value.items()}
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


SPECIAL = {
    "float16": [np.nan, -np.inf, np.inf, -0.0, 0.0, 6e-8, -6e-8, 65504.0],
    "float32": [np.nan, -np.inf, np.inf, -0.0, 0.0, 1e-45, -1e-45, -0.25],
    "float64": [np.nan, -np.inf, np.inf, -0.0, 0.0, 5e-324, -5e-324, 1e308],
}
"""Values of which a careless encoding loses the bits."""


def many_wide(n_chunks: int, n_tokens: int, *, seed: int = 1) -> list[Record]:
    """many(), and of three chunks one has top-k columns, one has others, one has none."""
    rng = np.random.default_rng(seed)
    records = many(n_chunks, n_tokens, seed=seed)
    for at, record in enumerate(records):
        if isinstance(record, Chunk) and at % 3:
            top: dict[str, Array] = {
                "top_ids": rng.integers(0, 150_000, (n_tokens, 5), dtype=np.int32),
                "top_logprobs": -rng.random((n_tokens, 5), dtype=np.float32),
            }
            other: dict[str, Array] = {
                "entropy": rng.random(n_tokens, dtype=np.float32),
                "top_ids": rng.integers(0, 150_000, (n_tokens, 2), dtype=np.int64),
                "tool": rng.random((n_tokens, 1)) < 0.5,
            }
            records[at] = dataclasses.replace(record, columns=top if at % 3 == 1 else other)
    return records


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
        types = {values.dtype.name for r in records if isinstance(r, Chunk) for values in r.columns.values()}
        assert info.wide == tuple(name for name in WIDE_TYPES if name in types)
        assert codec.describe(info.key, segment.data) == info
        assert [plain(record) for record in codec.decode(segment.data, info)] == expected
        assert [plain(record) for record in codec.decode(segment.data, None)] == expected
        for step in (None, 2, len(records) + 1):
            parts = codec.parts(segment.data, info)
            assert sum(part.n_records for part in parts) == len(records)
            wanted = [None if step is None else np.arange(0, part.n_records, step) for part in parts]
            made = [part.unpack()(own) for part, own in zip(parts, wanted, strict=True)]
            assert [plain(record) for part in made for record in part] == expected
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

    @pytest.mark.parametrize("type_", WIDE_TYPES)
    @pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 3)], ids=str)
    def test_l3_wide_columns_of_every_type(self, type_: str, shape: tuple[int, ...]) -> None:
        dtype, n_values = np.dtype(type_), 8 * (shape[1:] or (1,))[0]
        if dtype.kind == "f":
            values = np.resize(np.array(SPECIAL[type_], dtype), n_values)
        elif dtype.kind == "b":
            values = np.arange(n_values) % 3 == 1
        else:
            bounds = np.iinfo(dtype)
            values = np.resize(np.array([bounds.min, bounds.max, 0, 1], dtype), n_values)
        chunk = dataclasses.replace(_chunk(8), columns={"x.Y_z-0": values.reshape(shape)})
        self.check_round_trip([chunk, _chunk(3), chunk])

    def test_l3_wide_columns_keep_the_payload_of_a_nan(self) -> None:
        bits16, bits32 = [0x7E00, 0x7C01, 0xFE42, 0xFC00, 0x8000, 1], [0x7FC00000, 0x7F800001, 0xFFC12345, 1]
        bits64 = [0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8000000012345, 1]
        columns: dict[str, Array] = {
            "a": np.resize(np.array(bits16, np.uint16), 8).view(np.float16),
            "b": np.resize(np.array(bits32, np.uint32), 16).view(np.float32).reshape(8, 2),
            "c": np.resize(np.array(bits64, np.uint64), 8).view(np.float64),
        }
        self.check_round_trip([dataclasses.replace(_chunk(8), columns=columns)])

    def test_records_of_one_segment_have_different_wide_columns(self) -> None:
        for n_chunks, size in ((9, 1), (20, 4), (150, 64)):
            self.check_round_trip(many_wide(n_chunks, 7), records_per_batch=size)

    def test_a_chunk_with_as_many_wide_columns_as_it_may_have(self) -> None:
        columns: dict[str, Array] = {
            f"{i:03d}": np.full((5, 1 + i % 3), i % 100, WIDE_TYPES[i % len(WIDE_TYPES)]) for i in range(256)
        }
        self.check_round_trip([_chunk(5), dataclasses.replace(_chunk(5), columns=columns)])

    def test_wide_columns_that_are_views_in_any_order_of_memory(self) -> None:
        block = np.arange(80, dtype=np.int32).reshape(8, 10)
        columns: dict[str, Array] = {"a": block[:, ::2], "b": block[::-1, 3], "c": np.asfortranarray(block)}
        self.check_round_trip([dataclasses.replace(_chunk(8), columns=columns)])

    def test_decoded_wide_columns_are_read_only(self) -> None:
        codec = self.make_codec()
        segment = codec.encode(many_wide(20, 6), "seg/x")
        found = [r.columns for r in codec.decode(segment.data, segment.info) if isinstance(r, Chunk) and r.columns]
        assert found and not any(values.flags.writeable for columns in found for values in columns.values())

    def test_a_segment_without_wide_columns_is_what_it_was_before_there_were_any(self) -> None:
        codec = self.make_codec()
        bare, wide_one = (codec.encode(make(20, 6), "seg/x") for make in (many, many_wide))
        assert bare.info.wide == () and b"wide" not in bare.data
        assert b"wide-columns" in wide_one.data

    def test_coordinates_with_other_wide_columns_are_refused(self) -> None:
        codec = self.make_codec()
        segment = codec.encode(many_wide(20, 6), "seg/x")
        batch = segment.info.batches[0]
        part = segment.data[batch.offset : batch.offset + batch.length]
        assert segment.info.wide == ("bool", "int32", "int64", "float32")
        for other in ((), ("int32",), ("bool", "int32", "int64", "float32", "float64"), ("bool", "int32", "uint64")):
            info = dataclasses.replace(segment.info, wide=other)
            with pytest.raises(Damaged):
                codec.decode(segment.data, info)
            with pytest.raises(Damaged):
                codec.decode_batch(part, info, 0)
        for unknown in (("float8",), ("int32", "bool"), ("int32", "int32")):
            with pytest.raises(FormatNotUnderstood, match="wide"):
                codec.decode_batch(part, dataclasses.replace(segment.info, wide=unknown), 0)

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

    def test_every_flipped_byte_and_every_truncation_of_wide_columns_is_found(self) -> None:
        codec = self.make_codec()
        segment = codec.encode(many_wide(3, 4), "seg/x")
        assert len(segment.info.wide) == 4
        for at in range(len(segment.data)):
            for change in (1 << at % 8, 255):
                mangled = bytearray(segment.data)
                mangled[at] ^= change
                with pytest.raises(DigestMismatch, match="crc32c"):
                    codec.decode(bytes(mangled), segment.info)
            with pytest.raises(DigestMismatch, match="bytes"):
                codec.decode(segment.data[:at], segment.info)

    def test_mangled_bytes_never_crash_a_reader_that_skips_the_sum(self, tmp_path: Path) -> None:
        segment = self.make_codec(records_per_batch=8).encode(many_wide(20, 12), "seg/x")
        sample = tmp_path / "sample"
        sample.write_bytes(segment.data)
        seed = random.Random(20260101).randrange(1 << 30)
        tally = try_in_process(self.codec, sample, seed=seed, count=self.n_mutations)
        assert sum(tally.values()) == self.n_mutations
        assert tally["Damaged"] + tally["DigestMismatch"] > self.n_mutations // 2

    def test_mangled_batches_never_crash_a_reader_that_skips_the_sum(self, tmp_path: Path) -> None:
        info = (segment := self.make_codec().encode(many_wide(20, 12), "seg/x")).info
        sample = tmp_path / "sample"
        sample.write_bytes(segment.data[info.batches[0].offset :][: info.batches[0].length])
        count = self.n_mutations // 2
        tally = try_in_process(self.codec, sample, records=info.n_records, wide=info.wide, seed=2, count=count)
        assert sum(tally.values()) == count
        assert tally["Damaged"] + tally["DigestMismatch"] > count // 2


def _chunk(n_tokens: int = 6) -> Chunk:
    chunk = many(2, n_tokens)[2]
    assert isinstance(chunk, Chunk)
    return chunk
