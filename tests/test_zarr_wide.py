"""The wide columns of a Zarr segment: which arrays there are, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood
from recovery.model import WIDE_TYPES
from storage_backends import zarr_arrays, zarr_zip
from storage_backends.testing.segments import many, many_wide, plain
from storage_backends.zarr_segments import ZarrSegmentCodec
from tests.test_zarr_refused import entries_of, rewritten, set_cell, zipped

CODEC = ZarrSegmentCodec()
ARRAYS = ["wide", "wide_bool", "wide_bool_range", "wide_float32", "wide_float32_range", "wide_int32"]
ARRAYS += ["wide_int32_range", "wide_int64", "wide_int64_range", "wide_range"]
ROW, OTHER, BARE, OPENED, ENDED = 1, 2, 3, 0, 4


def documents(data: bytes) -> dict[str, dict[str, Any]]:
    return {name: json.loads(content) for name, content in entries_of(data).items() if name.endswith("zarr.json")}


def test_a_segment_has_the_arrays_of_the_types_that_it_has() -> None:
    bare, wide = (documents(CODEC.encode(make(3, 4), "s").data) for make in (many, many_wide))
    assert bare["zarr.json"]["attributes"]["requires"] == []
    assert wide["zarr.json"]["attributes"]["requires"] == ["wide-columns"]
    assert [name.removesuffix("/zarr.json") for name in wide if name not in bare] == ARRAYS
    for name in ("wide", *(f"wide_{type_}" for type_ in ("bool", "int32", "int64", "float32"))):
        assert wide[f"{name}/zarr.json"]["data_type"] == (name[5:] or "uint8")
        assert len(wide[f"{name}/zarr.json"]["shape"]) == 1
        assert wide[f"{name}_range/zarr.json"]["shape"] == [5, 2]
    every = zarr_arrays.array_names(WIDE_TYPES)
    assert every == sorted(every) and len(every) == 17 + 2 + 2 * 12


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [
        ("wide_range", ROW, [0, 0]),
        ("wide_range", BARE, [0, 1]),
        ("wide_int32_range", OPENED, [0, 1]),
        ("wide_int32_range", ROW, [0, 19]),
        ("wide_int32_range", ENDED, [20, 21]),
        ("wide_bool_range", OTHER, [0, 1 << 63]),
        ("wide", 0, ord("{")),
        ("wide", 0, 0xFF),
        ("wide", -1, ord(" ")),
    ],
)
def test_a_row_that_breaks_a_rule_is_damage(column: str, row: int, value: Any) -> None:
    with pytest.raises(Damaged):
        CODEC.decode(rewritten(many_wide(3, 4), set_cell(column, row, value)), None)


@pytest.mark.parametrize(("column", "chunk"), [("wide_int32", ROW), ("wide_bool", OTHER), ("wide_float32", ROW)])
def test_changed_content_is_named_by_call_and_tokens(column: str, chunk: int) -> None:
    records = many_wide(3, 4)

    def change(columns: dict[str, Any]) -> None:
        columns[column][0] = ~columns[column][0] if column != "wide_float32" else -0.0

    with pytest.raises(DigestMismatch) as caught:
        CODEC.decode(rewritten(records, change), None)
    assert f"call {records[0].call_id.hex()} tokens [{4 * chunk - 4}, {4 * chunk})" in caught.value.message


def test_f4_wide_columns_have_to_be_required_and_what_is_required_has_to_be_there() -> None:
    for records, requires in ((many_wide(3, 4), []), (many(3, 4), ["wide-columns"])):
        entries = entries_of(CODEC.encode(records, "s").data)
        group = json.loads(entries["zarr.json"])
        group["attributes"]["requires"] = requires
        with pytest.raises(Damaged, match="require"):
            CODEC.decode(zipped(entries | {"zarr.json": json.dumps(group).encode()}), None)
    group["attributes"]["requires"] = ["wide-columns", "planes"]
    with pytest.raises(FormatNotUnderstood, match="'planes'"):
        CODEC.decode(zipped(entries | {"zarr.json": json.dumps(group).encode()}), None)


@pytest.mark.parametrize(
    "drop",
    [
        lambda name: name.startswith("wide_int32/"),
        lambda name: name.startswith("wide_int32_range/"),
        lambda name: name.startswith("wide_int32"),
        lambda name: name.startswith("wide/"),
        lambda name: name.startswith("wide"),
        lambda name: name == "wide_int32/zarr.json",
        lambda name: name == "wide_int32/c/0",
        lambda name: name == "wide/c/0",
    ],
)
def test_c3_an_array_or_chunk_that_is_missing_is_damage(drop: Callable[[str], bool]) -> None:
    entries = entries_of(CODEC.encode(many_wide(3, 4), "s").data)
    with pytest.raises(Damaged):
        CODEC.decode(zipped({name: content for name, content in entries.items() if not drop(name)}), None)


def test_a_batch_knows_its_arrays_from_its_description() -> None:
    segment = CODEC.encode(many_wide(70, 4), "s")
    assert len(segment.info.batches) == 2
    found = []
    for number, batch in enumerate(segment.info.batches):
        part = segment.data[batch.offset : batch.offset + batch.length]
        assert {entry.name.split("/")[0] for entry in zarr_zip.read_run(part, "x")} >= set(ARRAYS)
        found += CODEC.decode_batch(part, segment.info, number)
    assert list(map(plain, found)) == list(map(plain, many_wide(70, 4)))
