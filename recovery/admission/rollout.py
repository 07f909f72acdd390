"""FullyAsyncRollout: groups of samples on any number of engines, batches for a trainer, and everybody who holds it up.

Owns: the tasks that generate, which engine each runs on, and who is woken when something changed.
Does not know: what is allowed (ownership.py decides every step), what an engine is made of, stores, wall time.

Runs on one event loop, the one of `start`; elsewhere every verb is refused before it changes anything. What is between
two awaits is one step of the machine, so no gate can close in between.

Invariants (numbers are those of docs/admission.md):
1. (A16) A group is reserved in the same step in which the gate was seen open.
2. (A50) A group leaves its slot only when its task has ended; cancelling one is a request.
3. Every wait has a deadline, and a deadline changes nothing (changes.py).
4. (A48, A49) Closing settles everything, reports the first error after trying all, and goes on when its caller is gone.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from recovery.admission import view
from recovery.admission.attempts import Attempt, Execution, Phase, Record
from recovery.admission.changes import Changes, Deadline, LongWait, running_loop
from recovery.admission.closing import Closing
from recovery.admission.covering import covered
from recovery.admission.generation import Engine, Generate, Generation, check_engines, check_keep, each_sample, pinned
from recovery.admission.holds import AdmissionClosed, Hold, HoldKind, Lifecycle
from recovery.admission.leases import Lease
from recovery.admission.limits import Exhausted, Limits, Waiting, whole
from recovery.admission.ownership import Ownership
from recovery.admission.participant import RolloutParticipant
from recovery.admission.placement import Placement
from recovery.admission.prefixes import NO_PREFIXES, Prefixes
from recovery.admission.replay import ReplaySource
from recovery.admission.samples import Sample, copies
from recovery.admission.staleness import Action, Staleness
from recovery.admission.state import RolloutState
from recovery.admission.trainer import PublicationId, TrainerAdmission
from recovery.admission.updates import WeightUpdates
from recovery.admission.versions import PolicyVersions
from recovery.config import RolloutConfig
from recovery.config_checks import check_rollout
from recovery.errors import ConfigError, ProgramError
from recovery.model import PolicyVersion
from recovery.ports import Clock, Entropy


class FullyAsyncRollout:
    """Make one, `start` it on the event loop, then take batches.

    Args:
        source: where groups come from (ReplaySource over JsonlRows or IterableRows).
        engines: what generates; a group runs on the one with the fewest groups. One with an attribute `pinned` (a
            PolicyVersion) takes no update and generates only what has to go on under that version.
        config: the block `rollout`.
        batch_groups: groups in a train batch.
        clock: the real one, or a test's.
        entropy: likewise.
        generate: makes a group's samples; by default each sample is given to the engine for itself.
        keep: a finished group for which it is false is never trained on (dynamic sampling).
        prefixes: what the engines' store knows of unfinished samples after a restart.
        on_version: told of every version in the step in which it becomes the current one; if it raises, the update has
            failed and the version is not published.
    """

    def __init__(
        self,
        source: ReplaySource,
        engines: Sequence[Engine],
        config: RolloutConfig,
        *,
        batch_groups: int,
        clock: Clock,
        entropy: Entropy,
        generate: Generate = each_sample,
        keep: Callable[[Sequence[Sample]], bool] = lambda samples: True,
        prefixes: Prefixes = NO_PREFIXES,
        on_version: Callable[[PolicyVersion], None] = lambda version: None,
    ) -> None:
        self._engines = list(engines)
        check_engines(self._engines, generate)
        self._placement = Placement([pinned(engine) for engine in self._engines])
        check_keep(keep)
        check_rollout(config, whole("batch_groups", batch_groups))
        self._source = source
        self._clock = clock
        self._entropy = entropy
        self._prefixes = prefixes
        self.on_version = on_version
        self._tasks: dict[Execution, tuple[asyncio.Task[object], int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = False
        self._closing = Closing(self)
        limits = Limits(
            executing=config.max_executing_groups,
            slots=config.completed_prefetch_groups,
            batch_groups=batch_groups,
            buffer_max=config.async_buffer_max_groups,
        )
        self.generation = Generation(generate, limits.executing)
        staleness = Staleness(
            limit=config.max_policy_version_lag,
            policy=config.on_stale,
            headroom=config.staleness_headroom,
            max_requeues=config.max_pristine_requeues,
            escalate_to=config.escalate_to,
            granularity=config.stale_granularity,
        )
        self.ownership = Ownership(
            source,
            limits,
            staleness,
            PolicyVersions(PolicyVersion()),
            incarnation=entropy.hex(8),
            keep=keep,
            settled=self._forget,
        )
        self.changes = Changes()
        self.state = RolloutState(self.ownership, source, warnings.warn)
        self.updates = WeightUpdates(self)
        self._admissions: list[TrainerAdmission] = []
        self.participant = RolloutParticipant(self)

    # ---- the trainer -------------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        return self.ownership.versions.current

    def restore(self, states: Mapping[str, bytes], *, rollout: int, version: PolicyVersion | int, lineage: str) -> None:
        """Take up what a snapshot says of this rollout, if it says anything; before `start`.

        Args:
            states: the participants' states of the restored snapshot.
            rollout: the trainer's checkpoint is the one after that batch; 0 if it begins anew.
            version: the one that `Trainer.save` was given for that checkpoint; its lineage says of which branch it
                is. Only its number, if the checkpoint was written without the lineage: refused where that may be two.
            lineage: a name that was never used (with the store's epoch in it, say), for the versions from here on.

        Raises FingerprintMismatch, Damaged, or NotOutstanding after `start`, with nothing changed.
        """
        self.state.restore(states, rollout=rollout, version=version, lineage=lineage)
        self._prefixes.forget(self._source.spent(self._prefixes.known()))
        self.on_version(self.version)

    def start(self) -> None:
        """Begin to generate, on the running event loop. After `restore`, if there may be something to restore.

        Raises ConfigError where prefixes are saved in a store of whose snapshots the rollout is no part.
        """
        if self._prefixes.saved and not self.participant.attached:
            raise ConfigError(
                "the store of `prefixes` takes snapshots without this rollout: a crash would lose what was trained",
                hint="call session.participants.add(rollout.participant) before rollout.start()",
            )
        self._check_loop("start")
        self._loop, self._started = running_loop("start"), True
        self._go_on()

    async def next_batch(
        self, rollout: int | None = None, *, timeout_s: float | None = None
    ) -> Lease | Waiting | Exhausted:
        """A batch under an id above all earlier ones (None: the next one); Waiting at the deadline, with the reason.

        Warns once when it has waited long for somebody's hold, or for `start`.
        """
        self._check_loop("next_batch")
        deadline, long = Deadline(timeout_s), LongWait("next_batch")
        while True:
            before = self._measure()
            try:
                newest = self.ownership.leases.newest
                got = self.ownership.lease(newest + 1 if rollout is None else whole("rollout", rollout))
            finally:
                self._pump()
                if self._measure() != before:
                    self.changes.tell()
            if not isinstance(got, Waiting):
                return got
            got = view.explained(got, self._clock.utc(), started=self._started)
            if deadline.passed:
                return got
            await self.changes.next(long.until(deadline, got.holds or not self._started, got.reason))

    def _measure(self) -> tuple[int, int, bool]:
        """What other waiters may have waited for, as far as asking for a batch can change it."""
        own = self.ownership
        return len(own.finished), len(own.attempts), own.exhausted

    def commit(self, lease: Lease) -> None:
        """The trainer has the batch and trains it: its groups come again only if it goes back to a checkpoint."""
        self._check_loop("commit")
        try:
            self.ownership.commit(lease)
        finally:
            self._go_on()

    def roll_back(self, lease: Lease) -> None:
        """The trainer did not begin with it: its groups are generated again."""
        self._check_loop("roll_back")
        try:
            self.ownership.roll_back(lease)
        finally:
            self._go_on()

    def checkpoint_saved(self, rollout: int) -> None:
        """The trainer's checkpoint after that rollout is durable: what it was trained on never comes again.

        Raises NotCovered if its batch was not committed, or no snapshot that covers it was published before (where
        snapshots are taken); and what stopped this process: a newer one that owns the store, say.
        """
        self._check_loop("checkpoint_saved")
        self.participant.check_covers(rollout)
        self._source.checkpoint_saved(rollout)
        for admission in self._admissions:
            admission.forget(rollout)

    async def prepare_checkpoint(
        self, rollout: int, want_snapshot: Callable[[str], None], *, timeout_s: float | None = None
    ) -> bool:
        """Whether a published snapshot covers the rollout: then its checkpoint may be written. False: the deadline.

        `want_snapshot` is told that one is wanted, again after one that was given up; what it raises is raised.
        (A39, A40) Raises the NotPrepared that kept it from being taken: no lease may be open, nothing retained, nothing
        unresolved at the trainer. Where the rollout is part of no snapshots (participants.add was not called), there is
        nothing to wait for.
        """
        self._check_loop("prepare_checkpoint")
        return await covered(self, rollout, want_snapshot, timeout_s)

    def trainer_admission(
        self, deleted: Callable[[PublicationId], None] = lambda publication: None
    ) -> TrainerAdmission:
        """For a trainer of several ranks. What it has not resolved keeps a checkpoint from being prepared (A40)."""
        leases = self.ownership.leases
        made = TrainerAdmission(
            self.ownership.incarnation,
            self.commit,
            self.roll_back,
            deleted,
            is_open=lambda lease: lease in leases.open,  # a lease equals no other
        )
        self._admissions.append(made)
        return made

    @property
    def unresolved(self) -> int:
        """Publications to trainers that are neither committed nor rolled back."""
        return sum(admission.unresolved for admission in self._admissions)

    def reconcile(self) -> list[BaseException]:
        """Try again to give back whatever could not be. Returns what still cannot."""
        self._check_loop("reconcile")
        errors = self.ownership.reconcile()
        self._go_on()
        return errors

    # ---- holds -------------------------------------------------------------------------------------------------

    def acquire(self, kind: HoldKind, owner: str, reason: str) -> Hold:
        """Nothing new is reserved and no batch is leased from here on. Raises AdmissionClosed after `close`."""
        self._check_loop("acquire")
        return self.ownership.acquire(kind, owner, reason, self._clock.utc())

    async def wait_terminal(self, hold: Hold, *, timeout_s: float | None = None) -> bool:
        """Whether all that ran when the hold was acquired has ended (or, for a cut, was frozen). False: the deadline.

        Raises the rollout's failure, which releases nothing. Waiting again is fine.
        """
        deadline = Deadline(timeout_s)
        while True:
            if self.ownership.failure is not None:
                raise self.ownership.failure
            if self.ownership.gate.lifecycle is not Lifecycle.OPEN:
                raise AdmissionClosed("the rollout was closed")
            if self.ownership.gate.done(hold):
                return True
            if deadline.passed:
                return False
            await self.changes.next(deadline)

    def release(self, hold: Hold) -> None:
        """Give the claim back. A second time is an error; after `close` nothing happens."""
        self._check_loop("release")
        self.ownership.gate.release(hold)
        self._go_on()

    @asynccontextmanager
    async def holding(self, kind: HoldKind, owner: str, reason: str) -> AsyncIterator[Hold]:
        """A hold for the time of a block; it is released however the block ends (A24)."""
        hold = self.acquire(kind, owner, reason)
        try:
            yield hold
        finally:
            if hold in self.ownership.gate.active:
                self.release(hold)

    def _check_loop(self, verb: str) -> None:
        """Raise ProgramError, with nothing changed, anywhere but on the event loop on which it was started."""
        if self._loop is not None and running_loop(verb) is not self._loop:
            raise ProgramError(
                f"rollout.{verb}() was called on another event loop than rollout.start()",
                hint="use a rollout on one loop from start to close",
            )

    @property
    def running(self) -> list[asyncio.Task[object]]:
        """The executions whose work has not stopped."""
        return [task for task, _ in self._tasks.values()]

    # ---- generating --------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Something changed: reserve what may be reserved, and wake everybody who waits."""
        self._pump()
        self.changes.tell()

    def _pump(self) -> None:
        while self._started and not self.ownership.refusal():
            try:
                record = self.ownership.admit()
            except Exception as error:
                self.ownership.fail(error)  # every waiter is told (A20)
                return
            if record is None:
                return
            self._begin(record)

    def _begin(self, record: Record) -> None:
        execution = record.execution
        assert execution is not None
        try:
            stored = self.state.take_finished(record)
            if stored is not None:
                self.ownership.complete(execution, stored, self._draw())
                return
            loads = [sum(at == index for _, at in self._tasks.values()) for index in range(len(self._engines))]
            verdict, n_tokens, index = self._placement.of(record.attempt, self._prefixes, self.ownership, loads)
            if verdict in (Action.REQUEUE, Action.REJECT):
                self.ownership.refuse_prefix(execution, verdict, n_tokens)
                return
            self.ownership.metrics.add("tokens_reused", n_tokens)
            work = self.generation.run(copies(record.attempt.samples), self._engines[index])
        except Exception as error:
            if record.phase is Phase.EXECUTING:
                self.ownership.broke(execution, error)  # nothing of it runs
            self.ownership.fail(error)
            return
        task = asyncio.get_running_loop().create_task(work, name=record.attempt.reservation_id)
        self._tasks[execution] = (task, index)
        task.add_done_callback(partial(self._ended, execution))

    def _ended(self, execution: Execution, task: asyncio.Task[object]) -> None:
        """All work of an execution has stopped: the one place where a group leaves the executing ones."""
        del self._tasks[execution]
        try:
            if not task.cancelled() and task.exception() is None:
                self.ownership.complete(execution, task.result(), self._draw())
                if self.participant.attached:
                    self.state.finished()  # encoded one by one, and not all of them in the step of a snapshot
                return
            error = None if task.cancelled() else task.exception()
            if error is None:
                self.ownership.aborted(execution)
            else:
                self.ownership.broke(execution, error)
        except Exception as error:
            self.ownership.fail(error)
        finally:
            self._go_on()

    def _forget(self, attempt: Attempt) -> None:
        """Settled, one way or the other: what is saved of its samples is of no more use."""
        self._prefixes.forget([sample.request_id for sample in attempt.samples])

    def _draw(self) -> int:
        return int(self._entropy.hex(4), 16)

    # ---- what people and metrics see ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Every key of metrics.KEYS; counters are since the last call."""
        return view.metrics(self.ownership, self._clock.utc())

    # ---- the end -----------------------------------------------------------------------------------------------

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Stop for good: cancel what runs, wait for it, give everything back. May be called again until it succeeds.

        Raises CannotClose (an open lease, an update under way), TerminalPending at the deadline or if anything is still
        owned, or the first error of the source. Neither a deadline nor a cancelled caller ends it. With an open lease
        nothing is admitted or leased any more: settle it, and close again.
        """
        self._check_loop("close")
        await self._closing.close(timeout_s)
