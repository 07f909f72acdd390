"""vllm_hooks.trajectory on a real session and store: what is found again, what is not, and what each mode keeps.

Owns: matching by place, parent and prompt; divergence; modes; the single-turn agent; the mailbox at a restore.
Does not know: kills (tests/test_workplace_agent.py), vLLM.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from examples.agents.mailbox import AnotherAction, Mailbox, WentAnotherWay
from examples.agents.single_turn import ask
from recovery.config import CheckpointingConfig, GymConfig
from recovery.errors import InputError
from recovery.model import OPEN
from recovery.trajectories import Place
from tests import independent_reader
from tests.agent_lives import PATIENCE_S, TASK, TOKENS, Job, ModeName, TokenSource
from tests.fake_engine import next_token
from vllm_hooks.position import Position
from vllm_hooks.session import RecoverySession
from vllm_hooks.trajectory import Trajectory

MODES: list[ModeName] = ["turn", "prefix_recovery"]


async def nothing() -> None:
    """There is nobody else to wait for."""


class World:
    """One life with a session."""

    def __init__(self, folder: Path, mode: ModeName, restore: Any = "auto", flush: int = 1) -> None:
        gym = GymConfig(mode=mode, generation_chunk_flush_tokens=flush)
        store = str(folder / "store")
        config = CheckpointingConfig(enabled=True, store=store, gym=gym, snapshot_interval_s=3600.0, restore=restore)
        self.session = RecoverySession.open(config)
        self.cut_after: int | None = None
        self.tokens: list[str] = []
        self.source = TokenSource(self.session, self._step, mode, self._settled)

    def _step(self, what: str) -> None:
        self.tokens.append(what)

    async def _settled(self) -> None:
        await asyncio.sleep(0)
        while self.session.stager.busy or self.session.flushing._scheduled:
            await asyncio.sleep(0.0005)
        if self.cut_after is not None and len(self.tokens) >= self.cut_after:
            raise ConnectionAbortedError("the engine is gone")

    def trajectory(self, rollout: str = "r") -> Trajectory:
        return Trajectory(self.source, self.session, rollout)

    def calls(self) -> dict[tuple[str, int, int], tuple[int, bool]]:
        """Rollout, turn and model call of what the ledger has: number of tokens, and whether it has ended."""
        return {
            (e.identity.rollout, e.identity.turn, e.identity.model_call): (e.n_tokens, e.state != OPEN)
            for e in self.session.stored.entries()
        }


def live(world: World, work: Callable[[World], Awaitable[Any]], *, last: bool = True) -> Any:
    """`work` on a started session; without `last` the life ends without a snapshot, as with a kill."""

    async def run() -> Any:
        world.session.start()
        try:
            return await asyncio.wait_for(work(world), PATIENCE_S)
        finally:
            attempt = await world.session.stop(last_snapshot=last, timeout_s=PATIENCE_S)
            assert not last or attempt is not None

    return asyncio.run(run())


async def two_turns(world: World, first: tuple[int, ...] = TASK, second: tuple[int, ...] = (7,)) -> list[list[int]]:
    """A turn of two model calls, and one of one; the prompts of later ones hold the earlier answers."""
    trajectory, context, answers = world.trajectory(), list(first), []
    for number in range(3):
        if number == 2:
            trajectory.next_turn()
        output = await trajectory.generate(context, 4)
        answers.append(list(output.outputs[0].token_ids))
        context += [*answers[-1], *second]
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_the_same_agent_finds_its_answers_again(tmp_path: Path, mode: ModeName) -> None:
    first = live(World(tmp_path, mode), two_turns)
    again = World(tmp_path, mode)
    assert live(again, two_turns) == first and again.tokens == []
    assert again.session.counters.calls_diverged == 0
    assert again.calls() == {("r", 0, 0): (4, True), ("r", 0, 1): (4, True), ("r", 1, 0): (4, True)}


def test_the_ledger_and_a_reader_from_the_document_alone_see_the_lineage(tmp_path: Path) -> None:
    world = World(tmp_path, "prefix_recovery")
    live(world, two_turns)
    entries = {(e.identity.turn, e.identity.model_call): e for e in world.session.stored.entries()}
    assert entries[0, 0].identity.parent == bytes(16)
    assert entries[0, 1].identity.parent == entries[0, 0].call_id
    assert entries[1, 0].identity.parent == entries[0, 1].call_id
    found = independent_reader.read_store(tmp_path / "store")["snapshot"]
    assert [call["turn"] for call in found["calls"]] == [0, 0, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut_after", range(1, 12))
def test_an_unfinished_call_goes_on_or_begins_again_and_finished_ones_are_kept(
    tmp_path: Path, mode: ModeName, cut_after: int
) -> None:
    """Without a snapshot: what was flushed is adopted."""
    reference = live(World(tmp_path / "whole", mode), two_turns)
    cut = World(tmp_path / "cut", mode)
    cut.cut_after = cut_after
    with pytest.raises(ConnectionAbortedError):
        live(cut, two_turns, last=False)
    again = World(tmp_path / "cut", mode)
    finished, rest = divmod(cut_after, 4)
    if rest == 0:  # the last token was there, and the end of the call was not said
        finished, rest = finished - 1, 4
    assert live(again, two_turns) == reference
    kept = 0 if mode == "turn" else rest
    assert len(again.tokens) == 12 - 4 * finished - kept
    assert again.session.counters.calls_diverged == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_that_goes_another_way_gets_no_prefix_that_is_not_its_own(tmp_path: Path, mode: ModeName) -> None:
    """Its second call has another prompt: it begins afresh, and so does what followed from the first one's answer."""
    live(World(tmp_path, mode), two_turns)

    async def another_way(world: World) -> list[list[int]]:
        trajectory = world.trajectory()
        first = list((await trajectory.generate(TASK, 4)).outputs[0].token_ids)
        second = list((await trajectory.generate([*TASK, *first, 8], 4)).outputs[0].token_ids)
        return [first, second]

    again = World(tmp_path, mode)
    first, second = live(again, another_way)
    expected: list[int] = []
    while len(expected) < 4:
        expected.append(next_token([*TASK, *first, 8], expected))
    assert second == expected and len(again.tokens) == 4, "only the second call was generated"
    assert again.session.counters.calls_diverged == 1
    assert again.calls() == {("r", 0, 0): (4, True), ("r", 0, 1): (4, True)}, "the third call was another agent's"
    back = World(tmp_path, mode)
    live(back, two_turns)
    assert back.session.counters.calls_diverged == 1 and len(back.tokens) == 8


