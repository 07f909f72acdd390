"""recovery.ledger against a model of plain dicts; bases and deltas reload to the same at every publication."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from recovery.errors import Damaged
from recovery.ledger import ChunkAt, EndedAt, Ledger, OpenedAt
from recovery.ledger_columns import LedgerRows, Names
from recovery.model import (
    DROPPED,
    ENDED,
    OPEN,
    BatchInfo,
    CallId,
    ChunkRef,
    Identity,
    LedgerRow,
    PolicyVersion,
    RecordRef,
    Restarted,
    Resumed,
    SegmentInfo,
)
from tests.fakes import V0, name

NAMES = ["c0", "c1"]


def segment(number: int) -> SegmentInfo:
    key = f"seg/e000001/w0.00000000/{number:08d}-00000000-00000000.arrow"
    return SegmentInfo(key=key, nbytes=100 + number, crc32c=number, batches=(BatchInfo(0, 10, 1, 64),))


def identity(rollout: str, at: RecordRef) -> Identity:
    return Identity(rollout=rollout, turn=0, request_digest=b"r" * 16, source_digest="s", restart_only="", opened=at)


def chunk_ref(at: RecordRef, start: int, n: int, version: PolicyVersion = V0) -> ChunkRef:
    digest = hashlib.sha256(f"{at}{start}{n}".encode()).digest()[:16]
    return ChunkRef(at, start, n, digest, version)


@dataclass
class Call:
    """The model's call: chunks as (segment number, start, n), no cleverness."""

    attempt: int
    opened_in: int
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    ended: bool = False
    history: list[tuple[str, int]] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(n for _, _, n in self.chunks)


def flat(ledger: Ledger) -> dict[str, Any]:
    """A ledger as plain values, through its public face."""
    found = {}
    for entry in ledger:
        found[entry.identity.rollout] = (
            entry.attempt,
            entry.identity.opened.segment,
            [(c.at.segment, c.start, c.n_tokens) for c in entry.chunks],
            entry.n_tokens,
            entry.state,
            entry.ended,
            [(type(event).__name__, event.at) for event in entry.history],
        )
        assert entry.call_id == name(entry.identity.rollout)
        assert ledger.get(entry.call_id) is entry
    assert len(found) == len(ledger)
    return found


def flat_model(calls: dict[str, Call]) -> dict[str, Any]:
    return {
        rollout: (
            call.attempt,
            segment(call.opened_in).key,
            [(segment(s).key, start, n) for s, start, n in call.chunks],
            call.n_tokens,
            ENDED if call.ended else OPEN,
            ("length", None) if call.ended else None,
            call.history,
        )
        for rollout, call in calls.items()
    }


def used_segments(calls: dict[str, Call]) -> set[int]:
    return {call.opened_in for call in calls.values()} | {s for call in calls.values() for s, _, _ in call.chunks}


Pick = Callable[[list[Any]], Any]
"""Chooses one of a list: hypothesis, which shrinks, or a seeded walk, which goes far."""


