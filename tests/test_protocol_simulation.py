"""Random schedules of two or three coordinators that crash, stall, lose answers, wake up as zombies, collect garbage.

Every store call is a decision of a seeded scheduler. Checked at every call: a slot is created once and acknowledged by
its writer only; what is deleted is reached by no kept snapshot; what a new snapshot references is there. Checked at the
end: no acknowledged snapshot is missing, each restore went on from the newest snapshot before its claim, the kept ones
can be read, and the job ends with the answers of a run that nothing happened to.

SIMULATIONS sets how many schedules are run, SIMULATION_SEED the first seed; a failure names its seed.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable

from recovery import layout
from recovery.ledger import Ledger
from recovery.log_reading import read_slot
from recovery.ports import ObjectStore
from recovery.protocol import Verdict
from recovery.snapshots import Snapshot, load, read_ledger_objects
from storage_backends.memory import MemoryStore
from tests.fake_engine import Life, Prompt, reference_answers
from tests.interleavings import Actor, Fate
from tests.plain_codecs import PlainLedgers

PROMPTS = (Prompt("p0", (5, 6, 8), 9), Prompt("p1", (8,), 14), Prompt("p2", (9, 9), 3), Prompt("p4", (7, 7), 6, "seed"))
REFERENCE = reference_answers(PROMPTS)
BROWN_OUT = [Fate.FAIL] * 6 + [Fate.LOSE, Fate.DELAY, Fate.GO]
FATES = [Fate.GO] * 194 + [Fate.FAIL] * 2 + [Fate.LOSE] * 2 + [Fate.KILL_BEFORE, Fate.KILL_AFTER]


class Schedule:
    """One seed: some processes one after another, up to three at a time, none of which knows of the others."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.keep = 1 + seed % 2
        self.inner = MemoryStore()
        self.seen: ObjectStore = self.inner
        """The store as the processes see it; what is checked is looked up in `inner`."""
        self.lives: list[Life] = []
        self.actors: list[Actor] = []
        self.stalled: dict[Actor, int] = {}
        self.brown_out: dict[Actor, int] = {}
        self.n_started = 0
        self.n_steps = 0
        self.n_zombies = 0
        self.n_deletions = 0
        self._reached: dict[int, set[str]] = {}

    # ---- processes ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.n_started += 1
        number = self.n_started
        seed = self.chance.random()
        self.actors.append(Actor(f"life {number}", self.seen, self.process(number, seed)))

    def process(self, number: int, seed: float) -> Callable[[ObjectStore], None]:
        chance = random.Random(seed)

        def work(store: ObjectStore) -> None:
            life = Life(store, number, prompts=PROMPTS, keep_latest_k=self.keep)
            self.lives.append(life)
            life.dispatch(chance.randint(1, len(PROMPTS)))
            for _ in range(chance.randint(2, 9)):
                life.decode(chance.randint(0, 3))
                if chance.random() < 0.5:
                    life.flush()
                if chance.random() < 0.2:
                    life.dispatch()
                if chance.random() < 0.6 and life.snapshot().verdict is Verdict.FENCED:
                    return

        return work

    def run(self) -> None:
        total = self.chance.randint(3, 6)
        self.start()
        while True:
            running = [actor for actor in self.actors if not actor.done]
            may_start = self.n_started < total and len(running) < 3
            if may_start and (not running or self.chance.random() < 0.02):
                self.start()
                continue
            if not running:
                break
            awake = [actor for actor in running if self.stalled.get(actor, 0) <= self.n_steps] or running
            self.step(self.chance.choice(awake))
        for actor in self.actors:
            for late in actor.delayed:
                self.watched(late)

    def step(self, actor: Actor) -> None:
        self.n_steps += 1
        if self.chance.random() < 0.01:
            self.stalled[actor] = self.n_steps + self.chance.randint(20, 400)
            return
        if self.chance.random() < 0.01:
            self.brown_out[actor] = self.n_steps + self.chance.randint(3, 12)
        if actor.delayed and self.chance.random() < 0.2:
            self.watched(actor.delayed.pop(0))
        assert actor.at is not None
        verb, key = actor.at
        fate = self.chance.choice(BROWN_OUT if self.brown_out.get(actor, 0) > self.n_steps else FATES)
        if fate is Fate.DELAY and verb != "put_new":
            fate = Fate.FAIL
        if verb == "delete" and fate not in (Fate.FAIL, Fate.KILL_BEFORE):
            self.check_deletion(key)
        self.watched(lambda: actor.step(fate))

    def watched(self, act: Callable[[], object]) -> None:
        """Do one thing to the store, and look at the slot that it made, if it made one."""
        before = {key: data for key, data in self.inner._objects.items() if key.startswith("log/")}
        act()
        after = {key: data for key, data in self.inner._objects.items() if key.startswith("log/")}
        assert before.items() <= after.items(), "a slot was changed or deleted"
        for key in after.keys() - before.keys():
            self.check_slot(int(key[4:16]))

    # ---- what must hold at every call --------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """Ids of all snapshots, read without the code under test."""
        slots = [json.loads(data) for key, data in sorted(self.inner._objects.items()) if key.startswith("log/")]
        assert [slot["seq"] for slot in slots] == list(range(1, len(slots) + 1)), "slots are dense"
        return [slot["seq"] for slot in slots if slot["kind"] == "snapshot"]

    def reached(self, seq: int) -> set[str]:
        if seq not in self._reached:
            read = read_slot(self.inner, seq)
            assert read is not None
            snapshot = Snapshot.from_slot(read.slot)
            objects = read_ledger_objects(self.inner, PlainLedgers(), snapshot.ledger)
            ledger = Ledger.from_objects((item.header, item.rows) for item in objects)
            keys = {item.ref.key for item in objects} | {ref.key for ref in snapshot.states.values()}
            self._reached[seq] = keys | ledger.segments_in_use()
        return self._reached[seq]

    def check_deletion(self, key: str) -> None:
        assert layout.epoch_of(key) is not None
        self.n_deletions += 1
        for seq in self.snapshots()[-self.keep :]:
            assert key not in self.reached(seq), f"{key} is deleted, and snapshot {seq} references it"

    def check_slot(self, seq: int) -> None:
        read = read_slot(self.inner, seq)
        assert read is not None
        if read.slot.kind == "snapshot":
            missing = self.reached(seq) - set(self.inner._objects)
            assert not missing, f"snapshot {seq} was published and references what is not there: {missing}"
            origin = read.slot.body["restored_from"]
            if read.slot.body["cause"] == "adoption":
                before = [one for one in self.snapshots() if one < seq]
                assert origin == (before[-1] if before else None), "a restore did not go on from the newest snapshot"
        if read.slot.kind == "gc":
            victims = set(json.loads(self.inner._objects[read.slot.body["victims"]["key"]]))
            assert len(victims) == read.slot.body["count"]
            for kept in self.snapshots()[-self.keep :]:
                assert not victims & self.reached(kept), f"gc slot {seq} names what kept snapshot {kept} references"

    # ---- what must hold in the end -----------------------------------------------------------------------------

    def check_end(self) -> None:
        owners: dict[int, str] = {}
        for number, data in enumerate(sorted(k for k in self.inner._objects if k.startswith("log/")), start=1):
            owners[number] = json.loads(self.inner._objects[data])["owner"]
        present = self.snapshots()
        told: dict[int, str] = {}
        for life in self.lives:
            for seq in life.published:
                assert seq not in told, f"{told[seq]} and {life.log._owner} were both told that they own slot {seq}"
                told[seq] = life.log._owner
        for seq, owner in told.items():
            assert seq in present, f"acknowledged snapshot {seq} is lost"
            assert owners[seq] == owner
        for seq in present[-self.keep :]:
            read = read_slot(self.inner, seq)
            assert read is not None
            load(self.inner, PlainLedgers(), Snapshot.from_slot(read.slot))
            assert self.reached(seq) <= set(self.inner._objects)
        self.n_zombies = sum(1 for life in self.lives if life.attempts and life.attempts[-1].verdict is Verdict.FENCED)
        last = Life(self.inner, 1000, prompts=PROMPTS, keep_latest_k=self.keep)
        assert last.restored.snapshot == (present[-1] if present else None)
        assert last.run_to_end() == REFERENCE and len(last.publication.ledger) == len(PROMPTS)


def test_random_schedules() -> None:
    """C4, C7, C8: thousands of schedules with SIMULATIONS=10000; some hundreds here."""
    n, first = int(os.environ.get("SIMULATIONS", "300")), int(os.environ.get("SIMULATION_SEED", "0"))
    figures = {"calls": 0, "processes": 0, "snapshots": 0, "fenced": 0, "deletions": 0}
    for seed in range(first, first + n):
        schedule = Schedule(seed)
        try:
            schedule.run()
            schedule.check_end()
        except BaseException as error:
            error.add_note(f"SIMULATION_SEED={seed} SIMULATIONS=1")
            raise
        figures["calls"] += schedule.n_steps
        figures["processes"] += schedule.n_started
        figures["snapshots"] += len(schedule.snapshots())
        figures["fenced"] += schedule.n_zombies
        figures["deletions"] += schedule.n_deletions
    print(f"{n} schedules from seed {first}: {figures}")
    assert figures["fenced"] > n // 20 and figures["snapshots"] > 3 * n