def test_one_that_goes_another_way_and_comes_back_in_one_life(tmp_path: Path) -> None:
    """A call that was given up and is asked for again before a snapshot is not dropped by the next one."""
    reference = live(World(tmp_path, "prefix_recovery"), two_turns)

    async def there_and_back(world: World) -> Any:
        await world.trajectory().generate((1, 2), 4)
        return await two_turns(world)

    world = World(tmp_path, "prefix_recovery")
    assert live(world, there_and_back) == reference
    assert world.session.counters.calls_diverged == 2
    last = World(tmp_path, "prefix_recovery")
    assert live(last, two_turns) == reference and last.tokens == [] and len(last.calls()) == 3


def test_two_requests_at_one_place_at_the_same_time_are_refused(tmp_path: Path) -> None:
    async def both(world: World) -> None:
        first = world.source.generate(TASK, 4, "r", position=Position("r", Place(0, 0)))
        admitted = asyncio.ensure_future(anext(first))
        while not world.tokens:
            await asyncio.sleep(0)
        with pytest.raises(InputError, match="another request of rollout 'r' is running at turn 0, model call 0"):
            await world.trajectory().generate((1, 2), 4)
        await admitted
        await first.aclose()

    live(World(tmp_path, "prefix_recovery"), both)


def test_a_rollout_that_has_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    live(World(tmp_path, "prefix_recovery"), two_turns)

    async def end(world: World) -> None:
        await ask(world.source, world.session, "other", TASK, 4, len)
        world.session.rollout_ended("r")

    world = World(tmp_path, "prefix_recovery")
    live(world, end)
    assert set(world.calls()) == {("other", 0, 0)}


@pytest.mark.parametrize("flush", [0, 1])
def test_an_answer_is_in_the_store_before_the_agent_has_it(tmp_path: Path, flush: int) -> None:
    """Also where flushes are at cuts only: a tool would act on an answer that a crash takes."""

    async def one(world: World) -> Any:
        answer, reward = await ask(world.source, world.session, "r", TASK, 4, lambda answer: sum(answer) / 2)
        shutil.copytree(tmp_path / "store", tmp_path / "copy" / "store")
        return answer, reward

    answer, reward = live(World(tmp_path, "prefix_recovery", flush=flush), one, last=False)
    assert reward == sum(answer) / 2
    copy = World(tmp_path / "copy", "prefix_recovery")
    assert copy.session.restored is not None and copy.calls() == {("r", 0, 0): (4, True)}
    copy.session.stager.close(wait=True)


def test_modes_of_one_store_may_change(tmp_path: Path) -> None:
    cut = World(tmp_path, "prefix_recovery")
    cut.cut_after = 6
    with pytest.raises(ConnectionAbortedError):
        live(cut, two_turns)
    turn = World(tmp_path, "turn")
    live(turn, two_turns)
    assert len(turn.tokens) == 8
    (entry,) = [e for e in turn.session.stored.entries() if e.identity.model_call == 1]
    assert [event.at for event in entry.history] == [2]  # restarted, and 2 tokens thrown away
    again = World(tmp_path, "prefix_recovery")
    live(again, two_turns)
    assert again.tokens == []


# ---- the mailbox at a restore ------------------------------------------------------------------------------------


