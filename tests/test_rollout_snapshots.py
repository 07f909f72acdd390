"""One cut for calls and rollout, on the local disk: kills at every store call and at every moment of the trainer.

Owns: that whatever is killed when, every sample is trained exactly once on the trainer's line, token for token; that a
snapshot and a trainer's checkpoint that do not fit are refused; the double resume.
ROLLOUT_KILLS sets how many kill points are tried in memory (100; 0: all), KILL_SEED which; twelve more on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.admission.holds import HoldKind
from recovery.admission.participant import NotCovered, NotTakenUp
from recovery.admission.prefixes import Prefix
from recovery.admission.preparation import LeasesOpen, TrainerUnresolved
from recovery.admission.replay import NotOutstanding, ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.state import NAME, check_fits
from recovery.admission.trainer import Acknowledgement, Outcome, PublicationRefused
from recovery.config import RolloutConfig
from recovery.errors import (
    CannotRestore,
    Damaged,
    FingerprintMismatch,
    InputError,
    ProgramError,
    RecoveryError,
    SnapshotAbandoned,
)
from recovery.model import PolicyVersion
from recovery.participants import Participants
from storage_backends import open_store
from storage_backends.memory import MemoryStore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests import virtual_loop
from tests.fake_engine import Life
from tests.fakes import ManualClock
from tests.lives import ids, worked
from tests.rollout_lives import Job, JobLife
from tests.test_rollout import batch_of, groups, on_virtual_time, rollout

LENGTHS = [4, 2, 11, 3, 6, 1]
CONFIG = RolloutConfig(max_executing_groups=3, completed_prefetch_groups=5, max_policy_version_lag=1)


def job(seed: int = 0, **config: Any) -> Job:
    return Job(seed, LENGTHS, msgspec.structs.replace(CONFIG, **config))


def finish(one: Job, store: Any) -> None:
    for _ in range(5):
        if virtual_loop.run(one.live(store)):
            return
    raise AssertionError("a life that nobody kills does not end")


def disk(tmp_path: Path, name: object) -> Any:
    return open_store(str(tmp_path / str(name)), create=True)


def test_a_whole_job_on_disk_trains_every_sample_once(tmp_path: Path) -> None:
    one = job()
    finish(one, disk(tmp_path, "store"))
    assert one.lives == 1 and one.reused == 0


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_kill_at_any_store_call_loses_and_doubles_nothing(tmp_path: Path, place: str) -> None:
    """A41, M29: killed before a call, after it, or its answer lost; then continued."""
    counting = KillingStore(MemoryStore(), 0)
    finish(job(), counting)
    points = [(at, how) for at in range(1, counting.n_calls + 1) for how in WAYS]
    n = 12 if place == "disk" else int(os.environ.get("ROLLOUT_KILLS", "100"))
    rng = random.Random(os.environ.get("KILL_SEED", "0"))
    reused = 0
    for number, (at, how) in enumerate(rng.sample(points, n) if n else points):
        store, one = disk(tmp_path, number) if place == "disk" else MemoryStore(), job()
        with contextlib.suppress(Killed, RecoveryError):
            virtual_loop.run(one.live(KillingStore(store, at, how)))
        try:
            finish(one, store)
        except BaseException as error:
            error.add_note(f"killed at store call {at}, {how}")
            raise
        reused += one.reused
    assert reused > 0, "something was resumed"


@pytest.mark.parametrize("on_stale", ["requeue_pristine", "resume_masked", "wait_not_drop"])
def test_w3_kills_at_any_moment_of_the_loop_lose_no_long_sample(on_stale: str) -> None:
    """Generation, lease, optimizer step, trainer's checkpoint, weight push, snapshot: several in a row."""
    for seed in range(12):
        one, store, rng = job(seed, on_stale=on_stale), MemoryStore(), random.Random(seed)
        try:
            for _ in range(rng.choice([1, 3, 5])):
                if virtual_loop.run(one.live(store, rng.uniform(1, 30))):
                    break
            finish(one, store)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_w3_long_samples_are_trained_as_often_as_short_ones() -> None:
    """64 prompts of heavy-tailed lengths, five kills: each in exactly one trained sample, the mean length unchanged."""
    lengths = [1 + int(2 / (1 - position / 65) ** 1.2) for position in range(64)]
    random.Random(7).shuffle(lengths)
    config = RolloutConfig(max_executing_groups=6, completed_prefetch_groups=12, max_policy_version_lag=2)
    one, store = Job(3, lengths, config, batch=4, samples=1), MemoryStore()
    kills = 0
    for stop_s in (20.0, 45.0, 15.0, 60.0, 30.0):
        assert not virtual_loop.run(one.live(store, stop_s))
        kills += 1
    finish(one, store)
    plain = Job(3, lengths, config, batch=4, samples=1)
    finish(plain, MemoryStore())
    mean = sum(len(tokens) for _, _, tokens in one.expected()) / 64
    assert kills == 5 and one.reused > 0 and mean == one.mean_trained == plain.mean_trained


