"""Finding an engine's process, also one that could not give itself its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.job_processes import is_engine, name_of

SPAWNED = """
import multiprocessing, os, sys, setproctitle

def child(first, title, ready):
    if first:  # by which setproctitle finds where its argv is
        name = open("/proc/self/environ").read().split("=")[0]
        os.environ[name] = os.environ[name]
    if title:
        setproctitle.setproctitle(title)
    ready.send(os.getpid())
    ready.recv()

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=child, args=(sys.argv[1] == "changed", sys.argv[2], theirs), daemon=True).start()
    print(ours.recv(), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("environment", "title", "name", "expected"),
    [
        ("as it was", "VLLM::EngineCore", "VLLM::EngineCor", True),
        ("changed", "VLLM::EngineCore", "python", True),
        ("as it was", "VLLM::APIServer_1", "VLLM::APIServer", False),
    ],
)
def test_an_engine_is_found_by_its_name_or_as_one_that_has_none(
    tmp_path: Path, environment: str, title: str, name: str, expected: bool
) -> None:
    program = tmp_path / "spawning.py"
    program.write_text(SPAWNED)
    command = [sys.executable, str(program), environment, title]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        pid = int(parent.stdout.readline())
        found, called = is_engine(pid), name_of(pid).strip()
        ours = is_engine(parent.pid)
        parent.stdin.write("\n")
    assert (called.startswith(name), found, ours) == (True, expected, False), called
