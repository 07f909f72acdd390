"""vllm_hooks.adapters: an adapter is what its files hold, under any path."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_hooks.adapters import Adapters


def extra(adapters: Adapters, path: Path, name: str = "a") -> dict[str, Any]:
    lora = SimpleNamespace(lora_name=name, lora_path=str(path))
    return asyncio.run(adapters.extra_of(lora))


def folder(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path


def test_an_adapter_is_its_content(tmp_path: Path) -> None:
    adapters = Adapters()
    one = extra(adapters, folder(tmp_path / "one", b"abc"))
    assert one == extra(adapters, folder(tmp_path / "two", b"abc")) and set(one) == {"lora_request"}
    assert one != extra(adapters, folder(tmp_path / "three", b"abd"))
    assert one != extra(adapters, tmp_path / "one", name="b")
    assert asyncio.run(adapters.extra_of(None)) == {}


def test_changed_files_are_read_again_and_others_are_not(tmp_path: Path) -> None:
    adapters, path = Adapters(), folder(tmp_path / "one", b"abc")
    before = extra(adapters, path)
    weights = path / "adapter_model.safetensors"
    at = weights.stat()
    weights.write_bytes(b"abd")
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns + 1))
    assert extra(adapters, path) != before
    weights.write_bytes(b"abc")
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert extra(adapters, path) == before


def test_an_adapter_that_is_not_here_is_named(tmp_path: Path) -> None:
    assert extra(Adapters(), tmp_path / "hub-name") == {"lora_request": "a", "lora_path": str(tmp_path / "hub-name")}
