"""recovery.compaction: how many pieces are left, how often a token is rewritten, what is joined, what is read."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.compaction import Limits, Part, batch_of, joined, plan
from recovery.ledger import ChunkAt, EndedAt, Ledger, OpenedAt
from recovery.model import BatchInfo, Chunk, ChunkRef, Identity, PolicyVersion, RecordRef, SegmentInfo
from tests.fakes import V0, chunk, name

MUCH = 1 << 40


def segment(number: int, n_records: int = 1000, nbytes: int = 100_000, batch: int = 64) -> SegmentInfo:
    sizes = [min(batch, n_records - at) for at in range(0, n_records, batch)]
    each = nbytes // len(sizes)
    batches = tuple(BatchInfo(i * each, each, 0, n) for i, n in enumerate(sizes))
    key = f"seg/e000001/w0.00000000/{number:08d}-00000000-00000000.arrow"
    return SegmentInfo(key=key, nbytes=nbytes, crc32c=0, batches=batches)


class World:
    """A ledger whose segments hold what the test says; `rewritten` counts tokens that rounds moved."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.number = 0
        self.infos: dict[int, SegmentInfo] = {}
        self.rewritten = 0

    def new_segment(self, **fields: Any) -> int:
        self.number += 1
        self.infos[self.number] = segment(self.number, **fields)
        self.ledger.describe(self.infos[self.number])
        return self.number

    def open(self, rollout: str, at: int, index: int = 0) -> None:
        where = RecordRef(self.infos[at].key, index)
        identity = Identity(
            rollout=rollout, turn=0, request_digest=b"r" * 16, source_digest="", restart_only="", opened=where
        )
        assert self.ledger.apply(OpenedAt(name(rollout), 0, identity)) == ""

    def extend(self, rollout: str, at: int, n: int, index: int = 1, version: PolicyVersion = V0) -> None:
        entry = self.ledger.get(name(rollout))
        assert entry is not None
        ref = ChunkRef(RecordRef(self.infos[at].key, index), entry.n_tokens, n, b"d" * 16, version)
        assert self.ledger.apply(ChunkAt(name(rollout), 0, ref)) == ""

    def end(self, rollout: str) -> None:
        entry = self.ledger.get(name(rollout))
        assert entry is not None
        assert self.ledger.apply(EndedAt(name(rollout), 0, entry.n_tokens, "stop", None)) == ""

    def compact(self, limits: Limits, nbytes: int = MUCH) -> int:
        """Carry one round out as compactor.py does, versions joined or not. Returns the number of its parts."""
        found = plan(self.ledger, limits, nbytes)
        if found is None:
            return 0
        to = self.new_segment()
        for i, part in enumerate(found.parts):
            if part.chunks:
                start, n = part.chunks[0].start, sum(c.n_tokens for c in part.chunks)
                new = ChunkRef(RecordRef(self.infos[to].key, i), start, n, b"j" * 16, part.chunks[0].version)
                assert self.ledger.move(part.call_id, part.chunks, [new]) == ""
                self.rewritten += n
            if part.opened is not None:
                assert self.ledger.move_request(part.call_id, part.opened, RecordRef(self.infos[to].key, 999)) == ""
        self.ledger.published()
        return len(found.parts)

    def pieces(self, rollout: str) -> list[int]:
        entry = self.ledger.get(name(rollout))
        assert entry is not None
        sizes: list[int] = []
        last = ""
        for ref in entry.chunks:
            if ref.at.segment == last:
                sizes[-1] += ref.n_tokens
            else:
                sizes.append(ref.n_tokens)
            last = ref.at.segment
        return sizes


@settings(max_examples=300)
@given(
    sizes=st.lists(st.one_of(st.just(1), st.integers(1, 300), st.integers(1, 10_000)), max_size=400),
    pieces=st.integers(2, 9),
    versions=st.booleans(),
)
def test_an_open_call_lies_in_a_bounded_number_of_segments_and_is_rewritten_seldom(
    sizes: list[int], pieces: int, versions: bool
) -> None:
    """Whatever the sizes of its flushes: fewer than PIECES + log2(n) segments, each token moved 1 + log2(n) times."""
    world = World()
    world.open("r", world.new_segment())
    n = 0
    for i, size in enumerate(sizes):
        world.extend("r", world.new_segment(), size, version=PolicyVersion("a", i if versions else 0))
        n += size
        world.compact(Limits(pieces=pieces, most_sparse=1 << 30))
        left = world.pieces("r")
        assert len(left) < pieces + math.log2(n), left
        assert sum(left) == n
    assert world.rewritten <= n * (1 + math.log2(max(n, 2)))


