"""The composition root of a coordinator of many workers: store, restore, snapshots, and who may carry on which call.

Owns: the one epoch, its ledger and log, the coordinator's thread, and the answers to workers and to the job's driver.
Does not know: Ray, engines, prompts, outputs. Workers are asked through `messages.Ask`; no token comes here but those
that planning a call reads from the store.

Every method may be called from any thread, several at a time.

Invariants:
1. A worker that was found gone is out before any of its calls is given to another, and what it had stored is in the
   ledger by then.
2. A call is given out once its new attempt is published (plans.py).
3. A coordinator that was started again goes on with the store as it is, and bumps no attempt of a call that lives in a
   worker: workers join it with what they have, and decode on.
4. A fenced coordinator answers nothing any more but Fenced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from recovery.adoption import UNREADABLE, read_flushed
from recovery.calls import StoredUpTo
from recovery.claims import latest_claims
from recovery.compactor import Compactor
from recovery.config import CheckpointingConfig
from recovery.coordinator import Attempt, Coordinator, InOneThread
from recovery.errors import Fenced, FingerprintMismatch, InputError, ProgramError, RecoveryError
from recovery.layout import segment_position, segments_of
from recovery.ledger import Entry, Ledger
from recovery.log_reading import find_tail
from recovery.model import OPEN, CallId
from recovery.participants import Participants
from recovery.ports import ObjectStore, Participant, SegmentCodec, Staging
from recovery.protocol import Verdict
from recovery.restore import differences
from recovery.resume import StopRules
from recovery.salvage import Salvaged, salvage
from recovery.staging import Staged, coordinates_of
from storage_backends import open_store
from vllm_hooks.opening import Opened, open_store_for
from vllm_hooks.ray_workers.fleet import WorkersFleet
from vllm_hooks.ray_workers.members import Busy, Members
from vllm_hooks.ray_workers.messages import Ask, Claimed, Figures, Joined, Joining, Lost, NotAMember, WorkerId
from vllm_hooks.ray_workers.plans import Plans
from vllm_hooks.snapshot_loop import SnapshotLoop

GRADES = ("statistical", "token", "bitwise")
"""How exact a resume is, the least first."""


class Coordination:
    """One coordinator. Make it with `open`."""

    def __init__(
        self,
        config: CheckpointingConfig,
        opened: Opened,
        stop: StopRules,
        must: Mapping[str, Any],
        recorded: Mapping[str, Any],
        *,
        again: bool,
    ) -> None:
        self._config = config
        self._must, self._recorded = must, recorded
        self.opened = opened
        self._publication = opened.publication
        self.epoch = opened.publication.log.epoch
        self._lock = threading.RLock()
        self._members = Members()
        self._grades: dict[WorkerId, str] = {}
        self._captured: dict[WorkerId, int] = {}
        self._gone: set[WorkerId] = set()
        self._departed: dict[WorkerId, frozenset[CallId]] = {}
        """By worker that is gone: the calls that it had."""
        self._salvaged: dict[WorkerId, Salvaged] = {}
        self._news = self._started = False
        self._waits = again
        self.failure: RecoveryError | None = None
        self._figures = Figures(self.epoch, passed_over=tuple(opened.restored.passed_over_lines()))
        self._plans = Plans(opened.publication, opened.store, opened.segments, stop)
        rewound = isinstance(config.restore, int)
        self.participants = Participants(opened.states, opened.clock, rewound=rewound)
        """Agents, tools, environments: asked with every snapshot, wherever they live."""
        self._fleet = WorkersFleet(
            self.epoch, self.participants.states, on_gone=self._found_gone, on_stage=self._plans.due
        )
        compactor = Compactor(opened.store, opened.segments, opened.entropy, epoch=self.epoch)
        coordinator = Coordinator(
            opened.publication,
            self._fleet,
            opened.clock,
            timeout_s=config.snapshot_timeout_s,
            fingerprint=opened.fingerprint,
            run=InOneThread(),
            compactor=compactor,
            amend=self._plans.amend,
            joined=self.participants,
        )
        self._compactor = compactor
        self._snapshots = SnapshotLoop(
            coordinator,
            interval_s=config.snapshot_interval_s,
            may_take=lambda: self.failure is None,
            has_news=self._has_news,
            on_attempt=self._on_attempt,
            on_error=self._on_error,
        )

    @classmethod
    def open(
        cls,
        config: CheckpointingConfig,
        must: Mapping[str, Any],
        recorded: Mapping[str, Any],
        stop: StopRules,
        *,
        owner: str,
        again: bool = False,
    ) -> Coordination:
        """Claim the store of `config` and restore from it. Raises RecoveryError and its kin.

        Args:
            owner: who this is, the same for every coordinator of one run of a job.
            again: this one takes the place of another of the same run. It goes on with what that one published,
                whatever `restore` says; and if the store is another run's by now, it is Fenced before it claims.
        """
        if again:
            config = _going_on(config, owner)
        opened = open_store_for(config, must, recorded, None, owner=owner, exactness="statistical", again=again)
        return cls(config, opened, stop, must, recorded, again=again)

    def go_on(self, participants: Iterable[tuple[Participant, float]] = ()) -> None:
        """In another's place: these had joined it and are as they were, each with its deadline. Harmless twice."""
        with self._lock:
            if self._waits:
                for one, timeout_s in participants:
                    self.participants.join(one, timeout_s, running=True)
                self._waits = False
        self.start()

    def start(self) -> None:
        """Begin to take snapshots. Harmless twice; one in another's place begins with `go_on`."""
        with self._lock:
            if not self._started and not self._waits:
                self._started = True
                self._snapshots.start()

    def finish(self, *, last: bool, timeout_s: float | None = None) -> Attempt | None:
        """Stop, with a last snapshot if wanted and possible. Returns the last attempt."""
        wait_s = self._config.snapshot_timeout_s if timeout_s is None else timeout_s
        attempt = self._snapshots.finish(last=last, timeout_s=timeout_s, wait_s=wait_s)
        self._compactor.close()
        return attempt

    # ---- workers -----------------------------------------------------------------------------------------------

    def join(self, joining: Joining, ask: Ask) -> Joined:
        """A worker is in from here on: it is asked with every snapshot.

        Raises FingerprintMismatch for another job's, and NotAMember for one that was found gone: its calls are others'
        by now, and it may come back under another name.
        """
        self._check()
        if joining.worker in self._departed:
            raise NotAMember(joining.worker)
        if fields := differences(self._must, joining.must):
            raise FingerprintMismatch(
                f"worker {joining.worker} has another engine than this job: " + "; ".join(fields),
                hint="give every worker the model, tokenizer and engine arguments of the job",
            )
        grade = joining.grade
        if self.opened.changed or differences(self._recorded, joining.recorded):
            grade = GRADES[0]  # a self-test compares an engine with itself
        with self._lock:
            ahead = {call_id: entry.attempt for call_id in joining.calls if (entry := self._entry(call_id)) is not None}
            calls = {c: attempt for c, attempt in joining.calls.items() if attempt >= ahead.get(c, 0)}
            superseded = self._members.join(joining.worker, calls) | (joining.calls.keys() - calls.keys())
            self._grades[joining.worker] = grade
            self._captured.setdefault(joining.worker, 0)
            self._fleet.add(joining.worker, ask)
            stored: dict[CallId, StoredUpTo | None] = {}
            for call_id in calls.keys() - superseded:
                entry = self._entry(call_id)
                stored[call_id] = None if entry is None else StoredUpTo(entry.attempt, entry.n_tokens)
        return Joined(self.epoch, stored, superseded)

    def beat(self, worker: WorkerId, n_captured: int) -> int | None:
        """The epoch, or None if the worker is no member and should join."""
        self._check()
        with self._lock:
            if worker not in self._members:
                return None
            self._captured[worker] = n_captured
        return self.epoch

    def claim(self, worker: WorkerId, call_id: CallId, timeout_s: float) -> Claimed | None:
        """Give a call to a worker; None if that is not published within the time: ask again.

        Raises NotAMember, and InputError if another member has the call.
        """
        self._check()
        self._recover()
        with self._lock:
            given = self._members.claim(worker, call_id)
            if isinstance(given, Busy):
                raise InputError(
                    f"the call is running already, in worker {given.owner}",
                    hint="give every concurrent request an id of its own",
                )
            entry = self._entry(call_id)
            # One that somebody had before may be stored and on its way into the ledger.
            waits = given.attempt > 0 if entry is None else entry.state == OPEN
            if waits:
                self._plans.want(call_id, self._grades[worker])
        if waits:
            self._snapshots.request("claim")
            if not self._plans.wait(call_id, timeout_s):
                self._check()
                return None
        part = self._publication.excerpt([call_id])
        carried = part.get(call_id)
        return Claimed(given.attempt) if carried is None else Claimed(carried.attempt, part)

    def lost(self, worker: WorkerId) -> Lost:
        """A worker is gone: what it had stored is taken, and its calls can be claimed by others. Harmless twice."""
        self._check()
        began = time.monotonic()
        with self._lock:
            self._found_gone(worker)
            calls = self._departed[worker]
        self._recover()
        waited = self._salvaged.pop(worker, Salvaged())
        up_to = self._fleet.arrived_up_to()
        entries = [entry for call_id in calls if (entry := self._entry(call_id)) is not None and entry.state == OPEN]
        known = {entry.call_id: entry.n_tokens for entry in entries}
        n_tokens = sum(max(known.get(call_id, 0), up_to.get(call_id, 0)) for call_id in calls)
        why = "; ".join(error.message for _, error in waited.troubles()[:3])
        return Lost(len(calls), n_tokens, time.monotonic() - began, waited.segments, why)

    def _found_gone(self, worker: WorkerId) -> None:
        with self._lock:
            if worker in self._members:
                self._departed[worker] = self._members.leave(worker)
                self._gone.add(worker)
            self._departed.setdefault(worker, frozenset())
            self._fleet.remove(worker)
            self._captured.pop(worker, None)

    def _recover(self) -> None:
        """Take over what workers that are gone had stored and could not tell of any more."""
        with self._lock:  # claims of their calls wait here until it is done
            for worker in sorted(self._gone):
                self._fleet.arrived(self._stored_by(worker))
                self._gone.discard(worker)

    def _stored_by(self, worker: WorkerId) -> list[Staged]:
        if self.opened.staging is not None:
            self._salvaged[worker] = self._salvage(self.opened.staging, worker)
        return stored_by(self.opened.store, self.opened.segments, self.epoch, worker, self._fleet.known)

    def _salvage(self, staging: Staging, worker: WorkerId) -> Salvaged:
        def unknown(key: str) -> bool:
            at = segment_position(key)
            return at is not None and at.flush > self._fleet.known(at.writer)

        return salvage(staging, self.opened.store, segments_of(self.epoch, f"{worker}."), unknown)

    # ---- the driver --------------------------------------------------------------------------------------------

    def everything(self) -> Ledger:
        """All calls, as the ledger has them now."""
        with self._publication.lock:
            call_ids = [entry.call_id for entry in self._publication.ledger]
        return self._publication.excerpt(call_ids)

    def excerpt(self, call_ids: list[CallId]) -> Ledger:
        """These calls, as the ledger has them now."""
        self._check()
        return self._publication.excerpt(call_ids)

    def drop(self, call_id: CallId) -> None:
        """Forget an ended call whose stored answer is of no use. Only before `start`."""
        with self._publication.lock:
            if self._entry(call_id) is not None:
                self._publication.ledger.drop(call_id)

    def unsure(self, ended: Mapping[CallId, int]) -> list[CallId]:
        """Of calls that ended, by the epoch in which their end was stored: those whose end is not known to be durable.

        One that ended under an earlier epoch may not have been there when this one took over. Its worker says it again;
        one that has no worker any more is not waited for: it would begin again, to the same answer if it is greedy.
        Raises Fenced.
        """
        self._check()
        self._publication.log.check_not_fenced()
        unsure = []
        for call_id, epoch in ended.items():
            entry = self._entry(call_id)
            waits = epoch < self.epoch and not (entry is not None and entry.ended is not None)
            with self._lock:
                if waits and self._members.owner(call_id) is not None:
                    unsure.append(call_id)
        if unsure:
            self._snapshots.request("claim")
        return unsure

    def request(self, cause: str) -> None:
        self._check()
        self._snapshots.request(cause)

    def figures(self) -> Figures:
        """What was counted; raises what stops the coordinator."""
        self._check()
        with self._lock:
            self._figures.workers = tuple(self._members)
            self._figures.waits = self._waits
        self._figures.rejected = dict(self._snapshots.rejected)
        return self._figures

    # ---- told by the coordinator's thread ----------------------------------------------------------------------

    def _has_news(self) -> bool:
        with self._lock:
            return self._news or any(n != self._fleet.n_cut.get(worker, 0) for worker, n in self._captured.items())

    def _on_attempt(self, attempt: Attempt) -> None:
        figures = self._figures
        if attempt.verdict is Verdict.PUBLISHED:
            figures.snapshots += 1
            figures.last_snapshot, figures.last_error = attempt.snapshot, ""
            self._news = False
            self._plans.published()
            self._fleet.published(attempt.ended)
            with self._lock:
                self._members.ended(attempt.ended)
            return
        figures.snapshots_abandoned += 1
        figures.last_error = f"{attempt.step}: {attempt.error}"
        self._news = True
        if attempt.verdict is Verdict.FENCED and isinstance(attempt.error, Fenced):
            self.failure = attempt.error
        elif self._plans.waited_for:
            self._snapshots.request("claim")

    def _on_error(self, error: BaseException) -> None:
        self.failure = ProgramError(f"taking a snapshot failed: {error!r}", hint="this is a bug; please report it")

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _entry(self, call_id: CallId) -> Entry | None:
        return self._publication.ledger.get(call_id)


def stored_by(store: ObjectStore, segments: SegmentCodec, epoch: int, worker: WorkerId, known: Any) -> list[Staged]:
    """What a worker stored in an epoch after the last flush of it that is known.

    What cannot be read is left: what came after it does not fit the ledger, and is generated again.
    """
    found = []
    for item in store.list(segments_of(epoch, f"{worker}.")):
        at = segment_position(item.key)
        if at is None or at.flush <= known(at.writer):
            continue
        try:
            info, records = read_flushed(store, segments, item)
        except UNREADABLE:
            continue
        found.append(Staged(info, coordinates_of(records, item.key), at.writer, at.flush))
    return found


def _going_on(config: CheckpointingConfig, owner: str) -> CheckpointingConfig:
    assert config.store is not None
    store = open_store(config.store, create=True, **config.store_options.given())
    claims = latest_claims(store, find_tail(store), 1)
    if not claims:
        return config
    if claims[0].owner != owner[:200]:
        raise Fenced(
            f"the store was taken over by {claims[0].owner or 'another run'} (slot {claims[0].seq})",
            hint="another run of this job goes on with it; stop this one",
        )
    return msgspec.structs.replace(config, restore="auto")
