"""The verb `import`: a new store out of a portable file.

Owns: what a new store may be made in, what an import that was not finished left, and what is said of it.
Does not know: the command line's grammar, what is carried how (carrying.py), the shape of a file (storage_backends).

Invariants:
1. A store has a snapshot only when it has all of it: the log slot comes last. An import that was interrupted left
   claims, and objects that nothing refers to; it is done again by doing the same again.
2. Nobody is fenced by an import: it claims behind the slot up to which it looked, or not at all.
3. No bytes of a file are written but those of states: what was read is checked, taken apart and encoded anew.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from recovery.errors import ConfigError, Damaged
from recovery.log import Slot
from recovery.log_reading import slot_exists
from recovery.origin import import_claim, is_import_claim, origin_of
from recovery.ports import ObjectStore
from recovery.snapshots import FORMAT_KEY, Loaded, Snapshot, make_root
from snapshot_inspect import calls, documents
from snapshot_inspect.carrying import Carrier, carry, check_carried, codec_of
from snapshot_inspect.documents import Document
from snapshot_inspect.export import figures, origin_for, taken
from snapshot_inspect.leftovers import is_foreign
from snapshot_inspect.newest import Adopted
from snapshot_inspect.places import Place, glance, is_config, ledger_codec, naming, open_place, store_at, strangers
from snapshot_inspect.progress import progress_on
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import Unreadable, choose, position, walk
from snapshot_inspect.verbs import Answer
from snapshot_inspect.writing import log_of
from storage_backends import open_store
from storage_backends.archive import ArchiveStore, is_archive
from storage_backends.codecs import CodecName, MixedSegmentCodec

PROBES = "probe/"
"""What a probe of a bucket leaves if it is killed: no part of a store, and no reason to refuse an import."""


def import_(args: Namespace, now: float) -> Answer:
    with naming(args.file):
        if os.path.isfile(args.file) and not is_archive(args.file) and not is_config(args.file):
            what = f"{args.file} is no portable file: it does not begin like one"
            raise ConfigError(what, hint="such files are made by `snapshot-inspect export`")
        source = open_place(args.file)
        if not isinstance(source.store, ArchiveStore):
            raise ConfigError(
                f"{args.file} is a store, not a portable file",
                hint="make one: snapshot-inspect export STORE snapshot.zip",
            )
        source.store.check()
        snapshot = _only_snapshot(source.store)
        loaded = calls.load_whole(source.store, ledger_codec(), snapshot)
        check_carried(loaded)
    origin = origin_for(source, loaded, Adopted())
    codec: CodecName = args.codec or codec_of(loaded.ledger)
    target = _opened(args.store, args.single_writer)
    unfinished = check_empty(target, args.store)
    alone = args.single_writer
    slot, notes = _into(target, source, loaded, codec, origin, follows=len(unfinished), single_writer=alone)
    document = {
        "file": args.file,
        "store": args.store,
        "snapshot": slot.seq,
        "codec": codec,
        "origin": documents.origin(origin),
        "counts": documents.counts_of(slot),
        "unfinished": len(unfinished),
        "notes": _unfinished_notes(unfinished) + notes,
    }
    return Answer(0, [document], lambda screen: shown_import(screen, document))


def _opened(address: str, single_writer: bool) -> ObjectStore:
    """Where the store is made, tried for what is asked of a store."""
    url, options = store_at(address)
    if single_writer:
        return open_store(url, create=True, **{**options, "exclusive": True})
    try:
        return open_store(url, create=True, **options)
    except ConfigError as error:
        if "exclusive" not in error.hint:
            raise
        hint = "use a server that has it (docs/s3.md); or, where nothing else ever writes, --single-writer"
        raise ConfigError(error.message, hint=f"{hint}, which fences nobody") from error


def _only_snapshot(store: ObjectStore) -> Snapshot:
    """The newest snapshot of a file, of which the whole log is sound."""
    at = position(store)
    for found in walk(store, at.top):
        if isinstance(found, Unreadable):
            raise found.error
    return choose(store, at, "latest").snapshot


def _into(
    target: ObjectStore,
    source: Place,
    loaded: Loaded,
    codec: CodecName,
    origin: dict[str, Any],
    *,
    follows: int,
    single_writer: bool,
) -> tuple[Slot, list[str]]:
    """The slot that was published, and what is to be told of it."""
    from vllm_hooks.opening import SystemEntropy

    entropy = SystemEntropy()
    make_root(target, entropy)
    log = log_of(target, "import", single_writer=single_writer)
    log.claim(import_claim(origin), follows=follows)
    to = Carrier(
        store=target,
        segments=MixedSegmentCodec(codec),
        ledgers=ledger_codec(),
        entropy=entropy,
        log=log,
        cause="import",
        origin=origin,
    )
    with naming(source.address, Damaged):  # what is damaged is the file
        slot = carry(source.store, loaded, to, progress_on(sys.stderr, "import"), strict=True)
    return slot, list(log.try_to_leave_hint())


def check_empty(store: ObjectStore, address: str) -> list[Slot]:
    """The claims of imports that were not finished, and nothing else. Raises ConfigError, naming what is there.

    Only what has a log is looked through to the end: a folder of somebody else's may be large.
    """
    names, all_of_it = glance(store)
    if not all_of_it and not slot_exists(store, 1):
        what = min((name for name in names if is_foreign(name)), default="a great deal")
        raise _not_empty(address, f"{what} lies there, among more than {len(names)} others")
    keys = [item.key for item in store.list("") if not item.key.startswith(PROBES)]
    foreign = [key for key in keys if is_foreign(key)] + strangers(store).names
    if foreign:
        raise _not_empty(address, f"{foreign[0]} lies there" + _more(len(foreign) - 1))
    claims = []
    for found in walk(store, position(store).top):
        if isinstance(found, Unreadable):
            raise _not_empty(address, f"it is a store, and {found.error.message}")
        if found.slot.kind == "snapshot":
            raise _not_empty(address, f"it is a store, which has snapshot {found.slot.seq}{_whose(found.slot)}")
        if not is_import_claim(found.slot):
            raise _not_empty(address, f"it is a store, claimed by {found.slot.owner or 'somebody'}")
        claims.append(found.slot)
    if not claims and keys not in ([], [FORMAT_KEY]):
        key = next(key for key in keys if key != FORMAT_KEY)
        raise _not_empty(address, f"it holds {key}" + _more(len(keys) - 2))
    return claims


def _whose(slot: Slot) -> str:
    origin = origin_of(slot)
    if slot.body.get("cause") != "import" or origin is None:
        return ""
    return f", imported: snapshot {origin['snapshot']} of store {origin['store_id'] or 'unknown'}"


def _more(n: int) -> str:
    return f", and {n} more" if n > 0 else ""


def _not_empty(address: str, why: str) -> ConfigError:
    return ConfigError(f"{address} is not empty: {why}", hint="import into a new folder, or under a new prefix")


def _unfinished_notes(claims: Iterable[Slot]) -> list[str]:
    return [
        f"an import was begun here before and not finished ({claim.owner}); what it left, a run collects"
        for claim in claims
    ]


def shown_import(screen: Screen, document: Document) -> None:
    facts = [
        ("store", f"{document['store']} ({document['codec']} segments)"),
        ("snapshot", f"{document['snapshot']}{taken(document['origin'], None)}"),
        *figures(document["counts"]),
    ]
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)
