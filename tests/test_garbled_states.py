"""States that are handed back mangled: to a trajectory, to the workplace agent, to the mailbox, to shards.

Owns: that each says what is wrong with whose state and what to do, in an error of the tree, and is as it was then.
Does not know: how states get into a store; there their digest is checked first (recovery.blobs).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.agents.mailbox import Mailbox, WentAnotherWay
from examples.agents.workplace import Workplace
from recovery.errors import Damaged, FormatNotUnderstood, InputError, ParticipantFailed, RecoveryError
from recovery.participants import PREFIX, Participants
from recovery.sharded import Sharded
from vllm_hooks.trajectory import Trajectory

NOBODY: Any = None


class Clock:
    @staticmethod
    def monotonic() -> float:
        return 0.0

    utc = monotonic


def trajectory(rollout: str = "r") -> Trajectory:
    made = Trajectory(NOBODY, NOBODY, rollout)
    made.turn, made.model_call, made._parent = 2, 1, bytes(range(16))  # type: ignore[assignment]
    return made


GOOD = trajectory().state()


def test_its_own_state_takes_it_back() -> None:
    one = Trajectory(NOBODY, NOBODY, "r")
    one.restore(json.loads(json.dumps(GOOD)))
    assert one.state() == GOOD


MANGLED: list[tuple[Any, type[RecoveryError], str]] = [
    (None, Damaged, "'r' is no object"),
    ([], Damaged, "'r' is no object"),
    ({}, Damaged, "'r' is no object"),
    ("state", Damaged, "'r' is no object"),
    ({**GOOD, "schema": "1"}, Damaged, "'r' is no object with a `schema`"),
    ({**GOOD, "schema": True}, Damaged, "'r' is no object with a `schema`"),
    ({**GOOD, "schema": 2}, FormatNotUnderstood, "'r' has schema 2; this version reads 1"),
    ({**GOOD, "rollout": "s"}, InputError, "'r' was given the state of 's'"),
    ({**GOOD, "rollout": None}, InputError, "'r' was given the state of None"),
    ({**GOOD, "turn": -1}, Damaged, "malformed.*turn"),
    ({**GOOD, "turn": 1 << 40}, Damaged, "malformed.*turn"),
    ({**GOOD, "turn": "2"}, Damaged, "malformed.*turn"),
    ({**GOOD, "turn": True}, Damaged, "malformed.*turn"),
    ({**GOOD, "model_call": 1.5}, Damaged, "malformed.*model_call"),
    ({**GOOD, "parent": "00"}, Damaged, "malformed.*parent '00'"),
    ({**GOOD, "parent": "zz" * 16}, Damaged, "malformed"),
    ({**GOOD, "parent": 7}, Damaged, "malformed"),
    *(({name: GOOD[name] for name in GOOD if name != left}, RecoveryError, "'r'") for left in GOOD),
]


@pytest.mark.parametrize(("state", "kind", "why"), MANGLED, ids=[str(n) for n in range(len(MANGLED))])
def test_a_trajectory_says_what_is_wrong_and_stays_where_it_is(state: Any, kind: type[RecoveryError], why: str) -> None:
    one = trajectory()
    with pytest.raises(kind, match=why) as caught:
        one.restore(state)
    assert caught.value.hint and one.state() == GOOD and one._restored_at == bytes(16)


def agent(mailbox: Mailbox, rollout: str = "r") -> Workplace:
    return Workplace(NOBODY, NOBODY, rollout, (5, 9), mailbox, turns=2, params=3)


Parts = tuple[Workplace, Mailbox, Sharded]


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    mailbox = Mailbox(tmp_path / "mailbox.sqlite")
    mailbox.do("r/0/0", "send", {"sender": "a", "text": "b" * 5000})
    sharded = Sharded("envs", ["a", "b"])
    for shard in ("a", "b"):
        sharded.take(shard, Shard())
    one = agent(mailbox)
    one.trajectory.turn = 1
    one._state = one._state_now()
    return one, mailbox, sharded


class Shard:
    def prepare(self, cut: int) -> bytes:
        return b"state of a shard"

    def commit(self, published: bool) -> None:
        pass

    def restore(self, state: bytes, rewound: bool) -> None:
        pass


def given_by(one: Any) -> bytes:
    state: bytes = one.prepare()
    one.commit(False)
    return state


def refuses(one: Any, state: Any, now: Callable[[], Any]) -> None:
    """Raises one of ours with something to do, and nothing is changed; or it took it for what it is."""
    before = now()
    try:
        one.restore(state, False)
    except RecoveryError as error:
        assert error.hint and error.message
        assert now() == before
        if not isinstance(one, Sharded):  # whose shards wait for owners once another mangled state was a good one
            assert given_by(one)  # and it goes on


def test_truncated_anywhere_and_with_any_byte_changed_it_is_an_error_of_ours(parts: Parts) -> None:
    one, mailbox, sharded = parts
    now: list[Callable[[], Any]] = [
        lambda: (one.context, one.trajectory.state()), mailbox.contents, lambda: (sharded._states, sharded._rewound),
    ]  # fmt: skip
    for who, at in zip(parts, now, strict=True):
        state = given_by(who)
        step = max(1, len(state) // 150)
        before = at()
        for end in range(0, len(state), step):
            with pytest.raises(RecoveryError):
                who.restore(state[:end], False)
        assert at() == before
        for place in range(0, len(state), step):
            for byte in (0, 0xFF, state[place] ^ 1):
                refuses(who, state[:place] + bytes([byte]) + state[place + 1 :], at)


@settings(max_examples=60)
@given(state=st.one_of(st.binary(max_size=300), st.text().map(str.encode), st.just(b"[" * 100_000)))
def test_any_bytes_at_all(state: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    mailbox = Mailbox(tmp_path_factory.getbasetemp() / "any.sqlite")
    for who in (agent(mailbox), mailbox, Sharded("envs", ["a"])):
        with pytest.raises(RecoveryError) as caught:
            who.restore(state, False)
        assert who.name in caught.value.message and caught.value.hint
    assert mailbox.contents() == {"messages": [], "log": []}


def test_of_somebody_else(parts: Parts, tmp_path: Path) -> None:
    one, mailbox, sharded = parts
    with pytest.raises(InputError, match="'other' was given the state of 'r'"):
        agent(mailbox, "other").restore(given_by(one), False)
    other = Mailbox(tmp_path / "other.sqlite")
    other.do("r/0/0", "send", {"sender": "another", "text": "b"})
    with pytest.raises(WentAnotherWay, match=r"other.sqlite has 1 actions"):
        other.restore(given_by(mailbox), False)
    with pytest.raises(InputError, match="has the shards"):
        Sharded("envs", ["a"]).restore(given_by(sharded), False)
    with pytest.raises(Damaged, match="envs"):
        sharded.restore(given_by(mailbox), False)
    with pytest.raises(Damaged, match="mailbox is no mailbox"):
        mailbox.restore(given_by(sharded), False)
    with pytest.raises(FormatNotUnderstood, match=r"agent.r has schema 2"):
        one.restore(json.dumps({**json.loads(given_by(one)), "schema": 2}).encode(), False)


def test_a_damaged_copy_never_replaces_a_mailbox_that_is_behind(parts: Parts, tmp_path: Path) -> None:
    """Its log can be read, and its messages cannot: put back, it would be the only copy."""
    _, mailbox, _ = parts
    for number in range(40):
        mailbox.do(f"r/1/{number}", "send", {"sender": "a", "text": "c" * 900})
    state, refused = given_by(mailbox), 0
    for number, page in enumerate(range(4096, len(state), 4096)):
        fresh = Mailbox(tmp_path / f"fresh-{number}.sqlite")
        try:
            fresh.restore(state[:page] + b"\xff" * 4096 + state[page + 4096 :], False)
        except Damaged:
            refused += 1
            assert fresh.contents() == {"messages": [], "log": []}
        else:
            database = sqlite3.connect(tmp_path / f"fresh-{number}.sqlite")
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            database.close()
    assert refused > 5


def test_what_is_told_to_who_joins_says_what_to_do(parts: Parts) -> None:
    from recovery.blobs import packed

    one, _, _ = parts
    carried = {PREFIX + one.name: packed(b"{}")}
    with pytest.raises(
        ParticipantFailed, match=r"agent.r is no object with a `schema`.*begin without a state"
    ) as caught:
        Participants(carried, Clock()).join(one, 60.0)
    assert isinstance(caught.value.__cause__, Damaged)
