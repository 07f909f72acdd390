"""S3Store when things go wrong, with a real server behind a proxy that makes them go wrong."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    NoStore,
    ObjectMissing,
    OutcomeUnknown,
    RecoveryError,
    StoreFull,
    StoreUnavailable,
)
from recovery.ports import Put
from storage_backends import open_store
from storage_backends.s3 import S3Store
from storage_backends.s3_retry import PAUSE_MAX_S, UNREACHABLE_TRIES, Pace
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import Answer, FaultProxy, of, when
from storage_backends.testing.servers import BUCKET, KEY, SECRET, Server, free_ports

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

VERBS: dict[str, Callable[[S3Store], Any]] = {
    "put_new": lambda store: store.put_new("a", b"1"),
    "put": lambda store: store.put("a", b"1"),
    "get": lambda store: store.get("a"),
    "list": lambda store: store.list("a"),
    "delete": lambda store: store.delete("a"),
}


@dataclass
class Waits:
    """Time that passes only by waiting, and is not waited for."""

    now: float = 0.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    @property
    def pace(self) -> Pace:
        return Pace(sleep=self.sleep, monotonic=lambda: self.now, chance=lambda: 0.5)


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def open_at(fresh_prefix: Callable[[], str], waits: Waits) -> Callable[..., S3Store]:
    """A store behind an endpoint, with credentials from the environment."""
    return lambda url, **options: S3Store(BUCKET, fresh_prefix(), endpoint_url=url, pace=waits.pace, **options)


@pytest.fixture
def store(proxy: FaultProxy, open_at: Callable[..., S3Store]) -> S3Store:
    return open_at(proxy.url)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def test_each_verb_is_one_request_and_a_write_carries_its_sum(store: S3Store, proxy: FaultProxy) -> None:
    data = b"x" * 300_000
    store.put_new("a", data)
    store.put("hint", b"1")
    store.get("a", 5, 10)
    store.list("")
    store.delete("a")
    assert [seen.operation for seen in proxy.seen] == [
        "PutObject", "PutObject", "GetObject", "ListObjectsV2", "DeleteObject",
    ]  # fmt: skip
    new, hint, read, *_ = proxy.seen
    assert new.headers["if-none-match"] == "*" and "if-none-match" not in hint.headers
    crc = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    assert new.headers["x-amz-checksum-crc32c"] == crc and new.headers["content-length"] == "300000"
    assert read.headers["range"] == "bytes=5-9"


def test_s11_the_bucket_is_in_the_path_or_in_the_host(proxy: FaultProxy, open_at: Callable[..., S3Store]) -> None:
    """MinIO and its like need the first, and get it unasked; AWS wants the second."""
    by_host = open_at(f"http://moto.s3.test:{proxy.port}", addressing="virtual")
    for store in (open_at(proxy.url), open_at(proxy.url, addressing="path"), by_host):
        store.put_new("a", b"1")
        assert store.get("a") == b"1"
    put = [seen for seen in proxy.seen if seen.method == "PUT"]
    assert [seen.headers["host"] for seen in put] == [f"127.0.0.1:{proxy.port}"] * 2 + [
        f"{BUCKET}.moto.s3.test:{proxy.port}"
    ]
    assert [seen.path.startswith(f"/{BUCKET}/") for seen in put] == [True, True, False]


def test_what_changes_on_the_way_is_noticed_by_the_server_and_sent_again(
    seaweedfs: Server, open_at: Callable[..., S3Store]
) -> None:
    with FaultProxy(seaweedfs.url, when(of("PutObject"), faults.Garble())) as proxy:
        store = open_at(proxy.url)
        assert store.put_new("a", b"as written") is Put.CREATED
        assert store.get("a") == b"as written"
        assert proxy.count("PutObject") == 2 and store.counters.retries == 1


# ---- busy servers ----------------------------------------------------------------------------------------------------


def test_s1_a_server_that_says_slow_down_is_waited_for(store: S3Store, proxy: FaultProxy, waits: Waits) -> None:
    proxy.plan = faults.sometimes(0.2, faults.SLOW_DOWN, seed=1)
    for number in range(40):
        assert store.put_new(f"log/{number:03d}", b"%d" % number) is Put.CREATED
    assert [item.key for item in store.list("log/")] == [f"log/{number:03d}" for number in range(40)]
    refused = len(proxy.seen) - 41
    assert refused >= 4
    counters = store.counters
    assert (counters.busy, counters.retries, counters.requests) == (refused, refused, refused + 41)
    assert len(waits.pauses) == refused and counters.waited_s == pytest.approx(sum(waits.pauses))


@pytest.mark.parametrize(
    "answer", [faults.SLOW_DOWN, Answer(429, "TooManyRequests"), Answer(503, "ServiceUnavailable")]
)
@pytest.mark.parametrize("verb", VERBS)
def test_s1_a_server_that_stays_busy_is_given_up_in_time(
    store: S3Store, proxy: FaultProxy, waits: Waits, answer: Answer, verb: str
) -> None:
    proxy.plan = lambda seen: answer
    with pytest.raises(StoreUnavailable, match=rf"{proxy.url} answered {answer.status} {answer.code}.*times") as caught:
        VERBS[verb](store)
    assert caught.value.exit_code == 20
    assert 10 < sum(waits.pauses) <= store.options.retry_for_s
    assert waits.pauses == sorted(waits.pauses) and max(waits.pauses) <= PAUSE_MAX_S
    assert waits.pauses[:3] == [0.0625, 0.125, 0.25], "each shortened by a random share"


def test_a_server_that_says_when_to_come_back_is_obeyed(store: S3Store, proxy: FaultProxy, waits: Waits) -> None:
    proxy.plan = when(of("GetObject"), Answer(503, "SlowDown", headers={"Retry-After": "3"}))
    with pytest.raises(ObjectMissing):
        store.get("a")
    assert waits.pauses == [3.0]


def test_s3_a_conflict_of_conditional_requests_is_tried_again(store: S3Store, proxy: FaultProxy) -> None:
    conflict = Answer(409, "ConditionalRequestConflict")
    proxy.plan = when(of("PutObject"), conflict, conflict)
    assert store.put_new("a", b"1") is Put.CREATED
    proxy.plan = lambda seen: conflict
    with pytest.raises(StoreUnavailable, match="409 ConditionalRequestConflict"):
        store.put_new("b", b"1")
    proxy.plan = lambda seen: Answer(409, "ExistingObjectIsDirectory")
    with pytest.raises(StoreUnavailable, match="409 ExistingObjectIsDirectory"):
        store.put_new("c", b"1")


@pytest.mark.parametrize("body", ["<Condition>If-None-Match</Condition>", ""])
def test_s3_a_condition_that_fails_is_known_by_its_status(store: S3Store, proxy: FaultProxy, body: str) -> None:
    """With and without what AWS adds; and from servers with a code of their own."""
    more = {"Condition": "If-None-Match"} if body else {}
    proxy.plan = when(of("PutObject"), Answer(412, "PreconditionFailed", more=more), Answer(412, "Whatever"))
    assert store.put_new("a", b"1") is Put.EXISTS
    assert store.put_new("a", b"1") is Put.EXISTS


# ---- lost answers ----------------------------------------------------------------------------------------------------


def test_s2_an_answer_that_is_lost_once(store: S3Store, proxy: FaultProxy) -> None:
    """The object is there, and so the second try says; who wrote it the caller knows by the nonce in it."""
    proxy.plan = when(of("PutObject"), faults.DropAfter())
    assert store.put_new("a", b"nonce") is Put.EXISTS
    assert store.get("a") == b"nonce"
    proxy.plan = when(of("PutObject"), faults.DropBefore())
    assert store.put_new("b", b"nonce") is Put.CREATED
    for answer in (Answer(500, "InternalError"), Answer(502, ""), Answer(504, "")):
        proxy.plan = when(of("PutObject"), faults.Instead(200, answer))
        assert store.put_new(f"c{answer.status}", b"nonce") is Put.EXISTS


@pytest.mark.parametrize("drop", [faults.DropAfter(), faults.DropBefore(), Answer(500, "InternalError")])
def test_s2_a_create_whose_answer_stays_lost_is_unknown(store: S3Store, proxy: FaultProxy, drop: faults.Fault) -> None:
    proxy.plan = when(of("PutObject"), ever_after=drop)
    with pytest.raises(OutcomeUnknown, match=r"PutObject of s3://bucket/.*/a may or may not have been done") as caught:
        store.put_new("a", b"nonce")
    assert caught.value.exit_code == 20 and "read the object back" in caught.value.hint
    with pytest.raises(StoreUnavailable):
        store.put("hint", b"1")


def test_a_create_that_was_refused_after_a_lost_answer_stays_unknown(store: S3Store, proxy: FaultProxy) -> None:
    lost = faults.DropAfter()  # twice: the HTTP library repeats by itself once
    proxy.plan = when(of("PutObject"), lost, lost, ever_after=Answer(403, "AccessDenied"))
    with pytest.raises(OutcomeUnknown, match="403 AccessDenied"):
        store.put_new("a", b"nonce")


@pytest.mark.parametrize("verb", ["get", "list", "delete", "put"])
def test_other_verbs_are_simply_done_again(store: S3Store, proxy: FaultProxy, verb: str) -> None:
    store.put("a", b"1")
    for fault in (faults.DropBefore(), faults.DropAfter(), Answer(500, "InternalError"), faults.CutShort(0)):
        proxy.plan = when(lambda seen: True, fault)
        VERBS[verb](store)
    proxy.plan = when(lambda seen: True, ever_after=faults.DropBefore())
    with pytest.raises(StoreUnavailable, match=f"no answer from {proxy.url}"):
        VERBS[verb](store)


def test_half_an_answer_is_none(store: S3Store, proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 4000
    store.put_new("a", data)
    proxy.plan = when(of("GetObject"), faults.CutShort(1000), faults.CutShort(len(data) - 1))
    assert store.get("a") == data
    assert store.counters.lost == 2


def test_a_server_that_passes_over_ranges(store: S3Store, proxy: FaultProxy) -> None:
    store.put_new("a", b"0123456789")
    proxy.plan = lambda seen: faults.PassOn(without=("range",))
    assert [store.get("a", 2, 5), store.get("a", 8), store.get("a", 3, 3), store.get("a", 20)] == [
        b"234",
        b"89",
        b"",
        b"",
    ]


# ---- slow and silent servers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "error"), [("put_new", OutcomeUnknown), ("get", StoreUnavailable)])
def test_a_server_that_never_answers_costs_one_timeout(
    proxy: FaultProxy, fresh_prefix: Callable[[], str], verb: str, error: type[RecoveryError]
) -> None:
    options = {"read_timeout_s": 0.4, "connect_timeout_s": 0.4, "retry_for_s": 0.2}
    store = S3Store(BUCKET, fresh_prefix(), endpoint_url=proxy.url, **options)
    hang = faults.Hang()
    proxy.plan = lambda seen: hang
    began = time.monotonic()
    with pytest.raises(error, match=proxy.url):
        VERBS[verb](store)
    assert time.monotonic() - began < 5
    hang.event.set()
    proxy.plan = faults.pass_on
    assert store.put_new("b", b"1") is Put.CREATED, "the same store goes on when the server does"


def test_a_slow_server_is_waited_for(store: S3Store, proxy: FaultProxy) -> None:
    proxy.plan = lambda seen: faults.PassOn(delay_s=0.2)
    assert store.put_new("a", b"1") is Put.CREATED
    assert store.counters.requests == 1


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "action"), [("put_new", "s3:PutObject"), ("put", "s3:PutObject"), ("list", "s3:ListBucket"), ("delete", "s3:DeleteObject")]
)  # fmt: skip
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
    proxy.plan = lambda seen: (
        Answer(403, "AccessDenied")
        if seen.operation == "ListObjectsV2"
        else faults.Instead(404, Answer(403, "AccessDenied"))
    )
    assert store.get("a") == b"1", "what is known by its name can be read"
    with pytest.raises(CredentialsRefused, match="not found or no permission") as caught:
        store.get("b")
    assert "s3:ListBucket" in caught.value.hint
    with pytest.raises(CredentialsRefused, match="ListObjectsV2"):
        store.list("")


def test_a_wrong_secret_is_told(seaweedfs: Server, open_at: Callable[..., S3Store]) -> None:
    store = open_at(seaweedfs.url, key=KEY, secret="wrong")
    with pytest.raises(CredentialsRefused, match="SignatureDoesNotMatch.*given as an option") as caught:
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


@pytest.mark.parametrize("verb", VERBS)
def test_a_server_that_is_not_there(open_at: Callable[..., S3Store], waits: Waits, verb: str) -> None:
    (port,) = free_ports(1)
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
