"""Takes snapshots: does the protocol's effects, in order, under one deadline.

Owns: the order in which holds, fence, cut, staging and publication are called, and what a snapshot attempt counted.
Does not know: the event loop (ports: Fleet), the format (publication.py), when a snapshot is due.

Invariants:
1. Only one attempt at a time; a store call that an abandoned attempt left hanging must return before another touches
   the ledger or the log.
2. The deadline ends an attempt, never a call: decoding does not wait for a snapshot.
3. An error of the tree abandons the attempt; Fenced stops the coordinator; anything else is a program error, is raised,
   and still leaves hold and fence released.
4. What the fleet handed over is applied to the ledger once, by this attempt or a later one.
5. What the ledger took back because it does not read back is asked for again, whatever becomes of the attempt.
6. What compaction has moved becomes part of the ledger between two attempts, and is published with it or not at all. An
   attempt never waits for compaction.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from recovery.calls import Stored, StoredUpTo
from recovery.compactor import Compactor
from recovery.errors import Fenced, RecoveryError, SnapshotAbandoned
from recovery.log import Slot
from recovery.model import CallId
from recovery.ports import Clock
from recovery.protocol import Effect, Event, SnapshotMachine, Verdict
from recovery.publication import Draft, Publication
from recovery.staging import Staged

T = TypeVar("T")

DELETING_SHARE = 0.5
"""Of an attempt's time: deletions stop there, so that a great deal of garbage does not hold up the next snapshot."""


class Joined(Protocol):
    """Participants that may be slow, hang or die (recovery.participants): asked before anybody is held up."""

    def ask(self, timeout_s: float) -> Mapping[str, bytes]:
        """Their states, by name. Raises SnapshotAbandoned."""

    def tell(self, published: bool) -> None:
        """How it ended; returns at once."""


class Fleet(Protocol):
    """The side that decodes: one process, or many behind one object. Every call returns within `timeout_s`."""

    def acquire_hold(self, reason: str, timeout_s: float) -> None: ...

    def release_hold(self) -> None:
        """Release exactly the hold of `acquire_hold`; harmless if there is none."""

    def raise_fence(self, timeout_s: float) -> None:
        """From here on terminal results wait; decoding does not."""

    def lower_fence(self) -> None: ...

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        """The participants' states, by name."""

    def resume(self, published: bool) -> None:
        """Tell the participants how it ended."""

    def cut(self, timeout_s: float) -> None:
        """Freeze and swap every active buffer. Raises EngineDead if there is no live engine behind it."""

    def stage(self, timeout_s: float) -> list[Staged]:
        """Everything stored since the last call, the cut included, in order."""

    def store_again(self, staged: Staged, timeout_s: float) -> Staged | None:
        """What `stage` gave does not read back: store the same records once more. None if they are not kept."""

    def rewind(self, stored: Stored) -> None:
        """The store kept no more than this of these calls: let them hand over the rest again. Returns at once."""


