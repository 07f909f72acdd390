"""The verb `export`: one snapshot as one portable file, or as JSON lines.

Owns: which snapshot goes along and what is added to it, where it is written, and what is said of it.
Does not know: the command line's grammar, what is carried how (carrying.py), the shape of a file (storage_backends).

Invariants:
1. A file has its name only when it is whole (new_file.py).
2. The same snapshot in the same encoding is the same bytes: nothing in them comes from a clock or from chance.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from recovery.errors import ConfigError
from recovery.origin import origin_here, origin_of
from recovery.slots import SlotLog
from recovery.snapshots import Loaded, make_root
from snapshot_inspect import calls, documents, json_lines
from snapshot_inspect.carrying import Carrier, DerivedEntropy, FixedClock, carry, check_carried, codec_of
from snapshot_inspect.documents import Document
from snapshot_inspect.new_file import new_file
from snapshot_inspect.newest import Adopted, intended_after, would_adopt
from snapshot_inspect.places import Place, ledger_codec, open_place, segment_codec
from snapshot_inspect.progress import progress_on
from snapshot_inspect.render import Fact, Screen
from snapshot_inspect.survey import Position, choose, position
from snapshot_inspect.texts import count_text, nbytes_text, origin_text
from snapshot_inspect.tokenizer import Texts
from snapshot_inspect.unpublished import unpublished
from snapshot_inspect.verbs import Answer, notes_of
from storage_backends.archive import ArchiveWriter
from storage_backends.codecs import CodecName, MixedSegmentCodec

STDOUT = "-"


def export(args: Namespace, now: float) -> Answer:
    id_, file = _words(args)
    texts = None if args.tokenizer is None else Texts(args.tokenizer)
    place = open_place(args.store)
    at = position(place.store)
    choice = choose(place.store, at, id_)
    loaded = calls.load_whole(place.store, ledger_codec(), choice.snapshot)
    check_carried(loaded)
    newest = choose(place.store, at, "latest").snapshot.id == loaded.snapshot.id
    adopted, notes = _adopted(place, at, loaded, args.adopt, newest)
    notes = [*notes_of(choice), *notes]
    codec, origin = None, origin_for(place, loaded, adopted)
    if args.jsonl is not None:
        lines = json_lines.lines(
            place.store, segment_codec(), loaded, texts, progress_on(sys.stderr, "export", "calls")
        )
        if file == STDOUT:
            return Answer(0, lines, lambda screen: None, tuple(notes), always_json=True)
        with new_file(file, replace=args.force) as fd:
            nbytes, sha256 = json_lines.write(fd, file, map(documents.dump, lines))
    else:
        codec = args.codec or codec_of(loaded.ledger)
        nbytes, sha256 = _archive(place, loaded, file, codec, origin, replace=args.force)
    document = {
        "store": place.address,
        "snapshot": loaded.snapshot.id,
        "file": file,
        "form": "portable" if args.jsonl is None else "json_lines",
        "codec": codec,
        "nbytes": nbytes,
        "sha256": sha256,
        "origin": documents.origin(origin),
        "counts": documents.counts(loaded.ledger.counts()),
        "adopted": {"segments": len(adopted.segments), "tokens": adopted.tokens},
        "notes": notes,
    }
    return Answer(0, [document], lambda screen: shown_export(screen, document))


def _words(args: Namespace) -> tuple[str, str]:
    """ID and FILE, of which the command line has one, the other, or both."""
    words: list[str] = args.words
    if args.jsonl is not None:
        if args.codec is not None:
            raise ConfigError("--codec is for portable files, not for --jsonl")
        if len(words) > 1:
            raise ConfigError(f"with --jsonl FILE there is at most an ID before it, not {' '.join(words)!r:.100}")
        return (words[0] if words else "latest"), args.jsonl
    if args.tokenizer is not None:
        raise ConfigError("--tokenizer is for --jsonl: a portable file holds token ids")
    if not words or (len(words) == 1 and (words[0] == "latest" or words[0].isdecimal())):
        name = f"; ./{words[0]} is a file of that name" if words else ""
        raise ConfigError(f"there is no file to export to{name}", hint="snapshot-inspect export STORE [ID] FILE")
    if len(words) > 2:
        raise ConfigError(f"there is at most an ID before the file, not {' '.join(words[:-1])!r:.100}")
    if words[-1] == STDOUT:
        raise ConfigError("a portable file is not written to stdout", hint="name a file, or use --jsonl -")
    return (words[0] if len(words) == 2 else "latest"), words[-1]


def _adopted(place: Place, at: Position, loaded: Loaded, wanted: bool, newest: bool) -> tuple[Adopted, list[str]]:
    """What was added to the ledger, and what should be known of what was not."""
    epoch, flushed = loaded.snapshot.slot.epoch, loaded.flushed
    if not newest:
        if wanted:
            raise ConfigError(
                f"--adopt adds to the latest snapshot, not to {loaded.snapshot.id}", hint="leave out --adopt, or the id"
            )
        return Adopted(), []
    if not wanted:
        n = len(unpublished(place.store, loaded.ledger, epoch, flushed))
        said = f"{n} segments were flushed after this snapshot; a restore adopts them, --adopt exports them as well"
        return Adopted(), [said] if n else []
    collected = intended_after(place.store, at.tail, loaded.snapshot.id)
    adopted = would_adopt(
        place.store, segment_codec(), loaded.ledger, epoch=epoch, flushed=flushed, collected=collected
    )
    return adopted, [f"not adopted: {key}: {why}" for key, why in adopted.unreadable]


def origin_for(place: Place, loaded: Loaded, adopted: Adopted) -> dict[str, Any]:
    slot = loaded.snapshot.slot
    known = None if adopted.segments else origin_of(slot)
    return known or origin_here(slot, place.mark.get("store_id"), adopted.tokens)


def _archive(
    place: Place, loaded: Loaded, file: str, codec: CodecName, origin: dict[str, Any], *, replace: bool
) -> tuple[int, str]:
    """Write a portable file. Returns its length and sha256."""
    entropy, clock = DerivedEntropy({"origin": origin, "codec": codec}), FixedClock(origin["utc"])
    with new_file(file, replace=replace) as fd:
        writer = ArchiveWriter(fd, file)
        make_root(writer, entropy)
        log = SlotLog(writer, clock, entropy, origin["owner"])
        log.claim()
        to = Carrier(
            store=writer,
            segments=MixedSegmentCodec(codec),
            ledgers=ledger_codec(),
            entropy=entropy,
            log=log,
            cause="export",
            origin=origin,
        )
        carry(place.store, loaded, to, progress_on(sys.stderr, "export"))
        sha256 = writer.finish()
        return writer.nbytes, sha256


# ---- for people ----------------------------------------------------------------------------------------------------


def shown_export(screen: Screen, document: Document) -> None:
    form = {"portable": f"portable file, {document['codec']} segments", "json_lines": "JSON lines, one call a line"}
    facts = [
        ("file", f"{document['file']} ({form[document['form']]}, {nbytes_text(document['nbytes'])})"),
        ("sha256", document["sha256"]),
        ("snapshot", f"{document['snapshot']}{taken(document['origin'], document['snapshot'])}"),
        *figures(document["counts"]),
    ]
    if document["adopted"]["segments"]:
        facts.append(("adopted", f"{document['adopted']['tokens']} tokens that no snapshot names yet"))
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)


def taken(origin: Document, here: int | None) -> str:
    """Where a snapshot was taken, if that is not what is said anyway."""
    return "" if origin["snapshot"] == here else f" ({origin_text(origin)})"


def figures(counts: Document) -> list[Fact]:
    calls = f"{count_text(counts['calls'], 'call')} ({counts['open']} open, {counts['ended']} ended)"
    return [("calls", calls), ("tokens", f"{counts['tokens']} in {count_text(counts['chunks'], 'chunk')}")]