class LedgerWorld:
    """Records of any attempt and position arrive; restores and retractions happen; publications succeed or fail."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.calls: dict[str, Call] = {}
        self.segment = 1
        self.index = 0
        self.objects: list[tuple[dict[str, Any], LedgerRows]] = []
        self.said_in: dict[CallId, int] = {}
        self.numbered: dict[int, CallId] = {}

    def open_calls(self) -> list[str]:
        return [rollout for rollout, call in self.calls.items() if not call.ended]

    def at(self) -> RecordRef:
        """Where the next record lies. A segment is described when its records are applied."""
        self.index += 1
        self.ledger.describe(segment(self.segment))
        return RecordRef(segment(self.segment).key, self.index - 1)

    # ---- records -----------------------------------------------------------------------------------------------

    def next_segment(self, pick: Pick) -> None:
        self.segment += 1
        self.index = 0

    def opened(self, pick: Pick) -> None:
        rollout, attempt = pick(NAMES), pick([0, 1, 2, 3])
        reason = self.ledger.apply(OpenedAt(name(rollout), attempt, identity(rollout, self.at())))
        call = self.calls.get(rollout)
        if call is None:
            self.calls[rollout] = Call(attempt, self.segment)
        fits = call is None or (not call.ended and attempt > call.attempt)
        assert (reason == "") == fits
        if call is not None and fits:
            call.attempt, call.chunks = attempt, []

    def next_chunk(self, pick: Pick) -> None:
        """A chunk at the end of the call and of its attempt; the usual thing."""
        self._chunk(pick(NAMES), 0, 0, pick([1, 2, 9]))

    def any_chunk(self, pick: Pick) -> None:
        self._chunk(pick(NAMES), pick([-2, -1, 0, 1, 2]), pick([-1, 0, 1]), pick([1, 2, 9]))

    def _chunk(self, rollout: str, wrong: int, late: int, n: int) -> None:
        call = self.calls.get(rollout)
        attempt = max(0, (call.attempt if call else 0) + late)
        start = max(0, (call.n_tokens if call else 0) + wrong)
        reason = self.ledger.apply(ChunkAt(name(rollout), attempt, chunk_ref(self.at(), start, n)))
        fits = call is not None and not call.ended and attempt == call.attempt and start == call.n_tokens
        assert (reason == "") == fits
        if fits and call is not None:
            call.chunks.append((self.segment, start, n))

    def ended(self, pick: Pick) -> None:
        rollout, (late, wrong) = pick(NAMES), pick([(0, 0), (0, 0), (0, 1), (1, 0)])
        call = self.calls.get(rollout)
        attempt, n = (call.attempt + late, call.n_tokens + wrong) if call else (0, 0)
        reason = self.ledger.apply(EndedAt(name(rollout), attempt, n, "length", None))
        fits = call is not None and not call.ended and not late and not wrong
        assert (reason == "") == fits
        if fits and call is not None:
            call.ended = True

    # ---- restores, retention, damage ---------------------------------------------------------------------------

    def resume(self, pick: Pick) -> None:
        if rollouts := self.open_calls():
            rollout = pick(rollouts)
            call = self.calls[rollout]
            self.ledger.resume(name(rollout), 7, "bitwise")
            call.attempt += 1
            if call.history[-1:] != [("Resumed", call.n_tokens)]:
                call.history.append(("Resumed", call.n_tokens))

    def restart(self, pick: Pick) -> None:
        if rollouts := self.open_calls():
            rollout = pick(rollouts)
            call = self.calls[rollout]
            self.ledger.restart(name(rollout), 7, "seed: why")
            if call.n_tokens:
                call.history.append(("Restarted", call.n_tokens))
            call.attempt, call.chunks = call.attempt + 1, []

    def finish(self, pick: Pick) -> None:
        if rollouts := self.open_calls():
            rollout = pick(rollouts)
            self.ledger.finish(name(rollout), "length", None)
            self.calls[rollout].ended = True

    def drop(self, pick: Pick) -> None:
        if self.calls:
            rollout = pick(sorted(self.calls))
            self.ledger.drop(name(rollout))
            del self.calls[rollout]

    def retract(self, pick: Pick) -> None:
        """A segment turned out bad: every call that has a record in it goes back to before it."""
        if not self.calls:
            return
        bad = pick(sorted(used_segments(self.calls), reverse=True))
        mentioned = [r for r, c in self.calls.items() if c.opened_in == bad or any(s == bad for s, _, _ in c.chunks)]
        self.ledger.retract(segment(bad).key, [name(r) for r in mentioned] + [name("never seen")])
        for rollout in mentioned:
            call = self.calls[rollout]
            if call.opened_in == bad:
                del self.calls[rollout]
                continue
            first = next(i for i, (s, _, _) in enumerate(call.chunks) if s == bad)
            del call.chunks[first:]
            call.ended = False
        assert not self.ledger.knows_segment(segment(bad).key)

    def move(self, pick: Pick) -> None:
        """Some chunks that follow one another are written again, joined or not; and a request."""
        rollouts = [rollout for rollout, call in self.calls.items() if call.chunks]
        if not rollouts:
            return
        rollout = pick(sorted(rollouts))
        call, entry = self.calls[rollout], self.ledger.get(name(rollout))
        assert entry is not None
        first = pick(range(len(call.chunks)))
        last = pick(range(first + 1, len(call.chunks) + 1))
        old, start = tuple(entry.chunks[first:last]), entry.chunks[first].start
        sizes = [sum(chunk.n_tokens for chunk in old)] if pick([True, False]) else [chunk.n_tokens for chunk in old]
        self.next_segment(pick)
        new = []
        for n in sizes:
            new.append(chunk_ref(self.at(), start, n))
            start += n
        if len(old) > 1:
            assert self.ledger.move(name(rollout), old[::-1], new[:1] * len(old)) != "", "not what the call has"
        assert self.ledger.move(name(rollout), old, new) == ""
        assert self.ledger.move(name(rollout), old, new) != "", "they are not there any more"
        call.chunks[first:last] = [(self.segment, chunk.start, chunk.n_tokens) for chunk in new]
        if pick([True, False]):
            opened, to = entry.identity.opened, self.at()
            assert self.ledger.move_request(name(rollout), opened, to) == ""
            assert self.ledger.move_request(name(rollout), opened, to) != ""
            call.opened_in = self.segment

    # ---- publications ------------------------------------------------------------------------------------------

    def publish(self, pick: Pick) -> None:
        """Write an object; only an acknowledged one counts. A failed one must be contained in the next."""
        whole = [name(rollout) for rollout in self.calls if pick([False, False, True])]
        rows = self.ledger.rows(whole)
        said = {call_id for call_id, is_whole in zip(rows.call_ids, rows.whole(), strict=True) if is_whole}
        assert set(whole) <= said and len(set(rows.call_ids)) == len(rows)
        described = {number: self.ledger.segments.info(number) for number in sorted(rows.segments())}
        if not pick([True, True, False]):
            return
        header = {"segments": described, "calls_numbered": self.ledger.call_numbers.numbered}
        self.ledger.published()
        self.objects.append((header, replace(rows, names=Names(rows.names))))
        for number, call_id in zip(rows.numbers, rows.call_ids, strict=True):
            assert 0 < number < header["calls_numbered"] and self.numbered.setdefault(number, call_id) == call_id
        self.said_in.update(dict.fromkeys(said, len(self.objects) - 1))
        assert flat(self.loaded(self.objects)) == flat_model(self.calls)
        assert len(self.ledger.rows()) == 0
        # What every call's last whole row needs is enough; what was said before may be gone. Descriptions may not.
        needed = min((self.said_in[name(rollout)] for rollout in self.calls), default=len(self.objects) - 1)
        used = {segment(number).key for number in used_segments(self.calls)}
        described = {n: info for h, _ in self.objects[:needed] for n, info in h["segments"].items() if info.key in used}
        enough = [({"segments": described}, LedgerRows(self.objects[0][1].names)), *self.objects[needed:]]
        assert flat(self.loaded(enough)) == flat_model(self.calls)

    def loaded(self, objects: list[tuple[dict[str, Any], LedgerRows]]) -> Ledger:
        """As a process that has nothing but the objects sees them, with ids only where a row has to have one."""
        names = Names(objects[0][1].names)
        stored = [
            (header, replace(rows, names=names, call_ids=rows.shortest_ids(), by_number=True))
            for header, rows in objects
        ]
        for _, rows in reversed(stored):  # the newest is read first
            rows.bind()
        return Ledger.from_objects(stored)

    def reload(self, pick: Pick) -> None:
        """What a restore reads is the last acknowledged publication; it can be written on top of."""
        if self.objects:
            loaded = self.loaded(self.objects)
            assert len(loaded.rows()) == 0
            if flat(loaded) == flat_model(self.calls):
                self.ledger = loaded
                self.next_segment(pick)

    # ---- what holds at every moment ----------------------------------------------------------------------------

    def check(self) -> None:
        assert flat(self.ledger) == flat_model(self.calls)
        counts = self.ledger.counts()
        used = used_segments(self.calls)
        n_ended = sum(call.ended for call in self.calls.values())
        assert (counts.calls, counts.ended, counts.open) == (len(self.calls), n_ended, len(self.calls) - n_ended)
        assert counts.tokens == sum(call.n_tokens for call in self.calls.values())
        assert counts.chunks == sum(len(call.chunks) for call in self.calls.values())
        assert (counts.segments, counts.nbytes) == (len(used), sum(100 + number for number in used))
        assert self.ledger.segments_in_use() == {segment(number).key for number in used}
        for entry in self.ledger:
            end = 0
            for chunk in entry.chunks:
                assert chunk.start == end
                end = chunk.stop
            assert end == entry.n_tokens


OFTEN = ["next_chunk", "next_chunk", "next_chunk", "next_segment", "publish", "publish", "opened"]
SELDOM = ["move", "move", "any_chunk", "ended", "finish", "resume", "restart", "drop", "retract", "reload"]


class LedgerMachine(RuleBasedStateMachine):
    """The world under hypothesis: finds a short history that goes wrong."""

    @initialize()
    def begin(self) -> None:
        self.world = LedgerWorld()

    @rule(what=st.sampled_from(OFTEN + SELDOM), data=st.data())
    def step(self, what: str, data: Any) -> None:
        getattr(self.world, what)(lambda options: data.draw(st.sampled_from(options)))
        self.world.check()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(150))
def test_seeded_walks(seed: int) -> None:
    """The world on long walks."""
    chance = random.Random(seed)
    world = LedgerWorld()
    for _ in range(150):
        getattr(world, chance.choice(OFTEN * 2 + SELDOM))(chance.choice)
        world.check()


# ---- single rules ----------------------------------------------------------------------------------------------


def ledger_with(rollout: str = "c0", n_chunks: int = 2) -> Ledger:
    ledger = Ledger()
    ledger.describe(segment(1))
    assert ledger.apply(OpenedAt(name(rollout), 0, identity(rollout, RecordRef(segment(1).key, 0)))) == ""
    for i in range(n_chunks):
        assert not ledger.apply(ChunkAt(name(rollout), 0, chunk_ref(RecordRef(segment(1).key, i + 1), 4 * i, 4)))
    return ledger


def test_the_reason_says_what_did_not_fit() -> None:
    ledger = ledger_with()
    ref = chunk_ref(RecordRef(segment(1).key, 9), 4, 4)
    assert "starts at 4, the call ends at 8" in ledger.apply(ChunkAt(name("c0"), 0, ref))
    assert "attempt 1, the call is at attempt 0" in ledger.apply(ChunkAt(name("c0"), 1, replace(ref, start=8)))
    assert "unknown" in ledger.apply(ChunkAt(name("nobody"), 0, ref))
    assert "9 tokens and has 8" in ledger.apply(EndedAt(name("c0"), 0, 9, "stop", None))
    assert ledger.apply(EndedAt(name("c0"), 0, 8, "stop", 5)) == ""
    assert "has ended" in ledger.apply(EndedAt(name("c0"), 0, 8, "stop", 5))
    assert "has ended" in ledger.apply(OpenedAt(name("c0"), 5, identity("c0", RecordRef(segment(1).key, 0))))


def test_every_restart_that_threw_tokens_away_is_in_the_history() -> None:
    """Two restarts after equally many tokens are two; a resume that got nowhere is not worth two lines."""
    ledger = ledger_with()
    ledger.restart(name("c0"), 5, "seed: why")
    ledger.restart(name("c0"), 6, "seed: why")  # nothing to throw away
    assert not ledger.apply(ChunkAt(name("c0"), 2, chunk_ref(RecordRef(segment(1).key, 3), 0, 8)))
    ledger.restart(name("c0"), 7, "seed: why")
    entry = ledger.get(name("c0"))
    assert entry is not None
    assert entry.history == (Restarted(8, 5, "seed: why"), Restarted(8, 7, "seed: why"))
    other = ledger_with("c1")
    for snapshot in (5, 6, 7):
        other.resume(name("c1"), snapshot, "bitwise")
    entry = other.get(name("c1"))
    assert entry is not None and entry.history == (Resumed(8, 7, "bitwise"),)


def test_a_delta_says_only_what_changed() -> None:
    ledger = ledger_with(n_chunks=50)
    for i in range(1, 4):
        ledger.apply(OpenedAt(name(f"c{i}"), 0, identity(f"c{i}", RecordRef(segment(1).key, 60 + i))))
    ledger.published()
    ledger.describe(segment(2))
    assert not ledger.apply(ChunkAt(name("c0"), 0, chunk_ref(RecordRef(segment(2).key, 0), 200, 3)))
    (row,) = ledger.rows()
    assert (row.kept, len(row.chunks), row.identity, row.history) == (50, 1, None, None)
    assert ledger.rows().segments() == {ledger.names.known(segment(2).key)}
    first, second = ledger.rows([name("c2")])
    assert first == row and (second.call_id, second.kept, second.history) == (name("c2"), 0, ())


def test_the_order_of_calls_survives_a_reload() -> None:
    ledger = Ledger()
    ledger.describe(segment(1))
    for i in range(5):
        ledger.apply(OpenedAt(name(f"c{i}"), 0, identity(f"c{i}", RecordRef(segment(1).key, i))))
    first = ledger.rows()
    ledger.published()
    ledger.resume(name("c2"), 1, "token")
    loaded = Ledger.from_objects(
        [({"segments": {0: segment(1)}}, first), ({"segments": {}}, ledger.rows([name("c4")]))]
    )
    assert [entry.identity.rollout for entry in loaded] == [f"c{i}" for i in range(5)]


def test_a_segment_that_nothing_refers_to_is_forgotten_and_its_number_is_not_given_out_again() -> None:
    ledger = ledger_with()
    ledger.describe(segment(2))
    assert not ledger.apply(ChunkAt(name("c0"), 0, chunk_ref(RecordRef(segment(2).key, 0), 8, 4)))
    ledger.describe(segment(3))
    ledger.published()
    assert sorted(ledger.names.keys.values()) == [segment(1).key, segment(2).key]
    ledger.retract(segment(2).key, [name("c0")])
    assert not ledger.knows_segment(segment(2).key) and ledger.names.known(segment(2).key) == 1
    ledger.published()
    assert ledger.names.known(segment(2).key) is None
    ledger.describe(segment(2))
    assert ledger.names.known(segment(2).key) == 3 and ledger.names.numbered == 4


# ---- rows that do not fit --------------------------------------------------------------------------------------


def row(**fields: Any) -> LedgerRow:
    at = RecordRef(segment(1).key, 0)
    values: dict[str, Any] = {
        "call_id": name("c0"),
        "attempt": 0,
        "state": OPEN,
        "n_tokens": 8,
        "kept": 0,
        "chunks": (chunk_ref(at, 0, 4), chunk_ref(at, 4, 4)),
        "identity": identity("c0", at),
        "ended": None,
        "history": (),
    }
    return LedgerRow(**{**values, **fields})


REF = RecordRef(segment(1).key, 0)
BAD_BASES: list[tuple[str, dict[str, Any]]] = [
    ("7 tokens are listed|8 tokens are listed, 7 stated", {"n_tokens": 7}),
    ("starts at 5 where 4 is next", {"chunks": (chunk_ref(REF, 0, 4), chunk_ref(REF, 5, 3))}),
    ("starts at 3 where 4 is next", {"chunks": (chunk_ref(REF, 0, 4), chunk_ref(REF, 3, 5))}),
    ("starts at 1 where 0 is next", {"chunks": (chunk_ref(REF, 1, 7),)}),
    ("starts at 4 where 4 is next", {"chunks": (chunk_ref(REF, 0, 4), chunk_ref(REF, 4, 0), chunk_ref(REF, 4, 4))}),
    ("no object of this ledger says it whole", {"kept": 1}),
    ("no object of this ledger says it whole", {"history": None}),
    ("no object of this ledger says it whole", {"identity": None}),
    ("state and its end", {"state": ENDED}),
    ("state and its end", {"ended": ("stop", None)}),
    ("9 is no state", {"state": 9}),
    ("dropped and has chunks", {"state": DROPPED}),
    ("is not described", {"chunks": (chunk_ref(RecordRef("seg/elsewhere", 0), 0, 8),)}),
    ("is not described", {"identity": identity("c0", RecordRef("seg/elsewhere", 0))}),
]


@pytest.mark.parametrize(("said", "fields"), BAD_BASES)
def test_a_row_that_does_not_fit_is_damage_that_names_the_call(said: str, fields: dict[str, Any]) -> None:
    with pytest.raises(Damaged, match=said) as caught:
        Ledger.from_objects([({"segments": {0: segment(1)}}, [row(**fields)])])
    assert name("c0").hex() in str(caught.value)


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("3 chunks should have been kept, there are 2", {"kept": 3, "chunks": (), "n_tokens": 8}),
        ("starts at 4 where 8 is next", {"kept": 2, "chunks": (chunk_ref(REF, 4, 4),), "n_tokens": 12}),
        ("8 tokens are listed, 12 stated", {"kept": 2, "chunks": (), "n_tokens": 12}),
        ("dropped and has chunks", {"kept": 1, "chunks": (), "n_tokens": 0, "state": DROPPED}),
    ],
)
def test_a_row_must_fit_what_was_said_before(said: str, fields: dict[str, Any]) -> None:
    base: tuple[dict[str, Any], list[LedgerRow]] = ({"segments": {0: segment(1)}}, [row()])
    assert len(Ledger.from_objects([base, ({"segments": {}}, [row(kept=2, chunks=())])])) == 1
    with pytest.raises(Damaged, match=said):
        Ledger.from_objects([base, ({"segments": {}}, [row(identity=None, **fields)])])


def test_a_row_whose_beginning_is_not_there_waits_for_a_whole_one() -> None:
    described, nothing = {"segments": {0: segment(1)}}, {"segments": {}}
    later = row(kept=2, chunks=(), identity=None, history=None)
    gone = row(state=DROPPED, n_tokens=0, chunks=(), identity=None, history=None)
    for first in ([later], [row(attempt=3, n_tokens=9, kept=7, chunks=(chunk_ref(REF, 5, 4),), identity=None)]):
        (entry,) = Ledger.from_objects([(nothing, first), (described, [row(attempt=5)]), (nothing, [later])])
        assert (entry.attempt, entry.n_tokens, len(entry.chunks)) == (0, 8, 2)
        assert len(Ledger.from_objects([(nothing, first), (nothing, [gone])])) == 0
        with pytest.raises(Damaged, match="says it whole"):
            Ledger.from_objects([(described, first), (described, [row(call_id=name("c1"))])])


def test_a_segment_is_described_once_or_the_same_again() -> None:
    again: dict[str, Any] = {"segments": {0: segment(1)}}
    assert len(Ledger.from_objects([(again, [row()]), (again, [])])) == 1
    with pytest.raises(Damaged, match="number 0 is segment"):
        Ledger.from_objects([(again, [row()]), ({"segments": {0: segment(2)}}, [])])
    with pytest.raises(Damaged, match="described in two ways"):
        Ledger.from_objects([(again, [row()]), ({"segments": {0: replace(segment(1), nbytes=1)}}, [])])


def test_dropping_what_no_ancestor_has_is_fine() -> None:
    """A call that came and went between two publications."""
    gone = row(state=DROPPED, n_tokens=0, chunks=(), identity=None, history=None)
    assert len(Ledger.from_objects([({"segments": {}}, [gone])])) == 0


def check_failed(change: Callable[[Ledger], None]) -> CallId:
    ledger = ledger_with()
    before = flat(ledger)
    change(ledger)
    assert flat(ledger) == before
    return name("c0")


def test_a_rejected_record_changes_nothing() -> None:
    check_failed(lambda ledger: ledger.apply(ChunkAt(name("c0"), 0, chunk_ref(RecordRef(segment(1).key, 9), 3, 5))))
    check_failed(lambda ledger: ledger.apply(ChunkAt(name("c0"), 3, chunk_ref(RecordRef(segment(1).key, 9), 8, 5))))
    check_failed(lambda ledger: ledger.apply(EndedAt(name("c0"), 0, 7, "stop", None)))
    check_failed(lambda ledger: ledger.apply(OpenedAt(name("c0"), 0, identity("c0", RecordRef(segment(1).key, 9)))))


def test_an_excerpt_is_as_it_was_when_it_was_taken() -> None:
    ledger = ledger_with("c0", 3)
    ledger.describe(segment(2))
    for at in (OpenedAt(name("c1"), 0, identity("c1", RecordRef(segment(2).key, 0))),):
        assert ledger.apply(at) == ""
    part = ledger.excerpt([name("c0"), name("nobody")])
    before = flat(part)
    assert before == {"c0": flat(ledger)["c0"]} and part.segments_in_use() == {segment(1).key}
    assert part.segment(segment(1).key) == segment(1)
    ledger.retract(segment(1).key, [name("c0")])
    assert flat(part) == before and flat(ledger).keys() == {"c1"}
