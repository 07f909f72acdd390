"""A trainer, an evaluator and a snapshot loop on one rollout, in an order that a seed decides; and its process dies.

Owns: the fake engine, the actors, what survives a kill (the last snapshot, the trainer's last checkpoint), and the
checks that hold in every schedule: no sample lost, doubled, or trained under a version that is too old.
Does not know: real time, real stores (test_rollout_snapshots.py has those).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from recovery.admission.attempts import Attempt
from recovery.admission.holds import AdmissionClosed, HoldKind, Lifecycle
from recovery.admission.leases import Lease
from recovery.admission.limits import CannotClose, Exhausted, TerminalPending, Waiting
from recovery.admission.metrics import KEYS
from recovery.admission.preparation import NotPrepared, prepare
from recovery.admission.replay import ReplaySource
from recovery.admission.rollout import FullyAsyncRollout
from recovery.admission.rows import IterableRows
from recovery.admission.samples import Sample
from recovery.admission.settlement import Why
from recovery.admission.updates import DeadlinePassed, EnginesTorn
from recovery.config import RolloutConfig
from recovery.errors import SnapshotAbandoned
from recovery.model import PolicyVersion
from tests.admission_doubles import SourceDown
from tests.fakes import ManualClock, SeededEntropy


class Boom(Exception):
    """What a generate function raises that was told to: the rollout has failed."""


class Cut(Exception):
    """The push of weights that was told to fail."""


class FlakySource(ReplaySource):
    """Fails a verb now and then; `calls_left` says when the next failures come."""

    def __init__(self, rng: random.Random, rate: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rng, self.rate = rng, rate

    def requeue(self, attempts: Sequence[Attempt], why: Why) -> None:
        self._maybe("requeue")
        super().requeue(attempts, why)

    def acknowledge(self, attempts: Sequence[Attempt], rollout: int) -> None:
        self._maybe("acknowledge")
        super().acknowledge(attempts, rollout)

    def _maybe(self, verb: str) -> None:
        if self._rng.random() < self.rate:
            raise SourceDown(verb)


class FakeEngine:
    """Takes its time, reports the version it serves for each token, and is cancelled by nobody now and then."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def generate(self, sample: Sample) -> Sample:
        world = self._world
        versions: list[PolicyVersion] = []
        for _ in range(world.lengths[sample.group_index]):
            await asyncio.sleep(world.rng.choice([0, 1, 1, 2]))
            versions.append(world.serving)
        if world.dies:
            raise Boom
        if world.rng.random() < world.abort_rate:
            raise asyncio.CancelledError
        made = Sample(
            row_id="?", group_index=-1, sample_index=-1, request_id="?", row={}
        )  # A67: identity is not theirs
        made.token_ids = [sample.group_index] * len(versions)
        made.version_spans = [(i, i + 1, v.lineage, v.number) for i, v in enumerate(versions)]
        return made


@dataclass
class Durable:
    """What survives the process."""

    lengths: list[int]
    states: dict[str, bytes] | None = None
    rollout: int = 0
    version: PolicyVersion | int = 0
    trained: list[tuple[str, int]] = field(default_factory=list)
    """(row, sample) of everything the trainer's checkpoint has seen."""


