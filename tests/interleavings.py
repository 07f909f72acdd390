"""Several writers on one store, one store call at a time, in an order that the test decides.

Owns: the baton (an actor runs until its next store call and waits there), what may become of that call, and the walk
over every order.
Does not know: what the actors do. Nothing here depends on time: between two decisions exactly one thread runs.

An actor may use threads of its own, as long as only one of them at a time is in a store call (the stager does).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

from recovery.errors import OutcomeUnknown, StoreUnavailable
from recovery.ports import ObjectStore
from storage_backends.testing.faults import Verb, Wrapped
from storage_backends.testing.kills import Killed

T = TypeVar("T")


class Fate(Enum):
    """What becomes of the call at which an actor waits."""

    GO = "go"
    FAIL = "fail before it is applied"
    LOSE = "apply it and lose the answer"
    DELAY = "lose the answer, and apply it some time later"
    KILL_BEFORE = "kill the actor before it"
    KILL_AFTER = "kill the actor after it"


EVERY_VERB: frozenset[Verb] = frozenset({"put_new", "put", "get", "list", "delete"})


class Actor:
    """One writer: `work(store)` in a thread, stopped before it begins and at every store call (of `verbs`)."""

    def __init__(
        self,
        name: str,
        inner: ObjectStore,
        work: Callable[[ObjectStore], Any],
        verbs: frozenset[Verb] = EVERY_VERB,
    ) -> None:
        self.name = name
        self.at: tuple[Verb, str] | None = None
        self.done = False
        self.killed = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.delayed: list[Callable[[], Any]] = []
        """Calls on their way; the test makes them when it likes, also after the actor's end."""
        self._work = work
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._fates: queue.SimpleQueue[Fate] = queue.SimpleQueue()
        self._store = _Stopping(inner, self, verbs)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._arrived.get()

    def _run(self) -> None:
        try:
            if self._wait("list", "its beginning") is Fate.GO:
                self.result = self._work(self._store)
        except BaseException as error:
            self.error = error
        self.at, self.done = None, True
        self._arrived.put(None)

    def step(self, fate: Fate = Fate.GO) -> None:
        """Let the call go its way; returns when the actor stands at its next one, or is done."""
        assert self.at is not None and not self.done
        self._fates.put(fate)
        self._arrived.get()

    def finish(self) -> None:
        """Let it run on undisturbed."""
        while not self.done:
            self.step()

    def kill(self) -> None:
        """End it where it stands."""
        while not self.done:
            self.step(Fate.KILL_BEFORE)
        self._thread.join()

    def _wait(self, verb: Verb, key: str) -> Fate:
        if self.killed:
            raise Killed(f"{self.name} is dead")
        self.at = (verb, key)
        self._arrived.put(None)
        fate = self._fates.get()
        self.killed = fate in (Fate.KILL_BEFORE, Fate.KILL_AFTER)
        return fate


class _Stopping(Wrapped):
    def __init__(self, inner: ObjectStore, actor: Actor, verbs: frozenset[Verb]) -> None:
        super().__init__(inner)
        self._actor = actor
        self._verbs = verbs

    def _call(self, verb: Verb, key: str, apply: Callable[[], T]) -> T:
        if verb not in self._verbs and not self._actor.killed:
            return apply()
        match self._actor._wait(verb, key):
            case Fate.GO:
                return apply()
            case Fate.FAIL:
                raise StoreUnavailable(f"{verb} of {key} failed")
            case Fate.LOSE:
                apply()
                raise OutcomeUnknown(f"the answer to {verb} of {key} was lost")
            case Fate.DELAY:
                self._actor.delayed.append(apply)
                raise OutcomeUnknown(f"no answer to {verb} of {key}")
            case Fate.KILL_BEFORE:
                raise Killed(f"before {verb} of {key}")
            case Fate.KILL_AFTER:
                apply()
                raise Killed(f"after {verb} of {key}")


class Choices:
    """One walk through a tree of decisions: follows a given path, then takes the first branch."""

    def __init__(self, path: list[int]) -> None:
        self._path = path
        self.taken: list[int] = []
        self.widths: list[int] = []

    def choose(self, n: int) -> int:
        """One of 0 … n - 1."""
        depth = len(self.taken)
        choice = self._path[depth] if depth < len(self._path) else 0
        self.taken.append(choice)
        self.widths.append(n)
        return choice


def every_walk() -> Iterator[Choices]:
    """A Choices for every path through the tree that the user of each spans by calling `choose`."""
    path: list[int] = []
    while True:
        choices = Choices(path)
        yield choices
        path = choices.taken
        while path and path[-1] + 1 == choices.widths[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1
