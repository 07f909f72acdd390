"""storage_backends.stagings: memory passes what every staging has to pass; when a queue is refused, and how."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from recovery.config import parse_config
from recovery.errors import ConfigError, StoreUnavailable
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


class Package:
    """Answers that the real one cannot be made to give at will; what it does give is tested with a real one."""

    async def async_kv_batch_get(self, *asked: str) -> Any:
        raise ValueError("keys or partition were not found!")

    async def async_kv_clear(self, *asked: Any) -> None:
        raise ValueError("something else")

    async def async_kv_list(self, partition: str) -> Any:
        await asyncio.Event().wait()


def test_an_answer_that_never_comes_and_one_that_nobody_expects_are_the_same_to_who_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage_backends.transfer_queue.package", Package)
    monkeypatch.setattr(QueueRows, "_attach", lambda self: None)
    rows = QueueRows("p", answer_s=0.05)
    assert rows.get("k") is None
    with pytest.raises(StoreUnavailable, match="list: no answer within"):
        rows.keys()
    with pytest.raises(StoreUnavailable, match="clear: ValueError: something else"):
        rows.clear(["k"])


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
