"""A kill at every store call (before it, after it, its answer lost) of snapshots, flushes, claims and restores.

Owns: the acceptance line that a store then restores to the previous or the new snapshot and nothing between, that
nothing which was acknowledged as stored is lost, and that the finished job equals one that was never killed.
Enumerated: single kills over a whole job (with both codecs, keeping one snapshot and two), and every pair of a kill
during a snapshot and a kill during the restore after it. Pairs over the whole job are sampled; KILL_PAIRS sets how many
(0: all of them), KILL_SEED the seed.
Elsewhere, in the same way: compaction in test_compactor.py, a pin in test_pins.py, a forget in test_forgetting.py, a
prune in test_pruning.py, the three commands in test_inspect_deleting.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from recovery.errors import RecoveryError
from recovery.ports import LedgerCodec, SegmentCodec
from storage_backends.memory import MemoryStore
from storage_backends.testing.kills import WAYS, Killed, KillingStore
from tests.fake_engine import Content, Flushed, Life, Prompt, content_of, reference_answers
from tests.plain_codecs import PlainLedgers, PlainSegments

PROMPTS = (
    Prompt("p0", (5, 6, 8), 9),
    Prompt("p1", (8,), 14),
    Prompt("p2", (9, 9), 3),
    Prompt("p3", (4, 1, 3, 3), 21),
    Prompt("p4", (7, 7), 6, "seed"),
)
REFERENCE = reference_answers(PROMPTS)
Kill = tuple[int, str]
NO_KILL: Kill = (0, "before")


@dataclass
class Run:
    """One job on one store over several lives, with what was promised so far.

    `acknowledged`: contents of snapshots by id, as a life was told or as a later one found them. `candidates`: contents
    of what was under way when lives ended; only these may appear under an id that nobody was told of.
    """

    keep: int = 2
    codecs: Callable[[], tuple[SegmentCodec, LedgerCodec]] = lambda: (PlainSegments(), PlainLedgers())
    store: MemoryStore = field(default_factory=MemoryStore)
    n_lives: int = 0
    acknowledged: dict[int, Content] = field(default_factory=dict)
    candidates: list[Content] = field(default_factory=list)
    flushed: Flushed = field(default_factory=Flushed)
    n_calls: int = 0
    outcomes: set[str] = field(default_factory=set)

    def live(self, kill: Kill, job: Callable[[Life], Any]) -> Any:
        """One process: restore, check what came back, work until done or dead. Returns what `job` does, or None."""
        self.n_lives += 1
        store = KillingStore(self.store, kill[0], kill[1])  # type: ignore[arg-type]
        segments, ledgers = self.codecs()
        life = Life.__new__(Life)  # in two steps: a life that dies in its restore is looked at too
        works = False
        try:
            life.__init__(  # type: ignore[misc]
                store, self.n_lives, prompts=PROMPTS, keep_latest_k=self.keep, segments=segments, ledgers=ledgers
            )
            works = True
            assert life.restored.uncollected is None or kill[1] == "lost"
            self.check(life)
            return job(life)
        except Killed:
            return None
        except RecoveryError:
            # A call of the claim or the restore got no answer: the process ends with a message. From then on every
            # such error is dealt with inside, and an attempt is made again.
            assert not works and kill[1] == "lost"
            return None
        finally:
            self.n_calls = store.n_calls
            life.close()
            self.note(life, works)

    def note(self, life: Life, works: bool) -> None:
        """What this life was told, and what it had under way when it ended."""
        self.acknowledged |= life.published
        if life.at_cut is not None:
            self.candidates.append(life.at_cut)
        if not works and hasattr(life, "publication"):
            self.candidates.append(content_of(life.publication.ledger))
        for rollout, n in life.flushed.tokens.items():
            self.flushed.tokens[rollout] = max(n, self.flushed.tokens.get(rollout, 0))
        self.flushed.ended |= life.flushed.ended

    def check(self, life: Life) -> None:
        """The chosen snapshot is the newest acknowledged one, or one that was in flight; adoption loses nothing."""
        seq, content = life.restored.snapshot, life.chosen_content
        newest = max(self.acknowledged, default=None)
        assert life.restored.passed_over == []
        if seq is None or content is None:
            assert newest is None, "an acknowledged snapshot was lost"
            self.outcomes.add("none")
        elif seq == newest:
            assert content == self.acknowledged[seq]
            self.outcomes.add("previous")
        else:
            assert newest is None or seq > newest, "an acknowledged snapshot was lost"
            assert content in self.candidates, "something between the previous and the new snapshot"
            self.acknowledged[seq] = content
            self.outcomes.add("new")
        self.candidates.clear()
        life.keeps(self.flushed)

    def copy(self) -> Run:
        """The same job at the same point, on a store of its own."""
        run = Run(self.keep, self.codecs, n_lives=self.n_lives)
        run.store._objects.update(self.store._objects)
        run.acknowledged, run.candidates = dict(self.acknowledged), list(self.candidates)
        run.flushed = Flushed(dict(self.flushed.tokens), set(self.flushed.ended))
        return run

    def finish(self) -> None:
        """Two more lives without a kill: the first ends the job, the second finds nothing left to do."""
        answers = self.live(NO_KILL, lambda life: life.run_to_end(flush_every=5))
        assert answers == REFERENCE
        again = self.live(NO_KILL, lambda life: (life.answers(), len(life.publication.ledger), life.restored.calls))
        assert again == (REFERENCE, len(PROMPTS), []), "each once, and nothing is open"


def first_life_but_its_last_snapshot(life: Life) -> None:
    life.dispatch(3)
    life.decode(3)
    life.flush()
    life.decode(2)
    life.snapshot()
    life.dispatch()
    life.decode(2)
    life.flush()
    life.decode(1)


def first_life(life: Life) -> None:
    """Decode, flush, snapshot, decode, flush, snapshot."""
    first_life_but_its_last_snapshot(life)
    life.snapshot()


def second_life(life: Life) -> None:
    """Carry on, flush, snapshot, and to the end."""
    life.dispatch()
    life.decode(2)
    life.flush()
    life.decode(1)
    life.snapshot()
    life.snapshot()
    life.work_to_end(flush_every=6)


JOBS = (first_life, second_life)


def run_with(kills: dict[int, Kill], **fields: Any) -> Run:
    """The whole job, with a kill in the lives that `kills` names."""
    run = Run(**fields)
    try:
        for number, job in enumerate(JOBS):
            run.live(kills.get(number, NO_KILL), job)
        run.finish()
    except BaseException as error:
        error.add_note(f"kills, by life: {kills}; {fields}")
        raise
    return run


def calls_of_each_life(**fields: Any) -> list[int]:
    run = Run(**fields)
    calls = []
    for job in JOBS:
        run.live(NO_KILL, job)
        calls.append(run.n_calls)
    return calls


def every_kill(n_calls: int, first: int = 1) -> Iterator[Kill]:
    return ((k, how) for k in range(first, n_calls + 1) for how in WAYS)


def arrow_codecs() -> tuple[SegmentCodec, LedgerCodec]:
    from storage_backends.arrow_ledger import ArrowLedgerCodec
    from storage_backends.arrow_segments import ArrowSegmentCodec

    return ArrowSegmentCodec(), ArrowLedgerCodec(rows_per_batch=2)


def plain_codecs() -> tuple[SegmentCodec, LedgerCodec]:
    return PlainSegments(), PlainLedgers()


def test_the_job_without_a_kill() -> None:
    run = run_with({})
    assert run.outcomes == {"none", "previous"}


@pytest.mark.parametrize(("codecs", "keep"), [(plain_codecs, 1), (plain_codecs, 2), (arrow_codecs, 2)])
@pytest.mark.parametrize("number", [0, 1])
def test_one_kill_at_every_store_call(number: int, codecs: Any, keep: int) -> None:
    """C1, W1, W16: claims, restores, flushes, snapshots and garbage collection, each call in each way."""
    n_calls = calls_of_each_life(keep=keep, codecs=codecs)[number]
    outcomes: set[str] = set()
    n = 0
    for kill in every_kill(n_calls):
        outcomes |= run_with({number: kill}, keep=keep, codecs=codecs).outcomes
        n += 1
    print(f"{n} kills over {n_calls} store calls of life {number}: restored to {sorted(outcomes)}")
    assert n == 3 * n_calls > 90 and {"previous", "new"} <= outcomes


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_during_a_snapshot_and_one_during_the_restore_after_it(keep: int) -> None:
    """Every pair: each call of the second snapshot of the first life, and of its restore, in each way."""

    run = Run(keep=keep)
    run.live(NO_KILL, first_life_but_its_last_snapshot)
    before, last = run.n_calls, calls_of_each_life(keep=keep)[0]
    n = 0
    for first in every_kill(last, before + 1):
        told = Run(keep=keep)
        told.live(first, first_life)
        untouched = told.copy()
        untouched.live(NO_KILL, lambda life: None)
        for second in every_kill(untouched.n_calls):
            run = told.copy()
            try:
                run.live(second, lambda life: None)
                run.live(NO_KILL, lambda life: life.dispatch())  # compares every prefix with the reference
                if n % 5 == 0:
                    run.finish()
            except BaseException as error:
                error.add_note(f"kills {first} in the snapshot, {second} in the restore; keep {keep}")
                raise
            n += 1
    print(f"{n} pairs: {last - before} calls of the snapshot, each with every call of the restore after it")
    assert n > 1000


def test_two_kills_anywhere() -> None:
    """Pairs over the whole job: a sample, or all of them with KILL_PAIRS=0."""
    wanted, seed = int(os.environ.get("KILL_PAIRS", "300")), int(os.environ.get("KILL_SEED", "20240607"))
    chance = random.Random(seed)
    n_first, n_second = calls_of_each_life()
    pairs: Iterator[tuple[Kill, Kill]]
    if wanted:
        ways = list(WAYS)
        pairs = iter(
            [
                ((chance.randint(1, n_first), chance.choice(ways)), (chance.randint(1, n_second), chance.choice(ways)))
                for _ in range(wanted)
            ]
        )
    else:
        pairs = ((one, two) for one in every_kill(n_first) for two in every_kill(n_second))
    n = 0
    for first, second in pairs:
        run_with({0: first, 1: second}, keep=1 + n % 2)
        n += 1
    print(f"{n} pairs of kills, KILL_SEED={seed}")
