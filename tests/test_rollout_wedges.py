"""What a rollout must not hang on: odd generate functions, listeners that raise, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from recovery.admission import state
from recovery.admission.exclusion import Work
from recovery.admission.holds import HoldKind, Lifecycle
from recovery.admission.limits import CannotClose, Exhausted, TerminalPending, VersionNotServed
from recovery.admission.preparation import LeasesOpen, TrainerUnresolved
from recovery.admission.replay import ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.samples import Sample
from recovery.admission.trainer import Acknowledgement, Outcome
from recovery.admission.training import train_all
from recovery.admission.unserved import DRAWS_MAX
from recovery.errors import ConfigError, Fenced, ProgramError, SnapshotAbandoned
from recovery.model import PolicyVersion
from tests.admission_doubles import SourceDown
from tests.test_rollout import Engine, batch_of, groups, nothing, on_virtual_time, rollout

PATIENCE_S = 120.0


# ---- generate functions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async", "an awaitable"])
@pytest.mark.parametrize(
    "error", [StopIteration("end"), StopAsyncIteration("end"), KeyError("reward"), GeneratorExit()]
)
def test_m11_whatever_a_generate_function_raises_is_told_and_close_gets_through(
    kind: str, error: BaseException
) -> None:
    """A StopIteration cannot be set on a future, nor raised by a task: it comes as the cause of a RuntimeError."""

    def sync(samples: list[Sample], engine: Any) -> Any:
        raise error

    async def raises(samples: list[Sample], engine: Any) -> Any:
        raise error

    def later(samples: list[Sample], engine: Any) -> Any:
        return raises(samples, engine)

    async def main() -> None:
        one = rollout(2, generate={"sync": sync, "async": raises, "an awaitable": later}[kind])
        one.start()
        with pytest.raises((RuntimeError, type(error))) as told:
            await one.next_batch(timeout_s=PATIENCE_S)
        assert told.value is error or told.value.__cause__ is error
        await one.close(timeout_s=PATIENCE_S)
        assert one.ownership.slots.used == 0

    asyncio.run(main())


def test_sync_functions_that_wait_for_the_loop_do_not_use_up_its_threads() -> None:
    """All of them at once wait for an engine that needs a thread of the loop's own pool."""
    executing = 40  # more than the default pool has, on any machine: at most 32

    async def main() -> None:
        loop = asyncio.get_running_loop()
        together = threading.Barrier(executing)

        class Threaded(Engine):
            async def generate(self, sample: Sample) -> Sample:
                return await asyncio.to_thread(lambda: sample)

        def generate(samples: list[Sample], engine: Any) -> list[Sample]:
            together.wait(PATIENCE_S)
            return [asyncio.run_coroutine_threadsafe(engine.generate(one), loop).result(PATIENCE_S) for one in samples]

        one = rollout(
            executing,
            batch=executing,
            generate=generate,
            engines=[Threaded()],
            max_executing_groups=executing,
            completed_prefetch_groups=executing,
        )
        one.start()
        lease = await batch_of(one, timeout_s=PATIENCE_S)
        assert len(lease.groups) == executing
        one.commit(lease)
        await one.close(timeout_s=PATIENCE_S)

    asyncio.run(main())


# ---- updates and evaluations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [True, False])
def test_a59_a26_an_update_of_which_nobody_could_be_told_publishes_nothing_and_the_next_one_goes_on(
    again: bool,
) -> None:
    told: list[PolicyVersion] = []

    def on_version(version: PolicyVersion) -> None:
        told.append(version)
        if len(told) == 1:
            raise OSError("the metrics server is down")

    @on_virtual_time
    async def main() -> None:
        one = rollout(4, on_version=on_version)
        one.start()
        before = one.version
        with pytest.raises(OSError, match="metrics"):
            await one.updates.update(nothing)
        assert one.version == before and one.ownership.versions.torn and len(one.ownership.gate.active) == 1
        got = await one.updates.update(nothing, again=again)
        assert got.number == before.number + (not again) and told[-1] == got == one.version
        assert one.ownership.gate.open
        for _ in range(2):
            await one.updates.update(nothing)
        one.commit(await batch_of(one))
        await one.close()

    main()


