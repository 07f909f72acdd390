"""Where each kind of object lies in a store: the grammar of docs/format.md, section 3, for all but the log.

Owns: making and recognising the keys of segments, ledger objects, states, garbage lists and pins.
Does not know: what is in an object, who writes it.

Invariants:
1. What does not match the grammar exactly is foreign: it is never read as ours, and never deleted.
2. A key that is made here is recognised here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SEGMENTS, LEDGERS, STATES, GARBAGE = "seg/", "ledger/", "state/", "gc/"
PREFIXES = (SEGMENTS, LEDGERS, STATES, GARBAGE)
"""In the order in which they are deleted: a list of garbage goes after what it lists."""

PINS = "pin/"
"""Not among them: what is there was put there by people, and is removed by people."""

_EPOCH = r"e(?P<epoch>[0-9]{6,})"
_NAME = r"[a-z0-9._-]+"
_SEGMENT = re.compile(
    rf"seg/{_EPOCH}/(?P<writer>{_NAME}\.[0-9a-f]{{8}})/(?P<flush>[0-9]{{8,}})-[0-9a-f]{{8}}-[0-9a-f]{{8}}\.[a-z0-9]+"
)
_OTHERS = (
    re.compile(rf"ledger/{_EPOCH}/[0-9a-f]{{16}}\.[a-z0-9]+"),
    re.compile(rf"state/{_EPOCH}/{_NAME}-[0-9a-f]{{16}}\.json"),
    re.compile(rf"gc/{_EPOCH}/[0-9a-f]{{16}}\.json"),
)
_PIN = re.compile(r"pin/(?P<snapshot>[0-9]{12,})-[0-9a-f]{16}\.json")

COMPACTED = "compacted"
"""The worker's name in the keys of segments that compaction wrote: their records are those of others, written again."""


@dataclass(frozen=True, slots=True, order=True)
class SegmentPosition:
    """Which flush of which worker incarnation (`writer`) in which epoch a segment is."""

    epoch: int
    writer: str
    flush: int

    @property
    def is_compacted(self) -> bool:
        return self.writer.rpartition(".")[0] == COMPACTED

    def extends(self, epoch: int, flushed: Mapping[str, int]) -> bool:
        """Whether it was flushed in `epoch`, and after what `flushed` accounts for (docs/format.md, invariant 11.4)."""
        return not self.is_compacted and self.epoch == epoch and self.flush > flushed.get(self.writer, 0)


def segments_of(epoch: int, writer: str = "") -> str:
    """What the keys of an epoch's segments begin with: of all, or of those whose writer's name begins so."""
    return f"{SEGMENTS}e{epoch:06d}/{writer}"


def segment_stem(epoch: int, writer: str, flush: int, nonce: str) -> str:
    """A segment's key up to its sum, which the codec adds. `nonce`: 8 hex digits."""
    return f"{segments_of(epoch, writer)}/{flush:08d}-{nonce}"


def ledger_key(epoch: int, nonce: str, suffix: str) -> str:
    """`nonce`: 16 hex digits."""
    return f"{LEDGERS}e{epoch:06d}/{nonce}.{suffix}"


def state_key(epoch: int, name: str, nonce: str) -> str:
    return f"{STATES}e{epoch:06d}/{name}-{nonce}.json"


def garbage_key(epoch: int, nonce: str) -> str:
    return f"{GARBAGE}e{epoch:06d}/{nonce}.json"


def pin_key(snapshot: int, nonce: str) -> str:
    """`nonce`: 16 hex digits."""
    return f"{PINS}{snapshot:012d}-{nonce}.json"


def pinned_by(key: str) -> int | None:
    """The snapshot of a pin; None for a foreign name."""
    match = _PIN.fullmatch(key)
    return None if match is None else int(match["snapshot"])


def segment_position(key: str) -> SegmentPosition | None:
    """None for a foreign name."""
    match = _SEGMENT.fullmatch(key)
    if match is None:
        return None
    return SegmentPosition(int(match["epoch"]), match["writer"], int(match["flush"]))


def epoch_of(key: str) -> int | None:
    """The epoch in which an object of ours was written; None for a foreign name."""
    for grammar in (_SEGMENT, *_OTHERS):
        if match := grammar.fullmatch(key):
            return int(match["epoch"])
    return None
