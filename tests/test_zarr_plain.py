"""Zarr segments and plain zarr: each reads what the other wrote. The readers here use docs/format.md and zarr alone."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore, ZipStore

from recovery.errors import Damaged
from recovery.model import WIDE_TYPES, Record
from storage_backends import zarr_arrays, zarr_zip
from storage_backends.arrow_segments import ArrowSegmentCodec
from storage_backends.testing.segments import SPECIAL, many, many_wide, plain
from storage_backends.zarr_segments import ZarrSegmentCodec

CODEC = ZarrSegmentCodec()
SAMPLES = [many(3, 4), many(200, 5), many(2, 70_000), [], many_wide(4, 4), many_wide(199, 5), many_wide(5, 20_000)]


def opened(data: bytes, folder: Path) -> zarr.Group:
    """The group that plain zarr finds in a segment."""
    (folder / "segment.zip").write_bytes(data)
    return zarr.open_group(ZipStore(folder / "segment.zip", mode="r"), mode="r", zarr_format=3)


def rows_of(group: zarr.Group) -> list[dict[str, Any]]:
    """The rows of the table of section 9, from flat arrays and ranges."""
    arrays: dict[str, Any] = {name: array[:] for name, array in group.arrays()}
    rows = []
    for index, kind in enumerate(arrays["kind"].tolist()):

        def part(name: str, ranges: str, index: int = index) -> Any:
            begin, end = arrays[ranges][index].tolist()
            return arrays[name][begin:end]

        is_chunk = kind == 1
        wide = {}
        if "wide" in arrays:
            types = ["bool", "int32", "int64", "float32"]
            wide = {f"wide_{type_}": part(f"wide_{type_}", f"wide_{type_}_range").tolist() for type_ in types}
            wide["wide"] = part("wide", "wide_range").tobytes().decode() or None
        rows.append(
            {
                **wide,
                "kind": kind,
                "call_id": arrays["call_id"][index].tobytes(),
                "attempt": int(arrays["attempt"][index]),
                "start": int(arrays["start"][index]),
                "token_ids": part("token_ids", "token_range").tolist(),
                "logprobs": part("logprobs", "token_range").tolist() if arrays["has_logprobs"][index] else None,
                "mask_starts": part("mask_starts", "mask_range").tolist(),
                "mask_values": part("mask_values", "mask_range").tolist(),
                "lineage": part("lineage", "lineage_range").tobytes().decode() if is_chunk else None,
                "number": int(arrays["number"][index]) if is_chunk else None,
                "digest": arrays["digest"][index].tobytes() if kind != 2 else None,
                "body": None if is_chunk else part("body", "body_range").tobytes().decode(),
            }
        )
    return rows


@pytest.mark.parametrize("records", SAMPLES, ids=len)
def test_plain_zarr_finds_the_rows_that_plain_pyarrow_finds_in_the_arrow_segment(
    records: list[Record], tmp_path: Path
) -> None:
    group = opened(CODEC.encode(records, "seg/x").data, tmp_path)
    requires = ["wide-columns"] if any(getattr(record, "columns", {}) for record in records) else []
    assert dict(group.attrs) == {"format": "prefix-recovery/segment", "version": 1, "requires": requires}
    assert rows_of(group) == pa.ipc.open_file(ArrowSegmentCodec().encode(records, "seg/x").data).read_all().to_pylist()


def test_l3_plain_zarr_reads_the_bits_of_a_logprob(tmp_path: Path) -> None:
    bits = np.array([0x7FC00000, 0x7F800001, 0xFFC12345, 0xFF800000, 0x80000000, 1, 0, 0xBF800000], np.uint32)
    record = dataclasses.replace(many(2, 8)[2], logprobs=bits.view("<f4"))
    group = opened(CODEC.encode([record], "seg/x").data, tmp_path)
    assert group["logprobs"][:].view(np.uint32).tolist() == bits.tolist()


@pytest.mark.parametrize("type_", WIDE_TYPES)
def test_l3_plain_zarr_reads_the_bits_of_wide_values(type_: str, tmp_path: Path) -> None:
    if type_ in SPECIAL:
        values = np.array(SPECIAL[type_], type_)
    else:
        values = np.arange(8).astype(type_)
    record = dataclasses.replace(many(2, 8)[2], columns={"x": values.reshape(8, 1)})
    group = opened(CODEC.encode([record], "seg/x").data, tmp_path)
    begin, end = group[f"wide_{type_}_range"][0].tolist()
    found = group[f"wide_{type_}"][begin:end]
    assert found.dtype == np.dtype(type_) and found.tobytes() == values.tobytes()
    assert json.loads(group["wide"][:].tobytes()) == [["x", type_, 1]]


# ---- and the other way ------------------------------------------------------------------------------------------


def written_by_zarr(group: zarr.Group) -> dict[str, bytes]:
    """The objects of a copy of `group` that plain zarr makes, with the same chunks and codecs."""
    store = MemoryStore()
    copy = zarr.create_group(store, zarr_format=3, attributes=dict(group.attrs))
    for name, array in group.arrays():
        made = copy.create_array(
            name,
            shape=array.shape,
            chunks=array.chunks,
            dtype=array.dtype,
            fill_value=array.fill_value,
            filters=None,
            serializer="auto",
            compressors=[zarr.codecs.ZstdCodec(level=1, checksum=False), zarr.codecs.Crc32cCodec()],
            config={"write_empty_chunks": True},
        )
        made[...] = array[...]
    return asyncio.run(_objects(store))


async def _objects(store: MemoryStore) -> dict[str, bytes]:
    found = {}
    async for key in store.list():
        value = await store.get(key, default_buffer_prototype())
        assert value is not None
        found[key] = value.to_bytes()
    return found


@pytest.mark.parametrize("records", SAMPLES, ids=len)
def test_what_plain_zarr_wrote_is_read(records: list[Record], tmp_path: Path) -> None:
    segment = CODEC.encode(records, "seg/x")
    ours = {entry.name: bytes(entry.data) for entry in zarr_zip.read(segment.data, "x")}
    theirs = written_by_zarr(opened(segment.data, tmp_path))
    assert ours.keys() == theirs.keys()
    for name in zarr_arrays.document_names(segment.info.wide):
        document = {k: v for k, v in json.loads(theirs[name]).items() if k != "attributes" or name == "zarr.json"}
        assert document.pop("storage_transformers", []) == []
        assert document == json.loads(ours[name])
        theirs[name] = ours[name]
    data, _ = zarr_zip.write((name, theirs[name]) for name in ours)
    assert list(map(plain, CODEC.decode(data, None))) == list(map(plain, records))


def test_c3_a_missing_chunk_reads_as_zeros_in_plain_zarr_and_is_damage_here(tmp_path: Path) -> None:
    segment = CODEC.encode(many(3, 4), "seg/x")
    entries = [(e.name, bytes(e.data)) for e in zarr_zip.read(segment.data, "x") if e.name != "token_ids/c/0"]
    data, _ = zarr_zip.write(entries)
    assert not opened(data, tmp_path)["token_ids"][:].any()
    with pytest.raises(Damaged):
        CODEC.decode(data, None)


def test_a_segment_is_a_zip_file_of_stored_entries_without_a_date() -> None:
    with zipfile.ZipFile(io.BytesIO(CODEC.encode(many(70, 4), "seg/x").data)) as file:
        assert file.testzip() is None and file.comment == b""
        for info in file.infolist():
            assert info.compress_type == zipfile.ZIP_STORED and info.date_time == (1980, 1, 1, 0, 0, 0)
            assert not info.extra and not info.comment
        names = file.namelist()
    assert len(set(names)) == len(names) and names[:2] == ["zarr.json", "attempt/zarr.json"]