async def _for_ever(work: Callable[[], Any]) -> None:
    while True:
        await work()


@pytest.mark.parametrize("kind", list(Work)[:2])
def test_a27_who_comes_again_at_once_starves_nobody(kind: Work) -> None:
    """An evaluator that re-enters at once against an update, and two trainers against an evaluation."""

    @on_virtual_time
    async def main() -> None:
        one = rollout(8)
        one.start()

        async def evaluate() -> None:
            async with one.updates.evaluation():
                await asyncio.sleep(1)

        async def update() -> None:
            await one.updates.update(lambda version: asyncio.sleep(1))

        greedy, patient = (evaluate, update) if kind is Work.EVALUATION else (update, evaluate)
        others = [asyncio.ensure_future(_for_ever(greedy)) for _ in range(2)]
        await asyncio.sleep(0.5)
        for _ in range(3):
            await asyncio.wait_for(patient(), 30)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await one.close()

    main()


@on_virtual_time
async def test_a27_what_is_started_inside_an_evaluation_does_not_wait_behind_who_waits_for_it() -> None:
    one = rollout(4)
    one.start()

    async def part() -> None:
        async with one.updates.evaluation("part"):
            await asyncio.sleep(1)

    async with one.updates.evaluation():
        update = asyncio.ensure_future(one.updates.update(nothing))
        await asyncio.sleep(1)
        await asyncio.gather(part(), part())
        await part()
        assert not update.done()
    assert (await update).number == 1
    await one.close()


async def _entered(one: Any) -> None:
    async with one.updates.evaluation("later"):
        pass


@on_virtual_time
async def test_a18_who_gives_up_its_place_lets_those_behind_it_in() -> None:
    one = rollout(4)
    one.start()
    async with one.updates.evaluation():
        update = asyncio.ensure_future(one.updates.update(nothing))
        await asyncio.sleep(1)
        later = asyncio.get_running_loop().create_task(_entered(one), context=contextvars.Context())
        await asyncio.sleep(1)
        assert not later.done()
        update.cancel()
        await asyncio.wait_for(later, 10)
    assert one.version.number == 0 and groups(await batch_of(one))
    one.roll_back(one.ownership.leases.open[0])
    await one.close()


# ---- the loop, and closing --------------------------------------------------------------------------------------


def test_a4_every_verb_is_refused_off_the_loop_with_nothing_changed() -> None:
    async def main() -> None:
        one = rollout(6, engines=[Engine(0.0)])
        one.start()
        lease = await batch_of(one, timeout_s=PATIENCE_S)
        hold = one.acquire(HoldKind.DRAIN, "evaluation", "")
        before = (one.ownership.slots.used, one.ownership.gate.epoch, one.ownership.leases.open)
        verbs = (
            lambda: one.commit(lease),
            lambda: one.roll_back(lease),
            lambda: one.release(hold),
            lambda: one.acquire(HoldKind.DRAIN, "other", ""),
            lambda: one.checkpoint_saved(1),
            one.reconcile,
            one.start,
        )
        for verb in verbs:
            with pytest.raises(ProgramError, match="no event loop"):
                await asyncio.to_thread(verb)
            with pytest.raises(ProgramError, match="another event loop"):
                await asyncio.to_thread(lambda verb=verb: asyncio.run(_calls(verb)))  # type: ignore[misc]
        for coroutine in (one.next_batch, one.close):
            with pytest.raises(ProgramError, match="another event loop"):
                await asyncio.to_thread(lambda made=coroutine: asyncio.run(made()))  # type: ignore[misc]
        assert before == (one.ownership.slots.used, one.ownership.gate.epoch, one.ownership.leases.open)
        one.release(hold)
        one.commit(lease)
        seen = set(groups(lease))
        while not isinstance(got := await one.next_batch(timeout_s=PATIENCE_S), Exhausted):
            assert not hasattr(got, "reason")
            one.commit(got)
            seen |= set(groups(got))
        assert seen == set(range(6)), "nothing is left behind without a task"
        await one.close(timeout_s=PATIENCE_S)

    asyncio.run(main())


