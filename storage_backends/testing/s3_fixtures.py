"""Fixtures for tests on S3: a pytest plugin, taken by `pytest_plugins = ["storage_backends.testing.s3_fixtures"]`.

Owns: one server of each kind per test session, the bucket in it, and an environment in which nothing but loopback is
ever asked for anything.
Does not know: what is tested.

Invariants:
1. A server is started by the first test that asks for it and ends with the session (servers.py, invariant 2).
2. No test sees another's objects: each takes a prefix of its own from `fresh_prefix`.
3. No credentials, configuration or proxy of the machine are used; there is no metadata service; every host below
   servers.DOMAIN is loopback, and a look-up of any other host fails.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_backends.s3 import S3Store
from storage_backends.testing import servers
from storage_backends.testing.s3_proxy import FaultProxy
from storage_backends.testing.servers import BUCKET, KEY, REGION, SECRET, Server
from storage_backends.testing.waits import Waits

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """AWS's variables, as a user would set them for a server here; the credentials' file can be written by the test."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "FSSPEC_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", REGION)
    look_up = socket.getaddrinfo

    def on_loopback(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name is None or name in LOOPBACK:
            return look_up(host, *arguments, **options)
        if name.endswith("." + servers.DOMAIN):
            return look_up("127.0.0.1", *arguments, **options)
        raise socket.gaierror(socket.EAI_NONAME, f"tests ask loopback only, not {name}")

    monkeypatch.setattr(socket, "getaddrinfo", on_loopback)
    return credentials


def _running(server: Server) -> Iterator[Server]:
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """The fast server, with BUCKET in it."""
    yield from _running(servers.start_moto())


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The independent server, with BUCKET in it."""
    yield from _running(servers.start_seaweedfs(tmp_path_factory.mktemp("seaweedfs")))


_numbers = itertools.count()


@pytest.fixture(scope="session")
def fresh_prefix() -> Callable[[], str]:
    """A prefix that no other test has."""
    return lambda: f"run-{next(_numbers)}"


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    """A proxy before the fast server; its plan is the test's to change."""
    with FaultProxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def open_at(fresh_prefix: Callable[[], str], waits: Waits) -> Callable[..., S3Store]:
    """An empty store behind an endpoint, which waits without waiting; credentials come from the environment."""
    return lambda url, **options: S3Store(BUCKET, fresh_prefix(), endpoint_url=url, pace=waits.pace, **options)
