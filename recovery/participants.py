"""Whose states go into a snapshot beside the calls.

Owns: the participants of one process, and the states that nobody here has taken up yet.
Does not know: what a state means, when a snapshot is taken. Everything here runs on the event loop, without a wait.

Invariants:
1. Who was held is released, whoever refused; releasing who is not held is harmless.
2. A restored state stays in every snapshot until a participant that owns its name is there; from then on only that
   participant's word counts, also when it leaves the name out.
3. No two participants give a state of one name.
"""

from __future__ import annotations

from collections.abc import Mapping

from recovery.errors import ProgramError
from recovery.ports import Participant


class Participants:
    """`carried`: the states that a restore brought back."""

    def __init__(self, carried: Mapping[str, bytes]) -> None:
        self._carried = dict(carried)
        self._all: list[Participant] = []

    def add(self, one: Participant) -> None:
        """From the next snapshot on its states are part of each. Raises what `attach` raises, with nothing changed."""
        one.attach({name: data for name, data in self._carried.items() if one.owns(name)})
        self._all.append(one)

    def hold(self, reason: str) -> None:
        """Everybody stands still, as far as its state goes. Raises what the first one raised that cannot."""
        for one in self._all:
            one.hold(reason)

    def states(self) -> dict[str, bytes]:
        """Of this moment. Raises what a participant raises that has none now."""
        found = {name: data for name, data in self._carried.items() if not any(one.owns(name) for one in self._all)}
        for one in self._all:
            for name, data in one.states().items():
                if name in found or not one.owns(name):
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