async def _calls(verb: Callable[[], Any]) -> None:
    verb()


def test_a_start_without_a_loop_is_refused_and_may_be_made_again_on_one() -> None:
    one = rollout(2, engines=[Engine(0.0)])
    with pytest.raises(ProgramError, match="start"):
        one.start()

    async def main() -> None:
        one.start()
        for group in range(2):
            lease = await batch_of(one, timeout_s=PATIENCE_S)
            assert groups(lease) == [group]
            one.commit(lease)
        await one.close(timeout_s=PATIENCE_S)

    asyncio.run(main())


@on_virtual_time
async def test_a48_what_cannot_begin_is_given_back_and_close_leaves_nothing_owned() -> None:
    """The store of prefixes fails while a group is being begun: it is owned, and no task of it runs."""

    class Broken:
        saved = True

        def of(self, request_id: str) -> Any:
            raise OSError("the store of prefixes")

        def known(self) -> Any:
            return []

        def forget(self, request_ids: Any) -> None:
            pass

    one = rollout(3, prefixes=Broken())
    one.participant.attached = True
    one.start()
    with pytest.raises(OSError, match="prefixes"):
        await one.next_batch()
    assert one.ownership.slots.used == 0
    await one.close()
    assert one.ownership.gate.lifecycle is Lifecycle.CLOSED


@on_virtual_time
async def test_a48_close_does_not_say_that_it_is_done_while_something_is_owned() -> None:
    one = rollout(3)
    one.start()
    task = one.running[0]
    lost = one._tasks.pop(next(iter(one._tasks)))  # a task that nobody knows of, as no step of ours leaves it
    one.acquire(HoldKind.DRAIN, "evaluation", "")
    lost[0].remove_done_callback(lost[0]._callbacks[0][0])  # type: ignore[attr-defined]
    task.cancel()
    with pytest.raises(TerminalPending, match=r"p0 \(executing\)"):
        await one.close()
    assert one.ownership.gate.lifecycle is Lifecycle.CLOSING


def test_a50_a_close_with_a_deadline_has_it_whoever_closed_before_without_one() -> None:
    async def main() -> None:
        release, began = threading.Event(), threading.Event()

        def generate(samples: list[Sample], engine: Any) -> list[Sample]:
            began.set()
            assert release.wait(PATIENCE_S)
            return samples

        one = rollout(1, generate=generate)
        one.start()
        await asyncio.to_thread(began.wait, PATIENCE_S)
        first = asyncio.ensure_future(one.close())
        await asyncio.sleep(0)
        first.cancel()
        for _ in range(2):
            with pytest.raises(TerminalPending, match="p0"):
                await one.close(timeout_s=0.01)
        release.set()
        await one.close(timeout_s=PATIENCE_S)
        assert one.ownership.gate.lifecycle is Lifecycle.CLOSED
        await one.close(timeout_s=0.0)

    asyncio.run(main())


@on_virtual_time
async def test_m24_a_close_that_an_open_lease_refused_has_closed_admission_and_goes_on_when_it_is_settled() -> None:
    one = rollout(4)
    one.start()
    lease = await batch_of(one)
    with pytest.raises(CannotClose, match="1"):
        await one.close()
    assert one.ownership.gate.lifecycle is Lifecycle.CLOSING and one.ownership.refusal() == "closed"
    one.roll_back(lease)
    await one.close()


# ---- checkpoints ------------------------------------------------------------------------------------------------


class Snapshots:
    """What a session does: takes a snapshot when it was asked for one, gives some up, and stops."""

    def __init__(self, one: Any, *, given_up: int = 0, takes_s: float = 1.0) -> None:
        self.one, self.given_up, self.takes_s = one, given_up, takes_s
        self.asked = self.taken = 0
        self.failure: Exception | None = None
        self._task: asyncio.Future[None] | None = None
        one.participant.attach({})

    def want(self, cause: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.asked += 1
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._take())

    async def _take(self) -> None:
        part = self.one.participant
        await asyncio.sleep(self.takes_s)
        published = False
        try:
            part.hold("checkpoint")
            part.states()
            published = self.failure is None and self.taken >= self.given_up
            self.taken += 1
        except SnapshotAbandoned:
            pass
        part.resume(published)
        part.release()


