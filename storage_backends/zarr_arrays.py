"""The arrays of a Zarr segment: their names, types and shapes, the documents that say so, and their chunks.

Owns: docs/format.md, section 9.1, as far as Zarr is concerned: `zarr.json` of the group and of each array, and one
chunk to bytes and back.
Does not know: zip files, records, how chunks are divided among batches (zarr_batches.py).

Invariants:
1. What plain zarr needs is all there: the documents follow the Zarr specification 3.0, and chunks are as its codecs
   `bytes`, `zstd` and `crc32c` make them.
2. Only these documents are understood. A document names nothing that is then looked up and run: a `zarr.json` of
   somebody else chooses no code here.
3. A chunk is decompressed only after its crc32c fits and the size that it claims was compared with the largest that it
   may have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recovery.errors import Damaged, DigestMismatch
from recovery.model import WIDE_TYPES
from storage_backends import arrow_file, arrow_wide, strict_json
from storage_backends.sums import crc32c

Array = npt.NDArray[Any]

FORMAT = "prefix-recovery/segment"
RECORDS_PER_BATCH = 64
CHUNK_VALUES_MAX = 1 << 16
"""More values become several chunks: so the padding of the last one, and what a chunk may claim, stay small."""

DOCUMENT_BYTES_MAX = 64 << 10
HEADER_BYTES_MAX = 64 << 20
NO_RECORD = 255
"""`kind` behind the last record."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Kind:
    """What one array holds: elements of `dtype`, per record (then each of shape `element`) or as values on end.

    `ranges`: for values, the array that says which of them are whose.
    """

    dtype: str
    element: tuple[int, ...] = ()
    ranges: str = ""
    fill: int = 0

    @property
    def element_nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize) * math.prod(self.element)

    @property
    def chunk_values_max(self) -> int:
        return CHUNK_VALUES_MAX if self.ranges else RECORDS_PER_BATCH


_ARRAYS = {
    "attempt": Kind("<u4"),
    "body": Kind("u1", ranges="body_range"),
    "body_range": Kind("<u8", (2,)),
    "call_id": Kind("u1", (16,)),
    "digest": Kind("u1", (16,)),
    "has_logprobs": Kind("?"),
    "kind": Kind("u1", fill=NO_RECORD),
    "lineage": Kind("u1", ranges="lineage_range"),
    "lineage_range": Kind("<u8", (2,)),
    "logprobs": Kind("<f4", ranges="token_range"),
    "mask_range": Kind("<u8", (2,)),
    "mask_starts": Kind("<u4", ranges="mask_range"),
    "mask_values": Kind("?", ranges="mask_range"),
    "number": Kind("<u8"),
    "start": Kind("<u4"),
    "token_ids": Kind("<i4", ranges="token_range"),
    "token_range": Kind("<u8", (2,)),
}
_WIDE_ARRAYS = {"wide": Kind("u1", ranges="wide_range"), "wide_range": Kind("<u8", (2,))}
for _type in WIDE_TYPES:
    _WIDE_ARRAYS[f"wide_{_type}"] = Kind(np.dtype(_type).newbyteorder("<").str, ranges=f"wide_{_type}_range")
    _WIDE_ARRAYS[f"wide_{_type}_range"] = Kind("<u8", (2,))
ARRAYS = _ARRAYS | _WIDE_ARRAYS
"""Every array that a segment may have; which ones it has is `array_names`."""


