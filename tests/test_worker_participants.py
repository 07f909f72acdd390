"""Participants of a job with many workers: asked by whichever coordinator there is, never rewound by a new one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from recovery.blobs import unpacked
from recovery.errors import InputError
from tests.carried_stores import newest
from tests.fake_engine import MUST, PROMPTS, STOP, reference_answers
from tests.test_ray_workers import played
from tests.worker_worlds import World, until
from vllm_hooks.ray_workers.coordination import Coordination


class Notes:
    """A tool whose state is a number."""

    name = "notes"

    def __init__(self) -> None:
        self.n = 0
        self.restored: list[tuple[bytes, bool]] = []
        self.told: list[bool] = []

    def prepare(self) -> bytes:
        return str(self.n).encode()

    def commit(self, published: bool) -> None:
        self.told.append(published)

    def restore(self, state: bytes, rewound: bool) -> None:
        self.restored.append((state, rewound))
        self.n = int(state)


def stored(coordination: Coordination) -> bytes | None:
    """What the newest snapshot has of the notes."""
    found = newest(coordination.opened.store).states.get("participant-notes")
    return None if found is None else unpacked(found, "participant-notes")


def test_a_participant_s_state_is_in_every_snapshot_and_comes_back(tmp_path: Path, rng: random.Random) -> None:
    async def first(world: World) -> None:
        coordination, notes = await world.coordinate(), Notes()
        await world.worker()
        await asyncio.to_thread(coordination.participants.join, notes, 60.0)
        with pytest.raises(InputError, match="is taken"):
            coordination.participants.join(Notes(), 60.0)
        for n in (1, 2):
            notes.n = n
            await world.snapshot()
            assert stored(coordination) == str(n).encode()
        await until(lambda: notes.told == [True, True], "it is told")
        assert notes.restored == []
        assert await world.answers(PROMPTS[:2]) == reference_answers(PROMPTS[:2])

    played(tmp_path, rng, first)

    async def second(world: World) -> None:
        coordination, notes = await world.coordinate(owner="another run"), Notes()
        await asyncio.to_thread(coordination.participants.join, notes, 60.0)
        assert notes.restored == [(b"2", False)] and notes.n == 2
        coordination.participants.leave("notes")
        await world.snapshot()
        assert stored(coordination) is None

    played(tmp_path, rng, second)


def test_a_coordinator_in_another_s_place_waits_for_the_participants_and_does_not_rewind_them(
    tmp_path: Path, rng: random.Random
) -> None:
    """A snapshot of its own before they are with it would have calls of now and a state of then."""

    async def play(world: World) -> None:
        coordination, notes = await world.coordinate(), Notes()
        await asyncio.to_thread(coordination.participants.join, notes, 60.0)
        notes.n = 1
        await world.snapshot()
        old = world.kill_coordinator()
        notes.n = 2
        made = await asyncio.to_thread(
            lambda: Coordination.open(world.config, MUST, {}, STOP, owner="this run", again=True)
        )
        made.start()
        made.request("request")
        assert made.figures().waits and made.figures().snapshots == 0
        made.go_on([(notes, 60.0)])
        await until(lambda: made.figures().snapshots > 0, "it takes one")
        assert not made.figures().waits and stored(made) == b"2" and notes.restored == []
        world.coordination = made
        await asyncio.to_thread(lambda: old.finish(last=True))

    played(tmp_path, rng, play)
