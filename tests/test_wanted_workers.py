"""prefix_recovery.wanted_workers: the count of workers that somebody wants a running job to have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefix_recovery.cli import main
from prefix_recovery.output_lock import OutputLock
from prefix_recovery.wanted_workers import WantedWorkers
from tests.job_files import write_job
from tests.test_notes import GARBAGE


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job's config; nothing of it runs."""
    return write_job(tmp_path, tmp_path / "model", [], workers=2)


def test_without_a_run_on_ray_there_is_nothing_to_scale(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = job.parent / "results.jsonl"
    assert main(["workers", str(job), "3"]) == 2
    lock = OutputLock(output)
    lock.acquire()  # a run in one process
    try:
        assert main(["workers", str(job), "3"]) == 2
        assert "no run on Ray" in capsys.readouterr().err
    finally:
        lock.release()
    WantedWorkers(output, 2, print)  # what a run left that was killed
    assert main(["workers", str(job)]) == 2


@pytest.mark.parametrize("note", [*GARBAGE, b'{"run": {"pid": 1e400, "started": 1, "boot": "b"}}', b'{"run": 7}'])
def test_a_mangled_lock_names_no_run(job: Path, note: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    WantedWorkers(job.parent / "results.jsonl", 2, print)
    (job.parent / "results.jsonl.lock").write_bytes(note)
    assert main(["workers", str(job), "3"]) == 2
    assert "no run on Ray" in capsys.readouterr().err


@pytest.fixture
def said() -> list[str]:
    """What the run says."""
    return []


@pytest.fixture
def wanted(job: Path, said: list[str]) -> Iterator[WantedWorkers]:
    """Of a run on Ray with two workers, which is this process."""
    output = job.parent / "results.jsonl"
    lock = OutputLock(output)
    lock.acquire()
    yield WantedWorkers(output, 2, said.append)
    WantedWorkers.none(output)
    lock.release()


def test_a_running_job_sees_what_is_wanted_once(
    job: Path, wanted: WantedWorkers, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted.changed() is None
    assert main(["workers", str(job), "3"]) == 0
    assert (wanted.changed(), wanted.changed()) == (3, None)
    assert main(["workers", str(job), "3"]) == 0
    assert wanted.changed() is None
    capsys.readouterr()
    assert main(["workers", str(job)]) == 0 and capsys.readouterr().out == "3\n"
    for n in ("0", "-1", "10000"):
        assert main(["workers", str(job), n]) == 2
    assert wanted.changed() is None
    assert said == ["wanted workers: 3 (2 before)"]


@pytest.mark.parametrize("text", ["", "many", "0", "-3", "2.5", "99999", "٣", "\x00", "9" * 5000])
def test_what_is_no_count_changes_nothing_and_is_said_once(job: Path, text: str) -> None:
    said: list[str] = []
    wanted = WantedWorkers(job.parent / "results.jsonl", 2, said.append)
    path = job.parent / "results.jsonl.workers"
    other = path.with_name("other")
    other.write_text(text, encoding="utf-8")
    other.replace(path)
    assert [wanted.changed() for _ in range(3)] == [None, None, None]
    assert len(said) == 1 and "no number of workers" in said[0]
    path.unlink()
    assert wanted.changed() is None and len(said) == 1


def test_a_mangled_file_is_written_over(
    job: Path, wanted: WantedWorkers, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (job.parent / "results.jsonl.workers").write_text("many\n")
    assert wanted.changed() is None and len(said) == 1
    assert main(["workers", str(job)]) == 2 and "no number of workers" in capsys.readouterr().err
    assert main(["workers", str(job), "3"]) == 0
    assert wanted.changed() == 3
