"""storage_backends.stagings: memory passes what every staging has to pass; when a queue is refused, and how."""

from __future__ import annotations

import sys

import pytest

from recovery.config import parse_config
from recovery.errors import ConfigError
from storage_backends.stagings import MemoryRows
from storage_backends.testing.stagings import StagingConformance
from storage_backends.transfer_queue import QueueRows


class TestMemory(StagingConformance):
    EXAMPLES = 200

    def make_rows(self) -> MemoryRows:
        return MemoryRows()


def test_a_queue_that_is_not_installed_is_an_error_that_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    with pytest.raises(ConfigError, match="needs transfer_queue, which is not installed") as caught:
        QueueRows("p")
    assert "pip install 'prefix-recovery[transfer-queue]'" in caught.value.hint


JOB = {"model": "m", "prompts": "p.jsonl", "output": "o.jsonl"}


@pytest.mark.parametrize(
    ("block", "more", "said"),
    [
        ({}, {}, "runs in one process"),
        ({"gym": {"generation_chunk_flush_tokens": 0}}, {"workers": 2}, "nothing is flushed between two snapshots"),
    ],
)
def test_a_queue_that_would_be_of_no_use_is_refused(
    block: dict[str, object], more: dict[str, object], said: str
) -> None:
    checkpointing = {"enabled": True, "store": "s", "staging": "transfer_queue", **block}
    with pytest.raises(ConfigError, match=r"rollout_checkpointing\.staging") as caught:
        parse_config({**JOB, **more, "rollout_checkpointing": checkpointing})
    assert said in str(caught.value)


@pytest.mark.parametrize("more", [{"workers": 2}, {"ray": {"address": "auto"}}])
def test_a_queue_on_ray_is_taken(more: dict[str, object]) -> None:
    checkpointing = {"enabled": True, "store": "s", "staging": "transfer_queue"}
    assert parse_config({**JOB, **more, "rollout_checkpointing": checkpointing}).rollout_checkpointing.staging
