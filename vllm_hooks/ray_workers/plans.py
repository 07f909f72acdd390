"""Calls that wait to be carried on: each is planned, noted in the ledger and published before anybody has it.

Owns: which calls are due, which are planned and not yet published, and waiting for that.
Does not know: who wants them, when a snapshot is taken, how a ledger is published.

Invariants:
1. A call is given out only when the snapshot with its new attempt is published: what its former owner may still write
   comes under an attempt that no restore takes any more.
2. `amend` runs in the coordinator's thread, which alone changes the ledger; no store is read under the ledger's lock.
3. A call is planned with all of it that was known to be stored when it was wanted.
4. A call of which nothing can be read begins again at its prompt: it is forgotten here.
5. What was planned in an attempt that failed is published with the next one, and not planned twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from recovery.errors import Damaged
from recovery.model import OPEN, CallId
from recovery.ports import ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.reading import read_transcripts
from recovery.restore import carry_out
from recovery.restored import planned
from recovery.resume import StopRules


class Plans:
    """Of one coordinator."""

    def __init__(self, publication: Publication, store: ObjectStore, segments: SegmentCodec, stop: StopRules) -> None:
        self._publication = publication
        self._store = store
        self._segments = segments
        self._stop = stop
        self._changed = threading.Condition()
        self._wanted: dict[CallId, str] = {}
        self._due: dict[CallId, str] = {}
        self._planned: set[CallId] = set()
        self._noted: int | None = None

    def want(self, call_id: CallId, exactness: str) -> None:
        """Have a call planned with the next snapshot; `exactness` is what its resume may claim."""
        with self._changed:
            self._wanted[call_id] = exactness

    def due(self) -> None:
        """What arrived before this moment is about to be in the ledger: what is wanted can be planned after that."""
        with self._changed:
            self._due |= self._wanted
            self._wanted = {}

    def wait(self, call_id: CallId, timeout_s: float) -> bool:
        """Until the plan of a wanted call is published. False if it is not within the time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(call_id in some for some in (self._wanted, self._due, self._planned)), timeout_s
            )

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for the next publication."""
        with self._changed:
            return bool(self._wanted or self._due or self._planned)

    def amend(self) -> int | None:
        """recovery.coordinator's `amend`."""
        publication = self._publication
        number = publication.log.tail + 1
        if self._noted is not None and self._noted != number:
            with publication.lock:
                publication.ledger.renumber(self._noted, number)
        with self._changed:
            due = dict(self._due)
        if due:
            self._plan(due, number)
        self._noted = number if due or self._noted is not None else None
        return self._noted

    def _plan(self, due: Mapping[CallId, str], number: int) -> None:
        publication = self._publication
        ledger = publication.ledger
        found = [entry for call_id in due if (entry := ledger.get(call_id)) is not None and entry.state == OPEN]
        for entry in found:
            try:
                transcripts = read_transcripts(self._store, self._segments, ledger, [entry])
            except Damaged:
                with publication.lock:
                    ledger.drop(entry.call_id)
                continue
            for call in planned(transcripts, self._stop):
                with publication.lock:
                    carry_out(ledger, call, number, due[entry.call_id])
        with self._changed:
            for call_id in due:
                self._due.pop(call_id, None)
            self._planned |= due.keys()

    def published(self) -> None:
        """The last attempt was."""
        with self._changed:
            self._noted = None
            self._planned.clear()
            self._changed.notify_all()
