"""A ledger that grows and is written again and again, for the tests of what is written and read.

Owns: calls that get a token at a time, one ledger object per snapshot.
Does not know: segments' bytes, the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recovery import layout
from recovery.ledger import Ledger
from recovery.ledger_writer import LedgerWriter
from recovery.model import Record
from recovery.ports import ObjectStore
from recovery.snapshots import LedgerObject, ObjectRef, read_ledger_objects
from recovery.staging import coordinates_of
from storage_backends.memory import MemoryStore
from tests.fakes import SeededEntropy, chunk, name, opened
from tests.plain_codecs import PlainLedgers, PlainSegments

CODEC = PlainLedgers()
WRITER = "w0.00000000"


class Job:
    """`refs` are the newest objects of its snapshots, `depths` how many before each are part of it."""

    def __init__(self, store: ObjectStore, n_calls: int = 0) -> None:
        self.store = store
        self.ledger = Ledger()
        self.writer = LedgerWriter(store, CODEC, SeededEntropy("ledger"), 1, self.ledger)
        self.n_flush = 0
        self.refs: list[ObjectRef] = []
        self.depths: list[int] = []
        self.flush([opened(f"c{i:05d}") for i in range(n_calls)])

    def flush(self, records: list[Record]) -> None:
        self.n_flush += 1
        stem = layout.segment_stem(1, WRITER, self.n_flush, "00000000")
        info = PlainSegments().encode(records, stem).info
        self.ledger.describe(info)
        for at in coordinates_of(records, info.key):
            assert self.ledger.apply(at) == ""

    def snapshot(self) -> int:
        """Write and acknowledge; returns how many bytes the ledger object has."""
        pending = self.writer.write({WRITER: self.n_flush})
        self.writer.published(pending)
        self.ledger.published()
        self.refs.append(pending.ref)
        self.depths.append(pending.depth)
        assert self.writer.depth == pending.depth
        return pending.ref.nbytes

    def decode(self, rollouts: Sequence[str]) -> None:
        """One more token for each of these calls."""
        entries = [self.ledger.get(name(rollout)) for rollout in rollouts]
        self.flush([chunk(e.identity.rollout, e.n_tokens, [7]) for e in entries if e is not None])

    @property
    def head(self) -> ObjectRef:
        return self.refs[-1]

    def objects(self) -> list[LedgerObject]:
        return read_ledger_objects(self.store, CODEC, self.head)

    def read(self) -> Ledger:
        """The ledger of the newest snapshot, as it is stored."""
        return Ledger.from_objects((item.header, item.rows) for item in self.objects())


def many_objects(store: MemoryStore) -> Job:
    """A job whose ledger lies in several objects, with others before them."""
    job = Job(store, n_calls=200)
    for number in range(30):
        job.decode([f"c{number:05d}"])
        job.snapshot()
    assert 5 < job.depths[-1] < 20
    return job


def flat(ledger: Ledger) -> dict[str, Any]:
    return {e.identity.rollout: (e.attempt, e.n_tokens, e.state, list(e.chunks), e.history) for e in ledger}
