"""What a log entry says of its snapshot, held against the objects that it names and the entry before it.

Owns: every comparison of the words in a snapshot's entry with something else.
Does not know: which snapshot is wanted, what a contradiction means for a restore.

No later entry vouches for the newest one (docs/format.md, section 6): what it says of itself may have been made up.

Invariants:
1. `unsupported` reads one slot and lists names; it reads no ledger, no state and no segment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from recovery.codec import fingerprint
from recovery.errors import CredentialsRefused, Damaged, FormatNotUnderstood, ObjectMissing
from recovery.ledger import Counts
from recovery.log import check_successor, slot_key
from recovery.log_reading import read_slot
from recovery.ports import ObjectStore
from recovery.reading import by_last_byte
from recovery.snapshots import Loaded, ObjectRef, Snapshot
from snapshot_inspect.findings import INCONSISTENT, Problem


def contradictions(snapshot: Snapshot, counts: Counts, depth: int) -> Iterator[Problem]:
    """Where the log entry says something else than the ledger that it names, or nothing."""
    key, body = slot_key(snapshot.id), snapshot.slot.body
    said = body.get("counts")
    stated = {**(said if isinstance(said, dict) else {}), "depth": body.get("depth")}
    for name, value in {"depth": depth, **asdict(counts)}.items():
        if stated.get(name) != value:
            says = f"states {name} {stated[name]!r:.40}" if name in stated else f"states no {name}"
            yield Problem(key, INCONSISTENT, f"{key} {says}; its ledger {snapshot.ledger.key} has {value}")


def flushed_problem(snapshot: Snapshot, flushed: Mapping[str, int]) -> Problem | None:
    """Where the log entry accounts for other flushes than the ledger that it names."""
    stated = snapshot.slot.body.get("flushed")
    if stated is None or stated == flushed:
        return None
    key = slot_key(snapshot.id)
    message = f"{key} accounts for other flushes ({stated!r:.60}) than its ledger {snapshot.ledger.key}"
    return Problem(key, INCONSISTENT, message)


def job_problem(snapshot: Snapshot, key: str, data: bytes) -> Problem | None:
    """What is wrong with the compatibility record, of which the log entry has the fingerprint."""
    try:
        stands_for = fingerprint(dict(json.loads(data)["must"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Problem.of(key, Damaged(f"{key} is no compatibility record: {error}"))
    if snapshot.slot.body.get("fingerprint") == stands_for:
        return None
    message = f"{slot_key(snapshot.id)} does not have the fingerprint of its job's record {key}"
    return Problem(slot_key(snapshot.id), INCONSISTENT, message)


def contradicted(loaded: Loaded) -> list[str]:
    """What a snapshot that was read says wrongly of itself. A restore does not look at that."""
    snapshot, job = loaded.snapshot, loaded.states.get("job")
    problems = list(contradictions(snapshot, loaded.ledger.counts(), len(loaded.objects) - 1))
    if (wrong := flushed_problem(snapshot, loaded.flushed)) is not None:
        problems.append(wrong)
    if job is not None and (wrong := job_problem(snapshot, snapshot.states["job"].key, job)) is not None:
        problems.append(wrong)
    return [problem.message for problem in problems]


def unsupported(store: ObjectStore, snapshot: Snapshot, *, vouched: bool) -> Iterator[str]:
    """What is seen without reading: an entry that does not follow the one before, objects that are not there."""
    if not vouched and (broken := _broken_chain(store, snapshot)):
        yield broken
    for ref in (snapshot.ledger, *snapshot.states.values()):
        if wrong := _length(store, ref):
            yield f"snapshot {snapshot.id}: {ref.key} {wrong}"


def _length(store: ObjectStore, ref: ObjectRef) -> str:
    """What is wrong with an object's presence or length."""
    try:
        nbytes = next((item.nbytes for item in store.list(ref.key) if item.key == ref.key), None)
    except CredentialsRefused:  # who may not list asks for the last byte
        wrong = by_last_byte(store, ref.key, ref.nbytes)
        return "" if wrong is None else "is missing" if isinstance(wrong, ObjectMissing) else f"has {wrong.message}"
    if nbytes is None:
        return "is missing"
    return "" if nbytes == ref.nbytes else f"has {nbytes} bytes, not {ref.nbytes}"


def _broken_chain(store: ObjectStore, snapshot: Snapshot) -> str:
    """Why the entry cannot follow the one before it; an earlier one that cannot be read says nothing."""
    try:
        before = read_slot(store, snapshot.id - 1) if snapshot.id > 1 else None
    except (Damaged, FormatNotUnderstood):
        return ""
    if before is None:
        return ""
    try:
        check_successor(before.slot, before.data, snapshot.slot)
    except Damaged as error:
        return f"{slot_key(snapshot.id)} was not written after the entry before it: {error.message}"
    return ""
