"""Stores that count, fail or refuse on purpose, around any store.

Owns: wrappers with the five verbs: CountingStore, FaultyStore, ReadOnlyStore.
Does not know: which store is inside, what is tested.

Invariants:
1. A wrapper changes nothing but what its name says: with a plan of PASS it is the inner store.
2. A fault before the call applies nothing; a fault after it applies all of it and loses the answer.
3. Safe in threads: each call takes exactly one step of the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from recovery.errors import CredentialsRefused
from recovery.ports import Listed, ObjectStore, Put

T = TypeVar("T")
Verb = Literal["put_new", "put", "get", "list", "delete"]
_Listing = list[Listed]


class Wrapped:
    """The five verbs of `inner`, each through `_call`."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    def _call(self, verb: Verb, key: str, apply: Callable[[], T]) -> T:
        return apply()

    def put_new(self, key: str, data: bytes) -> Put:
        return self._call("put_new", key, lambda: self.inner.put_new(key, data))

    def put(self, key: str, data: bytes) -> None:
        return self._call("put", key, lambda: self.inner.put(key, data))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._call("get", key, lambda: self.inner.get(key, start, end))

    def list(self, prefix: str, after: str = "") -> _Listing:
        return self._call("list", prefix, lambda: self.inner.list(prefix, after))

    def delete(self, key: str) -> None:
        return self._call("delete", key, lambda: self.inner.delete(key))


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a CountingStore saw. `nbytes`: given to a write, got from a read, else 0."""

    verb: Verb
    key: str
    nbytes: int


class CountingStore(Wrapped):
    """Keeps a log of every call, in the order in which the calls ended; a call that raised is in it too."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.log: list[Call] = []

    def count(self, *verbs: Verb) -> int:
        """How many calls of these verbs there were; of all verbs without an argument."""
        return sum(not verbs or call.verb in verbs for call in self.log)

    def nbytes(self, *verbs: Verb) -> int:
        """How many bytes went through these verbs."""
        return sum(call.nbytes for call in self.log if not verbs or call.verb in verbs)

    def put_new(self, key: str, data: bytes) -> Put:
        return self._logged("put_new", key, len(data), lambda: self.inner.put_new(key, data))

    def put(self, key: str, data: bytes) -> None:
        return self._logged("put", key, len(data), lambda: self.inner.put(key, data))

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = b""
        try:
            data = self.inner.get(key, start, end)
        finally:
            self.log.append(Call("get", key, len(data)))
        return data

    def _call(self, verb: Verb, key: str, apply: Callable[[], T]) -> T:
        return self._logged(verb, key, 0, apply)

    def _logged(self, verb: Verb, key: str, nbytes: int, apply: Callable[[], T]) -> T:
        try:
            return apply()
        finally:
            self.log.append(Call(verb, key, nbytes))


@dataclass(frozen=True, slots=True)
class Pass:
    """Let the call through."""


PASS = Pass()


@dataclass(frozen=True, slots=True)
class RaiseBefore:
    """Apply nothing, raise `error`."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class RaiseAfter:
    """Apply the call, throw its answer away, raise `error`."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Hang:
    """Wait until `event` is set, then let the call through. `entered` is set as soon as the call waits."""

    event: threading.Event
    entered: threading.Event | None = None


Step = Pass | RaiseBefore | RaiseAfter | Hang
Plan = Callable[[Verb, str], Step] | Iterable[Step]
"""Asked with verb and key of each call, or one step per call; when the steps run out, calls pass."""


class FaultyStore(Wrapped):
    """Fails as planned."""

    def __init__(self, inner: ObjectStore, plan: Plan) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._ask: Callable[[Verb, str], Step] = plan if callable(plan) else _one_by_one(iter(plan))

    def _call(self, verb: Verb, key: str, apply: Callable[[], T]) -> T:
        with self._lock:
            step = self._ask(verb, key)
        match step:
            case Pass():
                return apply()
            case RaiseBefore(error):
                raise error
            case RaiseAfter(error):
                apply()
                raise error
            case Hang(event, entered):
                if entered is not None:
                    entered.set()
                event.wait()
                return apply()


def _one_by_one(steps: Iterator[Step]) -> Callable[[Verb, str], Step]:
    return lambda verb, key: next(steps, PASS)


class ReadOnlyStore(Wrapped):
    """Reads pass, every write is refused."""

    def _call(self, verb: Verb, key: str, apply: Callable[[], T]) -> T:
        if verb in ("put_new", "put", "delete"):
            raise CredentialsRefused(
                f"{verb} of {key} is refused: this store may only be read", hint="use a store that may be written"
            )
        return apply()
