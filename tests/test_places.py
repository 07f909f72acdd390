"""The whole core on both places: foreign names, odd ids, order, clocks, zombies, late listings, bounded objects.

Each test is a case that users of other systems were hurt by; the docstring names it.
"""

from __future__ import annotations

import fcntl
import json
import random
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from recovery import layout, log
from recovery.codec import fingerprint
from recovery.coordinator import Coordinator
from recovery.errors import Fenced, SnapshotAbandoned
from recovery.log_reading import read_slot
from recovery.ports import Listed, ObjectStore, Put
from recovery.protocol import Verdict
from recovery.restore import compatibility_record
from recovery.snapshots import Snapshot
from snapshot_inspect import cli
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.memory import MemoryStore
from storage_backends.testing import s3_proxy as faults
from storage_backends.testing.faults import CountingStore, Wrapped
from storage_backends.testing.s3_proxy import FaultProxy, Hold
from storage_backends.testing.servers import BUCKET, Server
from tests import schedules as simulation
from tests.fake_engine import MUST, Life, Prompt, content_of, reference_answers
from tests.fakes import V0, ManualClock, UntilItHangs
from tests.lives import ids, objects_of, tokens, worked
from tests.log_stores import all_slots

if TYPE_CHECKING:
    from tests.places import Place  # a plugin: pytest imports it

pytest_plugins = ["storage_backends.testing.s3_fixtures", "tests.places"]
pytestmark = pytest.mark.usefixtures("s3_environment")


def real(store: ObjectStore, number: int, **fields: Any) -> Life:
    """A life with the codecs that jobs have."""
    return Life(store, number, segments=MixedSegmentCodec(), ledgers=ArrowLedgerCodec(rows_per_batch=2), **fields)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_n1_siblings_of_our_objects_are_never_touched(place: Place) -> None:
    """N1: beside objects of every kind what a person or a desktop left; restores, snapshots and collections follow."""
    life = worked(place.open(), keep=1)
    foreign = {}
    for name in {name.split("/")[0]: name for name in place.contents()}.values():
        folder = name.rpartition("/")[0]
        strange = [f"{name}.backup", f"{name} (copy)", f"{folder}/.DS_Store", f"{folder}/lost+found/x"]
        foreign |= {other.lstrip("/"): f"mine, beside {name}".encode() for other in strange}
    for name, data in foreign.items():
        place.put(name, data)
    before = set(place.contents())
    for number in range(2, 6):
        again = Life(place.open(), number, keep_latest_k=1)
        assert again.restored.passed_over == []
        again.keeps(life.flushed)
        again.dispatch()
        again.decode(1)
        again.fleet._states = {"job": compatibility_record(MUST, {"number": number})}  # the one before is garbage
        again.snapshot()
    assert again.run_to_end() == reference_answers()
    after = place.contents()
    assert {name: after.get(name) for name in foreign} == foreign
    assert before - set(after), "something was collected meanwhile"
    assert not [name for name in before - set(after) if name in foreign]


ODD_IDS = [
    "a b", "a+b", "a%2Fb", "a#b", "a:b", "..", ".", "a/../b", "\u00e9", "e\u0301", "🙂", "x" * 255, "'\"", " ", "a\nb",
]  # fmt: skip


def test_n6_request_ids_of_any_kind_are_kept_apart(place: Place) -> None:
    """N6: and in a root of such a name. The precomposed and the decomposed e-acute are two calls."""
    place.root += "/run +%2F#:🙂\u00e9e\u0301"
    prompts = [Prompt(name, (5, 5 + number), 4 + number) for number, name in enumerate(ODD_IDS)]
    life = real(place.open(), 1, prompts=prompts)
    life.dispatch()
    life.decode(3)
    life.flush()
    assert life.snapshot().verdict is Verdict.PUBLISHED
    again = real(place.open(), 2, prompts=prompts)
    assert tokens(again) == {prompt.rollout: min(3, len(prompt.reference())) for prompt in prompts}
    assert again.run_to_end() == reference_answers(prompts)
    assert len(again.answers()) == len(ODD_IDS)
    assert cli.main(["verify", place.url, "--read-data"]) == 0
    assert cli.main(["cat", place.url, "e\u0301"]) == 0


