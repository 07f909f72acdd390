"""The GGUF reader on small files of our own: whole, cut and mangled.

Owns: an independent writer of small GGUF files.
Does not know: any model.
"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from prefix_recovery.gguf import Gguf
from recovery.errors import ConfigError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def small_gguf(*, encoding: int = 3, payload: bytes = bytes(range(40)), columns: int = 64) -> bytes:
    """A file with one tensor `w` of one row and three metadata keys."""
    keys = text("a.text") + struct.pack("<I", 8) + text("é")
    keys += text("a.list") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz")
    keys += text("a.numbers") + struct.pack("<IIQ3i", 9, 5, 3, -1, 2, 3)
    info = text("w") + struct.pack("<IQQIQ", 2, columns, 1, encoding, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 3) + keys + info
    return head + b"\0" * (-len(head) % 32) + payload


def opened(tmp_path: Path, data: bytes) -> Gguf:
    path = tmp_path / "small.gguf"
    path.write_bytes(data)
    return Gguf(path)


def test_gguf_metadata_and_q4_1(tmp_path: Path) -> None:
    block = struct.pack("<ee16B", 0.5, -3.0, *(16 * (i % 7) + i for i in range(16)))
    gguf = opened(tmp_path, small_gguf(payload=block * 2))
    assert gguf.metadata == {"a.text": "é", "a.list": ["x", "yz"], "a.numbers": [-1, 2, 3]}
    low = [0.5 * i - 3.0 for i in range(16)]
    high = [0.5 * (i % 7) - 3.0 for i in range(16)]
    assert gguf.tensors["w"].shape == (1, 64)
    assert gguf.read("w").tolist() == [(low + high) * 2]


def test_gguf_q8_0_and_f32(tmp_path: Path) -> None:
    block = struct.pack("<e32b", 0.25, *range(-16, 16))
    gguf = opened(tmp_path, small_gguf(encoding=8, payload=block, columns=32))
    assert gguf.read("w").tolist() == [[0.25 * i for i in range(-16, 16)]]
    gguf = opened(tmp_path, small_gguf(encoding=0, payload=struct.pack("<3f", 1.5, -2.0, 0.0), columns=3))
    assert gguf.read("w").tolist() == [[1.5, -2.0, 0.0]]


def test_gguf_cut_anywhere_is_a_clear_error(tmp_path: Path) -> None:
    whole = small_gguf()
    opened(tmp_path, whole)
    for length in range(len(whole)):
        with pytest.raises(ConfigError, match=r"small\.gguf is not a readable GGUF file: .* \(at byte \d+ of"):
            opened(tmp_path, whole[:length])


def test_gguf_mangled_is_read_or_refused_by_name(tmp_path: Path) -> None:
    rng = random.Random(7)
    whole = small_gguf()
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        try:
            for name, info in (gguf := opened(tmp_path, bytes(data))).tensors.items():
                assert gguf.read(name).shape == info.shape
        except ConfigError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not start with GGUF"),
        (b"PK\x03\x04" + bytes(60), "does not start with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "format version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "more than the bytes left"),
        (small_gguf(encoding=2), "encoding 2; known are"),
        (small_gguf(columns=63), "not whole blocks"),
        (small_gguf(columns=1 << 62), "does not lie inside the file"),
    ],
)
def test_gguf_refusals(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, data)
