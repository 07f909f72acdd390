"""W15: the package as it is installed from its wheel, with no source tree on the path: run, kill, continue, look."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OnLoop
from tests.engine_runs import ask
from tests.job_files import FLUSH, assert_whole, lines, rows_of, write_job
from tests.job_processes import kill_at_rest, running, something
from vllm_hooks import surface

ROOT = Path(__file__).parents[1]
COMMAND = ("-m", "prefix_recovery")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel in it.

    Its dependencies are those of the running Python, reached through one line of path. An editable install is itself
    such a line, and lines of a folder that was reached by one are not read.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    home = folder / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = (home / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "-qq", str(wheel)], check=True)
    return home


@pytest.fixture
def in_venv(installed: Path, tmp_path: Path) -> Run:
    """Runs a command of the new environment in a folder of its own."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [str(installed / "bin" / name), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False
        )

    return run


def test_w15_what_is_imported_is_what_was_installed(installed: Path, in_venv: Run) -> None:
    names = ["recovery", "storage_backends", "vllm_hooks", "prefix_recovery", "snapshot_inspect"]
    script = f"import {', '.join(names)}; print(*[m.__file__ for m in ({', '.join(names)})], sep='\\n')"
    files = in_venv("python", "-c", script).stdout.split()
    assert len(files) == len(names)
    assert all(file.startswith(str(installed)) for file in files), files
    found = in_venv("python", "-c", "import tests.job_files")  # other packages have a `tests` too
    assert found.returncode != 0 and "No module named 'tests" in found.stderr


def test_w15_both_commands(in_venv: Run) -> None:
    for name in ("prefix-recovery", "snapshot-inspect"):
        shown = in_venv(name, "--help")
        assert shown.returncode == 0 and f"usage: {name}" in shown.stdout.lower() + shown.stderr.lower(), shown
    assert json.loads(in_venv("prefix-recovery", "schema").stdout)["title"] == "prefix-recovery job"


def test_w15_a_job_is_killed_and_continued(
    installed: Path, in_venv: Run, tmp_path: Path, rng: random.Random, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """No step but the user's: make a model, run, be killed, run again, look at the store."""
    made = in_venv("prefix-recovery", "model", "tiny", "tiny")
    assert made.returncode == 0, made.stderr
    rows = lines(8, least=150, step=20)
    config = write_job(tmp_path, Path("tiny"), rows)
    python = installed / "bin" / "python"
    with running(config, "first", program=COMMAND, python=python, cwd=tmp_path) as job:
        job.after(rng.randint(8 * FLUSH, 1000))
        kill_at_rest(job, something, "tokens of an unfinished call in the store", str(tmp_path / "store"))
    again = in_venv("prefix-recovery", "run", "job.yaml")
    assert again.returncode == 0, again.stderr
    assert "continuing from snapshot" in again.stderr

    async def wanted() -> list[dict[str, Any]]:
        found = []
        for row in rows:
            params = surface.sampling_params({"temperature": 0, "ignore_eos": True, "logprobs": 0, **row["sampling"]})
            answer = await ask(engine, row["prompt_token_ids"], params, f"w-{row['id']}")
            fields = ("prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason")
            values = {name: getattr(answer, name) for name in fields}
            found.append({"id": row["id"], "sample_index": 0, "logprobs": answer.sampled, **values})
        return found

    assert_whole(rows_of(tmp_path), on_loop(wanted()))
    assert any(row["resumes"] for row in rows_of(tmp_path))
    latest = in_venv("snapshot-inspect", "latest", "store", "--json")
    assert latest.returncode == 0, latest.stderr
    json.loads(latest.stdout)
