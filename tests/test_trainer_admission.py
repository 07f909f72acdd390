"""recovery.admission.trainer: only the whole cohort commits, and a lost answer is decided by status alone."""

from __future__ import annotations

from typing import Any

import pytest

from recovery.admission.leases import Lease
from recovery.admission.trainer import (
    TRANSITIONS,
    Acknowledgement,
    CohortChanged,
    Outcome,
    PublicationId,
    PublicationRefused,
    TrainerAdmission,
)
from recovery.model import PolicyVersion

COHORT = (("actor", 0), ("actor", 1), ("critic", 0))


class Inner:
    """The lease side: counts, and fails when told to."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.spent: set[int] = set()
        self.down: set[str] = set()

    def settle(self, verb: str, rollout: int) -> None:
        self.spent.add(rollout)
        self.do(verb, rollout)

    def do(self, verb: str, rollout: int) -> None:
        if verb in self.down:
            raise OSError(verb)
        self.done.append((verb, rollout))


def admission(inner: Inner, incarnation: str = "one") -> TrainerAdmission:
    return TrainerAdmission(
        incarnation,
        lambda lease: inner.settle("commit", lease.rollout),
        lambda lease: inner.settle("roll back", lease.rollout),
        lambda publication: inner.do("delete", publication.rollout),
        is_open=lambda lease: lease.rollout not in inner.spent,
    )


def lease(rollout: int = 4) -> Lease:
    return Lease(rollout=rollout, receipts=(), groups=(), version=PolicyVersion("a", 0))


def acknowledged(publication: PublicationId, members: Any = COHORT) -> list[Acknowledgement]:
    return [Acknowledgement(publication, member) for member in members]


def published(inner: Inner) -> tuple[TrainerAdmission, PublicationId]:
    trainer = admission(inner)
    return trainer, trainer.publish(lease(), 4, ["d1", "d2"], COHORT)


@pytest.mark.parametrize(
    "members",
    [COHORT[:2], (*COHORT, COHORT[0]), (*COHORT[:2], ("critic", 1)), (*COHORT, ("judge", 0)), ()],
    ids=["missing", "repeated", "changed", "foreign", "none"],
)
def test_a34_anything_but_the_whole_cohort_once_is_refused_before_settlement(members: Any) -> None:
    inner = Inner()
    trainer, publication = published(inner)
    with pytest.raises(PublicationRefused):
        trainer.commit(publication, acknowledged(publication, members))
    assert inner.done == [] and trainer.status(publication) is Outcome.PENDING and trainer.unresolved == 1
    trainer.commit(publication, acknowledged(publication, COHORT[::-1]))
    assert inner.done == [("commit", 4)] and trainer.unresolved == 0


def test_a34_m23_an_acknowledgement_of_another_publication_or_process_is_refused() -> None:
    inner = Inner()
    trainer, publication = published(inner)
    other = trainer.publish(lease(5), 5, ["d3"], COHORT)
    with pytest.raises(PublicationRefused, match="another"):
        trainer.commit(publication, acknowledged(other))
    restarted = admission(inner, "two")
    restarted.publish(lease(), 4, ["d1", "d2"], COHORT)
    for call in (restarted.status, restarted.roll_back, lambda p: restarted.commit(p, acknowledged(p))):
        with pytest.raises(PublicationRefused, match="known"):
            call(publication)
    assert inner.done == []


def test_a30_a_lease_of_another_rollout_is_rolled_back() -> None:
    inner = Inner()
    with pytest.raises(PublicationRefused, match="asked for was 5"):
        admission(inner).publish(lease(4), 5, [], COHORT)
    assert inner.done == [("roll back", 4)]


def test_a31_settled_is_settled() -> None:
    inner = Inner()
    trainer, publication = published(inner)
    trainer.commit(publication, acknowledged(publication))
    for again in (
        lambda: trainer.roll_back(publication),
        lambda: trainer.commit(publication, acknowledged(publication)),
    ):
        with pytest.raises(PublicationRefused, match="already"):
            again()
    assert inner.done == [("commit", 4)]


@pytest.mark.parametrize("verb, failed", [("commit", Outcome.COMMIT_FAILED), ("roll back", Outcome.ROLLBACK_FAILED)])
def test_a_failing_settlement_fails_closed(verb: str, failed: Outcome) -> None:
    inner = Inner()
    inner.down = {verb}
    trainer, publication = published(inner)
    with pytest.raises(OSError):
        if verb == "commit":
            trainer.commit(publication, acknowledged(publication))
        else:
            trainer.roll_back(publication)
    assert trainer.status(publication) is failed and trainer.unresolved == 1
    assert not trainer.may_train(publication, COHORT)
    with pytest.raises(PublicationRefused, match="neither"):
        trainer.after_lost_answer(publication)
    assert inner.done == []
    trainer.roll_back(publication)
    assert trainer.status(publication) is Outcome.ROLLED_BACK and trainer.unresolved == 0, "a way out"
    assert inner.done == [("delete", 4)], "A31: the lease is not settled again"


def test_a33_what_was_refused_before_it_began_is_settled_by_the_way_out() -> None:
    inner = Inner()
    trainer, publication = published(inner)
    inner.settle = inner.do  # type: ignore[method-assign]
    inner.down = {"commit"}
    with pytest.raises(OSError):
        trainer.commit(publication, acknowledged(publication))
    trainer.roll_back(publication)
    assert inner.done == [("roll back", 4), ("delete", 4)]


def test_a31_a_lease_is_published_once_and_only_while_it_is_open() -> None:
    inner = Inner()
    trainer = admission(inner)
    one = lease()
    publication = trainer.publish(one, 4, [], COHORT)
    with pytest.raises(PublicationRefused, match="already"):
        trainer.publish(one, 4, [], COHORT)
    assert trainer.unresolved == 1
    trainer.commit(publication, acknowledged(publication))
    with pytest.raises(PublicationRefused, match="settled before"):
        trainer.publish(lease(), 4, [], COHORT)
    assert trainer.unresolved == 0 and inner.done == [("commit", 4)]


def test_a35_m20_m21_a_lost_answer_is_decided_by_the_status() -> None:
    inner = Inner()
    trainer, publication = published(inner)
    assert trainer.after_lost_answer(publication) is False, "pending: rolled back"
    assert inner.done == [("roll back", 4), ("delete", 4)] and trainer.after_lost_answer(publication) is False
    inner = Inner()
    trainer, publication = published(inner)
    trainer.commit(publication, acknowledged(publication))
    assert trainer.after_lost_answer(publication) and trainer.may_train(publication, COHORT)
    assert inner.done == [("commit", 4)], "trained once"


def test_m22_a_cohort_that_changed_does_not_train() -> None:
    trainer, publication = published(Inner())
    trainer.commit(publication, acknowledged(publication))
    with pytest.raises(CohortChanged):
        trainer.may_train(publication, COHORT[:2])
    assert trainer.may_train(publication, COHORT[::-1])


def test_a37_the_source_is_settled_first_and_a_failing_deletion_un_settles_nothing() -> None:
    inner = Inner()
    inner.down = {"delete"}
    trainer, publication = published(inner)
    with pytest.raises(OSError, match="delete"):
        trainer.roll_back(publication)
    assert inner.done == [("roll back", 4)] and trainer.status(publication) is Outcome.ROLLED_BACK


def test_every_way_out_of_pending_leads_through_a_failed_state() -> None:
    assert all("failed" in outcome.value for outcome in TRANSITIONS[Outcome.PENDING])
    for cohort in ((), (COHORT[0], COHORT[0])):
        with pytest.raises(PublicationRefused, match="cohort"):
            admission(Inner()).publish(lease(), 4, [], cohort)
