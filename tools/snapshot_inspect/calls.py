"""The calls of one snapshot, and everything stored of one of them.

Owns: reading a snapshot's ledger, finding a call by what people type, reading its tokens.
Does not know: which snapshot is wanted, how tokens become text.

Invariants:
1. Ledger and tokens come through the checked read path of the core (recovery.snapshots, recovery.reading).
2. Calls come in the order of their rollouts' names, numbers in names by value, then turns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from recovery.errors import ConfigError, Damaged, FormatNotUnderstood
from recovery.ledger import Entry, Ledger
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.reading import read_transcripts
from recovery.snapshots import Loaded, Snapshot, load, read_ledger_objects
from recovery.transcripts import Transcript

_CALL_ID = re.compile(r"[0-9a-f]{1,32}")
_NUMBERS = re.compile(r"(\d+)")
_INSTEAD = "what a restore takes instead: snapshot-inspect latest --check STORE"


@dataclass(frozen=True, slots=True)
class Call:
    """A call with its request and tokens."""

    snapshot: int
    entry: Entry
    transcript: Transcript


def read_ledger(store: ObjectStore, codec: LedgerCodec, snapshot: Snapshot) -> Ledger:
    """The ledger of a snapshot. Raises Damaged, saying which snapshot and what to type next."""
    try:
        objects = read_ledger_objects(store, codec, snapshot.ledger)
        return Ledger.from_objects((item.header, item.rows) for item in objects)
    except (Damaged, FormatNotUnderstood) as error:
        raise _of_snapshot(snapshot.id, error) from error


def load_whole(store: ObjectStore, codec: LedgerCodec, snapshot: Snapshot) -> Loaded:
    """Ledger and states of a snapshot. Raises Damaged, saying which snapshot and what to type next."""
    try:
        return load(store, codec, snapshot)
    except (Damaged, FormatNotUnderstood) as error:
        raise _of_snapshot(snapshot.id, error) from error


def _of_snapshot(snapshot_id: int, error: Damaged | FormatNotUnderstood) -> Damaged | FormatNotUnderstood:
    hint = error.hint if isinstance(error, FormatNotUnderstood) else _INSTEAD
    return type(error)(f"snapshot {snapshot_id}: {error.message}", hint=hint)


def in_order(ledger: Ledger) -> list[Entry]:
    """All calls (invariant 2)."""
    return sorted(ledger, key=lambda entry: (_by_value(entry.identity.rollout), entry.identity.turn, entry.call_id))


def _by_value(name: str) -> list[tuple[int, int, str]]:
    parts = _NUMBERS.split(name)
    return [(1, int(part[:18]), part) if part.isdecimal() else (0, 0, part) for part in parts]


def find_call(ledger: Ledger, text: str) -> Entry:
    """The call that is named by its rollout, a job's prompt id, its call id, or digits that only that begins with.

    Raises ConfigError.
    """
    entries = in_order(ledger)
    found = [entry for entry in entries if entry.identity.rollout == text]
    if not found and _CALL_ID.fullmatch(text):
        found = [entry for entry in entries if entry.call_id.hex().startswith(text)]
    if not found:  # a job's samples are named <prompt id>#<sample index>
        found = [entry for entry in entries if entry.identity.rollout.startswith(f"{text}#")]
    if len(found) == 1:
        return found[0]
    hint = "list them: snapshot-inspect calls STORE"
    if not found:
        raise ConfigError(f"there is no call {text!r} in this snapshot ({len(entries)} calls)", hint=hint)
    names = "; ".join(f"{e.call_id.hex()} ({e.identity.rollout}, turn {e.identity.turn})" for e in found[:4])
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    raise ConfigError(f"{text!r} could be any of {len(found)} calls: {names}{more}", hint=hint)


def read_call(store: ObjectStore, codec: SegmentCodec, ledger: Ledger, entry: Entry, snapshot_id: int) -> Call:
    """Request and tokens of a call. Raises Damaged, saying which snapshot and what to type next."""
    try:
        transcripts = read_transcripts(store, codec, ledger, [entry])
    except (Damaged, FormatNotUnderstood) as error:
        raise _of_snapshot(snapshot_id, error) from error
    return Call(snapshot_id, entry, transcripts[entry.call_id])
