"""recovery.participants: agents and tools that hang, raise, are slow, give too much or die, and who waits for them.

Owns: that such a participant costs one snapshot attempt and nothing else, and is asked again when it can be.
Does not know: the engine. Nothing here asserts how long anything took: what hangs, hangs until the test lets it go.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recovery import asking
from recovery.blobs import packed, unpacked
from recovery.errors import Damaged, InputError, ParticipantFailed, SnapshotAbandoned
from recovery.log_reading import Read, find_tail, walk_back
from recovery.membership import State
from recovery.participants import PREFIX, Participants
from recovery.protocol import Verdict
from recovery.snapshots import Snapshot, load
from storage_backends.memory import MemoryStore
from tests.fake_engine import Life

PATIENCE_S = 120.0
"""For what must happen; nothing waits this long unless something is wrong."""

SHORT_S = 0.05
"""The deadline of a participant that hangs, and of nothing that has to be done in time."""


class Clock:
    monotonic, utc = staticmethod(time.monotonic), staticmethod(time.time)


class Agent:
    """Gives what it is told to, and remembers what it was told."""

    def __init__(self, name: str = "agent", state: Any = b"state") -> None:
        self.name = name
        self.state = state
        self.told: list[bool] = []
        self.restored: list[tuple[bytes, bool]] = []
        self.go_on = threading.Event()
        self.hangs = ""
        self.raises: dict[str, BaseException] = {}
        self.inside = threading.Event()

    def _maybe(self, method: str) -> None:
        if self.hangs == method:
            self.inside.set()
            assert self.go_on.wait(PATIENCE_S), f"nobody let {method} go"
        if method in self.raises:
            raise self.raises[method]

    def prepare(self) -> bytes:
        self._maybe("prepare")
        return self.state  # type: ignore[no-any-return]

    def commit(self, published: bool) -> None:
        self._maybe("commit")
        self.told.append(published)

    def restore(self, state: bytes, rewound: bool) -> None:
        self._maybe("restore")
        self.restored.append((state, rewound))


class World:
    """A job on the real core with participants."""

    def __init__(self, store: MemoryStore, number: int = 1) -> None:
        self.life = Life(store, number)
        self.parts = Participants(self.life.carried, Clock())
        self.life.coordinator._joined = self.parts
        self.life.fleet._states = {}  # type: ignore[attr-defined]
        self.life.fleet.prepare = lambda timeout_s: self.parts.states()  # type: ignore[method-assign]
        self.life.coordinator._clock = Clock()
        self.life.dispatch()

    def take(self) -> Any:
        self.life.decode(1)
        return self.life.snapshot()

    def has_time(self, name: str) -> None:
        """From its next method on."""
        self.parts._joined[PREFIX + name]._timeout_s = PATIENCE_S

    def is_due(self, name: str) -> None:
        """What it is in is overdue."""
        self.parts._joined[PREFIX + name].due = 0.0

    def stored(self) -> dict[str, bytes]:
        """The states of the newest snapshot, as a restart finds them."""
        store = self.life.store
        slots = (read.slot for read in walk_back(store, find_tail(store)) if isinstance(read, Read))
        newest = next(slot for slot in slots if slot.kind == "snapshot")
        states = load(store, self.life.ledgers, Snapshot.from_slot(newest)).states
        return {name[len(PREFIX) :]: unpacked(state, name) for name, state in states.items() if PREFIX in name}


@pytest.fixture
def world() -> Iterator[World]:
    made = World(MemoryStore())
    yield made
    made.life.close()


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    due = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < due, f"waited for {what}"
        time.sleep(0.001)


def idle(parts: Participants) -> bool:
    return all(one.state is State.IDLE for one in parts._joined.values())


def test_states_are_in_the_snapshot_and_come_back(world: World) -> None:
    """Bytes of any kind, digested; a restart hands them over, and until then they stay in every snapshot."""
    agent, tool = Agent("agent", bytes(range(256)) * 4), Agent("tool", b"")
    world.parts.join(agent, PATIENCE_S)
    world.parts.join(tool, PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    wait_for("both to be told", lambda: agent.told == tool.told == [True])
    world.life.close()
    later = World(world.life.store, 2)  # type: ignore[arg-type]
    assert later.take().verdict is Verdict.PUBLISHED
    later.life.close()
    last = World(world.life.store, 3)  # type: ignore[arg-type]
    again = Agent("agent", b"new")
    last.parts.join(again, PATIENCE_S)
    assert again.restored == [(bytes(range(256)) * 4, False)]
    assert last.take().verdict is Verdict.PUBLISHED
    assert last.stored() == {"agent": b"new", "tool": b""}
    last.life.close()


def test_a_participant_that_hangs_in_prepare_costs_one_attempt_and_nothing_else_waits(world: World) -> None:
    """Neither hold nor fence came up; the others are told, are asked again, and so is it once it came back."""
    hangs, other = Agent("hangs"), Agent("other")
    world.parts.join(other, PATIENCE_S)
    world.parts.join(hangs, SHORT_S)
    hangs.hangs = "prepare"
    first = world.take()
    assert first.verdict is Verdict.ABANDONED and "'hangs' did not prepare within" in str(first.error)
    assert first.step == "ask participants"
    assert world.life.fleet.calls == ["resume False", "release hold"], "nobody was held up"
    wait_for("the other to be told", lambda: other.told == [False])
    second = world.take()
    assert second.verdict is Verdict.ABANDONED and "is still in prepare" in str(second.error)
    assert world.parts.faults["hangs"].in_a_row == 2
    world.life.decode(3)
    world.life.flush()  # tokens are stored meanwhile
    assert hangs.told == []
    hangs.hangs = ""
    world.has_time("hangs")
    hangs.go_on.set()
    wait_for("what came too late to be told so", lambda: hangs.told == [False] and idle(world.parts))
    assert world.take().verdict is Verdict.PUBLISHED
    assert world.parts.faults["hangs"].error is None
    wait_for("both to be told", lambda: hangs.told == [False, True] and other.told[-1])


def test_decoding_admission_and_ends_go_on_while_a_participant_hangs(world: World) -> None:
    hangs = Agent("hangs")
    hangs.hangs = "prepare"
    world.parts.join(hangs, PATIENCE_S)
    taken: list[Any] = []
    world.life.decode(1)
    thread = threading.Thread(target=lambda: taken.append(world.life.coordinator.take("interval")))
    thread.start()
    assert hangs.inside.wait(PATIENCE_S)
    assert not world.life.fleet.held and not world.life.fleet.fenced, "no call waits for it"
    while world.life.live:
        world.life.decode(4)
        world.life.flush()
    hangs.go_on.set()
    thread.join(PATIENCE_S)
    assert taken[0].verdict is Verdict.PUBLISHED


def test_one_that_hangs_in_commit_has_no_influence_on_the_snapshot_and_fails_the_next_only_while_it_does(
    world: World,
) -> None:
    slow, other = Agent("slow"), Agent("other")
    world.parts.join(slow, PATIENCE_S)
    world.parts.join(other, PATIENCE_S)
    slow.hangs = "commit"
    assert world.take().verdict is Verdict.PUBLISHED
    assert slow.inside.wait(PATIENCE_S)
    world.is_due("slow")
    wait_for("the other to be told", lambda: other.told == [True])
    second = world.take()
    assert second.verdict is Verdict.ABANDONED and "'slow' is still in commit" in str(second.error)
    assert world.life.fleet.calls[-2:] == ["resume False", "release hold"]
    slow.hangs = ""
    slow.go_on.set()
    wait_for("it to come back", lambda: idle(world.parts))
    assert world.take().verdict is Verdict.PUBLISHED


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), SnapshotAbandoned("no")])
def test_one_that_raises_in_prepare(world: World, error: BaseException) -> None:
    bad, other = Agent("bad"), Agent("other")
    world.parts.join(bad, PATIENCE_S)
    world.parts.join(other, PATIENCE_S)
    bad.raises = {"prepare": error}
    attempt = world.take()
    assert attempt.verdict is Verdict.ABANDONED and "'bad' could not prepare" in str(attempt.error)
    assert type(error).__name__ in str(attempt.error)
    wait_for("the other to be told", lambda: other.told == [False])
    bad.raises = {}
    assert world.take().verdict is Verdict.PUBLISHED
    wait_for("who gave no state to be told of the second only", lambda: bad.told == [True])


def test_one_that_raises_costs_the_attempt_before_one_that_hangs_is_due(world: World) -> None:
    hangs, bad = Agent("hangs"), Agent("bad")
    hangs.hangs = "prepare"
    bad.raises = {"prepare": ValueError("no")}
    world.parts.join(hangs, 10 * PATIENCE_S)
    world.parts.join(bad, PATIENCE_S)
    attempt = world.take()
    assert "'bad' could not prepare" in str(attempt.error)
    hangs.go_on.set()
    wait_for("the one that was given up to be told", lambda: hangs.told == [False])


def test_one_that_raises_in_commit_is_counted_and_asked_again(world: World) -> None:
    bad = Agent("bad")
    bad.raises = {"commit": ValueError("no")}
    world.parts.join(bad, PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    wait_for("it to have raised", lambda: world.parts.faults["bad"].commits_raised == 1 and idle(world.parts))
    assert "ValueError('no')" in str(world.parts.faults["bad"].error)
    assert world.take().verdict is Verdict.PUBLISHED


def test_one_whose_restore_hangs_does_not_join_again_before_it_returns(world: World) -> None:
    world.parts.join(Agent("slow"), PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    world.life.close()
    later = World(world.life.store, 2)  # type: ignore[arg-type]
    slow = Agent("slow")
    slow.hangs = "restore"
    with pytest.raises(ParticipantFailed, match="TimeoutError"):
        later.parts.join(slow, 0.05)
    with pytest.raises(InputError, match="still in restore"):
        later.parts.join(slow, PATIENCE_S)
    slow.go_on.set()
    wait_for("its thread to have ended", lambda: not any(left.under_way for left in later.parts._left))
    later.parts.join(slow, PATIENCE_S)
    assert len(slow.restored) == 2
    later.life.close()


class Mislength(bytes):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (None, "gave NoneType for its state"),
        ("text", "gave str"),
        (b"12345", "state of 5 bytes; at"),
        (Mislength(b"12345"), "gave Mislength"),
    ],
)
def test_a_state_that_cannot_be_stored(world: World, state: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "BLOB_BYTES_MAX", 4)
    bad = Agent("bad", state)
    world.parts.join(bad, PATIENCE_S)
    attempt = world.take()
    assert attempt.verdict is Verdict.ABANDONED and problem in str(attempt.error)
    wait_for("it to be told", lambda: bad.told == [False] and idle(world.parts))
    bad.state = b"1234"
    assert world.take().verdict is Verdict.PUBLISHED


def test_the_largest_state_that_is_allowed_is_stored_and_comes_back(world: World) -> None:
    big = os.urandom(asking.BLOB_BYTES_MAX)
    world.parts.join(Agent("big", big), PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    assert world.stored() == {"big": big}


def test_one_that_is_slow_in_restore_is_not_there_and_its_state_stays(world: World) -> None:
    world.parts.join(Agent("slow", b"kept"), PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    world.life.close()
    later = World(world.life.store, 2)  # type: ignore[arg-type]
    slow = Agent("slow", b"never")
    slow.hangs = "restore"
    with pytest.raises(ParticipantFailed, match="'slow' did not take up its state: TimeoutError"):
        later.parts.join(slow, SHORT_S)
    assert later.take().verdict is Verdict.PUBLISHED
    slow.go_on.set()
    wait_for("it to come back", lambda: slow.restored == [(b"kept", False)])
    bad = Agent("slow")
    bad.raises = {"restore": RuntimeError("broken")}
    with pytest.raises(ParticipantFailed, match="broken"):
        later.parts.join(bad, PATIENCE_S)
    later.parts.join(good := Agent("slow", b"then"), PATIENCE_S)
    assert good.restored == [(b"kept", False)] and later.stored() == {"slow": b"kept"}
    assert later.take().verdict is Verdict.PUBLISHED and later.stored() == {"slow": b"then"}
    later.life.close()


def test_one_that_left_leaves_nothing_behind_whatever_it_is_doing(world: World) -> None:
    hangs, other = Agent("hangs"), Agent("other")
    world.parts.join(hangs, PATIENCE_S)
    world.parts.join(other, PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    hangs.hangs = "prepare"
    hangs.inside.clear()
    taken: list[Any] = []
    world.life.decode(1)
    thread = threading.Thread(target=lambda: taken.append(world.life.coordinator.take("interval")))
    thread.start()
    assert hangs.inside.wait(PATIENCE_S)
    world.parts.leave("hangs")
    thread.join(PATIENCE_S)
    assert taken[0].verdict is Verdict.PUBLISHED and world.stored() == {"other": b"state"}
    hangs.go_on.set()
    world.parts.leave("hangs")
    world.parts.leave("other")
    assert world.take().verdict is Verdict.PUBLISHED and world.stored() == {}
    wait_for(
        "both to be told what they gave a state for", lambda: hangs.told == [True] and other.told[:2] == [True] * 2
    )


def test_a_state_nobody_took_up_is_dropped_when_its_owner_has_ended(world: World) -> None:
    world.parts.join(Agent("ended"), PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    world.life.close()
    later = World(world.life.store, 2)  # type: ignore[arg-type]
    later.parts.leave("ended")
    assert later.take().verdict is Verdict.PUBLISHED and later.stored() == {}
    later.life.close()


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no words")


class LongWinded(Exception):
    def __repr__(self) -> str:
        return "x" * 10_000_000


@pytest.mark.parametrize("method", ["prepare", "commit"])
@pytest.mark.parametrize(
    ("error", "said"),
    [(Unspeakable(), "Unspeakable (its text cannot be made: ValueError)"), (LongWinded(), "x… (10000000 letters)")],
    ids=["unspeakable", "long"],
)
def test_what_is_raised_need_not_be_fit_to_print(world: World, method: str, error: Exception, said: str) -> None:
    """It is one fault of one participant: the session goes on, and the next snapshot asks it again."""
    bad = Agent("bad")
    world.parts.join(bad, PATIENCE_S)
    bad.raises = {method: error}
    assert world.take().verdict is (Verdict.ABANDONED if method == "prepare" else Verdict.PUBLISHED)
    wait_for("it to have raised", lambda: world.parts.faults["bad"].in_a_row == 1 and idle(world.parts))
    text = str(world.parts.faults["bad"].error)
    assert said in text and len(text) < 1000
    bad.raises = {}
    assert world.take().verdict is Verdict.PUBLISHED


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_is_none(world: World, timeout_s: float) -> None:
    for _ in range(2):  # and the name is not taken by it
        with pytest.raises(InputError, match=r"is given .* s for a method"):
            world.parts.join(Agent(), timeout_s)


def test_one_that_left_in_the_middle_of_a_method_does_not_join_again_before_it_returns(world: World) -> None:
    """Else two of its methods would be under way at once."""
    hangs = Agent("hangs")
    hangs.hangs = "commit"
    world.parts.join(hangs, PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    assert hangs.inside.wait(PATIENCE_S)
    world.parts.leave("hangs")
    with pytest.raises(InputError, match="still in commit"):
        world.parts.join(hangs, PATIENCE_S)
    world.parts.join(Agent("hangs"), PATIENCE_S)  # another object of this name is another matter
    world.parts.leave("hangs")
    hangs.go_on.set()
    wait_for("it to return", lambda: hangs.told == [True])
    wait_for("its thread to have ended", lambda: not any(left.under_way for left in world.parts._left))
    world.parts.join(hangs, PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED


@pytest.mark.parametrize("name", ["", "A", "a/b", "x" * 65, "é"])
def test_a_name_that_cannot_be_a_key(world: World, name: str) -> None:
    with pytest.raises(InputError, match="is not 1 to 64 of"):
        world.parts.join(Agent(name), PATIENCE_S)


def test_a_name_that_is_taken(world: World) -> None:
    world.parts.join(Agent(), PATIENCE_S)
    with pytest.raises(InputError, match="'agent' is taken"):
        world.parts.join(Agent(), PATIENCE_S)


DAMAGED = {
    "no json": b"x",
    "no object": b"[]",
    "a field missing": b'{"schema":1,"nbytes":1,"sha256":""}',
    "another schema": json.dumps({**json.loads(packed(b"a")), "schema": 2}).encode(),
    "another length": json.dumps({**json.loads(packed(b"a")), "nbytes": 2}).encode(),
    "another digest": json.dumps({**json.loads(packed(b"a")), "sha256": "0" * 64}).encode(),
    "another blob": json.dumps({**json.loads(packed(b"a")), "blob": "Yg=="}).encode(),
    "no base64": json.dumps({**json.loads(packed(b"a")), "blob": "Y*=="}).encode(),
    "no text": json.dumps({**json.loads(packed(b"a")), "blob": 7}).encode(),
}


@pytest.mark.parametrize("state", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_state_that_is_not_what_was_packed_is_not_handed_over(state: bytes) -> None:
    parts, agent = Participants({PREFIX + "agent": state}, Clock()), Agent()
    with pytest.raises(Damaged, match="participant-agent"):
        parts.join(agent, PATIENCE_S)
    assert agent.restored == [] and parts.states() == {PREFIX + "agent": state}


def test_an_older_snapshot_asked_for_by_its_id_is_said_to_be_one() -> None:
    parts, agent = Participants({PREFIX + "agent": packed(b"then")}, Clock(), rewound=True), Agent()
    parts.join(agent, PATIENCE_S)
    assert agent.restored == [(b"then", True)]


class Elsewhere:
    """A participant in a process of its own, which can be killed for good."""

    name = "elsewhere"
    PROGRAM = "import sys\nfor line in sys.stdin: print('{}', flush=True)"

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, what: str) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise ConnectionError("it has ended")
        return answer.encode()

    def prepare(self) -> bytes:
        return self._ask("prepare")

    def commit(self, published: bool) -> None:
        self._ask("commit")

    def restore(self, state: bytes, rewound: bool) -> None:
        self._ask("restore")


@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped, then killed"])
def test_a_participant_that_dies_costs_attempts_until_it_leaves(world: World, stopped: bool) -> None:
    one = Elsewhere()
    try:
        world.parts.join(one, PATIENCE_S)
        assert world.take().verdict is Verdict.PUBLISHED
        wait_for("it to be told", lambda: idle(world.parts))
        if stopped:
            one.process.send_signal(signal.SIGSTOP)
            world.parts.leave("elsewhere")
            world.parts.join(one, SHORT_S)
            attempt = world.take()
            assert attempt.verdict is Verdict.ABANDONED and "did not prepare" in str(attempt.error)
            world.has_time("elsewhere")
        one.process.kill()
        one.process.wait()
        wait_for("it to be known as dead", lambda: idle(world.parts))
        attempt = world.take()
        assert attempt.verdict is Verdict.ABANDONED and "'elsewhere' could not prepare" in str(attempt.error)
        world.parts.leave("elsewhere")
        assert world.take().verdict is Verdict.PUBLISHED and world.stored() == {}
    finally:
        one.process.kill()
        one.process.wait()


def test_one_that_joins_again_has_joined_once(world: World) -> None:
    """The answer to its first try was lost: asked again, it is handed nothing, and stays in every snapshot."""
    world.parts.join(agent := Agent("agent", b"first"), PATIENCE_S)
    world.parts.join(agent, PATIENCE_S)
    with pytest.raises(InputError, match="is taken"):
        world.parts.join(Agent("agent"), PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED and world.stored() == {"agent": b"first"}
    world.life.close()
    later = World(world.life.store, 2)  # type: ignore[arg-type]
    again = Agent("agent", b"then")
    again.hangs = "restore"
    threads = [threading.Thread(target=later.parts.join, args=(again, PATIENCE_S)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert again.inside.wait(PATIENCE_S)
    again.go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    later.parts.join(again, PATIENCE_S)
    assert again.restored == [(b"first", False)]
    assert later.take().verdict is Verdict.PUBLISHED and later.stored() == {"agent": b"then"}
    wait_for("it to be told once", lambda: again.told == [True] and idle(later.parts))
    later.life.close()


@pytest.mark.parametrize("timeout_s", [PATIENCE_S, SHORT_S])
def test_all_tries_of_one_that_does_not_take_its_state_up_are_told_so(world: World, timeout_s: float) -> None:
    world.parts.join(Agent("agent", b"kept"), PATIENCE_S)
    assert world.take().verdict is Verdict.PUBLISHED
    world.life.close()
    later = World(world.life.store, 2)  # type: ignore[arg-type]
    bad = Agent("agent")
    bad.hangs, bad.raises = "restore", {"restore": RuntimeError("broken")}
    told: list[str] = []

    def join() -> None:
        try:
            later.parts.join(bad, timeout_s)
        except (ParticipantFailed, InputError) as error:
            told.append(str(error))

    threads = [threading.Thread(target=join) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert bad.inside.wait(PATIENCE_S)
    if timeout_s == SHORT_S:  # nobody lets it go before all of them have given up
        wait_for("all to be told", lambda: len(told) == 3)
    bad.go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    # One that comes after the others were told, is told that it has not come back, or tries anew.
    assert len(told) == 3 and all("did not take up its state" in one or "still in restore" in one for one in told)
    assert not later.parts._joined and later.take().verdict is Verdict.PUBLISHED
    assert later.stored() == {"agent": b"kept"}
    later.life.close()
