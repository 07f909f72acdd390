"""Portable files as stores: what is written is read, by others too, and nothing else is (storage_backends/archive.py).

Owns: the shape of the file, its bytes, and every way in which a file of others may try to be something else.
Does not know: what is in a snapshot (test_export.py, test_import.py).

Invariants:
1. Files that are refused are made by hand or by the standard library, never by the code under test with a flag.
2. No test writes a large file: what is beyond 4 GiB lies in holes.
"""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import ConfigError, Damaged, DigestMismatch, NoStore, ObjectMissing, RecoveryError
from recovery.ports import Listed, Put
from storage_backends import open_store, zip_shape
from storage_backends.archive import ArchiveStore, ArchiveWriter
from storage_backends.zip_shape import Located

OBJECTS = {
    "format.json": b'{"format":"prefix-recovery"}',
    "log/000000000001.json": b"{}",
    "seg/e000001/w0.00000000/00000001-00000000-00000000.arrow": bytes(range(60)),
    "state/e000001/job-0000000000000000.json": b"",
    "log/000000000002.json": b'{"seq":2}',
}


def archive(path: Path, objects: dict[str, bytes] = OBJECTS) -> Path:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    writer = ArchiveWriter(fd, str(path))
    for key, data in objects.items():
        assert writer.put_new(key, data) is Put.CREATED
    writer.finish()
    os.close(fd)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return archive(tmp_path / "a.zip")


# ---- what is written is read ---------------------------------------------------------------------------------------


def test_the_objects_come_back_whole_and_by_range(path: Path) -> None:
    store = ArchiveStore(str(path))
    assert {item.key: store.get(item.key) for item in store.list("")} == OBJECTS
    assert [item.key for item in store.list("")] == sorted(OBJECTS)
    assert store.list("log/", "log/000000000001.json") == [Listed("log/000000000002.json", 9)]
    key = next(key for key in OBJECTS if key.startswith("seg/"))
    for start, end in ((0, 0), (0, 10), (5, 5), (50, 90), (60, None), (90, None), (0, 5000)):
        assert store.get(key, start, end) == OBJECTS[key][start:end], (start, end)
    for missing in ("log/000000000003.json", "log"):
        with pytest.raises(ObjectMissing, match=missing):
            store.get(missing)
    for wrong in ("../a", "/a", "A", ""):
        with pytest.raises(ConfigError):
            store.get(wrong)


def test_others_read_it(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert {info.filename: file.read(info) for info in file.infolist()} == OBJECTS
        assert [info.filename for info in file.infolist()] == list(OBJECTS), "in the order in which they were written"
        assert {(info.compress_type, info.date_time, info.extra) for info in file.infolist()} == {
            (zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0), b"")
        }


def test_the_same_objects_are_the_same_bytes(path: Path, tmp_path: Path) -> None:
    assert archive(tmp_path / "b.zip").read_bytes() == path.read_bytes()


def test_an_empty_one(tmp_path: Path) -> None:
    store = ArchiveStore(str(archive(tmp_path / "e.zip", {})))
    assert store.list("") == []


