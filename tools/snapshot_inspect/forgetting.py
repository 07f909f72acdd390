"""The verb `forget`: snapshots that no restore shall consider any more; without --apply, what that would mean.

Owns: the dry run, what a restore takes before and after, what only the forgotten snapshots reach, the document.
Does not know: how a snapshot is forgotten (recovery.forgetting), when its objects are deleted.

Invariants:
1. The dry run is the forgetting itself, on a store that is written to in memory only (overlay.py).
2. Nothing is deleted: the next run, or `prune`, collects what nothing else reaches.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from recovery import garbage
from recovery.errors import CannotRestore, Damaged, FormatNotUnderstood
from recovery.forgetting import forget, left_to_forget
from recovery.log import Slot
from recovery.ports import ObjectStore
from recovery.snapshots import Snapshot
from snapshot_inspect.documents import Document
from snapshot_inspect.newest import newest
from snapshot_inspect.overlay import Overlay
from snapshot_inspect.places import Place, ledger_codec, open_place, segment_codec
from snapshot_inspect.render import Fact, Screen
from snapshot_inspect.survey import choose, position, snapshots
from snapshot_inspect.texts import count_text, nbytes_text
from snapshot_inspect.verbs import Answer
from snapshot_inspect.writing import HAS_FENCED, WILL_FENCE, log_of, open_for_writing


def forget_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    at = position(place.store)
    wanted = sorted({choose(place.store, at, text).snapshot.id for text in args.ids})
    left = left_to_forget(place.store, at.tail, wanted)
    before, freed = _restored(place.store), _freed(place, set(left))
    store: ObjectStore = Overlay(place.store)
    slot = _forget(store, left, args.leave_none)
    if args.apply and left:  # what was only tried until now, and refused by then if it has to be
        store, single_writer = open_for_writing(args.store)
        slot = _forget(store, left, args.leave_none, single_writer=single_writer)
    document = {
        "store": place.address,
        "applied": args.apply,
        "forgotten": left,
        "already": [seq for seq in wanted if seq not in left],
        "restore_from": {"before": before, "after": _restored(store)},
        "freed": [{"object": key, "nbytes": nbytes} for key, nbytes in freed],
        "objects": len(freed),
        "nbytes": sum(nbytes for _, nbytes in freed),
        "slot": slot.seq if slot is not None and args.apply else None,
        "epoch": slot.epoch if slot is not None and args.apply else None,
    }
    document["notes"] = list(_notes(document))
    return Answer(0, [document], lambda screen: shown(screen, document))


def _forget(store: ObjectStore, ids: list[int], leave_none: bool, *, single_writer: bool = False) -> Slot | None:
    log = log_of(store, "forget", single_writer=single_writer)
    return forget(store, ledger_codec(), log, ids, leave_none=leave_none) if ids else None


def _restored(store: ObjectStore) -> int | None:
    """What a restore takes."""
    try:
        return newest(store, position(store), (segment_codec(), ledger_codec())).snapshot.id
    except (Damaged, CannotRestore):
        return None


def _freed(place: Place, going: set[int]) -> list[tuple[str, int]]:
    """Objects that these snapshots reach and no other does that a restore could still take, with their sizes."""
    alone: set[str] = set()
    kept: set[str] = set()
    forgotten: set[int] = set()
    for snapshot in snapshots(place.store, position(place.store).tail, whole=True, forgotten=forgotten):
        if isinstance(snapshot, Snapshot) and (snapshot.id in going or snapshot.id not in forgotten):
            try:
                reached = garbage.reached_by(place.store, ledger_codec(), snapshot)
            except (Damaged, FormatNotUnderstood):
                continue  # it holds on to nothing that could be named
            (alone if snapshot.id in going else kept).update(reached)
    sizes = {item.key: item.nbytes for item in place.store.list("")}
    return [(key, sizes[key]) for key in sorted(alone - kept) if key in sizes]


def _notes(document: Document) -> Iterator[str]:
    if not document["forgotten"]:
        yield "nothing to do: forgotten already"
        return
    yield HAS_FENCED if document["applied"] else WILL_FENCE
    if document["restore_from"]["after"] is None:
        yield "no snapshot is left that a restore would take: with restore: never a run begins anew"
    if document["restore_from"]["before"] != document["restore_from"]["after"]:
        yield "what was flushed after that snapshot is not taken over: it may be what is to be forgotten"
    yield "nothing takes this back; a snapshot that is to stay is pinned first: prefix-recovery pin STORE ID"


def shown(screen: Screen, document: Document) -> None:
    ids = ", ".join(map(str, document["forgotten"])) or "none"
    before, after = document["restore_from"]["before"], document["restore_from"]["after"]
    facts: list[Fact] = [("forget", ids)]
    if document["already"]:
        facts.append(("already", ", ".join(map(str, document["already"]))))
    taken = "nothing" if after is None else f"snapshot {after}"
    facts.append(("restore", taken if before == after else f"{taken}, instead of {before}"))
    freed = (
        f"{count_text(document['objects'], 'object')}, {nbytes_text(document['nbytes'])}, by the next run or `prune`"
    )
    facts.append(("collected", freed))
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)
    screen.line()
    if document["applied"]:
        screen.line(f"forgotten by log entry {document['slot']}" if document["slot"] else "forgotten", "bold green")
    else:
        screen.line("not written: add --apply", "bold yellow")
