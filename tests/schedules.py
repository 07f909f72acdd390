"""Random schedules of everything that may meet on one store, one store call at a time, from one seed.

Owns: the processes (jobs that decode, flush, take snapshots, compact and collect garbage, crash, stall and wake up as
zombies; people who pin, let go, forget and prune meanwhile), what becomes of each of their store calls, and what must
hold at every call and in the end.
Does not know: how many schedules are run (test_protocol_simulation.py), which mutations of the protocol they have to
find (test_simulation_mutations.py).

Invariants checked, by code of its own where it can be:
1. Slots are dense, created once and never changed; who was told that it owns one does, and nobody else was told so.
2. What a new snapshot references is there and decodes to what every call would have without any of this; no garbage
   list before it names any of it.
3. A garbage list names nothing that the newest kept snapshots reach, or one whose pin was acknowledged.
4. What is deleted was named, and a snapshot was published after that.
5. A restore goes on from the newest snapshot that was not forgotten, and takes over nothing that was flushed after a
   forgotten one.
6. In the end: no acknowledged snapshot, pin or forget is lost; the kept and the pinned snapshots can be restored; the
   job ends with the answers of a run that nothing happened to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from recovery import layout, pins
from recovery.compaction import Limits
from recovery.errors import RecoveryError
from recovery.forgetting import forget
from recovery.ledger import Ledger
from recovery.log_reading import read_slot
from recovery.ports import ObjectStore
from recovery.protocol import Verdict
from recovery.pruning import prune
from recovery.reading import read_transcripts
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot, read_ledger_objects
from storage_backends.memory import MemoryStore
from storage_backends.testing.kills import Killed
from tests.fake_engine import Life, Prompt, reference_answers
from tests.fakes import ManualClock, SeededEntropy
from tests.interleavings import Actor, Fate
from tests.plain_codecs import PlainLedgers, PlainSegments

PROMPTS = (Prompt("p0", (5,), 26), Prompt("p1", (8,), 14), Prompt("p2", (9, 9), 3), Prompt("p4", (7, 7), 12, "seed"))
REFERENCE = reference_answers(PROMPTS)
ANSWERS = {prompt.call_id: prompt.reference() for prompt in PROMPTS}
LIMITS = Limits(pieces=2, most_sparse=2, small_records=4)
BROWN_OUT = [Fate.FAIL] * 6 + [Fate.LOSE, Fate.DELAY, Fate.GO]
FATES = [Fate.GO] * 194 + [Fate.FAIL] * 2 + [Fate.LOSE] * 2 + [Fate.KILL_BEFORE, Fate.KILL_AFTER]
PEOPLE = ("pin", "pin", "let go", "forget", "prune")


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
        self.child_of: dict[Actor, Actor] = {}
        self.stalled: dict[Actor, int] = {}
        self.brown_out: dict[Actor, int] = {}
        self.pinned: dict[int, set[str]] = {}
        """Acknowledged pins that nobody has begun to remove."""
        self.letting_go: list[int] = []
        self.forgotten: dict[int, int] = {}
        """Slot that forgot, by snapshot, as they were acknowledged."""
        self.n_lives = self.n_people = self.n_steps = self.n_zombies = self.n_deletions = 0
        self.n_rounds = self.n_pins = self.n_late_pins = self.n_prunes = 0
        self._reached: dict[int, set[str]] = {}
        self._named: dict[str, int] = {}

    # ---- processes ---------------------------------------------------------------------------------------------

    def start_life(self) -> None:
        self.n_lives += 1
        number, seed = self.n_lives, self.chance.random()
        self.actors.append(Actor(f"life {number}", self.seen, self.life(number, seed)))

    def life(self, number: int, seed: float) -> Callable[[ObjectStore], None]:
        chance = random.Random(seed)

        def work(store: ObjectStore) -> None:
            def submit(compact: Callable[[], None]) -> None:
                """A round of compaction is a process of its own that dies with this one."""

                def alone(own: ObjectStore) -> None:
                    life.compactor._store = own
                    compact()

                child = Actor(f"compaction of life {number}", self.seen, alone)
                self.child_of[child] = me
                self.actors.append(child)

            me = next(actor for actor in self.actors if actor.name == f"life {number}")
            life = Life(store, number, prompts=PROMPTS, keep_latest_k=self.keep, limits=LIMITS, submit=submit)
            self.lives.append(life)
            life.dispatch(chance.randint(1, len(PROMPTS)))
            for _ in range(chance.randint(2, 12)):
                life.decode(chance.randint(0, 3))
                if chance.random() < 0.5:
                    life.flush()
                if chance.random() < 0.2:
                    life.dispatch()
                if chance.random() < 0.5:
                    life.fleet._states = {**life.fleet._states, "data": b'{"at": %d}' % chance.randrange(10**9)}
                if chance.random() < 0.6 and life.snapshot().verdict is Verdict.FENCED:
                    return

        return work

    def start_person(self) -> None:
        self.n_people += 1
        what, seed = self.chance.choice(PEOPLE), self.chance.random()
        work = {"pin": self.pin, "let go": self.let_go, "forget": self.forget, "prune": self.prune}[what]
        name = f"{what} {self.n_people}"
        self.actors.append(Actor(name, self.seen, lambda store: work(store, name, random.Random(seed))))

    def pin(self, store: ObjectStore, name: str, chance: random.Random) -> None:
        present = [seq for seq in self.snapshots() if self.condemned_by(seq) is None]
        if not present:
            return
        seq = chance.choice(present[-self.keep - 1 :])
        try:
            pins.pin(store, ManualClock(), SeededEntropy(name), name, seq, self.reached(seq))
        except RecoveryError:
            self.n_late_pins += 1
            raise
        self.n_pins += 1
        if seq not in self.letting_go:
            self.pinned[seq] = self.reached(seq)

    def let_go(self, store: ObjectStore, name: str, chance: random.Random) -> None:
        if self.pinned:
            seq = chance.choice(sorted(self.pinned))
            del self.pinned[seq]
            self.letting_go.append(seq)  # for good if it dies in the middle
            pins.unpin(store, seq)
            self.letting_go.remove(seq)

    def forget(self, store: ObjectStore, name: str, chance: random.Random) -> None:
        present = self.snapshots()
        if len(present) < 2:
            return
        wanted = set(present[-chance.randint(1, 2) :]) - pins.listed(store).keys()
        log = SlotLog(store, ManualClock(), SeededEntropy(name), name)
        slot = forget(store, PlainLedgers(), log, wanted or {present[-1]})
        if slot is not None:
            self.forgotten |= dict.fromkeys(slot.body["snapshots"], slot.seq)

    def prune(self, store: ObjectStore, name: str, chance: random.Random) -> None:
        entropy = SeededEntropy(name)
        log = SlotLog(store, ManualClock(), entropy, name)
        prune(store, PlainSegments(), PlainLedgers(), entropy, log, keep_latest_k=self.keep)
        self.n_prunes += 1

    # ---- the scheduler -----------------------------------------------------------------------------------------

    def run(self) -> None:
        total = self.chance.randint(3, 6)
        self.start_life()
        while True:
            running = [actor for actor in self.actors if not actor.done]
            jobs = [actor for actor in running if actor not in self.child_of]
            may_start = self.n_lives < total and len(jobs) < 4
            if may_start and (not jobs or self.chance.random() < 0.02):
                self.start_life()
                continue
            if self.n_people < 3 * total and len(jobs) < 4 and self.chance.random() < 0.03:
                self.start_person()
                continue
            if not running:
                break
            awake = [actor for actor in running if self.stalled.get(actor, 0) <= self.n_steps] or running
            self.step(self.chance.choice(awake))
        for actor in self.actors:
            for late in actor.delayed:
                self.watched(late)
            if actor.error is not None and not isinstance(actor.error, RecoveryError | Killed):
                raise actor.error

    def step(self, actor: Actor) -> None:
        self.n_steps += 1
        parent = self.child_of.get(actor)
        if parent is not None and parent.killed:
            actor.kill()
            return
        assert actor.at is not None
        verb, key = actor.at
        before_slot = verb == "put_new" and key.startswith("log/")  # there is most to be decided by who comes first
        if self.chance.random() < (0.06 if before_slot else 0.008):
            self.stalled[actor] = self.n_steps + self.chance.randint(20, 400)
            return
        if self.chance.random() < 0.01:
            self.brown_out[actor] = self.n_steps + self.chance.randint(3, 12)
        if actor.delayed and self.chance.random() < 0.2:
            self.watched(actor.delayed.pop(0))
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

    # ---- what the store holds, read without the code under test where that is short -----------------------------

    def slots(self) -> list[dict[str, object]]:
        found = [json.loads(data) for key, data in sorted(self.inner._objects.items()) if key.startswith("log/")]
        assert [slot["seq"] for slot in found] == list(range(1, len(found) + 1)), "slots are dense"
        return found

    def snapshots(self, below: int = 1 << 40) -> list[int]:
        """Ids of the snapshots that no slot below `below` forgets, oldest first."""
        slots = [slot for slot in self.slots() if slot["seq"] < below]  # type: ignore[operator]
        gone = {seq for slot in slots if slot["kind"] == "forget" for seq in slot["body"]["snapshots"]}  # type: ignore[index]
        return [slot["seq"] for slot in slots if slot["kind"] == "snapshot" and slot["seq"] not in gone]  # type: ignore[misc]

    def ledger(self, seq: int) -> tuple[Ledger, set[str]]:
        """Of a snapshot, and the keys of everything else that it references."""
        read = read_slot(self.inner, seq)
        assert read is not None
        snapshot = Snapshot.from_slot(read.slot)
        objects = read_ledger_objects(self.inner, PlainLedgers(), snapshot.ledger)
        ledger = Ledger.from_objects((item.header, item.rows) for item in objects)
        return ledger, {item.ref.key for item in objects} | {ref.key for ref in snapshot.states.values()}

    def reached(self, seq: int) -> set[str]:
        if seq not in self._reached:
            ledger, others = self.ledger(seq)
            self._reached[seq] = others | ledger.segments_in_use()
        return self._reached[seq]

    def condemned_by(self, seq: int) -> int | None:
        """The slot of a garbage list that names something that this snapshot reaches."""
        return min((at for key, at in self._named.items() if at > seq and key in self.reached(seq)), default=None)

    # ---- what must hold at every call --------------------------------------------------------------------------

    def check_deletion(self, key: str) -> None:
        if key.startswith("pin/"):
            return
        assert layout.epoch_of(key) is not None, f"{key} is nothing of a store"
        self.n_deletions += 1
        named = self._named.get(key)
        assert named is not None, f"{key} is deleted, and no garbage list names it"
        assert self.slots_after(named), f"{key} is deleted before a snapshot followed slot {named}, which names it"

    def slots_after(self, seq: int) -> bool:
        """Whether a snapshot was published after this slot."""
        return any(slot["kind"] == "snapshot" and slot["seq"] > seq for slot in self.slots())  # type: ignore[operator]

    def check_slot(self, seq: int) -> None:
        read = read_slot(self.inner, seq)
        assert read is not None
        if read.slot.kind == "snapshot":
            self.check_snapshot(seq, read.slot.body)
        if read.slot.kind == "gc":
            victims = json.loads(self.inner._objects[read.slot.body["victims"]["key"]])
            assert len(set(victims)) == len(victims) == read.slot.body["count"]
            for kept in self.snapshots(seq)[-self.keep :]:
                if self.condemned_by(kept) is None:  # else the forgetting of a newer one made it one of these
                    assert not set(victims) & self.reached(kept), f"slot {seq} names what kept snapshot {kept} reaches"
            for pinned, reached in self.pinned.items():
                assert not set(victims) & reached, f"slot {seq} names what pinned snapshot {pinned} reaches"
            for key in victims:
                self._named.setdefault(key, seq)

    def check_snapshot(self, seq: int, body: object) -> None:
        assert isinstance(body, dict)
        reached = self.reached(seq)
        missing = reached - set(self.inner._objects)
        assert not missing, f"snapshot {seq} was published and references what is not there: {missing}"
        named = reached & self._named.keys()
        assert not named, f"snapshot {seq} was published and references what garbage lists name: {named}"
        ledger, _ = self.ledger(seq)
        for call_id, found in read_transcripts(self.inner, PlainSegments(), ledger, ledger).items():
            assert tuple(found.token_ids.tolist()) == ANSWERS[call_id][: len(found.token_ids)]
        if body["cause"] != "adoption":
            return
        before = self.snapshots(seq)
        while before and self.condemned_by(before[-1]) is not None:
            before.pop()
        origin = body["restored_from"]
        assert origin == (before[-1] if before else None), f"snapshot {seq} did not go on from the newest snapshot"
        if origin is not None and any(origin < gone < seq for gone in self.forgotten):
            old, new = ({e.call_id: e.n_tokens for e in self.ledger(one)[0]} for one in (origin, seq))
            assert new.keys() == old.keys() and all(new[call_id] <= old[call_id] for call_id in new), "fenced off (W10)"

    # ---- what must hold in the end -----------------------------------------------------------------------------

    def check_end(self) -> None:
        slots = self.slots()
        published = [slot["seq"] for slot in slots if slot["kind"] == "snapshot"]
        told: dict[int, str] = {}
        for life in self.lives:
            for seq in life.published:
                assert seq not in told, f"{told[seq]} and {life.log._owner} were both told that they own slot {seq}"
                told[seq] = life.log._owner
        for seq, owner in told.items():
            assert seq in published, f"acknowledged snapshot {seq} is lost"
            assert slots[seq - 1]["owner"] == owner
        for seq, at in self.forgotten.items():
            assert seq in slots[at - 1]["body"]["snapshots"]  # type: ignore[index]
        left = [seq for seq in self.snapshots() if self.condemned_by(seq) is None]
        for seq in {*left[-self.keep :], *self.pinned}:
            assert self.reached(seq) <= set(self.inner._objects), f"snapshot {seq} has lost something"
        for seq in self.pinned:
            assert Life(self.copy(), 1001, prompts=PROMPTS, choice=seq).restored.snapshot == seq
        self.n_zombies = sum(1 for life in self.lives if life.attempts and life.attempts[-1].verdict is Verdict.FENCED)
        self.n_rounds = sum(life.compactor.counters.rounds for life in self.lives)
        last = Life(self.inner, 1000, prompts=PROMPTS, keep_latest_k=self.keep, limits=LIMITS)
        assert last.restored.snapshot == (left[-1] if left else None)
        assert last.run_to_end() == REFERENCE and len(last.publication.ledger) == len(PROMPTS)

    def copy(self) -> MemoryStore:
        copy = MemoryStore()
        copy._objects.update(self.inner._objects)
        return copy


FIGURES = {
    "calls": lambda one: one.n_steps,
    "jobs": lambda one: one.n_lives,
    "snapshots": lambda one: len(one.snapshots()),
    "fenced": lambda one: one.n_zombies,
    "deletions": lambda one: one.n_deletions,
    "compactions": lambda one: one.n_rounds,
    "pins": lambda one: one.n_pins,
    "late pins": lambda one: one.n_late_pins,
    "forgotten": lambda one: len(one.forgotten),
    "prunes": lambda one: one.n_prunes,
}
"""What is counted over many schedules."""


def run_schedules(n: int, first: int, make: Callable[[int], Schedule] = Schedule) -> dict[str, int]:
    """Run so many schedules from seed `first` on. A failure names its seed. Returns the figures."""
    figures = dict.fromkeys(FIGURES, 0)
    for seed in range(first, first + n):
        schedule = make(seed)
        try:
            schedule.run()
            schedule.check_end()
        except BaseException as error:
            error.add_note(f"SIMULATION_SEED={seed} SIMULATIONS=1")
            raise
        for name, count in FIGURES.items():
            figures[name] += count(schedule)
    return figures
