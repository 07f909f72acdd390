"""What ZarrSegmentCodec refuses: segments with right sums of which one thing is not as the format says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood
from recovery.model import BatchInfo, Record, SegmentInfo
from recovery.records import Records
from storage_backends import arrow_wide, zarr_arrays, zarr_batches, zarr_segments, zarr_zip
from storage_backends.arrow_records import to_arrays
from storage_backends.sums import crc32c
from storage_backends.testing.segments import many, many_wide, plain
from storage_backends.zarr_columns import to_columns
from storage_backends.zarr_segments import ZarrSegmentCodec

CODEC = ZarrSegmentCodec()


def entries_of(data: bytes) -> dict[str, bytes]:
    return {entry.name: bytes(entry.data) for entry in zarr_zip.read(data, "x")}


def zipped(entries: Mapping[str, bytes] | Iterable[tuple[str, bytes]]) -> bytes:
    return zarr_zip.write(entries.items() if isinstance(entries, Mapping) else entries)[0]


def with_document(data: bytes, name: str, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The segment with one `zarr.json` changed in place, and every sum right."""
    entries = entries_of(data)
    document = json.loads(entries[name])
    change(document)
    entries[name] = json.dumps(document).encode()
    return zipped(entries)


def rewritten(
    records: list[Record], change: Callable[[dict[str, Any]], Any] = lambda columns: None, per_batch: int = 64
) -> bytes:
    """A segment of one batch whose arrays were changed by `change`, with every sum right."""
    whole = Records.of(records)
    types = arrow_wide.types_of(whole)
    arrays = to_arrays(whole, slice(0, len(whole)), types)
    columns = {name: values.copy() for name, values in to_columns(arrays, types).items()}
    change(columns)
    layout = zarr_batches.layout_of([columns], per_batch, types)
    (chunks,) = zarr_batches.write_batches([columns], layout)
    return zipped([*zarr_arrays.documents(layout), *chunks])


def set_cell(column: str, row: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(columns: dict[str, Any]) -> None:
        columns[column][row] = value

    return change


# ---- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"format": "prefix-recovery/segment", "version": 2, "requires": []}, ["version 2", "version 1"]),
        ({"format": "prefix-recovery/segment", "version": True}, ["version True"]),
        ({"format": "prefix-recovery/ledger", "version": 1}, ["prefix-recovery/ledger"]),
        ({"format": "prefix-recovery/segment", "version": 1, "requires": ["planes"]}, ["'planes'"]),
        ({}, ["format None"]),
        (None, ["format None"]),
    ],
)
def test_f4_other_formats_versions_and_needs_are_not_understood(attributes: Any, words: list[str]) -> None:
    def change(group: dict[str, Any]) -> None:
        del group["attributes"]
        if attributes is not None:
            group["attributes"] = attributes

    with pytest.raises(FormatNotUnderstood) as caught:
        CODEC.decode(with_document(rewritten(many(1, 1)), "zarr.json", change), None)
    assert all(word in caught.value.message for word in words)
    assert caught.value.hint


def test_f4_a_newer_version_is_named_even_if_it_has_other_arrays() -> None:
    entries = entries_of(rewritten(many(1, 1)))
    group = json.loads(entries["zarr.json"])
    group["attributes"]["version"] = 2
    with pytest.raises(FormatNotUnderstood, match="version 2"):
        CODEC.decode(zipped({"zarr.json": json.dumps(group).encode(), "planes/zarr.json": b"{}"}), None)


def test_f4_unknown_attributes_of_the_group_are_ignored() -> None:
    data = with_document(rewritten(many(1, 1)), "zarr.json", lambda group: group["attributes"].update(comment={"a": 1}))
    assert len(CODEC.decode(data, None)) == 3


@pytest.mark.parametrize(
    "group",
    [
        b"", b"[]", b"\xff", b"{" * 100_000, b'{"zarr_format": 2}', b'{"attributes": [], "node_type": "group"}',
        b'{"zarr_format": 3, "node_type": "group", "attributes": []}',
        b'{"zarr_format": 3, "node_type": "array"}',
        b'{"zarr_format": 3, "node_type": "group", "attributes":'
        b' {"format": "prefix-recovery/segment", "version": 1, "requires": 1}}',
    ],
)  # fmt: skip
def test_a_group_that_says_nothing_is_damage(group: bytes) -> None:
    with pytest.raises(Damaged):
        CODEC.decode(zipped(entries_of(rewritten(many(1, 1))) | {"zarr.json": group}), None)


