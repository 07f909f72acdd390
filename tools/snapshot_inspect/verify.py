"""Everything that the snapshots of a store need, checked; every fault named.

Owns: the order of the checks, and what is counted.
Does not know: how each part is checked (lineages, segments, collected), what a fault means for a snapshot (verdict),
how the result is shown.

Invariants:
1. A fault is a finding, never an exception: one damaged object does not hide another. What is raised is about the store
   as a whole: it cannot be reached, it may not be read.
2. A job may go on meanwhile: what is missing is judged by the log as it is at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from recovery import pins
from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood, ObjectMissing
from recovery.layout import SEGMENTS
from recovery.ledger import Ledger
from recovery.log import Slot, forgotten_by, slot_key
from recovery.log_reading import Read
from recovery.ports import LedgerCodec, SegmentCodec
from recovery.snapshots import MAX_JSON_BYTES, ObjectRef, Snapshot, get_object
from snapshot_inspect.collected import Collected
from snapshot_inspect.findings import MISSING, NOT_UNDERSTOOD, Finding, Problem
from snapshot_inspect.leftovers import Leftovers, is_foreign, unreferenced
from snapshot_inspect.lineages import Lineages
from snapshot_inspect.newest import Adopted, would_adopt
from snapshot_inspect.places import Place, strangers
from snapshot_inspect.progress import Progress, Silent
from snapshot_inspect.segments import affected, check_segment
from snapshot_inspect.statements import job_problem
from snapshot_inspect.survey import Position, Unreadable, position, walk
from snapshot_inspect.verdict import COLLECTED, SOUND, Status, judge


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
        if self.not_understood is not None:
            return self.not_understood.exit_code
        return Damaged.exit_code if self.findings else 0

    @property
    def not_understood(self) -> FormatNotUnderstood | None:
        """What another version is needed for, if nothing else is wrong."""
        if {finding.problem.kind for finding in self.findings} != {NOT_UNDERSTOOD}:
            return None
        first = self.findings[0].problem
        return FormatNotUnderstood(first.message, hint=first.hint)


def verify(
    place: Place,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    *,
    only: int | None = None,
    read_data: bool = False,
    progress: Progress | None = None,
    ledgers_progress: Progress | None = None,
) -> Verification:
    """Check the log and every snapshot (or snapshot `only`), with `read_data` down to the tokens.

    `progress` is told of segments, `ledgers_progress` of the snapshots whose ledgers are read before.
    What lies there beside what snapshots need is looked for only if all are checked.
    """
    work = _worked(
        place, segments, ledgers, only=only, read_data=read_data, progress=progress, looking=ledgers_progress
    )
    return work.result


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound snapshot with its ledger and the keys of all that it needs.

    `accounted`: of every snapshot whose ledger was read, its epoch, its time (UTC seconds), and up to which flush of
    each writer it accounts.
    """

    snapshot: Snapshot
    ledger: Ledger
    keys: set[str]
    accounted: list[tuple[int, float, Mapping[str, int]]]


def structure(place: Place, segments: SegmentCodec, ledgers: LedgerCodec) -> tuple[Verification, Sound | None]:
    """What `verify` finds without data, and the newest sound snapshot."""
    work = _worked(place, segments, ledgers, only=None, read_data=False, progress=None)
    return work.result, work.newest_sound()


def _worked(
    place: Place,
    segments: SegmentCodec,
    ledgers: LedgerCodec,
    *,
    only: int | None,
    read_data: bool,
    progress: Progress | None,
    looking: Progress | None = None,
) -> _Work:
    work = _Work(place, segments, ledgers, read_data)
    work.read_log()
    work.read_structure(only, looking or Silent())
    if read_data:
        work.read_segments(progress or Silent())
    work.conclude()
    if only is None:
        work.look_around()
    return work


