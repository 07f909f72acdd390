"""docs/segments.md: the code that it shows reads what is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recovery.model import Chunk
from storage_backends.codecs import segment_codec
from storage_backends.testing.segments import many, many_wide

PAGE = Path(__file__).parent.parent / "docs" / "segments.md"
BLOCKS = re.findall("```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_wide_columns_are_appended_as_shown() -> None:
    names = run(BLOCKS[0])
    assert names["chunk"].columns["top_ids"].tolist() == [[11, 42], [7, 3]]
    assert names["chunk"].columns["top_logprobs"].tobytes() == names["top_logprobs"].tobytes()


@pytest.mark.parametrize("make", [many, many_wide])
@pytest.mark.parametrize(("codec", "block"), [("arrow", BLOCKS[1]), ("zarr", BLOCKS[2])])
def test_plain_libraries_read_as_shown(
    make: Any, codec: Any, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for last in (1, 2, 3):  # what the names hold after the loop is of the last chunk
        chunks = [record for record in make(6, 4) if isinstance(record, Chunk)][:last]
        Path(f"segment.{codec}").write_bytes(segment_codec(codec).encode(chunks, "seg/x").data)
        names, chunk = run(block), chunks[-1]
        assert np.array_equal(names["tokens"], chunk.token_ids)
        assert (names["logprobs"] is None) == (chunk.logprobs is None)
        assert chunk.logprobs is None or np.array(names["logprobs"], np.float32).tobytes() == chunk.logprobs.tobytes()
        assert names["columns"].keys() == chunk.columns.keys()
        for name, values in chunk.columns.items():
            found = names["columns"][name]
            assert (found.dtype, found.shape, found.tobytes()) == (values.dtype, values.shape, values.tobytes())