@pytest.mark.parametrize("name", zarr_arrays.array_names(arrow_wide.types_of(Records.of(many_wide(3, 4)))))
@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(data_type="int8"),
        lambda d: d.update(fill_value=7),
        lambda d: d.update(node_type="group"),
        lambda d: d.update(storage_transformers=[{"name": "x"}]),
        lambda d: d["codecs"].pop(),
        lambda d: d["codecs"].insert(0, {"name": "numcodecs.pickle"}),
        lambda d: d["chunk_key_encoding"]["configuration"].update(separator="."),
        lambda d: d["shape"].append(1),
        lambda d: d.update(shape=[]),
        lambda d: d.update(shape=None),
        lambda d: d["shape"].__setitem__(0, -1),
        lambda d: d["shape"].__setitem__(0, 1.0),
        lambda d: d["shape"].__setitem__(0, d["shape"][0] + 1),
        lambda d: d["shape"].__setitem__(0, 2 * d["shape"][0]),
        lambda d: d["shape"].__setitem__(0, 1 << 62),
        lambda d: d["shape"].__setitem__(0, 1 << 80),
        lambda d: d["chunk_grid"]["configuration"]["chunk_shape"].__setitem__(0, 1 << 40),
        lambda d: d["chunk_grid"]["configuration"]["chunk_shape"].__setitem__(0, 0),
        lambda d: d["chunk_grid"]["configuration"]["chunk_shape"].__setitem__(0, 1),
        lambda d: d.pop("chunk_grid"),
        lambda d: d.clear(),
    ],
)
def test_other_arrays_are_damage(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(Damaged):
        CODEC.decode(with_document(rewritten(many_wide(3, 4)), f"{name}/zarr.json", change), None)


def test_shapes_that_agree_on_other_records_are_damage() -> None:
    data = rewritten(many(3, 4))
    for name in zarr_arrays.array_names(()):
        if not zarr_arrays.ARRAYS[name].ranges:
            data = with_document(data, f"{name}/zarr.json", lambda d: d["shape"].__setitem__(0, 1 << 62))
    with pytest.raises(Damaged, match=r"claims [0-9]{21} bytes; at most"):
        CODEC.decode(data, None)
    for name in zarr_arrays.array_names(()):
        if not zarr_arrays.ARRAYS[name].ranges:
            data = with_document(data, f"{name}/zarr.json", lambda d: d["shape"].__setitem__(0, 70))
    with pytest.raises(Damaged, match="other batches"):
        CODEC.decode(data, None)
    entries = entries_of(data)
    with pytest.raises(Damaged, match="does not begin with"):
        CODEC.decode(zipped(dict(sorted(entries.items()))), None)
    with pytest.raises(Damaged, match="arrays of its format"):
        CODEC.decode(zipped({"zarr.json": entries.pop("zarr.json")} | dict(reversed(entries.items()))), None)
    entries = entries_of(data)
    entries["kind/zarr.json"] += b" " * (1 << 20)
    with pytest.raises(Damaged, match="at most"):
        CODEC.decode(zipped(entries), None)


# ---- entries --------------------------------------------------------------------------------------------------------


def test_c3_every_entry_that_is_missing_doubled_swapped_or_strange_is_damage() -> None:
    long = dataclasses.replace(many(1, 1)[1], token_ids=np.arange(70_000, dtype=np.int32), mask=np.ones(70_000, "?"))
    segment = ZarrSegmentCodec(records_per_batch=3).encode([*many(3, 4), dataclasses.replace(long, logprobs=None)], "s")
    entries = list(entries_of(segment.data).items())
    assert zipped(entries) == segment.data and len(segment.info.batches) == 2
    for at, (name, content) in enumerate(entries):
        rest = entries[:at] + entries[at + 1 :]
        for wrong in (
            rest,
            [*entries[:at], (name, content), *entries[at:]],
            [*entries, (name, content)],
            [*entries[:at], (f"../{name}", content), *entries[at + 1 :]],
            [*entries[:at], ("/etc/passwd", content), *entries[at:]],
            [*entries[:at], (name.replace("/c/", "/c/0"), content), *entries[at + 1 :]],
            [*rest, (name, content)],
            [(name, content), *rest],
        ):
            if wrong != entries:
                with pytest.raises(Damaged):
                    CODEC.decode(zipped(wrong), None)
    for name in ("x", "body/c/-1", "body/c/9999999999999999999", "a" * 255, "token_ids/c/1/0", ""):
        with pytest.raises(Damaged):
            CODEC.decode(zipped([*entries, (name, b"x")]), None)


def test_a_batch_with_a_missing_or_strange_chunk_is_damage() -> None:
    segment = CODEC.encode(many(3, 4), "seg/x")
    chunks = list(entries_of(segment.data).items())[18:]

    def decode(entries: list[tuple[str, bytes]], number: int = 0) -> list[Record]:
        part = b"".join(zarr_zip.write([entry])[0][: 30 + sum(map(len, entry))] for entry in entries)
        batch = BatchInfo(0, len(part), crc32c(part), 5)
        return CODEC.decode_batch(part, SegmentInfo(key="k", nbytes=1, crc32c=1, batches=(batch,) * 2), number)

    assert len(decode(chunks)) == 5
    for at in range(len(chunks)):
        for wrong in (chunks[:at] + chunks[at + 1 :], chunks[: at + 1] + chunks[at:]):
            with pytest.raises(Damaged):
                decode(wrong)
    with pytest.raises(Damaged, match=r"attempt/c/1 is missing"):
        decode(chunks, 1)
    with pytest.raises(Damaged):
        decode([(name.replace("token_ids/c/0", "token_ids/c/1"), content) for name, content in chunks])
    with pytest.raises(Damaged):
        decode([(name.replace("body/c/0", "body/c/-1"), content) for name, content in chunks])


def test_a_batch_with_other_records_than_recorded_is_refused() -> None:
    segment = CODEC.encode(many(3, 4), "seg/x")
    batch = segment.info.batches[0]
    part = segment.data[batch.offset : batch.offset + batch.length]
    for n_records in (0, 4, 6, 64, 1 << 40):
        info = dataclasses.replace(segment.info, batches=(dataclasses.replace(batch, n_records=n_records),))
        with pytest.raises(Damaged, match=f"5 records where {n_records}"):
            CODEC.decode_batch(part, info, 0)
    with pytest.raises(ValueError, match="no batch 1"):
        CODEC.decode_batch(b"", segment.info, 1)


def test_every_truncation_is_damage() -> None:
    segment = CODEC.encode(many(3, 4), "seg/x")
    for length in range(len(segment.data)):
        with pytest.raises(Damaged):
            CODEC.decode(segment.data[:length], None)


# ---- chunks ---------------------------------------------------------------------------------------------------------


def chunk_replaced(name: str, content: bytes) -> bytes:
    entries = entries_of(rewritten(many(3, 4)))
    assert name in entries
    return zipped(entries | {name: content})


def sealed(frame: bytes) -> bytes:
    return frame + crc32c(frame).to_bytes(4, "little")


def test_a_chunk_that_claims_more_than_a_chunk_may_have_is_refused_before_it_is_decompressed() -> None:
    bomb = pa.compress(bytes(1 << 28), codec="zstd", asbytes=True)
    assert len(bomb) < 1 << 16
    for name in ("token_ids/c/0", "kind/c/0", "body/c/0"):
        with pytest.raises(Damaged, match=r"claims 268435456 bytes"):
            CODEC.decode(chunk_replaced(name, sealed(bomb)), None)


def test_a_segment_that_claims_too_much_for_its_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [dataclasses.replace(many(1, 1)[1], token_ids=np.zeros(60_000, "<i4"), mask=np.ones(60_000, "?"))] * 70
    data = CODEC.encode(records, "seg/x").data
    assert len(data) < 40_000
    monkeypatch.setattr(zarr_segments, "NBYTES_ALWAYS", 0)
    with pytest.raises(Damaged, match=r"claims [0-9]+ bytes; at most [0-9]+"):
        CODEC.decode(data, None)
    with pytest.raises(ValueError, match="could not be read again"):
        CODEC.encode(records, "seg/x")
    assert CODEC.decode(CODEC.encode(many(40, 20), "seg/x").data, None)


def test_a_batch_that_claims_too_much_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = CODEC.encode(many(3, 4), "seg/x").data
    monkeypatch.setattr(zarr_batches, "BATCH_BYTES_MAX", 500)
    with pytest.raises(Damaged, match=r"claims [0-9]+ bytes; at most 500"):
        CODEC.decode(data, None)


def test_chunks_that_are_no_chunks_are_damage() -> None:
    right = entries_of(rewritten(many(3, 4)))["token_ids/c/0"]
    frame = right[:-4]
    wide = zarr_arrays.pack_chunk("token_ids", np.zeros(22, "<i4"), 22)
    for content in (
        b"", b"1234", right[4:], frame, frame + bytes(4), sealed(b""), sealed(frame[:-1]), sealed(frame + frame),
        sealed(frame[:4]), sealed(frame[:4] + b"\xc0\x00\x00"), sealed(frame[:4] + bytes(4)),
        sealed(frame[:5] + b"\x01" + frame[6:]), sealed(frame[:5] + b"\x00" + frame[6:]), wide,
    ):  # fmt: skip
        with pytest.raises(Damaged):
            CODEC.decode(chunk_replaced("token_ids/c/0", content), None)
    flipped = bytearray(right)
    flipped[len(right) // 2] ^= 1
    with pytest.raises(DigestMismatch, match="token_ids/c/0 does not have the crc32c"):
        CODEC.decode(chunk_replaced("token_ids/c/0", bytes(flipped)), None)


def test_a_truth_value_is_0_or_1() -> None:
    for name in ("has_logprobs/c/0", "mask_values/c/0"):
        size = zarr_arrays.claimed_length("kind", memoryview(entries_of(rewritten(many(3, 4)))[name]), "x")
        frame = pa.compress(b"\x02" * size, codec="zstd", asbytes=True)
        with pytest.raises(Damaged, match="neither true nor false"):
            CODEC.decode(chunk_replaced(name, sealed(frame)), None)


# ---- rows -----------------------------------------------------------------------------------------------------------

OPENED, PLAIN, CHUNK, ENDED = 0, 1, 2, 3


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (CHUNK, "kind", 3),
        (CHUNK, "kind", 255),
        (ENDED, "kind", 255),
        (CHUNK, "kind", 0),
        (CHUNK, "kind", 2),
        (OPENED, "kind", 1),
        (ENDED, "kind", 0),
        (PLAIN, "has_logprobs", True),
        (CHUNK, "has_logprobs", False),
        (OPENED, "has_logprobs", True),
        (OPENED, "start", 1),
        (CHUNK, "start", 5),
        (CHUNK, "number", 1),
        (CHUNK, "call_id", 0),
        (CHUNK, "digest", 0),
        (OPENED, "digest", 0),
        (ENDED, "token_range", [17, 18]),
        (ENDED, "token_range", [16, 17]),
        (ENDED, "token_range", [17, 16]),
        (ENDED, "token_range", [17, 1 << 63]),
        (ENDED, "token_range", [(1 << 64) - 1, (1 << 64) - 1]),
        (OPENED, "token_range", [1, 9]),
        (CHUNK, "token_range", [13, 16]),
        (CHUNK, "mask_range", [0, 0]),
        (ENDED, "body_range", [0, 0]),
        (CHUNK, "lineage_range", [1, 1]),
        (CHUNK, "mask_starts", 9),
    ],
)
def test_a_row_that_breaks_a_rule_is_damage(row: int, column: str, value: Any) -> None:
    with pytest.raises(Damaged):
        CODEC.decode(rewritten(many(2, 4), set_cell(column, row, value)), None)


