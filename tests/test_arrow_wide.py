"""arrow_wide: the wide columns of an Arrow segment as docs/format.md has them, and what is refused of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood
from recovery.model import (
    COLUMN_BYTES_PER_CHUNK_MAX,
    COLUMN_WIDTH_MAX,
    COLUMNS_PER_CHUNK_MAX,
    WIDE_TYPES,
    Chunk,
    Record,
    WideColumn,
    check_wide,
)
from storage_backends import arrow_segments
from storage_backends.arrow_segments import ArrowSegmentCodec, schema_of
from storage_backends.testing.segments import SPECIAL, many, many_wide, plain

CODEC = ArrowSegmentCodec()
KEY = b"prefix-recovery"
TYPES = ("bool", "int32", "int64", "float32")
ROW, OTHER, BARE, OPENED, ENDED = 1, 2, 3, 0, 4
"""Records of many_wide(3, 4): a chunk with top-k columns, one with others, one with none, and what is no chunk."""

Columns = dict[str, list[Any]]


def rewritten(
    records: list[Record], change: Callable[[Columns], Any] = lambda columns: None, schema: pa.Schema | None = None
) -> bytes:
    """A segment whose rows were changed by `change`, written by plain pyarrow."""
    file = pa.ipc.open_file(CODEC.encode(records, "seg/x").data)
    columns, schema = file.read_all().to_pydict(), schema or file.schema
    change(columns)
    loose = pa.schema([field.with_nullable(True) for field in schema], metadata=schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, loose) as writer:
        arrays = [pa.array(columns[f.name], f.type) for f in loose]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=loose))
    return bytes(sink.getvalue())


def set_cell(column: str, row: int, value: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[column][row] = value

    return change


def values_in(row: dict[str, Any], n_tokens: int) -> dict[str, list[Any]]:
    """The wide columns of a row as plain pyarrow gives it, by docs/format.md alone."""
    taken: dict[str, int] = {}
    found = {}
    for name, type_, width in json.loads(row["wide"] or "[]"):
        first = taken.get(type_, 0)
        taken[type_] = first + n_tokens * max(width, 1)
        flat = row[f"wide_{type_}"][first : taken[type_]]
        found[name] = [flat[i : i + width] for i in range(0, len(flat), width)] if width else flat
    return found


# ---- what plain pyarrow finds ---------------------------------------------------------------------------------------


def test_columns_are_those_of_the_format() -> None:
    records = many_wide(3, 4)
    segment = CODEC.encode(records, "seg/x")
    file = pa.ipc.open_file(segment.data)
    assert json.loads(file.schema.metadata[KEY])["requires"] == ["wide-columns"]
    assert [(field.name, str(field.type)) for field in file.schema][12:] == [
        ("wide", "string"),
        ("wide_bool", "list<item: bool>"),
        ("wide_int32", "list<item: int32>"),
        ("wide_int64", "list<item: int64>"),
        ("wide_float32", "list<item: float>"),
    ]
    assert segment.info.wide == TYPES
    rows = file.read_all().to_pylist()
    assert json.loads(rows[ROW]["wide"]) == [["top_ids", "int32", 5], ["top_logprobs", "float32", 5]]
    assert json.loads(rows[OTHER]["wide"]) == [["entropy", "float32", 0], ["tool", "bool", 1], ["top_ids", "int64", 2]]
    for row in (OPENED, BARE, ENDED):
        assert rows[row]["wide"] is None and not any(rows[row][f"wide_{type_}"] for type_ in TYPES)
    for row in (ROW, OTHER, BARE):
        record = records[row]
        assert isinstance(record, Chunk)
        assert values_in(rows[row], 4) == {name: values.tolist() for name, values in record.columns.items()}
    every = [str(field.type) for field in schema_of(WIDE_TYPES)][12:]
    numbers = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "halffloat", "float", "double"]
    assert every == ["string", *(f"list<item: {name}>" for name in ("bool", *numbers))]


def test_l3_plain_pyarrow_reads_the_bits_of_wide_values() -> None:
    columns = {name: np.array(values, name).reshape(8, 1) for name, values in SPECIAL.items()}
    record = dataclasses.replace(many(2, 8)[2], columns=columns)
    table = pa.ipc.open_file(CODEC.encode([record], "seg/x").data).read_all()
    for name, values in columns.items():
        found = table[f"wide_{name}"].chunk(0).values.to_numpy()
        assert found.dtype == values.dtype and found.tobytes() == values.tobytes()


def test_a_batch_is_readable_by_plain_pyarrow_with_the_types_of_its_description() -> None:
    segment = CODEC.encode(many_wide(100, 3), "seg/x")
    rows = []
    for batch in segment.info.batches:
        message = pa.ipc.read_message(segment.data[batch.offset : batch.offset + batch.length])
        rows += pa.ipc.read_record_batch(message, schema_of(segment.info.wide)).to_pylist()
    assert rows == pa.ipc.open_file(segment.data).read_all().to_pylist()


def test_what_plain_pyarrow_wrote_is_read() -> None:
    for records in (many_wide(5, 6), [many_wide(5, 6)[1]]):
        assert list(map(plain, CODEC.decode(rewritten(records), None))) == list(map(plain, records))


def test_decoded_columns_are_views_of_one_array_per_type() -> None:
    found = [r for r in CODEC.decode(CODEC.encode(many_wide(60, 9), "s").data, None) if isinstance(r, Chunk)]
    columns = [chunk.columns["top_logprobs"] for chunk in found if "top_logprobs" in chunk.columns]
    begins = [values.__array_interface__["data"][0] for values in columns]
    assert len(columns) == 20 and all(not values.flags.owndata for values in columns)
    assert max(begins) - min(begins) < 64 * 9 * 6 * 4, "they lie together"


def test_a_large_chunk_has_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_segments, "RAW_BYTES_PER_BATCH", 10_000)
    big = dataclasses.replace(many(2, 8)[2], columns={"h": np.ones((8, 512), np.float64)})
    segment = CODEC.encode([*many(2, 8), big, big, *many(2, 8)], "seg/x")
    assert [batch.n_records for batch in segment.info.batches] == [4, 1, 1, 4]


# ---- what may not be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"a": [1, 2, 3, 4]},
        {"a": np.array(["x"] * 4)},
        {"a": np.zeros(4, np.complex64)},
        {"a": np.zeros(4, ">f4")},
        {"a": np.zeros(4, "M8[s]")},
        {"a": np.zeros(4, object)},
        {"a": np.zeros(3, np.int8)},
        {"a": np.zeros((4, 0), np.int8)},
        {"a": np.zeros((4, 1, 1), np.int8)},
        {"a": np.zeros((), np.int8)},
        {"a": np.zeros((4, COLUMN_WIDTH_MAX + 1), np.int8)},
        {"": np.zeros(4, np.int8)},
        {"a b": np.zeros(4, np.int8)},
        {"ä": np.zeros(4, np.int8)},
        {"a\n": np.zeros(4, np.int8)},
        {"a" * 65: np.zeros(4, np.int8)},
        {f"{i}": np.zeros(4, np.int8) for i in range(COLUMNS_PER_CHUNK_MAX + 1)},
    ],
)
def test_what_cannot_be_a_wide_column_is_refused_when_the_chunk_is_made(columns: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="wide column"):
        dataclasses.replace(many(2, 4)[2], columns=columns)


def test_the_size_of_wide_columns_is_bounded() -> None:
    wide = (WideColumn("a", "float64", 4096), WideColumn("b", "float64", 4096))
    n_tokens = COLUMN_BYTES_PER_CHUNK_MAX // (2 * 4096 * 8)
    check_wide(wide, n_tokens)
    with pytest.raises(ValueError, match=f"at most {COLUMN_BYTES_PER_CHUNK_MAX}"):
        check_wide(wide, n_tokens + 1)
    with pytest.raises(ValueError, match="order"):
        check_wide((wide[1], wide[0]), 1)
    with pytest.raises(ValueError, match="order"):
        check_wide((wide[0], wide[0]), 1)


# ---- what is refused when read --------------------------------------------------------------------------------------

TOP = [["top_ids", "int32", 5], ["top_logprobs", "float32", 5]]


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (ROW, "wide", None),
        (ROW, "wide", ""),
        (ROW, "wide", "{}"),
        (ROW, "wide", "[]"),
        (ROW, "wide", "[" * 100_000),
        (ROW, "wide", json.dumps(TOP) + " " * (64 << 10)),
        (ROW, "wide", json.dumps([*TOP, 1])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32"]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32", 5, 1]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32", 5.0]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32", True]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32", -5]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32", 4]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float32", 1 << 70]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "int32", 5]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float64", 5]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_logprobs", "float8", 5]])),
        (ROW, "wide", json.dumps([TOP[0], ["top logprobs", "float32", 5]])),
        (ROW, "wide", json.dumps([TOP[0], ["top_ids", "float32", 5]])),
        (ROW, "wide", json.dumps(TOP[::-1])),
        (ROW, "wide", json.dumps(TOP[:1])),
        (ROW, "wide", json.dumps([*TOP, ["x", "bool", 0]])),
        (ROW, "wide_int32", []),
        (ROW, "wide_int32", None),
        (ROW, "wide_int32", [0] * 19),
        (ROW, "wide_int32", [0] * 21),
        (ROW, "wide_int32", [0] * 19 + [None]),
        (OTHER, "wide_bool", [True, None, True, True]),
        (BARE, "wide", json.dumps(TOP)),
        (BARE, "wide_int32", [1]),
        (OPENED, "wide", json.dumps(TOP)),
        (OPENED, "wide_int32", [1]),
        (ENDED, "wide", json.dumps(TOP)),
        (ENDED, "wide_bool", [True]),
    ],
)  # fmt: skip
def test_a_row_that_breaks_a_rule_is_damage(row: int, column: str, value: Any) -> None:
    with pytest.raises(Damaged) as caught:
        CODEC.decode(rewritten(many_wide(3, 4), set_cell(column, row, value)), None)
    assert not isinstance(caught.value, DigestMismatch)


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (ROW, "wide", json.dumps([["top_ids", "int32", 5], ["top_logprobz", "float32", 5]])),
        (ROW, "wide_int32", [0] * 20),
        (OTHER, "wide", json.dumps([["entropy", "float32", 1], ["tool", "bool", 1], ["top_ids", "int64", 2]])),
        (OTHER, "wide", json.dumps([["entropy", "float32", 0], ["tool", "bool", 0], ["top_ids", "int64", 2]])),
        (OTHER, "wide_bool", [True] * 4),
    ],
)
def test_changed_content_is_named_by_call_and_tokens(row: int, column: str, value: Any) -> None:
    records = many_wide(3, 4)
    with pytest.raises(DigestMismatch) as caught:
        CODEC.decode(rewritten(records, set_cell(column, row, value)), None)
    assert f"call {records[0].call_id.hex()} tokens [{4 * row - 4}, {4 * row})" in caught.value.message


def test_columns_that_were_dropped_behind_right_columns_are_found_by_the_digest() -> None:
    def change(columns: Columns) -> None:
        columns["wide"] = [None] * 5
        for type_ in TYPES:
            columns[f"wide_{type_}"] = [[] for _ in range(5)]

    with pytest.raises(DigestMismatch):
        CODEC.decode(rewritten(many_wide(3, 4), change), None)


def test_a_row_that_claims_more_than_a_chunk_may_have_is_refused_by_its_claim() -> None:
    columns = [[f"{i:03d}", "int32", COLUMN_WIDTH_MAX] for i in range(256)]
    n = 65  # 65 * 256 * 4096 * 4 bytes; there are none
    records = [dataclasses.replace(many(2, n)[2], columns={"a": np.zeros(n, np.int32)})]
    with pytest.raises(Damaged, match="larger ones than a chunk may have"):
        CODEC.decode(rewritten(records, set_cell("wide", 0, json.dumps(columns))), None)


def test_f4_wide_columns_have_to_be_required_and_what_is_required_has_to_be_there() -> None:
    def header(requires: list[str]) -> dict[bytes, bytes]:
        return {KEY: json.dumps({"format": "prefix-recovery/segment", "version": 1, "requires": requires}).encode()}

    for records, requires in ((many_wide(3, 4), []), (many(3, 4), ["wide-columns"])):
        schema = pa.ipc.open_file(CODEC.encode(records, "seg/x").data).schema.with_metadata(header(requires))
        with pytest.raises(Damaged, match="require"):
            CODEC.decode(rewritten(records, schema=schema), None)
    schema = schema_of(TYPES).with_metadata(header(["wide-columns", "planes"]))
    with pytest.raises(FormatNotUnderstood, match="'planes'"):
        CODEC.decode(rewritten(many_wide(3, 4), schema=schema), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.remove(13),
        lambda s: s.remove(12),
        lambda s: s.set(13, s.field(14)).set(14, s.field(13)),
        lambda s: s.append(pa.field("wide_float8", pa.list_(pa.int8()))),
        lambda s: s.append(pa.field("wide_int32", pa.list_(pa.int32()))),
        lambda s: s.set(14, pa.field("wide_int32", pa.list_(pa.uint32()))),
        lambda s: s.set(14, pa.field("wide_int32", pa.list_(pa.list_(pa.int32(), 5)))),
        lambda s: s.set(14, pa.field("wide_int32", pa.large_list(pa.int32()))),
    ],
)
def test_other_columns_are_damage_or_another_format(change: Callable[[pa.Schema], pa.Schema]) -> None:
    schema = change(schema_of(TYPES))

    def fill(columns: Columns) -> None:
        for field in schema:
            columns[field.name] = columns.get(field.name, [[]] * 5) if field.name != "wide_int32" else [[]] * 5

    with pytest.raises((Damaged, FormatNotUnderstood), match="column"):
        CODEC.decode(rewritten(many_wide(3, 4), fill, schema), None)


def test_every_truncation_is_damage() -> None:
    data = CODEC.encode(many_wide(3, 4), "seg/x").data
    for length in range(len(data)):
        with pytest.raises(Damaged):
            CODEC.decode(data[:length], None)