def test_the_writer_is_a_store_that_only_grows(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    writer = ArchiveWriter(fd, "a")
    assert writer.put_new("x", b"1") is Put.CREATED
    assert writer.put_new("x", b"2") is Put.EXISTS
    assert writer.get("x") == b"1" and writer.list("") == [Listed("x", 1)]
    for work in (lambda: writer.put("x", b"3"), lambda: writer.delete("x"), lambda: writer.put_new("../x", b"")):
        with pytest.raises(ConfigError):
            work()
    os.close(fd)


def test_it_is_opened_by_its_path_and_never_written(path: Path, tmp_path: Path) -> None:
    store = open_store(str(path))
    assert isinstance(store, ArchiveStore)
    for work in (lambda: store.put_new("x", b""), lambda: store.put("hint", b""), lambda: store.delete("hint")):
        with pytest.raises(ConfigError, match="never changed"):
            work()
    with pytest.raises(ConfigError, match="is a portable file, not a store") as caught:
        open_store(str(path), create=True)
    assert "snapshot-inspect import" in caught.value.hint
    (tmp_path / "other").write_bytes(b"PX\x03\x04")
    with pytest.raises(NoStore, match="is a file, not a folder"):
        open_store(str(tmp_path / "other"))


def test_the_file_that_was_opened_is_the_one_that_is_read(path: Path, tmp_path: Path) -> None:
    store = ArchiveStore(str(path))
    os.replace(archive(tmp_path / "b.zip", {"x": b"1"}), path)
    assert store.get("log/000000000001.json") == b"{}"


def test_beyond_four_gib_positions_are_in_zip64_records(tmp_path: Path) -> None:
    """Three large objects are holes; only their headers and what follows are written."""
    path = tmp_path / "large.zip"
    large = (1 << 31) - 100
    entries: list[Located] = []
    at = 0
    with open(path, "wb") as file:
        for name, nbytes in (("a", large), ("b", large), ("c", large), ("d", 5)):
            entry = Located(name, at, zlib.crc32(b"hello") if name == "d" else 7, nbytes)
            file.seek(at)
            file.write(zip_shape.header(name, entry.crc32, nbytes))
            if name == "d":
                file.write(b"hello")
            entries.append(entry)
            at = entry.stop
        file.seek(at)
        file.write(zip_shape.directory(entries))
    assert entries[3].offset > 1 << 32
    store = ArchiveStore(str(path))
    assert store.get("d") == b"hello" and store.list("b") == [Listed("b", large)]
    assert store.get("c", large - 3) == b"\0\0\0"
    with zipfile.ZipFile(path) as theirs:
        assert theirs.read("d") == b"hello" and theirs.getinfo("d").header_offset == entries[3].offset


def test_more_entries_than_a_plain_count_holds(tmp_path: Path) -> None:
    objects = {f"state/e000001/s-{n:016x}.json": b"" for n in range(65_536)}
    path = archive(tmp_path / "many.zip", objects)
    assert len(ArchiveStore(str(path)).list("")) == 65_536
    with zipfile.ZipFile(path) as theirs:
        assert len(theirs.infolist()) == 65_536


# ---- nothing else is read ------------------------------------------------------------------------------------------


def opened_and_read(path: Path) -> None:
    store = ArchiveStore(str(path))
    for item in store.list(""):
        store.get(item.key)


def test_every_flipped_bit_is_found_when_it_is_opened_or_read(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    other = tmp_path / "flipped.zip"
    for at in range(len(data)):
        other.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(Damaged):
            opened_and_read(other)


def test_every_truncation_and_growth_is_found(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    other = tmp_path / "cut.zip"
    for stop in range(len(data)):
        other.write_bytes(data[:stop])
        with pytest.raises(Damaged, match="no whole portable file"):
            ArchiveStore(str(other))
    for grown in (data + b"\0", b"\0" + data, data + data):
        other.write_bytes(grown)
        with pytest.raises(Damaged, match="no whole portable file"):
            ArchiveStore(str(other))


def by_hand(*entries: tuple[bytes, bytes], extra: bytes = b"", comment: bytes = b"", **fields: int) -> bytes:
    """A zip file of stored entries with whatever else is asked for, in both headers of each."""
    told = {"flags": 0, "method": 0, "date": 0x21, "attributes": 0, **fields}
    body, central = b"", b""
    for name, data in entries:
        sums = (told["flags"], told["method"], 0, told["date"], zlib.crc32(data), len(data), len(data), len(name))
        at = len(body)
        body += struct.pack("<4s5H3I2H", b"PK\3\4", 20, *sums, len(extra)) + name + extra + data
        more = (len(extra), len(comment), 0, 0, told["attributes"], at)
        central += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *sums, *more) + name + extra + comment
    return body + central + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *[len(entries)] * 2, len(central), len(body), 0)


def test_what_is_made_by_hand_without_anything_special_is_the_same(path: Path) -> None:
    assert by_hand(*((key.encode(), data) for key, data in OBJECTS.items())) == path.read_bytes()


NAMES = (
    *("/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "A", "a b", "a\\b", "C:x", "é", "\x01", "a/.", ".."),
    *(".tmp/x", "x" * 256, "a/" * 600 + "b"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_key_is_refused(tmp_path: Path, name: str) -> None:
    """Absolute, with `..`, or anything else that is no place in a store."""
    (tmp_path / "x.zip").write_bytes(by_hand((name.encode(), b"1")))
    with pytest.raises(Damaged, match=r"is no name of an object|is larger than the file"):
        ArchiveStore(str(tmp_path / "x.zip"))


def test_a_doubled_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(by_hand((b"format.json", b"1"), (b"format.json", b"2")))
    with pytest.raises(Damaged, match=r"format.json is in it twice"):
        ArchiveStore(str(tmp_path / "x.zip"))


def test_what_is_compressed_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """A bomb: 64 MiB of zeros in 64 kB."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", bytes(64 << 20))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    with pytest.raises(Damaged, match="no whole portable file"):
        ArchiveStore(str(path))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


SPECIAL: list[dict[str, Any]] = [
    {"comment": b"hello"},
    {"extra": b"\x99\x99\0\0"},
    {"date": 0x5C21},
    {"attributes": 0o120777 << 16},  # a symbolic link
    {"flags": 1},  # encrypted
    {"flags": 8},  # sizes behind the data
    {"method": 8},
]


@pytest.mark.parametrize("special", SPECIAL)
def test_anything_special_about_an_entry_is_refused(tmp_path: Path, special: dict[str, Any]) -> None:
    (tmp_path / "x.zip").write_bytes(by_hand((b"a", b"1"), **special))
    with pytest.raises(Damaged, match="no whole portable file"):
        ArchiveStore(str(tmp_path / "x.zip"))


def _mangled(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Files whose numbers lie: every 32-bit field of directory and end record set to what hurts most."""
    begin = data.index(b"PK\x01\x02")
    for at in range(begin, len(data) - 3):
        for value in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF, len(data)):
            mangled = data[:at] + struct.pack("<I", value) + data[at + 4 :]
            if mangled != data:
                yield f"{value:#x} at {at}", mangled


def test_no_number_that_lies_costs_memory_or_is_believed(tmp_path: Path) -> None:
    data = archive(tmp_path / "a.zip", {"a": b"1", "b/c": b"23"}).read_bytes()
    path = tmp_path / "lies.zip"
    tracemalloc.start()
    for what, mangled in _mangled(data):
        path.write_bytes(mangled)
        try:
            opened_and_read(path)
        except Damaged:
            continue
        raise AssertionError(f"{what} was believed")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_zip64_record_that_lies(tmp_path: Path) -> None:
    body = zip_shape.header("a", zlib.crc32(b"1"), 1) + b"1"
    plain = zip_shape.directory([Located("a", 0, zlib.crc32(b"1"), 1)])
    record, locator = zip_shape.END_64, zip_shape.LOCATOR_64
    path = tmp_path / "x.zip"
    for begin in (0, 1, len(body), 1 << 40, (1 << 64) - 1):
        far = record.pack(zip_shape.END_64_MAGIC, record.size - 12, 20, 20, 0, 0, 1, 1, len(plain), begin)
        far += locator.pack(zip_shape.LOCATOR_64_MAGIC, 0, len(body) + len(plain) - 22, 1)
        path.write_bytes(body + plain[:-22] + far + plain[-22:])
        with pytest.raises(Damaged):
            ArchiveStore(str(path))


def test_overlapping_entries_and_gaps_are_refused(tmp_path: Path) -> None:
    """Two entries that share bytes, and bytes that no entry has."""
    inner = zip_shape.header("b", zlib.crc32(b"x"), 1) + b"x"
    outer = zip_shape.header("a", zlib.crc32(inner), len(inner)) + inner
    shared = [Located("a", 0, zlib.crc32(inner), len(inner)), Located("b", 31, zlib.crc32(b"x"), 1)]
    gap = [Located("b", 0, zlib.crc32(b"x"), 1), Located("b2", len(inner) + 3, zlib.crc32(b"y"), 1)]
    second = zip_shape.header("b2", zlib.crc32(b"y"), 1) + b"y"
    for data, entries in ((outer, shared), (inner + b"\0\0\0" + second, gap)):
        buffer = io.BytesIO(data + zip_shape.directory(entries))
        path = tmp_path / "x.zip"
        path.write_bytes(buffer.getvalue())
        with pytest.raises(Damaged, match="no whole portable file"):
            ArchiveStore(str(path))


def test_what_is_no_plain_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        ArchiveStore(str(tmp_path / "pipe"))
    with pytest.raises(RecoveryError):
        ArchiveStore(str(tmp_path / "missing"))


def test_an_object_that_was_changed_after_the_file_was_opened_is_found(path: Path) -> None:
    store = ArchiveStore(str(path))
    data = path.read_bytes()
    at = data.index(b'{"seq":2}')
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"[")
    with pytest.raises(DigestMismatch, match=r"log/000000000002.json"):
        store.get("log/000000000002.json")
    os.truncate(path, 20)
    with pytest.raises(Damaged, match="ends at byte"):
        store.get("log/000000000001.json")