def test_a_range_that_asks_for_chunks_that_are_not_there_is_damage() -> None:
    def change(columns: dict[str, Any]) -> None:
        columns["token_range"][-1, 1] = 1 << 20

    with pytest.raises(Damaged, match="asks for other chunks"):
        CODEC.decode(rewritten(many(2, 4), change), None)


def test_text_that_is_not_utf_8_is_damage() -> None:
    for column in ("lineage", "body"):
        with pytest.raises(Damaged):
            CODEC.decode(rewritten(many(2, 4), set_cell(column, 0, 0xFF)), None)


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("token_ids", 13, 1), ("logprobs", 13, -0.0), ("number", CHUNK, 1), ("lineage", 1, ord("b"))],
)
def test_changed_content_of_a_chunk_is_named_by_call_and_tokens(column: str, row: int, value: Any) -> None:
    records = many(2, 4)
    with pytest.raises(DigestMismatch) as caught:
        CODEC.decode(rewritten(records, set_cell(column, row, value)), None)
    assert f"call {records[0].call_id.hex()} tokens [4, 8)" in caught.value.message


def test_changed_content_of_a_request_is_named_by_call() -> None:
    records = many(2, 4)
    with pytest.raises(DigestMismatch, match=records[0].call_id.hex()):
        CODEC.decode(rewritten(records, set_cell("token_ids", 0, 77)), None)


def test_what_stands_where_nothing_belongs_is_ignored() -> None:
    def change(columns: dict[str, Any]) -> None:
        columns["logprobs"][:9] = 1.0  # a prompt has none
        columns["number"][OPENED] = 5
        columns["digest"][ENDED] = 7

    records = many(2, 4)
    assert list(map(plain, CODEC.decode(rewritten(records, change), None))) == list(map(plain, records))