def in_this_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Do `work` here and now: for tests and for stores that cannot hang."""
    return work()


class InOneThread:
    """Do work in a thread of its own and give up waiting at the deadline.

    The thread is a daemon and cannot be killed; until its call returns nothing else is accepted (invariant 1). An error
    that it ends with after its deadline is the abandoned attempt's, but a program error is raised by the next call.
    """

    def __init__(self) -> None:
        self._running: threading.Thread | None = None
        self._late: list[BaseException] = []

    def __call__(self, work: Callable[[], T], timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        self._wait_for_earlier(timeout_s)
        result: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:
                raised.append(error)

        self._running = threading.Thread(target=run, name="snapshot-step", daemon=True)
        self._running.start()
        self._wait(self._running, max(0.0, deadline - time.monotonic()))
        if self._running.is_alive():
            self._late = raised
            raise SnapshotAbandoned(
                f"a step did not finish within the {timeout_s:.1f} s that were left",
                hint="raise rollout_checkpointing.snapshot_timeout_s, or look at the store's back end",
            )
        if raised:
            raise raised[0]
        return result[0]

    def _wait(self, thread: threading.Thread, timeout_s: float) -> None:
        """Until it has ended, or the time is over."""
        thread.join(timeout_s)

    def _wait_for_earlier(self, timeout_s: float) -> None:
        if self._running is not None:
            self._wait(self._running, timeout_s)
            if self._running.is_alive():
                raise SnapshotAbandoned(
                    "a store call of an earlier snapshot still has not returned",
                    hint="look at the store's back end; decoding goes on meanwhile",
                )
        late, self._late = self._late, []
        if late and not isinstance(late[0], RecoveryError):
            raise late[0]


@dataclass(slots=True)
class Attempt:
    """What one attempt did; `snapshot` is the id if it was published, `ended` the calls whose end it is the first to
    contain."""

    cause: str
    verdict: Verdict = Verdict.ABANDONED
    snapshot: int | None = None
    error: RecoveryError | None = None
    step: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_written: int = 0
    collected: int = 0
    ended: tuple[CallId, ...] = ()


class Coordinator:
    """One per epoch. `take` and `look` may be called from any one thread at a time."""

    def __init__(
        self,
        publication: Publication,
        fleet: Fleet,
        clock: Clock,
        *,
        timeout_s: float,
        fingerprint: str,
        run: Callable[[Callable[[], object], float], object] = in_this_thread,
        compactor: Compactor | None = None,
        joined: Joined | None = None,
        amend: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`amend` changes the ledger once what was stored has extended it, in the thread that does so. It gives the
        number of the slot that its changes name, if they name one: they are published as that one or not yet."""
        self._publication = publication
        self._amend = amend
        self._publish_as: int | None = None
        self._compactor = compactor
        self._joined = joined
        self._fleet = fleet
        self._clock = clock
        self._timeout_s = timeout_s
        self._fingerprint = fingerprint
        self._run = run
        self._machine = SnapshotMachine()
        self._states: Mapping[str, bytes] = {}
        self._arrived: deque[Staged] = deque()
        self._unvalidated: list[Staged] = []
        self._draft: Draft | None = None
        self._ended: list[CallId] = []
        self.rejected: Counter[str] = Counter()
        """How many records did not fit the ledger, by reason."""

    def take(self, cause: str, timeout_s: float | None = None) -> Attempt:
        """Take one snapshot. Returns how it went; raises only program errors, and those only after all was released.

        After FENCED there is nothing more to take: IllegalEvent.
        """
        attempt = Attempt(cause)
        deadline = self._clock.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        step = self._machine.on(Event.BEGIN)
        unexpected: BaseException | None = None
        while step.effect is not None:
            began = self._clock.monotonic()
            event = Event.DONE
            try:
                self._do(step.effect, attempt, deadline)
            except Fenced as error:
                event, attempt.error, attempt.step = Event.FENCED, error, step.effect.value
            except RecoveryError as error:
                event = Event.FAILED
                attempt.error, attempt.step = attempt.error or error, attempt.step or step.effect.value
            except BaseException as error:  # KeyboardInterrupt too must not leave a fence up; raised below
                event, unexpected, attempt.step = Event.FAILED, unexpected or error, step.effect.value
            attempt.seconds[step.effect.value] = self._clock.monotonic() - began
            step = self._machine.on(event)
        attempt.verdict = self._machine.verdict or Verdict.ABANDONED
        if unexpected is not None:
            raise unexpected
        if attempt.verdict is Verdict.PUBLISHED:
            self._collect(attempt, deadline)
        if attempt.verdict is Verdict.FENCED and self._compactor is not None:
            self._compactor.close()
        return attempt

    def look(self) -> Attempt | None:
        """An attempt that was fenced, if a newer coordinator is known to have taken over. One small read, no snapshot.

        A store that does not answer says nothing of that; the next snapshot tells what is wrong with it.
        """
        try:
            self._bounded(self._publication.log.check_not_fenced, self._timeout_s)
        except Fenced as error:
            if self._compactor is not None:
                self._compactor.close()
            return Attempt("look", Verdict.FENCED, error=error, step="look")
        except RecoveryError:
            return None
        return None

    def _collect(self, attempt: Attempt, deadline: float) -> None:
        """After everybody was released: hint, garbage, and what to compact. A failure leaves garbage, not damage."""
        began = self._clock.monotonic()
        enough = began + DELETING_SHARE * self._left(deadline)
        try:
            attempt.collected = self._bounded(
                lambda: self._publication.collect(lambda: self._clock.monotonic() < enough), self._left(deadline)
            )
            if self._compactor is not None and self._left(deadline) > 0:
                compactor = self._compactor
                self._bounded(lambda: compactor.plan(self._publication.ledger), self._left(deadline))
        except Fenced as error:
            attempt.verdict, attempt.error, attempt.step = Verdict.FENCED, error, "collect garbage"
        except RecoveryError as error:
            attempt.error, attempt.step = error, "collect garbage"
        attempt.seconds["collect garbage"] = self._clock.monotonic() - began

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())

    def _bounded(self, work: Callable[[], T], left_s: float) -> T:
        if left_s <= 0:
            raise SnapshotAbandoned(
                "the snapshot did not finish within its deadline",
                hint="raise rollout_checkpointing.snapshot_timeout_s, or look at the store's back end",
            )
        return self._run(work, left_s)  # type: ignore[return-value]

    def _do(self, effect: Effect, attempt: Attempt, deadline: float) -> None:
        fleet, left_s = self._fleet, self._left(deadline)
        match effect:
            case Effect.ASK:
                # What still hangs of an earlier attempt is waited for before anybody is held up.
                self._bounded(lambda: None, left_s)
                self._states = self._joined.ask(self._left(deadline)) if self._joined is not None else {}
            case Effect.ACQUIRE_HOLD:
                fleet.acquire_hold(f"snapshot ({attempt.cause})", left_s)
            case Effect.RAISE_FENCE:
                fleet.raise_fence(left_s)
            case Effect.PREPARE:
                self._states = {**self._states, **fleet.prepare(left_s)}
            case Effect.CUT:
                fleet.cut(left_s)
            case Effect.STAGE:
                self._arrived.extend(fleet.stage(left_s))
            case Effect.RECORD:
                self._bounded(self._record, left_s)
            case Effect.VALIDATE:
                self._bounded(lambda: self._validate(deadline), left_s)
            case Effect.PUBLISH:
                # The id is noted in this thread: of a slot that lands after the deadline this attempt knows nothing.
                slot = self._bounded(lambda: self._publish(attempt.cause), left_s)
                attempt.snapshot, attempt.bytes_written = slot.seq, slot.body["bytes_written"]
                attempt.ended, self._ended = tuple(self._ended), []
            case Effect.LOWER_FENCE:
                fleet.lower_fence()
            case Effect.RESUME:
                published = attempt.snapshot is not None
                if self._joined is not None:
                    self._joined.tell(published)
                fleet.resume(published)
            case Effect.RELEASE_HOLD:
                fleet.release_hold()

    def _extend(self) -> None:
        """Extend the ledger in memory. A record that does not fit costs its call the newest chunk, nothing else."""
        ledger = self._publication.ledger
        while self._arrived:
            item = self._arrived.popleft()
            with self._publication.lock:
                ledger.describe(item.info)
                ended, rejected = ledger.apply_all(item.coordinates)
            self._ended += ended
            self.rejected.update(rejected)
            self._publication.flushed[item.writer] = item.flush
            self._unvalidated.append(item)

    def _put_in_place(self) -> None:
        """Put what compaction has moved into the ledger; what no longer fits its call stays where it was."""
        moved = self._compactor.take() if self._compactor is not None else None
        if moved is None or self._compactor is None:
            return
        ledger, unused = self._publication.ledger, 0
        with self._publication.lock:
            for info in moved.segments:
                ledger.describe(info)
            for move in moved.moves:
                part = move.part
                unused += bool(part.chunks and ledger.move(part.call_id, part.chunks, move.chunks))
                if part.opened is not None and move.opened is not None:
                    unused += bool(ledger.move_request(part.call_id, part.opened, move.opened))
        self._compactor.counters.unused += unused
        keys = (*(info.key for info in moved.segments), *moved.abandoned)
        self._publication.retention.drop(key for key in keys if not ledger.knows_segment(key))

    def _record(self) -> None:
        self._publication.log.settle()
        self._extend()
        self._put_in_place()
        self._publish_as = self._amend()
        self._draft = self._publication.record(self._states)

    def _validate(self, deadline: float) -> None:
        assert self._draft is not None
        try:
            wrong = self._publication.validate(
                self._draft,
                self._unvalidated,
                lambda staged: self._fleet.store_again(staged, self._left(deadline)),
            )
        finally:
            self._ask_again()
        self._unvalidated = []
        if wrong:
            raise SnapshotAbandoned(
                f"{len(wrong)} freshly written segments did not read back: {wrong[0]}",
                hint="what they held is stored again; check the disk or bucket before you trust it further",
            )

    def _ask_again(self) -> None:
        """Tell the fleet what the ledger has of the calls of which it took something back (invariant 5)."""
        retracted, self._publication.retracted = self._publication.retracted, set()
        if not retracted:
            return
        self._ended = [call_id for call_id in self._ended if call_id not in retracted]
        stored: dict[CallId, StoredUpTo | None] = {}
        for call_id in retracted:
            entry = self._publication.ledger.get(call_id)
            stored[call_id] = None if entry is None else StoredUpTo(entry.attempt, entry.n_tokens)
        self._fleet.rewind(stored)

    def _publish(self, cause: str) -> Slot:
        assert self._draft is not None
        slot = self._publication.publish_as(
            self._publish_as, self._draft, cause=cause, fingerprint=self._fingerprint, restored_from=None
        )
        if slot is None:
            raise SnapshotAbandoned(
                f"log slot {self._publish_as} is somebody else's",
                hint="nothing to do: the next snapshot has the next slot",
            )
        return slot
