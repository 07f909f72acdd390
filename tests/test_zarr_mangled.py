"""Zarr segments that are mangled behind right sums: what the sums would have kept away from the parsers.

The sums of a zip entry and of a chunk find nearly every mutation of a segment (SegmentConformance tries those). Here
the content is mangled first and sealed afterwards, so that documents, zstd frames and arrays are what is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from recovery.model import Record
from storage_backends import zarr_arrays, zarr_zip
from storage_backends.sums import crc32c
from storage_backends.testing.mutations import try_in_process
from storage_backends.testing.segments import many_wide
from storage_backends.zarr_segments import ZarrSegmentCodec

COUNT = 1000


class Sealed:
    """Decodes the joined contents of a segment's entries: each mangled, then given the sums that it should have.

    Entries have their old lengths; what is more or less than that is the last one's.
    """

    def __init__(self) -> None:
        segment = ZarrSegmentCodec(records_per_batch=6).encode(many_wide(10, 12), "seg/x")
        self.contents = [(entry.name, self.unsealed(entry)) for entry in zarr_zip.read(segment.data, "x")]

    @staticmethod
    def is_chunk(name: str) -> bool:
        return "/c/" in name

    def unsealed(self, entry: zarr_zip.Entry) -> bytes:
        return bytes(entry.data[:-4] if self.is_chunk(entry.name) else entry.data)

    def sealed(self, name: str, content: bytes) -> bytes:
        return content + crc32c(content).to_bytes(4, "little") if self.is_chunk(name) else content

    def sample(self) -> bytes:
        return b"".join(content for _, content in self.contents)

    def decode(self, data: bytes) -> list[Record]:
        named = []
        at = 0
        for number, (name, content) in enumerate(self.contents):
            stop = at + len(content) if number + 1 < len(self.contents) else len(data)
            named.append((name, self.sealed(name, data[at:stop])))
            at = stop
        return ZarrSegmentCodec().decode(zarr_zip.write(named)[0], None)


class Compressed(Sealed):
    """As above, and the chunks are mangled before they are compressed: any value may be anything."""

    def unsealed(self, entry: zarr_zip.Entry) -> bytes:
        if not self.is_chunk(entry.name):
            return bytes(entry.data)
        name, data = entry.name.split("/")[0], memoryview(entry.data)
        length = zarr_arrays.claimed_length(name, data, "x")
        return zarr_arrays.unpack_chunk(name, data, length, "x").tobytes()

    def sealed(self, name: str, content: bytes) -> bytes:
        if not self.is_chunk(name):
            return content
        return super().sealed(name, pa.compress(content, codec="zstd", asbytes=True))


class Arrays(Compressed):
    """As above, the documents being spared."""

    def __init__(self) -> None:
        super().__init__()
        self.documents = [item for item in self.contents if not self.is_chunk(item[0])]
        self.contents = [item for item in self.contents if self.is_chunk(item[0])]

    def decode(self, data: bytes) -> list[Record]:
        contents, self.contents = self.contents, self.documents + self.contents
        try:
            return super().decode(b"".join(content for _, content in self.documents) + data)
        finally:
            self.contents = contents


@pytest.mark.parametrize("kind", [Sealed, Compressed, Arrays])
def test_mangled_content_behind_right_sums_never_crashes_a_reader(kind: Any, tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    sample.write_bytes(kind().sample())
    tally = try_in_process(f"{__name__}:{kind.__name__}", sample, seed=5, count=COUNT)
    assert sum(tally.values()) == COUNT
    assert tally["Damaged"] + tally["DigestMismatch"] > COUNT // 2
