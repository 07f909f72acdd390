"""vllm_hooks.ray_workers without Ray and engines: sessions, a coordination, a store on disk, and both sides dying."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from recovery.config import CheckpointingConfig
from recovery.errors import Fenced, FingerprintMismatch, InputError, ProgramError, SnapshotAbandoned
from recovery.model import CallId
from recovery.protocol import Verdict
from recovery.restored import PassedOverWarning
from storage_backends import open_store
from tests.fake_engine import MUST, PROMPTS, Prompt, reference_answers
from tests.worker_worlds import STOP, Worker, World, until
from vllm_hooks.ray_workers.coordination import Coordination, stored_by
from vllm_hooks.ray_workers.members import Busy, Members, Yours
from vllm_hooks.ray_workers.messages import Gone, Joining, NotAMember
from vllm_hooks.ray_workers.step_log import StepLog, Steps

_SOME = (Prompt(f"long-{k}", (7 + k, 3), 240) for k in range(1000))
LONG = tuple(prompt for prompt, _ in zip((p for p in _SOME if len(p.reference()) >= 180), range(6), strict=False))
"""Six calls that do not end early."""

Play = Callable[[World], Coroutine[Any, Any, None]]


def played(
    tmp_path: Path, rng: random.Random, play: Callable[[World], Coroutine[Any, Any, None]], **fields: Any
) -> None:
    async def all_of_it() -> None:
        world = World(tmp_path / "store", rng, **fields)
        try:
            await play(world)
        finally:
            await world.close()

    asyncio.run(all_of_it())


def test_calls_spread_over_workers_end_as_in_one_process(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        coordination = await world.coordinate()
        for _ in range(3):
            await world.worker()
        assert await world.answers() == reference_answers()
        await world.snapshot()
        entries = list(coordination.everything())
        assert {e.identity.rollout for e in entries if e.ended is not None} == reference_answers().keys()
        assert coordination.figures().rejected == {}

    played(tmp_path, rng, play)


def test_w1_calls_of_a_dead_worker_go_on_elsewhere_while_the_others_decode(tmp_path: Path, rng: random.Random) -> None:
    """The survivor decodes on while the recovery is held up in the middle of its publication: it waits for nothing."""

    async def play(world: World) -> None:
        coordination = await world.coordinate()
        victim, survivor = await world.worker(), await world.worker()
        world.pace = stand_at(100, go := asyncio.Event())
        answers = asyncio.create_task(world.answers(LONG))
        await until(lambda: victim.n_decoded >= 100 and survivor.n_decoded >= 100, "both decode")
        stager = victim.session._stager
        assert stager is not None
        await until(lambda: victim.session.table.longest_pending() < 8 and not stager.busy, "its flushes are stored")
        publication, held = coordination.opened.publication, asyncio.Event()
        real, loop = publication.publish_as, asyncio.get_running_loop()

        def publish(*arguments: Any, **named: Any) -> Any:
            asyncio.run_coroutine_threadsafe(_wait(held), loop).result()
            return real(*arguments, **named)

        publication.publish_as = publish  # type: ignore[method-assign]
        victim.kill()
        go.set()
        before = survivor.n_decoded
        await until(lambda: survivor.n_decoded >= before + 100, "the survivor decodes during the recovery")
        waiting = [call for call in LONG[::2] if call.rollout in survivor.tasks]
        assert all(survivor.session.table.get(call.call_id) is None for call in waiting), "none is given out before"
        held.set()
        assert await answers == reference_answers(LONG)
        resumed = [entry for entry in coordination.everything() if entry.history]
        assert resumed and all(entry.attempt > 0 for entry in resumed)
        twice = victim.n_decoded + survivor.n_decoded - sum(map(len, reference_answers(LONG).values()))
        assert 0 <= twice <= 3 * 8, "at most a flush of each call is decoded twice"

    played(tmp_path, rng, play)


def stand_at(n_tokens: int, go: asyncio.Event) -> Callable[[Worker], Coroutine[Any, Any, None]]:
    """A pace at which no worker gets further than so many tokens before `go`."""

    async def pace(worker: Worker) -> None:
        while worker.n_decoded >= n_tokens and not go.is_set():
            await asyncio.sleep(0.002)
        await asyncio.sleep(0)

    return pace


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def test_w1_decoding_goes_on_without_a_coordinator_and_the_next_one_is_given_the_rest(
    tmp_path: Path, rng: random.Random
) -> None:
    async def play(world: World) -> None:
        await world.coordinate()
        workers = [await world.worker() for _ in range(2)]
        world.pace = stand_at(50, killed := asyncio.Event())
        answers = asyncio.create_task(world.answers(LONG))
        await until(lambda: all(w.n_decoded >= 50 for w in workers), "both decode")
        world.kill_coordinator()
        killed.set()
        await until(lambda: all(w.n_decoded >= 250 for w in workers), "they go on")
        coordination = await world.coordinate(again=True)
        assert await answers == reference_answers(LONG)
        await world.snapshot()
        entries = list(coordination.everything())
        assert all(entry.ended is not None and entry.attempt == 0 and not entry.history for entry in entries)
        assert sum(w.n_decoded for w in workers) == sum(map(len, reference_answers(LONG).values())), "nothing twice"

    played(tmp_path, rng, play)


def test_what_a_coordinator_that_was_started_again_passes_over_reaches_who_runs_the_job(
    tmp_path: Path, rng: random.Random
) -> None:
    async def play(world: World) -> None:
        coordination = await world.coordinate()
        await world.worker()
        await world.answers(PROMPTS[:2])
        await world.snapshot()
        assert coordination.figures().passed_over == ()
        newest = coordination.opened.publication.writer.head
        assert newest is not None
        world.kill_coordinator()
        open_store(world.config.store or "").delete(newest.key)
        with pytest.warns(PassedOverWarning, match=newest.key):
            coordination = await world.coordinate(again=True)
        told = coordination.figures().passed_over
        assert newest.key in told[0] and "verify" in told[-1]

    played(tmp_path, rng, play)


def test_w10_a_stalled_coordinator_that_wakes_up_publishes_nothing(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        await world.coordinate()
        await world.worker()
        assert await world.answers(PROMPTS[:2]) == reference_answers(PROMPTS[:2])
        old = world.kill_coordinator()
        await world.coordinate(again=True)
        attempt = await asyncio.to_thread(lambda: old.finish(last=True))
        assert attempt is not None and attempt.verdict is Verdict.FENCED
        with pytest.raises(Fenced):
            old.figures()
        assert await world.answers() == reference_answers()

    played(tmp_path, rng, play)


def test_a_fence_that_a_dead_coordinator_left_is_lowered_by_the_next(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        await world.coordinate()
        worker = await world.worker()
        session = worker.session
        for step in (("hold", "snapshot"), ("raise_fence",)):
            await session.step(session.worker, step[0], session.epoch, *step[1:])
        assert not session.barriers.open
        answers = asyncio.create_task(world.answers())
        world.kill_coordinator()
        await world.coordinate(again=True)
        assert session.barriers.open and await answers == reference_answers()

    played(tmp_path, rng, play)


def test_a_worker_that_was_given_up_too_early_comes_back_without_its_calls(tmp_path: Path, rng: random.Random) -> None:
    """It only hung: what it decodes of calls that others carry on is dropped, and it takes new ones."""

    async def play(world: World) -> None:
        coordination = await world.coordinate()
        slow, other = await world.worker(), await world.worker()
        answers = asyncio.create_task(world.answers(LONG))
        await until(lambda: slow.n_decoded >= 60, "it decodes")
        name = slow.session.worker
        await asyncio.to_thread(coordination.lost, name)
        assert coordination.beat(name, 0) is None
        await slow.join()
        assert slow.session.worker != name and coordination.beat(slow.session.worker, 0) == coordination.epoch
        assert await answers == reference_answers(LONG)
        assert await slow.run(PROMPTS[0]) == list(PROMPTS[0].reference())
        assert other.n_decoded > 0

    played(tmp_path, rng, play)


def test_a_damaged_segment_of_a_dead_worker_costs_its_tokens_and_holds_up_nobody(
    tmp_path: Path, rng: random.Random
) -> None:
    async def play(world: World) -> None:
        coordination = await world.coordinate()
        victim, _ = await world.worker(), await world.worker()
        world.pace = stand_at(100, go := asyncio.Event())
        answers = asyncio.create_task(world.answers(LONG))
        await until(lambda: victim.n_decoded >= 100, "it decodes")
        opened, name = coordination.opened, victim.session.worker
        await victim.session.flushed()
        victim.kill()
        found = stored_by(opened.store, opened.segments, coordination.epoch, name, lambda writer: 0)
        last = max(found, key=lambda staged: staged.flush).info.key
        path = tmp_path / "store" / last
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        left = stored_by(opened.store, opened.segments, coordination.epoch, name, lambda writer: 0)
        assert {staged.info.key for staged in left} == {staged.info.key for staged in found} - {last}
        go.set()
        assert await answers == reference_answers(LONG)

    played(tmp_path, rng, play)


def test_a_worker_that_leaves_loses_nothing_and_one_that_comes_takes_calls(tmp_path: Path, rng: random.Random) -> None:
    """Grown and shrunk in mid-decode, whenever that is: no token is decoded twice."""

    async def play(world: World) -> None:
        coordination = await world.coordinate()
        leaving, _ = await world.worker(), await world.worker()
        world.pace = stand_at(100, go := asyncio.Event())
        answers = asyncio.create_task(world.answers(LONG))
        await until(lambda: all(w.n_decoded >= 100 for w in world.workers), "both decode")
        coming = await world.worker()
        await world.snapshot()  # one that joins between cuts is asked with the next
        assert set(coordination.figures().workers) == {w.session.worker for w in world.workers}
        await leaving.retire()
        lost = await asyncio.to_thread(coordination.lost, leaving.session.worker)
        assert (lost.n_calls, lost.n_tokens) == (3, leaving.n_decoded), "all of it is stored"
        go.set()
        assert await answers == reference_answers(LONG)
        assert world.alive == [world.workers[1], coming]
        total = sum(map(len, reference_answers(LONG).values()))
        assert sum(w.n_decoded for w in world.workers) == total
        assert leaving.session.worker not in coordination.figures().workers
        resumed = [entry for entry in coordination.everything() if entry.history]
        assert resumed and coordination.figures().rejected == {}

    played(tmp_path, rng, play)


def test_a_snapshot_that_waits_for_a_worker_goes_on_when_that_is_found_gone(tmp_path: Path, rng: random.Random) -> None:
    """Ray may take long to say that a process is gone; whoever knows it before lets the snapshot go on without it."""

    async def play(world: World) -> None:
        coordination = await world.coordinate()
        await world.worker()
        silent = await world.worker()
        asked = asyncio.Event()

        def ask(step: str, epoch: int, *arguments: Any) -> Any:
            world.loop.call_soon_threadsafe(asked.set)
            return Future()

        coordination._fleet.add(silent.session.worker, ask)
        coordination.request("request")
        await asked.wait()
        await asyncio.to_thread(coordination.lost, silent.session.worker)
        await until(lambda: coordination.figures().snapshots == 1, "it is published")
        assert coordination.figures().snapshots_abandoned == 0

    played(tmp_path, rng, play, snapshot_timeout_s=3600.0)


def test_an_answer_that_was_lost_on_its_way_is_given_again(tmp_path: Path, rng: random.Random) -> None:
    """A worker says what it has stored until the coordinator is known to have it."""

    async def play(world: World) -> None:
        coordination = await world.coordinate()
        worker = await world.worker()
        fleet = coordination._fleet
        ask, n_lost = worker.ask, 0

        def losing(step: str, epoch: int, *arguments: Any) -> Any:
            nonlocal n_lost
            asked = ask(step, epoch, *arguments)
            if step != "stage" or n_lost == 2:
                return asked
            n_lost += 1
            lost: Future[Any] = Future()
            gone = SnapshotAbandoned("the answer was lost", hint="")
            asked.add_done_callback(lambda done: lost.set_exception(gone))
            return lost

        fleet.add(worker.session.worker, losing)
        assert await world.answers() == reference_answers()
        for n in (1, 2):
            coordination.request("request")
            await until(lambda n=n: coordination.figures().snapshots_abandoned == n, "an answer is lost")  # type: ignore[misc]
        await world.snapshot()
        assert {e.identity.rollout for e in coordination.everything() if e.ended} == reference_answers().keys()
        assert coordination.figures().rejected == {}

    played(tmp_path, rng, play)


def test_a_worker_that_can_no_longer_follow_a_coordinator_fails() -> None:
    """Its task of beats would end unseen otherwise, and nobody would hear of the worker again."""
    from vllm_hooks.ray_workers.actors import EngineWorker

    class Llm:
        vllm_config = None

    async def play() -> None:
        failed: list[Any] = []
        worker = EngineWorker("w0", Llm, CheckpointingConfig(enabled=True, store="s"), {}, False)
        worker.session = SimpleNamespace(fail=failed.append, worker="w0-1", n_captured=0)  # type: ignore[assignment]
        worker._coordinator = SimpleNamespace()  # it has nothing that can be asked
        worker._follow_for_ever()
        await until(lambda: bool(failed), "it fails")
        assert isinstance(failed[0], ProgramError) and "AttributeError" in failed[0].message

    asyncio.run(play())


def test_the_newest_coordinator_is_followed_in_whichever_order_it_is_told() -> None:
    """Ray begins calls of an async actor in any order: an older one that is told last would be asked for ever."""
    from vllm_hooks.ray_workers.actors import EngineWorker

    async def play() -> None:
        worker = EngineWorker("w0", lambda: None, CheckpointingConfig(enabled=True, store="s"), {}, False)
        worker._ready = asyncio.Event()
        worker._ready.set()
        worker.session = SimpleNamespace(raise_if_failed=lambda: None, worker="w0-1")  # type: ignore[assignment]
        for coordinator, number, followed in (("b", 1, "b"), ("a", 0, "b"), ("c", 2, "c"), ("c", 2, "c")):
            await worker.follow(coordinator, number)
            assert worker._coordinator == followed

    asyncio.run(play())


def test_a_worker_whose_joining_was_answered_too_late_joins_again(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found gone by mistake, it came back; the coordinator counts it as a member of its epoch, and it has to know that.

    Else its calls wait for ever, and every snapshot of all workers is abandoned because it is just joining.
    """
    from vllm_hooks.ray_workers import actors

    async def play(world: World) -> None:
        coordination = await world.coordinate()
        found_gone, other = await world.worker(), await world.worker()
        lost = [1]

        async def answer(asked: tuple[Callable[..., Any], tuple[Any, ...]], timeout_s: float) -> Any:
            method, arguments = asked
            given = await asyncio.to_thread(method, *arguments)
            if method == join and lost[0]:
                lost[0] -= 1
                raise TimeoutError
            return given

        def join(joining: Joining, me: object) -> Any:
            return coordination.join(joining, found_gone.ask)

        here = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(current_actor=None))
        monkeypatch.setattr(actors, "answer", answer)
        monkeypatch.setattr(actors, "ray", here)
        monkeypatch.setattr(actors, "BEAT_S", 0.01)
        actor: Any = SimpleNamespace(
            session=found_gone.session,
            _coordinator=SimpleNamespace(
                beat=SimpleNamespace(remote=lambda *a: (coordination.beat, a)),
                join=SimpleNamespace(remote=lambda *a: (join, a)),
            ),
            _ready=asyncio.Event(),
            _fields=(MUST, {}),
        )
        actor._join = lambda: actors.EngineWorker._join(actor)
        before = found_gone.session.worker
        await asyncio.to_thread(coordination.lost, before)
        beats = asyncio.create_task(actors.EngineWorker._beat(actor))
        await until(lambda: not lost[0], "the answer is lost")
        await until(lambda: found_gone.session.is_member, "it joins again")
        assert found_gone.session.worker != before
        assert await world.answers() == reference_answers()
        assert other.session.is_member
        await world.snapshot()
        beats.cancel()

    played(tmp_path, rng, play)


