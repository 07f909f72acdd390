"""recovery.compactor in a job: the calls are the same bit for bit, whatever races it and wherever it is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recovery import compactor, layout
from recovery.calls import StoredUpTo
from recovery.compaction import Limits
from recovery.compactor import Compactor
from recovery.errors import Damaged, OutcomeUnknown, RecoveryError, StoreFull, StoreUnavailable
from recovery.ledger import Ledger
from recovery.model import CallId, PolicyVersion
from recovery.ports import LedgerCodec, SegmentCodec
from recovery.protocol import Verdict
from recovery.reading import read_transcripts
from recovery.transcripts import Transcript
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import PASS, CountingStore, FaultyStore, RaiseAfter, RaiseBefore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests.fake_engine import Life, Prompt, content_of, reference_answers
from tests.fakes import SeededEntropy
from tests.independent_reader import check_everything, read_store
from tests.lives import damage_flip, ids
from tests.plain_codecs import PlainLedgers, PlainSegments

PROMPTS = (
    Prompt("long", (5,), 60),
    Prompt("other", (10,), 34),
    Prompt("short", (9, 9), 3),
    Prompt("seeded", (8,), 30, "seed"),
)
REFERENCE = reference_answers(PROMPTS)
LIMITS = Limits(pieces=4, most_sparse=4, small_records=6)
Submit = Callable[[Callable[[], None]], None]


def life(store: Any, number: int = 1, *, keep: int = 1, submit: Submit | None = None, **fields: Any) -> Life:
    more = {} if submit is None else {"submit": submit}
    return Life(store, number, prompts=PROMPTS, keep_latest_k=keep, limits=LIMITS, **more, **fields)


class Later:
    """Rounds that run when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def run(self) -> int:
        work, self.waiting = self.waiting, []
        for one in work:
            one()
        return len(work)


def step(one: Life, n: int = 1) -> None:
    for _ in range(n):
        one.decode(1)
        one.flush()
        one.decode(1)
        assert one.snapshot().verdict is Verdict.PUBLISHED


def transcripts(one: Life) -> dict[CallId, Transcript]:
    ledger = one.publication.ledger
    return dict(read_transcripts(one.store, one.segments, ledger, ledger))


def assert_same(found: dict[CallId, Transcript], before: dict[CallId, Transcript]) -> None:
    """Bit for bit; of calls that went on, as far as they were."""
    for call_id, old in before.items():
        n = len(old.token_ids)
        assert found[call_id].token_ids[:n].tobytes() == old.token_ids.tobytes()
        assert found[call_id].logprobs[:n].tobytes() == old.logprobs.tobytes()
        assert found[call_id].request.rollout == old.request.rollout
        assert found[call_id].request.prompt_token_ids.tobytes() == old.request.prompt_token_ids.tobytes()


def most_segments(ledger: Ledger) -> int:
    return max(len({chunk.at.segment for chunk in entry.chunks}) for entry in ledger)


CODECS: list[Callable[[], tuple[SegmentCodec, LedgerCodec]]] = [
    lambda: (PlainSegments(), PlainLedgers()),
    lambda: (MixedSegmentCodec("arrow"), ArrowLedgerCodec(rows_per_batch=2)),
    lambda: (MixedSegmentCodec("zarr"), ArrowLedgerCodec(rows_per_batch=2)),
]


@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("keep", [1, 3])
def test_a_compacted_job_is_the_same_job_in_fewer_objects(keep: int, codecs: Any) -> None:
    """All transcripts after each snapshot; each kept snapshot too; a restore in the middle; the whole job's answers."""
    store = MemoryStore()
    segments, ledgers = codecs()
    one = life(store, keep=keep, segments=segments, ledgers=ledgers)
    one.dispatch()
    before: dict[CallId, Transcript] = {}
    for _ in range(8):
        step(one)
        found = transcripts(one)
        assert_same(found, before)
        before = found
    counters = one.compactor.counters
    assert counters.rounds > 2 and counters.chunks_after < counters.chunks_before and counters.unused == 0
    assert counters.segments_read > counters.segments_written > 0
    assert counters.nbytes_read > 0 < counters.nbytes_written and counters.failures == 0
    again = life(store, 2, keep=keep, segments=segments, ledgers=ledgers)
    assert again.chosen_content == one.published[max(one.published)]
    assert_same({i: t for i, t in transcripts(again).items() if again.by_id[i].rollout != "seeded"}, {})
    again.dispatch()
    step(again, 4)
    assert most_segments(again.publication.ledger) <= 4 + 6 + 4
    assert again.run_to_end(3) == REFERENCE
    assert any(layout.segment_position(item.key).is_compacted for item in store.list("seg/"))  # type: ignore[union-attr]


