"""The two places as tests of the whole core see them: a folder on disk, and a prefix in a bucket. A pytest plugin.

Owns: opening a store there, and reaching its files or objects behind the store's back, under any name.
Does not know: what is tested.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recovery.ports import ObjectStore
from storage_backends import open_store
from storage_backends.s3 import S3Store
from storage_backends.testing.servers import BUCKET, KEY, REGION, SECRET, Server


@dataclass
class Place:
    """`root` is the folder or the prefix; `bucket` is a store of the whole bucket, `client` another way to it."""

    root: str
    bucket: S3Store | None = None
    client: Any = None

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.root}" if self.bucket else self.root

    def open(self) -> ObjectStore:
        """As another process would; in the bucket, on the same connections."""
        return self.bucket.under(self.root) if self.bucket else open_store(self.url, create=True)

    def put(self, name: str, data: bytes) -> None:
        """A file or object that the store did not write."""
        if self.client:
            self.client.put_object(Bucket=BUCKET, Key=f"{self.root}/{name}", Body=data)
            return
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def contents(self) -> dict[str, bytes]:
        """Everything that is there, by name."""
        if not self.client:
            files = (path for path in Path(self.root).rglob("*") if path.is_file())
            return {str(path.relative_to(self.root)): path.read_bytes() for path in files}
        listed = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self.root}/")
        names = [item["Key"] for page in listed for item in page.get("Contents", ())]
        read = self.client.get_object
        return {name[len(self.root) + 1 :]: read(Bucket=BUCKET, Key=name)["Body"].read() for name in names}

    def age(self, seconds: float) -> None:
        """On disk: let every file look as if it was written that long ago (or later, if negative)."""
        for path in Path(self.root).rglob("*") if not self.client else ():
            moment = path.stat().st_mtime - seconds
            os.utime(path, (moment, moment))


@functools.cache
def _bucket(url: str) -> S3Store:
    return S3Store(BUCKET, endpoint_url=url, key=KEY, secret=SECRET, region=REGION)


@pytest.fixture(params=["disk", "moto"])
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    fresh_prefix: Callable[[], str],
    s3_environment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """An empty place of each kind."""
    if request.param == "disk":
        return Place(str(tmp_path / "store"))
    server: Server = request.getfixturevalue(request.param)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    return Place(fresh_prefix(), _bucket(server.url), server.client)
