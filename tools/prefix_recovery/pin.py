"""`prefix-recovery pin`: keep one snapshot whatever is published after it, or let it go again, beside a running job.

Owns: the order in which a snapshot is looked at, pinned and read, and what is said.
Does not know: how a pin holds (recovery.pins), how a snapshot is verified (snapshot_inspect.verify).

Invariants:
1. Nothing is pinned of which the ledger, a state or a segment is missing: that is looked at first. Then it is pinned,
   so that nothing of it goes while it is read; what turns out to be damaged is let go again, and refused.
2. The job that runs on the store is not disturbed: a pin is one object and one entry of its log.
3. Interrupting is safe. At worst a pin is left of which nobody was told; the same command, or --remove, deals with it.
"""

from __future__ import annotations

import sys

from recovery import garbage, pins
from recovery.errors import ConfigError, Damaged
from recovery.ports import ObjectStore
from recovery.snapshots import Snapshot
from snapshot_inspect.places import Place, ledger_codec, open_place, segment_codec
from snapshot_inspect.progress import progress_on
from snapshot_inspect.survey import choose, position
from snapshot_inspect.verify import Verification, verify
from snapshot_inspect.writing import open_for_writing
from storage_backends.writer_name import writer_name
from vllm_hooks.opening import SystemClock, SystemEntropy


def run_pin(address: str, text: str | None, *, remove: bool) -> int:
    """Pin snapshot `text`, remove its pins, or list all pins if no snapshot is named. Returns the exit code."""
    place = open_place(address)
    if text is None:
        return _list(place, remove=remove)
    pinned = pins.listed(place.store)
    if remove:
        seq = _pinned_one(place, text, pinned)
        store, _ = open_for_writing(address)
        print(f"snapshot {seq} {'is no longer pinned' if pins.unpin(store, seq) else 'was not pinned'}")
        return 0
    snapshot = choose(place.store, position(place.store), text).snapshot
    _refuse_damage(_verified(place, snapshot, read_data=False))
    store, _ = open_for_writing(address)
    key = _pin(store, snapshot)
    try:
        _refuse_damage(_verified(place, snapshot, read_data=True))
    except Damaged:
        store.delete(key)
        raise
    for older in pinned.get(snapshot.id, []):
        store.delete(older)  # one pin is enough; one that was interrupted is replaced
    print(f"snapshot {snapshot.id} is pinned: every byte of it was read, and nothing of it is collected from here on")
    return 0


def _list(place: Place, *, remove: bool) -> int:
    if remove:
        raise ConfigError("which snapshot is to be let go?", hint="list the pins: prefix-recovery pin STORE")
    for seq in sorted(pins.listed(place.store)):
        print(f"snapshot {seq} is pinned")
    return 0


def _pinned_one(place: Place, text: str, pinned: dict[int, list[str]]) -> int:
    """The pinned snapshot that is meant; by its number also one that is not there any more."""
    if text.isascii() and text.isdigit():
        begins = [seq for seq in pinned if str(seq).startswith(str(int(text)))]
        if int(text) in pinned or len(begins) == 1:
            return int(text) if int(text) in pinned else begins[0]
    return choose(place.store, position(place.store), text).snapshot.id


def _pin(store: ObjectStore, snapshot: Snapshot) -> str:
    reached = garbage.reached_by(store, ledger_codec(), snapshot)
    return pins.pin(store, SystemClock(), SystemEntropy(), writer_name("pin"), snapshot.id, reached)[0]


def _verified(place: Place, snapshot: Snapshot, *, read_data: bool) -> Verification:
    progress = progress_on(sys.stderr, "pin") if read_data else None
    return verify(place, segment_codec(), ledger_codec(), only=snapshot.id, read_data=read_data, progress=progress)


def _refuse_damage(found: Verification) -> None:
    """Raise Damaged if the snapshot is not sound. What is wrong elsewhere in the log does not matter to it."""
    for status in found.snapshots:
        if status.status != "sound":
            raise Damaged(
                f"snapshot {status.id} is {status.status} and is not pinned: {status.reason}",
                hint="pin another one: snapshot-inspect list STORE",
            )