async def _one_committed() -> Any:
    one = rollout(6)
    one.start()
    one.commit(await batch_of(one))
    return one


@on_virtual_time
async def test_a42_a_snapshot_that_was_given_up_is_asked_for_again() -> None:
    one = await _one_committed()
    snapshots = Snapshots(one, given_up=2)
    update = asyncio.ensure_future(one.updates.update(lambda version: asyncio.sleep(5)))
    await asyncio.sleep(0)
    assert await one.prepare_checkpoint(1, snapshots.want)
    assert snapshots.taken == 3 and snapshots.asked > 3, "some were refused because of the update"
    await update
    one.checkpoint_saved(1)
    await one.close()


@on_virtual_time
async def test_a_waiter_is_told_at_once_of_a_stop_that_the_participant_was_told_of() -> None:
    one = await _one_committed()
    snapshots = Snapshots(one, takes_s=5.0)
    waiters = [asyncio.ensure_future(one.prepare_checkpoint(1, snapshots.want)) for _ in range(2)]
    await asyncio.sleep(1)
    one.participant.stopped(Fenced("another process claimed the store", hint=""))
    for waiter in waiters:
        with pytest.raises(Fenced):
            await asyncio.wait_for(waiter, 1.0)
    assert snapshots._task is not None
    await snapshots._task
    await one.close()


@on_virtual_time
async def test_a_waiter_learns_that_the_process_was_fenced_however_little_is_heard() -> None:
    one = await _one_committed()
    snapshots = Snapshots(one, takes_s=1e9)
    waiter = asyncio.ensure_future(one.prepare_checkpoint(1, snapshots.want))
    await asyncio.sleep(1)
    snapshots.failure = Fenced("another process claimed the store", hint="")
    with pytest.raises(Fenced):
        await waiter
    assert snapshots._task is not None
    snapshots._task.cancel()
    await one.close()


@on_virtual_time
async def test_a39_two_waiters_do_not_disturb_each_other() -> None:
    one = await _one_committed()
    snapshots = Snapshots(one, takes_s=3.0)
    late = asyncio.ensure_future(one.prepare_checkpoint(1, snapshots.want, timeout_s=1.0))
    patient = asyncio.ensure_future(one.prepare_checkpoint(1, snapshots.want, timeout_s=30.0))
    assert await late is False and await patient is True
    lease = await batch_of(one)
    both = [asyncio.ensure_future(one.prepare_checkpoint(2, snapshots.want)) for _ in range(2)]
    for waiter in both:
        with pytest.raises(LeasesOpen):  # each is told
            await waiter
    one.commit(lease)
    assert await one.prepare_checkpoint(2, snapshots.want)
    assert not one.participant.waits.any
    await one.close()


@on_virtual_time
async def test_a40_m18_a_commit_that_the_source_refused_once_keeps_no_checkpoint_from_being_prepared() -> None:
    class Once(ReplaySource):
        down = True

        def acknowledge(self, attempts: Any, rollout: int) -> None:
            if self.down:
                self.down = False
                raise SourceDown("acknowledge")
            super().acknowledge(attempts, rollout)

    one = rollout(source=Once(IterableRows([{"id": f"p{i}"} for i in range(3)]), samples_per_prompt=1))
    snapshots = Snapshots(one)
    one.start()
    trainer, member = one.trainer_admission(), ("actor", 0)
    lease = await batch_of(one)
    publication = trainer.publish(lease, lease.rollout, ["d"], [member])
    with pytest.raises(SourceDown):
        trainer.commit(publication, [Acknowledgement(publication, member)])
    one.commit(again := await batch_of(one))
    with pytest.raises(TrainerUnresolved, match="roll it back"):
        await one.prepare_checkpoint(again.rollout, snapshots.want)
    trainer.roll_back(publication)
    assert trainer.status(publication) is Outcome.ROLLED_BACK
    assert await one.prepare_checkpoint(again.rollout, snapshots.want)
    seen = groups(again)
    while not isinstance(got := await one.next_batch(), Exhausted):
        one.commit(got)  # type: ignore[arg-type]
        seen += groups(got)  # type: ignore[arg-type]
    assert sorted(seen) == [0, 1, 2]
    await one.close()


