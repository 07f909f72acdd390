"""recovery.coordinator: whatever fails or hangs, hold and fence come down, nothing is lost, the next attempt works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recovery.codec import fingerprint
from recovery.coordinator import Attempt, Coordinator, InOneThread
from recovery.errors import (
    CredentialsRefused,
    Damaged,
    EngineDead,
    Fenced,
    OutcomeUnknown,
    RecoveryError,
    SnapshotAbandoned,
    StoreFull,
    StoreUnavailable,
)
from recovery.protocol import IllegalEvent, Verdict
from recovery.slots import SlotLog
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, Hang, RaiseAfter, RaiseBefore
from tests.fake_engine import MUST, Life, content_of, reference_answers
from tests.fakes import ManualClock, SeededEntropy, UntilItHangs

FLEET_CALLS = [
    "acquire hold",
    "raise fence",
    "prepare",
    "cut",
    "stage",
    "lower fence",
    "resume True",
    "release hold",
]


class World:
    """A job in the middle of decoding, with something to snapshot."""

    def __init__(self, run: Any = None, timeout_s: float = 60) -> None:
        self.inner = MemoryStore()
        self.store = FaultyStore(self.inner, [])
        self.life = Life(self.store, 1)
        self.clock = ManualClock()
        self.fleet = self.life.fleet
        if run is not None:
            self.life.coordinator = Coordinator(
                self.life.publication,
                self.fleet,
                self.clock,
                timeout_s=timeout_s,
                fingerprint=fingerprint(MUST),
                run=run,
            )
        self.life.dispatch()
        self.life.decode(4)
        self.life.flush()
        self.life.decode(2)

    def take(self, timeout_s: float | None = None) -> Attempt:
        self.fleet.calls.clear()
        return self.life.coordinator.take("interval", timeout_s)

    def is_free(self) -> bool:
        return not self.fleet.held and not self.fleet.fenced

    def snapshots(self) -> list[str]:
        return [item.key for item in self.inner.list("log/")]

    def goes_on(self) -> None:
        """Nothing was lost: the next attempt publishes everything, and a fresh process finishes the job."""
        self.life.decode(1)
        attempt = self.life.snapshot()
        assert attempt.verdict is Verdict.PUBLISHED, attempt
        again = Life(self.inner, 2)
        assert again.chosen_content == self.life.at_cut
        assert again.run_to_end() == reference_answers()
        again.close()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any, **fields: Any) -> World:
        made.append(World(*args, **fields))
        return made[-1]

    yield make
    for world in made:
        world.life.close()


# ---- one attempt -----------------------------------------------------------------------------------------------


def test_the_order_of_a_good_snapshot(worlds: Callable[..., World]) -> None:
    world = worlds()
    attempt = world.take()
    assert world.fleet.calls == FLEET_CALLS
    assert (attempt.verdict, attempt.snapshot, attempt.error, attempt.step) == (Verdict.PUBLISHED, 3, None, "")
    assert attempt.bytes_written > 0
    assert list(attempt.seconds)[:3] == ["ask participants", "acquire hold", "raise fence"]
    assert list(attempt.seconds)[-1] == "collect garbage"
    world.goes_on()


@pytest.mark.parametrize("error", [StoreFull("full"), Damaged("bad"), SnapshotAbandoned("no"), EngineDead("gone")])
@pytest.mark.parametrize("method", ["acquire_hold", "raise_fence", "prepare", "cut", "stage"])
def test_each_step_of_the_fleet_failing(worlds: Callable[..., World], method: str, error: RecoveryError) -> None:
    """W12 among them: a dead engine gives no cut, and nothing is published."""
    world = worlds()
    before = world.snapshots()
    good = getattr(world.fleet, method)

    def fails(*args: Any) -> None:
        good(*args)  # half done: what came up must come down
        raise error

    setattr(world.fleet, method, fails)
    attempt = world.take()
    assert (attempt.verdict, attempt.snapshot, attempt.error) == (Verdict.ABANDONED, None, error)
    assert world.is_free() and world.snapshots() == before
    assert "resume False" in world.fleet.calls, "participants were asked before anything was tried"
    setattr(world.fleet, method, good)
    if method != "stage":  # what a failed hand-over had taken out of the stager is the fleet's to keep
        world.goes_on()


@pytest.mark.parametrize("method", ["lower_fence", "resume", "release_hold"])
@pytest.mark.parametrize("error", [SnapshotAbandoned("no"), StoreUnavailable("down")])
def test_an_undo_step_that_fails_stops_neither_the_others_nor_the_publication(
    worlds: Callable[..., World], method: str, error: RecoveryError
) -> None:
    world = worlds()
    good = getattr(world.fleet, method)

    def fails(*args: Any) -> None:
        good(*args)
        raise error

    setattr(world.fleet, method, fails)
    attempt = world.take()
    assert (attempt.verdict, attempt.snapshot, attempt.error) == (Verdict.PUBLISHED, 3, error)
    assert world.is_free() and world.fleet.calls == FLEET_CALLS
    setattr(world.fleet, method, good)
    world.goes_on()


@pytest.mark.parametrize("method", ["acquire_hold", "raise_fence", "prepare", "cut", "stage", "lower_fence", "resume"])
def test_fenced_may_come_from_any_side_and_still_everything_comes_down(
    worlds: Callable[..., World], method: str
) -> None:
    world = worlds()
    good = getattr(world.fleet, method)

    def fenced(*args: Any) -> None:
        good(*args)
        raise Fenced("another one")

    setattr(world.fleet, method, fenced)
    attempt = world.take()
    assert attempt.verdict is Verdict.FENCED and isinstance(attempt.error, Fenced)
    assert (attempt.snapshot is not None) == (method in ("lower_fence", "resume"))
    assert world.is_free()
    with pytest.raises(IllegalEvent):
        world.take()
    assert world.is_free() and world.fleet.calls == []


def test_c8_a_fenced_publication_stops_the_coordinator(worlds: Callable[..., World]) -> None:
    world = worlds()
    SlotLog(world.inner, ManualClock(), SeededEntropy("heir"), "heir").claim()
    attempt = world.take()
    assert attempt.verdict is Verdict.FENCED and attempt.step == "publish" and attempt.snapshot is None
    assert "heir" in str(attempt.error) and world.is_free()
    assert world.fleet.calls[-3:] == ["lower fence", "resume False", "release hold"]
    with pytest.raises(IllegalEvent):
        world.take()


def test_c8_a_look_finds_who_took_over_and_writes_nothing(worlds: Callable[..., World]) -> None:
    """C8: an idle coordinator has no snapshot to publish; one that does not answer says nothing."""
    world = worlds()
    counting = CountingStore(world.inner)
    world.store.inner = counting
    plan = iter([PASS, RaiseBefore(StoreUnavailable("down"))])
    world.store._ask = lambda verb, key: next(plan, PASS)
    assert world.life.coordinator.look() is None and counting.count() == counting.count("get") == 1
    assert world.life.coordinator.look() is None and next(plan, None) is None
    successor = Life(world.inner, 2)
    found = world.life.coordinator.look()
    assert found is not None and found.verdict is Verdict.FENCED and isinstance(found.error, Fenced)
    assert world.take().verdict is Verdict.FENCED
    successor.close()


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), SystemExit(3), AssertionError("bug")])
@pytest.mark.parametrize("method", ["acquire_hold", "prepare", "cut", "stage", "lower_fence", "resume", "release_hold"])
def test_a_program_error_is_raised_after_everything_came_down(
    worlds: Callable[..., World], method: str, error: BaseException
) -> None:
    world = worlds()
    good = getattr(world.fleet, method)

    def fails(*args: Any) -> None:
        good(*args)
        raise error

    setattr(world.fleet, method, fails)
    with pytest.raises(type(error)) as caught:
        world.take()
    assert caught.value is error and world.is_free()
    assert world.fleet.calls[-1] == "release hold"
    setattr(world.fleet, method, good)
    if method != "stage":
        world.goes_on()


# ---- the store -------------------------------------------------------------------------------------------------


def store_calls() -> int:
    """How many calls one snapshot of the world makes."""
    world = World()
    counting = CountingStore(world.inner)
    world.store.inner = counting
    world.take()
    world.life.close()
    return counting.count()


N_CALLS = 7
"""The cut's segment, the ledger, two segments and the ledger read back, the slot, the hint."""


