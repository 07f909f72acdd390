"""The seams: what the core asks of the outside, each as small as it can be.

Owns: the Protocols and the outcome values that cross them.
Does not know: any implementation.

Invariants:
1. Storage is synchronous, has five verbs, and takes and gives whole byte strings.
2. `put_new` is the only way anything that matters is written. It is atomic: a reader sees nothing or all of it.
3. EXISTS is an answer, not an error. A lost answer is `OutcomeUnknown` or `StoreUnavailable`, never EXISTS.
4. `put` is for the tail hint alone, which nobody trusts.
5. A key is a relative slash-separated path of [a-z0-9._-] components, none of them `.` or `..`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from recovery.errors import RecoveryError
from recovery.ledger_columns import LedgerRows, Names
from recovery.model import Array, Record, SegmentInfo
from recovery.records import Records


class Put(enum.Enum):
    """What a conditional create found."""

    CREATED = "created"
    EXISTS = "exists"


@dataclass(frozen=True, slots=True, order=True)
class Listed:
    """One listed object."""

    key: str
    nbytes: int


class ObjectStore(Protocol):
    """Five verbs over one root.

    Errors of every verb: StoreUnavailable, CredentialsRefused; of writes also StoreFull, OutcomeUnknown.
    """

    def put_new(self, key: str, data: bytes) -> Put:
        """Create `key` with `data` if it does not exist; durable on return."""

    def put(self, key: str, data: bytes) -> None:
        """Overwrite `key`; no promise about concurrent readers beyond old-or-new."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes [start, end) of `key`. Raises ObjectMissing if there is no such object."""

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        """Objects whose key starts with `prefix` and is greater than `after`, in key order."""

    def delete(self, key: str) -> None:
        """Remove `key`; removing what is not there is fine."""


class Staging(Protocol):
    """Where segments wait in the memory of other processes until a snapshot has them in the store. Nothing in it is
    durable, and nothing that comes out of it is believed: a segment's key ends with the sum of its bytes.

    Errors of every verb: StoreUnavailable.
    """

    def stage(self, key: str, data: bytes) -> None:
        """On return whoever has the same staging can fetch it, byte for byte. Raises DigestMismatch if `data` is not
        what `key` says, or if it reads back as something else; ObjectMissing if it does not read back."""

    def staged(self, prefix: str) -> Sequence[str]:
        """Keys of segments that should be there, in key order; `fetch` tells which are."""

    def fetch(self, key: str) -> bytes:
        """What was staged as `key`. Raises ObjectMissing, or DigestMismatch if it is not that any more."""

    def drop(self, keys: Sequence[str]) -> None:
        """Forget these; forgetting what is not there is fine."""


@dataclass(frozen=True, slots=True)
class EncodedSegment:
    """A segment as bytes, with the coordinates that the ledger keeps (its key is given when it is put)."""

    data: bytes
    info: SegmentInfo


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """Some records of a segment, which follow one another, still encoded.

    `unpack` may be called in any thread, and leaves the interpreter to others for most of its time. What it returns
    makes the records, all of them checked, and needs the interpreter throughout. Both raise what `decode` does.
    """

    n_records: int
    unpack: Callable[[], Callable[[Array | None], Records]]
    """Asked with the numbers of the records that will be used, or None for all. Of other chunks the digest is not
    computed; that their bytes are those that were written is known."""


class SegmentCodec(Protocol):
    """Records to one immutable object and back."""

    suffix: str

    def encode(self, records: Sequence[Record], key_stem: str) -> EncodedSegment:
        """Encode in order. The key is `<key_stem>-<crc32c:08x>.<suffix>`."""

    def describe(self, key: str, data: bytes) -> SegmentInfo:
        """Coordinates of a listed segment. Checks `data` against the crc32c in `key` before parsing."""

    def decode(self, data: bytes, info: SegmentInfo | None) -> Records:
        """All records in order, each with its digest checked. With `info`, length and crc32c are checked first.

        Raises Damaged or FormatNotUnderstood on anything mangled; never crashes.
        """

    def parts(self, data: bytes, info: SegmentInfo | None) -> Sequence[SegmentPart]:
        """The same as work to be done, part by part. What is checked of the segment as a whole was checked before."""

    def decode_batch(self, data: bytes, info: SegmentInfo, batch: int) -> Records:
        """Records of one batch, from the bytes of that batch alone."""


class LedgerCodec(Protocol):
    """Ledger objects to bytes and back; see docs/format.md, section 8."""

    suffix: str

    def encode(self, header: Mapping[str, Any], rows: LedgerRows) -> bytes:
        """One object. Segments are written as the numbers that they have in `rows`."""

    def decode(self, data: bytes, names: Names) -> tuple[dict[str, Any], LedgerRows]:
        """Header and rows, which use `names`. The header's segments give its numbers meaning; binding them is not
        done here. Raises FormatNotUnderstood or Damaged; never crashes on mangled input.
        """


class Participant(Protocol):
    """An agent, a tool, an environment: whoever has a state that goes with the calls. It may be slow, hang, or die.

    Its methods are called one at a time, in threads of their own, each under the deadline that it joined with.
    """

    name: str
    """1 to 64 of a-z 0-9 . _ -; no other participant of the store has it."""

    def prepare(self) -> bytes:
        """Its state, of any form. From here to `commit` nothing changes that another participant could know of."""

    def commit(self, published: bool) -> None:
        """What became of the snapshot; it goes on. Told once after each `prepare` that returned, late ones too."""

    def restore(self, state: bytes, rewound: bool) -> None:
        """Take up what `prepare` gave before the crash; called at most once, before any `prepare`.

        `rewound`: an older snapshot was asked for by its id, so that nothing that came after it counts. Otherwise calls
        that ended after this state have their answers in the store.
        """


class LoopParticipant(Protocol):
    """Somebody whose states are of the very step in which others are held. On the event loop: nothing here may wait."""

    name: str
    """What it is called: of two with one name the second is refused."""

    def attach(self, carried: Mapping[str, bytes]) -> None:
        """It is one from now on. `carried`: its own states in the snapshot that was restored.

        Raises if it should have taken them up and did not: its next states would replace them.
        """

    def owns(self, name: str) -> bool:
        """Whether a state of that name is its own; no two participants own one."""

    @property
    def has_news(self) -> bool:
        """Whether a snapshot would say something else than the newest that was published. From any thread, at once."""

    def hold(self, reason: str) -> None:
        """Keep the state as it is until `release`. Raises SnapshotAbandoned if that is impossible now."""

    def states(self) -> Mapping[str, bytes]:
        """JSON objects by name, all of one moment. Raises SnapshotAbandoned."""

    def resume(self, published: bool) -> None:
        """How the snapshot ended; still held."""

    def release(self) -> None:
        """Harmless if not held."""

    def stopped(self, error: RecoveryError) -> None:
        """This process must not go on, and why: no snapshot comes any more."""


class Clock(Protocol):
    """Time for deadlines (monotonic seconds) and for people (UTC seconds since 1970)."""

    def monotonic(self) -> float: ...

    def utc(self) -> float: ...


class Entropy(Protocol):
    """Randomness for nonces and names, passed in so that a schedule can be replayed."""

    def hex(self, nbytes: int) -> str: ...
