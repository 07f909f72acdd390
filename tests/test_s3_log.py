"""The numbered log, snapshots and restores on S3: racing coordinators, lost answers, busy servers (S1, S2, W10)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from recovery import log
from recovery.errors import Fenced, OutcomeUnknown, Retry, SnapshotAbandoned
from recovery.log import Slot
from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from storage_backends.s3 import S3Store
from storage_backends.s3_retry import Pace
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.s3_proxy import FaultProxy, Seen, of, when
from storage_backends.testing.servers import BUCKET, Server
from storage_backends.testing.waits import Waits
from tests.fake_engine import Life, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.log_stores import all_slots

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
pytestmark = pytest.mark.usefixtures("s3_environment")


@pytest.fixture
def prefix(fresh_prefix: Callable[[], str]) -> str:
    return fresh_prefix()


def store_at(url: str, prefix: str) -> S3Store:
    """A store whose pauses are short and whose patience is as short."""
    pace = Pace(sleep=lambda seconds: None, chance=lambda: 0.0)
    return S3Store(BUCKET, prefix, endpoint_url=url, pace=pace, retry_for_s=1.0)


def patient_store_at(url: str, prefix: str) -> S3Store:
    """One that repeats a request some forty times before it gives up, without waiting: of requests of which three in
    ten are refused none is refused so often (0.3 ** 40 is 1e-21)."""
    return S3Store(BUCKET, prefix, endpoint_url=url, pace=Waits().pace, retry_for_s=100.0)


def writer(store: ObjectStore, name: str) -> SlotLog:
    return SlotLog(store, ManualClock(), SeededEntropy(name), name)


# ---- one writer and lost answers -------------------------------------------------------------------------------------


def test_s2_a_commit_whose_answer_was_lost_is_recognised_and_reported_once(proxy: FaultProxy, prefix: str) -> None:
    store = store_at(proxy.url, prefix)
    one = writer(store, "one")
    one.claim()
    for n_lost in (1, 2, 3, 7):
        lost = [faults.DropAfter()] * n_lost
        proxy.plan = when(of("PutObject", key="/log/"), *lost)
        slot = one.append("snapshot", {"lost": n_lost})
        assert log.decode(store.get(log.slot_key(slot.seq)), slot.seq) == slot
    proxy.plan = faults.pass_on
    assert [slot.body.get("lost") for slot in all_slots(store)] == [None, 1, 2, 3, 7], "each is there once"


def test_s2_a_commit_that_cannot_be_read_back_is_unknown_and_settled_later(proxy: FaultProxy, prefix: str) -> None:
    store = store_at(proxy.url, prefix)
    one = writer(store, "one")
    one.claim()

    def deaf(seen: Seen) -> faults.Fault:
        return faults.DropAfter() if "/log/" in seen.path else faults.PASS_ON

    proxy.plan = deaf
    with pytest.raises(OutcomeUnknown, match="could not learn whether log slot 2 was written"):
        one.append("snapshot", {"n": 1})
    with pytest.raises(Retry):
        one.settle()
    proxy.plan = faults.pass_on
    settled = one.settle()
    assert settled is not None and settled.body == {"n": 1}
    assert one.append("snapshot", {"n": 2}).seq == 3
    assert [slot.body.get("n") for slot in all_slots(store)] == [None, 1, 2]


# ---- two writers -----------------------------------------------------------------------------------------------------


@dataclass
class Coordinated:
    """What one coordinator was told."""

    acknowledged: list[Slot] = field(default_factory=list)
    n_fenced: int = 0
    n_unknown: int = 0


def coordinate(store: ObjectStore, name: str, n_appends: int) -> Coordinated:
    """Claim and append; claim again when fenced; look again when an answer was lost."""
    told = Coordinated()
    one: SlotLog | None = None
    number = 0
    while len(told.acknowledged) < n_appends:
        number += 1
        try:
            if one is None:
                one = writer(store, f"{name}.{number}")
                one.claim()
            told.acknowledged.append(one.append("snapshot", {"by": name, "number": number}))
        except Fenced:
            told.n_fenced += 1
            one = None
        except Retry:
            told.n_unknown += 1
            if one is not None and not one.epoch:
                one = None
    return told


def weather(seed: int, share: float) -> faults.Plan:
    """Of log writes and reads, this share goes wrong, one way or another."""
    chance = random.Random(seed)
    ways: list[faults.Fault] = [
        faults.DropAfter(),
        faults.DropBefore(),
        faults.SLOW_DOWN,
        faults.Answer(500, "InternalError"),
    ]
    ways.append(faults.Instead(200, faults.Answer(500, "InternalError")))
    return lambda seen: chance.choice(ways) if "/log/" in seen.path and chance.random() < share else faults.PASS_ON


@pytest.mark.parametrize(("kind", "share"), [("moto", 0.0), ("moto", 0.3), ("seaweedfs", 0.0), ("seaweedfs", 0.2)])
def test_two_coordinators_race_and_nothing_is_lost_or_doubled(
    request: pytest.FixtureRequest, prefix: str, rng: random.Random, kind: str, share: float
) -> None:
    server: Server = request.getfixturevalue(kind)
    with FaultProxy(server.url, weather(rng.randrange(1 << 30), share)) as proxy:
        told: dict[str, Coordinated] = {}

        def run(name: str) -> None:
            told[name] = coordinate(store_at(proxy.url, prefix), name, 12)

        threads = [threading.Thread(target=run, args=(name,)) for name in ("left", "right")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(400)
        assert len(told) == 2, "a coordinator did not come to its end"
    slots = {slot.seq: slot for slot in all_slots(store_at(server.url, prefix))}
    acknowledged = [slot for each in told.values() for slot in each.acknowledged]
    assert len({slot.seq for slot in acknowledged}) == len(acknowledged) == 24
    assert all(slots[slot.seq] == slot for slot in acknowledged)
    written = [(slot.body["by"], slot.body["number"]) for slot in slots.values() if slot.kind == "snapshot"]
    assert len(set(written)) == len(written), "an append was written twice"


def test_w10_a_replaced_coordinator_is_fenced(moto: Server, prefix: str) -> None:
    zombie, heir = (writer(store_at(moto.url, prefix), name) for name in ("zombie", "heir"))
    zombie.claim()
    zombie.append("snapshot", {})
    heir.claim()
    with pytest.raises(Fenced, match="written by heir at epoch 2"):
        zombie.append("snapshot", {})
    assert [slot.owner for slot in all_slots(store_at(moto.url, prefix))] == ["zombie", "zombie", "heir"]


# ---- the whole core --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "codec"), [("moto", "arrow"), ("seaweedfs", "zarr")])
def test_s1_a_job_snapshots_and_restores_on_a_busy_server(
    request: pytest.FixtureRequest, prefix: str, rng: random.Random, kind: str, codec: CodecName
) -> None:
    server: Server = request.getfixturevalue(kind)
    refused = 0
    busy = faults.sometimes(0.3, faults.SLOW_DOWN, rng.randrange(1 << 30))

    def plan(seen: Seen) -> faults.Fault:
        """The first request of a store is refused in any case."""
        nonlocal refused
        fault = busy(seen) if refused else faults.SLOW_DOWN
        refused += fault is faults.SLOW_DOWN
        return fault

    with FaultProxy(server.url, plan) as proxy:
        store = patient_store_at(proxy.url, prefix)

        def life(number: int) -> Life:
            return Life(store, number, segments=MixedSegmentCodec(codec), ledgers=ArrowLedgerCodec())

        first = life(1)
        first.dispatch()
        first.decode(3)
        first.flush()
        assert first.snapshot().snapshot is not None
        first.decode(2)
        first.flush()  # stored, in no snapshot
        first.decode(1)  # lost
        second = life(2)
        second.keeps(first.flushed)
        assert second.restored.adopted_tokens > 0
        assert isinstance(first.snapshot().error, Fenced)
        assert second.run_to_end() == reference_answers()
        first.close()
        second.close()
        assert store.counters.busy == store.counters.retries == refused > 0
    again = Life(store_at(server.url, prefix), 3, segments=MixedSegmentCodec(codec), ledgers=ArrowLedgerCodec())
    assert again.answers() == reference_answers()
    again.close()


def test_c6_a_server_that_fails_costs_a_snapshot_and_no_token(proxy: FaultProxy, prefix: str) -> None:
    store = store_at(proxy.url, prefix)
    life = Life(store, 1)
    life.dispatch()
    life.decode(3)
    proxy.plan = lambda seen: faults.SLOW_DOWN
    attempt = life.snapshot()
    assert attempt.snapshot is None and isinstance(attempt.error, (Retry, SnapshotAbandoned))
    proxy.plan = when(of("PutObject"), *[faults.DropAfter()] * 3)
    life.decode(2)
    assert life.run_to_end() == reference_answers()
    life.close()