def test_every_store_call_of_a_snapshot_has_its_turn() -> None:
    assert store_calls() == N_CALLS


@pytest.mark.parametrize("k", range(N_CALLS))
@pytest.mark.parametrize("error", [StoreUnavailable("down"), StoreFull("full"), CredentialsRefused("no")])
def test_each_store_call_failing(worlds: Callable[..., World], k: int, error: RecoveryError) -> None:
    world = worlds()
    plan = iter([PASS] * k + [RaiseBefore(error)])
    world.store._ask = lambda verb, key: next(plan, PASS)
    attempt = world.take()
    assert world.is_free() and next(plan, None) is None
    if attempt.verdict is Verdict.ABANDONED:
        assert attempt.error is error and attempt.snapshot is None
    world.goes_on()


@pytest.mark.parametrize("k", range(N_CALLS))
def test_each_store_call_staying_down(worlds: Callable[..., World], k: int) -> None:
    world = worlds()
    calls = iter([PASS] * k)
    world.store._ask = lambda verb, key: next(calls, RaiseBefore(StoreUnavailable("down")))
    for _ in range(2):
        attempt = world.take()
        assert world.is_free()
    assert attempt.verdict is Verdict.ABANDONED
    world.store._ask = lambda verb, key: PASS
    world.goes_on()