def test_double_resume_loses_nothing() -> None:
    """Snapshot, kill, restore, snapshot before anything finishes, kill, restore."""
    one, store = job(), MemoryStore()

    async def short() -> list[tuple[int, int]]:
        one.lives += 1
        life = JobLife(one, store, one.lives)
        life.rollout.start()
        await asyncio.sleep(0.5)
        assert life.snapshot()
        life.rollout._started = False
        tasks = [task for task, _ in life.rollout._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        state = json.loads(life.life.fleet.participants._all[0]._rollout.state.states()[NAME])  # type: ignore[attr-defined]
        return state["source"]["cursor"]["group_frontier"]

    virtual_loop.run(one.live(store, 12.0))
    first = virtual_loop.run(short())
    second = virtual_loop.run(short())
    assert first == second
    finish(one, store)
    assert one.reused > 0


def test_a_snapshot_that_the_trainer_has_passed_is_not_restored() -> None:
    """The trainer wrote a checkpoint that no snapshot covers: refused by name, nothing is trained twice."""
    one, store = job(), MemoryStore()
    virtual_loop.run(one.live(store, 15.0))
    one.trainer.rollout += 50
    with pytest.raises(CannotRestore, match="rollout 5"):
        virtual_loop.run(one.live(store))


def test_a_snapshot_that_does_not_fit_is_passed_over_for_one_that_does() -> None:
    store, asked = MemoryStore(), []
    newest, before = ids(worked(store))[::-1][:2]

    def fits(states: Any) -> None:
        asked.append(states)
        if len(asked) == 1:
            raise FingerprintMismatch("the trainer is at rollout 3; what was trained up to 4 is forgotten here")

    life = Life(store, 2, compatible=fits)
    assert life.restored.snapshot == before and set(asked[0]) == {"job"}
    (passed,) = life.restored.passed_over
    assert passed.what == f"snapshot {newest}" and "forgotten" in passed.reason
    asked.clear()
    with pytest.raises(FingerprintMismatch):
        Life(store, 3, compatible=fits, choice="strict")


@pytest.mark.parametrize(
    "saved, covered, rollout, fits",
    [(2, 5, 1, False), (2, 5, 2, True), (2, 5, 5, True), (2, 5, 6, False), (0, 0, 0, True)],
)
def test_a_trainer_fits_between_what_is_forgotten_and_what_is_covered(
    saved: int, covered: int, rollout: int, fits: bool
) -> None:
    versions = {"lineage": "a", "number": 0, "forks": {}}
    state = {"rollouts": {"newest": 9, "covered": covered}, "source": {"saved": saved}, "versions": versions}
    if fits:
        check_fits({NAME: json.dumps(state).encode()}, rollout)
    else:
        with pytest.raises(FingerprintMismatch, match=f"rollout {rollout}"):
            check_fits({NAME: json.dumps(state).encode()}, rollout)


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"rollouts": {"newest": 1, "covered": "x"}, "source": {}}'])
def test_a_state_that_is_none_is_damage(data: bytes) -> None:
    with pytest.raises(Damaged):
        check_fits({NAME: data}, 0)
    with pytest.raises(FingerprintMismatch, match="no rollout"):
        check_fits({}, 3)
    check_fits({}, 0)


# ---- the state of a rollout -------------------------------------------------------------------------------------


def again(states: dict[str, bytes], at: int, version: int = 0, **options: Any) -> Any:
    one = rollout(**options)
    one.restore(states, rollout=at, version=version, lineage="b")
    return one


def cut(one: Any) -> dict[str, bytes]:
    one.participant.hold("test")
    states = dict(one.participant.states())
    one.participant.release()
    return states


