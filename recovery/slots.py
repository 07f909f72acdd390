"""The log over a store, as its writer has it: claim an epoch, append, read back.

Owns: the only code that creates slots, and the position of this coordinator in the log.
Does not know: how a slot or the tail is found (log_reading.py), what a snapshot contains.

Invariants:
1. A slot is acknowledged only when it was seen to hold this writer's nonce (log.classify).
2. After `Fenced` this object never writes again.
3. An append whose outcome is unknown is settled, by reading, before the next append decides anything.
4. A slot of this coordinator's own epoch that is not the one being written is a guest's, or an earlier create of its
   own that landed late: it is followed, like any other slot. What a slot says is decided when everything before it is
   known (`append_if`).
5. With `single_writer` the place need not keep two writers apart. The own tail is then read before each append, so
   that a second writer who wrote over it is noticed; that is not prevented.
6. A guest (`join`) has no epoch of its own: it writes under the latest one, is never fenced, and fences nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from recovery import log
from recovery.codec import sha256_hex
from recovery.errors import (
    ConfigError,
    CredentialsRefused,
    Damaged,
    Fenced,
    ObjectMissing,
    OutcomeUnknown,
    RecoveryError,
    Retry,
)
from recovery.log import Outcome, Slot
from recovery.log_reading import Read, find_tail, read_slot, walk_back
from recovery.ports import Clock, Entropy, ObjectStore, Put

_CREATE_TRIES = 4


class SlotLog:
    """One coordinator's place in the log, from its claim on."""

    def __init__(
        self, store: ObjectStore, clock: Clock, entropy: Entropy, owner: str, *, single_writer: bool = False
    ) -> None:
        self._store = store
        self._clock = clock
        self._entropy = entropy
        self._owner = owner
        self._single_writer = single_writer
        self._tail = 0
        self._prev = log.GENESIS
        self._unsettled: Slot | None = None
        self._fenced: Fenced | None = None
        self._guest = False
        self.pins: list[str] = []
        """Keys in the pin slots that were followed."""
        self.epoch = 0

    @property
    def tail(self) -> int:
        return self._tail

    def claim(self, body: Mapping[str, Any] | None = None, *, follows: int | None = None) -> int:
        """Take the next epoch; every coordinator of a lower one is fenced from here on. Returns the epoch.

        With `follows` only right behind that slot: if the log has gone on, this one is Fenced, and nobody else.
        """
        self._tail = find_tail(self._store, trust_hint=False) if follows is None else follows
        while True:
            epoch, self._prev = self._last()
            outcome, found = self._create(self._slot("epoch", epoch + 1, body or {}))
            if outcome is Outcome.COMMITTED:
                self.epoch = epoch + 1
                return self.epoch
            if follows is not None:
                raise self._fence(found.slot)
            self._tail = found.slot.seq

    def join(self) -> None:
        """Take a place in the log beside whoever has claimed it. Raises Damaged if its end cannot be read."""
        self._guest = True
        self._tail = find_tail(self._store, trust_hint=False)
        read = read_slot(self._store, self._tail)
        if read is None:
            raise ObjectMissing("there is no log yet: no run has claimed this store", hint="start the job first")
        if read.slot.single_writer and not self._single_writer:
            raise ConfigError(
                "this store is written in single-writer mode: a second writer beside a job could overwrite its log",
                hint="keep a copy of the store instead",
            )
        self.epoch = read.slot.epoch
        self._advance(read)

    def _last(self) -> tuple[int, str]:
        """An epoch that no slot up to the tail exceeds, and the sum of the tail's bytes.

        A tail that cannot be read must not keep a job from going on. Each slot raises the epoch by one at most, which
        bounds the epochs of damaged slots above the last good one.
        """
        if not self._tail:
            return 0, log.GENESIS
        for read in walk_back(self._store, self._tail):
            if isinstance(read, Read):
                skipped = self._tail - read.slot.seq
                data = read.data if not skipped else self._tail_bytes()
                return read.slot.epoch + skipped, sha256_hex(data)
        return self._tail, sha256_hex(self._tail_bytes())

    def _tail_bytes(self) -> bytes:
        return self._store.get(log.slot_key(self._tail), 0, log.MAX_SLOT_BYTES + 1)

    def append(self, kind: str, body: Mapping[str, Any]) -> Slot:
        """Create the next slot. Returns it once it is known to be ours.

        Raises Fenced (stop for good) or OutcomeUnknown (call `settle`, or append again: it settles first).
        """
        slot = self.append_if(kind, lambda: body)
        assert slot is not None
        return slot

    def append_if(self, kind: str, body: Callable[[], Mapping[str, Any] | None]) -> Slot | None:
        """`append` with what `body` gives, asked anew whenever another slot came first; None from it gives up."""
        self._refuse_if_fenced()
        if self._unsettled is not None and self.settle() is not None:
            raise OutcomeUnknown(
                f"slot {self._tail} turned out to be published already",
                hint="take the next snapshot on top of it",
            )
        if self._single_writer:
            self._check_own_tail()
        while (says := body()) is not None:
            slot = self._slot(kind, self.epoch, says)
            outcome, found = self._create(slot)
            if outcome is Outcome.COMMITTED:
                return slot
            self._follow(found)
        return None

    def settle(self) -> Slot | None:
        """Learn what became of an append whose outcome was unknown: the slot if it is ours, else None.

        None is not final: a create that is still on its way may land later (invariant 4).
        """
        self._refuse_if_fenced()
        slot, self._unsettled = self._unsettled, None
        if slot is None:
            return None
        try:
            found = read_slot(self._store, slot.seq)
        except (Retry, CredentialsRefused):
            self._unsettled = slot
            raise
        if found is None:
            return None
        if log.classify(slot, found.slot) is Outcome.COMMITTED:
            self._advance(found)
            return slot
        self._follow(found)
        return None

    def check_not_fenced(self) -> None:
        """One cheap look at what follows our tail. Raises Fenced if a newer coordinator wrote there."""
        self._refuse_if_fenced()
        seq = self._tail + 1
        while (found := read_slot(self._store, seq)) is not None:
            if found.slot.epoch > self.epoch:
                raise self._fence(found.slot)
            seq += 1

    def _check_own_tail(self) -> None:
        found = read_slot(self._store, self._tail)
        if found is not None and sha256_hex(found.data) == self._prev:
            return
        if found is not None and found.slot.epoch > self.epoch:
            raise self._fence(found.slot)
        raise Damaged(
            f"log slot {self._tail} is not as this coordinator left it: in single-writer mode, something else writes",
            hint="end every other run on this store; then look: snapshot-inspect verify STORE",
        )

    def leave_hint(self) -> None:
        self._refuse_if_fenced()
        self._store.put(log.HINT_KEY, json.dumps({"tail": self._tail}).encode())

    def try_to_leave_hint(self) -> tuple[str, ...]:
        """Leave the hint, once what matters is published: not being able to is a note for people, no failure."""
        try:
            self.leave_hint()
        except RecoveryError as error:
            return (f"the hint was not written, and nothing depends on it: {error.message}",)
        return ()

    def _slot(self, kind: str, epoch: int, body: Mapping[str, Any]) -> Slot:
        return Slot(
            seq=self._tail + 1,
            epoch=epoch,
            kind=kind,
            nonce=self._entropy.hex(16),
            prev=self._prev,
            owner=self._owner,
            utc=round(self._clock.utc(), 3),
            body=body,
            single_writer=self._single_writer,
        )

    def _create(self, slot: Slot) -> tuple[Outcome, Read]:
        data = log.encode(slot)
        unknown: RecoveryError | None = None
        for _ in range(_CREATE_TRIES):
            try:
                put = self._store.put_new(log.slot_key(slot.seq), data)
                found = Read(slot, data) if put is Put.CREATED else read_slot(self._store, slot.seq)
            except Retry as error:
                unknown = error
                try:
                    found = read_slot(self._store, slot.seq)
                except (Retry, CredentialsRefused) as second:
                    unknown = second
                    continue
            except CredentialsRefused as error:
                if unknown is None:  # refused at once: nothing was written
                    raise
                unknown = error
                continue
            if found is None:
                continue
            outcome = log.classify(slot, found.slot)
            if outcome is Outcome.COMMITTED:
                self._advance(found)
            return outcome, found
        self._unsettled = slot if slot.kind != "epoch" else None
        raise OutcomeUnknown(
            f"could not learn whether log slot {slot.seq} was written: {unknown or 'it keeps vanishing'}",
            hint="the next attempt reads the slot before it decides anything",
        ) from unknown

    def _advance(self, read: Read) -> None:
        self._tail = read.slot.seq
        self._prev = sha256_hex(read.data)

    def _follow(self, found: Read) -> None:
        """Go on after a slot that is not the one we tried to create; raises Fenced if that is not allowed."""
        if self._guest:
            self.epoch = max(self.epoch, found.slot.epoch)
        if found.slot.epoch > self.epoch:
            raise self._fence(found.slot)
        if found.slot.epoch < self.epoch or found.slot.prev != self._prev:
            raise Damaged(
                f"log slot {found.slot.seq} (epoch {found.slot.epoch}) cannot follow slot {self._tail}, which this "
                f"coordinator of epoch {self.epoch} knows",
                hint="run: snapshot-inspect verify STORE",
            )
        self._advance(found)
        if found.slot.kind == "pin" and isinstance(key := found.slot.body.get("pin"), str):
            self.pins.append(key)

    def _refuse_if_fenced(self) -> None:
        if self._fenced is not None:
            raise self._fenced

    def _fence(self, winner: Slot) -> Fenced:
        self._fenced = Fenced(
            f"slot {winner.seq} was written by {winner.owner or 'another coordinator'} at epoch {winner.epoch}; "
            + (f"this coordinator holds epoch {self.epoch}" if self.epoch else "this one had not claimed it yet"),
            hint="another run took over this store; stop this one",
        )
        return self._fenced