@pytest.mark.parametrize("k", range(1, N_CALLS))  # the first call is the stager's; a fleet has its own deadline for it
def test_c6_a_store_call_that_hangs_costs_one_attempt(worlds: Callable[..., World], k: int) -> None:
    """Hold released and fence lowered at the deadline; while it hangs the next attempts fail early, then one works."""
    event, entered = threading.Event(), threading.Event()
    world = worlds(run=UntilItHangs(lambda: entered.is_set() and not event.is_set()))
    plan = iter([PASS] * k + [Hang(event, entered)])
    world.store._ask = lambda verb, key: next(plan, PASS)
    attempt = world.take(timeout_s=60)
    assert entered.is_set() and world.is_free()
    if attempt.verdict is Verdict.PUBLISHED:
        assert attempt.step == "collect garbage" and isinstance(attempt.error, SnapshotAbandoned)
    else:
        assert attempt.verdict is Verdict.ABANDONED and attempt.snapshot is None
        assert "did not finish" in str(attempt.error)
    world.life.decode(1)
    second = world.take(timeout_s=60)
    assert second.verdict is Verdict.ABANDONED and world.is_free()
    assert "still has not returned" in str(second.error)
    assert "acquire hold" not in world.fleet.calls and "raise fence" not in world.fleet.calls, "nobody is held up"
    event.set()
    world.goes_on()
    assert attempt.snapshot is None or attempt.verdict is Verdict.PUBLISHED


def test_a_publication_that_lands_after_its_deadline_is_a_snapshot_all_the_same(worlds: Callable[..., World]) -> None:
    event, entered = threading.Event(), threading.Event()
    world = worlds(run=UntilItHangs(lambda: entered.is_set() and not event.is_set()))
    hung: list[str] = []

    def ask(verb: str, key: str) -> Any:
        if verb == "put_new" and key.startswith("log/") and not hung:
            hung.append(key)
            return Hang(event, entered)
        return PASS

    world.store._ask = ask  # type: ignore[assignment]
    known = content_of(world.life.publication.ledger)
    attempt = world.take(timeout_s=60)
    assert attempt.verdict is Verdict.ABANDONED and len(known) == 0
    event.set()
    world.life.decode(3)
    second = world.life.snapshot()
    assert second.verdict is Verdict.PUBLISHED and attempt.snapshot is None
    assert [key for key in world.snapshots() if key >= hung[0]] == [hung[0], f"log/{second.snapshot:012d}.json"]
    older = Life(world.inner, 2, choice=int(hung[0][4:16]))
    assert older.restored.snapshot == int(hung[0][4:16]) and len(older.publication.ledger) == 4
    older.close()