@on_virtual_time
async def test_a44_a45_what_the_store_has_of_a_rollout_is_taken_up_before_anything_else() -> None:
    one = rollout(8, batch=1)
    one.start()
    one.commit(await batch_of(one))
    states = cut(one)
    with pytest.raises(NotOutstanding, match="restore, then start"):
        one.restore({}, rollout=0, version=0, lineage="b")
    assert await one.prepare_checkpoint(1, lambda cause: None), "part of no snapshot: nothing to wait for"
    await one.close()
    parts, forgotten = Participants(states, ManualClock()), rollout(8, batch=1)
    with pytest.raises(NotTakenUp, match=r"call rollout\.restore"):
        parts.add(forgotten.participant)
    assert not forgotten.participant.attached and parts.states() == states, "the store's state is carried on"
    parts.add(again(states, 1, batch=1).participant)


@on_virtual_time
async def test_m34_a42_what_is_finished_leased_running_and_requeued_comes_back_once() -> None:
    one = rollout(8, max_executing_groups=3, completed_prefetch_groups=6, batch=1)
    one.start()
    trained = await batch_of(one)
    one.commit(trained)
    leased = await batch_of(one)
    one.roll_back(await batch_of(one))
    states = cut(one)
    finished = json.loads(states[NAME])["finished"]
    assert groups(leased)[0] in finished and set(states) == {NAME, *(f"group-{g}" for g in finished)}
    assert json.loads(states[NAME])["rollouts"] == {"newest": 3, "covered": 1}
    await close(one, leased)
    for at, lost in ((0, []), (1, groups(trained))):
        back = again(states, at)
        back.start()
        seen: list[int] = []
        while len(seen) < 8 - len(lost):
            lease = await batch_of(back)
            assert lease.rollout > at
            seen += groups(lease)
            back.commit(lease)
        assert sorted(seen) == [g for g in range(8) if g not in lost]
        await close(back)
    with pytest.raises(FingerprintMismatch, match="up to 1 of 3"):
        again(states, 2)


async def close(one: Any, *leases: Any) -> None:
    for lease in leases:
        one.roll_back(lease)
    await one.close()


@on_virtual_time
async def test_a53_a_finished_group_comes_back_with_the_version_it_was_admitted_under() -> None:
    one = rollout(2, max_policy_version_lag=1)
    one.start()
    hold = one.acquire(HoldKind.DRAIN, "evaluation", "")
    assert await one.wait_terminal(hold)
    one.release(hold)
    states = cut(one)
    await one.close()
    for version, passes in ((0, True), (1, True), (2, False)):
        ran: list[str] = []
        back = again(states, 0, version, n=2, max_policy_version_lag=1, engines=[Counting(ran)])
        back.start()
        back.commit(await batch_of(back))
        assert back.version == PolicyVersion("b", version) and (ran == []) is passes
        await back.close()


class Counting:
    def __init__(self, ran: list[str]) -> None:
        self.ran = ran

    async def generate(self, sample: Any) -> Any:
        self.ran.append(sample.request_id)
        await asyncio.sleep(1)
        return sample


@on_virtual_time
async def test_v9_a_trainer_that_went_back_goes_on_in_a_new_lineage() -> None:
    one = rollout(9, max_policy_version_lag=2, completed_prefetch_groups=4)

    async def push(target: PolicyVersion) -> None:
        pass

    for _ in range(12):
        await one.updates.update(push)
    one.start()
    hold = one.acquire(HoldKind.DRAIN, "evaluation", "")
    assert await one.wait_terminal(hold)
    states = cut(one)
    one.release(hold)
    await one.close()
    ran: list[str] = []
    back = again(states, 0, 10, n=9, max_policy_version_lag=2, engines=[Counting(ran)])
    assert back.version == PolicyVersion("b", 10)
    for _ in range(2):
        await back.updates.update(push)
    back.start()
    names = []
    for _ in range(9):
        lease = await batch_of(back)
        names.append(lease.groups[0][0].request_id)
        back.commit(lease)
    assert sorted(names)[:3] == ["p0/0.1", "p1/0.1", "p2/0"], "the dead branch's 12 is not this 12"
    assert back.metrics()["rollout/fully_async/lineage_mismatches"] == 2
    await back.close()


