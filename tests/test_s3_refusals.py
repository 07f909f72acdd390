"""S3Store refused: permissions, credentials that run out, regions, clocks, buckets and servers that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    NoStore,
    NotFoundOrRefused,
    StoreFull,
    StoreUnavailable,
)
from recovery.ports import Put
from storage_backends import open_store
from storage_backends.s3 import S3Store
from storage_backends.s3_retry import UNREACHABLE_TRIES
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import Answer, FaultProxy, of, when
from storage_backends.testing.servers import KEY, SECRET, Server, claimed_ports
from storage_backends.testing.waits import Waits

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

VERBS: dict[str, Callable[[S3Store], Any]] = {
    "put_new": lambda store: store.put_new("a", b"1"),
    "put": lambda store: store.put("a", b"1"),
    "get": lambda store: store.get("a"),
    "list": lambda store: store.list("a"),
    "delete": lambda store: store.delete("a"),
}


@pytest.fixture
def store(proxy: FaultProxy, open_at: Callable[..., S3Store]) -> S3Store:
    return open_at(proxy.url)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "action"),
    [
        ("put_new", "s3:PutObject"),
        ("put", "s3:PutObject"),
        ("list", "s3:ListBucket"),
        ("delete", "s3:DeleteObject"),
    ],
)
def test_403_names_who_and_what(store: S3Store, proxy: FaultProxy, verb: str, action: str) -> None:
    proxy.plan = lambda seen: Answer(403, "AccessDenied", "Access Denied.")
    with pytest.raises(
        CredentialsRefused, match=rf"403 AccessDenied \(Access Denied\), for the access key {KEY} \(found by: env\)"
    ) as caught:
        VERBS[verb](store)
    assert caught.value.exit_code == 12 and action in caught.value.hint and SECRET not in str(caught.value)
    assert len(proxy.seen) == 1, "a refusal is not asked for twice"


def test_s6_without_list_permission_missing_and_forbidden_look_alike(store: S3Store, proxy: FaultProxy) -> None:
    store.put_new("a", b"1")
    proxy.plan = faults.unlisted
    assert store.get("a") == b"1", "what is known by its name can be read"
    with pytest.raises(NotFoundOrRefused, match="not found or no permission") as caught:
        store.get("b")
    assert "s3:ListBucket" in caught.value.hint and caught.value.exit_code == 12
    with pytest.raises(CredentialsRefused, match="ListObjectsV2"):
        store.list("")


def test_a_wrong_secret_is_told(seaweedfs: Server, open_at: Callable[..., S3Store]) -> None:
    store = open_at(seaweedfs.url, key=KEY, secret="wrong")
    with pytest.raises(CredentialsRefused, match=r"SignatureDoesNotMatch.*given as an option") as caught:
        store.put_new("a", b"1")
    assert "wrong" not in str(caught.value)
    with pytest.raises(CredentialsRefused, match=r"InvalidAccessKeyId.*out of date or unknown"):
        open_at(seaweedfs.url, key="nobody", secret="x").get("a")


def test_no_credentials_at_all(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CredentialsRefused, match="locate credentials") as caught:
        store.get("a")
    assert "AWS_PROFILE" in caught.value.hint


def test_a_profile_that_is_not_there(proxy: FaultProxy, open_at: Callable[..., S3Store]) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        open_at(proxy.url, profile="nowhere").get("a")


@pytest.mark.parametrize("verb", VERBS)
def test_a_bucket_that_is_not_there(moto: Server, verb: str) -> None:
    store = S3Store("no-such-bucket", "run", endpoint_url=moto.url)
    with pytest.raises(NoStore, match=rf"{moto.url} has no bucket no-such-bucket") as caught:
        VERBS[verb](store)
    assert caught.value.exit_code == 10
    with pytest.raises(NoStore):
        open_store("s3://no-such-bucket/run", create=True, endpoint_url=moto.url)


def test_an_endpoint_without_a_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where botocore only has a ValueError: wherever the endpoint comes from."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:18973")
    with pytest.raises(ConfigError, match=r"Invalid endpoint: 127\.0\.0\.1:18973") as caught:
        open_store("s3://bucket/run").get("a")
    assert "http://host:port" in caught.value.hint
    with pytest.raises(ConfigError, match="no server's address") as given:
        open_store("s3://bucket/run", endpoint_url="localhost:18973")
    assert "http://host:port" in given.value.hint


def test_https_asked_of_a_plain_server(moto: Server) -> None:
    with pytest.raises(ConfigError, match=r"WRONG_VERSION_NUMBER") as caught:
        open_store("s3://bucket/run", endpoint_url=moto.url.replace("http:", "https:")).get("a")
    assert "write its endpoint as http://host:port" in caught.value.hint


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_is_not_there(open_at: Callable[..., S3Store], waits: Waits, verb: str) -> None:
    with claimed_ports(1) as (port,):
        store = open_at(f"http://127.0.0.1:{port}")
        with pytest.raises(StoreUnavailable, match=f"cannot reach http://127.0.0.1:{port}") as caught:
            VERBS[verb](store)
    assert caught.value.exit_code == 20 and "AWS_ENDPOINT_URL" in caught.value.hint
    assert len(waits.pauses) == UNREACHABLE_TRIES - 1 and sum(waits.pauses) < 1


def test_a_host_that_is_not_there(open_at: Callable[..., S3Store]) -> None:
    with pytest.raises(StoreUnavailable, match=r"cannot reach http://s3\.example\.invalid"):
        open_at("http://s3.example.invalid").get("a")


@pytest.mark.parametrize(
    "answer", [Answer(507, "XMinioStorageFull"), Answer(403, "QuotaExceeded"), Answer(400, "EntityTooLarge")]
)
def test_no_room(store: S3Store, proxy: FaultProxy, answer: Answer) -> None:
    proxy.plan = lambda seen: answer
    with pytest.raises(StoreFull, match=answer.code):
        store.put_new("a", b"1")


def test_an_answer_that_nobody_knows(store: S3Store, proxy: FaultProxy) -> None:
    proxy.plan = lambda seen: Answer(418, "Teapot", "short and stout")
    with pytest.raises(StoreUnavailable, match=r"418 Teapot \(short and stout\)"):
        store.put_new("a", b"1")
    assert len(proxy.seen) == 1


# ---- credentials that run out ----------------------------------------------------------------------------------------


def _write_credentials(file: Path, token: str) -> None:
    file.write_text(f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\naws_session_token={token}\n")


@pytest.fixture
def from_file(s3_environment: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Credentials come from a file that something else keeps fresh."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    _write_credentials(s3_environment, "old")
    return s3_environment


def test_s7_credentials_that_expire_are_looked_up_anew(store: S3Store, proxy: FaultProxy, from_file: Path) -> None:
    proxy.plan = faults.expiring("old", after=3)
    for number in range(3):
        store.put_new(f"log/{number}", b"1")
    _write_credentials(from_file, "new")
    for number in range(3, 6):
        assert store.put_new(f"log/{number}", b"1") is Put.CREATED
    assert store.counters.renewals == 1 and store.counters.retries == 1
    assert [seen.headers["x-amz-security-token"] for seen in proxy.seen] == ["old"] * 4 + ["new"] * 3


def test_s7_credentials_that_nobody_renewed_are_told(store: S3Store, proxy: FaultProxy, from_file: Path) -> None:
    proxy.plan = faults.expiring("old", after=1)
    store.put_new("a", b"1")
    for _ in range(2):
        with pytest.raises(
            CredentialsRefused, match=r"400 ExpiredToken.*found by: shared-credentials-file.*out of date"
        ) as caught:
            store.get("a")
        assert "renew" in caught.value.hint
    _write_credentials(from_file, "new")
    assert store.get("a") == b"1", "a later call finds what was renewed meanwhile"


@pytest.mark.parametrize("unfinished", ["", "[default]\n", f"[default]\naws_access_key_id={KEY}\n", "[defau"])
def test_s7_a_file_that_was_read_while_it_was_written_is_read_again(
    store: S3Store, proxy: FaultProxy, from_file: Path, unfinished: str
) -> None:
    """S7: who renews credentials may truncate the file first; whoever reads it then finds none, or half of them."""
    proxy.plan = faults.expiring("old", after=1)
    store.put_new("a", b"1")
    from_file.write_text(unfinished)
    with pytest.raises(CredentialsRefused):
        store.get("a")
    _write_credentials(from_file, "new")
    assert store.get("a") == b"1"


def test_s7_given_credentials_cannot_be_renewed(proxy: FaultProxy, open_at: Callable[..., S3Store]) -> None:
    store = open_at(proxy.url, key=KEY, secret=SECRET, token="old")
    proxy.plan = faults.expiring("old", after=0)
    with pytest.raises(CredentialsRefused, match="given as an option"):
        store.get("a")
    assert len(proxy.seen) == 1


# ---- regions and clocks ----------------------------------------------------------------------------------------------

ELSEWHERE = Answer(301, "PermanentRedirect", "use the right endpoint", {"x-amz-bucket-region": "eu-west-1"})


@pytest.mark.parametrize("verb", VERBS)
def test_s8_another_region_is_followed(store: S3Store, proxy: FaultProxy, verb: str) -> None:
    def plan(seen: faults.Seen) -> faults.Fault:
        return faults.PASS_ON if "/eu-west-1/s3/" in seen.headers["authorization"] else ELSEWHERE

    store.put("a", b"1") if verb == "get" else None
    proxy.plan = plan
    VERBS[verb](store)
    assert sum(plan(seen) == ELSEWHERE for seen in proxy.seen) == (1 if verb != "get" else 2)


def test_s8_another_region_is_named_where_following_does_not_help(store: S3Store, proxy: FaultProxy) -> None:
    proxy.plan = lambda seen: ELSEWHERE
    with pytest.raises(
        ConfigError, match="the bucket is in eu-west-1, the request was made for region us-east-1"
    ) as caught:
        store.get("a")
    assert caught.value.exit_code == 2 and caught.value.hint == "set AWS_REGION=eu-west-1"
    proxy.plan = lambda seen: Answer(301, "PermanentRedirect")
    with pytest.raises(ConfigError, match="a redirect that names no region") as caught:
        store.get("a")
    assert "get-bucket-location --bucket bucket" in caught.value.hint


@pytest.mark.parametrize(("ahead_s", "words"), [(3600, "3600 s ahead of"), (-7200, "7200 s behind")])
def test_s10_a_wrong_clock_is_told_with_its_offset(
    store: S3Store, proxy: FaultProxy, ahead_s: float, words: str
) -> None:
    proxy.plan = lambda seen: faults.skewed(ahead_s)
    with pytest.raises(
        StoreUnavailable, match=f"RequestTimeTooSkewed.*this machine's clock is {words} the server's"
    ) as caught:
        store.put_new("a", b"1")
    assert "clock" in caught.value.hint
    assert len(proxy.seen) == 2, "once more, signed anew"


def test_s10_a_request_that_took_too_long_is_signed_anew(store: S3Store, proxy: FaultProxy) -> None:
    proxy.plan = when(of("PutObject"), faults.skewed(1000))
    assert store.put_new("a", b"1") is Put.CREATED
    proxy.plan = when(of("GetObject"), Answer(403, "RequestTimeTooSkewed"), Answer(403, "RequestTimeTooSkewed"))
    with pytest.raises(StoreUnavailable, match="clock"):
        store.get("a")