@pytest.mark.parametrize("lands", [True, False])
def test_s2_a_publication_of_unknown_outcome_costs_one_attempt(worlds: Callable[..., World], lands: bool) -> None:
    world = worlds()
    down = StoreUnavailable("down")
    tried: list[str] = []

    def ask(verb: str, key: str) -> Any:
        if not key.startswith("log/"):
            return PASS
        tried.append(key)
        return RaiseAfter(down) if lands and len(tried) == 1 else RaiseBefore(down)

    world.store._ask = ask  # type: ignore[assignment]
    attempt = world.take()
    assert attempt.verdict is Verdict.ABANDONED and isinstance(attempt.error, OutcomeUnknown)
    assert world.is_free() and (tried[0] in world.snapshots()) == lands
    world.store._ask = lambda verb, key: PASS
    world.goes_on()


def test_no_time_left_is_said_before_the_store_is_asked(worlds: Callable[..., World]) -> None:
    world = worlds(run=InOneThread(), timeout_s=60)
    counting = CountingStore(world.inner)
    prepare = world.fleet.prepare

    def slow(timeout_s: float) -> Any:
        assert timeout_s == 60
        world.clock.now += 61
        return prepare(timeout_s)

    world.fleet.prepare = slow  # type: ignore[method-assign]
    world.store.inner = counting
    attempt = world.take()
    assert attempt.verdict is Verdict.ABANDONED and "within its deadline" in str(attempt.error)
    assert attempt.seconds["prepare participants"] == 61
    assert [call.key[:4] for call in counting.log] == ["seg/"], "only the cut's own flush"
    world.fleet.prepare = prepare  # type: ignore[method-assign]
    world.goes_on()


class Rotten(FaultyStore):
    """Writes `many` segments from the `first`-th on with a wrong last byte; with `again`, second writes of them too."""

    def __init__(self, inner: Any, first: int, many: int = 1, again: bool = False) -> None:
        super().__init__(inner, [])
        self.n = 0
        self.bad = range(first, first + many)
        self.again = again
        self.spoilt: set[bytes] = set()

    def put_new(self, key: str, data: bytes) -> Any:
        if key.startswith("seg/"):
            self.n += 1
            if (self.n in self.bad and data not in self.spoilt) or (self.again and data in self.spoilt):
                self.spoilt.add(data)
                data = data[:-1] + b"!"
        return self.inner.put_new(key, data)


@pytest.mark.parametrize("second", ["good", "not kept", "damaged too"])
@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("first", range(1, 6))
def test_c3_what_a_damaged_segment_held_is_stored_again(
    monkeypatch: pytest.MonkeyPatch, first: int, many: int, second: str
) -> None:
    """It held requests, chunks and ends, and good segments follow it. It costs one attempt, and no token."""
    monkeypatch.setattr("recovery.staging.KEPT_NBYTES", 0 if second == "not kept" else 1 << 20)
    store = MemoryStore()
    life = Life(store, 1)
    assert life.stager is not None
    life.stager._store = Rotten(store, first, many, second == "damaged too")  # type: ignore[assignment]
    abandoned = 0
    for steps in (1, 3, 5):
        life.dispatch(steps)
        for _ in range(steps):
            life.decode(1)
            life.flush()
        life.decode(1)
        attempt = life.snapshot()
        if attempt.verdict is Verdict.ABANDONED:
            abandoned += 1
            assert attempt.step == "validate" and "did not read back" in str(attempt.error) and attempt.ended == ()
    life.decode(1)
    for _ in range(1 + many):
        attempt = life.snapshot()
    assert attempt.verdict is Verdict.PUBLISHED and abandoned >= 1
    assert bool(life.fleet.rewound) == (second != "good"), "with its bytes at hand nothing is taken back"
    assert (life.stager.counters.stored_again > 0) == (second != "not kept")
    assert life.coordinator.rejected == {} or second != "good"
    assert not life.stager._kept, "all of it is published"
    again = Life(store, 2)
    assert again.restored.passed_over == [], "it is accounted for, so that no restore looks at it again"
    assert again.chosen_content == life.at_cut
    assert again.run_to_end() == reference_answers()


