"""Everything a fully asynchronous rollout owns, as one machine.

Owns: the order of the steps that involve several of these; every method is one step, without a wait in between.
Does not know: the event loop, how a group is generated, time, chance (both are given with the event).

Invariants (numbers are those of docs/admission.md):
1. (A8) Every outstanding attempt holds a slot; at most E are reserved or executing, at most P are outstanding.
2. (A15, A16) `acquire` closes reservation and lease issue and takes the frontier in one step, and `admit` and `lease`
   look at the gate in the step in which they act.
3. (A19) A member leaves a frontier in the step that publishes, discards or rolls back, and in no other.
4. (A28, A29, A58, M14 to M16) Ages are looked at in the very step that issues a lease; nothing is popped before it.
5. (A20, M9, M10) After a failure nobody is admitted and no lease is issued; everything else can still be settled.
6. (A63) While versions are torn or being updated nobody is admitted and no lease is issued, hold or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recovery.admission.ages import Ages
from recovery.admission.attempts import Attempt, Attempts, Execution, Phase, Record
from recovery.admission.exclusion import ExclusionFence
from recovery.admission.finished import Entry, FinishedGroups
from recovery.admission.holds import AdmissionClosed, AdmissionGate, Hold, HoldKind, Lifecycle
from recovery.admission.leases import Lease, Leases, LeaseSpent
from recovery.admission.limits import (
    ABORTS_MAX,
    CancelledTooOften,
    CannotClose,
    Exhausted,
    Limits,
    NewerThanCurrent,
    Waiting,
)
from recovery.admission.metrics import Metrics
from recovery.admission.patience import Patience
from recovery.admission.samples import Sample, apart, finished
from recovery.admission.settlement import Settlement, Source, Why, under
from recovery.admission.slots import Slots
from recovery.admission.staleness import Action, Staleness
from recovery.admission.unserved import Unserved
from recovery.admission.versions import Ghost, PolicyVersions, State
from recovery.model import PolicyVersion


class Ownership:
    """One rollout in one process. `incarnation` is new in every process, so that no old receipt passes here."""

    def __init__(
        self,
        source: Source,
        limits: Limits,
        staleness: Staleness,
        versions: PolicyVersions,
        *,
        incarnation: str,
        keep: Callable[[Sequence[Sample]], bool] = lambda samples: True,
        settled: Callable[[Attempt], None] = lambda attempt: None,
    ) -> None:
        self.limits = limits
        self.ages = Ages(staleness, versions)
        self.staleness = staleness
        self.versions = versions
        self.incarnation = incarnation
        self.attempts = Attempts(incarnation, "rollout")
        self.slots = Slots(limits.slots)
        self.settlement = Settlement(source, self.attempts, self.slots)
        self.finished = FinishedGroups(limits.buffer_max, self.ages.of)
        self.leases = Leases()
        self.gate = AdmissionGate()
        self.fence = ExclusionFence()
        self.metrics = Metrics()
        self.failure: BaseException | None = None
        self.exhausted = False
        self._keep = keep
        self._settled = settled
        self.unserved = Unserved(versions)
        self.patience = Patience(staleness, self.ages, self.attempts, limits.batch_groups)

    # ---- admission ---------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """Why no group may be reserved now; empty if one may."""
        if self.failure is not None:
            return "the rollout has failed"
        if self.gate.lifecycle is not Lifecycle.OPEN:
            return "closed"
        if not self.gate.open:
            return f"held by {', '.join(hold.owner for hold in self.gate.active)}"
        if self.versions.state is not State.STEADY:
            return f"the engines' weights are {self.versions.state.value}"
        if self.settlement.refuses:
            return "attempts wait to be given back to the source"
        if len(self.attempts.in_phase(Phase.RESERVED, Phase.EXECUTING)) == self.limits.executing:
            return "enough groups are executing"
        if self.slots.used == self.slots.total:
            return "no slot is free"
        return "more groups would grow too old" if self.patience.has_enough() else ""

    def admit(self) -> Record | None:
        """Reserve one group, with its slot and the current version, and begin it. None: the source is at its end.

        The caller has seen that `refusal()` is empty, in this very step. A source that raises is a failure (M9).
        """
        assert not self.refusal(), "A16: looked at before"
        try:
            records = self.settlement.acquire(1, self.versions.current)
        except BaseException as error:
            self.fail(error)
            raise
        self.exhausted = not records
        if not records:
            return None
        if self.staleness.escalated(records[0].attempt.stale):
            self.metrics.add("escalated_groups")
        self.attempts.begin(records[0])
        return records[0]

    # ---- the end of an execution -------------------------------------------------------------------------------

    def complete(self, execution: Execution, returned: Any, draw: int) -> None:
        """The generate function returned. What it returned is published, filtered, or (malformed) a failure."""
        try:
            samples = finished(execution.attempt.samples, returned)
            keeps = self._keep(samples)
        except BaseException as error:
            self.broke(execution, error)
            raise
        record = self.attempts.end(execution, samples)
        if keeps:
            self._publish(record, draw)
        else:
            self.metrics.add("filtered_groups")
            self._discard(record)

    def broke(self, execution: Execution, error: BaseException) -> None:
        """(M11) The generate function raised: a failure of the rollout; its receipt is rolled back."""
        record = self.attempts.end(execution)
        self.fail(error)
        self.gate.failed(execution, error)
        try:
            self._roll_back([record], Why.OTHER)
        except BaseException as cleanup:  # it is retained
            under(error, cleanup)

    def aborted(self, execution: Execution) -> None:
        """It was cancelled, and has stopped: generated again, pristine."""
        record = self.attempts.end(execution)
        if record.attempt.aborted + 1 >= ABORTS_MAX and self.gate.lifecycle is Lifecycle.OPEN:
            name = record.attempt.reservation_id
            self.fail(CancelledTooOften(f"group {name!r} was cancelled {ABORTS_MAX} times, and nobody here did it"))
        self._roll_back([record], Why.ABORTED)
        self.metrics.add("aborted_requeued")
        self.metrics.add("aborted_groups_recycled")

    def refuse_prefix(self, execution: Execution, action: Action, n_tokens: int) -> None:
        """(V12) A replayed group whose saved prefixes are too old: drawn anew, or given up; not begun with them."""
        record = self.attempts.end(execution)
        self.metrics.add("stale_groups_filtered")
        self.metrics.add("stale_rejected")
        if action is Action.REJECT:
            self._discard(record)
        else:
            self.metrics.add("tokens_regenerated", n_tokens)
            self._requeue_stale(record)

    def fail(self, error: BaseException) -> None:
        """The first failure is the one that everybody is told."""
        self.failure = self.failure or error

    # ---- leases ------------------------------------------------------------------------------------------------

    def lease(self, rollout: int) -> Lease | Waiting | Exhausted:
        """A batch of groups of which none is too old now, or why there is none.

        Raises the rollout's failure; NewerThanCurrent; what the source raised when a stale group was given back (it is
        retained, and the next call goes on without it).
        """
        if self.failure is not None:
            raise self.failure
        if self.gate.lifecycle is not Lifecycle.OPEN:
            raise AdmissionClosed("the rollout was closed")
        if not self.leases.may_issue(rollout):
            raise LeaseSpent(f"rollout {rollout} is not above {self.leases.newest}, the newest one")
        if not self.gate.open or self.versions.state is not State.STEADY:
            return self._refused(self.refusal())
        self._sweep()
        ready = sorted(self.finished, key=self._urgency)
        open_leases = len(self.attempts.in_phase(Phase.LEASED))
        more = not self.exhausted or len(self.attempts) > len(ready) + open_leases
        if not more and not ready:
            return Waiting("the last groups are leased") if open_leases else Exhausted()
        if more and len(ready) < self.limits.batch_groups:
            return Waiting(f"{len(ready)} of {self.limits.batch_groups} groups are finished")
        chosen = ready[: self.limits.batch_groups]
        long = self.patience.must_wait_for()
        if long:
            return self._refused(f"group {long} would grow too old: it is waited for")
        return self._issue(rollout, [entry.record for entry in chosen])

    def _urgency(self, entry: Entry) -> tuple[bool, int]:
        """First in, first out; but what is waited for goes first, the oldest of it before the rest."""
        return (not entry.kept, -max(self.ages.of(entry.record)[1], default=0) if entry.kept else 0)

    def _refused(self, reason: str) -> Waiting:
        self.metrics.add("refused_leases")
        return Waiting(reason, self.gate.active)

    def _issue(self, rollout: int, records: list[Record]) -> Lease:
        for record in records:
            self.metrics.leased(self.ages.far(record))
            self.finished.remove(record)
            self.attempts.move(record, Phase.LEASED)
        receipts = tuple(record.terminal for record in records if record.terminal is not None)
        groups = tuple(tuple(apart(sample) for sample in record.samples) for record in records)
        self.patience.leased()
        self.unserved.leased(records)
        return self.leases.issue(
            Lease(rollout=rollout, receipts=receipts, groups=groups, version=self.versions.current)
        )

    def commit(self, lease: Lease) -> None:
        """The trainer has the batch. Raises what the source raised; then its groups are generated again."""
        records = self._spend(lease)
        try:
            self.settlement.commit(records, lease.rollout)
        except BaseException:
            self.patience.not_trained()
            self._gone(records)
            raise
        self._gone(records)

    def roll_back(self, lease: Lease) -> None:
        """The trainer never began with it: generated again."""
        records = self._spend(lease)
        self.patience.not_trained()
        self._roll_back(records, Why.OTHER)

    def _spend(self, lease: Lease) -> list[Record]:
        self.leases.check_open(lease)
        records = self.attempts.check(lease.receipts, Phase.LEASED)
        self.leases.spend(lease)
        return records

    # ---- ages --------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Take out of the buffer what may not be trained on now. Raises the first error, after looking at all."""
        self._gone(self.settlement.retry(but="newer than current")[0])
        errors: list[BaseException] = []
        for entry in self.finished:
            record, trained = entry.record, self.ages.trained(entry.record)
            verdict = self.staleness.of_group(self.versions, trained, record.attempt.stale)
            if verdict.action is Action.ACCEPT:
                continue
            if verdict.action is Action.MASK:
                self.ages.mask(record)
                continue
            if verdict.action is not Action.QUARANTINE and (withheld := self.ages.withhold(record)):
                self.metrics.add("samples_withheld", withheld)
                continue
            self.finished.remove(record)
            try:
                self._withdraw(record, verdict.action, verdict.reason)
            except Exception as error:
                errors.append(error)
        if errors or self.failure is not None:
            raise self.failure or errors[0]

    def _withdraw(self, record: Record, action: Action, reason: str) -> None:
        name = record.attempt.reservation_id
        if action is Action.QUARANTINE:
            self.metrics.add("negative_lags")
            self.settlement.retain([record], Why.OTHER, "newer than current")
            raise NewerThanCurrent(f"group {name!r} is {reason}; it is kept until it is reconciled")
        if any(isinstance(self.versions.distance(one), Ghost) for one in self.ages.trained(record)):
            self.metrics.add("lineage_mismatches")
        self.metrics.add("stale_groups_filtered")
        self.metrics.add("stale_rejected")
        self._check_served(record, given_up=action is Action.REJECT)
        if action is Action.REJECT:
            self._discard(record)
        else:
            self._requeue_stale(record)

    def _check_served(self, record: Record, *, given_up: bool) -> None:
        if error := self.unserved.note(record, self.ages.trained(record), given_up=given_up):
            self.fail(error)

    def _requeue_stale(self, record: Record) -> None:
        n = sum(len(sample.token_ids) for sample in record.samples)
        self._roll_back([record], Why.STALE)
        self.metrics.add("tokens_regenerated", n)
        self.metrics.add("stale_requeued")
        self.metrics.add("stale_groups_recycled")

    # ---- buffer and settlement ---------------------------------------------------------------------------------

    def _publish(self, record: Record, draw: int) -> None:
        self.attempts.move(record, Phase.PUBLISHED)
        kept = self.staleness.waits_for(record.attempt.stale)
        victims = self.finished.put(Entry(record=record, kept=kept, draw=draw))
        self.metrics.finished()
        self.gate.settled(record.execution)
        errors: list[Exception] = []
        for entry, stale in victims:
            self.metrics.add("evicted_stale_groups" if stale else "evicted_overflow_groups")
            if stale:
                self._check_served(entry.record, given_up=self.staleness.policy == "reject")
            try:
                if stale and self.staleness.policy == "reject":
                    self._discard(entry.record)
                else:
                    self._roll_back([entry.record], Why.STALE if stale else Why.OTHER)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _discard(self, record: Record) -> None:
        """Given up, with the rollout that comes next: a trainer that goes back behind it sees the group again."""
        self.attempts.move(record, Phase.DISCARDED)
        self.gate.settled(record.execution)
        try:
            self.settlement.commit([record], self.leases.newest + 1)
        finally:
            self._gone([record])

    def _roll_back(self, records: Sequence[Record], why: Why) -> None:
        try:
            self.settlement.roll_back(records, why)
        except BaseException as error:
            for record in records:
                self.gate.failed(record.execution, error)
            raise
        self._gone(records)

    def _gone(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.phase in (Phase.COMMITTED, Phase.ROLLED_BACK):
                self.gate.settled(record.execution)
                self._settled(record.attempt)
                self.exhausted = self.exhausted and record.phase is Phase.COMMITTED

    def reconcile(self) -> list[BaseException]:
        """Give back whatever is retained. Returns what still cannot be."""
        done, errors = self.settlement.retry()
        self._gone(done)
        return errors

    # ---- holds, updates, close ---------------------------------------------------------------------------------

    def acquire(self, kind: HoldKind, owner: str, reason: str, utc: float) -> Hold:
        """Close admission and lease issue; the frontier is what executes at this moment."""
        members = self.attempts.in_phase(Phase.EXECUTING)
        return self.gate.acquire(kind, owner, reason, utc, [record.execution for record in members])

    def begin_update(self, hold: Hold, target: PolicyVersion) -> None:
        """(A25) Under a drain hold whose frontier was seen to be done."""
        self.gate.check_may_record(hold)
        self.versions.begin(target)

    def end_update(self, hold: Hold, ok: bool) -> None:
        """(A64) Everything that holds the version moves here, together."""
        if not ok:
            self.versions.fail()
            return
        try:
            self.gate.record_update(hold)
        except BaseException:  # (M31) released under the update: what was pushed is not published
            self.versions.fail()
            raise
        self.versions.succeed()
        self.patience.published(len(self.leases.open))

    def close(self) -> None:
        """(A46, A47) Closed for good. Raises CannotClose while an update is under way or a lease is open."""
        if not self.fence.may_close:
            raise CannotClose("a weight update is under way: let it end first")
        self.gate.close()
        if self.leases.open:
            rollouts = ", ".join(str(lease.rollout) for lease in self.leases.open)
            raise CannotClose(f"the leases of rollouts {rollouts} are open: commit or roll them back first")

    def settle_all(self) -> list[BaseException]:
        """(A48) Give back everything whose work has stopped and that no lease owns. CLOSED if nothing is left."""
        errors: list[BaseException] = []
        for record in self.attempts.in_phase(Phase.RESERVED, Phase.TERMINAL, Phase.PUBLISHED, Phase.DISCARDED):
            self.finished.remove(record)
            try:
                self._roll_back([record], Why.OTHER)
            except Exception as error:
                errors.append(error)
        errors += self.reconcile()
        if not len(self.attempts) and not self.settlement.refuses:
            self.gate.closed()
        return errors
