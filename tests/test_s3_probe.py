"""Opening a store on servers that do and do not keep two writers apart: S3 and F7, and single-writer mode."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.config import CheckpointingConfig, StoreOptions, load_config
from recovery.errors import ConfigError, CredentialsRefused, OutcomeUnknown, StoreUnavailable
from recovery.ports import Listed, Put
from snapshot_inspect import cli
from storage_backends import open_store
from storage_backends.s3 import S3Store
from storage_backends.s3_probe import Guarantee, probe_conditional_create
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import Answer, FaultProxy, of, when
from storage_backends.testing.servers import BUCKET, Server
from tests.fake_engine import STOP
from tests.job_files import write_job
from vllm_hooks.opening import open_store_for

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

WITHOUT: dict[str, faults.Plan] = {
    "ignoring": faults.ignoring_conditions,
    "refusing": faults.refusing_conditions,
}


@pytest.fixture
def url(fresh_prefix: Callable[[], str]) -> str:
    return f"s3://{BUCKET}/{fresh_prefix()}"


def names(server: Server, url: str) -> list[str]:
    prefix = url.removeprefix(f"s3://{BUCKET}/")
    return [item["Key"] for item in server.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]


@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
def test_a_server_that_keeps_its_word_is_taken(request: pytest.FixtureRequest, url: str, kind: str) -> None:
    server: Server = request.getfixturevalue(kind)
    with FaultProxy(server.url) as proxy:
        store = open_store(url, create=True, endpoint_url=proxy.url)
        assert [seen.operation for seen in proxy.seen] == ["PutObject", "PutObject", "GetObject", "DeleteObject"]
        assert len({seen.path for seen in proxy.seen}) == 1
        open_store(url, create=True, endpoint_url=proxy.url)
        assert len({seen.path for seen in proxy.seen}) == 2, "each probe has a key of its own"
    assert names(server, url) == []
    assert isinstance(store, S3Store)


def test_f7_a_server_that_silently_overwrites_is_refused(proxy: FaultProxy, moto: Server, url: str) -> None:
    proxy.plan = faults.ignoring_conditions
    with pytest.raises(ConfigError, match=rf"{proxy.url} silently ignores .* Missing is atomic create") as caught:
        open_store(url, create=True, endpoint_url=proxy.url)
    assert caught.value.exit_code == 2 and "exclusive=True" in caught.value.hint
    assert names(moto, url) == []


def test_s3_a_server_that_does_not_know_conditions_is_refused(proxy: FaultProxy, moto: Server, url: str) -> None:
    proxy.plan = faults.refusing_conditions
    with pytest.raises(ConfigError, match=rf"{proxy.url} refuses conditional create .* 501 NotImplemented") as caught:
        open_store(url, create=True, endpoint_url=proxy.url)
    assert caught.value.exit_code == 2 and "exclusive=True" in caught.value.hint
    proxy.plan = when(of("PutObject"), Answer(400, "InvalidArgument", "unsupported header"))
    with pytest.raises(ConfigError, match="400 InvalidArgument"):
        open_store(url, create=True, endpoint_url=proxy.url)
    assert names(moto, url) == []


def test_a_server_that_says_412_and_overwrites_is_refused(proxy: FaultProxy, url: str) -> None:
    """What is said of the second create is not enough: the first one's bytes have to be there."""

    def plan(seen: faults.Seen) -> faults.Fault:
        over = faults.Instead(200, Answer(412, "PreconditionFailed"), without=("if-none-match",))
        return over if seen.operation == "PutObject" and proxy.count("PutObject") == 2 else faults.PASS_ON

    proxy.plan = plan
    store = S3Store(BUCKET, url.removeprefix(f"s3://{BUCKET}/"), endpoint_url=proxy.url)
    found = probe_conditional_create(store)
    assert found.guarantee is Guarantee.IGNORED and "lost the first" in found.answer


def test_a_probe_that_fails_leaves_nothing_and_says_what_it_met(proxy: FaultProxy, moto: Server, url: str) -> None:
    proxy.plan = when(of("GetObject"), Answer(403, "AccessDenied"))
    with pytest.raises(CredentialsRefused, match=r"GetObject of .*/probe/"):
        open_store(url, create=True, endpoint_url=proxy.url)
    proxy.plan = when(of("PutObject"), faults.PASS_ON, Answer(501, "NotImplemented"))
    with pytest.raises(ConfigError, match="501"):
        open_store(url, create=True, endpoint_url=proxy.url)
    assert names(moto, url) == []
    proxy.plan = when(of("DeleteObject"), Answer(403, "AccessDenied"))
    with pytest.raises(CredentialsRefused, match=r"DeleteObject") as caught:
        open_store(url, create=True, endpoint_url=proxy.url)
    assert "s3:DeleteObject" in caught.value.hint


