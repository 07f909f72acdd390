"""A trainer that goes back, and back again: which of its checkpoints a snapshot fits, against what was really trained.

Owns: that no checkpoint of a branch that was left is taken up, that one on the line always is, and what is said.
Does not know: stores, engines; the trainer's checkpoint is the list of what it was trained on.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest

from recovery.admission.leases import Lease
from recovery.admission.limits import Exhausted
from recovery.admission.samples import Sample
from recovery.admission.state import NAME, check_fits
from recovery.admission.versions import PolicyVersions
from recovery.errors import FingerprintMismatch
from recovery.model import PolicyVersion
from tests import virtual_loop
from tests.test_rollout import batch_of, groups, on_virtual_time, rollout
from tests.test_rollout_snapshots import cut

N = 6


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the trainer; its content is the oracle."""

    rollout: int = 0
    version: PolicyVersion | int = 0
    trained: tuple[int, ...] = ()


class Slow:
    """Samples end in an order of this life's own, so that branches differ."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def generate(self, sample: Sample) -> Sample:
        await asyncio.sleep(self._rng.choice([1, 2, 5]))
        sample.token_ids = [1]
        return sample


async def push(version: PolicyVersion) -> None:
    pass


def fitting(snapshots: list[dict[str, bytes]], start: Saved) -> dict[str, bytes] | None:
    """The newest that fits, as a restore takes it."""
    for states in reversed(snapshots):
        try:
            check_fits(states, start.rollout, start.version)
            return states
        except FingerprintMismatch:
            pass
    return None


async def life(
    name: str, rng: random.Random, states: dict[str, bytes], start: Saved, batches: int
) -> tuple[list[dict[str, bytes]], list[Saved], bool]:
    """Its snapshots, its checkpoints, and whether it came to the end of the data."""
    one = rollout(N, engines=[Slow(rng)], max_executing_groups=4, completed_prefetch_groups=6)
    one.restore(states, rollout=start.rollout, version=start.version, lineage=name)
    one.participant.attach(states)
    one.start()
    trained, snapshots, checkpoints, ended = list(start.trained), [], [], False
    for _ in range(batches):
        got = await one.next_batch()
        if isinstance(got, Exhausted):
            ended = True
            break
        assert isinstance(got, Lease)
        one.commit(got)
        trained += groups(got)
        if rng.random() < 0.5:
            await one.updates.update(push)
        if rng.random() < 0.8:
            snapshots.append(cut(one))
            one.participant.resume(True)
            if rng.random() < 0.7:
                checkpoints.append(Saved(got.rollout, one.version, tuple(trained)))
                if rng.random() < 0.7:
                    one.checkpoint_saved(got.rollout)
    if ended:
        assert Counter(trained) == Counter(range(N)), "every group once on this trainer's line"
    await one.close()
    return snapshots, checkpoints, ended


def test_a_checkpoint_is_taken_up_on_its_own_line_and_nowhere_else() -> None:
    """The user goes back to any checkpoint; a life may die before it has written one. Every snapshot is kept."""
    counts: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        snapshots: list[dict[str, bytes]] = [{}]
        checkpoints = [Saved()]
        for number in range(6):
            start = rng.choice(checkpoints[-3:])
            states = fitting(snapshots, start)
            assert states is not None, f"seed {seed}: a checkpoint has a snapshot of its own line"
            counts["passed over"] += states is not snapshots[-1]
            batches = N + 1 if number == 5 else rng.choice([1, 2, 3])
            made, saved, ended = virtual_loop.run(life(f"e{number}", rng, states, start, batches))
            snapshots += made
            checkpoints += saved
            counts["ended"] += ended
    assert counts["passed over"] > 40 and counts["ended"] > 60, counts


async def two_branches() -> tuple[Saved, Saved, dict[str, bytes]]:
    """A (rollout 1) and B (rollout 2) of life e1, and a snapshot of e2, which went on from A to rollout 2."""
    one = rollout(4)
    one.restore({}, rollout=0, version=0, lineage="e1")
    one.start()
    first = await batch_of(one)
    one.commit(first)
    states = cut(one)
    a = Saved(first.rollout, one.version, tuple(groups(first)))
    second = await batch_of(one)
    one.commit(second)
    b = Saved(second.rollout, one.version, (*a.trained, *groups(second)))
    await one.close()
    two = rollout(4)
    two.restore(states, rollout=1, version=a.version, lineage="e2")
    two.start()
    for _ in range(2):
        two.commit(await batch_of(two))
    newer = cut(two)
    await two.close()
    return a, b, newer


@on_virtual_time
async def test_a_checkpoint_of_a_branch_that_was_left_is_refused_by_name() -> None:
    a, b, newer = await two_branches()
    check_fits(newer, a.rollout, a.version)
    check_fits(newer, 2, PolicyVersion("e2", 0))
    with pytest.raises(FingerprintMismatch, match=r"rollout 2 of lineage 'e1'.*'e2'.*went back to rollout 1"):
        rollout(4).restore(newer, rollout=b.rollout, version=b.version, lineage="e3")
    with pytest.raises(FingerprintMismatch, match=r"'e7', which did not lead to .*'e2' or 'e1'"):
        check_fits(newer, 1, PolicyVersion("e7", 0))


@on_virtual_time
async def test_a_checkpoint_with_its_number_only_is_taken_where_it_can_be_of_one_branch() -> None:
    a, b, newer = await two_branches()
    check_fits(newer, a.rollout, 0)
    with pytest.raises(FingerprintMismatch, match=r"pass version=PolicyVersion.*'e2'"):
        check_fits(newer, b.rollout, 0)
    state = json.loads(newer[NAME])
    del state["versions"]["begun"]  # as it was written before
    check_fits({NAME: json.dumps(state).encode()}, b.rollout, 0)
    assert PolicyVersions.from_json(state["versions"]).line() == [("e2", None), ("e1", None), ("a", None)]
