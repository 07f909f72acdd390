"""One participant made of shards, each of which has an owner that may be replaced at any moment.

Owns: asking the owners of one cut at the same time, and putting what they say together.
Does not know: where owners live, what a state means. Whose word counts is decided in shards.py.

Invariants:
1. `prepare` gives the states of one cut, each from the owner that the shard had when it was merged, or raises.
2. An owner that hangs is waited for only until the shard is taken over, or the participant's own deadline.
3. A new owner begins with the newest state of its shard that was part of a snapshot.
4. Every owner whose state counted is told what became of it. One that was replaced is told nothing more.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable
from typing import Protocol

from recovery.blobs import SCHEMA, object_of
from recovery.codec import canonical_json
from recovery.errors import Damaged, InputError, SnapshotAbandoned
from recovery.shards import Missing, Receipt, Shards

_OWN = "look what is damaged: snapshot-inspect verify; an older snapshot may be asked for by its id"


class Owner(Protocol):
    """Who has a shard. Called in threads of their own; from `prepare` to `commit` it stands still."""

    def prepare(self, cut: int) -> bytes: ...

    def commit(self, published: bool) -> None: ...

    def restore(self, state: bytes, rewound: bool) -> None: ...


class Sharded:
    """recovery.ports.Participant."""

    def __init__(self, name: str, shards: Iterable[str]) -> None:
        self.name = name
        self._names = tuple(shards)
        self._changed = threading.Condition()
        self._shards = Shards(self._names)
        self._owners: dict[str, tuple[int, Owner]] = {}
        self._asked: set[tuple[int, str, int]] = set()
        self._failed: dict[tuple[str, int], BaseException] = {}
        self._merged: dict[str, Receipt] = {}
        self._states: dict[str, bytes] = {}
        self._rewound = False

    def take(self, shard: str, owner: Owner) -> int:
        """`owner` has the shard from here on, and has taken its state up. Returns its epoch."""
        with self._changed:
            state, rewound = self._states.get(shard), self._rewound
        if state is not None:
            owner.restore(state, rewound)
        with self._changed:
            epoch = self._shards.claim(shard)
            self._owners[shard] = (epoch, owner)
            self._changed.notify_all()
            return epoch

    def prepare(self) -> bytes:
        """Raises SnapshotAbandoned for a shard without an owner, and what an owner raises that was not replaced."""
        with self._changed:
            cut = self._shards.begin()
            self._failed.clear()
        try:
            return self._prepared(cut)
        except BaseException:
            with self._changed:
                given = [self._owners[shard][1] for shard in self._shards.abandon()]
            for owner in given:
                owner.commit(False)
            raise

    def _prepared(self, cut: int) -> bytes:
        with self._changed:
            while (missing := self._shards.missing()) is not None:
                self._ask(cut, missing)
                self._changed.wait()
            merged = self._shards.merge()
            assert not isinstance(merged, Missing)
            self._merged = merged
            states = {name: base64.b64encode(one.state).decode("ascii") for name, one in merged.items()}
            return canonical_json({"schema": SCHEMA, "epochs": self._shards.epochs, "states": states})

    def _ask(self, cut: int, missing: Missing) -> None:
        for shard, epoch in missing.shards.items():
            if (error := self._failed.get((shard, epoch))) is not None:
                raise SnapshotAbandoned(
                    f"owner {epoch} of shard {shard!r} of {self.name!r} could not prepare: {error!r}",
                    hint="mend it, or let another one take the shard over",
                ) from error
            if shard not in self._owners:
                raise SnapshotAbandoned(
                    f"shard {shard!r} of {self.name!r} has no owner", hint="let one take it: Sharded.take"
                )
            if (cut, shard, epoch) not in self._asked:
                self._asked.add((cut, shard, epoch))
                work = (cut, shard, epoch, self._owners[shard][1])
                threading.Thread(target=self._receive, args=work, name=f"{self.name} {shard}", daemon=True).start()

    def _receive(self, cut: int, shard: str, epoch: int, owner: Owner) -> None:
        state, raised = b"", None
        try:
            state = owner.prepare(cut)
        except BaseException as error:
            raised = error
        with self._changed:
            self._asked.discard((cut, shard, epoch))
            if raised is not None:
                self._failed[shard, epoch] = raised
                refused = True
            else:
                refused = self._shards.receive(Receipt(shard, epoch, cut, state)) is not None
            self._changed.notify_all()
        if raised is None and refused:
            owner.commit(False)

    def commit(self, published: bool) -> None:
        """Raises what the first owner raised; the others are told all the same."""
        with self._changed:
            merged, self._merged = self._merged, {}
            told = [self._owners[name][1] for name, one in merged.items() if self._owners[name][0] == one.epoch]
            if published:
                self._states.update({name: one.state for name, one in merged.items()})
                self._rewound = False
        errors: list[BaseException] = []
        for owner in told:
            try:
                owner.commit(published)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def restore(self, state: bytes, rewound: bool) -> None:
        """Raises InputError for a state of other shards, Damaged for what is none, FormatNotUnderstood for a newer one.

        Nothing is changed then.
        """
        found = object_of(state, self.name, _OWN)
        try:
            states = {name: base64.b64decode(text, validate=True) for name, text in found["states"].items()}
            epochs = {name: found["epochs"][name] for name in states}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Damaged(f"the state of {self.name!r} is malformed: {error!r:.200}", hint=_OWN) from error
        if not all(type(epoch) is int and epoch >= 0 for epoch in epochs.values()):
            raise Damaged(f"the state of {self.name!r} has epochs that are no counts: {epochs!r:.200}", hint=_OWN)
        if sorted(states) != sorted(self._names):
            raise InputError(
                f"{self.name!r} has the shards {sorted(self._names)}, the snapshot {sorted(states)}"[:500],
                hint="make it with the shards of the snapshot",
            )
        with self._changed:
            self._shards, self._states, self._rewound = Shards(self._names, epochs), states, rewound
