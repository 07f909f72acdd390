"""A training job on the real store: process-lives of FullyAsyncRollout, its engine's calls, snapshots and a trainer.

Owns: an engine whose tokens are captured call by call and carried on after a restore, a coordinator that snapshots
calls and rollout in one cut, and a trainer with a checkpoint of its own.
Does not know: vLLM, real time; where the store is.

The next token is a function of the whole context (fake_engine.next_token), so a sample that was resumed with a token
lost or doubled differs from its reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from recovery import resume
from recovery.admission.leases import Lease
from recovery.admission.participant import NotCovered
from recovery.admission.prefixes import Prefix
from recovery.admission.replay import ReplaySource
from recovery.admission.rollout import FullyAsyncRollout
from recovery.admission.rows import IterableRows
from recovery.admission.samples import Sample
from recovery.admission.state import check_fits
from recovery.admission.training import train_all
from recovery.config import RolloutConfig
from recovery.model import PolicyVersion
from recovery.participants import Participants
from recovery.ports import ObjectStore
from recovery.protocol import Verdict
from recovery.reading import read_transcripts
from tests.fake_engine import DirectFleet, Life, Prompt, logprob, next_token
from tests.fakes import ManualClock, SeededEntropy


class JobFleet(DirectFleet):
    """The calls and the participants in one cut, as vllm_hooks.fleet has them."""

    participants: Participants

    def acquire_hold(self, reason: str, timeout_s: float) -> None:
        super().acquire_hold(reason, timeout_s)
        self.participants.hold(reason)

    def release_hold(self) -> None:
        super().release_hold()
        self.participants.release()

    def prepare(self, timeout_s: float) -> Any:
        return self.participants.states()

    def resume(self, published: bool) -> None:
        super().resume(published)
        self.participants.resume(published)


@dataclass
class Trainer:
    """What the trainer's own checkpoint holds."""

    rollout: int = 0
    version: PolicyVersion | int = 0
    trained: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)


