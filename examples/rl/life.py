"""One process-life of the job: engine, session, rollout and trainer, put together from what the folder holds.

Owns: the order in which a life begins and ends, and its figures.
Does not know: the loop's order (recovery.admission.training), the command line.

Invariants:
1. The engine is started before torch is used here: it forks.
2. (A60) A life begins with a push of its checkpoint's weights, published as the version that the checkpoint names.
3. (A42) Nothing is read of a life before but the folder: the newest checkpoint, and the newest snapshot that fits it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from examples.rl.checkpoints import Anchor, Checkpoints
from examples.rl.moments import Moments
from examples.rl.reward import reward, rows
from prefix_recovery.engine import Engine
from recovery.admission import FullyAsyncRollout
from recovery.admission.leases import Lease
from recovery.admission.replay import ReplaySource
from recovery.admission.rows import IterableRows
from recovery.admission.samples import Sample
from recovery.admission.state import check_fits
from recovery.admission.training import train_all
from recovery.config import LoopConfig
from recovery.model import PolicyVersion
from vllm_hooks import open_session
from vllm_hooks.opening import SystemClock, SystemEntropy
from vllm_hooks.rollout_engine import RolloutEngine
from vllm_hooks.surface import tokenizer_of
from vllm_hooks.weights import reload_weights

ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 192 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and how. The same in every life."""

    folder: Path
    model: Path
    loop: LoopConfig
    prompts: int
    samples: int
    batch: int
    shortest: int
    longest: int
    learning_rate: float
    save_every: int

    @property
    def n_samples(self) -> int:
        return self.prompts * self.samples


