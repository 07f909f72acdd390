"""vllm_hooks.stored: answers are read beside a coordinator that goes on changing the ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from recovery.errors import ObjectMissing
from recovery.protocol import Verdict
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, FaultyStore
from tests.fake_engine import Life
from tests.plain_codecs import PlainLedgers, PlainSegments
from vllm_hooks.stored import StoredCalls


def stored_of(life: Life, store: Any) -> StoredCalls:
    return StoredCalls(SimpleNamespace(store=store, segments=life.segments, publication=life.publication))  # type: ignore[arg-type]


def worked() -> Life:
    life = Life(MemoryStore(), 1, segments=PlainSegments(), ledgers=PlainLedgers())
    life.dispatch()
    life.decode(3)
    life.flush()
    assert life.snapshot().verdict is Verdict.PUBLISHED
    return life


def test_a_ledger_that_changes_in_the_middle_of_a_read_is_read_as_it_was() -> None:
    life = worked()
    wanted = [entry.call_id for entry in life.publication.ledger]
    before = {entry.call_id: entry.n_tokens for entry in life.publication.ledger}
    changed = []

    def change(verb: str, key: str) -> Any:
        if not changed:
            changed.append(key)
            life.publication.ledger.retract(key, wanted)
        return PASS

    found = stored_of(life, FaultyStore(life.store, change)).read(wanted)
    assert changed and len(life.publication.ledger) == 0
    assert {call_id: len(transcript.token_ids) for call_id, transcript in found.items()} == before


def test_what_was_collected_in_the_middle_of_a_read_is_read_where_it_is_now() -> None:
    """The calls begin anew elsewhere and what the excerpt named is deleted: the second look finds what there is."""
    life = worked()
    wanted = [entry.call_id for entry in life.publication.ledger]
    gone = []

    def collect(verb: str, key: str) -> Any:
        if not gone:
            gone.append(key)
            for call_id in wanted[1:]:
                life.publication.ledger.drop(call_id)
            life.decode(1)
            life.publication.ledger.restart(wanted[0], 9, "a test")
        return PASS

    store = FaultyStore(life.store, collect)
    (item,) = life.store.list("seg/")
    moved = life.store.get(item.key)
    life.store.delete(item.key)
    with pytest.raises(ObjectMissing):
        stored_of(life, store).read(wanted)
    assert gone == [item.key], "the first look failed; the second was made because the ledger is another one"
    life.store.put_new(item.key, moved)
    found = stored_of(life, store).read(wanted)
    assert [len(transcript.token_ids) for transcript in found.values()] == [0]


def test_what_is_missing_and_was_not_replaced_is_damage() -> None:
    life = worked()
    (item,) = life.store.list("seg/")
    life.store.delete(item.key)
    calls = []
    store = FaultyStore(life.store, lambda verb, key: calls.append(key) or PASS)
    with pytest.raises(ObjectMissing, match=item.key):
        stored_of(life, store).read([entry.call_id for entry in life.publication.ledger])
    assert calls == [item.key]


def test_what_was_forgotten_is_said_by_the_snapshot_that_was_cut_after_it() -> None:
    """Not by one that was cut before it and published after it, nor by one that was abandoned; it is news till then."""
    life = worked()
    stored = stored_of(life, life.store)
    (call_id, *_) = [entry.call_id for entry in life.publication.ledger]
    assert not stored.has_news
    stored.due()
    forgotten = stored.next_cut
    stored.forget(call_id)
    stored.published()
    assert not stored.is_said(forgotten) and stored.has_news
    stored.due()
    stored.sweep()
    assert not stored.is_said(forgotten) and stored.has_news, "it was abandoned, say"
    stored.due()
    stored.published()
    assert stored.is_said(forgotten) and not stored.has_news and stored.entry(call_id) is None


def test_what_arrives_with_the_snapshot_that_forgets_it_is_dropped_from_it() -> None:
    """It was cut and not stored yet when it was forgotten: the ledger gets it between the cut and the record."""
    arrived = [entry.call_id for entry in worked().publication.ledger]  # of another life: the calls are the same
    life = Life(MemoryStore(), 1, segments=PlainSegments(), ledgers=PlainLedgers())
    stored = stored_of(life, life.store)
    for call_id in arrived:
        stored.forget(call_id)
    stored.due()
    stored.remember(arrived[-1])
    life.dispatch()
    life.decode(3)
    life.flush()
    assert life.snapshot().verdict is Verdict.PUBLISHED
    assert {entry.call_id for entry in stored.entries()} == set(arrived)
    stored.sweep()
    assert [entry.call_id for entry in stored.entries()] == arrived[-1:]
