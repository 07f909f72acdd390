"""Which codec reads and writes a segment: the one place that knows them by name.

Owns: the names of segment codecs, which are also the suffixes of their keys; reading a store that holds several kinds.
Does not know: any encoding, which one a job has chosen.

Invariants:
1. A segment is read by what its key says, never by what the job is configured to write: a store may hold any mixture.
2. A codec, and the library behind it, is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

from recovery.errors import ConfigError, Damaged, FormatNotUnderstood
from recovery.model import Record, SegmentInfo
from recovery.ports import EncodedSegment, SegmentCodec, SegmentPart
from recovery.records import Records

CodecName = Literal["arrow", "zarr"]

_MAGIC: dict[bytes, CodecName] = {b"ARROW1": "arrow", b"PK\x03\x04": "zarr"}


@cache
def segment_codec(name: CodecName) -> SegmentCodec:
    """The codec of that name. Raises ConfigError if there is none."""
    match name:
        case "arrow":
            from storage_backends.arrow_segments import ArrowSegmentCodec

            return ArrowSegmentCodec()
        case "zarr":
            from storage_backends.zarr_segments import ZarrSegmentCodec

            return ZarrSegmentCodec()
    raise ConfigError(f"{name!r:.60} is no segment codec", hint="codec: arrow, or codec: zarr")


def codec_of_key(key: str) -> SegmentCodec:
    """The codec of the segment with this key. Raises FormatNotUnderstood if its suffix is none of ours."""
    _, dot, suffix = key.rpartition(".")
    if dot and suffix in ("arrow", "zarr"):
        return segment_codec(suffix)
    raise FormatNotUnderstood(
        f"segment {key} is in an encoding that is not known here",
        hint="read it with the version of prefix-recovery that wrote it, or a newer one",
    )


class MixedSegmentCodec:
    """A SegmentCodec that writes with the named codec and reads whatever a segment is."""

    def __init__(self, write: CodecName = "arrow") -> None:
        self._write = segment_codec(write)
        self.suffix = self._write.suffix

    def encode(self, records: Sequence[Record], key_stem: str) -> EncodedSegment:
        return self._write.encode(records, key_stem)

    def describe(self, key: str, data: bytes) -> SegmentInfo:
        return codec_of_key(key).describe(key, data)

    def decode(self, data: bytes, info: SegmentInfo | None) -> Records:
        codec = _codec_of_bytes(data) if info is None else codec_of_key(info.key)
        return codec.decode(data, info)

    def parts(self, data: bytes, info: SegmentInfo | None) -> Sequence[SegmentPart]:
        codec = _codec_of_bytes(data) if info is None else codec_of_key(info.key)
        return codec.parts(data, info)

    def decode_batch(self, data: bytes, info: SegmentInfo, batch: int) -> Records:
        return codec_of_key(info.key).decode_batch(data, info, batch)


def _codec_of_bytes(data: bytes) -> SegmentCodec:
    for magic, name in _MAGIC.items():
        if data.startswith(magic):
            return segment_codec(name)
    raise Damaged("a segment begins like none that is known here")