class Training:
    """recovery.admission.training.Trainer: a Policy, its checkpoints, and the engine that serves it."""

    def __init__(self, job: Job, llm: Any, checkpoints: Checkpoints, at: Moments) -> None:
        from examples.rl.policy import Policy  # it imports torch: invariant 1

        self._job, self._llm, self._checkpoints, self._at = job, llm, checkpoints, at
        folder, anchor = checkpoints.newest()
        self.anchor = replace(anchor, lives=anchor.lives + 1)
        self._seen = {(one["id"], one["sample"]) for one in anchor.trained}
        self._tokenizer: Any = tokenizer_of(llm)
        self._policy = Policy(folder or job.model, job.learning_rate)

    def ask(self, sample: Sample) -> tuple[Any, Any]:
        """The same request for the same sample in every life."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0,
            max_tokens=sample.row["max_tokens"],
            ignore_eos=True,
            logprobs=0,
            seed=zlib.crc32(sample.request_id.encode()),
        )
        return {"prompt_token_ids": self.prompt_ids(sample)}, params

    def prompt_ids(self, sample: Sample) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(sample.row["prompt"])]

    # ---- recovery.admission.training.Trainer -------------------------------------------------------------------

    async def train(self, batch: Lease) -> None:
        prompts = [[self.prompt_ids(sample) for sample in group] for group in batch.groups]
        mean = await asyncio.to_thread(self._policy.step, batch.groups, prompts)
        entries = [_entry(batch, sample) for group in batch.groups for sample in group]
        for one in entries:
            key = (one["id"], one["sample"])
            assert key not in self._seen, f"{key} was trained before"
            self._seen.add(key)
        trained = [*self.anchor.trained, *entries]
        self.anchor = replace(self.anchor, trained=trained, rewards=[*self.anchor.rewards, mean])
        print(f"rollout {batch.rollout}: {len(entries)} samples, mean reward {mean:.3f}", flush=True)

    async def push(self, version: PolicyVersion) -> None:
        folder = self._job.folder / "weights"
        await asyncio.to_thread(self._policy.save_weights, folder)
        self._at("weights_written")
        await reload_weights(self._llm, folder, self._policy.weight_names)
        self._at("weights_loaded")
        shutil.rmtree(folder)

    async def save(self, rollout: int, version: PolicyVersion) -> None:
        self.anchor = replace(self.anchor, rollout=rollout, version=version.number, lineage=version.lineage)

        def write(folder: Path) -> None:
            self._policy.save_weights(folder)
            self._policy.save_optimizer(folder)

        await asyncio.to_thread(self._checkpoints.save, self.anchor, write, partial(self._at, "checkpoint_written"))


def _entry(batch: Lease, sample: Sample) -> dict[str, Any]:
    oldest = min(number for *_, number in sample.version_spans)
    return {
        "id": sample.row_id,
        "sample": sample.sample_index,
        "rollout": batch.rollout,
        "tokens": len(sample.token_ids),
        "lag": batch.version.number - oldest,
        "spans": len(sample.version_spans),
        "reward": round(reward(sample.text), 4),
    }


def run(job: Job, at: Moments) -> dict[str, Any]:
    """The job to its end, from wherever the life before was killed. Returns its figures."""
    checkpoints = Checkpoints(job.folder / "checkpoints")
    _, anchor = checkpoints.newest()
    if len(anchor.trained) == job.n_samples:  # a life before was killed after its last checkpoint
        return figures(job, anchor, {})
    shutil.rmtree(job.folder / "weights", ignore_errors=True)
    engine = Engine(str(job.model), ENGINE)
    try:
        return asyncio.run(_live(job, engine.llm, checkpoints, at))
    finally:
        engine.close()


async def _live(job: Job, llm: Any, checkpoints: Checkpoints, at: Moments) -> dict[str, Any]:
    trainer = Training(job, llm, checkpoints, at)
    begun = trainer.anchor
    session = await open_session(
        llm,
        job.loop.rollout_checkpointing,
        must={"rl.prompts": job.prompts, "rl.samples": job.samples, "rl.longest": job.longest},
        compatible=partial(check_fits, rollout=begun.rollout, version=begun.saved_as),
    )
    engine = RolloutEngine(llm, session, trainer.ask)
    rollout = FullyAsyncRollout(
        ReplaySource(
            IterableRows(rows(job.prompts, job.shortest, job.longest)),
            samples_per_prompt=job.samples,
        ),
        [engine],
        job.loop.rollout,
        batch_groups=job.batch,
        clock=SystemClock(),
        entropy=SystemEntropy(),
        prefixes=engine,
        on_version=engine.serve,
    )
    assert session.restored is not None
    rollout.restore(
        session.restored.states, rollout=begun.rollout, version=begun.saved_as, lineage=f"e{session.stored.epoch}"
    )
    session.participants.add(rollout.participant)
    reused = session.counters.tokens_reused
    print(
        f"life {session.stored.epoch}: at rollout {begun.rollout}, version {begun.version}, {reused} tokens restored",
        flush=True,
    )
    at("restored")
    await rollout.updates.update(trainer.push, again=True)
    rollout.start()
    await train_all(
        rollout,
        trainer,
        want_snapshot=session.want_snapshot,
        troubles=lambda: session.troubles,
        save_every=job.save_every,
        at=at,
    )
    metrics = rollout.metrics()
    await session.stop()
    await rollout.close()
    at("finished")
    return figures(job, trainer.anchor, metrics)


def figures(job: Job, anchor: Anchor, metrics: dict[str, float]) -> dict[str, Any]:
    """What the last line of the output says."""
    counts = Counter((one["id"], one["sample"]) for one in anchor.trained)
    wanted = {(row["id"], i) for row in rows(job.prompts, job.shortest, job.longest) for i in range(job.samples)}
    lengths = [one["tokens"] for one in anchor.trained]
    prefix = "rollout/fully_async"
    return {
        "samples": job.n_samples,
        "trained": len(anchor.trained),
        "lost": len(wanted - set(counts)),
        "doubled": sum(n - 1 for n in counts.values()),
        "mean_tokens": round(sum(lengths) / max(len(lengths), 1), 3),
        "optimizer_steps": len(anchor.rewards),
        "rollout": anchor.rollout,
        "version": anchor.version,
        "largest_lag": max((one["lag"] for one in anchor.trained), default=0),
        "mixed_samples": sum(one["spans"] > 1 for one in anchor.trained),
        "open_leases": int(metrics.get(f"{prefix}/open_leases", 0)),
        "tokens_reused": int(metrics.get(f"{prefix}/tokens_reused", 0)),
        "reward_first": round(anchor.rewards[0], 4),
        "reward_last": round(anchor.rewards[-1], 4),
        "at_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
