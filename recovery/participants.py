"""Whose states go into a snapshot beside the calls.

Owns: the participants of one process, and the states that nobody here has taken up yet.
Does not know: what a state means, when a snapshot is taken, how one participant is called (asking.py).

Two kinds join: those that never wait are called on the event loop, in the very step of the hold (`add`); those that may
are asked in threads of their own before anybody is held up (`join`).

Invariants:
1. Who was held is released, whoever refused; releasing who is not held is harmless.
2. A restored state stays in every snapshot until a participant that owns its name is there; from then on only that
   participant's word counts, also when it leaves the name out.
3. No two participants give a state of one name. Who joins again is one, not two: it takes its state up once.
4. All are asked at the same time, and nobody waits for a participant but the snapshot that asked: not a call, not a
   lease, no other participant once one has failed.
5. A state that was given is in that snapshot or in none; one that did not come costs the attempt.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping

from recovery.asking import Asked, Faults, words_of
from recovery.blobs import packed, unpacked
from recovery.errors import InputError, ParticipantFailed, ProgramError, RecoveryError, SnapshotAbandoned
from recovery.membership import State
from recovery.ports import Clock, LoopParticipant, Participant

PREFIX = "participant-"
"""Of the name of the state of one that joined."""

_NAME = re.compile(r"[a-z0-9._-]{1,64}")


class Participants:
    """`carried`: the states that a restore brought back; `rewound`: it was asked for an older snapshot by its id."""

    def __init__(self, carried: Mapping[str, bytes], clock: Clock, *, rewound: bool = False) -> None:
        self._carried = dict(carried)
        self._clock = clock
        self._rewound = rewound
        self._all: list[LoopParticipant] = []
        self._changed = threading.Condition()
        self._joined: dict[str, Asked] = {}
        self._left: list[Asked] = []
        """Those that have left, or never came to be there, and may still be in a method."""
        self._given: frozenset[str] = frozenset()

    # ---- those that may wait: from any thread but the loop's ---------------------------------------------------

    def join(self, one: Participant, timeout_s: float, *, running: bool = False) -> None:
        """Have it take up its state, if there is one; from the next snapshot on it is asked for it. Blocks.

        Args:
            one: see the port.
            timeout_s: for each of its methods.
            running: it has a state of its own by now (a coordinator of other processes has taken another's place), and
                takes none up. Until it has given it, what the store has of it stays in every snapshot.

        One that has joined and joins again (the answer to its first try may have been lost) is there as it was, and is
        handed nothing.

        Raises InputError for a name, a time or an object that cannot be used, Damaged for a stored state that does not
        match its digest, and ParticipantFailed if it did not take its state up in time; the state then stays in every
        snapshot.
        """
        name = PREFIX + one.name
        if not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise InputError(
                f"the participant {one.name!r:.80} is given {timeout_s!r} s for a method",
                hint="give it a number of seconds above 0",
            )
        with self._changed:
            self._left = [left for left in self._left if left.under_way]
            for left in self._left:
                if left.is_of(one):
                    raise InputError(
                        f"the participant {one.name!r:.80} is none here, and still in {left.under_way}",
                        hint="let it return first, or join with another object",
                    )
            there = self._joined.get(name)
            if not _NAME.fullmatch(one.name) or (there is not None and not there.is_of(one)):
                why = "is not 1 to 64 of a-z 0-9 . _ -" if there is None else "is taken"
                raise InputError(f"the participant's name {one.name!r:.80} {why}", hint="give it another name")
            asked = self._begun(one, name, timeout_s, running) if there is None else there
        raised = asked.restored()
        if raised is None:
            return
        with self._changed:
            if self._joined.get(name) is asked:  # of its tries, the first that is told
                del self._joined[name]
                self._left.append(asked)
        raise ParticipantFailed(
            f"participant {one.name!r} did not take up its state: {words_of(raised)}",
            hint="mend it and run again; what the store has of it stays in every snapshot",
        ) from raised

    def _begun(self, one: Participant, name: str, timeout_s: float, running: bool) -> Asked:
        """It has joined, and is taking up its state if there is one."""
        carried = None if running else self._carried.get(name)
        state = None if carried is None else unpacked(carried, name)
        asked = Asked(one, timeout_s, self._clock, self._changed, restores=state is not None)
        self._joined[name] = asked
        if state is not None:
            asked.restore(state, self._rewound)
        return asked

    def leave(self, name: str) -> None:
        """It has ended: from the next snapshot on nothing of it is kept. Harmless for one that is not there."""
        with self._changed:
            self._carried.pop(PREFIX + name, None)
            asked = self._joined.pop(PREFIX + name, None)
            if asked is not None:
                asked.leave()
                self._left.append(asked)

    @property
    def faults(self) -> dict[str, Faults]:
        """What went wrong with each that joined, by its name."""
        with self._changed:
            return {asked.name: asked.faults for asked in self._joined.values()}

    def ask(self, timeout_s: float) -> dict[str, bytes]:
        """The states of all that joined, by name. Raises SnapshotAbandoned, naming the first that gave none."""
        deadline = self._clock.monotonic() + timeout_s
        with self._changed:
            self._given = frozenset()
            # One whose restore is under way has a carried state, and that still counts (invariant 2).
            asked = {name: one for name, one in self._joined.items() if one.state is not State.RESTORING}
        refused = [error for one in asked.values() if (error := one.ask(deadline)) is not None]
        if refused:
            raise refused[0]
        with self._changed:
            while True:
                answers = {name: one.answer(deadline) for name, one in asked.items()}
                failed = [error for error in answers.values() if isinstance(error, SnapshotAbandoned)]
                if failed:
                    raise failed[0]
                waits = [min(one.due, deadline) for one in asked.values() if one.state is State.PREPARING]
                if not waits:
                    break
                self._changed.wait(max(0.0, min(waits) - self._clock.monotonic()))
            found = {name: state for name, state in answers.items() if isinstance(state, bytes)}
            self._given = frozenset(found)
        return {name: packed(state) for name, state in found.items()}

    def tell(self, published: bool) -> None:
        """How the snapshot ended; returns at once."""
        with self._changed:
            joined = list(self._joined.values())
            if published:
                for name in self._given:
                    self._carried.pop(name, None)
            self._given = frozenset()
        for asked in joined:
            asked.tell(published)

    # ---- those that never wait: on the event loop --------------------------------------------------------------

    def add(self, one: LoopParticipant) -> None:
        """From the next snapshot on its states are part of each.

        Raises InputError if one of that name is there, or what `attach` raises; nothing is changed then.
        """
        if any(other.name == one.name for other in self._all):
            raise InputError(
                f"a participant {one.name!r} is part of these snapshots already",
                hint="one session has one of each: open a session (and a store) for the other",
            )
        one.attach({name: data for name, data in self._carried.items() if one.owns(name)})
        self._all.append(one)

    @property
    def has_news(self) -> bool:
        """Whether the state of one of them may be another than in the newest snapshot. From any thread."""
        return any(one.has_news for one in self._all)

    def hold(self, reason: str) -> None:
        """Everybody stands still, as far as its state goes. Raises what the first one raised that cannot."""
        for one in self._all:
            one.hold(reason)

    def states(self) -> dict[str, bytes]:
        """Of this moment, without those that `ask` gave. Raises what a participant raises that has none now."""
        with self._changed:
            carried, given = dict(self._carried), self._given
        found = {
            name: data
            for name, data in carried.items()
            if name not in given and not any(one.owns(name) for one in self._all)
        }
        for one in self._all:
            for name, data in one.states().items():
                if name in found or name.startswith(PREFIX) or not one.owns(name):
                    raise ProgramError(
                        f"two participants give the state {name!r}", hint="this is a bug; please report it"
                    )
                found[name] = data
        return found

    def resume(self, published: bool) -> None:
        """How the snapshot ended."""
        for one in self._all:
            one.resume(published)

    def release(self) -> None:
        for one in self._all:
            one.release()

    def stopped(self, error: RecoveryError) -> None:
        """This process must not go on."""
        for one in self._all:
            one.stopped(error)
