"""The verbs: from arguments to documents, an exit code and a way to show them.

Owns: which parts each verb reads, and what its exit code says about what was found.
Does not know: the command line's grammar, how errors are printed.

Invariants:
1. A verb reads first and answers when it is done: what fails leaves stdout empty.
2. Arrow is loaded only where a ledger is read.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from recovery import pins
from recovery.errors import Damaged, FormatNotUnderstood, NothingPublished, RecoveryError
from recovery.layout import LEDGERS
from recovery.model import ENDED, OPEN
from recovery.snapshots import Snapshot
from snapshot_inspect import call_documents, calls, documents, rescore, views
from snapshot_inspect.documents import Document
from snapshot_inspect.newest import Newest, newest
from snapshot_inspect.parents import Below, side_by_side
from snapshot_inspect.places import Place, ledger_codec, open_folder, open_place, place_below, segment_codec
from snapshot_inspect.progress import progress_on
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import Choice, Position, Unreadable, choose, nothing_published, position, snapshots
from snapshot_inspect.tokenizer import Texts
from snapshot_inspect.verify import verify


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb says: `documents` for --json, one a line; `show` for people; `notes` on stderr for both.

    `error`: what an exit code from 10 on stands for, said after all of it (of 1 the answer itself tells).
    Documents that are made while they are printed (`always_json`) can end in an error after the first of them.
    """

    exit_code: int
    documents: Iterable[Document]
    show: Callable[[Screen], None]
    notes: tuple[str, ...] = ()
    always_json: bool = False
    error: RecoveryError | None = None


def list_(args: Namespace, now: float) -> Answer:
    if below := open_folder(args.store):
        return _list_stores(below, now)
    place = open_place(args.store)
    at = position(place.store)
    ledger_keys = {item.key for item in place.store.list(LEDGERS)}
    found: list[Snapshot | Unreadable] = [] if at.blocked is None else [at.blocked]
    n = 0
    forgotten: set[int] = set()
    for item in snapshots(place.store, at.top, whole=args.last is None, forgotten=forgotten):
        found.append(item)
        n += isinstance(item, Snapshot)
        if n == args.last:
            break
    if not found:
        raise nothing_published(place.store)
    pinned = pins.listed(place.store)
    rows = [
        documents.list_row(place, item, ledger_keys, now, pinned=pinned, forgotten=forgotten)
        for item in reversed(found)
    ]
    bad = [item.error for item in found if isinstance(item, Unreadable)]
    error = worst(bad)
    code = 0 if error is None else error.exit_code
    return Answer(code, rows, lambda screen: views.snapshots(screen, rows), error=error)


def worst(errors: Sequence[RecoveryError]) -> RecoveryError | None:
    """The one to name: that something is damaged matters more than that something is not understood."""
    return next((error for error in errors if not isinstance(error, FormatNotUnderstood)), next(iter(errors), None))


def _list_stores(below: list[Below], now: float) -> Answer:
    found = side_by_side(_newest_of, below)
    rows = [documents.store_row(item.name, item.address, one, now) for item, one in zip(below, found, strict=True)]
    fine = all(row["exit_code"] in (0, NothingPublished.exit_code) for row in rows)
    return Answer(0 if fine else 3, rows, lambda screen: views.stores(screen, rows))


def _newest_of(item: Below) -> Newest | RecoveryError:
    """Whatever is wrong with one store of many is that one's row."""
    try:
        store = place_below(item).store
        return newest(store, position(store))
    except RecoveryError as error:
        return error


