"""S3Store in forks, threads, running event loops and other processes: S4, and what a process leaves behind."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from recovery.ports import Put
from storage_backends import open_store
from storage_backends.s3 import S3Store
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing import writers
from storage_backends.testing.conformance import in_threads
from storage_backends.testing.s3_proxy import FaultProxy
from storage_backends.testing.servers import BUCKET, KEY, SECRET, Server

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")

CHILD_S = 120


@pytest.fixture
def store(moto: Server, fresh_prefix: Callable[[], str]) -> S3Store:
    return S3Store(BUCKET, fresh_prefix(), endpoint_url=moto.url)


def in_a_fork(work: Callable[[], None]) -> int:
    """Exit code of a forked child that does `work`; ended after CHILD_S seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + CHILD_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError(f"the child did not end within {CHILD_S} s")
        time.sleep(0.01)


def test_s4_a_forked_child_writes_and_its_parent_goes_on(store: S3Store) -> None:
    store.put_new("parent/before", b"1")

    def child() -> None:
        assert store.put_new("child/a", b"2") is Put.CREATED
        assert store.get("parent/before") == b"1"
        assert in_a_fork(lambda: store.put("child/b", b"3")) == 0

    assert in_a_fork(child) == 0
    assert store.put_new("parent/after", b"4") is Put.CREATED
    assert [item.key for item in store.list("")] == ["child/a", "child/b", "parent/after", "parent/before"]


def test_s4_a_fork_in_the_middle_of_calls_of_other_threads(store: S3Store) -> None:
    """Whatever lock another thread holds at that moment, the child must not need it."""
    done = threading.Event()

    def busy(index: int) -> None:
        number = 0
        while not done.is_set():
            store.put_new(f"busy/{index}/{number}", b"x")
            number += 1

    threads = [threading.Thread(target=busy, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            assert in_a_fork(lambda number=number: store.put(f"child/{number}", b"1")) == 0  # type: ignore[misc]
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert len(store.list("child/")) == 5


def test_s4_a_store_made_before_a_fork_and_first_used_after_it(store: S3Store) -> None:
    assert in_a_fork(lambda: store.put("a", b"1")) == 0
    assert store.get("a") == b"1"


def test_s4_multiprocessing_with_fork(store: S3Store) -> None:
    store.put("parent", b"1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=store.put, args=("child", b"2"))
        process.start()
    process.join(CHILD_S)
    assert process.exitcode == 0 and store.get("child") == b"2"


def test_s4_inside_a_running_event_loop(store: S3Store) -> None:
    async def main() -> None:
        assert store.put_new("in/loop", b"1") is Put.CREATED
        results = await asyncio.gather(*(asyncio.to_thread(store.put_new, f"in/thread{n}", b"2") for n in range(8)))
        assert results == [Put.CREATED] * 8
        assert store.get("in/loop") == b"1"

    asyncio.run(main())
    asyncio.run(main_again(store))


async def main_again(store: S3Store) -> None:
    """A second loop, after the first was closed."""
    assert len(store.list("in/")) == 9


def test_many_threads_share_one_client(store: S3Store) -> None:
    outcomes = in_threads(32, lambda index: [store.put_new(f"k/{index}/{n}", b"x" * 5000) for n in range(4)])
    assert outcomes == [[Put.CREATED] * 4] * 32
    assert len(store.list("k/")) == 128
    assert sum(thread.name == "s3-io" for thread in threading.enumerate()) == 1


def test_a_waiting_call_does_not_keep_others_waiting(proxy: FaultProxy, fresh_prefix: Callable[[], str]) -> None:
    store = S3Store(BUCKET, fresh_prefix(), endpoint_url=proxy.url)
    hang = faults.Hang()
    proxy.plan = faults.when(faults.of("GetObject", key="/slow"), hang)
    store.put("slow", b"1")
    waiting = threading.Thread(target=store.get, args=("slow",))
    waiting.start()
    while not proxy.count("GetObject"):
        time.sleep(0.01)
    assert in_threads(4, lambda index: store.put_new(f"fast/{index}", b"1")) == [Put.CREATED] * 4
    assert waiting.is_alive()
    hang.event.set()
    waiting.join(CHILD_S)
    assert not waiting.is_alive()


def test_threads_whose_credentials_expire_at_once_renew_them_once(
    proxy: FaultProxy, fresh_prefix: Callable[[], str], s3_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(token: str) -> None:
        text = f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\naws_session_token={token}\n"
        s3_environment.write_text(text)

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    write("old")
    store = S3Store(BUCKET, fresh_prefix(), endpoint_url=proxy.url)
    store.put("first", b"1")
    write("new")
    proxy.plan = faults.expiring("old", after=0)
    assert in_threads(8, lambda index: store.put_new(f"k/{index}", b"1")) == [Put.CREATED] * 8
    assert store.counters.renewals == 1


# ---- what is left behind ---------------------------------------------------------------------------------------------


def test_connections_are_closed_with_the_store(proxy: FaultProxy, fresh_prefix: Callable[[], str]) -> None:
    store = S3Store(BUCKET, fresh_prefix(), endpoint_url=proxy.url)
    store.put("a", b"1")

    def open_connections() -> int:
        port = f"{proxy.port:04X}"
        lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        return sum(line.split()[2].endswith(f":{port}") and line.split()[3] == "01" for line in lines)

    assert open_connections() == 1
    del store
    gc.collect()
    deadline = time.monotonic() + 60
    while open_connections() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_connections() == 0


SCRIPTS = {
    "plain": "store.put('a', b'1')",
    "several stores": "[S3Store('bucket', 'x', endpoint_url=url).put('a', b'1') for _ in range(3)]",
    "forked": """
store.put('a', b'1')
pid = os.fork()
if pid == 0:
    store.put('b', b'1')
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
store.put('c', b'1')
assert store.counters.requests == 2 and store.counters.lost == 0, "the child's end broke the parent's connection"
""",
    "forked, unused in the child": """
store.put('a', b'1')
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
store.put('b', b'1')
""",
    "renewed": "store.put('a', b'1'); store._here.renew(0); store.put('a', b'2')",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_process_ends_quickly_and_says_nothing(proxy: FaultProxy, name: str) -> None:
    """Through the proxy, because that keeps connections open."""
    script = f"""
import os, sys, time
from storage_backends.s3 import S3Store
url = {proxy.url!r}
store = S3Store('bucket', 'ends', endpoint_url=url)
{SCRIPTS[name]}
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", script],
        env=writers.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- other processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moto", "seaweedfs"])
def test_processes_that_race_have_one_winner_per_key(
    request: pytest.FixtureRequest, fresh_prefix: Callable[[], str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    server: Server = request.getfixturevalue(kind)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    url = f"s3://{BUCKET}/{fresh_prefix()}"
    processes = [writers.start_at("race", url, "20") for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    won = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        won.append(json.loads(out))
    assert sorted(number for each in won for number in each) == list(range(20))
    assert len(open_store(url).list("race/")) == 20
