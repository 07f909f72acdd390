"""Lists of S3Store on servers that list in an order of their own, or in parts: a model of such a server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import StoreUnavailable
from storage_backends.s3 import S3Store, _safe_start
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import FaultProxy

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

NAMES = st.text("a0-._", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
KEYS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
AFTERS = st.one_of(KEYS, KEYS.map(lambda key: key + "/"), st.text("a0-._/Z~", max_size=5))


def by_bytes(keys: set[str], start: str) -> list[str]:
    """What AWS lists after `start`."""
    return [key for key in sorted(keys) if key > start]


def by_folders(keys: set[str], start: str) -> list[str]:
    """What a server lists that walks folders, and passes over a folder that has the name where it starts."""
    parts = start.split("/")
    skipped = start + "/" if start and not start.endswith("/") else ""
    return [
        key
        for key in sorted(keys, key=lambda key: key.split("/"))
        if key.split("/") > parts and not (skipped and key.startswith(skipped))
    ]


@given(keys=st.sets(KEYS, max_size=12), after=AFTERS)
def test_nothing_that_is_wanted_is_before_the_place_where_servers_start(keys: set[str], after: str) -> None:
    wanted = {key for key in keys if key > after}
    start = _safe_start(after)
    assert wanted <= set(by_bytes(keys, start))
    assert wanted <= set(by_folders(keys, start))


def test_a_list_of_the_log_starts_near_its_end() -> None:
    assert _safe_start("log/000000001234.json") == "log/00000000123"
    assert [_safe_start(after) for after in ("", "a", "a/", "a/b-c", "-", "seg/e1/w0.x")] == [
        "",
        "",
        "a/",
        "a/",
        "",
        "seg/e1/w",
    ]


@pytest.mark.parametrize("token", ["", "<NextContinuationToken>again</NextContinuationToken>"])
def test_a_list_without_its_rest_is_no_list(proxy: FaultProxy, open_at: Callable[..., S3Store], token: str) -> None:
    page = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}</ListBucketResult>"
    proxy.plan = lambda seen: faults.Answer(200, "", document=page)
    with pytest.raises(StoreUnavailable, match="not the rest"):
        open_at(proxy.url).list("")
