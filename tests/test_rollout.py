"""recovery.admission.FullyAsyncRollout: generate functions of every kind, holds, updates, close; and schedules by seed.

SCHEDULES sets how many seeds are run (400), SCHEDULE_SEED the first one; a failure names its seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from recovery.admission import FullyAsyncRollout
from recovery.admission.changes import TOLD_AFTER_S
from recovery.admission.holds import AdmissionClosed, HoldKind, Lifecycle, NotHeld
from recovery.admission.leases import Lease
from recovery.admission.limits import CancelledTooOften, CannotClose, Exhausted, TerminalPending, Waiting
from recovery.admission.prefixes import Prefix
from recovery.admission.replay import ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.samples import MalformedSample, Sample
from recovery.admission.updates import DeadlinePassed, EnginesTorn, WaitsForItself
from recovery.config import RolloutConfig
from recovery.errors import ConfigError, InputError
from recovery.model import PolicyVersion
from tests import rollout_worlds, virtual_loop
from tests.fakes import ManualClock, SeededEntropy

DRAIN, CUT = HoldKind.DRAIN, HoldKind.CUT


class Engine:
    """Takes `delay_s`; notes who ran on it."""

    def __init__(self, delay_s: float = 1.0) -> None:
        self.delay_s = delay_s
        self.ran: list[str] = []

    async def generate(self, sample: Sample) -> Sample:
        self.ran.append(sample.request_id)
        await asyncio.sleep(self.delay_s)
        sample.token_ids = [sample.group_index]
        return sample


def rollout(n: int = 8, *, batch: int = 1, samples: int = 1, engines: Any = None, **options: Any) -> FullyAsyncRollout:
    names = RolloutConfig.__struct_fields__
    config = {name: options.pop(name) for name in list(options) if name in names}
    config = {"max_executing_groups": 2, "completed_prefetch_groups": 4, **config}
    source = options.pop("source", None) or ReplaySource(
        IterableRows([{"id": f"p{i}"} for i in range(n)]), samples_per_prompt=samples
    )
    return FullyAsyncRollout(
        source,
        engines or [Engine()],
        RolloutConfig(**config),
        batch_groups=batch,
        clock=ManualClock(),
        entropy=SeededEntropy(1),
        **options,
    )


async def batch_of(one: FullyAsyncRollout, **options: Any) -> Lease:
    got = await one.next_batch(**options)
    assert isinstance(got, Lease), got
    return got


def groups(lease: Lease) -> list[int]:
    return [group[0].group_index for group in lease.groups]


def on_virtual_time(work: Callable[[], Any]) -> Callable[[], None]:
    def test() -> None:
        virtual_loop.run(work())

    test.__name__, test.__doc__ = work.__name__, work.__doc__
    return test


# ---- schedules --------------------------------------------------------------------------------------------------


def test_no_schedule_loses_doubles_or_trains_too_old() -> None:
    """Trainer, evaluator, snapshots and impatient waiters, over up to four process-lives a seed."""
    first, n = int(os.environ.get("SCHEDULE_SEED", "0")), int(os.environ.get("SCHEDULES", "400"))
    for seed in range(first, first + n):
        try:
            virtual_loop.run(rollout_worlds.schedule(seed))
        except BaseException as error:
            error.add_note(f"SCHEDULE_SEED={seed} SCHEDULES=1")
            raise


@pytest.mark.parametrize("on_stale", ["reject", "requeue_pristine"])
def test_a11_what_a_cap_evicts_is_given_up_only_for_its_age(on_stale: str) -> None:
    """No limit: nothing is ever too old, so all are trained once, however often they were evicted."""

    async def main() -> None:
        options = {"max_executing_groups": 4, "completed_prefetch_groups": 8, "async_buffer_max_groups": 1}
        one = rollout(12, on_stale=on_stale, **options)
        one.start()
        trained: list[int] = []
        while not isinstance(got := await one.next_batch(), Exhausted):
            assert isinstance(got, Lease)
            one.commit(got)
            trained += groups(got)
            await asyncio.sleep(2.5)
        assert sorted(trained) == list(range(12))
        found = one.metrics()
        assert found["rollout/fully_async/evicted_overflow_groups"] > 0
        assert found["rollout/fully_async/evicted_stale_groups"] == 0
        await one.close()

    virtual_loop.run(main())


@pytest.mark.parametrize("capacity", [1, 3])
def test_without_a_limit_and_a_hold_it_is_a_queue(capacity: int) -> None:
    """A55: the same order and size as asyncio.Queue fed by the same workers."""

    async def plain(delays: Sequence[float]) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue(len(delays))
        items, seen = iter(range(len(delays))), []

        async def worker() -> None:
            for item in items:
                await asyncio.sleep(delays[item])
                await queue.put(item)

        workers = [asyncio.ensure_future(worker()) for _ in range(capacity)]
        for _ in delays:
            seen.append(await queue.get())
        await asyncio.gather(*workers)
        return seen

    async def ours(delays: Sequence[float]) -> list[int]:
        async def generate(samples: list[Sample], engine: Any) -> list[Sample]:
            await asyncio.sleep(delays[samples[0].group_index])
            return samples

        n, seen = len(delays), []
        one = rollout(n, generate=generate, max_executing_groups=capacity, completed_prefetch_groups=n)
        one.start()
        for _ in delays:
            lease = await batch_of(one)
            seen += groups(lease)
            one.commit(lease)
        assert isinstance(await one.next_batch(), Exhausted)
        await one.close()
        return seen

    for seed in range(20):
        delays = random.Random(seed).sample(range(1, 100), 7)
        assert virtual_loop.run(ours(delays)) == virtual_loop.run(plain(delays)), f"seed {seed}"


# ---- generate functions -----------------------------------------------------------------------------------------


@on_virtual_time
async def test_groups_go_to_the_engine_with_the_fewest_and_siblings_run_together() -> None:
    engines = [Engine(3.0), Engine(1.0)]
    one = rollout(6, samples=2, engines=engines)
    one.start()
    first = await batch_of(one)
    assert groups(first) == [1] and engines[0].ran == ["p0/0", "p0/1"]
    assert [s.request_id for s in first.groups[0]] == ["p1/0", "p1/1"]
    one.commit(first)
    await one.close()


@on_virtual_time
async def test_a_generate_function_may_be_an_object_and_replace_samples() -> None:
    class Agent:
        async def __call__(self, samples: list[Sample], engine: Any) -> list[Sample]:
            await asyncio.sleep(1)
            return [
                Sample(row_id="", group_index=9, sample_index=9, request_id="", row={}, text="new") for _ in samples
            ]

    one = rollout(2, samples=2, generate=Agent())
    one.start()
    lease = await batch_of(one)
    assert [(s.row_id, s.sample_index, s.text) for s in lease.groups[0]] == [("p0", 0, "new"), ("p0", 1, "new")]
    one.roll_back(lease)
    again = await batch_of(one)
    assert groups(again) == [1]
    one.commit(again)
    await one.close()


@on_virtual_time
async def test_m11_what_a_generate_function_raises_is_what_the_trainer_sees() -> None:
    """Its sibling is cancelled and waited for; what had finished is not handed out any more (M10)."""
    ended: list[str] = []

    class Breaks(Engine):
        async def generate(self, sample: Sample) -> Sample:
            try:
                await asyncio.sleep(5 if sample.sample_index else 2)
                if sample.group_index == 1:
                    raise RuntimeError("the reward model is gone")
            finally:
                ended.append(sample.request_id)
            return sample

    one = rollout(3, samples=2, engines=[Breaks()], max_executing_groups=3)
    one.start()
    hold = one.acquire(DRAIN, "evaluation", "")
    with pytest.raises(RuntimeError, match="reward"):
        await one.wait_terminal(hold)
    assert "p1/1" in ended
    with pytest.raises(RuntimeError, match="reward"):
        await one.next_batch()
    await one.close()
    assert one.ownership.slots.used == 0


@on_virtual_time
async def test_what_is_no_group_is_a_failure() -> None:
    async def generate(samples: list[Sample], engine: Any) -> Any:
        return samples[:1]

    one = rollout(3, samples=2, generate=generate)
    one.start()
    with pytest.raises(MalformedSample, match="2 samples, and 1"):
        await one.next_batch()
    await one.close()


@on_virtual_time
async def test_a_generate_function_that_is_cancelled_is_tried_again_and_not_for_ever() -> None:
    tries: list[str] = []

    async def generate(samples: list[Sample], engine: Any) -> list[Sample]:
        tries.append(samples[0].request_id)
        await asyncio.sleep(1)
        if (samples[0].group_index == 0 and len(tries) < 4) or samples[0].group_index == 1:
            raise asyncio.CancelledError
        return samples

    one = rollout(2, generate=generate, max_executing_groups=1)
    one.start()
    lease = await batch_of(one)
    assert tries[:4] == ["p0/0", "p0/0.1", "p0/0.2", "p0/0.3"], "V18: a new draw has new request ids"
    assert one.metrics()["fully_async/count/aborted_requeued"] == 3
    one.commit(lease)
    with pytest.raises(CancelledTooOften, match="p1"):
        await one.next_batch()
    await one.close()


def test_a50_a_sync_function_runs_in_a_thread_and_keeps_its_slot_until_it_returns() -> None:
    async def main() -> None:
        release, began = threading.Event(), threading.Event()

        def generate(samples: list[Sample], engine: Any) -> list[Sample]:
            assert threading.current_thread() is not threading.main_thread()
            began.set()
            assert release.wait(240)
            return samples

        one = rollout(1, generate=generate)
        one.start()
        await asyncio.to_thread(began.wait, 60)
        with pytest.raises(TerminalPending, match="p0"):
            await one.close(timeout_s=0.01)
        assert one.ownership.slots.used == 1
        with pytest.raises(AdmissionClosed):
            one.acquire(DRAIN, "evaluation", "")
        release.set()
        await one.close(timeout_s=60)
        assert one.ownership.slots.used == 0

    asyncio.run(main())


def test_a_sync_function_may_return_an_awaitable_or_the_group() -> None:
    async def main() -> None:
        async def later(samples: list[Sample]) -> list[Sample]:
            return samples

        def generate(samples: list[Sample], engine: Any) -> Any:
            return later(samples) if samples[0].group_index else samples

        one = rollout(2, generate=generate, batch=2)
        one.start()
        lease = await batch_of(one, timeout_s=60)
        assert sorted(groups(lease)) == [0, 1]
        one.commit(lease)
        await one.close(timeout_s=60)

    asyncio.run(main())


@on_virtual_time
async def test_a_source_that_raises_is_told_to_everybody() -> None:
    def process(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "p1":
            raise OSError("the template is gone")
        return row

    source = ReplaySource(IterableRows([{"id": f"p{i}"} for i in range(3)], process), samples_per_prompt=1)
    one = rollout(source=source)
    one.start()
    with pytest.raises(InputError, match=r"row 1: .*template") as told:
        await one.next_batch()
    assert isinstance(told.value.__cause__, OSError)
    await one.close()


# ---- holds ------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_a18_m1_m2_a_waiter_that_is_cancelled_or_late_changes_nothing() -> None:
    one = rollout(8, batch=2, engines=[Engine(5.0)])
    one.start()
    hold = one.acquire(DRAIN, "evaluation", "")
    waiter = asyncio.ensure_future(one.wait_terminal(hold))
    await asyncio.sleep(1)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert await one.wait_terminal(hold, timeout_s=1.0) is False and hold in one.ownership.gate.active
    assert await one.wait_terminal(hold) is True
    got = await one.next_batch(timeout_s=1.0)
    assert isinstance(got, Waiting) and "held by evaluation" in got.reason, "A28"
    assert len(one.ownership.finished) == 2, "A18: nothing was consumed"
    one.release(hold)
    one.commit(await batch_of(one))
    with pytest.raises(NotHeld):
        one.release(hold)
    await one.close()
    one.release(hold)


@on_virtual_time
async def test_a24_m3_a_hold_is_released_when_its_block_is_cancelled() -> None:
    one = rollout(8, engines=[Engine(5.0)])
    one.start()

    async def evaluates() -> None:
        async with one.updates.evaluation():
            raise AssertionError("never reached")

    task = asyncio.ensure_future(evaluates())
    await asyncio.sleep(1)
    assert [hold.owner for hold in one.ownership.gate.active] == ["evaluation"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert one.ownership.gate.active == () and one.ownership.fence.may_close
    await one.close()


@on_virtual_time
async def test_m8_two_holds_and_the_epoch() -> None:
    one = rollout(4)
    one.start()
    async with one.holding(DRAIN, "evaluation", ""):
        async with one.holding(CUT, "snapshot", ""):
            assert not one.ownership.gate.open
        assert not one.ownership.gate.open and one.metrics()["rollout/fully_async/holds_active"] == 1
    assert one.ownership.gate.open
    await one.close()


# ---- weight updates ---------------------------------------------------------------------------------------------


async def nothing(target: PolicyVersion) -> None:
    await asyncio.sleep(1)


@on_virtual_time
async def test_a59_a60_hooks_push_and_version_in_order() -> None:
    one = rollout(4)
    one.start()
    said: list[str] = []

    async def push(target: PolicyVersion) -> None:
        assert not one._tasks and one.version.number == target.number - 1
        assert "held" in one.ownership.refusal() and isinstance(one.ownership.lease(1), Waiting), "A62: nobody comes in"
        said.append(f"push {target.number}")

    async def before(target: PolicyVersion) -> None:
        said.append(f"before {target.number}")

    async def after(target: PolicyVersion, ok: bool) -> None:
        said.append(f"after {target.number} {ok} at {one.version.number}")

    for n in (1, 2):
        assert await one.updates.update(push, before=before, after=after) == PolicyVersion("a", n)
    assert said == ["before 1", "push 1", "after 1 True at 0", "before 2", "push 2", "after 2 True at 1"]
    assert one.ownership.gate.open
    await one.close()


@on_virtual_time
async def test_a26_a63_m30_a_failed_push_stays_held_and_torn_until_an_update_succeeds() -> None:
    one = rollout(4)
    one.start()
    hooks: list[bool] = []

    async def fails(target: PolicyVersion) -> None:
        raise OSError("shard 3 did not answer")

    async def after(target: PolicyVersion, ok: bool) -> None:
        hooks.append(ok)
        raise RuntimeError("and the hook too")

    with pytest.raises(OSError, match="shard 3") as raised:
        await one.updates.update(fails, after=after)
    assert "the hook too" in raised.value.__notes__[0] and hooks == [False], "A38"
    assert one.version.number == 0 and len(one.ownership.gate.active) == 1
    with pytest.raises(EnginesTorn):
        async with one.updates.evaluation():
            raise AssertionError("never reached")
    assert isinstance(await one.next_batch(timeout_s=1.0), Waiting)
    with pytest.raises(OSError):
        await one.updates.update(fails)
    assert len(one.ownership.gate.active) == 1, "still the one hold"
    assert await one.updates.update(nothing, again=True) == PolicyVersion("a", 0)
    assert one.ownership.gate.open and one.ownership.refusal() in ("", "enough groups are executing")
    assert await one.updates.update(nothing) == PolicyVersion("a", 1)
    await one.close()


@on_virtual_time
async def test_a64_m31_a_hook_or_a_record_that_fails_publishes_nothing() -> None:
    one = rollout(4)
    one.start()

    async def after(target: PolicyVersion, ok: bool) -> None:
        raise RuntimeError("the hook")

    async def releases(target: PolicyVersion) -> None:
        one.release(one.ownership.gate.active[0])

    with pytest.raises(RuntimeError, match="hook"):
        await one.updates.update(nothing, after=after)
    assert one.version.number == 0 and one.ownership.versions.torn
    with pytest.raises(NotHeld):
        await one.updates.update(releases)
    assert one.version.number == 0 and one.ownership.versions.torn and "torn" in one.ownership.refusal()
    await one.updates.update(nothing)
    assert one.version.number == 1 and one.ownership.gate.open
    await one.close()


@on_virtual_time
async def test_a_hook_before_the_push_that_fails_has_torn_nothing() -> None:
    one = rollout(4)
    one.start()

    async def before(target: PolicyVersion) -> None:
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"):
        await one.updates.update(nothing, before=before)
    assert not one.ownership.versions.torn and one.ownership.gate.open
    await one.close()


@on_virtual_time
async def test_a27_one_fence_for_updates_evaluations_and_close() -> None:
    one = rollout(8)
    one.start()
    order: list[str] = []

    async def slow(target: PolicyVersion) -> None:
        order.append("update begins")
        await asyncio.sleep(10)
        order.append("update ends")

    async def evaluates(name: str) -> None:
        async with one.updates.evaluation():
            order.append(f"{name} begins")
            await asyncio.sleep(2)
            order.append(f"{name} ends")

    update = asyncio.ensure_future(one.updates.update(slow))
    await asyncio.sleep(3)
    with pytest.raises(CannotClose, match="weight update"):
        await one.close()
    with pytest.raises(Exception, match="weight update"):
        one.updates.hold_for_cut("interval")
    with pytest.raises(DeadlinePassed, match="weight update"):
        async with one.updates.evaluation(timeout_s=1.0):
            raise AssertionError("never reached")
    both = [asyncio.ensure_future(evaluates(name)) for name in ("one", "two")]
    await asyncio.gather(update, *both)
    assert order == ["update begins", "update ends", "one begins", "two begins", "one ends", "two ends"]
    evaluation = asyncio.ensure_future(evaluates("three"))
    await asyncio.sleep(1.5)
    with pytest.raises(DeadlinePassed):
        await one.updates.update(nothing, timeout_s=0.1)
    assert [hold.owner for hold in one.ownership.gate.active] == ["evaluation"]
    await evaluation
    await one.close()


@on_virtual_time
async def test_an_update_that_is_not_drained_in_time_holds_nothing() -> None:
    one = rollout(8, engines=[Engine(50.0)])
    one.start()
    with pytest.raises(DeadlinePassed, match="executing"):
        await one.updates.update(nothing, timeout_s=2.0)
    assert one.ownership.gate.open and not one.ownership.versions.torn and one.ownership.fence.may_close
    await one.close()


# ---- close ------------------------------------------------------------------------------------------------------


@on_virtual_time
async def test_a46_m24_m25_close_wakes_waiters_and_names_open_leases() -> None:
    one = rollout(8, batch=2, max_executing_groups=2)
    one.start()
    lease = await batch_of(one, rollout=7)
    waiter = asyncio.ensure_future(one.next_batch())
    held = asyncio.ensure_future(one.wait_terminal(one.acquire(DRAIN, "evaluation", "")))
    await asyncio.sleep(0)
    with pytest.raises(CannotClose, match="7"):
        await one.close()
    for task in (waiter, held):
        with pytest.raises(AdmissionClosed):
            await task
    one.commit(lease)
    await one.close()
    await one.close()
    assert one.ownership.slots.used == 0


@on_virtual_time
async def test_a49_cancelling_who_closes_does_not_cancel_the_close() -> None:
    class Stubborn(Engine):
        async def generate(self, sample: Sample) -> Sample:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(5)
                raise
            return sample

    one = rollout(4, engines=[Stubborn()])
    one.start()
    await asyncio.sleep(1)
    closing = asyncio.ensure_future(one.close())
    await asyncio.sleep(1)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert one.ownership.slots.used == 2, "A50: not proven yet"
    await asyncio.sleep(10)
    assert one.ownership.slots.used == 0 and one.ownership.gate.lifecycle is Lifecycle.CLOSED
    await one.close()


# ---- prefixes ---------------------------------------------------------------------------------------------------


def three_updates(one: FullyAsyncRollout) -> None:
    """As if three versions had been published before anything was begun."""
    for _ in range(3):
        one.ownership.versions.begin(one.ownership.versions.next)
        one.ownership.versions.succeed()


class Saved:
    """Prefixes by request id, and what was forgotten."""

    saved = False

    def __init__(self, **found: Prefix) -> None:
        self.found = {name.replace("_", "/"): prefix for name, prefix in found.items()}
        self.forgotten: list[str] = []

    def of(self, request_id: str) -> Prefix | None:
        return self.found.get(request_id)

    def known(self) -> Sequence[str]:
        return tuple(self.found)

    def forget(self, request_ids: Sequence[str]) -> None:
        self.forgotten += request_ids


@on_virtual_time
async def test_v12_v17_v18_a_prefix_that_is_too_old_sends_its_whole_group_to_a_new_draw() -> None:
    old = Prefix(30, frozenset({PolicyVersion("a", 0)}))
    young = Prefix(20, frozenset({PolicyVersion("a", 3)}))
    saved, engine = Saved(p0_0=old, p0_1=young, p1_1=young), Engine()
    one = rollout(2, samples=2, engines=[engine], prefixes=saved, max_policy_version_lag=2)
    three_updates(one)
    one.start()
    for _ in range(2):
        one.commit(await batch_of(one))
    assert sorted(engine.ran) == ["p0/0.1", "p0/1.1", "p1/0", "p1/1"] and saved.forgotten[:2] == ["p0/0", "p0/1"]
    assert set(saved.forgotten) == {"p0/0", "p0/1", *engine.ran}, "whatever is settled is forgotten"
    counted = one.metrics()
    assert counted["rollout/fully_async/tokens_reused"] == 20
    assert counted["rollout/fully_async/tokens_regenerated"] == 50
    assert counted["fully_async/count/stale_rejected"] == counted["fully_async/count/stale_requeued"] == 1
    await one.close()


@on_virtual_time
async def test_v18_a_restore_forgets_what_is_saved_of_trained_groups_and_old_draws() -> None:
    before = rollout(4, samples=1, max_executing_groups=1, completed_prefetch_groups=1)
    before.start()
    before.commit(await batch_of(before))
    before.roll_back(await batch_of(before))
    states = before.state.states()
    await before.close()
    some = Prefix(5, frozenset({PolicyVersion("a", 0)}))
    saved = Saved(p0_0=some, p1_0=some, **{"p1_0.1": some, "p1_0.2": some}, p2_0=some, p3_0=some, evaluation=some)
    after = rollout(4, samples=1, prefixes=saved)
    after.restore(states, rollout=1, version=0, lineage="b")
    assert saved.forgotten == ["p0/0", "p1/0"], "no draw that may come, nothing of others"
    await after.close()


@on_virtual_time
async def test_v17_siblings_of_a_stale_prefix_go_on_if_one_may() -> None:
    old, young = (Prefix(30, frozenset({PolicyVersion("a", number)})) for number in (0, 3))
    saved, engine = Saved(p0_0=old, p0_1=young, p1_0=old, p1_1=old), Engine()
    one = rollout(2, samples=2, engines=[engine], prefixes=saved, max_policy_version_lag=2, stale_granularity="sibling")
    three_updates(one)
    one.start()
    for _ in range(2):
        one.commit(await batch_of(one))
    assert sorted(engine.ran) == ["p0/0", "p0/1", "p1/0.1", "p1/1.1"], "all siblings stale: drawn anew"
    await one.close()


@on_virtual_time
async def test_pin_weights_sends_a_prefix_to_the_engine_that_stays_at_its_version() -> None:
    def versioned(number: int) -> Prefix:
        return Prefix(10, frozenset({PolicyVersion("a", number)}))

    pinned, following = Engine(), Engine()
    pinned.pinned = PolicyVersion("a", 1)  # type: ignore[attr-defined]
    saved = Saved(p0_0=versioned(1), p1_0=versioned(2), p2_0=versioned(3))
    one = rollout(4, engines=[pinned, following], prefixes=saved, on_stale="pin_weights", max_executing_groups=4)
    three_updates(one)
    one.start()
    for _ in range(4):
        one.commit(await batch_of(one))
    assert pinned.ran == ["p0/0"], "only what it alone can go on with"
    assert sorted(following.ran) == ["p1/0.1", "p2/0", "p3/0"], "one of no engine's version is drawn anew"
    await one.close()
    with pytest.raises(ConfigError, match="follows the weight updates"):
        rollout(1, engines=[pinned])


@on_virtual_time
async def test_a_prefix_is_given_up_where_the_policy_rejects() -> None:
    saved = Saved(p0_0=Prefix(3, frozenset({PolicyVersion("z", 0)})))
    one = rollout(2, prefixes=saved, max_policy_version_lag=2, on_stale="reject")
    one.start()
    assert groups(await batch_of(one)) == [1] and saved.forgotten == ["p0/0"]


# ---- mistakes that are told at once -------------------------------------------------------------------------------


@on_virtual_time
async def test_a28_who_waits_is_told_whose_hold_it_is_and_that_nothing_was_started() -> None:
    one = rollout(8)
    got = await one.next_batch(timeout_s=1.0)
    assert got == Waiting("nothing is generated: start() was not called")
    one.start()
    hold = one.acquire(DRAIN, "evaluation", "every 100 steps")
    one._clock.utc_now += 90  # type: ignore[attr-defined]
    got = await one.next_batch(timeout_s=1.0)
    assert got == Waiting("held by evaluation (every 100 steps) for 90 s", (hold,))
    short = one.acquire(CUT, "snapshot", "interval")
    waiter = asyncio.ensure_future(one.next_batch())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        await asyncio.sleep(TOLD_AFTER_S - 1)
        one.release(short)
        await asyncio.sleep(TOLD_AFTER_S - 1)
        assert told == [], "it has not waited for the same so long"
        await asyncio.sleep(10 * TOLD_AFTER_S)
    (warning,) = told
    assert str(warning.message) == "next_batch has waited for 60 s: held by evaluation (every 100 steps) for 90 s"
    one.release(hold)
    lease = await waiter
    assert isinstance(lease, Lease)
    one.commit(lease)
    await one.close()


@on_virtual_time
async def test_a27_a_task_that_would_wait_for_its_own_end_is_refused() -> None:
    one = rollout(8)
    one.start()

    async def push(target: PolicyVersion) -> None: ...

    async def pushes_and_evaluates(target: PolicyVersion) -> None:
        async with one.updates.evaluation():
            raise AssertionError("it was let in")

    async with one.updates.evaluation("judge"):
        with pytest.raises(WaitsForItself, match="waits for a weight update inside the evaluation of judge"):
            await one.updates.update(push)
        async with one.updates.evaluation("another"):  # nobody waits for that
            other = asyncio.ensure_future(one.updates.update(push))
            await asyncio.sleep(1)
            assert not other.done(), "another task waits"
    assert (await other).number == 1
    with pytest.raises(WaitsForItself, match="evaluation inside the weight update of weight_update"):
        await one.updates.update(pushes_and_evaluates)
    assert (await one.updates.update(push)).number == 2
    await one.close()


@on_virtual_time
async def test_a_push_or_a_hook_that_cannot_be_awaited_is_named() -> None:
    one = rollout(8)
    one.start()
    pushed: list[int] = []

    async def push(target: PolicyVersion) -> None:
        pushed.append(target.number)

    with pytest.raises(ConfigError, match="before returned nothing, which cannot be awaited") as caught:
        await one.updates.update(push, before=lambda version: None)  # type: ignore[arg-type, return-value]
    assert caught.value.hint == "write it as `async def before(...)`" and pushed == [] and not one.ownership.gate.active
    with pytest.raises(ConfigError, match="push returned a list, which cannot be awaited"):
        await one.updates.update(lambda version: [version])  # type: ignore[arg-type, return-value]
    assert one.ownership.versions.torn and one.ownership.gate.active, "what it did to the weights is not known"
    assert (await one.updates.update(push)).number == 1 and pushed == [1]
    await one.close()


def test_an_engine_that_makes_no_samples_is_refused_when_the_rollout_is_made() -> None:
    class Stream:
        async def generate(self, prompt: str) -> AsyncIterator[str]:
            yield prompt

    with pytest.raises(ConfigError, match=r"engines\[1\], a object, makes no samples: generate\(sample\) is missing"):
        rollout(engines=[Engine(), object()])
    with pytest.raises(ConfigError, match=r"engines\[0\], a Stream, .* is a stream of outputs") as caught:
        rollout(engines=[Stream()])
    assert "RolloutEngine" in caught.value.hint

    async def own(samples: list[Sample], engine: Any) -> list[Sample]:
        return samples

    rollout(engines=[object()], generate=own)


@on_virtual_time
async def test_a_rollout_that_is_in_no_snapshot_of_its_store_does_not_start() -> None:
    saved = Saved()
    saved.saved = True
    one = rollout(2, prefixes=saved)
    with pytest.raises(ConfigError, match="takes snapshots without this rollout") as caught:
        one.start()
    assert "session.participants.add(rollout.participant)" in caught.value.hint
    one.participant.attach({})
    one.start()
    await one.close()


@on_virtual_time
async def test_a58_the_limit_is_looked_at_when_a_lease_is_issued_and_not_after_that() -> None:
    """Of two leases that are open over an update the second is trained one update later; a new one is not."""
    one = rollout(4, max_policy_version_lag=0)
    one.start()
    first, second = await batch_of(one), await batch_of(one)

    async def push(target: PolicyVersion) -> None:
        pass

    one.commit(first)
    await one.updates.update(push)
    one.commit(second)
    assert (second.version.number, one.version.number) == (0, 1)
    third = await batch_of(one)
    assert third.version == one.version
    one.commit(third)
    await one.close()