class Saved:
    """A prefix of group 1 that was flushed under a version which no snapshot knows."""

    saved = False

    def of(self, request_id: str) -> Prefix | None:
        return Prefix(5, frozenset({PolicyVersion("a", 1)})) if request_id == "p1/0" else None

    def known(self) -> Any:
        return ("p1/0",)

    def forget(self, request_ids: Any) -> None:
        pass


@pytest.mark.parametrize("limit", [None, 2])
def test_v9_versions_that_no_snapshot_knows_do_not_pass_for_new_ones(limit: int | None) -> None:
    """Snapshot at 0, then 1 was published and sampled under; back at 0, a new 1 comes before the group is begun."""

    async def main() -> None:
        one = rollout(2)
        states = cut(one)
        await one.close()
        for found in (states, {}):
            ran: list[str] = []
            options = {"max_policy_version_lag": limit, "prefixes": Saved(), "max_executing_groups": 1}
            back = again(found, 0, 0, n=2, engines=[Counting(ran)], **options)

            async def push(target: PolicyVersion) -> None:
                pass

            await back.updates.update(push)
            back.start()
            for _ in range(2):
                back.commit(await batch_of(back))
            assert ran == ["p0/0", "p1/0.1"]
            await back.close()

    virtual_loop.run(main())


@on_virtual_time
async def test_a_group_that_is_not_json_is_generated_again() -> None:
    async def generate(samples: Any, engine: Any) -> Any:
        samples[0].extra["object"] = object()
        return samples

    one = rollout(1, generate=generate)
    one.start()
    lease = await batch_of(one)
    with pytest.warns(UserWarning, match="'p0', nor others like it: .*object is not JSON"):
        states = cut(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        assert set(states) == set(cut(one)) == {NAME}
    back = again(states, 0, n=1)
    back.start()
    assert groups(await batch_of(back)) == [0]
    await close(one, lease)


@pytest.mark.parametrize("change", ["missing", "not json", "bad sample", "bad versions"])
def test_a_state_that_is_incomplete_changes_nothing(change: str) -> None:
    async def main() -> None:
        one = rollout(2)
        one.start()
        lease = await batch_of(one)
        states = cut(one)
        await close(one, lease)
        group = next(name for name in states if name != NAME)
        match change:
            case "missing":
                del states[group]
            case "not json":
                states[group] = b"{"
            case "bad sample":
                states[group] = b'{"draw": 0, "version": null, "samples": [{}]}'
            case "bad versions":
                state = json.loads(states[NAME])
                state["versions"] = {"lineage": ""}
                states[NAME] = json.dumps(state).encode()
        back = rollout(2)
        with pytest.raises(Damaged):
            back.restore(states, rollout=0, version=0, lineage="b")
        back.start()
        fresh = await batch_of(back)
        assert groups(fresh) == [0] and fresh.groups[0][0].request_id == "p0/0"
        await close(back, fresh)

    virtual_loop.run(main())


@on_virtual_time
async def test_a_rollout_that_cannot_stand_still_costs_the_snapshot_and_stays_released() -> None:
    one = rollout(3)
    one.start()
    with pytest.raises(SnapshotAbandoned, match="not held"):
        one.participant.states()
    one.ownership.fail(RuntimeError("worker"))
    one.participant.hold("test")
    with pytest.raises(SnapshotAbandoned, match="worker"):
        one.participant.states()
    one.participant.release()
    one.participant.release()
    assert one.ownership.gate.active == ()
    await one.close()
    with pytest.raises(SnapshotAbandoned, match="closed"):
        one.participant.hold("test")
    one.participant.release()


@on_virtual_time
async def test_a39_a40_a_checkpoint_waits_for_a_snapshot_without_leases_or_open_publications() -> None:
    one = rollout(4, batch=1)
    one.participant.attach({})
    causes: list[str] = []

    def snapshot(cause: str) -> None:
        """What a coordinator does, at once."""
        causes.append(cause)
        one.participant.hold(cause)
        try:
            states = one.participant.states()
        except SnapshotAbandoned:
            states = None
        one.participant.resume(states is not None)
        one.participant.release()

    one.start()
    trainer = one.trainer_admission()
    first, second = await batch_of(one), await batch_of(one)
    known = trainer.publish(first, first.rollout, ["d"], [("actor", 0)])
    trainer.commit(known, [Acknowledgement(known, ("actor", 0))])
    with pytest.raises(LeasesOpen, match=f"rollouts {second.rollout}"):
        await one.prepare_checkpoint(first.rollout, snapshot)
    snapshot("interval")
    assert one.participant.covered == first.rollout, "a snapshot in between is taken all the same (decision 0013)"
    with pytest.raises(LeasesOpen):  # and is none that a checkpoint may rely upon
        await one.prepare_checkpoint(first.rollout, snapshot)
    one.commit(second)
    other = trainer.publish(await batch_of(one), second.rollout + 1, ["d"], [("actor", 0)])
    with pytest.raises(LeasesOpen):
        await one.prepare_checkpoint(second.rollout, snapshot)
    trainer._move(trainer._find(other), Outcome.COMMIT_FAILED)  # as a commit whose answer never came leaves it
    one.commit(trainer._find(other).lease)
    with pytest.raises(TrainerUnresolved, match="1 publications"):
        await one.prepare_checkpoint(other.rollout, snapshot)
    trainer._move(trainer._find(other), Outcome.COMMITTED)
    assert not await one.prepare_checkpoint(other.rollout, lambda cause: None, timeout_s=3.0), "the deadline"
    assert await one.prepare_checkpoint(other.rollout, snapshot)
    assert causes == ["checkpoint", "interval", *["checkpoint"] * 4]
    one.checkpoint_saved(second.rollout)
    with pytest.raises(PublicationRefused):
        trainer.status(known)  # forgotten: nobody asks behind a checkpoint
    assert trainer.status(other) is Outcome.COMMITTED
    await one.close()


@on_virtual_time
async def test_a_checkpoint_is_of_a_batch_that_was_committed() -> None:
    """Also where there are no snapshots: a number that is too high would refuse every batch up to it."""
    one = rollout(3)
    one.start()
    for _ in range(3):
        lease = await batch_of(one)
        for wrong in (lease.rollout, lease.rollout + 99):
            with pytest.raises(NotCovered, match="was not committed"):
                one.checkpoint_saved(wrong)
        one.commit(lease)
        one.checkpoint_saved(lease.rollout)
    await one.close()


# ---- participants -----------------------------------------------------------------------------------------------


class Part:
    def __init__(self, *names: str, name: str = "", refuses: bool = False) -> None:
        self.names, self.name, self.refuses, self.events = names, name or names[0], refuses, []

    def attach(self, carried: Mapping[str, bytes]) -> None:
        self.events.append("attach")

    def owns(self, name: str) -> bool:
        return name in (*self.names, "mine")

    has_news = False

    def hold(self, reason: str) -> None:
        if self.refuses:
            raise SnapshotAbandoned("not now")
        self.events.append(reason)

    def states(self) -> dict[str, bytes]:
        return {name: b"new" for name in self.names}

    def resume(self, published: bool) -> None:
        self.events.append(str(published))

    def release(self) -> None:
        self.events.append("release")

    def stopped(self, error: RecoveryError) -> None:
        self.events.append(str(error))


def test_a_state_is_carried_until_its_owner_is_there() -> None:
    parts = Participants({"job": b"j", "a": b"old", "mine": b"old"}, ManualClock())
    assert parts.states() == {"job": b"j", "a": b"old", "mine": b"old"}
    one = Part("a")
    parts.add(one)
    assert parts.states() == {"job": b"j", "a": b"new"}, "what the owner leaves out is gone"
    with pytest.raises(InputError, match="already"):
        parts.add(Part("a", "b"))
    assert parts.states() == {"job": b"j", "a": b"new"}, "refused, nothing changed"
    parts.add(Part("a", name="other"))
    with pytest.raises(ProgramError, match="two participants"):
        parts.states()


def test_who_was_held_is_released_whoever_refused() -> None:
    parts, one, two = Participants({}, ManualClock()), Part("a"), Part("b", refuses=True)
    parts.add(one)
    parts.add(two)
    with pytest.raises(SnapshotAbandoned):
        parts.hold("interval")
    parts.resume(False)
    parts.release()
    assert one.events == ["attach", "interval", "False", "release"] and two.events == ["attach", "False", "release"]


def test_the_source_refuses_a_state_over_owned_work() -> None:
    source = ReplaySource(IterableRows([{"id": 1}]), samples_per_prompt=1)
    state = source.to_json()
    source.restore(state, 0)
    assert [one.reservation_id for one in source.reserve(1)] == ["1"]