def test_versions_logprobs_and_wide_columns_are_what_they_were() -> None:
    """A call of three policy versions, now with logprobs and now without, with top-k columns of two widths."""
    store = MemoryStore()
    one = life(store, segments=MixedSegmentCodec("arrow"), ledgers=ArrowLedgerCodec(rows_per_batch=2))
    one.dispatch(1)
    (call,) = one.live
    draw = np.random.default_rng(3)
    for i in range(24):
        n = int(draw.integers(1, 5))
        columns = {"top": draw.integers(0, 99, (n, 2 + i // 12)).astype(np.int32)} if i % 5 else {}
        logprobs = draw.random(n).astype(np.float32).tolist() if i % 7 else None
        call.append(draw.integers(3, 99, n).tolist(), logprobs, PolicyVersion("a", i // 9), columns)
        one.flush()
        if i % 3 == 2:
            before = transcripts(one)
            assert one.snapshot().verdict is Verdict.PUBLISHED
            after = transcripts(one)
            assert_same(after, before)
    (found,) = transcripts(one).values()
    assert one.compactor.counters.rounds >= 2
    assert found.version_spans == tuple(call.version_spans)
    assert found.token_ids.tolist() == list(call.transcript_ids)
    assert found.logprobs.tobytes() == np.asarray(call.transcript_logprobs, np.float32).tobytes()
    plain = life(MemoryStore(), segments=MixedSegmentCodec("arrow"), ledgers=ArrowLedgerCodec(rows_per_batch=2))
    plain.compactor.close()
    plain.dispatch(1)
    again, draw = plain.live[0], np.random.default_rng(3)
    for i in range(24):
        n = int(draw.integers(1, 5))
        columns = {"top": draw.integers(0, 99, (n, 2 + i // 12)).astype(np.int32)} if i % 5 else {}
        logprobs = draw.random(n).astype(np.float32).tolist() if i % 7 else None
        again.append(draw.integers(3, 99, n).tolist(), logprobs, PolicyVersion("a", i // 9), columns)
        plain.flush()
    assert plain.snapshot().verdict is Verdict.PUBLISHED
    (expected,) = transcripts(plain).values()
    assert found.columns.keys() == expected.columns.keys() == {"top"}
    runs = [(run.start, run.values.tobytes()) for run in found.columns["top"]]
    assert runs == [(run.start, run.values.tobytes()) for run in expected.columns["top"]]


def test_a_reader_that_knows_nothing_of_compaction_reads_the_same_calls(tmp_path: Path) -> None:
    """tests/independent_reader.py, written from docs/format.md: digests, contiguity, counts, attempts."""
    store = LocalStore(str(tmp_path))
    one = life(store, keep=3, segments=MixedSegmentCodec("arrow"), ledgers=ArrowLedgerCodec(rows_per_batch=2))
    one.dispatch()
    step(one, 6)
    again = life(store, 2, keep=3, segments=MixedSegmentCodec("arrow"), ledgers=ArrowLedgerCodec(rows_per_batch=2))
    again.dispatch()
    step(again, 6)
    assert one.compactor.counters.rounds and again.compactor.counters.rounds
    read, _ = check_everything(tmp_path)
    assert set(read) >= set(ids(again)[-3:])
    found = {call["rollout"]: call for call in read_store(tmp_path)["snapshot"]["calls"]}
    for call_id, transcript in transcripts(again).items():
        call = found[again.by_id[call_id].rollout]
        assert call["token_ids"].tobytes() == transcript.token_ids.tobytes()
        assert call["logprobs"].tobytes() == transcript.logprobs.tobytes()


# ---- races ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", range(4))
def test_a_round_that_takes_long_is_put_in_place_under_what_came_meanwhile(snapshots: int) -> None:
    """Calls flush on, end, are published; garbage of what it reads is not collected, for the ledger still names it."""
    store, later = MemoryStore(), Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 3)
    assert later.waiting
    step(one, snapshots)
    assert later.run() == 1
    before = transcripts(one)
    step(one)
    assert one.compactor.counters.unused == 0 and one.compactor.counters.rounds == 1
    assert_same(transcripts(one), before)
    later.run()
    assert one.run_to_end(3) == REFERENCE


def test_a_call_that_changed_meanwhile_stays_where_it_is() -> None:
    """Cut back and begun again: the round's other calls are moved, and what nobody uses of it is collected."""
    store, later = MemoryStore(), Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 2)
    ledger = one.publication.ledger
    entries = {entry.identity.rollout: entry for entry in ledger}
    ledger.retract(entries["long"].chunks[1].at.segment, [entries["long"].call_id])
    ledger.restart(entries["other"].call_id, 9, "a test")
    assert later.run() == 1
    one.table.rewind({entries["long"].call_id: StoredUpTo(0, entries["long"].n_tokens)})
    step(one)
    counters = one.compactor.counters
    assert (counters.rounds, counters.unused) == (1, 2)
    moved = [entry.identity.rollout for entry in ledger if any("compacted" in c.at.segment for c in entry.chunks)]
    assert moved == ["seeded"]
    for _ in range(3):
        step(one)
    later.run()
    answers = one.run_to_end(3)
    assert answers.pop("long") == REFERENCE["long"] and "other" not in answers


def test_a_round_of_which_nothing_fits_any_more_leaves_garbage_that_is_collected() -> None:
    store, later = MemoryStore(), Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 2)
    assert later.run() == 1
    written = {item.key for item in store.list("seg/e000001/compacted")}
    for entry in one.publication.ledger:
        one.publication.ledger.restart(entry.call_id, 9, "a test")
    for _ in range(4):
        one.decode(1)
        assert one.snapshot().verdict is Verdict.PUBLISHED
    assert written and not written & set(store._objects)


def test_a_zombies_compaction_publishes_nothing() -> None:
    """C8: the new owner restores while the old one still moves chunks; both write, one publishes."""
    store, later = MemoryStore(), Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 3)
    again = life(store, 2)
    assert later.run() == 1 and one.compactor._done is not None
    one.decode(1)
    assert one.snapshot().verdict is Verdict.FENCED
    assert not one.compactor.plan(one.publication.ledger), "nothing more is begun"
    moved = {item.key for item in store.list("seg/e000001/compacted")}
    assert moved, "it was written"
    third = life(store, 3)
    assert third.chosen_content == again.published[max(again.published)]
    assert third.run_to_end(3) == REFERENCE
    for number in (4, 5):
        life(store, number)
    assert not moved & set(store._objects), "and collected, since nobody names it"


def test_what_compaction_wrote_is_not_adopted() -> None:
    store, later = MemoryStore(), Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 3)
    later.run()
    one.decode(1)
    one.flush()
    again = life(store, 2)
    assert again.restored.adopted_segments == 1 and again.restored.rejected == {}
    again.keeps(one.flushed)
    assert again.run_to_end(3) == REFERENCE


def test_an_abandoned_attempt_keeps_what_was_put_in_place() -> None:
    store = FaultyStore(MemoryStore(), [])
    one = life(store)
    one.dispatch()
    step(one, 3)
    before = transcripts(one)
    store._ask = lambda verb, key: RaiseBefore(StoreUnavailable("down")) if key.startswith("log/") else PASS  # type: ignore[assignment]
    assert one.snapshot().verdict is Verdict.ABANDONED
    assert one.compactor._done is None, "it is in the ledger"
    store._ask = lambda verb, key: PASS  # type: ignore[assignment]
    one.decode(1)
    assert one.snapshot().verdict is Verdict.PUBLISHED
    assert_same(transcripts(one), before)
    assert life(store, 2).run_to_end(3) == REFERENCE


# ---- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreFull("no space left on device"), StoreUnavailable("down"), OutcomeUnknown("?")])
@pytest.mark.parametrize("how", [RaiseBefore, RaiseAfter])
@pytest.mark.parametrize("k", range(10))
def test_f1_a_round_that_fails_anywhere_costs_nothing(error: RecoveryError, how: Any, k: int) -> None:
    """F1: a full disk too. Snapshots go on, the counters say it, a later round does the work."""
    inner = MemoryStore()
    store = FaultyStore(inner, [])
    later = Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 3)
    plan = iter([PASS] * k + [how(error)])
    store._ask = lambda verb, key: next(plan, PASS)  # type: ignore[assignment]
    later.run()
    failed = next(plan, None) is None
    store._ask = lambda verb, key: PASS  # type: ignore[assignment]
    counters = one.compactor.counters
    assert counters.failures == failed and (counters.error is error) == failed
    assert one.compactor.bad == set()
    before = transcripts(one)
    for _ in range(4):
        step(one)
        later.run()
        assert_same(transcripts(one), before)
    assert counters.rounds >= 1 and not (k > 7 and failed) and counters.error is None
    assert life(inner, 2).run_to_end(60) == REFERENCE


def test_after_failures_in_a_row_it_waits_longer() -> None:
    store = FaultyStore(MemoryStore(), [])
    one = life(store)
    one.dispatch()
    full = RaiseBefore(StoreFull("no space left on device"))
    store._ask = lambda verb, key: full if verb == "put_new" and "compacted" in key else PASS  # type: ignore[assignment]
    seen = []
    for _ in range(20):
        one.decode(1)
        assert one.snapshot().verdict is Verdict.PUBLISHED
        seen.append(one.compactor.counters.failures)
    assert [seen.count(n) for n in range(1, 5)] == [2, 3, 4, 5], seen


def test_c3_damage_that_a_round_meets_is_named_and_left_alone() -> None:
    """It is damage of the last snapshot. Nothing is moved on top of it, and nothing hides it."""
    inner, later = MemoryStore(), Later()
    one = life(inner, keep=2, submit=later)
    one.dispatch()
    step(one, 3)
    entry = next(entry for entry in one.publication.ledger if entry.identity.rollout == "long")
    bad = entry.chunks[1].at.segment
    damage_flip(inner, bad)
    later.run()
    counters = one.compactor.counters
    assert counters.failures == 1 and bad in str(counters.error) and one.compactor.bad == {bad}
    for _ in range(6):
        step(one)
        later.run()
    assert counters.failures == 1 and one.publication.ledger.knows_segment(bad)
    with pytest.raises(Damaged, match=bad):
        transcripts(one)


@pytest.mark.parametrize("what", ["flip", "other records", "gone"])
def test_c3_what_was_written_wrongly_is_not_handed_over(what: str) -> None:
    inner = MemoryStore()

    class Rotten(FaultyStore):
        def put_new(self, key: str, data: bytes) -> Any:
            if "compacted" not in key:
                return self.inner.put_new(key, data)
            if what == "flip":
                return self.inner.put_new(key, data[:-1] + b"?")
            return None if what == "gone" else self.inner.put_new(key, b"[]")

    one = life(Rotten(inner, []))
    one.dispatch()
    step(one, 6)
    assert one.compactor.counters.failures > 0 and one.compactor.counters.rounds == 0
    assert not [key for key in one.publication.reached() if "compacted" in key]
    assert life(inner, 2).run_to_end(3) == REFERENCE


def test_a_program_error_in_a_round_is_not_overlooked() -> None:
    store, later = MemoryStore(), Later()
    one = life(store, submit=later)
    one.dispatch()
    step(one, 3)
    one.compactor._codec = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        later.run()
    one.decode(1)
    with pytest.raises(AttributeError):
        one.snapshot()
    assert not one.fleet.held and not one.fleet.fenced


def test_a_round_that_is_too_large_for_memory_makes_the_next_ones_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "ROUND_RAW_NBYTES", 100)
    store = MemoryStore()
    one = life(store)
    one.compactor._nbytes = one.compactor._limits.round_nbytes
    one.dispatch()
    step(one, 3)
    assert one.compactor._nbytes == LIMITS.round_nbytes // 2 and "larger than it may be" in str(
        one.compactor.counters.error
    )
    monkeypatch.setattr(compactor, "ROUND_RAW_NBYTES", 1 << 30)
    step(one, 4)
    assert one.compactor.counters.rounds > 0 and one.compactor._nbytes == LIMITS.round_nbytes
    assert one.run_to_end(3) == REFERENCE


def test_a_large_round_is_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "SEGMENT_RAW_NBYTES", 600)
    one = life(MemoryStore())
    one.dispatch()
    step(one, 5)
    counters = one.compactor.counters
    assert counters.segments_written > counters.rounds > 0
    assert one.run_to_end(3) == REFERENCE


def test_a_closed_one_stops_at_its_next_step() -> None:
    for k in range(8):
        inner, later = MemoryStore(), Later()
        store = FaultyStore(inner, [])
        one = life(store, submit=later)
        one.dispatch()
        step(one, 3)
        n = iter(range(100))

        def close(verb: str, key: str, k: int = k, one: Life = one, n: Any = n) -> Any:
            if next(n) == k:
                one.compactor.close()
            return PASS

        store._ask = close  # type: ignore[assignment]
        later.run()
        assert next(n) <= max(k + 3, 1)
        assert life(inner, 2).run_to_end(3) == REFERENCE


def test_few_records_of_a_large_segment_are_read_by_their_batches() -> None:
    """One long call among many short ones: its round does not read what the others have."""
    prompts = (PROMPTS[0], *(Prompt(f"p{i}", (i + 3,), 2) for i in range(150)))
    store = CountingStore(MemoryStore())
    later = Later()
    one = Life(
        store,
        1,
        prompts=prompts,
        limits=Limits(pieces=4, most_sparse=1 << 20),
        submit=later,
        segments=MixedSegmentCodec("arrow"),
        ledgers=ArrowLedgerCodec(rows_per_batch=2),
    )
    one.dispatch(1)
    for i in range(4):
        for prompt in prompts[1 + 30 * i : 31 + 30 * i]:
            one._start(one.table.open(prompt.request, prompt.call_id, 0))
        one.decode(2)
        one.flush()
    assert one.snapshot().verdict is Verdict.PUBLISHED and later.waiting
    store.log.clear()
    before = transcripts(one)
    store.log.clear()
    later.run()
    read = {call.key: call.nbytes for call in store.log if call.verb == "get" and "compacted" not in call.key}
    assert len(read) == 4 and all(nbytes < 0.8 * len(store.inner.get(key)) for key, nbytes in read.items())
    assert one.compactor.counters.nbytes_read == sum(read.values())
    one.decode(1)
    one.snapshot()
    assert_same(transcripts(one), before)


def test_in_the_background_it_is_a_thread_that_nobody_waits_for() -> None:
    import threading

    seen: list[bool] = []
    done = threading.Event()
    compactor.in_background(lambda: (seen.append(threading.current_thread().daemon), done.set()))
    assert done.wait(240) and seen == [True]


# ---- kills ---------------------------------------------------------------------------------------------------------


def test_c1_a_kill_at_every_store_call_of_a_compaction_and_of_the_snapshots_around_it() -> None:
    """Before, after, answer lost: the job goes on from the newest snapshot, and ends as if nothing had been."""
    kills = at = 0
    while True:
        at += 1
        for how in WAYS:
            inner = MemoryStore()
            first = life(inner)
            first.dispatch()
            step(first)
            promised = first.flushed
            store = KillingStore(inner, at, how)
            publication = first.publication
            for part in (publication, publication.log, publication.writer, first.compactor, first.stager):
                part._store = store  # type: ignore[union-attr]
            try:
                for _ in range(4):
                    first.decode(1)
                    first.flush()
                    first.snapshot()
            except Killed:
                pass
            if store.n_calls < at:
                print(f"{kills} kills over {at - 1} store calls with a compaction in them")
                assert first.compactor.counters.rounds >= 1 and at > 30
                assert any("compacted" in key for key in publication.reached())
                return
            kills += 1
            again = life(inner, 2)
            again.keeps(promised)
            newest = max(first.published)
            assert again.restored.snapshot is not None and again.restored.snapshot >= newest
            if again.restored.snapshot == newest:
                assert again.chosen_content == first.published[newest]
            elif again.chosen_content != first.at_cut:
                raise AssertionError("something between the previous and the new snapshot")
            assert again.restored.passed_over == []
            assert again.run_to_end(60) == REFERENCE
            assert content_of(again.publication.ledger).keys() == {prompt.call_id for prompt in PROMPTS}


def test_the_writer_of_compacted_segments_has_a_name_of_its_own() -> None:
    one = Compactor(MemoryStore(), PlainSegments(), SeededEntropy(1), epoch=3)
    key = f"{layout.segment_stem(3, one._writer, 1, '00000000')}-00000000.arrow"
    at = layout.segment_position(key)
    assert at is not None and at.is_compacted
    other = layout.segment_position("seg/e000003/compacted-not.00000000/00000001-00000000-00000000.arrow")
    assert other is not None and not other.is_compacted
    assert json.dumps(key)