def test_two_workers_never_have_one_call(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        coordination = await world.coordinate()
        one, other = await world.worker(), await world.worker()
        call_id = PROMPTS[0].call_id
        coordination.claim(one.session.worker, call_id, 1.0)
        with pytest.raises(InputError, match=one.session.worker):
            coordination.claim(other.session.worker, call_id, 1.0)
        with pytest.raises(NotAMember):
            coordination.claim("nobody-00000000", call_id, 1.0)

    played(tmp_path, rng, play)


def test_an_engine_of_another_job_may_not_join(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        coordination = await world.coordinate()
        worker = await world.worker()
        with pytest.raises(FingerprintMismatch, match="model"):
            coordination.join(Joining("w9-00000000", {}, {**MUST, "model": "other"}, {}, "bitwise"), worker.ask)

    played(tmp_path, rng, play)


def test_a_coordinator_does_not_come_back_to_a_store_that_another_run_took(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        await world.coordinate()
        world.kill_coordinator()
        await world.coordinate(owner="another run")
        with pytest.raises(Fenced, match="another run"):
            Coordination.open(world.config, MUST, {}, STOP, owner="this run", again=True)

    played(tmp_path, rng, play)


def test_steps_of_others_than_the_followed_coordinator_are_refused(tmp_path: Path, rng: random.Random) -> None:
    async def play(world: World) -> None:
        await world.coordinate()
        worker = await world.worker()
        world.kill_coordinator()
        await world.coordinate(again=True)
        session = worker.session
        with pytest.raises(Fenced):
            await session.step(session.worker, "cut", session.epoch - 1)
        with pytest.raises(Gone):
            await session.step("w0-00000000", "cut", session.epoch)
        assert session.barriers.open

    played(tmp_path, rng, play)


def decoded(world: World) -> int:
    return sum(worker.n_decoded for worker in world.workers)


@pytest.mark.parametrize("number", range(12))
def test_w1_kills_at_random_change_no_token(tmp_path: Path, rng: random.Random, number: int) -> None:
    """Workers and coordinators die at random moments, workers come and go; every answer is the uninterrupted one."""

    async def play(world: World) -> None:
        await world.coordinate()
        for _ in range(3):
            await world.worker()

        async def slow(worker: Any) -> None:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))

        world.pace = slow
        answers = asyncio.create_task(world.answers(LONG))
        for _ in range(rng.randrange(2, 6)):
            total = sum(w.n_decoded for w in world.workers) + rng.randrange(1, 120)
            await until(
                lambda goal=total: answers.done() or sum(w.n_decoded for w in world.workers) >= goal, "decoding"
            )
            what = rng.choice(("worker", "coordinator", "both", "join"))
            if what in ("worker", "both"):
                await world.worker()
                rng.choice(world.alive).kill()
            if what in ("coordinator", "both"):
                world.kill_coordinator()
                await world.coordinate(again=True)
            if what == "join":
                await world.worker()
        assert await answers == reference_answers(LONG)

    flush, interval_s = rng.choice(((0, 0.05), (4, 0.05), (4, 3600.0), (32, 3600.0)))
    played(tmp_path, rng, play, flush=flush, snapshot_interval_s=interval_s)


class MembersAreExclusive(RuleBasedStateMachine):
    """Against a model that is one dictionary: call -> owner."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members()
        self.owner: dict[CallId, str] = {}
        self.joined: set[str] = set()
        self.given: dict[CallId, list[int]] = {}

    workers = st.sampled_from(("a", "b", "c"))
    calls = st.sampled_from([CallId(bytes([k]) * 16) for k in range(4)])

    @rule(worker=workers)
    def join(self, worker: str) -> None:
        assert self.members.join(worker, {}) == frozenset()
        self.joined.add(worker)

    @rule(worker=workers, call=calls)
    def claim(self, worker: str, call: CallId) -> None:
        if worker not in self.joined:
            with pytest.raises(NotAMember):
                self.members.claim(worker, call)
            return
        given = self.members.claim(worker, call)
        if self.owner.get(call, worker) != worker:
            assert given == Busy(self.owner[call])
            return
        assert isinstance(given, Yours) and given.attempt not in self.given.setdefault(call, [])
        self.given[call].append(given.attempt)
        self.owner[call] = worker

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        freed = {call for call, owner in self.owner.items() if owner == worker}
        assert self.members.leave(worker) == freed
        self.joined.discard(worker)
        for call in freed:
            del self.owner[call]

    @rule(worker=workers, call=calls)
    def come_back_with(self, worker: str, call: CallId) -> None:
        """What it had been given last, if it was not given to another since."""
        attempts = self.given.get(call)
        if worker in self.joined or not attempts:
            return
        superseded = self.members.join(worker, {call: attempts[-1]})
        self.joined.add(worker)
        assert (call in superseded) == (call in self.owner)
        if call not in superseded:
            self.owner[call] = worker

    @rule(call=calls)
    def end(self, call: CallId) -> None:
        self.members.ended([call])
        self.owner.pop(call, None)
        self.given.pop(call, None)

    @invariant()
    def owners_agree(self) -> None:
        assert set(self.members) == self.joined
        for worker in self.joined:
            assert self.members.calls_of(worker) == {c for c, owner in self.owner.items() if owner == worker}


MembersAreExclusive.TestCase.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestMembers = MembersAreExclusive.TestCase


def test_a_step_log_counts_pauses_over_the_edges_of_a_span() -> None:
    log = StepLog()
    for at, n in ((0.0, 2), (1.0, 2), (1.0, 1), (4.0, 5), (5.0, 1)):
        log.add(at, n)
    assert log.between(0.5, 4.5) == Steps(2, 8, 2.0, 3.0)
    assert log.between(2.0, 3.0) == Steps(0, 0, 0.0, 3.0)
    assert StepLog().between(0.0, 1.0) == Steps(0, 0, 0.0, 0.0)