# ---- versions that nobody serves --------------------------------------------------------------------------------


class Reports(Engine):
    """Says for every token that it was sampled under one version, whatever is served."""

    def __init__(self, lineage: str, number: int) -> None:
        super().__init__(1.0)
        self.says = (lineage, number)

    async def generate(self, sample: Sample) -> Sample:
        made = await super().generate(sample)
        made.version_spans = [(0, 1, *self.says)]
        return made


@pytest.mark.parametrize("policy", ["requeue_pristine", "reject"])
@pytest.mark.parametrize("cap", [None, 1])
def test_a57_an_engine_that_names_another_lineage_is_not_asked_for_ever(policy: str, cap: int | None) -> None:
    engine = Reports("policy", 0)

    @on_virtual_time
    async def main() -> None:
        one = rollout(30, engines=[engine], max_policy_version_lag=1, on_stale=policy, async_buffer_max_groups=cap)
        one.start()
        with pytest.raises(VersionNotServed, match=r"reports the version \(policy, 0\), and \(a, 0\) is served"):
            await one.next_batch()
        assert len(engine.ran) <= 4 * DRAWS_MAX + 2, "each of the four slots"
        await one.close()

    main()


def test_a57_an_engine_that_stays_behind_is_told_from_a_group_that_updates_overtook() -> None:
    behind = Reports("a", 0)

    @on_virtual_time
    async def main() -> None:
        one = rollout(30, engines=[behind], max_policy_version_lag=0, max_pristine_requeues=0)
        one.start()
        for _ in range(DRAWS_MAX + 2):  # overtaken while it is drawn, again and again
            await asyncio.sleep(0.5)
            one.ownership.versions.current = PolicyVersion("a", one.version.number + 1)
            await asyncio.sleep(0.5)
            behind.says = ("a", one.version.number - 1)
            await one.next_batch(timeout_s=0.1)
        assert one.ownership.failure is None
        with pytest.raises(VersionNotServed, match="8 times"):
            await one.next_batch()
        await one.close()

    main()


@on_virtual_time
async def test_a_version_without_a_lag_is_no_number_in_the_buffers_staleness() -> None:
    one = rollout(2, batch=2, engines=[Reports("policy", 3)])
    one.start()
    await asyncio.sleep(5)
    found = one.metrics()
    assert found["rollout/fully_async/buffer_max_staleness"] == 0 == found["rollout/fully_async/buffer_avg_staleness"]
    one.commit(await batch_of(one))
    assert one.metrics()["fully_async/version_lag/count_unknown"] == 2
    await one.close()


@on_virtual_time
async def test_a42_a_trainer_that_waits_for_a_snapshot_says_so_and_why() -> None:
    class Trainer:
        saved: list[int] = []  # noqa: RUF012

        async def train(self, batch: Any) -> None: ...

        async def push(self, version: PolicyVersion) -> None: ...

        async def save(self, number: int, version: PolicyVersion) -> None:
            self.saved.append(number)

    one = rollout(1)
    one.participant.attach({})
    one.start()
    trainer, lines = Trainer(), []
    work = asyncio.ensure_future(
        train_all(one, trainer, want_snapshot=lambda cause: None, troubles=lambda: ["disk is full"], told=lines.append)
    )
    await asyncio.sleep(200)
    assert len(lines) == 3 and "rollout 1 waits for a snapshot for 120 s: disk is full" in lines[1]
    assert not trainer.saved
    one.participant.hold("interval")
    one.participant.states()
    one.participant.resume(True)
    one.participant.release()
    assert await work == 1 and trainer.saved == [1]
    await one.close()


