"""zarr_zip against the zipfile of the standard library, and what it refuses."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import Damaged, DigestMismatch
from storage_backends import zarr_zip

NAMES = st.text("abc/._-0", min_size=1, max_size=20)
ENTRIES = st.dictionaries(NAMES, st.binary(max_size=50), max_size=8)
SAMPLE = {"zarr.json": b"{}", "a/zarr.json": b'{"a": 1}', "a/c/0": bytes(range(100))}


def plain_zip(entries: dict[str, bytes], **options: object) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as file:
        for name, content in entries.items():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.create_system = 0
            for option, value in options.items():
                setattr(info, option, value)
            file.writestr(info, content)
    return sink.getvalue()


@given(entries=ENTRIES)
def test_what_is_written_is_a_zip_file(entries: dict[str, bytes]) -> None:
    data, written = zarr_zip.write(entries.items())
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        assert {info.filename: file.read(info) for info in file.infolist()} == entries
        assert all(info.date_time == (1980, 1, 1, 0, 0, 0) and info.compress_type == 0 for info in file.infolist())
        assert [info.header_offset for info in file.infolist()] == [entry.offset for entry in written]
    assert [(e.name, bytes(e.data), e.offset) for e in zarr_zip.read(data, "x")] == [
        (e.name, e.data, e.offset) for e in written
    ]


def test_the_bytes_are_those_of_the_standard_library() -> None:
    # it marks a file of the owner in the directory, where nothing is marked here
    ours, theirs = zarr_zip.write(SAMPLE.items())[0], plain_zip(SAMPLE, external_attr=1)
    assert len(ours) == len(theirs)
    assert [a for a, b in zip(theirs, ours, strict=True) if a != b] == [1] * len(SAMPLE)


def test_more_entries_than_16_bits_count() -> None:
    for count in (0xFFFE, 0xFFFF):
        data, _ = zarr_zip.write((f"{number}", b"") for number in range(count))
        assert len(zarr_zip.read(data, "x")) == count
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            assert len(file.infolist()) == count and file.infolist()[-1].filename == str(count - 1)


def test_a_run_of_entries_is_read_without_the_rest() -> None:
    data, entries = zarr_zip.write(SAMPLE.items())
    part = data[entries[1].offset : entries[2].stop]
    assert [entry.name for entry in zarr_zip.read_run(part, "x")] == ["a/zarr.json", "a/c/0"]
    for wrong in (part[1:], part[:-1], part + b"\0", data):
        with pytest.raises(Damaged):
            zarr_zip.read_run(wrong, "x")
    assert zarr_zip.read_run(b"", "x") == []


def test_every_other_form_of_the_same_content_is_damage() -> None:
    data, entries = zarr_zip.write(SAMPLE.items())
    directory = data[entries[-1].stop :]
    for wrong in (
        plain_zip(SAMPLE, compress_type=zipfile.ZIP_DEFLATED),
        plain_zip(SAMPLE, date_time=(1980, 1, 2, 0, 0, 0)),
        plain_zip(SAMPLE, extra=b"\x01\x02\x00\x00"),
        plain_zip(SAMPLE, comment=b"hello"),
        plain_zip(SAMPLE | {"é": b""}),
        data + b"\0",
        b"\0" + data,
        data + data,
        data[:-2] + b"\x01\x00!",
        directory,
        b"",
        data[: entries[1].offset] + data[entries[0].offset :],
        data[: entries[2].offset] + directory,
    ):
        with pytest.raises(Damaged):
            zarr_zip.read(wrong, "x")


def test_every_flipped_bit_is_found() -> None:
    data, _ = zarr_zip.write(SAMPLE.items())
    for bit in range(8 * len(data)):
        mangled = bytearray(data)
        mangled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            zarr_zip.read(bytes(mangled), "x")


def test_changed_content_is_named() -> None:
    data, entries = zarr_zip.write(SAMPLE.items())
    mangled = bytearray(data)
    mangled[entries[2].stop - 1] ^= 1
    with pytest.raises(DigestMismatch, match="a/c/0"):
        zarr_zip.read(bytes(mangled), "x")


def test_two_entries_of_one_name_are_two_entries() -> None:
    data, _ = zarr_zip.write([("a", b"1"), ("a", b"2")])
    assert [bytes(entry.data) for entry in zarr_zip.read(data, "x")] == [b"1", b"2"]


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = zarr_zip.write(SAMPLE.items())
    monkeypatch.setattr(zarr_zip, "FILE_BYTES_MAX", len(data))
    assert len(zarr_zip.read(data, "x")) == len(zarr_zip.read(zarr_zip.write(SAMPLE.items())[0], "x")) == 3
    monkeypatch.setattr(zarr_zip, "FILE_BYTES_MAX", len(data) - 1)
    with pytest.raises(Damaged, match="at most"):
        zarr_zip.read(data, "x")
    with pytest.raises(ValueError, match="could not be read again"):
        zarr_zip.write(SAMPLE.items())
    monkeypatch.setattr(zarr_zip, "FILE_BYTES_MAX", 100)
    with pytest.raises(ValueError, match="could not be read again"):
        zarr_zip.write(SAMPLE.items())
