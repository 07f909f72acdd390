"""Ready-made process-lives for the tests of restores, and ways to damage a store.

Owns: a life that took some snapshots and flushed more, what snapshots reference, three kinds of damage.
Does not know: what a restore should make of it.
"""

from __future__ import annotations

from typing import Any

from recovery import garbage
from recovery.log_reading import read_slot
from recovery.protocol import Verdict
from recovery.snapshots import Snapshot
from storage_backends.memory import MemoryStore
from tests.fake_engine import Life
from tests.plain_codecs import PlainLedgers


def worked(store: Any, n_snapshots: int = 2, number: int = 1, keep: int = 2, **fields: Any) -> Life:
    """A life that took so many snapshots, and then flushed something more."""
    life = Life(store, number, keep_latest_k=keep, **fields)
    life.dispatch()
    for _ in range(n_snapshots):
        life.decode(2)
        life.flush()
        life.decode(1)
        assert life.snapshot().verdict is Verdict.PUBLISHED
    life.decode(2)
    life.flush()
    return life


def ids(life: Life) -> list[int]:
    return sorted(life.published)


def tokens(life: Life) -> dict[str, int]:
    return {entry.identity.rollout: entry.n_tokens for entry in life.publication.ledger}


def objects_of(store: Any, seq: int) -> list[str]:
    """What snapshot `seq` references, newest ledger object first."""
    read = read_slot(store, seq)
    assert read is not None
    snapshot = Snapshot.from_slot(read.slot)
    reached = garbage.reached_by(store, PlainLedgers(), snapshot)
    return [snapshot.ledger.key, *sorted(reached - {snapshot.ledger.key})]


def damage_missing(store: MemoryStore, key: str) -> None:
    store.delete(key)


def damage_flip(store: MemoryStore, key: str) -> None:
    data = store.get(key)
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def damage_truncate(store: MemoryStore, key: str) -> None:
    store.put(key, store.get(key)[:-3])


DAMAGES = [damage_missing, damage_flip, damage_truncate]


def own_objects(store: MemoryStore, life: Life) -> list[str]:
    """Objects that the newest snapshot references and the one before does not."""
    newest, before = ids(life)[-1], ids(life)[-2]
    older = objects_of(store, before)
    return [key for key in objects_of(store, newest) if key not in older]
