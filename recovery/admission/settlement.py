"""Between the owner and its source: what is taken from it, and how each attempt is given back exactly once.

Owns: the calls of the source port, and what is retained because such a call failed.
Does not know: buffers, leases, holds, versions.

Invariants (numbers are those of docs/admission.md):
1. (A1) `acquire(k)` adopts exactly k attempts or none. What does not fit goes back whole; if that fails nothing more is
   acquired until a retry succeeds.
2. (A9) Slots come back only after the source accepted the settlement.
3. (A32) A commit that fails requeues within the same call; what still fails is retained, with its cause, and `retry`
   is its exit.
4. (A38) The first error is the one that is raised; what failed while cleaning up is chained under it.
5. (A2) An attempt that is outstanding already is never given back because of a newcomer with its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from recovery.admission.attempts import Attempt, Attempts, Phase, Record
from recovery.admission.slots import Slots
from recovery.model import PolicyVersion


class Why(Enum):
    """Why a group is generated again."""

    STALE = "stale"
    ABORTED = "aborted"
    OTHER = "other"


class Source(Protocol):
    """Where attempts come from. Every verb does all of it or raises and has done nothing."""

    def reserve(self, k: int) -> Sequence[Attempt]:
        """Exactly k attempts, requeued ones first; none at the end."""

    def requeue(self, attempts: Sequence[Attempt], why: Why) -> None:
        """Will be reserved again, pristine."""

    def acknowledge(self, attempts: Sequence[Attempt], rollout: int) -> None:
        """Trained, or given up, with that rollout."""


class SourceBroken(Exception):
    """The source returned what cannot be owned; it was given back, or waits to be."""


def under(primary: BaseException, cleanup: BaseException) -> BaseException:
    """`primary`, with `cleanup` chained under it."""
    primary.add_note(f"while cleaning up: {cleanup!r}")
    if primary.__cause__ is None:
        primary.__cause__ = cleanup
    return primary


class Settlement:
    """The owner's side of one source."""

    def __init__(self, source: Source, attempts: Attempts, slots: Slots) -> None:
        self._source = source
        self._attempts = attempts
        self._slots = slots
        self._misfits: list[Attempt] = []
        self._why: dict[str, Why] = {}

    @property
    def refuses(self) -> bool:
        """Whether something that could not be adopted still waits to be given back."""
        return bool(self._misfits)

    @property
    def retained(self) -> list[Record]:
        return self._attempts.in_phase(Phase.RETAINED)

    def acquire(self, k: int, version: PolicyVersion | None) -> list[Record]:
        """k new records with their slots; none at the end of the source. The caller has seen that k slots are free."""
        if self._misfits:
            raise SourceBroken(f"{len(self._misfits)} attempts could not be given back to the source; reconcile first")
        got = list(self._source.reserve(k))
        if not got:
            return []
        problem = self._problem(got, k)
        if problem:
            active = {id(record.attempt) for record in self._attempts}
            self._misfits = [attempt for attempt in dict.fromkeys(got) if id(attempt) not in active]
            error: BaseException = SourceBroken(problem)
            try:
                self._give_back_misfits()
            except BaseException as cleanup:
                error = under(error, cleanup)
            raise error
        records = []
        for attempt in got:
            assert self._slots.take(attempt.reservation_id), "a slot was free (A13)"
            records.append(self._attempts.adopt(attempt, version))
        return records

    def _problem(self, got: Sequence[Attempt], k: int) -> str:
        clashes = self._attempts.clashes(got)
        if clashes:
            return f"the source gave {clashes[0].reservation_id!r} out twice"
        return "" if len(got) == k else f"the source gave {len(got)} attempts instead of {k}"

    def _give_back_misfits(self) -> None:
        self._source.requeue(self._misfits, Why.OTHER)
        self._misfits = []

    def commit(self, records: Sequence[Record], rollout: int) -> None:
        """All of them are done for good. Raises what the source raised, after they were requeued or retained."""
        try:
            self._source.acknowledge([record.attempt for record in records], rollout)
        except BaseException as error:
            try:
                self.roll_back(records, Why.OTHER, cause="commit failed")
            except BaseException as cleanup:
                raise under(error, cleanup) from cleanup
            raise
        self._settle(records, Phase.COMMITTED)

    def roll_back(self, records: Sequence[Record], why: Why, cause: str = "rollback failed") -> None:
        """All of them are generated again. Raises what the source raised; they are retained then."""
        try:
            self._source.requeue([record.attempt for record in records], why)
        except BaseException:
            self.retain(records, why, cause)
            raise
        self._settle(records, Phase.ROLLED_BACK)

    def retain(self, records: Sequence[Record], why: Why, cause: str) -> None:
        """Keep them, slot and all, until `retry`."""
        for record in records:
            if record.phase is not Phase.RETAINED:
                self._attempts.move(record, Phase.RETAINED)
            record.cause = cause
            self._why[record.attempt.reservation_id] = why

    def retry(self, but: str = "") -> tuple[list[Record], list[BaseException]]:
        """Give back everything retained (`but` what has that cause), one by one: who was, and what went wrong."""
        done: list[Record] = []
        errors: list[BaseException] = []
        if self._misfits:
            try:
                self._give_back_misfits()
            except Exception as error:
                errors.append(error)
        for record in self.retained:
            if but and record.cause == but:
                continue
            try:
                self.roll_back([record], self._why[record.attempt.reservation_id], record.cause)
                done.append(record)
            except Exception as error:
                errors.append(error)
        return done, errors

    def _settle(self, records: Sequence[Record], phase: Phase) -> None:
        for record in records:
            self._attempts.move(record, phase)
            self._slots.give_back(record.attempt.reservation_id)
            self._why.pop(record.attempt.reservation_id, None)