def test_a_probe_survives_bad_weather(proxy: FaultProxy, moto: Server, url: str) -> None:
    """A lost answer to the first create makes its repetition see its own object: no reason to refuse the server."""
    proxy.plan = when(lambda seen: True, faults.DropAfter(), faults.DropBefore(), faults.SLOW_DOWN)
    open_store(url, create=True, endpoint_url=proxy.url)
    assert names(moto, url) == []


def test_a_server_that_is_not_there(url: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"cannot reach http://127\.0\.0\.1:9"):
        open_store(url, create=True, endpoint_url="http://127.0.0.1:9")


# ---- one writer, by explicit choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WITHOUT)
def test_f7_single_writer_mode_is_asked_for_by_name(proxy: FaultProxy, url: str, kind: str) -> None:
    proxy.plan = WITHOUT[kind]
    store = open_store(url, create=True, endpoint_url=proxy.url, exclusive=True)
    assert store.put_new("a", b"first") is Put.CREATED
    assert store.put_new("a", b"second") is Put.EXISTS
    assert store.get("a") == b"first"
    store.put("a", b"third")
    store.delete("a")
    assert store.put_new("a", b"fourth") is Put.CREATED
    assert store.list("") == [Listed("a", 6)]


def test_f7_single_writer_mode_reaches_a_job_and_is_told_at_its_start_and_by_latest(
    proxy: FaultProxy, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F7: in the job's config, by name. Without it the job is refused; with it the start and `latest` say so."""
    proxy.plan = faults.ignoring_conditions
    options = {"endpoint_url": proxy.url}
    open_it = functools.partial(open_store_for, must={}, recorded={}, stop=STOP, owner="me", exactness="token")
    with pytest.raises(ConfigError, match="Missing is atomic create"):
        open_it(CheckpointingConfig(enabled=True, store=url, store_options=StoreOptions(**options)))
    config = write_job(tmp_path, tmp_path, [], block={"store": url, "store_options": {**options, "exclusive": True}})
    with pytest.warns(UserWarning, match=rf"single-writer mode .* nothing keeps a second run away from {url}"):
        opened = open_it(load_config(config).rollout_checkpointing)
    assert opened.restored.published == 2
    assert cli.main(["latest", str(config)]) == 0
    assert "single-writer mode: nothing keeps a second run away" in capsys.readouterr().out
    assert cli.main(["latest", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["single_writer"] is True


def test_single_writer_mode_still_uses_what_the_server_has(proxy: FaultProxy, url: str) -> None:
    store = open_store(url, create=True, endpoint_url=proxy.url, exclusive=True)
    store.put_new("a", b"1")
    assert [seen.operation for seen in proxy.seen] == ["HeadObject", "PutObject"]
    assert proxy.seen[1].headers["if-none-match"] == "*"


def test_single_writer_mode_and_lost_answers(proxy: FaultProxy, url: str) -> None:
    store = open_store(url, endpoint_url=proxy.url, exclusive=True, retry_for_s=0.3)
    proxy.plan = lambda seen: faults.DropAfter() if seen.method == "PUT" else faults.PASS_ON
    with pytest.raises(OutcomeUnknown):
        store.put_new("a", b"nonce")
    proxy.plan = faults.refusing_conditions
    assert store.put_new("a", b"nonce") is Put.EXISTS
    proxy.plan = lambda seen: Answer(403, "AccessDenied")
    with pytest.raises(CredentialsRefused, match=r"HeadObject.*not found or no permission"):
        store.put_new("b", b"1")


@pytest.mark.parametrize("kind", WITHOUT)
def test_without_it_a_store_that_was_not_probed_never_overwrites_unasked(
    proxy: FaultProxy, url: str, kind: str
) -> None:
    """A worker opens without `create`: a server that refuses conditions is still an error there."""
    proxy.plan = WITHOUT[kind]
    store = open_store(url, endpoint_url=proxy.url)
    if kind == "refusing":
        with pytest.raises(StoreUnavailable, match="501 NotImplemented"):
            store.put_new("a", b"1")
    else:
        assert store.put_new("a", b"1") is Put.CREATED
