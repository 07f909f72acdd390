"""An engine whose core is killed: what callers see, what is published, what the next session has (W12)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from recovery.model import OPEN
from tests.conftest import OnLoop
from tests.dying_engine import KINDS
from tests.engine_runs import ask, assert_same, capturing, greedy, prompts, read_back


def test_w12_nothing_is_published_from_a_dead_engine(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path
) -> None:
    """W12: every call raises vLLM's own error, at once. No snapshot comes after it; what was captured is flushed, is an
    exact prefix of the uninterrupted answers, and is all there in the next session, which carries every call on.
    """
    store = tmp_path / "store"
    command = [sys.executable, "-m", "tests.dying_engine", str(tiny_model), str(store)]
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["errors"] == ["EngineDeadError"] * 6 and found["late"] == "EngineDeadError"
    assert (found["snapshots"], found["last"], found["slots_after"]) == (1, None, 0)
    assert "EngineDeadError" in found["dead"]
    captured = found["captured"]
    for number, kind in enumerate(KINDS):
        given = found["yielded"][f"r{number}"]
        if kind in ("DELTA", "CUMULATIVE"):
            assert given == captured[f"r{number}"][0]
        else:
            assert given == []
    assert sum(len(ids) for ids, _ in captured.values()) >= 500
    before = read_back(store)
    assert sum(entry.n_tokens for entry in before.entries.values()) < sum(len(ids) for ids, _ in captured.values())

    async def scenario() -> None:
        params = greedy(900)
        wanted = await asyncio.gather(*(ask(engine, p, params, f"bare-{i}") for i, p in enumerate(prompts(6))))
        async with capturing(engine, store) as (wrapped, session):
            assert session.restored is not None and session.restored.adopted_segments >= 1
            stored = read_back(store)
            for name, (ids, logprobs) in captured.items():
                transcript, entry = stored.transcripts[name], stored.entries[name]
                assert (entry.state, transcript.token_ids.tolist()) == (OPEN, ids)
                assert transcript.logprobs.tolist() == logprobs
                whole = wanted[int(name[1:])]
                assert ids == whole.token_ids[: len(ids)]
                assert np.allclose(logprobs, whole.sampled[: len(ids)], rtol=0, atol=2e-5)
            answers = await asyncio.gather(*(ask(wrapped, p, params, f"r{i}") for i, p in enumerate(prompts(6))))
            assert session.counters.tokens_captured == 6 * 900 - sum(len(ids) for ids, _ in captured.values())
        for got, whole in zip(answers, wanted, strict=True):
            assert_same(got, whole, tolerance=2e-5)

    on_loop(scenario())