@dataclass
class Job:
    """One training run over many lives. `stop_s`: a life is killed after that long, on the loop's time."""

    seed: int
    lengths: list[int]
    config: RolloutConfig
    batch: int = 2
    samples: int = 2
    trainer: Trainer = field(default_factory=Trainer)
    reused: int = 0
    lives: int = 0
    mean_trained: float = 0.0
    """Tokens of a trained sample, once the job has ended."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [{"id": f"p{i}", "ids": [3 + i, 5], "max_tokens": n} for i, n in enumerate(self.lengths)]

    def reference(self, row: dict[str, Any], index: int) -> tuple[int, ...]:
        return Prompt("-", (*row["ids"], 100 + index), row["max_tokens"]).reference()

    def expected(self) -> Counter[tuple[str, int, tuple[int, ...]]]:
        return Counter((row["id"], i, self.reference(row, i)) for row in self.rows for i in range(self.samples))

    async def live(self, store: ObjectStore, stop_s: float | None = None) -> bool:
        """One process-life; whether the trainer got everything in it. Raises Killed if the store does."""
        self.lives += 1
        return await JobLife(self, store, self.lives).run(stop_s)


class JobLife:
    """One process."""

    def __init__(self, job: Job, store: ObjectStore, number: int) -> None:
        self.job, self.rng = job, random.Random(f"{job.seed} {number}")
        trainer = job.trainer
        fits = partial(check_fits, rollout=trainer.rollout, version=trainer.version)
        self.life = Life(store, number, prompts=(), compatible=fits, fleet=JobFleet)
        assert self.life.restored.states is not None
        participants = Participants(self.life.carried, ManualClock())
        self.life.fleet.participants = participants  # type: ignore[attr-defined]
        self.back = {call.entry.identity.rollout: call for call in self.life.restored.calls}
        self.serving = PolicyVersion()
        self.newest, self.pushed = 0, PolicyVersion()
        self.trained: list[tuple[str, int, tuple[int, ...]]] = []
        self.rollout = FullyAsyncRollout(
            ReplaySource(IterableRows(job.rows), samples_per_prompt=job.samples),
            [self, self],
            job.config,
            batch_groups=job.batch,
            clock=ManualClock(),
            entropy=SeededEntropy((job.seed, number)),
            prefixes=self,
            on_version=self.serve,
        )
        self.rollout.restore(
            self.life.restored.states,
            rollout=trainer.rollout,
            version=trainer.version,
            lineage=f"e{self.life.log.epoch}",
        )
        participants.add(self.rollout.participant)
        assert not self.rollout._source.spent(self.known()), "V18: what is trained, or drawn anew, has no prefix"

    def serve(self, version: PolicyVersion) -> None:
        self.serving = version

    # ---- the engine and its prefixes ---------------------------------------------------------------------------

    saved = True

    def of(self, request_id: str) -> Prefix | None:
        back = self.back.get(request_id)
        if back is None or isinstance(back.plan, resume.Restart) or not len(back.transcript.token_ids):
            return None
        versions = frozenset(version for _, _, version in back.transcript.version_spans)
        return Prefix(len(back.transcript.token_ids), versions)

    def known(self) -> Any:
        return tuple(self.back)

    def forget(self, request_ids: Any) -> None:
        for name in request_ids:
            self.back.pop(name, None)

    async def generate(self, sample: Sample) -> Sample:
        ids = (*sample.row["ids"], 100 + sample.sample_index)
        prompt = Prompt(sample.request_id, ids, sample.row["max_tokens"])
        self.life.by_id[prompt.call_id] = prompt
        call = self._call(prompt)
        while call.ended is None:
            await asyncio.sleep(self.rng.choice([1, 1, 2]))
            tokens = list(call.transcript_ids)
            token = next_token(ids, tokens)
            call.append([token], [logprob(token, len(tokens))], self.serving)
            if token == 2:
                call.end("stop", None)
            elif len(tokens) + 1 == prompt.max_tokens:
                call.end("length", None)
        call.in_use = False
        sample.token_ids = list(call.transcript_ids)
        sample.logprobs = [float(one) for one in call.transcript_logprobs]
        sample.version_spans = [(start, end, v.lineage, v.number) for start, end, v in call.version_spans]
        return sample

    def _call(self, prompt: Prompt) -> Any:
        table, ledger = self.life.table, self.life.publication.ledger
        live, entry = table.get(prompt.call_id), ledger.get(prompt.call_id)
        if live is not None:
            return live
        if entry is None:
            return table.open(prompt.request, prompt.call_id, 0)
        back = self.back.pop(prompt.rollout, None)
        if back is not None and entry.ended is None:
            keep = not isinstance(back.plan, resume.Restart)
            ids = back.transcript.token_ids.tolist() if keep else []
            lps = back.transcript.logprobs.tolist() if keep else []
            spans = back.transcript.version_spans if keep else ()
            self.job.reused += len(ids)
            return table.carry_on(back.transcript.request, prompt.call_id, entry.attempt, ids, lps, spans)
        return self._ended(prompt, entry)

    def _ended(self, prompt: Prompt, entry: Any) -> Any:
        """It had ended: its answer is in the store."""
        found = read_transcripts(self.life.store, self.life.segments, self.life.publication.ledger, [entry])
        transcript = found[prompt.call_id]
        call = self.life.table.carry_on(
            transcript.request,
            prompt.call_id,
            entry.attempt,
            transcript.token_ids.tolist(),
            transcript.logprobs.tolist(),
            transcript.version_spans,
        )
        call.settle_as_ended(*entry.ended)
        self.job.reused += len(transcript.token_ids)
        return call

    # ---- the actors --------------------------------------------------------------------------------------------

    def snapshot(self) -> bool:
        attempt = self.life.coordinator.take("interval")
        assert not self.life.fleet.held and self.rollout.updates._cut is None
        if attempt.snapshot is not None:
            self.life.table.published(attempt.ended)
        return attempt.verdict is Verdict.PUBLISHED

    async def snapshots(self) -> None:
        while True:
            await asyncio.sleep(self.rng.choice([3, 7]))
            if self.rng.random() < 0.5:
                self.life.flush()
            else:
                self.snapshot()

    async def train_everything(self) -> None:
        self.trained = list(self.job.trainer.trained)
        every = self.rng.choice([1, 1, 2, 3])
        last = await train_all(self.rollout, self, want_snapshot=self.want_snapshot, save_every=every)
        assert self.rollout._source.saved == self.job.trainer.rollout == last, (
            "the rollout was told of every checkpoint"
        )
        assert Counter(self.trained) == self.job.expected(), "every sample once, token for token"
        self.job.mean_trained = sum(len(tokens) for _, _, tokens in self.trained) / len(self.trained)

    def want_snapshot(self, cause: str) -> None:
        if self.rollout.participant.covered < self.newest:
            with contextlib.suppress(NotCovered):
                self.rollout.checkpoint_saved(self.newest)
                raise AssertionError("refused until a snapshot covers it")
        self.snapshot()

    # ---- recovery.admission.training.Trainer -------------------------------------------------------------------

    async def train(self, batch: Lease) -> None:
        await asyncio.sleep(1)
        self.newest = batch.rollout
        self.trained += [(s.row_id, s.sample_index, tuple(s.token_ids)) for group in batch.groups for s in group]

    async def push(self, version: PolicyVersion) -> None:
        await asyncio.sleep(1)
        self.pushed = version

    async def save(self, rollout: int, version: PolicyVersion) -> None:
        assert version == self.pushed == self.serving, "what is saved is what was pushed"
        trainer = self.job.trainer
        trainer.rollout, trainer.version, trainer.trained = rollout, version, list(self.trained)
        await asyncio.sleep(1)

    async def run(self, stop_s: float | None) -> bool:
        self.rollout.start()
        trainer, snapshots = asyncio.ensure_future(self.train_everything()), asyncio.ensure_future(self.snapshots())
        try:
            done, _ = await asyncio.wait({trainer, snapshots}, timeout=stop_s, return_when="FIRST_COMPLETED")
            for one in done:
                one.result()
            return trainer in done
        finally:
            self.rollout._started = False  # a dead process begins nothing
            mine = {task for task, _ in self.rollout._tasks.values()}
            for one in (trainer, snapshots, *mine):
                one.cancel()
            await asyncio.gather(trainer, snapshots, *mine, return_exceptions=True)
