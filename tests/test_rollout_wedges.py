"""What a rollout must not hang on: odd generate functions, listeners that raise, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from recovery.admission.exclusion import Work
from recovery.admission.samples import Sample
from recovery.model import PolicyVersion
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