@dataclass
class World:
    """One process-life of everybody."""

    rng: random.Random
    durable: Durable
    config: RolloutConfig
    batch: int
    samples: int = 2
    source_rate: float = 0.0
    abort_rate: float = 0.0
    push_rate: float = 0.0
    life: int = 0
    serving: PolicyVersion = PolicyVersion("a", 0)  # noqa: RUF009

    def __post_init__(self) -> None:
        self.dies = self.finished = False
        self.counts: Counter[str] = Counter()
        self.lengths = self.durable.lengths
        self.groups = len(self.lengths)
        self.trained = list(self.durable.trained)
        self.source = FlakySource(
            self.rng,
            self.source_rate,
            IterableRows([{"id": f"p{i}"} for i in range(self.groups)]),
            samples_per_prompt=self.samples,
        )
        engines = [FakeEngine(self) for _ in range(self.rng.choice([1, 2]))]
        entropy = SeededEntropy((self.life, self.rng.random()))
        self.rollout = FullyAsyncRollout(
            self.source, engines, self.config, batch_groups=self.batch, clock=ManualClock(), entropy=entropy
        )
        if self.durable.states is not None:
            self.rollout.state.restore(
                self.durable.states,
                rollout=self.durable.rollout,
                version=self.durable.version,
                lineage=f"life {self.life}",
            )
        self.serving = self.rollout.version

    # ---- the trainer -------------------------------------------------------------------------------------------

    async def until_the_end(self, work: Any) -> None:
        """An actor's work, which the end of the rollout may end at any of its waits."""
        try:
            await work()
        except (AdmissionClosed, Boom, SourceDown):  # the last one: where nobody waited for the source
            assert self.rollout.ownership.failure is not None or not self.rollout.ownership.gate.open

    async def train(self) -> None:
        """Batches until there are none: commit, train, push weights, and a checkpoint now and then."""
        while True:
            try:
                got = await self.rollout.next_batch(timeout_s=self.rng.choice([None, 3.0]))
            except SourceDown:
                if self.rollout.ownership.failure is not None:
                    raise  # it failed where nobody waited: every later call says so
                continue
            if isinstance(got, Exhausted):
                self.finished = True
                return
            if isinstance(got, Waiting):
                for hold in self.rollout.ownership.gate.active:
                    assert hold.owner in ("weight_update", "evaluation", "snapshot")
                continue
            self.check_batch(got)
            await asyncio.sleep(self.rng.choice([0, 0, 1]))
            if self.rng.random() < 0.15:
                self.settle(self.rollout.roll_back, got)
                continue
            if not self.settle(self.rollout.commit, got):
                continue
            await asyncio.sleep(self.rng.choice([0, 2]))
            self.trained += [(s.row_id, s.sample_index) for group in got.groups for s in group]
            await self.push_weights()
            if self.rng.random() < 0.4:
                await self.checkpoint(got.rollout)

    def settle(self, verb: Any, lease: Lease) -> bool:
        try:
            verb(lease)
            self.counts["leases settled"] += 1
            return True
        except SourceDown:
            self.counts["settlements that failed"] += 1
            while self.rollout.reconcile():
                pass
            return False

    def check_batch(self, lease: Lease) -> None:
        limit, versions = self.config.max_policy_version_lag, self.rollout.ownership.versions
        assert 1 <= len(lease.groups) <= self.batch
        for group in lease.groups:
            assert [s.sample_index for s in group] == list(range(self.samples))
            assert len({s.group_index for s in group}) == 1 and group[0].row_id == f"p{group[0].group_index}"
            for sample in group:
                assert sample.token_ids == [sample.group_index] * self.lengths[sample.group_index]
                assert (sample.row_id, sample.sample_index) not in self.trained, "trained twice"
                for (_, _, lineage, number), masked in zip(sample.version_spans, sample.loss_mask, strict=True):
                    if limit is not None and masked:
                        assert (lineage, number) in self.line(versions, limit), "too old, or of a dead branch"

    def line(self, versions: Any, limit: int) -> list[tuple[str, int]]:
        """The last `limit` + 1 versions that led to the current one."""
        lineage, newest = versions.current.lineage, versions.current.number
        oldest, found = newest - limit, []
        while True:
            found += [(lineage, number) for number in range(oldest, newest + 1)]
            if lineage not in versions._forks:
                return found
            lineage, at = versions._forks[lineage]
            newest = min(newest, at)

    async def push_weights(self) -> None:
        target = None
        while target is None:
            again = self.rollout.ownership.versions.torn and self.rng.random() < 0.3
            try:
                target = await self.rollout.updates.update(
                    self.push, again=again, timeout_s=self.rng.choice([None, 2.0])
                )
                if again:
                    target = None
            except (Cut, DeadlinePassed):
                await asyncio.sleep(1)

    async def push(self, target: PolicyVersion) -> None:
        assert not self.running(), "the engines are drained"
        await asyncio.sleep(self.rng.choice([0, 1]))
        if self.rng.random() < self.push_rate:
            self.counts["updates that failed"] += 1
            raise Cut
        self.serving = target
        self.counts["updates"] += 1

    def running(self) -> int:
        return len(self.rollout._tasks)

    async def checkpoint(self, rollout: int) -> None:
        """A snapshot first, so that whatever the trainer restores, a snapshot covers it."""
        if not await self.snapshot() or self.rng.random() < 0.2:
            return
        self.durable.rollout, self.durable.version = rollout, self.rollout.version
        self.durable.trained = list(self.trained)
        await asyncio.sleep(self.rng.choice([0, 1]))
        self.rollout.checkpoint_saved(rollout)

    # ---- the others --------------------------------------------------------------------------------------------

    async def snapshot(self) -> bool:
        """What a coordinator does: hold, state, publish, release. Parts of it take time; it may fail."""
        try:
            self.rollout.updates.hold_for_cut("test")
        except SnapshotAbandoned:
            return False
        try:
            await asyncio.sleep(self.rng.choice([0, 1]))
            hold = self.rollout.updates.cut_hold
            if self.closing:
                return False
            self.rollout.ownership.gate.freeze(hold)
            try:
                prepare(self.rollout.ownership, hold, checkpoint=False)
            except NotPrepared:
                assert self.rollout.ownership.failure is not None or self.closing
                return False
            states = self.rollout.state.states()
            await asyncio.sleep(self.rng.choice([0, 1]))
            if self.rng.random() < 0.2:
                return False
            self.durable.states = states
            self.counts["snapshots"] += 1
            return True
        finally:
            self.rollout.updates.release_cut()

    async def snapshots(self) -> None:
        while True:
            await asyncio.sleep(self.rng.choice([1, 4]))
            if self.rollout.updates._cut is None:
                await self.snapshot()

    async def evaluations(self) -> None:
        while True:
            await asyncio.sleep(self.rng.choice([2, 6]))
            try:
                async with self.rollout.updates.evaluation(timeout_s=self.rng.choice([None, 1.0, 5.0])):
                    assert not self.running(), "the engines are drained"
                    await asyncio.sleep(1)
                    assert not self.running(), "and stay so"
                    self.counts["evaluations"] += 1
            except (DeadlinePassed, EnginesTorn):
                pass

    async def impatient(self) -> None:
        """Waits that are cancelled, holds that are released early, retries, looks."""
        while True:
            await asyncio.sleep(self.rng.choice([1, 3]))
            if self.rng.random() < 0.5:
                with_hold = self.rollout.acquire(HoldKind.DRAIN, "evaluation", "impatient")
                waiter = asyncio.ensure_future(self.rollout.wait_terminal(with_hold, timeout_s=2.0))
                waiter.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen by nobody else
                await asyncio.sleep(self.rng.choice([0, 1]))
                waiter.cancel()
                await asyncio.gather(waiter, return_exceptions=True)
                self.rollout.release(with_hold)
            self.rollout.reconcile()
            assert set(self.rollout.metrics()) == KEYS
            own = self.rollout.ownership
            assert own.slots.used <= self.config.completed_prefetch_groups, "A8"
            assert self.running() <= self.config.max_executing_groups

    # ---- one life ----------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        return self.rollout.ownership.gate.lifecycle is not Lifecycle.OPEN

    async def live(self, ends_after_s: float | None, how: str = "kill") -> bool:
        """Whether the trainer got everything before the end: a kill, a close in mid-work, or a failing worker."""
        self.rollout.start()
        work = (self.train, self.snapshots, self.evaluations, self.impatient)
        trainer, *others = (asyncio.ensure_future(self.until_the_end(one)) for one in work)
        try:
            done, _ = await asyncio.wait({trainer}, timeout=ends_after_s)
            if not done and how != "kill":
                self.dies = how == "die"
                while how == "close" and not trainer.done():
                    try:
                        await self.rollout.close(timeout_s=self.rng.choice([1.0, 50.0]))
                        break
                    except (SourceDown, CannotClose, TerminalPending):
                        await asyncio.sleep(1)
                await asyncio.wait({trainer})
                await self.close()
            for one in (trainer, *others):
                if one.done():
                    one.result()
            return self.finished
        finally:
            self.rollout._started = False  # a killed process begins nothing any more
            self.source.rate = 0.0
            mine = {task for task, _ in self.rollout._tasks.values()}
            for one in (trainer, *others, *mine):
                one.cancel()
            await asyncio.wait({trainer, *others, *mine})

    async def close(self) -> None:
        """After the trainer has ended: repeatable, and nothing is left."""
        while True:
            try:
                await self.rollout.close(timeout_s=50.0)
                break
            except (SourceDown, CannotClose):
                for lease in self.rollout.ownership.leases.open:
                    self.settle(self.rollout.roll_back, lease)
        own = self.rollout.ownership
        assert len(own.attempts) == 0 and own.slots.used == 0 and not own.leases.open
        try:
            await self.rollout.next_batch()
            raise AssertionError("closed means closed")
        except (AdmissionClosed, Boom, SourceDown):
            pass

    def check_trained(self) -> None:
        expected = Counter((f"p{g}", i) for g in range(self.groups) for i in range(self.samples))
        assert Counter(self.trained) == expected, "every sample is trained exactly once"


