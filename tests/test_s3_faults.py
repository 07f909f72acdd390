"""S3Store on servers that are busy, slow or lose answers: what is sent, what is sent again, and what is said then."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import google_crc32c
import pytest

from recovery.errors import ObjectMissing, OutcomeUnknown, RecoveryError, StoreUnavailable
from recovery.ports import Put
from storage_backends.s3 import S3Store
from storage_backends.s3_retry import PAUSE_MAX_S
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import Answer, FaultProxy, of, when
from storage_backends.testing.servers import BUCKET, Server
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


BUSY = [faults.SLOW_DOWN, Answer(429, "TooManyRequests"), Answer(503, "ServiceUnavailable")]


@pytest.mark.parametrize(
    ("answer", "verb"), [(BUSY[0], verb) for verb in VERBS] + [(answer, "put_new") for answer in BUSY[1:]]
)
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
    timeouts: dict[str, Any] = {"read_timeout_s": 2, "connect_timeout_s": 2, "retry_for_s": 0.2}
    store = S3Store(BUCKET, fresh_prefix(), endpoint_url=proxy.url, **timeouts)
    hang = faults.Hang()
    proxy.plan = lambda seen: hang
    with pytest.raises(error, match=proxy.url):
        VERBS[verb](store)
    assert store.counters.requests == 1, "it is not tried again when the time for that is over"
    hang.event.set()
    proxy.plan = faults.pass_on
    assert store.put_new("b", b"1") is Put.CREATED, "the same store goes on when the server does"


def test_a_slow_answer_has_time_by_its_length(proxy: FaultProxy, fresh_prefix: Callable[[], str]) -> None:
    prefix, big = fresh_prefix(), b"x" * (8 << 20)
    writer = S3Store(BUCKET, prefix, endpoint_url=proxy.url)
    writer.put("big", big)
    writer.put("small", b"x" * 1000)
    timeouts: dict[str, Any] = {"read_timeout_s": 1, "connect_timeout_s": 1, "retry_for_s": 0.1}
    store = S3Store(BUCKET, prefix, endpoint_url=proxy.url, **timeouts)
    proxy.plan = lambda seen: faults.Trickle(pieces=10, pause_s=0.3)
    assert store.get("big") == big, "3 s are longer than the timeouts, and shorter than what 8 MiB have"
    with pytest.raises(StoreUnavailable, match=proxy.url):
        store.get("small")


def test_a_slow_server_is_waited_for(store: S3Store, proxy: FaultProxy) -> None:
    proxy.plan = lambda seen: faults.PassOn(delay_s=0.2)
    assert store.put_new("a", b"1") is Put.CREATED
    assert store.counters.requests == 1
