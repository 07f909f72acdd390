"""From problems to the status of each snapshot: sound, collected, damaged, not_understood or forgotten.

Owns: what is damage and what garbage collection did with right.
Does not know: how problems were found.

Invariants:
1. A snapshot that garbage collection took objects from, or is about to, is `collected`; nothing about it is a finding.
2. A fault of an object is a finding once, with every snapshot that needs the object and is not collected.
3. What only forgotten snapshots need is no finding; of a pinned one nothing may have been collected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from recovery.snapshots import Snapshot
from snapshot_inspect.collected import Collected
from snapshot_inspect.findings import INCONSISTENT, MISSING, NOT_UNDERSTOOD, Finding, Problem, merge
from snapshot_inspect.lineages import Lineages

SOUND, COLLECTED, DAMAGED, NOT_KNOWN, FORGOTTEN = "sound", "collected", "damaged", "not_understood", "forgotten"


@dataclass(frozen=True, slots=True)
class Status:
    """One snapshot; `reason` is empty if it is sound."""

    id: int
    status: str
    reason: str = ""


def judge(
    snapshots: Sequence[Snapshot],
    lineages: Lineages,
    own: Mapping[int, Sequence[Problem]],
    bad_segments: Mapping[str, Sequence[Problem]],
    others: Iterable[Problem],
    collected: Collected,
    *,
    pinned: Container[int],
    forgotten: Container[int],
) -> tuple[list[Status], list[Finding]]:
    """`own`: what is wrong with ledgers and states, by snapshot; `others`: what belongs to no snapshot."""
    going = collected.named_after(0)
    users = lineages.users(set(bad_segments) | going.intersection(lineages.segments))
    problems = {snapshot.id: list(own.get(snapshot.id, ())) for snapshot in snapshots}
    about_to_go: dict[int, list[str]] = defaultdict(list)
    for key, ids in users.items():
        for snapshot_id in ids:
            problems[snapshot_id] += bad_segments.get(key, ())
            if key in going:
                about_to_go[snapshot_id].append(key)
    statuses: list[Status] = []
    found: list[tuple[Problem, int | None]] = [(problem, None) for problem in others]
    for snapshot in sorted(snapshots, key=lambda item: item.id):
        objects = {ref.key for ref in snapshot.states.values()} | lineages.chain_keys(snapshot)
        named = sorted({*about_to_go[snapshot.id], *going.intersection(objects)})
        if snapshot.id in forgotten:
            statuses.append(Status(snapshot.id, FORGOTTEN, "no restore considers it"))
            continue
        kept = snapshot.id in pinned
        status, wrong = _judge_one(snapshot.id, problems[snapshot.id], named, collected, kept=kept)
        statuses.append(status)
        found += [(problem, snapshot.id) for problem in wrong]
    return statuses, merge(found)


def _judge_one(
    snapshot: int, problems: list[Problem], named: list[str], collected: Collected, *, kept: bool
) -> tuple[Status, list[Problem]]:
    """`kept`: by a pin, so that garbage collection had no right to anything of it."""
    for problem in problems if not kept else ():
        if problem.kind == MISSING and collected.may_lack(snapshot, problem.object):
            return Status(snapshot, COLLECTED, f"garbage collection took {problem.object}"), []
    for key in named:
        if key not in collected.named_after(snapshot):
            continue
        if collected.may_intend(snapshot, key) and not kept:
            return Status(snapshot, COLLECTED, f"garbage collection is about to delete {key}"), []
        why = "is pinned" if kept else "was not replaced by then"
        message = f"{key} is named for deletion although snapshot {snapshot} {why}"
        problems = [*problems, Problem(key, INCONSISTENT, message)]
    if not problems:
        return Status(snapshot, SOUND), []
    understood = any(problem.kind != NOT_UNDERSTOOD for problem in problems)
    return Status(snapshot, DAMAGED if understood else NOT_KNOWN, problems[0].message), problems