def test_n4_snapshots_are_in_the_order_of_their_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """N4: past 9 and past 99; the newest is the one with the largest number, and is what a restore takes."""
    store = open_store(tmp_path / "store", create=True)
    life = Life(store, 1, keep_latest_k=200)
    life.dispatch()
    while life.log.tail < 102:
        life.snapshot()
    assert [item.key for item in store.list("log/")] == [log.slot_key(n) for n in range(1, 103)]
    assert cli.main(["list", str(tmp_path / "store"), "--json"]) == 0
    shown = [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()]
    assert shown == sorted(shown) == ids(life) == list(range(2, 103))
    assert Life(store, 2).restored.snapshot == 102


# ---- order, clocks, content ------------------------------------------------------------------------------------------


def test_c3_one_chunk_is_removed_after_the_publication(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """C3: `latest` answers, `verify` fails with the name of what is missing, a restore falls back and says why."""
    life = worked(place.open(), segments=MixedSegmentCodec(), ledgers=ArrowLedgerCodec(rows_per_batch=2))
    older, newest = ids(life)[-2:]
    missing = sorted(item.key for item in life.store.list("seg/"))[3]
    life.store.delete(missing)
    cli.main(["latest", place.url])
    assert str(newest) in capsys.readouterr().out
    assert cli.main(["verify", place.url, "--json"]) == 1
    assert missing in [problem["object"] for problem in json.loads(capsys.readouterr().out)["problems"]]
    again = real(place.open(), 2)
    assert again.restored.snapshot == older
    (passed,) = again.restored.passed_over
    assert passed.what == f"snapshot {newest}" and missing in passed.reason
    assert again.run_to_end() == reference_answers()


def test_c7_s10_clocks_decide_nothing(place: Place) -> None:
    """C7, S10: retention 1, and each snapshot is taken an hour before the one before it, by its writer's clock and by
    the times of its files: the newest is the one that was published last, and it is never the one that is removed."""
    store = place.open()
    life = Life(store, 1, keep_latest_k=1)
    clock = life.log._clock
    assert isinstance(clock, ManualClock)
    life.dispatch()
    for number in range(6):
        life.decode(1)
        clock.utc_now -= 3600
        life.fleet._states = {"job": compatibility_record(MUST, {"number": number})}
        assert life.snapshot().verdict is Verdict.PUBLISHED
        place.age(3600 * number)
        assert all(store.get(key) for key in objects_of(store, ids(life)[-1]))
    utcs = [slot.utc for slot in all_slots(store) if slot.kind == "snapshot"]
    assert utcs == sorted(utcs, reverse=True)
    again = Life(place.open(), 2, keep_latest_k=1)
    assert again.restored.snapshot == ids(life)[-1] and again.chosen_content == life.published[ids(life)[-1]]
    assert again.run_to_end() == reference_answers()


def test_c7_two_writers_at_once_one_wins_and_the_other_learns_it(place: Place) -> None:
    """C7: both claim, both snapshot; the one of the lower epoch is told by whom it was replaced."""
    one, two = Life(place.open(), 1, keep_latest_k=1), Life(place.open(), 2, keep_latest_k=1)
    for life in (one, two):
        life.dispatch()
        life.decode(2)
    assert two.snapshot().verdict is Verdict.PUBLISHED
    attempt = one.snapshot()
    assert attempt.verdict is Verdict.FENCED and "written by life 2 at epoch 2" in str(attempt.error)
    assert two.snapshot().verdict is Verdict.PUBLISHED
    assert two.run_to_end() == reference_answers()


def test_c13_two_updates_of_equal_size_in_one_tick_are_told_apart(place: Place) -> None:
    """C13: a participant's state changes, and its size, its time and its number of calls do not."""
    store = place.open()
    life = Life(store, 1, keep_latest_k=3)
    life.dispatch()
    for letter in ("a", "b", "b", "c"):
        life.fleet._states = {"job": compatibility_record(MUST, {"letter": letter})}
        life.snapshot()
        place.age(0)
    slots = [slot for slot in all_slots(store) if slot.kind == "snapshot"][1:]
    assert len({slot.utc for slot in slots}) == 1, "one tick"
    refs = [slot.body["states"]["job"] for slot in slots]
    assert len({ref["nbytes"] for ref in refs}) == 1 and [refs[1] == refs[2], refs[0] == refs[1]] == [True, False]
    stored = [json.loads(store.get(ref["key"]))["recorded"]["letter"] for ref in refs]
    assert stored == ["a", "b", "b", "c"]


# ---- zombies ---------------------------------------------------------------------------------------------------------


def test_c8_what_a_zombie_writes_after_its_objects_were_collected_is_refused_and_collected(place: Place) -> None:
    """C8: A stalls, B takes over and collects what A had; A wakes and writes its segment and ledger anew. It publishes
    nothing, nothing of it is ever referenced, and what it recreated goes with the next collection."""
    zombie = worked(place.open(), keep=1)
    heir = Life(place.open(), 2, keep_latest_k=1)
    heir.dispatch()
    for _ in range(4):
        heir.decode(1)
        heir.publication.writer.head = None  # each ledger object is a base, so that A's are not needed
        heir.fleet._states = {"job": compatibility_record(MUST, {"n": heir.log.tail})}
        assert heir.snapshot().verdict is Verdict.PUBLISHED
    store = place.open()
    before = {item.key for item in store.list("")}
    assert not [key for key in before if key.startswith("ledger/e000001/")], "A's ledgers were collected"
    zombie.decode(3)
    zombie.flush()
    assert zombie.snapshot().verdict is Verdict.FENCED
    late = {item.key for item in store.list("")} - before
    assert any(key.startswith("seg/e000001/") for key in late) and any(
        key.startswith("ledger/e000001/") for key in late
    )
    third = Life(place.open(), 3, keep_latest_k=1)
    assert third.restored.snapshot == ids(heir)[-1] and third.restored.adopted_segments == 0
    assert not late & third.publication.reached()
    assert third.run_to_end() == reference_answers()
    for _ in range(3):
        third.snapshot()
    assert not late & {item.key for item in store.list("")}


@pytest.mark.parametrize("why", ["a future version", "another job"])
def test_c8_a_snapshot_that_cannot_be_used_is_passed_over_once_and_kept_aside(place: Place, why: str) -> None:
    """C8: not tried again at every start: what the restore publishes is newer. Its objects are not deleted then."""
    store = place.open()
    life = worked(store)
    older = ids(life)[-1]
    if why == "another job":
        life.coordinator._fingerprint = fingerprint({"model": "other"})
        life.fleet._states = {"job": compatibility_record({"model": "other"}, {})}
        assert life.snapshot().verdict is Verdict.PUBLISHED
    else:
        ledgers = life.ledgers
        encode = ledgers.encode
        ledgers.encode = lambda header, rows: encode({**header, "requires": ["teleport"]}, rows)  # type: ignore[method-assign]
        draft = life.publication.record({"job": compatibility_record(MUST, {})})
        life.publication.publish(draft, cause="interval", fingerprint=fingerprint(MUST), restored_from=None)
    unusable = life.log.tail if why != "another job" else ids(life)[-1]
    read = read_slot(store, unusable)
    assert read is not None and read.slot.kind == "snapshot"
    again = Life(place.open(), 2)
    (passed,) = again.restored.passed_over
    assert again.restored.snapshot == older and passed.what == f"snapshot {unusable}"
    assert ("teleport" if why == "a future version" else "belongs to another job") in passed.reason
    assert store.get(Snapshot.from_slot(read.slot).ledger.key), "kept aside"
    third = Life(place.open(), 3)
    assert third.restored.passed_over == [] and third.restored.snapshot == again.restored.published
    assert third.run_to_end() == reference_answers()
    assert read_slot(store, unusable) is not None, "the log keeps it for ever"


def test_w10_an_older_snapshot_by_its_id_fences_what_came_later_off(place: Place) -> None:
    """W10: newer snapshots, flushed fragments and the process that wrote them are still there when an older one is
    asked for: none of their tokens comes back, then or later, and the process can publish nothing more."""
    newer = worked(place.open(), n_snapshots=4, keep=9)
    wanted = ids(newer)[1]
    again = Life(place.open(), 2, choice=wanted, keep_latest_k=9)
    assert again.restored.snapshot == wanted and again.restored.adopted_segments == 0
    assert content_of(again.publication.ledger) == newer.published[wanted]
    newer.decode(2)
    newer.flush()
    assert newer.snapshot().verdict is Verdict.FENCED
    third = Life(place.open(), 3, keep_latest_k=9)
    assert third.restored.snapshot == again.restored.published and third.restored.adopted_segments == 0
    assert content_of(third.publication.ledger) == newer.published[wanted]
    assert third.run_to_end() == reference_answers()


# ---- a server that holds or hangs ------------------------------------------------------------------------------------


def held(proxy: FaultProxy, prefix: str, holds: list[Hold]) -> Life:
    """A life in a bucket whose coordinator gives steps up, as a job's does, while one of `holds` holds a request."""
    run = UntilItHangs(lambda: any(hold.reached.is_set() and not hold.event.is_set() for hold in holds))
    store = open_store(f"s3://{BUCKET}/{prefix}", endpoint_url=proxy.url)
    life = Life(store, 1)
    life.coordinator = Coordinator(
        life.publication, life.fleet, ManualClock(), timeout_s=60, fingerprint=fingerprint(MUST), run=run
    )
    life.dispatch()
    life.decode(2)
    return life


def test_c4_two_publications_in_flight_are_in_the_order_of_their_ids(
    proxy: FaultProxy, fresh_prefix: Callable[[], str]
) -> None:
    """C4: the create of the first is still on its way, past its deadline, when the next is wanted. The next waits for
    it; the ids are in the order in which they were committed, and the later one contains the earlier."""
    hold = Hold(answered=False)
    life = held(proxy, fresh_prefix(), [hold])
    proxy.plan = faults.when(faults.of("PutObject", key="/log/"), hold)
    first = life.coordinator.take("interval")
    assert first.verdict is Verdict.ABANDONED and hold.reached.is_set() and not life.fleet.held
    life.decode(2)
    second = life.coordinator.take("interval")
    assert second.verdict is Verdict.ABANDONED and "has not returned" in str(second.error)
    hold.event.set()
    third = life.snapshot()
    assert third.verdict is Verdict.PUBLISHED and third.snapshot is not None
    assert [slot.seq for slot in all_slots(life.store) if slot.kind == "snapshot"] == [2, 3, third.snapshot]
    earlier, later = (Life(life.store, n, choice=seq).chosen_content for n, seq in ((2, 3), (3, third.snapshot)))
    assert earlier is not None and later is not None and earlier.keys() <= later.keys()
    assert all(later[call][0] >= n for call, (n, _) in earlier.items())


def test_c6_a_server_that_hangs_costs_one_attempt(proxy: FaultProxy, fresh_prefix: Callable[[], str]) -> None:
    """C6: before a write is done, and with the answer to a read: hold and fence are released at the deadline, the
    attempt has failed, decoding goes on, and when the server answers again the next one is published."""
    holds: list[Hold] = []
    life = held(proxy, fresh_prefix(), holds)
    for kind, folder in (("PutObject", "/ledger/"), ("GetObject", "/seg/")):
        hold = Hold(answered=kind == "GetObject")
        holds.append(hold)
        proxy.plan = faults.when(faults.of(kind, key=folder), hold)
        life.decode(1)
        attempt = life.coordinator.take("interval")
        assert hold.reached.is_set() and attempt.verdict is Verdict.ABANDONED, attempt
        assert isinstance(attempt.error, SnapshotAbandoned) and attempt.snapshot is None
        assert not life.fleet.held and not life.fleet.fenced
        life.decode(1)
        hold.event.set()
        assert life.snapshot().verdict is Verdict.PUBLISHED
    assert life.run_to_end() == reference_answers()


def test_c10_a_writer_killed_in_mid_upload_leaves_nothing_in_the_bucket(
    moto: Server, fresh_prefix: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10: no object, and no multipart upload that nobody completes and somebody pays for."""
    from storage_backends.testing import writers

    prefix = fresh_prefix()
    with FaultProxy(moto.url) as proxy:
        hold = Hold(answered=False)
        proxy.plan = faults.when(faults.of("PutObject", key="race/0003"), hold)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        process = writers.start_at("race", f"s3://{BUCKET}/{prefix}", "20")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert hold.reached.wait(240)
        process.kill()
        process.communicate()
        store = open_store(f"s3://{BUCKET}/{prefix}", endpoint_url=moto.url)
        assert [item.key for item in store.list("")] == ["race/0000", "race/0001", "race/0002"]
        assert not moto.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
        assert store.put_new("race/0003", b"an heir") is Put.CREATED


# ---- F5: a file system that shows a folder late ----------------------------------------------------------------------


class LateListings(Wrapped):
    """Lists show what was there some calls ago; reads and creates are current. NFS with cached folders does that."""

    def __init__(self, inner: ObjectStore, chance: random.Random, latest: int) -> None:
        super().__init__(inner)
        self.chance = chance
        self.past: deque[list[Listed]] = deque([[]], latest + 1)

    def _call(self, verb: Any, key: str, apply: Callable[[], Any]) -> Any:
        self.past.append(self.inner.list(""))
        return apply()

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        self.past.append(self.inner.list(""))
        shown = self.past[-1 - self.chance.randrange(len(self.past))]
        return [item for item in shown if item.key.startswith(prefix) and item.key > after]


@pytest.mark.parametrize("latest", [10, 10_000])
def test_f5_a_job_on_a_place_that_lists_late(latest: int) -> None:
    """F5: what a list does not show costs at most what was flushed and not published. Nothing is called missing because
    of it, no slot is taken twice, and every answer is right."""
    store = LateListings(MemoryStore(), random.Random(latest), latest)
    newest = None
    for number in range(1, 9):
        life = Life(store, number)
        assert life.restored.passed_over == [] and life.restored.snapshot == newest
        life.dispatch()
        life.decode(1)
        life.flush()
        life.decode(1)
        newest = life.snapshot().snapshot
    assert life.run_to_end() == reference_answers()
    all_slots(store.inner)


def test_f5_schedules_of_several_coordinators_on_a_place_that_lists_late() -> None:
    """F5: the simulation of test_protocol_simulation, with crashes, zombies, lost answers and garbage collection."""
    figures: Counter[str] = Counter()
    for seed in range(40):
        schedule = simulation.Schedule(seed)
        schedule.seen = LateListings(schedule.inner, random.Random(seed), 60)
        try:
            schedule.run()
            schedule.check_end()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        figures["snapshots"] += len(schedule.snapshots())
        figures["fenced"] += schedule.n_zombies
    print(f"40 schedules: {dict(figures)}")
    assert figures["snapshots"] > 120 and figures["fenced"] > 2


def test_f5_c14_no_lock_is_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F5, C14: where locks hang or do not exist a store works as ever, and nothing has to be unlocked."""

    def locked(*arguments: Any) -> None:
        raise AssertionError("a lock was asked for")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, locked)
    life = worked(open_store(tmp_path / "store", create=True))
    again = Life(open_store(tmp_path / "store", create=True), 2)
    again.keeps(life.flushed)
    assert again.log.epoch == 2 and again.run_to_end() == reference_answers()
    assert isinstance(life.snapshot().error, Fenced)


# ---- F3: very many small files ---------------------------------------------------------------------------------------


def test_f3_objects_per_snapshot_are_bounded_whatever_the_number_of_calls_and_chunks() -> None:
    """F3: 2,000 calls of 50 chunks each on a fake clock. Per snapshot at most one object for each flush of each worker
    since the one before, and six: the cut's segment, ledger, state, slot, list of garbage and its slot (the hint is
    overwritten); compaction, counted apart, adds at most one. Not one per call or chunk, of which there are 100,000."""
    counting = CountingStore(MemoryStore())
    prompts = [Prompt(f"p{number}", (3 + number,), 200) for number in range(2000)]
    life = real(counting, 1, prompts=prompts)
    life.dispatch()
    n_chunks, flushes_between, most, n_compacted = 50, 4, 0, 0
    begun = len(counting.log)
    for chunk in range(n_chunks):
        for call in life.live:
            call.append([3 + chunk], [-1.0], V0)
        if (chunk + 1) % (flushes_between + 1):
            life.flush()
        else:
            assert life.snapshot().verdict is Verdict.PUBLISHED
            written = [call.key for call in counting.log[begun:] if call.verb in ("put_new", "put")]
            begun = len(counting.log)
            assert len(written) == len({key for key in written if key != "hint"}) + 1
            compacted = [key for key in written if f"/{layout.COMPACTED}." in key]
            n_compacted += len(compacted)
            most = max(most, len(written) - 1 - len(compacted))
            kinds = Counter(key.split("/")[0] for key in written if key not in compacted)
            assert kinds["seg"] == flushes_between + 1 and kinds["log"] <= 2 and len(compacted) <= 1, kinds
    assert most <= flushes_between + 6, most
    assert life.stager is not None and life.stager.counters.flushes == n_chunks
    ledger = life.publication.ledger
    assert ledger.counts().tokens == 100_000 and ledger.counts().calls == 2000
    assert len(counting.inner.list("seg/")) <= n_chunks + n_compacted
    assert len(counting.inner.list("")) <= n_chunks + n_compacted + 5 * (n_chunks // (flushes_between + 1)) + 5
