"""The verb `prune`: what a job would delete in time, at once; without --apply, what that would be.

Owns: the dry run, what else lies in a store's folder, the document and its words.
Does not know: what is garbage and how it is deleted (recovery.pruning).

Invariants:
1. The dry run is the prune itself, on a store that is written to in memory only (overlay.py): what it names is what
   --apply deletes, if nothing happens in between.
2. Names that the format does not know are never touched (N1); unfinished files only where their writer is dead.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from recovery import pins
from recovery.ports import Listed
from recovery.pruning import Pruned, prune
from snapshot_inspect.documents import Document
from snapshot_inspect.overlay import Overlay, Recorder
from snapshot_inspect.places import Place, ledger_codec, open_place, segment_codec
from snapshot_inspect.render import Fact, Screen
from snapshot_inspect.texts import count_text, nbytes_text
from snapshot_inspect.verbs import Answer
from snapshot_inspect.writing import HAS_FENCED, WILL_FENCE, log_of, open_for_writing
from storage_backends.local import LocalStore

_MOST = 40
"""Objects that are shown one by one; --json has all of them."""


def prune_(args: Namespace, now: float) -> Answer:
    from vllm_hooks.opening import SystemEntropy

    place = open_place(args.store)
    unfinished = place.store.abandoned_temporaries() if isinstance(place.store, LocalStore) else []
    single_writer = False
    store: Recorder = Overlay(place.store)
    if args.apply:
        writable, single_writer = open_for_writing(args.store)
        store = Recorder(writable)
    log = log_of(store, "prune", single_writer=single_writer)
    found = prune(store, segment_codec(), ledger_codec(), SystemEntropy(), log, keep_latest_k=args.keep)
    document = _document(place, args, found, store.deleted, unfinished)
    left = found.restored.passed_over
    code = 0 if not left else (3 if args.apply else 1)
    return Answer(code, [document], lambda screen: shown(screen, document))


def _document(
    place: Place, args: Namespace, found: Pruned, deleted: dict[str, int], unfinished: list[Listed]
) -> Document:
    restored = found.restored
    return {
        "store": place.address,
        "applied": args.apply,
        "keep": args.keep,
        "snapshot": restored.snapshot,
        "pinned": sorted(pins.listed(place.store)),
        "adopted": {"segments": restored.adopted_segments, "tokens": restored.adopted_tokens},
        "passed_over": [{"what": item.what, "reason": item.reason} for item in restored.passed_over],
        "deleted": [{"object": key, "nbytes": nbytes} for key, nbytes in sorted(deleted.items())],
        "objects": len(deleted),
        "nbytes": sum(deleted.values()),
        "unfinished": [{"file": item.key, "nbytes": item.nbytes} for item in unfinished],
        "epoch": found.epoch if args.apply else None,
        "published": list(found.snapshots) if args.apply else [],
        "notes": list(_notes(found, applied=args.apply)),
    }


def _notes(found: Pruned, *, applied: bool) -> Iterator[str]:
    yield HAS_FENCED if applied else WILL_FENCE
    if found.restored.passed_over:
        yield (
            "what was passed over is left for you to look at, and all other garbage with it; if it is of no use: "
            "snapshot-inspect forget STORE ID, then prune again"
        )


def shown(screen: Screen, document: Document) -> None:
    would = "" if document["applied"] else "would be "
    facts: list[Fact] = [("kept", _kept(document))]
    if document["adopted"]["segments"]:
        what = count_text(document["adopted"]["tokens"], "token")
        facts.append(("adopted", f"{what} that no snapshot named; they {would or 'are '}published first"))
    facts += [("passed over", f"{item['what']}: {item['reason']}") for item in document["passed_over"]]
    facts += [("delete", f"{item['object']}, {nbytes_text(item['nbytes'])}") for item in document["deleted"][:_MOST]]
    if len(document["deleted"]) > _MOST:
        facts.append(("delete", f"and {len(document['deleted']) - _MOST} more (--json lists them)"))
    facts += [("unfinished", f"{item['file']}, {nbytes_text(item['nbytes'])}") for item in document["unfinished"]]
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)
    screen.line()
    done = "deleted" if document["applied"] else "to delete"
    screen.line(f"{count_text(document['objects'], 'object')} {done}, {nbytes_text(document['nbytes'])}", "bold green")
    if not document["applied"]:
        screen.line("not written: add --apply", "bold yellow")


def _kept(document: Document) -> str:
    pinned = ", ".join(map(str, document["pinned"]))
    what = f"snapshot {document['snapshot']} and what comes with the newest {document['keep']}"
    return f"{what}; pinned: {pinned}" if pinned else what
