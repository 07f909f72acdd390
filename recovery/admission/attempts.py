"""Attempts at source groups and the receipts of their executions: who may settle what.

Owns: the table of phases, which attempts are outstanding, and the check of every receipt that is presented.
Does not know: sources, slots, buffers, the event loop.

Invariants (numbers are those of docs/admission.md):
1. (A2) Of two attempts with one id the active one stays; the newcomers are the caller's to give back.
2. (A3) `check` looks at a whole batch before anything changes, and a receipt that comes twice fails it.
3. (A4) Receipts are compared as objects: an equal one of another owner, execution or process is not this one.
4. A terminal receipt is issued once per execution, and only it moves the attempt on.
5. An illegal move raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from recovery.admission.samples import Sample
from recovery.model import PolicyVersion


class Phase(Enum):
    """Where an attempt is. The last two are settled; nothing follows them."""

    RESERVED = "reserved"
    EXECUTING = "executing"
    TERMINAL = "terminal"
    PUBLISHED = "published"
    LEASED = "leased"
    DISCARDED = "discarded"
    RETAINED = "retained"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.RESERVED: (Phase.EXECUTING, Phase.ROLLED_BACK, Phase.RETAINED),
    Phase.EXECUTING: (Phase.TERMINAL,),
    Phase.TERMINAL: (Phase.PUBLISHED, Phase.DISCARDED, Phase.ROLLED_BACK, Phase.RETAINED),
    Phase.PUBLISHED: (Phase.LEASED, Phase.DISCARDED, Phase.ROLLED_BACK, Phase.RETAINED),
    Phase.LEASED: (Phase.COMMITTED, Phase.ROLLED_BACK, Phase.RETAINED),
    Phase.DISCARDED: (Phase.COMMITTED, Phase.ROLLED_BACK, Phase.RETAINED),
    Phase.RETAINED: (Phase.ROLLED_BACK,),
    Phase.COMMITTED: (),
    Phase.ROLLED_BACK: (),
}
"""Phase -> what may follow. TERMINAL is left in the step that enters it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attempt:
    """One issue of a reservation. `draw` counts what was generated for the group before and thrown away.

    `stale` and `aborted` say how often of these it was too old, or was cancelled.
    """

    reservation_id: str
    group_index: int
    samples: tuple[Sample, ...]
    draw: int = 0
    stale: int = 0
    aborted: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Execution:
    """The executor's receipt: one execution of one attempt, in one stage, for one owner."""

    owner: str
    stage: str
    attempt: Attempt


@dataclass(frozen=True, slots=True, eq=False)
class Terminal:
    """The receipt that all work of an execution has stopped; the only thing that can be settled."""

    execution: Execution

    @property
    def attempt(self) -> Attempt:
        return self.execution.attempt


class ReceiptRefused(Exception):
    """A program error: the receipt is not the one that is outstanding, or not in a phase that allows this."""


@dataclass(slots=True)
class Record:
    """What the owner knows of an outstanding attempt. `version` is the policy version at its admission.

    `encoded`: its samples as a snapshot has them, once that is known; None again where they are changed.
    """

    attempt: Attempt
    version: PolicyVersion | None
    phase: Phase = Phase.RESERVED
    execution: Execution | None = None
    terminal: Terminal | None = None
    samples: tuple[Sample, ...] = ()
    encoded: bytes | None = None
    cause: str = ""


class Attempts:
    """Every outstanding attempt of one owner in one stage."""

    def __init__(self, owner: str, stage: str) -> None:
        self._owner = owner
        self._stage = stage
        self._records: dict[str, Record] = {}
        self.steps = 0
        """How often an attempt changed its phase."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def in_phase(self, *phases: Phase) -> list[Record]:
        return [record for record in self._records.values() if record.phase in phases]

    def clashes(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Those whose id is outstanding already, or comes twice among them (all of these: nobody guesses)."""
        ids = [attempt.reservation_id for attempt in attempts]
        return [a for a in attempts if a.reservation_id in self._records or ids.count(a.reservation_id) > 1]

    def adopt(self, attempt: Attempt, version: PolicyVersion | None) -> Record:
        if self.clashes([attempt]):
            raise ReceiptRefused(f"{attempt.reservation_id!r} is outstanding already")
        record = self._records[attempt.reservation_id] = Record(attempt, version)
        return record

    def begin(self, record: Record) -> Execution:
        """Issue the executor's receipt."""
        self.move(record, Phase.EXECUTING)
        record.execution = Execution(self._owner, self._stage, record.attempt)
        return record.execution

    def end(self, execution: Execution, samples: tuple[Sample, ...] = ()) -> Record:
        """All work of the execution has stopped: issue its terminal receipt, once."""
        record = self._records.get(execution.attempt.reservation_id)
        if record is None or record.execution is not execution or record.phase is not Phase.EXECUTING:
            raise ReceiptRefused(f"no such execution of {execution.attempt.reservation_id!r} is running here")
        self.move(record, Phase.TERMINAL)
        record.terminal, record.samples = Terminal(execution), samples
        return record

    def check(self, receipts: Iterable[Terminal], *phases: Phase) -> list[Record]:
        """The records of a whole batch of receipts. Raises ReceiptRefused, and has changed nothing."""
        found: list[Record] = []
        for receipt in receipts:
            name = receipt.attempt.reservation_id
            record = self._records.get(name)
            if record is None or record.terminal is not receipt:
                raise ReceiptRefused(f"the receipt for {name!r} is not the one that is outstanding here")
            if record.phase not in phases:
                raise ReceiptRefused(f"{name!r} is {record.phase.value}")
            if record in found:
                raise ReceiptRefused(f"the receipt for {name!r} comes twice")
            found.append(record)
        return found

    def move(self, record: Record, phase: Phase) -> None:
        """One step of TRANSITIONS; a settled attempt is forgotten."""
        if phase not in TRANSITIONS[record.phase]:
            raise ReceiptRefused(f"{record.attempt.reservation_id!r} is {record.phase.value}, not yet {phase.value}")
        record.phase = phase
        self.steps += 1
        if not TRANSITIONS[phase]:
            del self._records[record.attempt.reservation_id]
