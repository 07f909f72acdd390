"""What a rollout looks like from outside at a moment: its gauges, and what a waiter waits for, in words.

Owns: the texts, and which number stands under which key of the metrics.
Does not know: who waits, clocks (the moment is given), tasks.

Invariants:
1. Looking changes nothing but the counters of the metrics, which are since the last look.
"""

from __future__ import annotations

from collections.abc import Iterable

from recovery.admission.ages import NO_LAG
from recovery.admission.holds import Hold
from recovery.admission.limits import Waiting
from recovery.admission.metrics import HOLD_OWNERS, RETAINED_CAUSES
from recovery.admission.ownership import Ownership


def described(holds: Iterable[Hold], utc: float) -> str:
    """Owners of holds, why each holds, and for how long."""
    return ", ".join(
        f"{hold.owner} ({hold.reason or 'no reason given'}) for {max(0.0, utc - hold.acquired_utc):.0f} s"
        for hold in holds
    )


def explained(waiting: Waiting, utc: float, *, started: bool) -> Waiting:
    """The same answer for people: with the age of what is held, or that nobody has started anything."""
    if waiting.holds:
        return Waiting(f"held by {described(waiting.holds, utc)}", waiting.holds)
    return waiting if started else Waiting("nothing is generated: start() was not called")


def metrics(own: Ownership, utc: float) -> dict[str, float]:
    """Every key of metrics.KEYS; counters are since the last call."""
    known = ([lag for lag in own.ages.of(entry.record)[1] if lag != NO_LAG] for entry in own.finished)
    lags = [max(found, default=0) for found in known]  # a group without a lag is counted elsewhere, and is no number
    holds = own.gate.active
    ages = {owner: 0.0 for owner in HOLD_OWNERS}
    for hold in holds:
        owner = hold.owner if hold.owner in ages else "other"
        ages[owner] = max(ages[owner], utc - hold.acquired_utc)
    causes = [record.cause.replace(" ", "_") for record in own.settlement.retained]
    prefix = "rollout/fully_async"
    return own.metrics.emit(
        {
            "fully_async/queue/completed_groups": len(own.finished),
            "fully_async/policy/current_version": own.versions.current.number,
            f"{prefix}/queue_size": len(own.finished),
            f"{prefix}/buffer_avg_staleness": sum(lags) / len(lags) if lags else 0.0,
            f"{prefix}/buffer_max_staleness": max(lags, default=0),
            f"{prefix}/holds_active": len(holds),
            **{f"{prefix}/hold_age_s/{owner}": age for owner, age in ages.items()},
            f"{prefix}/frontier_groups": sum(own.gate.left(hold) for hold in holds),
            f"{prefix}/open_leases": len(own.leases.open),
            **{f"{prefix}/retained/{cause}": causes.count(cause) for cause in RETAINED_CAUSES},
            f"{prefix}/slots_used": own.slots.used,
            f"{prefix}/slots_total": own.slots.total,
        }
    )
