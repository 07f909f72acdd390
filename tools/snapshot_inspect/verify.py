"""Everything that the snapshots of a store need, checked; every fault named.

Owns: the order of the checks, the status of each snapshot, what counts as a problem.
Does not know: how each part is checked (lineages, segments, collected, leftovers), how the result is shown.

Invariants:
1. A fault is a finding, never an exception: one damaged object does not hide another. What is raised is about the store
   as a whole: it cannot be reached, it may not be read.
2. A job may go on meanwhile: what is missing is judged by the log as it is at the end.
3. A snapshot that garbage collection took objects from, as it may, is `collected` and no problem.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recovery.codec import fingerprint
from recovery.errors import Damaged, FormatNotUnderstood
from recovery.ledger import Ledger
from recovery.log import GENESIS, Slot, slot_key
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.slots import Read
from recovery.snapshots import MAX_STATE_BYTES, ObjectRef, Snapshot, get_object
from snapshot_inspect.collected import Collected
from snapshot_inspect.findings import INCONSISTENT, MISSING, NOT_UNDERSTOOD, Finding, Problem, merge
from snapshot_inspect.leftovers import Leftovers, is_foreign, unreferenced
from snapshot_inspect.lineages import Lineages
from snapshot_inspect.newest import Adopted, would_adopt
from snapshot_inspect.places import Place, strangers
from snapshot_inspect.progress import Progress, Silent
from snapshot_inspect.segments import affected, check_segment
from snapshot_inspect.survey import Position, Unreadable, position, snapshot_of, walk


@dataclass(slots=True)
class Tally:
    """How much was checked; the last four only when data were read."""

    slots: int = 0
    snapshots: int = 0
    ledger_objects: int = 0
    states: int = 0
    segments: int = 0
    requests: int = 0
    chunks: int = 0
    tokens: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """One snapshot: sound, collected, damaged or not_understood."""

    id: int
    status: str
    reason: str = ""


@dataclass(slots=True)
class Verification:
    """What `verify` found. `restore_from`: the newest sound snapshot."""

    position: Position
    read_data: bool
    tally: Tally = field(default_factory=Tally)
    snapshots: list[Status] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    restore_from: int | None = None
    leftovers: Leftovers = field(default_factory=Leftovers)

    @property
    def exit_code(self) -> int:
        kinds = {finding.problem.kind for finding in self.findings}
        if not kinds:
            return 0
        return FormatNotUnderstood.exit_code if kinds == {NOT_UNDERSTOOD} else Damaged.exit_code


def verify(
    place: Place,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    *,
    only: int | None = None,
    read_data: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Check the log and every snapshot (or snapshot `only`), with `read_data` down to the tokens."""
    work = _Work(place, segments, ledgers, read_data)
    work.read_log()
    work.read_structure(only)
    if read_data:
        work.read_segments(progress or Silent())
    work.judge()
    if only is None:
        work.look_around()
    return work.result


