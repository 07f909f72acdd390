"""vllm_hooks.rollout_engine on the real engine: a rollout whose process goes away in mid-decode, twice, and goes on.

The reference is always the bare engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from recovery.admission import FullyAsyncRollout
from recovery.admission.leases import Lease
from recovery.admission.limits import Exhausted
from recovery.admission.replay import ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.samples import Sample
from recovery.admission.state import check_fits
from recovery.config import RolloutConfig
from recovery.model import OPEN, PolicyVersion
from tests.conftest import OnLoop
from tests.engine_runs import ask as ask_bare
from tests.engine_runs import block, greedy, open_session, prompts, standing
from vllm_hooks.opening import SystemClock, SystemEntropy
from vllm_hooks.rollout_engine import RolloutEngine

LENGTHS = [40, 25, 300, 30, 300, 300, 30, 300]
"""Of three groups that are generated at a time a short one ends when the long ones have far to go: in the first life
the fourth, while the fifth has at most 30 of 300 tokens; in the second the seventh, beside what was carried on."""
CONFIG = RolloutConfig(max_executing_groups=3, completed_prefetch_groups=3, max_policy_version_lag=4)


def ask(sample: Sample) -> tuple[Any, Any]:
    prompt = [*sample.row["ids"], 5 + sample.sample_index]
    return {"prompt_token_ids": prompt}, greedy(sample.row["max_tokens"])


def rows() -> list[dict[str, Any]]:
    ids = [[int(i) for i in p["prompt_token_ids"]] if isinstance(p, dict) else list(p) for p in prompts(len(LENGTHS))]
    return [{"id": f"p{i}", "ids": ids[i], "max_tokens": n} for i, n in enumerate(LENGTHS)]


class Life:
    """One process: session, rollout, and the trainer at its checkpoint `rollout`."""

    def __init__(self, engine: Any, store: Path, *, rollout: int, version: PolicyVersion) -> None:
        fits = partial(check_fits, rollout=rollout, version=version)
        self.session = open_session(engine, block(store), compatible=fits)
        self.engine = RolloutEngine(engine, self.session, ask)
        self.rollout = FullyAsyncRollout(
            ReplaySource(IterableRows(rows()), samples_per_prompt=2),
            [self.engine],
            CONFIG,
            batch_groups=1,
            clock=SystemClock(),
            entropy=SystemEntropy(),
            prefixes=self.engine,
            on_version=self.engine.serve,
        )
        assert self.session.restored is not None
        self.rollout.restore(
            self.session.restored.states, rollout=rollout, version=version, lineage=f"e{self.session.stored.epoch}"
        )
        self.session.participants.add(self.rollout.participant)
        self.session.start()
        self.rollout.start()

    async def crash(self) -> None:
        """Nothing more is published; the engine is free for the next life."""
        self.rollout._started = False
        await self.session.stop(last_snapshot=False)
        tasks = [task for task, _ in self.rollout._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def saved_in_mid_decode(life: Life) -> bool:
    """Whether the last snapshot has a call with tokens that has still far to go."""
    return any(entry.state == OPEN and 0 < entry.n_tokens <= 200 for entry in life.session.stored.entries())


async def push(target: PolicyVersion) -> None:
    """The weights stay what they are: what is tested is who is stamped with what."""


def test_a_rollout_that_loses_its_process_twice_trains_every_sample_once(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path
) -> None:
    """B7: a prefix of an earlier life keeps the versions that sampled it, and its suffix has its own."""

    async def scenario() -> None:
        wanted = {}
        for row in rows():
            for i in range(2):
                prompt, params = ask(Sample(row_id="", group_index=0, sample_index=i, request_id="", row=row))
                wanted[row["id"], i] = (await ask_bare(engine, prompt, params, f"bare {row['id']} {i}")).token_ids
        trained: list[Sample] = []
        at, version, reused = 0, PolicyVersion(), 0
        for number in range(3):
            life = Life(engine, tmp_path / "store", rollout=at, version=version)
            while not isinstance(got := await life.rollout.next_batch(timeout_s=200), Exhausted):
                assert isinstance(got, Lease), got
                life.rollout.commit(got)
                trained += got.groups[0]
                if got.rollout == 1:
                    await life.rollout.updates.update(push)
                    assert life.session.version == PolicyVersion(f"e{number + 1}", 1)
                async with standing(engine):  # a slow disk does not let the calls come to their ends
                    assert await life.rollout.prepare_checkpoint(got.rollout, life.session.want_snapshot, timeout_s=200)
                at, version = got.rollout, life.rollout.version  # the trainer's checkpoint
                life.rollout.checkpoint_saved(at)
                if number < 2 and saved_in_mid_decode(life):
                    break
            assert number == 2 or isinstance(got, Lease), "it was not lost in mid-decode"
            reused += int(life.rollout.metrics()["rollout/fully_async/tokens_reused"])
            await life.crash()
        assert Counter((s.row_id, s.sample_index) for s in trained) == Counter(dict.fromkeys(wanted, 1))
        for sample in trained:
            assert sample.token_ids == wanted[sample.row_id, sample.sample_index], sample.request_id
            assert len(sample.logprobs) == len(sample.token_ids) == sample.version_spans[-1][1]
            assert {lineage for _, _, lineage, _ in sample.version_spans} <= {"e1", "e2", "e3"}
        assert reused > 0, "something was resumed in mid-decode"
        assert any(number == 1 for s in trained for *_, number in s.version_spans)
        assert any(len(s.version_spans) > 1 for s in trained), "prefix of one life, suffix of the next"
        left = {entry.identity.rollout for entry in life.session.stored.entries()}
        assert len(left) < len(wanted), "trained calls leave the ledger"

    on_loop(scenario())
