"""The trainer's side of a lease: which publication its ranks acknowledged, and what is certain when an answer is lost.

Owns: publications, their cohort of (role, rank), and the state that a status query answers.
Does not know: transports, how data reaches a rank, the optimizer.

Invariants (numbers are those of docs/admission.md):
1. (A34) A commit needs an acknowledgement of this very publication from every member of the cohort, once, and of nobody
   else; anything else is refused before the lease is touched.
2. The `*_FAILED` state is set before the lease is settled and replaced when that succeeded: a crash in between fails
   closed.
3. (A35) After a lost answer: COMMITTED trains, PENDING rolls back, a failed state does neither. Its way out is
   `roll_back`: what failed was given back by the owner of the lease, or is retained there and holds a checkpoint up.
4. (M22) A cohort that changed between acknowledging and training is refused before the optimizer runs.
5. (M23) A publication of another incarnation is refused.
6. What is resolved is kept until the trainer's checkpoint behind it is saved: until then somebody may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum

from recovery.admission.leases import Lease


class Outcome(Enum):
    PENDING = "pending"
    COMMITTED = "committed"
    COMMIT_FAILED = "commit_failed"
    ROLLED_BACK = "rolled_back"
    ROLLBACK_FAILED = "rollback_failed"


TRANSITIONS: dict[Outcome, tuple[Outcome, ...]] = {
    Outcome.PENDING: (Outcome.COMMIT_FAILED, Outcome.ROLLBACK_FAILED),
    Outcome.COMMIT_FAILED: (Outcome.COMMITTED, Outcome.ROLLBACK_FAILED),
    Outcome.ROLLBACK_FAILED: (Outcome.ROLLED_BACK,),
    Outcome.COMMITTED: (),
    Outcome.ROLLED_BACK: (),
}
"""Both ways lead through the failed state."""

RESOLVED = (Outcome.COMMITTED, Outcome.ROLLED_BACK)

Member = tuple[str, int]
"""A role of the trainer and a rank in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationId:
    """Exactly what was published: by whom, which admission, which rollout, which data, for whom."""

    incarnation: str
    admission: int
    rollout: int
    digests: tuple[str, ...]
    cohort: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    publication: PublicationId
    member: Member


class PublicationRefused(Exception):
    """The publication, or an acknowledgement of it, is not the one that is pending here."""


class CohortChanged(PublicationRefused):
    """The ranks that would train are not those that acknowledged."""


@dataclass(slots=True)
class _Admission:
    publication: PublicationId
    lease: Lease
    outcome: Outcome = Outcome.PENDING


