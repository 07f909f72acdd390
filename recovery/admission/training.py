"""The loop of a trainer around a rollout: the order of lease, step, weights, snapshot and checkpoint.

Owns: that order, and the names of the moments between its steps.
Does not know: what a step of the optimizer is, how weights reach an engine, what a checkpoint is made of.

Invariants (numbers are those of docs/admission.md):
1. (A36) A batch is committed before it is trained on; after that only a trainer that goes back sees it again.
2. (A59) A version is published only after its weights were pushed, in an update that holds the rollout up.
3. (A42) A checkpoint is written only when a published snapshot covers its rollout, and the rollout is told of it only
   when it is durable. So whatever is killed between two steps, the newest checkpoint finds a snapshot that fits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from recovery.admission.leases import Lease
from recovery.admission.limits import Exhausted, Waiting
from recovery.admission.rollout import FullyAsyncRollout
from recovery.model import PolicyVersion

MOMENTS = ("leased", "committed", "trained", "published", "covered", "saved", "told")
"""What `at` is told, in order; a process may die at any of them."""


class Trainer(Protocol):
    """What trains. Its checkpoint holds what `save` is given, also the version's lineage: a restart begins with it."""

    async def train(self, batch: Lease) -> None:
        """One step. From here on `push` pushes what came out of it."""

    async def push(self, version: PolicyVersion) -> None:
        """The engines serve the newest weights when it returns; raises if that is not certain."""

    async def save(self, rollout: int, version: PolicyVersion) -> None:
        """A checkpoint after that rollout, durable and whole when it returns."""


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def train_all(
    rollout: FullyAsyncRollout,
    trainer: Trainer,
    *,
    want_snapshot: Callable[[str], None],
    save_every: int = 1,
    snapshot_timeout_s: float = 60.0,
    troubles: Callable[[], Iterable[object]] = tuple,
    told: Callable[[str], None] = _on_stderr,
    at: Callable[[str], None] = lambda moment: None,
) -> int:
    """Train until the source is exhausted; a checkpoint every `save_every` batches and at the end. Returns its rollout.

    `rollout` is started. While no snapshot covers a checkpoint the trainer waits, and `told` gets a line every
    `snapshot_timeout_s` (by default on stderr), with what `troubles` (session.troubles) says cannot be stored. Raises
    what the trainer, the rollout or `want_snapshot` raises.
    """
    newest = saved = rollout.ownership.leases.newest

    async def save() -> None:
        tries = 0
        while not await rollout.prepare_checkpoint(newest, want_snapshot, timeout_s=snapshot_timeout_s):
            tries += 1
            why = "; ".join(str(trouble) for trouble in troubles()) or "session.troubles may say why"
            told(
                f"the checkpoint of rollout {newest} waits for a snapshot for {tries * snapshot_timeout_s:.0f} s: {why}"
            )
        at("covered")
        await trainer.save(newest, rollout.version)
        at("saved")
        rollout.checkpoint_saved(newest)
        at("told")

    while True:
        got = await rollout.next_batch()
        if isinstance(got, Exhausted):
            break
        assert not isinstance(got, Waiting), "without a deadline it waits"
        at("leased")
        rollout.commit(got)
        at("committed")
        await trainer.train(got)
        at("trained")
        await rollout.updates.update(trainer.push)
        at("published")
        newest = got.rollout
        if newest - saved >= save_every:
            await save()
            saved = newest
    if newest > saved:
        await save()
    return newest
