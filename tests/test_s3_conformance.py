"""S3Store on two real servers and both ways of addressing: the contract of every store."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest

from recovery.ports import Listed, ObjectStore, Put
from storage_backends.s3 import S3Store
from storage_backends.testing.conformance import StoreConformance, in_threads
from storage_backends.testing.servers import BUCKET, DOMAIN, KEY, REGION, SECRET, Server

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")


@cache
def connected(url: str, addressing: str) -> S3Store:
    """One store per server and way of addressing, so that its connections are made once."""
    return S3Store(BUCKET, endpoint_url=url, addressing=addressing, key=KEY, secret=SECRET, region=REGION)


class OnS3(StoreConformance):
    """Not collected itself: a subclass names the server, the way to address its buckets, and the folder of roots."""

    name: ClassVar[str]
    domain: ClassVar[str] = ""
    root: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _server(self, request: pytest.FixtureRequest, fresh_prefix: Callable[[], str]) -> None:
        server: Server = request.getfixturevalue(self.name)
        url = f"http://{self.domain}:{server.port}" if self.domain else server.url
        self.base = connected(url, "virtual" if self.domain else "path")
        self.raw = server.client
        self.fresh_prefix = fresh_prefix

    def make_store(self, folder: Path) -> S3Store:
        return self.base.under(self.root + self.fresh_prefix())

    def raw_put(self, store: ObjectStore, key: str, data: bytes) -> None:
        assert isinstance(store, S3Store)
        self.raw.put_object(Bucket=BUCKET, Key=f"{store.prefix}/{key}", Body=data)

    def raw_get(self, store: ObjectStore, key: str) -> bytes | None:
        assert isinstance(store, S3Store)
        try:
            data: bytes = self.raw.get_object(Bucket=BUCKET, Key=f"{store.prefix}/{key}")["Body"].read()
        except self.raw.exceptions.NoSuchKey:
            return None
        return data

    def raw_keys(self, store: ObjectStore) -> set[str]:
        assert isinstance(store, S3Store)
        prefix = f"{store.prefix}/"
        listed = self.raw.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
        return {item["Key"].removeprefix(prefix) for item in listed}

    def test_names_that_are_no_keys_are_passed_over(self, store: ObjectStore) -> None:
        """As the local store passes over what others put into its folder."""
        assert isinstance(store, S3Store)
        store.put_new("a", b"1")
        for name in ("A", "b c", "\u00e9", "snap-x (copy)", "UPPER/x"):
            self.raw.put_object(Bucket=BUCKET, Key=f"{store.prefix}/{name}", Body=b"")
        self.raw.put_object(Bucket=BUCKET, Key=f"{store.prefix}-neighbour/a", Body=b"")
        assert store.list("") == [Listed("a", 1)]

    def test_long_lists_come_in_pages(self, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = [f"{part}/{n:03d}.x" for part in ("a", "a-b", "a.b", "ab") for n in range(5)]
        for key in keys:
            self.raw_put(store, key, b"")
        for page in (1, 7, 20):
            monkeypatch.setattr("storage_backends.s3.PAGE_KEYS", page)
            assert [item.key for item in store.list("")] == sorted(keys)
            assert [item.key for item in store.list("a/", "a/001.x")] == keys[2:5]

    def test_folders_of_a_parent_of_many_stores(self, store: ObjectStore) -> None:
        assert isinstance(store, S3Store)
        assert store.folders() == []
        names = ["run-1", "run-10", "a b", "A+%2F", "\u00e9"]
        for name in names:
            store.under(f"{store.prefix}/{name}").put_new("format.json", b"{}")
        store.put_new("no-folder", b"")
        assert store.folders() == sorted(names)


class TestMotoByPath(OnS3):
    name = "moto"
    root = "a b+%2F\u00e9e\u0301#?&=:🙂/"  # N6, in every test of the contract


class TestMotoByHost(OnS3):
    """S11: the bucket's name is in the host's name."""

    name, domain = "moto", f"moto.{DOMAIN}"


class TestSeaweedfs(OnS3):
    name = "seaweedfs"

    def test_race_of_threads_has_one_winner(self, store: ObjectStore) -> None:
        """As in the contract, with four threads: this server backs off for seconds where sixteen want one key."""
        for number in range(8):
            key = f"race/{number:02d}"
            outcomes = in_threads(4, lambda i, key=key: store.put_new(key, b"%04d" % i * 1000))  # type: ignore[misc]
            assert outcomes.count(Put.CREATED) == 1
            assert store.get(key) == b"%04d" % outcomes.index(Put.CREATED) * 1000