def test_a_lockstep_of_calls_is_rewritten_three_times_for_eight_thousand_tokens() -> None:
    """The figure of docs/protocol.md: 64 calls, flushes of 64 tokens, the limits of a job."""
    world = World()
    first = world.new_segment()
    for i in range(64):
        world.open(f"r{i}", first, i)
    for _ in range(128):
        at = world.new_segment()
        for i in range(64):
            world.extend(f"r{i}", at, 64, index=i)
        world.compact(Limits())
    total = 64 * 128 * 64
    assert 2 <= world.rewritten / total <= 3, world.rewritten / total
    assert max(len(world.pieces(f"r{i}")) for i in range(64)) <= 34


def test_a_short_answer_is_never_written_twice() -> None:
    world = World()
    world.open("r", world.new_segment())
    for _ in range(31):
        world.extend("r", world.new_segment(), 200)
    assert plan(world.ledger, Limits(most_sparse=1 << 30), MUCH) is None
    world.extend("r", world.new_segment(), 200)
    found = plan(world.ledger, Limits(most_sparse=1 << 30), MUCH)
    assert found is not None and len(found.parts[0].chunks) == 32
    world.end("r")
    assert plan(world.ledger, Limits(most_sparse=1 << 30), MUCH) is None, "an ended call is left to rule two"


def test_a_segment_of_which_little_is_left_is_emptied_of_chunks_and_requests() -> None:
    """Requests too, and chunks of ended and of open calls; neighbours in two such segments become one part."""
    world = World()
    first, second, third = (world.new_segment(n_records=20) for _ in range(3))
    world.open("ended", first)
    world.open("open", first, 1)
    world.open("other", third, 0)
    for rollout, index in (("ended", 2), ("open", 3)):
        world.extend(rollout, first, 5, index)
        world.extend(rollout, second, 6, index)
    for i in range(18):
        world.extend("other", third, 1, 1 + i)
    world.end("ended")
    limits = Limits(most_sparse=2, small_records=0)
    found = plan(world.ledger, limits, MUCH)
    assert found is not None and {*found.segments} == {world.infos[first].key, world.infos[second].key}
    parts = {part.rollout: part for part in found.parts}
    assert set(parts) == {"ended", "open"}
    for part in parts.values():
        assert [c.n_tokens for c in part.chunks] == [5, 6] and part.opened is not None
    assert world.compact(limits) == 2
    assert {key for key, _ in world.ledger.segments.references()} == {world.infos[third].key, world.infos[4].key}
    assert plan(world.ledger, Limits(most_sparse=3, small_records=0), MUCH) is None, "few of them may lie there"


def test_small_segments_of_ended_calls_become_one_and_those_of_open_calls_wait() -> None:
    world = World()
    for i in range(10):
        at = world.new_segment(n_records=3)
        world.open(f"r{i}", at)
        world.extend(f"r{i}", at, 7)
        if i:
            world.end(f"r{i}")
    limits = Limits(most_sparse=9, small_records=64)
    assert world.compact(limits) == 9
    assert len(world.ledger.segments.references()) == 2
    assert world.compact(limits) == 0


def test_a_round_reads_no_more_than_it_may_and_takes_those_in_most_pieces_first() -> None:
    world = World()
    for i, n in enumerate((5, 9, 7)):
        at = world.new_segment()
        world.open(f"r{i}", at)
        for _ in range(n):
            world.extend(f"r{i}", world.new_segment(n_records=640, nbytes=1000), 4, index=70)
    each = 100  # ten batches of 64 records in a thousand bytes
    limits = Limits(pieces=4, most_sparse=1 << 30)
    for budget, taken in (
        (9 * each - 1, {"r2"}),
        (9 * each, {"r1"}),
        (16 * each, {"r1", "r2"}),
        (21 * each, {"r0", "r1", "r2"}),
    ):
        found = plan(world.ledger, limits, budget)
        assert found is not None and {part.rollout for part in found.parts} == taken, budget
    assert plan(world.ledger, limits, each) is None
    found = plan(world.ledger, limits, MUCH, bad={world.infos[2].key})
    assert found is not None and {part.rollout for part in found.parts} == {"r1", "r2"}


