"""Compaction beside a real engine: a call is moved while it decodes, and a round that hangs is in nobody's way."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from recovery import layout
from recovery.compaction import Limits
from recovery.protocol import Verdict
from storage_backends import open_store
from storage_backends.testing.faults import PASS, FaultyStore, Hang, Step, Verb
from tests.conftest import OnLoop
from tests.engine_runs import ask, capturing, greedy, prompts, read_back, take_snapshot, tokens_of, until

(PROMPT,) = prompts(1)
LONG = greedy(1000)


def test_c6_a_round_that_hangs_delays_nothing_and_the_call_is_what_it_was(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots are published and tokens decoded while it hangs; then it is put in place under what came meanwhile."""
    event, entered = threading.Event(), threading.Event()

    def plan(verb: Verb, key: str) -> Step:
        return Hang(event, entered) if verb == "put_new" and layout.COMPACTED in key else PASS

    monkeypatch.setattr(
        "vllm_hooks.opening.open_store", lambda url, **options: FaultyStore(open_store(url, **options), plan)
    )

    async def scenario() -> None:
        alone = await ask(engine, PROMPT, greedy(100), "alone")
        async with capturing(engine, quick_path, flush=1) as (wrapped, session):
            compactor = session.compactor
            compactor._limits = Limits(pieces=6)
            going = asyncio.ensure_future(ask(wrapped, PROMPT, LONG, "r"))
            while not entered.is_set():
                assert not going.done(), "the call was too short for this test"
                assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
            for _ in range(3):
                before = tokens_of(session)
                await until(lambda before=before: tokens_of(session) > before + 5)
                assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
                assert session.barriers.open and compactor.counters.rounds == 0
            event.set()
            await until(lambda: compactor.counters.rounds == 1)
            assert (await take_snapshot(session)).verdict is Verdict.PUBLISHED
            going.cancel()
            await asyncio.gather(going, return_exceptions=True)
            assert compactor.counters.failures == compactor.counters.unused == 0
        stored = read_back(quick_path)
        assert any(layout.COMPACTED in chunk.at.segment for chunk in stored.entries["r"].chunks)
        found = stored.transcripts["r"].token_ids.tolist()
        n = min(len(found), 100)
        assert n > 20 and found[:n] == alone.token_ids[:n]

    on_loop(scenario())
