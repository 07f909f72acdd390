"""vllm_hooks.session without an engine: what a loop of one's own is told when its process must stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recovery.admission.training import train_all
from recovery.config import CheckpointingConfig
from recovery.errors import Fenced
from recovery.resume import StopRules
from tests import virtual_loop
from tests.test_rollout import rollout
from vllm_hooks.session import RecoverySession


def test_c8_a_trainer_that_was_fenced_is_told_and_does_not_ask_for_snapshots_for_ever(tmp_path: Path) -> None:
    """C8: its snapshots are never published again, and without one its checkpoint may not be written."""
    config = CheckpointingConfig(enabled=True, store=str(tmp_path / "store"))
    session = RecoverySession.open(config, must={}, stop=StopRules((), 4096))

    class Trainer:
        async def train(self, batch: Any) -> None:
            session.fail(Fenced("another run has taken the store over"))

        async def push(self, version: Any) -> None:
            """There are no weights."""

        async def save(self, number: int, version: Any) -> None:
            raise AssertionError("no snapshot covers it")

    async def scenario() -> None:
        one = rollout(2, batch=1)
        session.participants.add(one.participant)
        one.start()
        with pytest.raises(Fenced, match="taken the store over"):
            await train_all(one, Trainer(), want_snapshot=session.want_snapshot)
        await one.close()

    virtual_loop.run(scenario())
    session.stager.close(wait=True)
