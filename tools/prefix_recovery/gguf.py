"""Reads a GGUF file: its metadata and its tensors as float32.

Owns: the container format (versions 2 and 3, little-endian) and the encodings F32, Q8_0 and Q4_1.
Does not know: any model, what a key or a tensor name means, where the file came from.

Invariants:
1. The file is not trusted: every length is checked against the bytes that are left before it is used, so that
   a cut or mangled file is an error that names the byte, never a crash, a hang or a large allocation.
2. Every tensor described lies whole inside the file, aligned; that is checked at opening, not at reading.
3. A shape is given outermost dimension first (C order), like in numpy and safetensors; GGUF has it reversed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recovery.errors import ConfigError

Float32Array = npt.NDArray[np.float32]

MAGIC = b"GGUF"
VERSIONS = frozenset({2, 3})
MAX_DIMENSIONS = 4
BLOCK = 32
"""Elements per block of the quantized encodings."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_Q4_1 = np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", BLOCK // 2)])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])
_F32 = np.dtype("<f4")
_ENCODINGS: dict[int, tuple[str, np.dtype[Any], int]] = {
    0: ("F32", _F32, 1),
    3: ("Q4_1", _Q4_1, BLOCK),
    8: ("Q8_0", _Q8_0, BLOCK),
}
"""Code in the file: name, layout of one block, elements per block."""


def decode_q4_1(blocks: npt.NDArray[np.void]) -> Float32Array:
    """Blocks of 32 unsigned 4-bit numbers, `scale * q + least`; low nibbles are the first half of a block."""
    pairs = blocks["pairs"]
    quants: Float32Array = np.concatenate([pairs & 0x0F, pairs >> 4], axis=-1).astype(np.float32)
    scale = blocks["scale"].astype(np.float32)[..., None]
    return quants * scale + blocks["least"].astype(np.float32)[..., None]


def decode_q8_0(blocks: npt.NDArray[np.void]) -> Float32Array:
    """Blocks of 32 signed bytes, `scale * q`."""
    values: Float32Array = blocks["values"].astype(np.float32)
    return values * blocks["scale"].astype(np.float32)[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset: int
    nbytes: int


class _Cursor:
    """Walks the head of the file; every step is checked (invariant 1)."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path, self.data, self.at = path, data, 0

    def fail(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.path} is not a readable GGUF file: {what} (at byte {self.at} of {self.data.size})",
            hint="it may be cut short or not the file it is taken for; install or copy it again",
        )

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.data.size - self.at:
            raise self.fail(f"{nbytes} bytes are announced, {self.data.size - self.at} are left")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at].tobytes()

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def count(self, what: str, least_nbytes: int) -> int:
        """A number of things that take at least `least_nbytes` each, so it bounds itself by what is left."""
        count: int = self.scalar("Q")
        if count * least_nbytes > self.data.size - self.at:
            raise self.fail(f"{count} {what} are announced, more than the bytes left could hold")
        return count

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind != _ARRAY:
            return self._element(kind)
        element = self.scalar("I")
        if element in _SCALARS:
            code = np.dtype(_SCALARS[element]).newbyteorder("<")
            return np.frombuffer(self.take(self.count("values", code.itemsize) * code.itemsize), code).tolist()
        return [self._element(element) for _ in range(self.count("values", 8))]

    def _element(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise self.fail(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])


class Gguf:
    """One opened file. `metadata` maps keys to Python values, `tensors` names to their places."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", hint="give the path of a GGUF file")
        empty = path.stat().st_size == 0
        self._data = np.zeros(0, np.uint8) if empty else np.memmap(path, np.uint8, mode="r")
        cursor = _Cursor(path, self._data)
        if cursor.data[:4].tobytes() != MAGIC:
            raise cursor.fail("it does not start with GGUF")
        cursor.take(4)
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise cursor.fail(f"format version {version} is not one of {sorted(VERSIONS)}")
        tensor_count = cursor.count("tensors", 24)
        self.metadata: dict[str, Any] = {}
        for _ in range(cursor.count("metadata keys", 13)):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} is there twice")
            self.metadata[key] = cursor.value()
        self.tensors = self._read_tensor_infos(cursor, tensor_count)

    def _read_tensor_infos(self, cursor: _Cursor, tensor_count: int) -> dict[str, TensorInfo]:
        described = [self._read_tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise cursor.fail(f"alignment {alignment!r} is not a multiple of 8")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, encoding, offset, nbytes in described:
            if name in tensors:
                raise cursor.fail(f"tensor {name!r} is there twice")
            if offset % alignment or start + offset + nbytes > self._data.size:
                raise cursor.fail(f"tensor {name!r} does not lie inside the file")
            tensors[name] = TensorInfo(name=name, shape=shape, encoding=encoding, offset=start + offset, nbytes=nbytes)
        return tensors

    @staticmethod
    def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
        name, rank = cursor.string(), cursor.scalar("I")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise cursor.fail(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        code, offset = cursor.scalar("I"), cursor.scalar("Q")
        if code not in _ENCODINGS:
            raise cursor.fail(f"tensor {name!r} has encoding {code}; known are F32, Q4_1 and Q8_0")
        encoding, layout, per_block = _ENCODINGS[code]
        if shape[-1] % per_block:
            raise cursor.fail(f"rows of tensor {name!r} are {shape[-1]} long, not whole blocks of {per_block}")
        return name, shape, encoding, offset, math.prod(shape) // per_block * layout.itemsize

    def read(self, name: str) -> Float32Array:
        """The tensor, decoded, in its shape."""
        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.nbytes]
        match info.encoding:
            case "Q4_1":
                return decode_q4_1(raw.view(_Q4_1)).reshape(info.shape)
            case "Q8_0":
                return decode_q8_0(raw.view(_Q8_0)).reshape(info.shape)
            case _:
                return raw.view(_F32).astype(np.float32).reshape(info.shape)
