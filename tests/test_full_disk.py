"""F1 on a real small disk: while it is full a job decodes on and says what waits; with room again all is saved.

A tmpfs of some MiB where mounting is permitted; the second arm, and the only one elsewhere, is a system whose writes to
that folder fail.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.waiting import notice
from tests.conftest import OnLoop
from tests.engine_runs import read_back, standing, until
from tests.job_files import lines, rows_of, write_job
from tests.job_here import job
from tests.small_disk import SmallDisk, small_disk


class FailingDisk(SmallDisk):
    """The same, by writes that fail."""

    full = False

    def fill(self) -> None:
        self.full = True

    def free(self) -> None:
        self.full = False

    def fail(self, patch: pytest.MonkeyPatch) -> None:
        write = os.write
        root = os.path.realpath(self.folder)

        def failing(fd: int, data: Any) -> int:
            if self.full and os.readlink(f"/proc/self/fd/{fd}").startswith(root):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data)

        patch.setattr(os, "write", failing)


@pytest.fixture(params=["tmpfs", "failing writes"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    folder = tmp_path / "small"
    folder.mkdir()
    if request.param == "tmpfs":
        with small_disk(folder, megabytes=3) as mounted:
            if mounted is not None:
                yield mounted
                return
    failing = FailingDisk(folder)
    failing.fail(monkeypatch)
    yield failing


def test_f1_a_full_disk_under_the_store(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path, disk: SmallDisk
) -> None:
    """F1: decoding goes on, the last snapshot is intact, both troubles are counted and told with what to do; when there
    is room the next snapshot succeeds and every row is written, without a restart."""
    rows = lines(4, least=400, step=20)
    total = sum(row["sampling"]["max_tokens"] for row in rows)
    store = disk.folder / "store"
    config = write_job(tmp_path, tiny_model, rows, block={"store": str(store), "snapshot_interval_s": 0.2})

    async def scenario() -> None:
        async with job(engine, config) as (dispatch, session):
            work = asyncio.ensure_future(dispatch.run(await dispatch.matched(), asyncio.Event()))
            await until(lambda: session.counters.snapshots >= 1 and session.counters.tokens_captured > 60)
            disk.fill()
            captured = session.counters.tokens_captured
            await until(lambda: session.counters.tokens_captured > captured)
            async with standing(engine):
                await until(lambda: {trouble.kind for trouble in session.troubles} == {"tokens", "snapshots"})
                stands = session.counters.last_snapshot
                captured = session.counters.tokens_captured
            await until(lambda: session.counters.tokens_captured == total)
            await until(lambda: session.counters.snapshots_abandoned >= 2)
            assert captured < total and not work.done()
            assert session.counters.last_snapshot == stands == read_back(store).snapshot
            (tokens, snapshots) = session.troubles
            assert tokens.waiting > 0 and snapshots.tries >= 2
            said = notice(tokens, 0), notice(snapshots, 0)
            assert all("no space is left" in line and "-> free space on that disk" in line for line in said)
            assert f"snapshot {stands} stands" in said[1]
            disk.free()
            await work
            session.want_snapshot()
            await until(lambda: session.counters.last_snapshot != stands and session.troubles == [])
            assert session.counters.tokens_captured == total, "nothing was generated twice"

    on_loop(scenario())
    assert len(rows_of(tmp_path)) == 4 and read_back(store).snapshot is not None


def test_f1_a_full_disk_under_the_output(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path, disk: SmallDisk
) -> None:
    """F1: finished rows wait and are told; snapshots are taken all the while; then each row is there once."""
    rows = lines(4, least=400, step=20)
    total = sum(row["sampling"]["max_tokens"] for row in rows)
    output = disk.folder / "results.jsonl"
    config = write_job(tmp_path, tiny_model, rows, output=str(output), block={"snapshot_interval_s": 0.2})

    async def scenario() -> None:
        async with job(engine, config) as (dispatch, session):
            disk.fill()
            work = asyncio.ensure_future(dispatch.run(await dispatch.matched(), asyncio.Event()))
            await until(lambda: dispatch.trouble is not None and dispatch.trouble.tries >= 2)
            await until(lambda: session.counters.tokens_captured == total)
            published = session.counters.snapshots
            session.want_snapshot()
            await until(lambda: session.counters.snapshots > published)
            trouble = dispatch.trouble
            assert trouble is not None and trouble.waiting > 0 and not work.done()
            line = notice(trouble, 0)
            assert f"cannot append to {output}: No space left on device" in line
            assert line.endswith(f"-> make room or mend the disk under {disk.folder}")
            assert session.troubles == []
            disk.free()
            await work
            assert dispatch.trouble is None and dispatch.outcome.undelivered == 0

    on_loop(scenario())
    found = rows_of(disk.folder)
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows)
    assert sum(len(row["token_ids"]) for row in found) == total
