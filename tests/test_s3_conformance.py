"""S3Store on two real servers and both ways of addressing: the contract of every store."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from recovery.ports import ObjectStore, Put
from storage_backends.s3 import S3Store
from storage_backends.testing.conformance import StoreConformance, _put_own, in_threads
from storage_backends.testing.s3_fixtures import BUCKET
from storage_backends.testing.servers import DOMAIN, KEY, REGION, SECRET, Server

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")


@cache
def base(port: int, **options: Any) -> S3Store:
    """One store per server and way of addressing, so that its connections are made once."""
    return S3Store(BUCKET, key=KEY, secret=SECRET, region=REGION, **options)


class OnS3(StoreConformance):
    """Not collected itself: a subclass names the server and the way."""

    name: ClassVar[str]
    addressing: ClassVar[str]
    root: ClassVar[str] = ""

    @pytest.fixture(autouse=True)
    def _server(self, request: pytest.FixtureRequest, fresh_prefix: Callable[[], str]) -> None:
        server: Server = request.getfixturevalue(self.name)
        host = "127.0.0.1" if self.addressing == "path" else f"{self.name}.{DOMAIN}" if self.name == "moto" else DOMAIN
        url = f"http://{host}:{server.port}"
        self.base = base(server.port, endpoint_url=url, addressing=self.addressing)
        self.raw = server.client()
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


class TestMotoByPath(OnS3):
    name, addressing = "moto", "path"
    root = "a b+%2F\u00e9e\u0301#?&=:🙂/"  # N6, in every test of the contract


class TestMotoByHost(OnS3):
    name, addressing = "moto", "virtual"


class TestSeaweedfsByPath(OnS3):
    name, addressing = "seaweedfs", "path"

class TestSeaweedfsByHost(OnS3):
    name, addressing = "seaweedfs", "virtual"
