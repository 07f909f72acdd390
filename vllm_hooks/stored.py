"""What the store of a session holds: its calls, their answers, and whether it is still ours.

Owns: reading the ledger and the segments for those who write results.
Does not know: what is captured, when anything is published.

Invariants:
1. Nothing here runs on the event loop but `entries`, `entry` and `history`: the others read the store.
2. Without a store (mode off) there are no calls, and nobody to be fenced by.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from recovery.errors import ObjectMissing
from recovery.ledger import Entry, Ledger
from recovery.model import CallId, Restore
from recovery.reading import read_transcripts
from recovery.trajectories import Place, Placed
from recovery.transcripts import Transcript
from vllm_hooks.opening import Opened


class StoredCalls:
    """The calls of an opened store (None: of none)."""

    def __init__(self, opened: Opened | None) -> None:
        self._opened = opened
        self._dropping = True
        self._forgotten: set[CallId] = set()
        self._due: set[CallId] = set()
        self._sweeping = threading.Lock()
        """Held while a call that is due is dropped: who remembers one finds it there, or finds it gone."""
        self._n_cuts = self._n_said = 0

    @property
    def _ledger(self) -> Ledger:
        return self._opened.publication.ledger if self._opened is not None else Ledger()

    def entries(self) -> list[Entry]:
        """All calls that the ledger has."""
        return list(self._ledger)

    def entry(self, call_id: CallId) -> Entry | None:
        """What the ledger has of a call."""
        return self._ledger.get(call_id)

    def history(self, call_id: CallId) -> tuple[Restore, ...]:
        """What restores did to a call, as published."""
        entry = self._ledger.get(call_id)
        return entry.history if entry is not None else ()

    def drop(self, call_id: CallId) -> None:
        """Forget an ended call whose stored answer is of no use. Only before anything was admitted."""
        assert self._dropping and self._opened is not None, "the ledger is the coordinator's once calls were admitted"
        with self._opened.publication.lock:
            self._ledger.drop(call_id)

    def placed(self) -> list[Placed]:
        """Every call that the ledger has, at its place in its rollout."""
        if self._opened is None:
            return []
        with self._opened.publication.lock:
            return [
                Placed(who.rollout, Place(who.turn, who.model_call), entry.call_id, who.parent)
                for entry in self._ledger
                for who in (entry.identity,)
            ]

    @property
    def epoch(self) -> int:
        """The epoch that this process claimed; 0 without a store."""
        return self._opened.publication.log.epoch if self._opened is not None else 0

    def forget(self, call_id: CallId) -> None:
        """Drop the call when `sweep` finds it; on the loop."""
        self._forgotten.add(call_id)

    def remember(self, call_id: CallId) -> None:
        """Somebody asked for it after all; on the loop, before the ledger is asked for it."""
        self._forgotten.discard(call_id)
        with self._sweeping:
            self._due.discard(call_id)

    def due(self) -> None:
        """What was forgotten up to this step goes with the next `sweep`; on the loop, once for each snapshot."""
        self._n_cuts += 1
        with self._sweeping:
            self._due |= self._forgotten
        self._forgotten = set()

    def published(self) -> None:
        """The snapshot of the last `due` was published. In the coordinator's thread, before the next one begins."""
        self._n_said = self._n_cuts
        with self._sweeping:
            self._due.clear()  # all that was stored of them had arrived; the rest never will

    @property
    def next_cut(self) -> int:
        """The number of the next `due`: what is forgotten by then is in no snapshot from that one on."""
        return self._n_cuts + 1

    def is_said(self, cut: int) -> bool:
        """Whether a snapshot of this cut or a later one was published: no restore brings back what it had forgotten."""
        return self._n_said >= cut

    @property
    def has_news(self) -> bool:
        """Whether the newest snapshot has what was forgotten since. From any thread."""
        return bool(self._forgotten) or self._n_said < self._n_cuts

    def sweep(self) -> None:
        """Drop what is due. In the coordinator's thread, whose ledger it is, once all that was cut has arrived in it.

        What was captured and not yet stored when it was forgotten arrives with this very snapshot, which is to be
        without it.
        """
        assert self._opened is not None
        for call_id in tuple(self._due):
            with self._sweeping, self._opened.publication.lock:  # one by one: the loop may be waiting
                if call_id in self._due and self._ledger.get(call_id) is not None:
                    self._ledger.drop(call_id)
                    self._due.discard(call_id)

    def admitted(self) -> None:
        """From here on the ledger is the coordinator's."""
        self._dropping = False

    def read(self, call_ids: Iterable[CallId]) -> Mapping[CallId, Transcript]:
        """Transcripts of calls that are in the ledger, from the store."""
        if self._opened is None:
            return {}
        publication, wanted = self._opened.publication, list(call_ids)
        part = publication.excerpt(wanted)
        while True:
            try:
                return read_transcripts(self._opened.store, self._opened.segments, part, part)
            except ObjectMissing:
                # What these calls lay in may have been replaced and collected meanwhile; else it is damage.
                before, part = part, publication.excerpt(wanted)
                if list(part) == list(before):
                    raise

    def check_not_fenced(self) -> None:
        """Raise Fenced if a newer coordinator took over. One small read."""
        if self._opened is not None:
            self._opened.publication.log.check_not_fenced()
