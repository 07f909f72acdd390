"""Addresses and options of stores on S3: what is taken literally, what is refused, what wins over what."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import fsspec.config
import pytest

from recovery.errors import ConfigError
from recovery.ports import Listed, Put
from storage_backends import open_store
from storage_backends.s3 import S3Store
from storage_backends.s3_options import PREFIX_BYTES_MAX, S3Options, check_options, filesystem_arguments, parse_address
from storage_backends.testing import writers
from storage_backends.testing.servers import BUCKET, KEY, SECRET, Server

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

ODD = [
    "a b", "a+b", "a%2Fb", "a%", "a#b", "a:b", "a?b=c&d", "a=b", "🙂", "\u00e9", "e\u0301", "~", "*", "a;b@c,d",
    "(x)", "'\"", "x" * 255, "..a", "s3:", "run/17/a b", " ",
]  # fmt: skip


# ---- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://b-1/run-17", "b-1", "run-17"),
        ("s3://b-1/run-17/", "b-1", "run-17"),
        ("s3://b-1/a/b/c", "b-1", "a/b/c"),
        ("s3://b-1", "b-1", ""),
        ("s3://b-1/", "b-1", ""),
        ("S3://Legacy_Bucket.x/a", "Legacy_Bucket.x", "a"),
        *((f"s3://b-1/{name}", "b-1", name) for name in ODD),
    ],
)
def test_n6_addresses_are_taken_literally(url: str, bucket: str, prefix: str) -> None:
    assert parse_address(url) == (bucket, prefix)
    assert S3Store(bucket, prefix).url == f"s3://{bucket}/{prefix}".rstrip("/")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "name is missing"),
        ("s3:///a", "name is missing"),
        ("s3://a b/c", "no name of a bucket"),
        ("s3://é/c", "no name of a bucket"),
        ("s3://..", "no name of a bucket"),
        ("s3://key:secret@bucket/a", "no name of a bucket"),
        ("s3://arn:aws:s3:us-east-1:1:accesspoint/a", "not its ARN"),
        ("s3://fast--use1-az4--x-s3/a", "directory bucket"),
        ("s3://bucket//a", "cannot be a store's prefix"),
        ("s3://bucket/a//b", "cannot be a store's prefix"),
        ("s3://bucket/a/../b", "cannot be a store's prefix"),
        ("s3://bucket/.", "cannot be a store's prefix"),
        ("s3://bucket/a\nb", "control character"),
        ("s3://bucket/a\\b", "backslash"),
        ("s3://bucket/\udc80", "not text"),
        ("s3://bucket/" + "x" * (PREFIX_BYTES_MAX + 1), "too long"),
        ("s3://bucket/" + "é" * (PREFIX_BYTES_MAX // 2 + 1), "too long"),
    ],
)
def test_what_is_no_address_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_store(url)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
def test_n6_odd_roots_are_kept_apart(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server: Server = request.getfixturevalue(kind)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    base = open_store(f"s3://{BUCKET}/odd", create=True)
    assert isinstance(base, S3Store)
    for name in ODD:
        store = base.under(f"odd/{name}")
        assert store.put_new("log/1.json", name.encode()) is Put.CREATED, name
        assert store.put_new("log/1.json", b"") is Put.EXISTS
    for name in ODD:
        store = base.under(f"odd/{name}")
        assert store.get("log/1.json") == name.encode()
        assert store.list("") == [Listed("log/1.json", len(name.encode()))]
        raw = server.client.get_object(Bucket=BUCKET, Key=f"{store.prefix}/log/1.json")["Body"].read()
        assert raw == name.encode(), "other programs find it under the same name"


def test_a_bucket_can_be_a_root(moto: Server) -> None:
    moto.make_bucket("whole")
    store = open_store("s3://whole", create=True, endpoint_url=moto.url)
    assert store.put_new("a", b"1") is Put.CREATED
    assert store.list("") == [Listed("a", 1)]
    assert repr(store) == "S3Store('s3://whole')"


def test_a_key_that_is_too_long_below_its_prefix(moto: Server) -> None:
    store = S3Store(BUCKET, "p" * 700, endpoint_url=moto.url)
    store.put_new("k/" * 150 + "k", b"1")
    with pytest.raises(ConfigError, match="longer than 1024 bytes"):
        store.put_new("k/" * 200 + "k", b"1")


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "http://x"}, "no option 'endpoint'.*did you mean endpoint_url"),
        ({"zzz": 1}, "no option 'zzz'.*there are: endpoint_url"),
        ({"endpoint_url": "127.0.0.1:9000"}, "no server's address"),
        ({"endpoint_url": "http://"}, "no server's address"),
        ({"endpoint_url": "http://key:secret@host"}, "no server's address"),
        ({"endpoint_url": "http://host:x"}, "no server's address"),
        ({"endpoint_url": "http://host?a=b"}, "no server's address"),
        ({"addressing": "dns"}, "addressing: found 'dns'"),
        ({"key": "a"}, "some of them are missing"),
        ({"token": "a"}, "some of them are missing"),
        ({"read_timeout_s": 0}, "read_timeout_s: found 0"),
        ({"exclusive": "yes"}, "exclusive: found 'yes'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store("s3://bucket/a", **options)


@pytest.mark.parametrize("url", ["memory://x", "file:///nowhere", "/nowhere"])
def test_other_stores_have_no_options(url: str) -> None:
    with pytest.raises(ConfigError, match="there is no option 'region'"):
        open_store(url, region="x")


def test_no_secret_is_shown() -> None:
    options = S3Options(key="AKIAEXAMPLE", secret="hush", token="hush")
    assert "hush" not in repr(options) and "hush" not in repr(S3Store("bucket", key="k", secret="hush"))


def test_defaults_never_repeat_or_remember() -> None:
    made = filesystem_arguments(S3Options(region="r"), {})
    assert made["use_listings_cache"] is False and made["skip_instance_cache"] is True
    config = made["config_kwargs"]
    assert config["retries"]["total_max_attempts"] == 1 and config["max_pool_connections"] == 64
    assert (config["connect_timeout"], config["read_timeout"]) == (5.0, 20.0)
    assert "s3" not in config and "endpoint_url" not in made and "key" not in made


def test_what_wins_over_what(monkeypatch: pytest.MonkeyPatch) -> None:
    configured = {
        "endpoint_url": "http://fsspec",
        "key": "fk",
        "secret": "fs",
        "token": "ft",
        "client_kwargs": {"region_name": "fr", "verify": False},
        "config_kwargs": {"s3": {"addressing_style": "virtual", "payload_signing_enabled": True}, "read_timeout": 1},
        "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
    }
    plain = filesystem_arguments(S3Options(), configured)
    assert (plain["endpoint_url"], plain["key"], plain["token"]) == ("http://fsspec", "fk", "ft")
    assert plain["client_kwargs"] == {"region_name": "fr", "verify": False}
    assert plain["config_kwargs"]["s3"] == {"addressing_style": "virtual", "payload_signing_enabled": True}
    assert plain["s3_additional_kwargs"] == {"ServerSideEncryption": "AES256"}
    given = S3Options(endpoint_url="http://given", region="gr", addressing="path", key="gk", secret="gs")
    made = filesystem_arguments(given, configured)
    assert (made["endpoint_url"], made["key"], made["secret"], made["token"]) == ("http://given", "gk", "gs", None)
    assert made["client_kwargs"]["region_name"] == "gr"
    assert made["config_kwargs"]["s3"] == {"addressing_style": "path", "payload_signing_enabled": True}
    assert configured["client_kwargs"] == {"region_name": "fr", "verify": False}, "what was given is not changed"
    monkeypatch.setenv("AWS_REGION", "er")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "dr")
    assert filesystem_arguments(S3Options(), {})["client_kwargs"]["region_name"] == "er"
    monkeypatch.delenv("AWS_REGION")
    assert filesystem_arguments(S3Options(), {})["client_kwargs"]["region_name"] == "dr"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert "region_name" not in filesystem_arguments(S3Options(), {})["client_kwargs"]


def test_awss_and_fsspecs_variables_are_used(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto.url)
    store = S3Store(BUCKET, "environment")
    assert store.endpoint == moto.url
    assert store.put_new("a", b"1") is Put.CREATED and store.endpoint == moto.url
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": moto.url, "key": KEY, "secret": SECRET})
    assert S3Store(BUCKET, "environment").get("a") == b"1"


def test_options_reach_the_store_by_open_store(moto: Server) -> None:
    given: dict[str, Any] = {
        "endpoint_url": moto.url,
        "region": "eu-west-1",
        "addressing": "path",
        "max_connections": 3,
    }
    store = open_store(f"s3://{BUCKET}/given", **given)
    assert isinstance(store, S3Store) and store.options == check_options(given)


def test_nothing_is_sent_before_the_first_verb() -> None:
    store = open_store(f"s3://{BUCKET}/a", endpoint_url="http://127.0.0.1:9")
    assert repr(store) == "S3Store('s3://bucket/a')"


def test_without_the_extra_the_hint_says_how_to_install_it() -> None:
    script = """
import sys
sys.modules["s3fs"] = None
from recovery.errors import ConfigError
from storage_backends import open_store
try:
    open_store("s3://bucket/a")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=writers.environment(), capture_output=True, text=True, check=True
    )
    assert "needs s3fs, which is not installed" in done.stdout and "prefix-recovery[s3]" in done.stdout