class TrainerAdmission:
    """`commit` and `roll_back` settle the inner lease; `deleted` is told of a publication whose data nobody needs."""

    def __init__(
        self,
        incarnation: str,
        commit: Callable[[Lease], None],
        roll_back: Callable[[Lease], None],
        deleted: Callable[[PublicationId], None] = lambda publication: None,
        *,
        is_open: Callable[[Lease], bool],
    ) -> None:
        self._incarnation = incarnation
        self._commit = commit
        self._roll_back = roll_back
        self._deleted = deleted
        self._is_open = is_open
        self._admissions: dict[int, _Admission] = {}
        self._published = 0

    @property
    def unresolved(self) -> int:
        """(A40) How many keep a checkpoint from being prepared or published."""
        return sum(admission.outcome not in RESOLVED for admission in self._admissions.values())

    def forget(self, rollout: int) -> None:
        """The trainer's checkpoint after that rollout is saved: nobody asks any more what became of those up to it."""
        self._admissions = {
            number: one
            for number, one in self._admissions.items()
            if one.outcome not in RESOLVED or one.publication.rollout > rollout
        }

    def publish(
        self, lease: Lease, rollout: int, digests: Collection[str], cohort: Collection[Member]
    ) -> PublicationId:
        """Offer a lease to the trainer. (A30) One of another rollout than the trainer asked for is rolled back."""
        if lease.rollout != rollout:
            self._roll_back(lease)
            raise PublicationRefused(f"the lease is of rollout {lease.rollout}, asked for was {rollout}")
        if not self._is_open(lease):
            raise PublicationRefused(f"the lease of rollout {rollout} was settled before, or is not of this rollout")
        if any(one.lease is lease for one in self._admissions.values()):
            raise PublicationRefused(f"the lease of rollout {rollout} is published already")
        if not cohort or len(set(cohort)) != len(cohort):
            raise PublicationRefused("a cohort has members, each of them once")
        self._published += 1
        publication = PublicationId(
            incarnation=self._incarnation,
            admission=self._published,
            rollout=rollout,
            digests=tuple(digests),
            cohort=tuple(sorted(cohort)),
        )
        self._admissions[publication.admission] = _Admission(publication, lease)
        return publication

    def status(self, publication: PublicationId) -> Outcome:
        return self._find(publication).outcome

    def commit(self, publication: PublicationId, acknowledgements: Collection[Acknowledgement]) -> None:
        """Every rank has the data. Raises PublicationRefused with nothing changed, or what the settlement raised."""
        admission = self._find(publication)
        if any(one.publication != publication for one in acknowledgements):
            raise PublicationRefused("an acknowledgement is of another publication")
        members = sorted(one.member for one in acknowledgements)
        if members != list(publication.cohort):
            raise PublicationRefused(f"acknowledged by {members}, needed from {list(publication.cohort)}")
        self._settle(admission, Outcome.COMMIT_FAILED, Outcome.COMMITTED, self._commit)

    def roll_back(self, publication: PublicationId) -> None:
        """(A37) The source first, the data second: a deletion that fails un-settles nothing.

        Also for one whose commit or rollback failed: its lease is settled only if that attempt had not begun (A31).
        """
        one = self._find(publication)
        began = one.outcome is not Outcome.PENDING
        if one.outcome is not Outcome.ROLLBACK_FAILED:
            self._move(one, Outcome.ROLLBACK_FAILED)
        if not began or self._is_open(one.lease):
            self._roll_back(one.lease)
        self._move(one, Outcome.ROLLED_BACK)
        self._deleted(publication)

    def may_train(self, publication: PublicationId, cohort: Collection[Member]) -> bool:
        """Whether the optimizer may run on it. Raises CohortChanged."""
        if tuple(sorted(cohort)) != publication.cohort:
            raise CohortChanged(f"{sorted(cohort)} would train what {list(publication.cohort)} acknowledged")
        return self.status(publication) is Outcome.COMMITTED

    def after_lost_answer(self, publication: PublicationId) -> bool:
        """(A35, M21) Whether to train, once nobody knows whether the commit arrived. Rolls back what is pending."""
        match self.status(publication):
            case Outcome.COMMITTED:
                return True
            case Outcome.PENDING:
                self.roll_back(publication)
                return False
            case Outcome.ROLLED_BACK:
                return False
            case failed:
                raise PublicationRefused(
                    f"rollout {publication.rollout}: {failed.value}, so neither train nor wait: roll_back(publication)"
                )

    def _settle(self, one: _Admission, before: Outcome, after: Outcome, settle: Callable[[Lease], None]) -> None:
        self._move(one, before)
        settle(one.lease)
        self._move(one, after)

    def _move(self, one: _Admission, outcome: Outcome) -> None:
        if outcome not in TRANSITIONS[one.outcome]:
            raise PublicationRefused(f"rollout {one.publication.rollout} is {one.outcome.value} already")
        one.outcome = outcome

    def _find(self, publication: PublicationId) -> _Admission:
        found = self._admissions.get(publication.admission)
        if found is None or found.publication != publication:  # another incarnation makes another publication
            raise PublicationRefused(f"no such publication of rollout {publication.rollout} is known here")
        return found