async def schedule(seed: object) -> Counter[str]:
    """One whole schedule: up to three lives, then the end. Returns what happened in it, counted."""
    rng, counts = random.Random(str(seed)), Counter(schedules=1)
    executing = rng.choice([1, 2, 3])
    batch = rng.choice([1, 2])
    slots = max(batch, executing) + rng.choice([0, 1, 2])
    config = RolloutConfig(
        max_executing_groups=executing,
        completed_prefetch_groups=slots,
        max_policy_version_lag=rng.choice([None, 0, 1, 2]),
        on_stale=rng.choice(["requeue_pristine", "resume_mixed", "resume_masked", "wait_not_drop"]),
        stale_granularity=rng.choice(["prompt_group", "sibling"]),
        max_pristine_requeues=rng.choice([0, 1, 3]),
        escalate_to=rng.choice(["wait_not_drop", "resume_masked"]),
        async_buffer_max_groups=rng.choice([None, None, slots]),
    )
    durable = Durable([rng.choice([1, 1, 2, 3, 9]) for _ in range(6)])
    for life in range(4):
        faults = {name: rng.choice([0.0, 0.0, 0.1]) for name in ("source_rate", "abort_rate", "push_rate")}
        if faults["source_rate"]:  # a source that fails where nobody waits for it ends the rollout, as it should
            faults["abort_rate"] = 0.0
            config = msgspec.structs.replace(config, async_buffer_max_groups=None)
        world = World(rng=rng, durable=durable, config=config, batch=batch, life=life, **faults)
        ends_after_s = rng.choice([2.0, 9.0, 25.0]) if life < rng.choice([0, 1, 2, 3]) else None
        how = rng.choice(["kill", "kill", "close", "die"])
        done = await world.live(ends_after_s, how)
        counts.update(world.counts, lives=1)
        if done:
            await world.close()
            world.check_trained()
            return counts + Counter(trained=len(world.trained))
        counts[f"ended by {how}"] += 1
