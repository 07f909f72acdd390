"""ArrowSegmentCodec: the contract of every segment codec, the columns of docs/format.md, and its own refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recovery.codec import chunk_digest, request_digest
from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood
from recovery.model import Chunk, Opened, Record
from storage_backends import arrow_file, flatbuffer
from storage_backends.arrow_segments import ArrowSegmentCodec, schema_of
from storage_backends.sums import check_bytes, crc32c, crc_from_key
from storage_backends.testing.conformance import SegmentConformance
from storage_backends.testing.segments import many, plain

CODEC = ArrowSegmentCodec()
KEY = b"prefix-recovery"
SCHEMA = schema_of()


class TestArrowSegments(SegmentConformance):
    codec = "storage_backends.arrow_segments:ArrowSegmentCodec"


def rewritten(
    records: list[Record],
    change: Callable[[dict[str, list[Any]]], None] = lambda columns: None,
    schema: pa.Schema = SCHEMA,
    compression: str | None = "zstd",
) -> bytes:
    """A segment whose rows were changed by `change`, written by plain pyarrow."""
    segment = CODEC.encode(records, "seg/x")
    columns = pa.ipc.open_file(segment.data).read_all().to_pydict()
    change(columns)
    loose = pa.schema([field.with_nullable(True) for field in schema], metadata=schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, loose, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        batch = pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in loose], schema=loose)
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_columns_are_those_of_the_format() -> None:
    records = many(3, 4)
    segment = CODEC.encode(records, "seg/x")
    file = pa.ipc.open_file(segment.data)
    assert json.loads(file.schema.metadata[KEY]) == {
        "format": "prefix-recovery/segment",
        "version": 1,
        "requires": [],
    }
    assert [(field.name, str(field.type)) for field in file.schema] == [
        ("kind", "uint8"),
        ("call_id", "fixed_size_binary[16]"),
        ("attempt", "uint32"),
        ("start", "uint32"),
        ("token_ids", "list<item: int32>"),
        ("logprobs", "list<item: float>"),
        ("mask_starts", "list<item: uint32>"),
        ("mask_values", "list<item: bool>"),
        ("lineage", "string"),
        ("number", "uint64"),
        ("digest", "fixed_size_binary[16]"),
        ("body", "string"),
    ]
    opened, first, second, _, ended = file.read_all().to_pylist()
    request = records[0]
    assert isinstance(request, Opened)
    assert opened["kind"] == 0 and opened["start"] == 0 and opened["token_ids"] == list(range(9))
    assert opened["digest"] == request_digest(request.request)
    assert json.loads(opened["body"]) == {
        "rollout": "p-1/é 🙂",
        "turn": 2,
        "sampling": {"temperature": 0.7, "n": 1},
        "extra": {},
        "restart_only": "",
        "source_digest": "",
    }
    assert first["logprobs"] is None and len(second["logprobs"]) == 4
    assert isinstance(records[2], Chunk)
    assert second["kind"] == 1 and second["start"] == 4 and second["digest"] == chunk_digest(records[2])
    assert (second["lineage"], second["number"], second["body"]) == ("a", 0, None)
    assert ended["kind"] == 2 and ended["start"] == 12 and ended["token_ids"] == [] and ended["digest"] is None
    assert json.loads(ended["body"]) == {"finish_reason": "stop", "stop_reason": 7}
    assert opened["mask_starts"] == ended["mask_values"] == []


def test_a_batch_is_readable_by_plain_pyarrow_from_its_own_bytes() -> None:
    segment = CODEC.encode(many(100, 3), "seg/x")
    ids = []
    for batch in segment.info.batches:
        message = pa.ipc.read_message(segment.data[batch.offset : batch.offset + batch.length])
        ids += pa.ipc.read_record_batch(message, SCHEMA).column("start").to_pylist()
    assert ids == [0, *range(0, 300, 3), 300]


def test_a_file_that_plain_pyarrow_wrote_is_read() -> None:
    records = many(5, 6)
    for compression in (None, "zstd", "lz4"):
        assert list(map(plain, CODEC.decode(rewritten(records, compression=compression), None))) == list(
            map(plain, records)
        )


def test_decoded_arrays_are_views_and_read_only() -> None:
    segment = CODEC.encode(many(64, 100), "seg/x")
    chunks = [r for r in CODEC.decode(segment.data, segment.info) if isinstance(r, Chunk)]
    for chunk in chunks:
        assert not chunk.token_ids.flags.owndata and not chunk.token_ids.flags.writeable
        assert chunk.logprobs is None or (not chunk.logprobs.flags.owndata and not chunk.logprobs.flags.writeable)
        assert not chunk.mask.flags.writeable


def test_huge_chunks_are_put_into_batches_of_their_own() -> None:
    n = 1 << 20
    rng = np.random.default_rng(0)
    big = many(1, 1)[1]
    assert isinstance(big, Chunk)
    big = dataclasses.replace(
        big, token_ids=rng.integers(0, 9, n, dtype=np.int32), logprobs=None, mask=rng.random(n) < 0.5
    )
    segment = CODEC.encode([big] * 5, "seg/x")
    assert [batch.n_records for batch in segment.info.batches] == [3, 2]
    assert list(map(plain, CODEC.decode(segment.data, segment.info))) == [plain(big)] * 5


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
    chunk = many(2, 6)[2]
    with pytest.raises((TypeError, ValueError)):
        CODEC.encode([dataclasses.replace(chunk, **{name: value})], "seg/x")


# ---- what is refused when read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"format": "prefix-recovery/segment", "version": 2, "requires": []}, ["version 2", "version 1"]),
        ({"format": "prefix-recovery/ledger", "version": 1}, ["prefix-recovery/ledger"]),
        ({"format": "prefix-recovery/segment", "version": 1, "requires": ["planes"]}, ["'planes'"]),
        ({}, ["format None"]),
    ],
)
def test_f4_other_formats_versions_and_needs_are_not_understood(header: dict[str, Any], words: list[str]) -> None:
    schema = SCHEMA.with_metadata({KEY: json.dumps(header).encode()} if header else {})
    with pytest.raises(FormatNotUnderstood) as caught:
        CODEC.decode(rewritten(many(1, 1), schema=schema), None)
    assert all(word in caught.value.message for word in words)
    assert caught.value.hint


def test_f4_unknown_fields_of_the_header_are_ignored() -> None:
    header = {"format": "prefix-recovery/segment", "version": 1, "requires": [], "comment": {"a": 1}}
    schema = SCHEMA.with_metadata({KEY: json.dumps(header).encode(), b"other": b"thing"})
    assert len(CODEC.decode(rewritten(many(1, 1), schema=schema), None)) == 3


def test_f4_other_columns_are_another_format() -> None:
    for schema in (
        SCHEMA.remove(3),
        SCHEMA.append(pa.field("x", pa.int8())),
        SCHEMA.set(2, pa.field("attempt", pa.int32())),
    ):

        def change(columns: dict[str, list[Any]]) -> None:
            columns["x"] = [0] * len(columns["kind"])

        with pytest.raises(FormatNotUnderstood, match="columns of format version 1") as caught:
            CODEC.decode(rewritten(many(1, 1), change, schema), None)
        assert "the version of prefix-recovery that wrote it" in caught.value.hint


def set_cell(column: str, row: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = value

    return change


OPENED, PLAIN, CHUNK, ENDED = 0, 1, 2, 3
BODY = {"rollout": "r", "turn": 0, "sampling": {}, "extra": {}, "restart_only": "", "source_digest": ""}


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (CHUNK, "kind", 3),
        (CHUNK, "kind", None),
        (CHUNK, "kind", 0),
        (CHUNK, "kind", 2),
        (OPENED, "kind", 1),
        (ENDED, "kind", 0),
        (CHUNK, "call_id", None),
        (CHUNK, "attempt", None),
        (CHUNK, "start", None),
        (CHUNK, "token_ids", None),
        (CHUNK, "token_ids", []),
        (CHUNK, "token_ids", [1, 2, None, 4]),
        (CHUNK, "logprobs", [-1.0]),
        (CHUNK, "logprobs", [-1.0, None, -1.0, -1.0]),
        (CHUNK, "mask_starts", None),
        (CHUNK, "mask_starts", []),
        (CHUNK, "mask_starts", [1]),
        (CHUNK, "mask_starts", [0, 1]),
        (CHUNK, "mask_values", [None]),
        (CHUNK, "lineage", None),
        (CHUNK, "lineage", ""),
        (CHUNK, "number", None),
        (CHUNK, "digest", None),
        (CHUNK, "body", "{}"),
        (OPENED, "start", 1),
        (OPENED, "logprobs", []),
        (OPENED, "mask_starts", [0]),
        (OPENED, "lineage", "a"),
        (OPENED, "number", 0),
        (OPENED, "digest", None),
        (OPENED, "body", None),
        (OPENED, "body", ""),
        (OPENED, "body", "[]"),
        (OPENED, "body", "{" * 100_000),
        (OPENED, "body", "[" * 100_000),
        (OPENED, "body", json.dumps({**BODY, "rollout": 1})),
        (OPENED, "body", json.dumps({**BODY, "rollout": "\ud800"})),
        (OPENED, "body", json.dumps({**BODY, "turn": -1})),
        (OPENED, "body", json.dumps({**BODY, "turn": True})),
        (OPENED, "body", json.dumps({**BODY, "turn": 1.0})),
        (OPENED, "body", json.dumps({**BODY, "sampling": []})),
        (OPENED, "body", json.dumps({**BODY, "sampling": {"t": float("nan")}})),
        (OPENED, "body", json.dumps({**BODY, "sampling": {"t": "\udfff"}})),
        (OPENED, "body", json.dumps({**BODY, "sampling": {}}).replace("{}", '{"t": 1e999}')),
        (OPENED, "body", json.dumps({**BODY, "turn": 0}).replace("0", "1" + "0" * 5000)),
        (OPENED, "body", json.dumps({"rollout": "r"})),
        (ENDED, "token_ids", [1]),
        (ENDED, "digest", bytes(16)),
        (ENDED, "logprobs", []),
        (ENDED, "body", None),
        (ENDED, "body", '{"finish_reason": "abort", "stop_reason": null}'),
        (ENDED, "body", '{"finish_reason": "stop", "stop_reason": 1.5}'),
        (ENDED, "body", '{"finish_reason": "stop", "stop_reason": true}'),
        (ENDED, "body", '{"stop_reason": null}'),
    ],
)  # fmt: skip
def test_a_row_that_breaks_a_rule_is_damage(row: int, column: str, value: Any) -> None:
    records = many(2, 4)
    with pytest.raises(Damaged):
        CODEC.decode(rewritten(records, set_cell(column, row, value)), None)


@pytest.mark.parametrize(
    ("starts", "values"),
    [
        ([0, 2, 2], [1, 0, 1]),
        ([0, 3, 2], [1, 0, 1]),
        ([0, 4], [1, 0]),
        ([0, 2], [1, 1]),
        ([0, 1, 2, 3, 4], [1, 0, 1, 0, 1]),
    ],
)
def test_runs_that_break_a_rule_are_damage(starts: list[int], values: list[int]) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns["mask_starts"][CHUNK], columns["mask_values"][CHUNK] = starts, list(map(bool, values))

    with pytest.raises(Damaged, match="run"):
        CODEC.decode(rewritten(many(2, 4), change), None)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("token_ids", [1, 2, 3, 4]),
        ("logprobs", None),
        ("logprobs", [-0.0, -1.0, -1.0, -1.0]),
        ("start", 5),
        ("lineage", "b"),
        ("number", 1),
        ("call_id", bytes(16)),
        ("digest", bytes(16)),
    ],
)
def test_changed_content_of_a_chunk_is_named_by_call_and_tokens(column: str, value: Any) -> None:
    records = many(2, 4)
    call = records[0].call_id if column != "call_id" else bytes(16)
    start = 5 if column == "start" else 4
    with pytest.raises(DigestMismatch) as caught:
        CODEC.decode(rewritten(records, set_cell(column, CHUNK, value)), None)
    assert f"call {call.hex()} tokens [{start}, {start + 4})" in caught.value.message
    assert "if another build wrote it, read it with that one" in caught.value.hint


@pytest.mark.parametrize(("column", "value"), [("token_ids", [1]), ("digest", bytes(16)), ("body", json.dumps(BODY))])
def test_changed_content_of_a_request_is_named_by_call(column: str, value: Any) -> None:
    records = many(2, 4)
    with pytest.raises(DigestMismatch, match=records[0].call_id.hex()):
        CODEC.decode(rewritten(records, set_cell(column, OPENED, value)), None)


def test_too_many_records_in_a_batch_are_refused_before_reading() -> None:
    with pytest.raises(Damaged, match="at most 64"):
        CODEC.decode(rewritten(many(70, 1)), None)


def test_claimed_sizes_are_bounded_before_anything_is_allocated() -> None:
    segment = CODEC.encode(many(3, 40), "seg/x")
    batch = segment.info.batches[0]
    part = bytearray(segment.data[batch.offset : batch.offset + batch.length])
    metadata = bytes(part[8 : 8 + int.from_bytes(part[4:8], "little")])
    before = flatbuffer.batch_shape(metadata, flatbuffer.message_shape(metadata), memoryview(part)[8 + len(metadata) :])
    assert 0 < before.nbytes < 10_000 and before.n_rows == 5
    body = 8 + len(metadata)
    part[body : body + 8] = (1 << 40).to_bytes(8, "little")
    info = dataclasses.replace(batch, crc32c=crc32c(bytes(part)))
    with pytest.raises(Damaged, match=r"claims 1[0-9]* bytes; at most"):
        CODEC.decode_batch(bytes(part), dataclasses.replace(segment.info, batches=(info,)), 0)


def test_a_batch_with_other_records_than_recorded_is_refused() -> None:
    segment = CODEC.encode(many(3, 4), "seg/x")
    batch = segment.info.batches[0]
    info = dataclasses.replace(segment.info, batches=(dataclasses.replace(batch, n_records=4),))
    with pytest.raises(Damaged, match="5 records where 4"):
        CODEC.decode_batch(segment.data[batch.offset : batch.offset + batch.length], info, 0)
    with pytest.raises(ValueError, match="no batch 1"):
        CODEC.decode_batch(b"", info, 1)


def test_every_truncation_is_damage() -> None:
    data = CODEC.encode(many(3, 4), "seg/x").data
    for length in range(len(data)):
        with pytest.raises(Damaged):
            CODEC.decode(data[:length], None)


def test_messages_are_found_where_the_footer_says_they_are() -> None:
    segment = CODEC.encode(many(130, 2), "seg/x")
    parts = arrow_file.split(segment.data, "x")
    assert [(f.offset, f.length) for f in parts.batches] == [(b.offset, b.length) for b in segment.info.batches]
    assert pa.ipc.open_file(segment.data).num_record_batches == len(parts.batches) == 3


# ---- sums -------------------------------------------------------------------------------------------------------


def test_crc32c_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_check_bytes_compares_length_first() -> None:
    check_bytes(b"123456789", nbytes=9, crc32c=0xE3069283, what="x")
    with pytest.raises(DigestMismatch, match="x has 9 bytes where 10"):
        check_bytes(b"123456789", nbytes=10, crc32c=0, what="x")
    with pytest.raises(DigestMismatch, match=r"x: .*e3069283"):
        check_bytes(b"123456789", nbytes=9, crc32c=0, what="x")


def test_the_sum_is_read_out_of_a_key() -> None:
    info = CODEC.encode(many(1, 1), "seg/e000001/w0.0000-000/00000001-0a0a0a0a").info
    assert crc_from_key(info.key) == info.crc32c
    for key in (
        "",
        "seg/a.arrow",
        "seg/a-1234567.arrow",
        "seg/a-123456789.arrow",
        "seg/a-1234567G.arrow",
        "a-12345678",
    ):
        with pytest.raises(Damaged, match="no segment's key"):
            crc_from_key(key)
