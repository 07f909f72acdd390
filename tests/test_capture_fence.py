"""Holds, the fence, stores that hang and disks that are full, while a real engine decodes.

Decoding must not notice any of it: every test counts tokens while something is in the way.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from recovery.admission.holds import HoldKind
from recovery.errors import StoreFull
from recovery.model import ENDED
from recovery.protocol import Verdict
from storage_backends import open_store
from storage_backends.testing.faults import PASS, FaultyStore, Hang, RaiseBefore, Step, Verb
from tests.conftest import OnLoop
from tests.engine_runs import (
    ask,
    assert_same,
    call_id_of,
    capturing,
    greedy,
    prompts,
    read_back,
    take_snapshot,
    tokens_of,
    until,
)

PROMPT, OTHER = prompts(2)
DEADLINE_S = 0.5

Faults = Callable[[Callable[[Verb, str], Step]], None]


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Makes every store that a session opens from here on fail by a plan."""

    def plan(step: Callable[[Verb, str], Step]) -> None:
        monkeypatch.setattr(
            "vllm_hooks.opening.open_store", lambda url, **options: FaultyStore(open_store(url, **options), step)
        )

    return plan


@asynccontextmanager
async def decoding(wrapped: Any, session: Any, name: str) -> AsyncIterator[None]:
    """A call that has begun, and others behind it if the block lasts longer than its 1000 tokens."""

    async def forever() -> None:
        for number in itertools.count():
            await ask(wrapped, PROMPT, greedy(1000), f"{name}-{number}" if number else name)

    task = asyncio.ensure_future(forever())
    try:
        await goes_on(session)
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def goes_on(session: Any, n_tokens: int = 20) -> None:
    """Decoding makes progress from here."""
    before = tokens_of(session)
    await until(lambda: tokens_of(session) >= before + n_tokens)


def free(session: Any) -> bool:
    """No hold is active and no fence is up."""
    return bool(session.barriers.open)


@pytest.mark.parametrize("pulls", [False, True])
def test_a_fence_parks_results_and_nothing_else(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, pulls: bool
) -> None:
    """While it is up a finished call waits with its result, another decodes on; when it is lowered all is delivered."""

    async def scenario() -> None:
        short, long = [await ask(engine, p, greedy(n), str(n)) for p, n in ((OTHER, 5), (PROMPT, 400))]
        async with capturing(engine, quick_path, pulls=pulls) as (wrapped, session):
            going = asyncio.ensure_future(ask(wrapped, PROMPT, greedy(400), "long"))
            await until(lambda: tokens_of(session) >= 10)
            session.barriers.raise_fence()
            parked = asyncio.ensure_future(ask(wrapped, OTHER, greedy(5), "short"))
            call_id = call_id_of("short", OTHER, greedy(5))
            await until(lambda: (call := session.table.get(call_id)) is not None and call.n_tokens == 5)
            await goes_on(session, 60)
            assert not parked.done() and session.table.get(call_id).ended is None
            session.barriers.lower_fence()
            assert_same(await parked, short)
            assert session.table.get(call_id).ended is not None
            assert_same(await going, long, tolerance=2e-5)

    on_loop(scenario())


