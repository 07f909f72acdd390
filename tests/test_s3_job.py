"""A whole job with its store in a bucket: killed and continued, and while the server or the credentials are gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.waiting import notice
from recovery.errors import CredentialsRefused, StoreUnavailable
from snapshot_inspect import cli
from storage_backends.s3 import S3Store
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import FaultProxy
from storage_backends.testing.servers import BUCKET, KEY, SECRET, Server, claimed_ports
from tests.conftest import OnLoop
from tests.engine_runs import standing, until
from tests.job_files import assert_whole, lines, rows_of, write_job
from tests.job_here import job, reference_rows
from tests.job_processes import kill_at_rest, run, running, something

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

QUICK = {"connect_timeout_s": 2, "read_timeout_s": 4, "retry_for_s": 0.3}


@pytest.fixture
def url(fresh_prefix: Callable[[], str]) -> str:
    return f"s3://{BUCKET}/{fresh_prefix()}"


def test_w2_a_job_in_a_bucket_is_killed_and_continued(
    seaweedfs: Server,
    url: str,
    tiny_model: Path,
    tmp_path: Path,
    rng: random.Random,
    engine: Any,
    on_loop: OnLoop[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """W2, with `store: s3://…` on SeaweedFS: SIGKILL of the process group, then the same command: each row once."""
    rows = lines(8, least=400, step=20)
    total = sum(row["sampling"]["max_tokens"] for row in rows)
    block = {"store": url, "store_options": {"endpoint_url": seaweedfs.url}}
    config = write_job(tmp_path, tiny_model, rows, block=block)
    with running(config, "killed") as killed:
        killed.after(rng.randint(total // 8, total // 3))
        saved = kill_at_rest(killed, something, "tokens in the bucket", url, endpoint_url=seaweedfs.url)
    last = run(config, "last")
    assert last.wait() == 0, last.text
    assert "continuing from snapshot" in last.text
    counts = last.counts()
    assert counts is not None
    # Not less than there was; a write that was on its way when the process was killed may have come after it.
    assert all(counts[0][k] >= saved.tokens.get(f"{row['id']}#0", 0) for k, row in enumerate(rows))
    assert counts[0].sum() >= sum(saved.tokens.values()) > 0
    assert_whole(rows_of(tmp_path), on_loop(reference_rows(engine, rows)))
    assert cli.main(["verify", str(config), "--read-data"]) == 0, capsys.readouterr().out


def test_s1_a_server_that_goes_away_and_comes_back(
    moto: Server, url: str, tiny_model: Path, tmp_path: Path, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """Decoding goes on, what waits is counted and told; when the server is back all is saved, without a restart."""
    rows = lines(4, least=600, step=20)
    total = sum(row["sampling"]["max_tokens"] for row in rows)

    async def scenario(port: int) -> None:
        proxy = FaultProxy(moto.url, port=port)
        options = {"endpoint_url": proxy.url, **QUICK}
        config = write_job(
            tmp_path, tiny_model, rows, block={"store": url, "store_options": options, "snapshot_interval_s": 0.2}
        )
        async with job(engine, config) as (dispatch, session):
            work = asyncio.ensure_future(dispatch.run(await dispatch.matched(), asyncio.Event()))
            await until(lambda: session.counters.tokens_captured > 40)
            await asyncio.to_thread(proxy.close)
            captured = session.counters.tokens_captured
            await until(lambda: session.counters.tokens_captured > captured)
            async with standing(engine):
                await until(lambda: {trouble.kind for trouble in session.troubles} == {"tokens", "snapshots"})
                captured = session.counters.tokens_captured
            stands = session.counters.last_snapshot
            await until(lambda: session.counters.tokens_captured == total)
            assert captured < total and not work.done() and rows_of(tmp_path) == []
            for trouble in session.troubles:
                assert isinstance(trouble.error, StoreUnavailable), trouble
                line = notice(trouble, 0)
                assert proxy.url in line and "decoding goes on" in line and "-> check that the server runs" in line
            with FaultProxy(moto.url, port=port):
                await work
                session.want_snapshot()
                await until(lambda: session.counters.last_snapshot != stands and session.troubles == [])
                await session.stop()
            assert session.counters.tokens_captured == total

    with claimed_ports(1) as (port,):
        on_loop(scenario(port))
    assert_whole(rows_of(tmp_path), on_loop(reference_rows(engine, rows)))


def test_s7_credentials_that_expire_during_a_job(
    moto: Server,
    url: str,
    tiny_model: Path,
    tmp_path: Path,
    engine: Any,
    on_loop: OnLoop[Any],
    s3_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S7: renewed once where something keeps them fresh, and the job does not even notice. Where nothing did, it is
    told whose they are and what to renew, live rollouts go on, and it is over when somebody renewed them."""
    rows = lines(4, least=600, step=20)
    total = sum(row["sampling"]["max_tokens"] for row in rows)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    def renew(token: str) -> None:
        account = f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\naws_session_token={token}\n"
        new = s3_environment.with_suffix(".new")
        new.write_text(account)
        new.replace(s3_environment)  # half-written files: test_s3_refusals.py

    def token_of(seen: faults.Seen) -> str:
        return seen.headers.get("x-amz-security-token", "")

    gone: set[str] = set()
    expired = faults.Answer(400, "ExpiredToken", "The provided token has expired.")
    renew("first")

    async def scenario(proxy: FaultProxy) -> None:
        proxy.plan = lambda seen: expired if token_of(seen) in gone else faults.PASS_ON
        options = {"endpoint_url": proxy.url, **QUICK}
        config = write_job(
            tmp_path, tiny_model, rows, block={"store": url, "store_options": options, "snapshot_interval_s": 0.2}
        )
        async with job(engine, config) as (dispatch, session):
            store = session.opened.store
            assert isinstance(store, S3Store)
            work = asyncio.ensure_future(dispatch.run(await dispatch.matched(), asyncio.Event()))
            await until(lambda: session.counters.tokens_captured > 40)
            renew("second")
            gone.add("first")
            await until(lambda: store.counters.renewals == 1)
            assert session.troubles == []
            gone.add("second")
            captured = session.counters.tokens_captured
            await until(lambda: session.counters.tokens_captured > captured)
            async with standing(engine):
                await until(lambda: {trouble.kind for trouble in session.troubles} == {"tokens", "snapshots"})
            await until(lambda: session.counters.tokens_captured == total)
            assert not work.done()
            for trouble in session.troubles:
                assert isinstance(trouble.error, CredentialsRefused) and trouble.error.exit_code == 12
                line = notice(trouble, 0)
                assert "ExpiredToken" in line and f"the access key {KEY}" in line and "-> renew the credentials" in line
            renew("third")
            await work
            await until(lambda: not session.troubles)

    with FaultProxy(moto.url) as proxy:
        on_loop(scenario(proxy))
    assert_whole(rows_of(tmp_path), on_loop(reference_rows(engine, rows)))
