"""What a place for stores really does, found out with scratch objects that are removed again.

Owns: the scratch keys, the questions asked with them, and their removal.
Does not know: what the answers mean for a person (doctor.py), which storage system it is.

Invariants:
1. Only keys under `probe/<random>/` are written: foreign to every store, whatever runs in it meanwhile.
2. However it ends, what was written is removed; what could not be is named.
3. The five verbs are asked through the store itself, as a job uses them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from recovery.errors import CredentialsRefused, ObjectMissing, RecoveryError, Retry
from recovery.ports import ObjectStore, Put

RACERS, RACES = 8, 3
SMALL_NBYTES, N_SMALL, AT_ONCE = 4096, 20, 8


@dataclass(frozen=True, slots=True)
class Answer:
    """One question: whether the place does what the format asks (docs/format.md, section 2), and what it did."""

    check: str
    fine: bool
    message: str


@dataclass(frozen=True, slots=True)
class Puts:
    """Speed of small creates."""

    nbytes: int
    n: int
    median_s: float
    slowest_s: float
    at_once: int
    per_second: float


class Scratch:
    """A run of questions. `left`: keys that could not be removed, after `remove`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.prefix = f"probe/{secrets.token_hex(8)}/"
        self._written: set[str] = set()
        self.left: list[str] = []

    def key(self, name: str) -> str:
        key = self.prefix + name
        self._written.add(key)
        return key

    def create(self, name: str, data: bytes) -> Put:
        return self._store.put_new(self.key(name), data)

    def remove(self) -> None:
        for key in sorted(self._written):
            try:
                self._store.delete(key)
            except RecoveryError:
                self.left.append(key)

    # ---- questions ---------------------------------------------------------------------------------------------

    def guarantees(self) -> list[Answer]:
        """Raises CredentialsRefused and Retry: then nothing was learned."""
        return [
            self._asked("create", self._create_twice),
            self._asked("race", self._race),
            self._asked("overwrite", self._overwrite),
            self._asked("range", self._range),
            self._asked("list-after-write", self._list),
            self._asked("delete", self._delete),
        ]

    def _asked(self, check: str, question: Callable[[], tuple[bool, str]]) -> Answer:
        try:
            fine, message = question()
        except (CredentialsRefused, Retry):
            raise
        except RecoveryError as error:
            fine, message = False, error.message
        return Answer(check, fine, message)

    def _create_twice(self) -> tuple[bool, str]:
        first, second = self.create("twice", b"first"), self.create("twice", b"second")
        kept = self._store.get(self.key("twice")) == b"first"
        if (first, second, kept) == (Put.CREATED, Put.EXISTS, True):
            return True, "the second of two creates of one key is refused"
        fate = "kept" if kept else "lost"
        return False, f"the second of two creates of one key was told {second.value!r}, and the first is {fate}"

    def _race(self) -> tuple[bool, str]:
        for race in range(RACES):
            with ThreadPoolExecutor(RACERS) as pool:
                outcomes = list(pool.map(lambda i, r=race: self.create(f"race-{r}", b"%d" % i), range(RACERS)))
            winners = [i for i, outcome in enumerate(outcomes) if outcome is Put.CREATED]
            if len(winners) != 1:
                return False, f"{len(winners)} of {RACERS} racing creates of one key were told that they succeeded"
            if self._store.get(self.key(f"race-{race}")) != b"%d" % winners[0]:
                return False, "a create that was told that it succeeded left another's bytes"
        return True, f"of {RACERS} racing creates of one key exactly one succeeds ({RACES} races)"

    def _overwrite(self) -> tuple[bool, str]:
        key = self.key("hint")
        self._store.put(key, b"old")
        self._store.put(key, b"new")
        fine = self._store.get(key) == b"new"
        return fine, "a read after an overwrite sees it" if fine else "a read after an overwrite sees the old bytes"

    def _range(self) -> tuple[bool, str]:
        self.create("range", bytes(range(100)))
        fine = self._store.get(self.key("range"), 40, 60) == bytes(range(40, 60))
        return fine, "a range of an object can be read" if fine else "a read of a range gives other bytes"

    def _list(self) -> tuple[bool, str]:
        self.create("listed", b"")
        listed = {item.key for item in self._store.list(self.prefix)}
        missing = len(self._written - listed)
        return not missing, "a list after a write sees it" if not missing else f"{missing} new objects are not listed"

    def _delete(self) -> tuple[bool, str]:
        key = self.key("deleted")
        self._store.put_new(key, b"x")
        self._store.delete(key)
        try:
            self._store.get(key)
        except ObjectMissing:
            return True, "what is deleted is gone"
        return False, "an object can be read after it was deleted"

    def small_puts(self, clock: Callable[[], float] = time.monotonic) -> Puts:
        """Creates one after the other, then several at once."""
        data, seconds = secrets.token_bytes(SMALL_NBYTES), []
        for number in range(N_SMALL):
            began = clock()
            self.create(f"small-{number}", data)
            seconds.append(clock() - began)
        began = clock()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda n: self.create(f"many-{n}", data), range(2 * N_SMALL)))
        rate = 2 * N_SMALL / max(1e-9, clock() - began)
        return Puts(SMALL_NBYTES, N_SMALL, round(median(seconds), 6), round(max(seconds), 6), AT_ONCE, round(rate, 1))