def array_names(types: Sequence[str]) -> list[str]:
    """The arrays of a segment with wide columns of these types, in the order of their names, which is the entries'."""
    wide = [f"wide_{type_}{end}" for type_ in types for end in ("", "_range")]
    return sorted([*_ARRAYS, *(["wide", "wide_range", *wide] if types else [])])


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes of one segment. `chunk_values`, `n_chunks`: per array with values. `types`: of its wide columns."""

    types: tuple[str, ...]
    n_records: int
    per_batch: int
    chunk_values: Mapping[str, int]
    n_chunks: Mapping[str, int]

    @property
    def n_batches(self) -> int:
        return -(-self.n_records // self.per_batch)

    @property
    def nbytes(self) -> int:
        """What all chunks are together when they are decompressed."""
        total = 0
        for name in array_names(self.types):
            kind = ARRAYS[name]
            values = self.chunk_values[name] * self.n_chunks[name] if kind.ranges else self.per_batch * self.n_batches
            total += kind.element_nbytes * values
        return total

    def records_of(self, batch: int) -> int:
        return min(self.per_batch, self.n_records - batch * self.per_batch)


# ---- documents -----------------------------------------------------------------------------------------------


def document_names(types: Sequence[str] = ()) -> list[str]:
    return ["zarr.json", *(f"{name}/zarr.json" for name in array_names(types))]


def types_in(names: Collection[str]) -> tuple[str, ...]:
    """The types of the wide columns that entries of these names have arrays for."""
    return tuple(type_ for type_ in WIDE_TYPES if f"wide_{type_}/zarr.json" in names)


def documents(layout: Layout) -> list[tuple[str, bytes]]:
    """Every `zarr.json` of a segment, by name."""
    requires = [arrow_wide.FEATURE] if layout.types else []
    attributes = {"format": FORMAT, "version": arrow_file.VERSION, "requires": requires}
    made: list[dict[str, Any]] = [{"zarr_format": 3, "node_type": "group", "attributes": attributes}]
    made += [_document(name, layout) for name in array_names(layout.types)]
    names = document_names(layout.types)
    return [(name, strict_json.dump(value).encode()) for name, value in zip(names, made, strict=True)]


def _document(name: str, layout: Layout) -> dict[str, Any]:
    kind = ARRAYS[name]
    if kind.ranges:
        chunk = layout.chunk_values[name]
        length = chunk * layout.n_chunks[name]
    else:
        chunk, length = layout.per_batch, layout.n_records
    dtype = np.dtype(kind.dtype)
    single = dtype.itemsize == 1
    fill: int | float | bool = {"b": False, "f": 0.0}.get(dtype.kind, kind.fill)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length, *kind.element],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, *kind.element]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [
            {"name": "bytes"} if single else {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1, "checksum": False}},
            {"name": "crc32c"},
        ],
    }


def check_group(data: bytes | memoryview, types: Sequence[str], what: str) -> None:
    """Raises FormatNotUnderstood unless the group says that it is a segment of this version; `types` as in types_in."""
    group = _parse(data, f"zarr.json of {what}", HEADER_BYTES_MAX)
    if group.get("zarr_format") != 3 or group.get("node_type") != "group":
        raise Damaged(f"{what} is no Zarr group of format 3")
    header = strict_json.take(group, "attributes", dict, f"zarr.json of {what}") if "attributes" in group else {}
    arrow_file.check_header(header, FORMAT, what, (arrow_wide.FEATURE,))
    if bool(types) != bool(header.get("requires")):
        raise Damaged(f"{what} does not require what its arrays are")


def read_layout(found: Mapping[str, bytes | memoryview], types: tuple[str, ...], what: str) -> Layout:
    """The shapes that the documents of the arrays agree on. Raises Damaged unless they are exactly ours."""
    names = array_names(types)
    parsed = {name: _parse(found[f"{name}/zarr.json"], f"{name}/zarr.json of {what}") for name in names}
    lengths = {name: _length(value, f"{name}/zarr.json of {what}") for name, value in parsed.items()}
    values = [name for name in names if ARRAYS[name].ranges]
    for name, (length, chunk) in lengths.items():
        if not 1 <= chunk <= ARRAYS[name].chunk_values_max or (name in values and length % chunk):
            raise Damaged(f"{name}/zarr.json of {what} has the shape {length} in chunks of {chunk}, which may not be")
    layout = Layout(
        types=types,
        n_records=lengths["kind"][0],
        per_batch=lengths["kind"][1],
        chunk_values={name: lengths[name][1] for name in values},
        n_chunks={name: lengths[name][0] // lengths[name][1] for name in values},
    )
    for name, value in parsed.items():
        if value != _document(name, layout):
            raise Damaged(f"{what} does not have the arrays of its format: {name} is another one")
    return layout


def _parse(data: bytes | memoryview, what: str, nbytes_max: int = DOCUMENT_BYTES_MAX) -> dict[str, Any]:
    if len(data) > nbytes_max:
        raise Damaged(f"{what} has {len(data)} bytes; at most {nbytes_max} are allowed")
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise Damaged(f"{what} is not text: {error}") from error
    return strict_json.parse(text, what)


def _length(document: dict[str, Any], what: str) -> tuple[int, int]:
    """Length and chunk length along the first axis."""
    grid = strict_json.take(document, "chunk_grid", dict, what)
    configuration = strict_json.take(grid, "configuration", dict, what)
    shapes = [
        strict_json.take(document, "shape", list, what),
        strict_json.take(configuration, "chunk_shape", list, what),
    ]
    firsts = [strict_json.take_number({"length": (shape or [None])[0]}, "length", what) for shape in shapes]
    return firsts[0], firsts[1]


# ---- chunks --------------------------------------------------------------------------------------------------


def chunk_name(name: str, index: int) -> str:
    """The key of a chunk in the group: chunks lie one behind the other along the first axis."""
    return f"{name}/c/{index}" + "/0" * len(ARRAYS[name].element)


def pack_chunk(name: str, values: Array, length: int) -> bytes:
    """One chunk of `length` elements, of which `values` are the first and the rest is filled."""
    kind = ARRAYS[name]
    if len(values) < length:
        rest = np.full((length - len(values), *kind.element), kind.fill, kind.dtype)
        values = np.concatenate([values, rest])
    frame = _zstd().compress(np.ascontiguousarray(values, kind.dtype).data.cast("B"), asbytes=True)
    return frame + crc32c(frame).to_bytes(4, "little")


def claimed_length(name: str, data: memoryview, what: str) -> int:
    """How many elements a chunk says that it has; at least one, and at most as many as a chunk may have."""
    kind = ARRAYS[name]
    nbytes = _content_nbytes(data[:-4])
    length, rest = divmod(nbytes, kind.element_nbytes)
    if rest or not 1 <= length <= kind.chunk_values_max:
        raise Damaged(f"{what} claims {nbytes} bytes; a chunk of {name} has no such size")
    return length


def unpack_chunk(name: str, data: memoryview, length: int, what: str) -> Array:
    """The elements of a chunk of which `claimed_length` is `length`; read-only."""
    kind = ARRAYS[name]
    frame = bytes(data[:-4])
    if crc32c(frame) != int.from_bytes(data[-4:], "little"):
        raise DigestMismatch(f"{what} does not have the crc32c that it ends with")
    try:
        raw = _zstd().decompress(frame, decompressed_size=length * kind.element_nbytes, asbytes=True)
    except (OSError, ValueError) as error:
        raise Damaged(f"{what} cannot be decompressed: {error}") from error
    dtype = np.dtype("u1") if kind.dtype == "?" else np.dtype(kind.dtype)
    values = np.frombuffer(raw, dtype).reshape(length, *kind.element)
    if kind.dtype == "?":
        if values.max() > 1:
            raise Damaged(f"{what} has a value that is neither true nor false")
        values = values.view(np.bool_)
    return values


def _zstd() -> pa.Codec:
    """A codec for one use: it costs nothing to make, and no thread shares its state."""
    return pa.Codec("zstd", compression_level=1)


def _content_nbytes(frame: memoryview) -> int:
    """The size that a zstd frame claims (RFC 8878, section 3.1.1.1); -1 if it claims none."""
    if len(frame) < 6 or frame[:4] != _ZSTD_MAGIC:
        return -1
    flags = frame[4]
    is_single = flags >> 5 & 1
    at = 5 + (1 - is_single) + (0, 1, 2, 4)[flags & 3]
    width = (is_single, 2, 4, 8)[flags >> 6]
    if not width or len(frame) < at + width:
        return -1
    return int.from_bytes(frame[at : at + width], "little") + (256 if width == 2 else 0)