def test_what_calls_share_is_counted_once() -> None:
    world = World()
    first = world.new_segment()
    for i in range(10):
        world.open(f"r{i}", first, i)
    for _ in range(4):
        at = world.new_segment(n_records=640, nbytes=1000)
        for i in range(10):
            world.extend(f"r{i}", at, 4, index=i)
    found = plan(world.ledger, Limits(pieces=4, most_sparse=1 << 30), 400)
    assert found is not None and len(found.parts) == 10
    assert {key: len(indexes) for key, indexes in found.wanted().items()} == dict.fromkeys(found.segments, 10)


@pytest.mark.parametrize(("index", "batch"), [(0, 0), (63, 0), (64, 1), (639, 9), (640, 9), (10_000, 9)])
def test_the_batch_of_a_record(index: int, batch: int) -> None:
    assert batch_of(segment(1, n_records=640), index) == batch


CHUNKS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 1), st.booleans(), st.integers(0, 2)), min_size=1, max_size=12
)


@given(layout=CHUNKS, seed=st.integers(0, 1000))
def test_joined_chunks_hold_the_same(layout: list[tuple[int, int, bool, int]], seed: int) -> None:
    """Against a plain concatenation by position; and as few chunks as there are changes of kind."""
    draw = np.random.default_rng(seed)
    chunks: list[Chunk] = []
    start = 0
    for n, version, with_logprobs, wide in layout:
        columns = {"top": draw.integers(0, 9, (n, wide)).astype(np.int32)} if wide else {}
        chunks.append(
            chunk(
                "r",
                start,
                draw.integers(0, 99, n).tolist(),
                attempt=start % 3,
                version=PolicyVersion("a", version),
                logprobs=draw.random(n).astype(np.float32) if with_logprobs else None,
                mask=draw.random(n) < 0.5,
                columns=columns,
            )
        )
        start += n
    found = joined(iter(chunks))
    changes = 1 + sum(one[1:] != other[1:] for one, other in pairwise(layout))
    assert len(found) == changes

    def flat(parts: list[Chunk]) -> list[Any]:
        return [
            (
                part.start + i,
                int(part.token_ids[i]),
                None if part.logprobs is None else part.logprobs[i].tobytes(),
                bool(part.mask[i]),
                part.version,
                {k: v[i].tolist() for k, v in part.columns.items()},
            )
            for part in parts
            for i in range(part.token_ids.shape[0])
        ]

    assert flat(found) == flat(chunks)
    for part in found:
        assert part.attempt == max(one.attempt for one in chunks if part.start <= one.start < part.stop)


def test_nothing_is_joined_beyond_what_a_chunk_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.compaction.MAX_TOKENS_PER_CHUNK", 10)
    chunks = [chunk("r", 4 * i, [1, 2, 3, 4]) for i in range(6)]
    assert [part.token_ids.shape[0] for part in joined(chunks)] == [8, 8, 8]
    monkeypatch.setattr("recovery.compaction.COLUMN_BYTES_PER_CHUNK_MAX", 4 * 8)
    wide = [chunk("r", 4 * i, [1, 2, 3, 4], columns={"v": np.zeros(4, np.int64)}) for i in range(2)]
    assert len(joined(wide)) == 2


def test_seeded_mixtures_stay_bounded() -> None:
    """Many calls that open, end and flush as they like, with all three rules at once: total and per call."""
    chance = random.Random(7)
    world = World()
    limits = Limits(pieces=4, small_records=8, most_sparse=6)
    live: list[str] = []
    for step in range(400):
        at = world.new_segment(n_records=2 + 2 * len(live))
        index = 0
        if len(live) < 6:
            live.append(f"r{step}")
            world.open(live[-1], at, index)
        for rollout in list(live):
            index += 1
            if chance.random() < 0.7:
                world.extend(rollout, at, chance.randint(1, 40), index=index)
            if chance.random() < 0.05:
                world.end(rollout)
                live.remove(rollout)
        world.compact(limits)
        for rollout in live:
            sizes = world.pieces(rollout)
            assert len(sizes) < 4 + math.log2(sum(sizes) + 2)
    assert len(world.ledger.segments.references()) < 60, "400 flushes"


def test_a_part_may_be_a_request_alone() -> None:
    world = World()
    for i in range(3):
        world.open(f"r{i}", world.new_segment(n_records=10))
    found = plan(world.ledger, Limits(most_sparse=3), MUCH)
    assert found is not None
    assert [(part.chunks, part.opened is None) for part in found.parts] == [((), False)] * 3
    assert isinstance(found.parts[0], Part)