class _Work:
    """One verification, step by step."""

    def __init__(self, place: Place, segments: SegmentCodec, ledgers: LedgerCodec, read_data: bool) -> None:
        self._place = place
        self._store: ObjectStore = place.store
        self._codec = segments
        self._lineages = Lineages(self._store, ledgers)
        self._at = position(self._store)
        self._slots: list[Slot] = []
        self._snapshots: list[Snapshot] = []
        self._log: list[Problem] = []
        self._own: dict[int, list[Problem]] = defaultdict(list)
        self._bad: dict[str, list[Problem]] = {}
        self._states: dict[ObjectRef, Problem | None] = {}
        self.result = Verification(self._at, read_data)

    # ---- the log -----------------------------------------------------------------------------------------------

    def read_log(self) -> None:
        top = max(self._at.beyond, default=self._at.tail)
        for found in walk(self._store, top):
            if isinstance(found, Unreadable):
                self._log.append(Problem.of(slot_key(found.seq), found.error))
                continue
            self._slots.append(found.slot)
            if found.slot.seq == 1:
                self._log += _beginning(found)
        self.result.tally.slots = len(self._slots)

    # ---- ledgers, states, and which segments there have to be -----------------------------------------------------

    def read_structure(self, only: int | None) -> None:
        for slot in self._slots:
            if slot.kind == "snapshot" and only in (None, slot.seq):
                try:
                    self._snapshots.append(snapshot_of(slot))
                except Damaged as error:
                    self._log.append(Problem.of(slot_key(slot.seq), error))
        for snapshot in self._snapshots:
            problem = self._lineages.add(snapshot)
            if problem is not None:
                self._own[snapshot.id].append(problem)
            for name, ref in snapshot.states.items():
                if (wrong := self._state(snapshot, name, ref)) is not None:
                    self._own[snapshot.id].append(wrong)
        for snapshot, problem in self._lineages.replay():
            self._own[snapshot.id].append(problem)
        present = {item.key: item.nbytes for item in self._store.list("seg/")}
        for key, info in self._lineages.segments.items():
            if present.get(key) != info.nbytes:
                self._bad[key] = [_absent(key, info.nbytes, present.get(key), self._hurt(key))]
        tally = self.result.tally
        tally.ledger_objects, tally.segments = self._lineages.n_objects, len(self._lineages.segments)
        tally.states = sum(problem is None for problem in self._states.values())

    def _hurt(self, key: str) -> tuple:  # type: ignore[type-arg]
        return affected(self._lineages.uses[key].values())

    def _state(self, snapshot: Snapshot, name: str, ref: ObjectRef) -> Problem | None:
        if ref not in self._states:
            try:
                if ref.nbytes > MAX_STATE_BYTES:
                    raise Damaged(
                        f"{ref.key} is said to have {ref.nbytes} bytes; at most {MAX_STATE_BYTES} are allowed"
                    )
                data = get_object(self._store, ref)
                self._states[ref] = _job(snapshot, ref.key, data) if name == "job" else None
            except Damaged as error:
                self._states[ref] = Problem.of(ref.key, error)
        return self._states[ref]

    # ---- the bytes of segments --------------------------------------------------------------------------------------

    def read_segments(self, progress: Progress) -> None:
        todo = [info for key, info in sorted(self._lineages.segments.items()) if key not in self._bad]
        tally = self.result.tally
        with progress:
            progress.begin(len(todo), sum(info.nbytes for info in todo))
            for info in todo:
                checked = check_segment(self._store, self._codec, info, list(self._lineages.uses[info.key].values()))
                if checked.problems:
                    self._bad[info.key] = checked.problems
                tally.requests += checked.requests
                tally.chunks += checked.chunks
                tally.tokens += checked.tokens
                tally.nbytes += info.nbytes
                progress.advance(info.nbytes)

    # ---- the verdict ------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        users = self._lineages.users(set(self._bad))
        for key, problems in self._bad.items():
            for snapshot_id in users.get(key, ()):
                self._own[snapshot_id] += problems
        self._collected = Collected(self._store, self._all_slots())
        found: list[tuple[Problem, int | None]] = [(problem, None) for problem in self._log]
        found += [(problem, None) for problem in self._collected.problems]
        for snapshot in reversed(self._snapshots):
            problems = self._own[snapshot.id]
            status = self._status(snapshot.id, problems)
            self.result.snapshots.append(status)
            if status.status != "collected":
                self.result.tally.snapshots += 1
                found += [(problem, snapshot.id) for problem in problems]
            if status.status == "sound":
                self.result.restore_from = snapshot.id
        self.result.findings = merge(found)

    def _status(self, snapshot_id: int, problems: list[Problem]) -> Status:
        for problem in problems:
            if problem.kind == MISSING and self._collected.may_lack(snapshot_id, problem.object):
                return Status(snapshot_id, "collected", f"garbage collection took {problem.object}")
        if not problems:
            return Status(snapshot_id, "sound")
        understood = any(problem.kind != NOT_UNDERSTOOD for problem in problems)
        return Status(snapshot_id, "damaged" if understood else "not_understood", problems[0].message)

    def _all_slots(self) -> list[Slot]:
        """The log as it is now, if something is missing (invariant 2)."""
        own = (problem for problems in self._own.values() for problem in problems)
        if not any(problem.kind == MISSING for problem in own):
            return self._slots
        seen = max((slot.seq for slot in self._slots), default=0)
        newer = []
        for found in walk(self._store, position(self._store).tail):
            if isinstance(found, Read):
                if found.slot.seq <= seen:
                    break
                newer.append(found.slot)
        return newer + self._slots

    # ---- what else lies there ---------------------------------------------------------------------------------------

    def look_around(self) -> None:
        listed = self._store.list("")
        beside = strangers(self._store)
        foreign = sorted({item.key for item in listed if is_foreign(item.key)} | set(beside.names))
        adopted = self._adoption()
        needed = self._lineages.keys | self._collected.lists | set(self._lineages.segments)
        needed |= {ref.key for ref in self._states}
        about_to_go = self._collected.named_after(0)
        rest = unreferenced(listed, needed, adopted, about_to_go)
        self.result.leftovers = Leftovers(adopted, rest, foreign, beside.unfinished)

    def _adoption(self) -> Adopted:
        """Tried on the newest sound snapshot, or on nothing if nothing was published."""
        epoch = max((slot.epoch for slot in self._slots), default=0)
        if not self._snapshots and not self._log:
            return would_adopt(
                self._store, self._codec, Ledger(), epoch=epoch, collected=self._collected.named_after(0)
            )
        base = next((s for s in self._snapshots if s.id == self.result.restore_from), None)
        if base is None:
            return Adopted()
        ledger, flushed = self._lineages.ledger_of(base)
        return would_adopt(
            self._store,
            self._codec,
            ledger,
            epoch=epoch,
            from_epoch=base.slot.epoch,
            flushed=flushed,
            collected=self._collected.named_after(base.id),
        )


def _beginning(read: Read) -> Iterator[Problem]:
    """Slot 1 follows nothing, and nobody can have written it but by a claim."""
    key, slot = slot_key(1), read.slot
    if slot.prev != GENESIS:
        yield Problem(key, INCONSISTENT, f"{key} names a slot before it")
    if slot.kind != "epoch" or slot.epoch < 1:
        yield Problem(key, INCONSISTENT, f"{key} is of kind {slot.kind}, epoch {slot.epoch}; a log begins with a claim")


def _absent(key: str, nbytes: int, found: int | None, hurt: Iterable) -> Problem:  # type: ignore[type-arg]
    if found is None:
        return Problem(key, MISSING, f"segment {key} is missing", affected=tuple(hurt))
    return Problem(key, "mismatch", f"segment {key} has {found} bytes, not {nbytes}", affected=tuple(hurt))


def _job(snapshot: Snapshot, key: str, data: bytes) -> Problem | None:
    """What is wrong with the compatibility record, of which the log entry has the fingerprint."""
    try:
        must = dict(json.loads(data)["must"])
        stands_for = fingerprint(must)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Problem.of(key, Damaged(f"{key} is no compatibility record: {error}"))
    if snapshot.slot.body.get("fingerprint") != stands_for:
        message = f"{slot_key(snapshot.id)} does not have the fingerprint of its job's record {key}"
        return Problem(slot_key(snapshot.id), INCONSISTENT, message)
    return None