@pytest.mark.parametrize("k", range(4))
def test_c3_what_was_taken_back_is_told_also_if_the_attempt_then_fails_elsewhere(
    worlds: Callable[..., World], k: int
) -> None:
    world = worlds()
    world.life.stager._store = Rotten(world.inner, 1)  # type: ignore[union-attr]
    reads = iter([PASS] * k + [RaiseBefore(StoreUnavailable("down"))])
    world.store._ask = lambda verb, key: next(reads, PASS) if verb == "get" else PASS  # type: ignore[assignment]
    assert world.take().verdict is Verdict.ABANDONED
    world.take()
    world.goes_on()


def test_records_that_do_not_fit_are_counted_by_reason(worlds: Callable[..., World]) -> None:
    world = worlds()
    stage = world.fleet.stage
    world.fleet.stage = lambda timeout_s: (staged := stage(timeout_s)) + staged  # type: ignore[method-assign]
    assert world.take().verdict is Verdict.PUBLISHED
    rejected = world.life.coordinator.rejected
    assert sum(rejected.values()) > 0 and all(isinstance(reason, str) and reason for reason in rejected)
    world.fleet.stage = stage  # type: ignore[method-assign]
    world.goes_on()


def test_what_was_handed_over_to_a_failed_attempt_is_applied_by_the_next(worlds: Callable[..., World]) -> None:
    """Staged coordinates are given once; an attempt that dies between them and the ledger must not lose them."""
    event, entered = threading.Event(), threading.Event()
    world = worlds(run=UntilItHangs(lambda: entered.is_set() and not event.is_set()))
    calls = iter([PASS, Hang(event, entered)])  # the ledger object
    world.store._ask = lambda verb, key: next(calls, PASS)
    assert world.take(timeout_s=60).verdict is Verdict.ABANDONED
    for _ in range(2):  # each hands over more while the earlier one still hangs
        world.life.decode(1)
        world.life.flush()
        assert world.take(timeout_s=60).verdict is Verdict.ABANDONED
    event.set()
    world.goes_on()
    assert world.life.coordinator.rejected == {}


def test_garbage_that_cannot_be_collected_is_told_and_costs_nothing(worlds: Callable[..., World]) -> None:
    """A bucket that forbids overwriting and deleting."""
    world = worlds()
    refused = RaiseBefore(CredentialsRefused("deleting is not allowed here"))
    world.store._ask = lambda verb, key: refused if verb in ("delete", "put") else PASS
    for _ in range(5):
        world.life.decode(1)
        attempt = world.life.snapshot()
        assert attempt.verdict is Verdict.PUBLISHED and attempt.step == "collect garbage"
        assert isinstance(attempt.error, CredentialsRefused)
    world.goes_on()


# ---- doing things in one thread --------------------------------------------------------------------------------


def test_in_one_thread_gives_results_and_raises_errors() -> None:
    run = InOneThread()
    assert run(lambda: 7, 60) == 7
    for error in (StoreUnavailable("x"), ZeroDivisionError(), KeyboardInterrupt()):

        def fails(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            run(fails, 60)
    assert run(lambda: 8, 60) == 8


@pytest.mark.parametrize("error", [StoreUnavailable("late"), ZeroDivisionError("late")])
def test_a_late_error_is_the_abandoned_attempts_but_a_bug_is_told(error: Exception) -> None:
    run = InOneThread()
    event = threading.Event()

    def late() -> None:
        event.wait()
        raise error

    with pytest.raises(SnapshotAbandoned, match="did not finish"):
        run(late, 0.02)
    with pytest.raises(SnapshotAbandoned, match="still has not returned"):
        run(lambda: None, 0.02)
    event.set()
    if isinstance(error, RecoveryError):
        assert run(lambda: 9, 60) == 9
    else:
        with pytest.raises(ZeroDivisionError, match="late"):
            run(lambda: 9, 60)
        assert run(lambda: 9, 60) == 9