def test_a_parked_result_whose_caller_leaves_is_finished_later(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """A call that had all its tokens and no terminal record yet: asked for again it is finished, not generated."""
    params = greedy(5)

    async def scenario() -> None:
        whole = await ask(engine, OTHER, params, "bare")
        async with capturing(engine, quick_path) as (wrapped, session):
            session.barriers.raise_fence()
            parked = asyncio.ensure_future(ask(wrapped, OTHER, params, "r"))
            await until(lambda: session.counters.tokens_captured == 5)
            parked.cancel()
            await asyncio.gather(parked, return_exceptions=True)
            session.barriers.lower_fence()
            assert_same(await ask(wrapped, OTHER, params, "r"), whole)
            assert session.counters.tokens_captured == 5
        entry = read_back(quick_path).entries["r"]
        assert (entry.state, entry.n_tokens) == (ENDED, 5)

    on_loop(scenario())


def test_a_hold_closes_admission_and_only_its_release_opens_it(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """Two owners hold; new requests wait until both have released; what runs goes on; a snapshot in between is fine."""

    async def scenario() -> None:
        async with capturing(engine, quick_path) as (wrapped, session), decoding(wrapped, session, "r"):
            holds = [session.barriers.hold(HoldKind.DRAIN, owner, "test", time.time()) for owner in ("a", "b")]
            waiting = asyncio.ensure_future(ask(wrapped, OTHER, greedy(5), "new"))
            await goes_on(session)
            assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
            session.barriers.release(holds[0])
            await goes_on(session)
            assert not waiting.done() and "new" not in read_back(quick_path).entries
            session.barriers.release(holds[1])
            assert len((await waiting).token_ids) == 5

    on_loop(scenario())


class Hanging:
    """A plan under which the `at`-th store call after `arm` hangs until `let_go`."""

    def __init__(self) -> None:
        self._n = self._at = 0
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._event = threading.Event()

    def arm(self, at: int) -> None:
        with self._lock:
            self._n, self._at, self._event = 0, at, threading.Event()
            self.calls = []

    def let_go(self) -> None:
        self._event.set()
        self._at = 0

    def __call__(self, verb: Verb, key: str) -> Step:
        self.calls.append(f"{verb} {key}")
        self._n += 1
        return Hang(self._event) if self._n == self._at else PASS


def test_c6_c1_a_store_that_hangs_at_each_step(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, faults: Faults
) -> None:
    """C6, C1: at each store call of a snapshot in turn. At the deadline hold and fence are gone and the attempt is
    counted; decoding never stopped; the last snapshot stands; when the store answers again the next one is published.
    """
    hanging = Hanging()
    faults(hanging)

    async def scenario() -> None:
        # What follows a publication has the configured deadline; each snapshot here is given one of its own.
        fields = {"flush": 0, "snapshot_timeout_s": DEADLINE_S}
        async with capturing(engine, quick_path, **fields) as (wrapped, session):
            async with decoding(wrapped, session, "r"):
                assert (await take_snapshot(session, 30.0)).verdict is Verdict.PUBLISHED
                await goes_on(session)
                hanging.arm(0)
                attempt = await take_snapshot(session, 30.0)
                assert attempt.verdict is Verdict.PUBLISHED
            calls = list(hanging.calls)
            assert sum(call.startswith("put_new seg/") for call in calls) == 1
            abandoned, published = 0, attempt.snapshot
            for at in range(1, len(calls) + 1):
                async with decoding(wrapped, session, f"r{at}"):
                    hanging.arm(at)
                    attempt = await take_snapshot(session, DEADLINE_S)
                    assert free(session), (at, attempt)
                    assert attempt.error is not None, (at, attempt)
                    if attempt.verdict is Verdict.ABANDONED:
                        abandoned += 1
                        assert read_back(quick_path).snapshot == published
                    else:
                        assert attempt.step == "collect garbage", (at, attempt)
                        published = attempt.snapshot
                    assert session.counters.snapshots_abandoned == abandoned
                    await goes_on(session)
                # The call still hangs; others are admitted and decoded all the same.
                assert len((await ask(wrapped, OTHER, greedy(5), f"new-{at}")).token_ids) == 5
                hanging.let_go()
                attempt = await take_snapshot(session, 30.0)
                assert attempt.verdict is Verdict.PUBLISHED, (at, attempt)
                published = attempt.snapshot
                assert published == read_back(quick_path).snapshot
            assert abandoned >= 4
            captured = {call.request.rollout: call.n_tokens for call in session.table._calls.values()}
        stored = read_back(quick_path)
        for name, n_tokens in captured.items():
            assert stored.entries[name].n_tokens >= n_tokens

    on_loop(scenario())


def test_a_store_that_never_answers_does_not_keep_a_session_from_stopping(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, faults: Faults
) -> None:
    """W5: the last snapshot has a deadline too."""
    hanging = Hanging()
    faults(hanging)

    async def scenario() -> None:
        async with capturing(engine, quick_path, flush=0) as (wrapped, session):
            await ask(wrapped, PROMPT, greedy(10), "r")
            hanging.arm(1)
            attempt = await session.stop(timeout_s=DEADLINE_S)
            assert attempt is not None and attempt.verdict is Verdict.ABANDONED
            hanging.let_go()

    on_loop(scenario())


def test_f1_a_full_disk_costs_nothing_but_time(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, faults: Faults
) -> None:
    """F1: no segment can be written for a while. Decoding goes on, what was captured is carried, the counters say so,
    snapshots are abandoned and the last one is intact; with room again everything is stored, in order.
    """
    full = False

    def plan(verb: Verb, key: str) -> Step:
        return RaiseBefore(StoreFull("no space left on device")) if full and key.startswith("seg/") else PASS

    faults(plan)

    async def scenario() -> None:
        nonlocal full
        whole = await ask(engine, PROMPT, greedy(200), "bare")
        async with capturing(engine, quick_path, flush=8) as (wrapped, session):
            await ask(wrapped, OTHER, greedy(20), "before")
            assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
            first = read_back(quick_path)
            full = True
            answer = await ask(wrapped, PROMPT, greedy(200), "r")
            assert_same(answer, whole)
            attempt = await take_snapshot(session)
            assert (attempt.verdict, attempt.step) == (Verdict.ABANDONED, "stage"), attempt
            assert "no space left" in str(attempt.error)
            counters = session.stager.counters
            assert counters.failures >= 1 and counters.backlog_records >= 2
            assert "no space left" in counters.last_failure
            assert {trouble.kind: trouble.tries for trouble in session.troubles} == {
                "tokens": counters.failures_in_a_row,
                "snapshots": 1,
            }
            assert all("no space left" in trouble.error.message for trouble in session.troubles)
            assert free(session)
            again = read_back(quick_path)
            assert (again.snapshot, set(again.entries)) == (first.snapshot, {"before"})
            full = False
            assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
            assert counters.backlog_records == 0 and session.troubles == []
        stored = read_back(quick_path)
        assert stored.transcripts["r"].token_ids.tolist() == whole.token_ids
        assert stored.entries["r"].state == ENDED

    on_loop(scenario())


def test_c3_a_segment_that_does_not_read_back_is_written_again_from_memory(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls, one of them ended and delivered, in a segment that was damaged on its way: both are stored whole."""
    rotten: list[str] = []

    class Rotten(FaultyStore):
        def put_new(self, key: str, data: bytes) -> Any:
            if key.startswith("seg/") and len(rotten) < 2:
                rotten.append(key)
                data = data[:-1] + bytes([data[-1] ^ 1])
            return self.inner.put_new(key, data)

    monkeypatch.setattr("vllm_hooks.opening.open_store", lambda url, **options: Rotten(open_store(url, **options), []))

    async def scenario() -> None:
        short, long = [await ask(engine, p, greedy(n), str(n)) for p, n in ((OTHER, 20), (PROMPT, 120))]
        async with capturing(engine, quick_path, flush=8) as (wrapped, session):
            going = asyncio.ensure_future(ask(wrapped, PROMPT, greedy(120), "long"))
            assert_same(await ask(wrapped, OTHER, greedy(20), "short"), short)
            await until(lambda: len(rotten) == 2)
            attempt = await take_snapshot(session)
            assert (attempt.verdict, attempt.step) == (Verdict.ABANDONED, "validate"), attempt
            assert free(session)
            assert_same(await going, long)
            assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
            assert session.table.get(call_id_of("short", OTHER, greedy(20))) is None, "published, and forgotten"
        stored = read_back(quick_path)
        for name, whole in (("short", short), ("long", long)):
            assert stored.transcripts[name].token_ids.tolist() == whole.token_ids
            assert stored.entries[name].state == ENDED

    on_loop(scenario())
