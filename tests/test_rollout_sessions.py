"""Rollouts in real sessions on the local disk, without an engine that is captured: branches, fencing, intervals.

Owns: what only several process-lives on one store show. Every order is made by events, none by time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recovery.admission import FullyAsyncRollout
from recovery.admission.limits import Exhausted
from recovery.admission.replay import ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.samples import Sample
from recovery.admission.state import check_fits
from recovery.config import CheckpointingConfig, RolloutConfig
from recovery.errors import CannotRestore, Fenced
from recovery.model import PolicyVersion
from recovery.restored import PassedOverWarning
from vllm_hooks.opening import SystemClock, SystemEntropy
from vllm_hooks.session import RecoverySession

WAIT_S = 120.0
FORWARDS, BACKWARDS = ("r0", "r1", "r2", "r3"), ("r3", "r2", "r1", "r0")


class OneByOne:
    """A group ends when it is its turn."""

    def __init__(self, order: list[str]) -> None:
        self._left = order
        self._turn = {name: asyncio.Event() for name in order}

    def one_more(self) -> None:
        if self._left:
            self._turn[self._left.pop(0)].set()

    async def generate(self, sample: Sample) -> Sample:
        await self._turn[sample.row_id].wait()
        sample.token_ids = [1]
        return sample


@dataclass
class Saved:
    """The trainer's checkpoint."""

    rollout: int = 0
    version: PolicyVersion | int = 0
    trained: list[str] = field(default_factory=list)


class Life:
    """One process: a session, a rollout, a trainer."""

    def __init__(self, session: RecoverySession, start: Saved, order: tuple[str, ...]) -> None:
        assert session.restored is not None
        self.session, self.trained = session, list(start.trained)
        engine = self.engine = OneByOne([name for name in order if name not in start.trained])
        self.rollout = FullyAsyncRollout(
            ReplaySource(IterableRows([{"id": name} for name in FORWARDS]), samples_per_prompt=1),
            (one for one in [engine]),  # type: ignore[arg-type]  (any iterable of engines is fine)
            RolloutConfig(max_executing_groups=4, completed_prefetch_groups=4),
            batch_groups=1,
            clock=SystemClock(),
            entropy=SystemEntropy(),
        )
        self.rollout.restore(
            session.restored.states,
            rollout=start.rollout,
            version=start.version,
            lineage=f"e{session.stored.epoch}",
        )
        session.participants.add(self.rollout.participant)
        session.start()
        self.rollout.start()

    @classmethod
    async def open(cls, store: Path, start: Saved, order: tuple[str, ...] = FORWARDS, **options: Any) -> Life:
        options = {"keep_latest_k": 8, "snapshot_interval_s": 3600.0, **options}
        config = CheckpointingConfig(enabled=True, store=str(store), **options)
        fits = partial(check_fits, rollout=start.rollout, version=start.version)
        return cls(await asyncio.to_thread(RecoverySession.open, config, compatible=fits), start, order)

    async def train(self, *, prepares: bool = True) -> Saved | None:
        """One batch, up to what its checkpoint would hold; None at the end of the data."""
        self.engine.one_more()
        batch = await self.rollout.next_batch(timeout_s=WAIT_S)
        if isinstance(batch, Exhausted):
            return None
        self.rollout.commit(batch)  # type: ignore[arg-type]
        self.trained += [group[0].row_id for group in batch.groups]  # type: ignore[union-attr]
        at = batch.rollout  # type: ignore[union-attr]
        if prepares:
            assert await self.rollout.prepare_checkpoint(at, self.session.want_snapshot, timeout_s=WAIT_S)
        return Saved(at, self.rollout.version, list(self.trained))

    async def end(self) -> None:
        """As good as a kill: nothing more is published."""
        await self.session.stop(last_snapshot=False)
        await self.rollout.close(timeout_s=WAIT_S)


def on_loop(work: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def test(tmp_path: Path) -> None:
        asyncio.run(work(tmp_path / "store"))

    test.__name__, test.__doc__ = work.__name__, work.__doc__
    return test


async def until(seen: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not seen():
        assert time.monotonic() < end, f"waited {WAIT_S:.0f} s for {what}"
        await asyncio.sleep(0.01)


async def from_a_to_a_dead_end(store: Path, **options: Any) -> tuple[Saved, Saved]:
    """A and B of the first life; the second goes back to A, trains two others and dies without a checkpoint."""
    one = await Life.open(store, Saved(), **options)
    a = await one.train()
    b = await one.train()
    assert a is not None and b is not None and b.trained == ["r0", "r1"]
    await one.end()
    two = await Life.open(store, a, BACKWARDS, **options)
    assert [await two.train() and two.trained[-1] for _ in range(2)] == ["r3", "r2"]
    await two.end()
    return a, b


@on_loop
async def test_v9_the_newest_checkpoint_on_disk_is_of_a_branch_that_was_left(store: Path) -> None:
    """Neither lost nor doubled: the last snapshot of B's own branch is taken, past those of the newer one."""
    _, b = await from_a_to_a_dead_end(store)
    with pytest.warns(PassedOverWarning, match=r"rollout 2 of lineage 'e1'.*is of a branch that was left"):
        three = await Life.open(store, b)
    while await three.train() is not None:
        pass
    assert Counter(three.trained) == Counter(FORWARDS)
    await three.end()


@on_loop
async def test_v9_a_dead_branch_whose_snapshots_are_gone_is_refused_by_name(store: Path) -> None:
    _, b = await from_a_to_a_dead_end(store, keep_latest_k=1)
    with pytest.raises(CannotRestore, match=r"rollout 2 of lineage 'e1'"):
        await Life.open(store, b, keep_latest_k=1)


@on_loop
async def test_a_process_that_was_fenced_before_it_saved_is_told(store: Path) -> None:
    one = await Life.open(store, Saved())
    a = await one.train()
    assert a is not None
    one.rollout.checkpoint_saved(a.rollout)
    b = await one.train()
    assert b is not None
    two = await Life.open(store, a, BACKWARDS)
    while await two.train() is not None:
        pass
    one.session.want_snapshot("test")
    stopped = one.rollout.participant
    await until(lambda: stopped.stopped_by is not None, "the first process to learn that it was fenced")
    with pytest.raises(Fenced):
        one.rollout.checkpoint_saved(b.rollout)
    assert Counter(two.trained) == Counter(FORWARDS)
    await one.end()
    await two.end()


@on_loop
async def test_an_interval_is_news_when_only_the_rollout_moved(store: Path) -> None:
    one = await Life.open(store, Saved(), snapshot_interval_s=0.05)
    at = await one.train(prepares=False)
    assert at is not None
    await until(lambda: one.rollout.participant.covered >= at.rollout, "a snapshot at an interval")
    while await one.train(prepares=False) is not None:
        pass
    await until(lambda: not one.session.participants.has_news, "the last of it to be covered")
    await one.end()