# ---- what a snapshot costs, and small things --------------------------------------------------------------------


def test_a_finished_group_is_encoded_once_when_it_finishes_and_again_only_when_it_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[str] = []
    whole = state.to_json

    def noted(sample: Sample) -> dict[str, Any]:
        encoded.append(sample.request_id)
        return whole(sample)

    monkeypatch.setattr(state, "to_json", noted)

    class Two(Engine):
        async def generate(self, sample: Sample) -> Sample:
            made = await super().generate(sample)
            made.token_ids, made.version_spans = [1, 2], [(0, 1, "a", 0), (1, 2, "a", 1)]
            return made

    @on_virtual_time
    async def main() -> None:
        one = rollout(4, batch=2, engines=[Two()], max_policy_version_lag=0, on_stale="resume_masked")
        one.ownership.versions.current = PolicyVersion("a", 1)
        one.participant.attach({})
        one.start()
        await asyncio.sleep(10)
        assert sorted(encoded) == ["p0/0", "p1/0", "p2/0", "p3/0"], "as each finished"
        first = one.state.states()
        assert len(encoded) == 4 and one.state.states() == first
        lease = await batch_of(one)  # masks what is too old
        later = one.state.states()
        assert len(encoded) == 8 and later["group-0"] != first["group-0"]
        assert json.loads(later["group-0"])["samples"][0]["loss_mask"] == [0, 1]
        one.commit(lease)
        assert sorted(one.state.states()) == ["group-2", "group-3", "rollout"]
        await one.close()

    main()


@on_virtual_time
async def test_v17_a_withheld_sibling_without_versions_is_counted_once() -> None:
    class Half(Engine):
        async def generate(self, sample: Sample) -> Sample:
            made = await super().generate(sample)
            if sample.sample_index == 0:
                made.version_spans = [(0, 1, "a", 1)]
            return made

    one = rollout(
        4, batch=2, samples=2, engines=[Half()], max_policy_version_lag=0, stale_granularity="sibling",
        max_executing_groups=1, completed_prefetch_groups=2,
    )  # fmt: skip
    one.start()
    await asyncio.sleep(1.5)
    one.ownership.versions.current = PolicyVersion("a", 1)  # the other sibling is as old as its admission
    for _ in range(5):
        await one.next_batch(timeout_s=0.0)
    await asyncio.sleep(5)
    lease = await batch_of(one)
    assert [sample.loss_mask for sample in lease.groups[0]] == [[1], [0]]
    assert one.metrics()["rollout/fully_async/samples_withheld"] == 2
    one.commit(lease)
    await one.close()


@on_virtual_time
async def test_no_rows_shuffled_and_engines_of_a_generator() -> None:
    source = ReplaySource(IterableRows([]), samples_per_prompt=1, shuffle_seed=1)
    one = rollout(source=source, engines=(engine for engine in [Engine()]))
    one.start()
    assert isinstance(await one.next_batch(), Exhausted)
    await one.close()


def test_v9_a_first_life_may_have_any_name() -> None:
    one = rollout(2)
    one.restore({}, rollout=0, version=3, lineage="a")
    assert one.version == PolicyVersion("a", 3)


def test_what_is_no_whole_number_no_name_or_no_function_is_refused_by_its_name() -> None:
    async def keep(samples: Any) -> bool:
        return False

    with pytest.raises(ConfigError, match="keep="):
        rollout(2, keep=keep)
    with pytest.raises(ConfigError, match=r"batch_groups: found 1\.5"):
        rollout(2, batch=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="samples_per_prompt: found '2'"):
        rollout(2, samples="2")  # type: ignore[arg-type]
    one: Any = rollout(2)
    for wrong in ({"version": 1.5}, {"lineage": 3}, {"rollout": "1"}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: found"):
            one.restore({}, **{"rollout": 0, "version": 0, "lineage": "e1", **wrong})

    @on_virtual_time
    async def main() -> None:
        one.start()
        with pytest.raises(ConfigError, match=r"rollout: found 1\.5"):
            await one.next_batch(1.5)
        await one.close()

    main()
