"""prefix_recovery.waiting and row_writer: what waits is told, and not too often, and rows outlast a full disk."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from prefix_recovery import job, row_writer, waiting
from prefix_recovery.progress import Progress
from prefix_recovery.row_writer import RowWriter
from prefix_recovery.waiting import FIRST_PAUSE_S, LONGEST_PAUSE_S, Notices
from recovery.compactor import CompactionCounters
from recovery.coordinator import Attempt
from recovery.errors import CredentialsRefused, Fenced, RecoveryError, SnapshotAbandoned, StoreFull, StoreUnavailable
from recovery.protocol import Verdict
from recovery.staging import StagingCounters
from vllm_hooks.trouble import Kind, RecentAttempts, Trouble, troubles_of

FULL = StoreFull("cannot create /st/seg/x: no space is left", hint="free space on that disk")


def full(kind: Kind = "tokens", tries: int = 1, waiting: int = 12, stands: int | None = None) -> Trouble:
    return Trouble(kind, tries, FULL, waiting, stands)


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_long_trouble_is_told_at_once_then_ever_more_rarely_and_when_it_is_over() -> None:
    notices = Notices()
    said = [second for second in range(600) if notices.lines(second, [full(tries=second + 1)])]
    assert said[:5] == [0, 5, 15, 35, 75]
    pauses = [after - before for before, after in itertools.pairwise(said)]
    assert pauses == sorted(pauses) and pauses[0] == FIRST_PAUSE_S and pauses[-1] == LONGEST_PAUSE_S
    assert len(said) < 15, "not a line a second"
    assert notices.lines(600, []) == [
        "captured tokens are stored again, after 600 s and 600 failed tries; nothing was lost"
    ]
    assert notices.lines(601, []) == []
    assert notices.lines(602, [full()]) != [], "a new trouble is told at once"


def test_another_error_is_told_at_once_and_each_kind_for_itself() -> None:
    notices = Notices()
    assert len(notices.lines(0, [full("tokens"), full("rows")])) == 2
    assert notices.lines(1, [full("tokens"), full("rows")]) == []
    refused = Trouble("tokens", 5, CredentialsRefused("PutObject of s3://b/x: 403", hint="allow s3:PutObject"), 12)
    (line,) = notices.lines(2, [refused, full("rows")])
    assert line.startswith("captured tokens cannot be stored (for 2 s, 5 failed tries): PutObject of s3://b/x: 403. ")
    (line,) = notices.lines(3, [refused])
    assert line == "the finished rows were appended, after 3 s and 1 failed try; nothing was lost"


# ---- in which words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (full("tokens"), ["captured tokens cannot be stored", "12 records wait in memory", "every second"]),
        (full("tokens", waiting=1), ["1 record waits in memory, and the rows of calls that end now"]),
        (full("rows", waiting=3), ["finished rows cannot be appended", "3 finished rows wait in memory"]),
        (full("snapshots", stands=7), ["no snapshot can be published", "snapshot 7 stands"]),
        (full("snapshots"), ["the one of the restore stands", "again with the next one"]),
        (full("compaction"), ["old segments cannot be joined", "Nothing depends on it but the number of objects"]),
        (full("garbage"), ["garbage in the store cannot be deleted", "Nothing depends on it but room"]),
    ],
)
def test_a_line_says_what_waits_what_goes_on_and_what_to_do(trouble: Trouble, words: list[str]) -> None:
    line = waiting.notice(trouble, 0)
    assert all(word in line for word in words), line
    assert "cannot create /st/seg/x: no space is left" in line and line.endswith("-> free space on that disk")
    assert trouble.kind in ("garbage", "compaction") or "decoding goes on" in line


def test_troubles_stand_until_the_same_thing_succeeds() -> None:
    staging, recent, compaction = StagingCounters(), RecentAttempts(), CompactionCounters()
    assert list(troubles_of(staging, recent, compaction)) == []
    staging.error, staging.failures_in_a_row, staging.backlog_records = FULL, 2, 5
    late = SnapshotAbandoned("a step did not finish")
    for error in (FULL, late):
        recent.note(Attempt("interval", Verdict.ABANDONED, error=error))
    assert list(troubles_of(staging, recent, compaction)) == [
        Trouble("tokens", 2, FULL, 5),
        Trouble("snapshots", 2, late),
    ]
    recent.note(Attempt("interval", Verdict.PUBLISHED, snapshot=9, error=FULL, step="collect garbage"))
    staging.error = None
    assert list(troubles_of(staging, recent, compaction)) == [Trouble("garbage", 1, FULL, stands=9)]
    recent.note(Attempt("interval", Verdict.PUBLISHED, snapshot=10))
    compaction.failures_in_a_row, compaction.error = 2, FULL
    assert list(troubles_of(staging, recent, compaction)) == [Trouble("compaction", 2, FULL, stands=10)]
    compaction.error = None
    assert list(troubles_of(staging, recent, compaction)) == []


# ---- rows ------------------------------------------------------------------------------------------------------------


class Output:
    """Fails as planned, then takes rows."""

    def __init__(self, *errors: RecoveryError) -> None:
        self.errors = list(errors)
        self.rows: list[Any] = []
        self.told = 0

    def append(self, rows: Sequence[Any]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.rows += rows

    def appended(self, n_rows: int) -> None:
        self.told += n_rows


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_writer, "PAUSE_S", 0.001)
    monkeypatch.setattr(row_writer, "LONGEST_PAUSE_S", 0.002)


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number} for number in numbers]


def test_f1_rows_outlast_a_full_disk_a_server_that_is_gone_and_credentials_that_ran_out() -> None:
    """F1, S7: tried again until it works, whole and in order; meanwhile it says why they wait."""
    output = Output(FULL, StoreUnavailable("no answer"), CredentialsRefused("expired"))
    seen: list[tuple[int, str, int]] = []

    async def scenario() -> None:
        writer = RowWriter(output.append, output.appended)
        for row in rows(1, 2):
            writer.put(row)
        task = asyncio.create_task(writer.run())
        while not output.rows:
            if writer.trouble is not None:
                seen.append((writer.trouble.tries, writer.trouble.error.message, writer.trouble.waiting))
            await asyncio.sleep(0)
        writer.put(rows(3)[0])
        writer.put_last()
        await task
        assert writer.trouble is None and writer.n_waiting == 0
        writer.close()

    asyncio.run(scenario())
    assert output.rows == rows(1, 2, 3) and output.told == 3
    assert [item[0] for item in seen] == sorted(item[0] for item in seen) and {item[2] for item in seen} == {2}


def test_c8_being_fenced_ends_the_rows() -> None:
    output = Output(Fenced("another run took over"))

    async def scenario() -> None:
        writer = RowWriter(output.append, output.appended)
        writer.put(rows(1)[0])
        with pytest.raises(Fenced):
            await asyncio.wait_for(writer.run(), 30)
        assert writer.n_waiting == 1
        writer.close()

    asyncio.run(scenario())
    assert output.rows == []


def test_a_run_says_what_waits_in_its_store_and_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ticker of `prefix-recovery run`, with what a session and a dispatch tell."""
    monkeypatch.setattr(job, "TICK_S", 0.001)
    session, dispatch = SimpleNamespace(troubles=[full("snapshots", stands=7)]), SimpleNamespace(trouble=full("rows"))
    said = ""

    async def scenario() -> None:
        nonlocal said
        ticker = asyncio.create_task(job._tick(Progress(3, 0, lambda: 0), session, dispatch))  # type: ignore[arg-type]
        for _ in range(100_000):
            said += capsys.readouterr().err
            if said.count("-> free space") == 2:
                session.troubles, dispatch.trouble = [], None
            if said.count("nothing was lost") == 2:
                break
            await asyncio.sleep(0.002)
        ticker.cancel()

    asyncio.run(scenario())
    assert "no snapshot can be published" in said and "12 finished rows wait in memory" in said
    assert "snapshots are published again" in said and "the finished rows were appended" in said
