"""Who writes into a store, as the log says it to people."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from storage_backends import writer_name as module
from storage_backends.writer_name import LENGTH_MAX, writer_name


def test_machines_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for boot in ("1a2b3c4d-0000", "ffffff00-0000"):
        (tmp_path / "boot").write_text(boot)
        monkeypatch.setattr(module, "_BOOT", str(tmp_path / "boot"))
        names.append(writer_name("prune"))
    who = f"{socket.gethostname()} (boot %s) pid {os.getpid()}, prune"
    assert names == [who % "1a2b3c", who % "ffffff"]


def test_a_system_without_boot_ids_and_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BOOT", str(tmp_path / "none"))
    assert re.fullmatch(r".+ pid \d+", writer_name()) and "boot" not in writer_name()
    assert len(writer_name("x" * 999)) == LENGTH_MAX
