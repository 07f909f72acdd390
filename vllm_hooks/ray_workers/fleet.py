"""The coordinator's view of all workers: each step of a snapshot, asked of everybody at once.

Owns: the fan-out of a step and its deadline, what was stored and no snapshot has taken yet, who was found gone.
Does not know: Ray, the protocol's order, the ledger.

Invariants:
1. Every wait has a deadline. A worker that does not answer costs one snapshot, nothing else; one that is gone costs
   nothing: the others' snapshot goes on without it, from the moment at which anybody has found it out.
2. What a worker has said to have stored is kept here until a snapshot took it, and the worker repeats it until it knows
   that it arrived: an answer that was lost on its way loses nothing.
3. Nothing of a worker that is no member is taken. One that joins in the middle of a snapshot has its turn with the
   next: only who was cut is asked what it stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from recovery.calls import Stored
from recovery.coordinates import ChunkAt
from recovery.errors import EngineDead, Fenced, RecoveryError, SnapshotAbandoned
from recovery.model import CallId
from recovery.staging import Staged
from vllm_hooks.fleet import UNDO_TIMEOUT_S
from vllm_hooks.ray_workers.messages import Ask, Cut, Gone, WorkerId


@dataclass(frozen=True, slots=True)
class _Member:
    """`left` is done once it is a member no more."""

    ask: Ask
    left: Future[None] = field(default_factory=Future)


class WorkersFleet:
    """recovery.coordinator.Fleet for many processes. In the coordinator's thread `on_gone` is told of each worker that
    turns out to be gone, and `on_stage` that what `arrived` before is about to be taken; `states`: gives what goes into
    the snapshot beside the calls."""

    def __init__(
        self,
        epoch: int,
        states: Callable[[], Mapping[str, bytes]],
        *,
        on_gone: Callable[[WorkerId], None],
        on_stage: Callable[[], None],
    ) -> None:
        self._epoch = epoch
        self._states = states
        self._on_gone = on_gone
        self._on_stage = on_stage
        self._lock = threading.Lock()
        self._asked: dict[WorkerId, _Member] = {}
        self._arrived: list[Staged] = []
        self._flushes: dict[str, int] = {}
        self._ended: tuple[CallId, ...] = ()
        self._in_cut: frozenset[WorkerId] = frozenset()
        self.n_cut: dict[WorkerId, int] = {}
        self.stall_s = 0.0

    # ---- members -----------------------------------------------------------------------------------------------

    def add(self, worker: WorkerId, ask: Ask) -> None:
        with self._lock:
            self._asked[worker] = _Member(ask)

    def remove(self, worker: WorkerId) -> None:
        with self._lock:
            member = self._asked.pop(worker, None)
            self.n_cut.pop(worker, None)
        if member is not None:
            member.left.set_result(None)

    def known(self, writer: str) -> int:
        """The last flush of that writer that arrived here."""
        return self._flushes.get(writer, 0)

    def arrived(self, staged: Iterable[Staged]) -> None:
        """Take what a worker has stored, whoever found it."""
        with self._lock:
            for item in staged:
                if item.flush > self._flushes.get(item.writer, 0):
                    self._flushes[item.writer] = item.flush
                    self._arrived.append(item)

    def arrived_up_to(self) -> dict[CallId, int]:
        """How far calls are stored in what arrived and is in no ledger yet."""
        with self._lock:
            chunks = [at for item in self._arrived for at in item.coordinates if isinstance(at, ChunkAt)]
        return {at.call_id: at.chunk.stop for at in chunks}

    # ---- Fleet -------------------------------------------------------------------------------------------------

    def acquire_hold(self, reason: str, timeout_s: float) -> None:
        self._ask_all("hold", timeout_s, reason)

    def release_hold(self) -> None:
        self._undo("release")

    def raise_fence(self, timeout_s: float) -> None:
        self._ask_all("raise_fence", timeout_s)

    def lower_fence(self) -> None:
        self._undo("lower_fence")

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        return self._states()

    def resume(self, published: bool) -> None:
        if published:
            self._undo("published", self._ended)
            self._ended = ()

    def published(self, ended: Iterable[CallId]) -> None:
        """The ends of these calls are in a published snapshot: the workers are told with the next one."""
        self._ended = (*self._ended, *ended)

    def cut(self, timeout_s: float) -> None:
        cuts: dict[WorkerId, Cut] = self._ask_all("cut", timeout_s)
        self._in_cut = frozenset(cuts)
        self.n_cut.update({worker: cut.n_captured for worker, cut in cuts.items()})
        self.stall_s = max((cut.stall_s for cut in cuts.values()), default=0.0)

    def stage(self, timeout_s: float) -> list[Staged]:
        self._on_stage()
        self._ask_all("stage", timeout_s, dict(self._flushes), each=self.arrived, among=self._in_cut)
        with self._lock:
            taken, self._arrived = self._arrived, []
        return taken

    def store_again(self, staged: Staged, timeout_s: float) -> Staged | None:
        for worker, member in self._members().items():
            if staged.writer.startswith(f"{worker}."):
                return self._result(worker, member, member.ask("store_again", self._epoch, staged), timeout_s)
        return None

    def rewind(self, stored: Stored) -> None:
        for member in self._members().values():
            member.ask("rewind", self._epoch, stored)

    # ---- asking ------------------------------------------------------------------------------------------------

    def _members(self) -> dict[WorkerId, _Member]:
        with self._lock:
            return dict(self._asked)

    def _ask_all(
        self,
        step: str,
        timeout_s: float,
        *arguments: Any,
        each: Callable[[Any], None] = lambda answer: None,
        among: frozenset[WorkerId] | None = None,
    ) -> dict[WorkerId, Any]:
        deadline = time.monotonic() + timeout_s
        asked = {
            worker: (member, member.ask(step, self._epoch, *arguments))
            for worker, member in self._members().items()
            if among is None or worker in among
        }
        answers: dict[WorkerId, Any] = {}
        wrong: list[RecoveryError] = []
        for worker, (member, future) in asked.items():
            try:
                answers[worker] = self._result(worker, member, future, max(0.0, deadline - time.monotonic()))
                each(answers[worker])
            except (Gone, EngineDead):
                self._on_gone(worker)
            except RecoveryError as error:
                wrong.append(error)
        if wrong:
            raise min(wrong, key=lambda error: not isinstance(error, Fenced))
        return answers

    def _result(self, worker: WorkerId, member: _Member, future: Future[Any], timeout_s: float) -> Any:
        wait((future, member.left), timeout_s, FIRST_COMPLETED)
        if future.done():
            return future.result()
        if member.left.done():
            raise Gone(worker)
        raise SnapshotAbandoned(
            f"worker {worker} did not answer within {timeout_s:.1f} s",
            hint="decoding goes on, and the next snapshot asks it again; a worker that hangs is worth a look",
        )

    def _undo(self, step: str, *arguments: Any) -> None:
        """Asked of everybody; who is gone has nothing to undo, and who is late does it later."""
        self._ask_all(step, UNDO_TIMEOUT_S, *arguments)
