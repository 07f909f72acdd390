"""recovery.ledger_writer: whatever happens, the objects that a snapshot counts say everything; none is a peak."""

from __future__ import annotations

import random

import pytest

from recovery.ledger import Ledger
from recovery.ledger_writer import LedgerWriter
from recovery.rotation import MAX_DEPTH, MIN_SHARE, ROTATION
from storage_backends.memory import MemoryStore
from tests.fakes import SeededEntropy, chunk, name, opened
from tests.growing_ledger import CODEC, Job, flat


def check(job: Job) -> None:
    """The newest snapshot can be read from exactly the objects that it counts."""
    objects = job.objects()
    assert len(objects) == job.depths[-1] + 1 <= MAX_DEPTH + 1
    assert flat(Ledger.from_objects((item.header, item.rows) for item in objects)) == flat(job.ledger)
    assert (objects[-1].header["parent"] is None) == (len(objects) == 1)


def test_every_snapshot_of_a_job_can_be_read_back() -> None:
    job = Job(MemoryStore(), n_calls=50)
    expected = []
    for i in range(150):
        job.decode([f"c{i % 50:05d}"])
        job.snapshot()
        check(job)
        expected.append(flat(job.ledger))
    assert max(job.depths) > 2
    for length in range(150, 0, -7):
        del job.refs[length:], job.depths[length:]
        assert flat(job.read()) == expected[length - 1]


def test_a_small_ledger_is_said_whole_each_time() -> None:
    job = Job(MemoryStore(), n_calls=4)
    for _ in range(MIN_SHARE // 4 - 1):
        job.decode([f"c{i:05d}" for i in range(4)])
        job.snapshot()
    assert set(job.depths) == {0}


@pytest.mark.parametrize("seed", range(12))
def test_calls_that_come_go_and_are_cut_back(seed: int) -> None:
    chance = random.Random(seed)
    job = Job(MemoryStore(), n_calls=chance.choice([0, 3, 80]))
    opened_calls = [entry.identity.rollout for entry in job.ledger]
    for step in range(100):
        match chance.choice(["open", "decode", "decode", "decode", "drop", "resume", "restart", "retract", "burst"]):
            case "open":
                opened_calls.append(f"n{step:05d}")
                job.flush([opened(opened_calls[-1])])
            case "burst" if chance.random() < 0.1:
                names = [f"b{step:03d}-{i:03d}" for i in range(200)]
                opened_calls += names
                job.flush([opened(one) for one in names])
            case "decode" if opened_calls:
                open_ = [e for e in job.ledger if chance.random() < 0.3]
                job.flush([chunk(e.identity.rollout, e.n_tokens, [7, 8], e.attempt) for e in open_])
            case "drop" if opened_calls:
                for rollout in chance.sample(opened_calls, 1 + len(opened_calls) // 3):
                    opened_calls.remove(rollout)
                    job.ledger.drop(name(rollout))
            case "resume" if opened_calls:
                job.ledger.resume(name(chance.choice(opened_calls)), 1, "token")
            case "restart" if opened_calls:
                job.ledger.restart(name(chance.choice(opened_calls)), 1, "why")
            case "retract" if len(job.ledger.segments_in_use()) > 1:
                bad = chance.choice(sorted(job.ledger.segments_in_use())[1:])
                used = [e for e in job.ledger if bad in {e.identity.opened.segment, *(c.at.segment for c in e.chunks)}]
                job.ledger.retract(bad, [e.call_id for e in used])
                opened_calls = [e.identity.rollout for e in job.ledger]
        if chance.random() < 0.2:
            job.writer.write({})  # written, never acknowledged
        job.snapshot()
        check(job)


def test_a_restored_ledger_is_continued() -> None:
    job = Job(MemoryStore(), n_calls=100)
    for number in range(70):
        job.decode([f"c{number:05d}"])
        job.snapshot()
    objects = job.objects()
    job.ledger = Ledger.from_objects((item.header, item.rows) for item in objects)
    job.writer = LedgerWriter(job.store, CODEC, SeededEntropy("again"), 2, job.ledger)
    job.writer.adopt(objects)
    assert (job.writer.head, job.writer.depth) == (job.refs[-1], job.depths[-1])
    for number in range(70):
        job.decode([f"c{number:05d}"])
        job.snapshot()
        check(job)
        assert job.refs[-1].key.startswith("ledger/e000002/")


def test_numbers_of_segments_go_on_where_those_before_ended() -> None:
    """Also those of segments that nothing refers to any more, or an older object would be read in two ways."""
    job = Job(MemoryStore(), n_calls=2)
    job.flush([opened("gone")])
    job.snapshot()
    job.ledger.drop(name("gone"))
    job.snapshot()
    assert job.depths == [0, 0] and job.read().names.numbered == 2


def test_a_failed_publication_is_contained_in_the_next() -> None:
    job = Job(MemoryStore(), n_calls=100)
    job.snapshot()
    job.decode(["c00000"])
    job.writer.write({})  # written, never acknowledged
    job.decode(["c00001"])
    job.snapshot()
    check(job)
    assert job.objects()[-1].header["flushed"] == {"w0.00000000": 3}


@pytest.mark.parametrize("n_calls", [100, 2000])
def test_the_bytes_of_a_snapshot_follow_what_changed_and_have_no_peaks(n_calls: int) -> None:
    """200 snapshots that change 8 calls each."""
    job = Job(MemoryStore(), n_calls)
    job.snapshot()
    sizes = []
    for i in range(200):
        job.decode([f"c{(8 * i + j) % n_calls:05d}" for j in range(8)])
        sizes.append(job.snapshot())
    per_row = 400  # JSON
    assert max(sizes) < 1500 + per_row * (8 + 2 * (n_calls + 8 * 200) / ROTATION)
    middle = sorted(sizes[100:])[50]
    assert max(sizes[100:]) < 2 * middle


def test_the_bytes_stay_a_share_when_live_calls_are_long() -> None:
    """4 calls of 700 chunks each: a call is said again when the shares of several snapshots add up to it."""
    job = Job(MemoryStore(), 4)
    sizes = []
    for _ in range(700):
        job.decode([f"c{i:05d}" for i in range(4)])
        sizes.append(job.snapshot())
    per_chunk = 130  # JSON
    share = 2800 / ROTATION
    assert sum(sizes[-64:]) / 64 < 4000 + 2 * per_chunk * share
    assert job.depths[-1] <= MAX_DEPTH