def latest(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    codecs = (segment_codec(), ledger_codec()) if args.check else None
    found = newest(place.store, position(place.store), codecs)
    document = documents.latest(place, found, now)
    return Answer(found.exit_code, [document], lambda screen: views.latest(screen, document))


def notes_of(choice: Choice) -> tuple[str, ...]:
    """What was skipped for `latest`: people should not take an old snapshot for the newest one."""
    return tuple(f"log slot {item.seq} cannot be used: {item.error.message}" for item in choice.skipped)


def show(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    at = position(place.store)
    choice = choose(place.store, at, args.id)
    snapshot = choice.snapshot
    newest_one, left = _latest(place, at) if args.id != "latest" else (snapshot.id, True)
    forgotten = None if newest_one > snapshot.id else not (left and newest_one == snapshot.id)
    earlier = snapshots(place.store, snapshot.id - 1)
    previous = next((item for item in earlier if isinstance(item, Snapshot)), None)
    document = documents.show(place, snapshot, newest_one, previous, now, forgotten=forgotten)
    code = Damaged.exit_code if document["problems"] else 0
    return Answer(code, [document], lambda screen: views.show(screen, document), notes_of(choice))


def _latest(place: Place, at: Position) -> tuple[int, bool]:
    """The newest snapshot that was not forgotten, or the newest of all if none is left; and whether one is."""
    try:
        return choose(place.store, at, "latest").snapshot.id, True
    except NothingPublished:
        return max(item.id for item in snapshots(place.store, at.tail) if isinstance(item, Snapshot)), False


def verify_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    only = None
    if args.snapshot is not None:
        only = choose(place.store, position(place.store), args.snapshot).snapshot.id
    progress = progress_on(sys.stderr, "verify") if args.read_data else None
    looking = progress_on(sys.stderr, "verify", "snapshots")
    codecs = (segment_codec(), ledger_codec())
    found = verify(place, *codecs, only=only, read_data=args.read_data, progress=progress, ledgers_progress=looking)
    document = documents.verification(place, found)
    if args.rescore is not None:
        document["rescored"] = _rescored(place, found.restore_from if only is None else only, args.rescore)
    show = partial(views.verification, document=document)
    return Answer(found.exit_code, [document], show, error=found.not_understood)


def _rescored(place: Place, snapshot_id: int | None, model: str) -> documents.Document:
    choice = choose(place.store, position(place.store), "latest" if snapshot_id is None else str(snapshot_id))
    loaded = calls.load_whole(place.store, ledger_codec(), choice.snapshot)
    record = rescore.record_of(loaded.states.get("job"))
    found = rescore.rescore(place.store, segment_codec(), loaded.ledger, record, model)
    return call_documents.rescored(choice.snapshot.id, found)


def _chosen(args: Namespace) -> tuple[Place, Choice]:
    place = open_place(args.store)
    return place, choose(place.store, position(place.store), args.id)


def calls_(args: Namespace, now: float) -> Answer:
    place, choice = _chosen(args)
    snapshot = choice.snapshot
    entries = calls.in_order(calls.read_ledger(place.store, ledger_codec(), snapshot))
    wanted = {"open": {OPEN}, "ended": {ENDED}}.get(args.state, {OPEN, ENDED})
    rows = [call_documents.call_row(entry, snapshot.id) for entry in entries if entry.state in wanted]
    return Answer(0, rows, lambda screen: views.calls(screen, rows), notes_of(choice))


def cat(args: Namespace, now: float) -> Answer:
    texts = None if args.tokenizer is None else Texts(args.tokenizer)
    place, choice = _chosen(args)
    snapshot = choice.snapshot
    ledger = calls.read_ledger(place.store, ledger_codec(), snapshot)
    entry = calls.find_call(ledger, args.call)
    call = calls.read_call(place.store, segment_codec(), ledger, entry, snapshot.id)
    prompt, generated = call.transcript.request.prompt_token_ids.tolist(), call.transcript.token_ids.tolist()
    said = None if texts is None else (texts.text(prompt), texts.text(generated))
    pieces = None if texts is None else texts.pieces(generated)
    document = call_documents.cat(place, call, said)
    return Answer(0, [document], lambda screen: views.cat(screen, document, pieces), notes_of(choice))