class _Work:
    """One verification, step by step."""

    def __init__(self, place: Place, segments: SegmentCodec, ledgers: LedgerCodec, read_data: bool) -> None:
        self._store = place.store
        self._codec = segments
        self._lineages = Lineages(self._store, ledgers)
        self._at = position(self._store)
        self._slots: list[Slot] = []
        self._snapshots: list[Snapshot] = []
        self._log: list[Problem] = []
        self._forgotten: set[int] = set()
        self._own: dict[int, list[Problem]] = defaultdict(list)
        self._bad: dict[str, list[Problem]] = {}
        self._states: dict[ObjectRef, bytes | Problem] = {}
        self.result = Verification(self._at, read_data)

    # ---- the log ---------------------------------------------------------------------------------------------------

    def read_log(self) -> None:
        if (blocked := self._at.blocked) is not None:
            self._log.append(Problem.of(slot_key(blocked.seq), blocked.error))
        for found in walk(self._store, self._at.top, whole=True):
            if isinstance(found, Unreadable):
                self._log.append(Problem.of(slot_key(found.seq), found.error))
                continue
            self._slots.append(found.slot)
            try:
                if found.slot.kind == "forget":
                    self._forgotten |= forgotten_by(found.slot)
            except Damaged as error:
                self._log.append(Problem.of(slot_key(found.slot.seq), error))
        self.result.tally.slots = len(self._slots)

    # ---- ledgers, states, and which segments there have to be ------------------------------------------------------

    def read_structure(self, only: int | None, progress: Progress) -> None:
        for slot in self._slots:
            if slot.kind == "snapshot" and only in (None, slot.seq):
                try:
                    self._snapshots.append(Snapshot.from_slot(slot))
                except Damaged as error:
                    self._log.append(Problem.of(slot_key(slot.seq), error))
        with progress:
            progress.begin(len(self._snapshots), sum(snapshot.ledger.nbytes for snapshot in self._snapshots))
            for snapshot in self._snapshots:
                self._read_snapshot(snapshot)
                progress.advance(snapshot.ledger.nbytes)
        for snapshot, problem in self._lineages.replay():
            self._own[snapshot.id].append(problem)
        self._find_segments()
        tally = self.result.tally
        tally.ledger_objects, tally.segments = self._lineages.n_objects, len(self._lineages.segments)
        tally.states = sum(isinstance(state, bytes) for state in self._states.values())

    def _read_snapshot(self, snapshot: Snapshot) -> None:
        if (problem := self._lineages.add(snapshot)) is not None:
            self._own[snapshot.id].append(problem)
        for name, ref in snapshot.states.items():
            if (problem := self._state_problem(snapshot, name, ref)) is not None:
                self._own[snapshot.id].append(problem)

    def _find_segments(self) -> None:
        present = {item.key: item.nbytes for item in self._store.list(SEGMENTS)}
        for key, info in self._lineages.segments.items():
            found = present.get(key)
            if found != info.nbytes:
                gone = ObjectMissing(f"segment {key} is missing")
                other = DigestMismatch(f"segment {key} has {found} bytes, not {info.nbytes}")
                hurt = affected(self._lineages.uses[key].values())
                self._bad[key] = [Problem.of(key, gone if found is None else other, hurt)]

    def _state_problem(self, snapshot: Snapshot, name: str, ref: ObjectRef) -> Problem | None:
        if ref not in self._states:
            try:
                self._states[ref] = get_object(self._store, ref, MAX_JSON_BYTES)
            except Damaged as error:
                self._states[ref] = Problem.of(ref.key, error)
        state = self._states[ref]
        if isinstance(state, Problem):
            return state
        return job_problem(snapshot, ref.key, state) if name == "job" else None

    # ---- the bytes of segments -------------------------------------------------------------------------------------

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

    # ---- what it means ---------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        self._collected = Collected(self._store, self._slots_now())
        others = self._log + self._collected.problems
        statuses, findings = judge(
            self._snapshots,
            self._lineages,
            self._own,
            self._bad,
            others,
            self._collected,
            pinned=pins.listed(self._store),
            forgotten=self._forgotten,
        )
        self.result.snapshots, self.result.findings = statuses, findings
        self.result.tally.snapshots = sum(status.status != COLLECTED for status in statuses)
        sound = [status.id for status in statuses if status.status == SOUND]
        self.result.restore_from = max(sound, default=None)

    def _slots_now(self) -> list[Slot]:
        """The log as it is now, if something is missing (invariant 2)."""
        problems = [problem for group in (*self._own.values(), *self._bad.values()) for problem in group]
        if not any(problem.kind == MISSING for problem in problems):
            return self._slots
        seen = max((slot.seq for slot in self._slots), default=0)
        newer = []
        for found in walk(self._store, position(self._store).tail):
            if isinstance(found, Read):
                if found.slot.seq <= seen:
                    break
                newer.append(found.slot)
        return newer + self._slots

    # ---- what else lies there --------------------------------------------------------------------------------------

    def look_around(self) -> None:
        listed = self._store.list("")
        beside = strangers(self._store)
        foreign = sorted({item.key for item in listed if is_foreign(item.key)} | set(beside.names))
        adopted = self._adoption()
        needed = self._lineages.keys | self._collected.lists | set(self._lineages.segments)
        needed |= {ref.key for ref in self._states}
        rest = list(unreferenced(listed, needed, adopted, self._collected.named_after(0)))
        self.result.leftovers = Leftovers(adopted, rest, foreign, beside.unfinished)

    def newest_sound(self) -> Sound | None:
        snapshot = next((s for s in self._snapshots if s.id == self.result.restore_from), None)
        if snapshot is None:
            return None
        ledger, _ = self._lineages.ledger_of(snapshot)
        others = {ref.key for ref in snapshot.states.values()} | self._lineages.chain_keys(snapshot)
        accounted = [(s.slot.epoch, s.slot.utc, flushed) for s, flushed in self._lineages.accounted()]
        return Sound(snapshot, ledger, others | ledger.segments_in_use(), accounted)

    def _adoption(self) -> Adopted:
        """Tried on the newest sound snapshot."""
        base = next((s for s in self._snapshots if s.id == self.result.restore_from), None)
        if base is None or max(self._forgotten, default=0) > base.id:
            return Adopted()
        ledger, flushed = self._lineages.ledger_of(base)
        collected = self._collected.named_after(base.id)
        return would_adopt(
            self._store, self._codec, ledger, epoch=base.slot.epoch, flushed=flushed, collected=collected
        )
