"""vllm_hooks.flushing: when a flush begins, against a stager that is done when it is told to be."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import RecoveryError, StoreUnavailable
from vllm_hooks.flushing import Flushing


class World:
    """Calls with pending tokens, a stager with at most one write in flight, and what is stored."""

    def __init__(self, bound: int, n_calls: int) -> None:
        self.pending = [0] * n_calls
        self.stored = [0] * n_calls
        self.writes: list[tuple[list[int], Future[RecoveryError | None]]] = []
        self.n_writes = self.n_refused = 0
        self.errors: list[BaseException] = []
        self.flushing = Flushing(self, self.freeze, lambda: max(self.pending), bound, self.errors.append)  # type: ignore[arg-type]
        self.flushing.bind(asyncio.get_running_loop())

    # What a Stager has of this:

    @property
    def busy(self) -> bool:
        return bool(self.writes)

    def flush(self, captured: Any, *, periodic: bool) -> Future[RecoveryError | None]:
        self.writes.append((captured, Future()))
        self.n_writes += 1
        return self.writes[-1][1]

    def refuse(self) -> None:
        self.n_refused += 1

    # What a session does:

    def freeze(self) -> Any:
        frozen, self.pending = self.pending, [0] * len(self.pending)
        return frozen

    async def step(self, n_tokens: int) -> None:
        """One output of the engine: so many tokens of each call."""
        for call in range(len(self.pending)):
            self.pending[call] += n_tokens
            self.flushing.pending(self.pending[call])
        await turns()

    async def written(self, error: RecoveryError | None = None) -> None:
        """The write in flight is done."""
        (frozen, future), self.writes = self.writes[0], self.writes[1:]
        if error is None:
            self.stored = [a + b for a, b in zip(self.stored, frozen, strict=True)]
        else:
            self.pending = [a + b for a, b in zip(self.pending, frozen, strict=True)]
        future.set_result(error)
        await turns()


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


@given(
    bound=st.integers(1, 200),
    n_calls=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=120),
)
def test_at_rest_no_call_has_more_than_three_quarters_of_a_flush(
    bound: int, n_calls: int, steps: list[tuple[int, bool]]
) -> None:
    """Invariants 2 and 3: the threshold keeps within its bounds whatever the store does; with no write in flight a call
    has fewer tokens than the highest threshold, and one more than it makes a write begin in the same step."""

    async def scenario() -> None:
        world = World(bound, n_calls)
        for n_tokens, done in steps:
            idle = not world.busy
            await world.step(n_tokens)
            assert max(1, bound // 4) <= world.flushing.at <= max(1, bound - max(1, bound // 4)) or bound < 4
            if idle and not world.busy:
                assert max(world.pending) < world.flushing.at
            if done and world.busy:
                await world.written()
        while world.busy:
            await world.written()
        assert max(world.pending) <= max(1, 3 * bound // 4 + 1)
        assert [a + b for a, b in zip(world.stored, world.pending, strict=True)] == [sum(n for n, _ in steps)] * n_calls
        assert world.errors == []

    asyncio.run(scenario())


@given(gain=st.integers(1, 60), rounds=st.integers(3, 20))
def test_a_store_that_takes_its_time_is_asked_early_enough(gain: int, rounds: int) -> None:
    """Invariant 3: where a call gains less than half of the bound while a flush is stored, then, once that was seen,
    never more than the bound is not stored."""
    bound = 128

    async def scenario() -> None:
        world = World(bound, 2)
        for number in range(rounds):
            while not world.busy:
                await world.step(1)
            for _ in range(gain):
                await world.step(1)
            if number >= 1:
                assert max(world.writes[0][0]) + max(world.pending) <= bound, number
            await world.written()

    asyncio.run(scenario())


def test_a_wish_during_a_write_is_counted_and_granted_afterwards() -> None:
    async def scenario() -> None:
        world = World(16, 1)
        await world.step(8)
        assert world.busy and world.n_writes == 1
        await world.step(16)
        assert (world.n_writes, world.n_refused) == (1, 1) and world.pending == [16]
        await world.written()
        assert world.n_writes == 2 and world.pending == [0], "without another token"
        await world.written()
        world.flushing.ended()
        await turns()
        assert world.n_writes == 3, "the end of a call is flushed whatever it has"

    asyncio.run(scenario())


def test_what_a_store_refused_is_tried_again_unasked(monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_hooks.flushing.RETRY_S", 0.0)

    async def scenario() -> None:
        world = World(16, 1)
        await world.step(8)
        await world.written(StoreUnavailable("down"))
        await asyncio.sleep(0)
        await turns()
        assert world.n_writes == 2 and world.busy
        await world.written()
        assert world.stored == [8]
        world.flushing.close()
        await world.step(99)
        assert world.n_writes == 2, "closed: nothing of its own accord"

    asyncio.run(scenario())


def test_with_no_bound_nothing_is_flushed_between_cuts() -> None:
    async def scenario() -> None:
        world = World(0, 1)
        await world.step(10_000)
        world.flushing.ended()
        await turns()
        assert world.n_writes == 0

    asyncio.run(scenario())