def acted(path: Path, keys: str) -> Mailbox:
    path.parent.mkdir(exist_ok=True)
    box = Mailbox(path)
    for key in keys:
        box.do(key, "send", {"sender": key, "text": "t"})
    return box


def state_of(box: Mailbox) -> bytes:
    state = box.prepare()
    box.commit(True)
    return state


@pytest.mark.parametrize(
    ("there", "saved", "rewound", "after"),
    [
        ("ab", "ab", False, "ab"),
        ("abc", "ab", False, "abc"),  # ahead: what it did is asked for again
        ("abc", "ab", True, "ab"),  # an older snapshot by its id: undone
        ("a", "ab", False, "ab"),  # a disk that is behind
        ("", "ab", False, "ab"),  # a new disk
        ("ac", "ab", True, "ab"),
        ("ac", "ab", False, None),  # another way: nothing is touched
        ("abc", "", False, "abc"),
    ],
)
def test_a_mailbox_that_is_ahead_behind_or_elsewhere(
    tmp_path: Path, there: str, saved: str, rewound: bool, after: str | None
) -> None:
    box, state = acted(tmp_path / "a" / "box", there), state_of(acted(tmp_path / "b" / "box", saved))
    if after is None:
        with pytest.raises(WentAnotherWay):
            box.restore(state, rewound)
    else:
        box.restore(state, rewound)
    assert "".join(row[1] for row in box.contents()["log"]) == (there if after is None else after)
    assert [row[2] for row in box.contents()["messages"]] == [row[1] for row in box.contents()["log"]]


def test_an_action_is_done_once_for_its_key(tmp_path: Path) -> None:
    box = acted(tmp_path / "box", "a")
    before = box.contents()
    assert box.do("a", "send", {"sender": "a", "text": "t"}) == 1 and box.contents() == before
    with pytest.raises(AnotherAction, match="a: send"):
        box.do("a", "send", {"sender": "b", "text": "t"})
    with pytest.raises(AnotherAction, match="a: move"):
        box.do("a", "move", {"number": 1, "folder": "x"})
    assert box.contents() == before


def test_an_older_snapshot_by_its_id_takes_the_mailbox_back(tmp_path: Path) -> None:
    """The agent does what came after it again, and ends where it ended before."""
    job = Job(tmp_path, "prefix_recovery")
    reference = job.outcome(job.live())
    older = Job(tmp_path, "prefix_recovery", restore=3)  # the first one after a turn
    assert older.outcome(older.live()) == reference
    assert older.generated == job.generated - TOKENS
    assert [step for step in older.steps.seen if step.startswith("committed r/1")], "done again, on a mailbox put back"


def test_b6_an_agent_that_rewrote_its_context_is_told_when_it_asks_for_the_whole(tmp_path: Path) -> None:
    """B6: its calls are as ever. After the rewritten one everything goes on from there, and is no whole either."""

    async def rewriting(world: World) -> None:
        trajectory = world.trajectory()
        with pytest.raises(InputError, match="without a model call"):
            await trajectory.tokens()
        answer = list((await trajectory.generate([5, 6], 4)).outputs[0].token_ids)
        assert (await trajectory.tokens()).token_ids.tolist() == answer
        await trajectory.generate([5, *answer], 4)
        with pytest.raises(InputError, match="they part at position 1"):
            await trajectory.tokens()

    live(World(tmp_path, "prefix_recovery"), rewriting)


def test_b6_calls_before_a_restored_state_come_from_the_store(tmp_path: Path) -> None:
    """B6: the mask is as long as the tokens, whichever of the calls this process made; forgotten ones are named."""
    states: list[dict[str, Any]] = []
    wholes: list[Any] = []

    async def first(world: World) -> None:
        trajectory, context = world.trajectory(), [*TASK]
        for number in range(3):
            states.append(trajectory.state())
            context += list((await trajectory.generate(context, 4)).outputs[0].token_ids)
            wholes.append(await trajectory.tokens())
            context += [7, 8, number]
        states.append(trajectory.state())

    async def second(world: World) -> None:
        for n_before, state in enumerate(states):
            trajectory, context = world.trajectory(), [*TASK]
            trajectory.restore(state)
            for number, made in enumerate(wholes):
                if number >= n_before:
                    await trajectory.generate([*made.context[:-4]], 4)
                context = [*made.context]
            found = await trajectory.tokens()
            assert found.context.tolist() == context
            assert found.loss_mask.tolist() == [True] * 4 + ([False] * 3 + [True] * 4) * 2
            assert found.logprobs.tolist() == wholes[-1].logprobs.tolist()
            assert found.version_spans == wholes[-1].version_spans
        world.session.rollout_ended("r")

    async def third(world: World) -> None:
        trajectory = world.trajectory()
        trajectory.restore(states[-1])
        with pytest.raises(InputError, match="the store has no call"):
            await trajectory.tokens()

    for one in (first, second, third):
        live(World(tmp_path, "prefix_recovery"), one)
