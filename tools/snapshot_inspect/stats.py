"""Where the bytes of a store are, and what they are worth.

Owns: the piles into which every object is counted, and the figures about calls.
Does not know: whether an object is sound (verify.py reads the structure), what becomes of garbage.

Invariants:
1. Every object is in one kind; every object of an epoch is in one of newest, older, adoptable, garbage.
2. What is said of calls is said of the newest sound snapshot.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from recovery import layout, log
from recovery.errors import Damaged
from recovery.ledger import Entry, Ledger
from recovery.model import OPEN, Restarted
from recovery.ports import Listed
from recovery.snapshots import FORMAT_KEY
from snapshot_inspect.documents import Document
from snapshot_inspect.places import Place
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import nothing_published
from snapshot_inspect.texts import count_text, nbytes_text
from snapshot_inspect.verify import Sound, Verification

RAW_TOKEN_BYTES = 8
"""An int32 id and a float32 logprob."""

_STATES = ("readable", "sound", "collected", "damaged", "forgotten")
"""Of snapshots."""

USES = ("newest", "older", "adoptable", "garbage")
_KINDS = {"seg": "segments", "ledger": "ledger", "state": "states", "gc": "garbage lists"}


@dataclass(slots=True)
class Pile:
    """Some objects."""

    objects: int = 0
    nbytes: int = 0

    def add(self, item: Listed) -> None:
        self.objects += 1
        self.nbytes += item.nbytes

    def as_json(self) -> Document:
        return {"objects": self.objects, "nbytes": self.nbytes}


def kind_of(key: str) -> str:
    if key == FORMAT_KEY:
        return "format"
    if key == log.HINT_KEY:
        return "hint"
    if log.seq_of_key(key) is not None:
        return "log"
    if layout.pinned_by(key) is not None:
        return "pins"
    if layout.epoch_of(key) is None:
        return "foreign"
    return _KINDS[key.partition("/")[0]]


def stats(place: Place, found: Verification, sound: Sound | None) -> Document:
    """Raises NothingPublished, or Damaged if no snapshot is sound."""
    if sound is None:
        if not found.snapshots and not found.findings:
            raise nothing_published(place.store)
        raise Damaged("no snapshot of this store is sound", hint="look: snapshot-inspect verify STORE")
    listed = place.store.list("")
    kinds: dict[str, Pile] = defaultdict(Pile)
    epochs: dict[int, tuple[Pile, Pile]] = defaultdict(lambda: (Pile(), Pile()))
    use = {name: Pile() for name in USES}
    garbage = {item.key for item in found.leftovers.unreferenced}
    adoptable = set(found.leftovers.adoption.segments)
    for item in listed:
        kinds[kind_of(item.key)].add(item)
        if (epoch := layout.epoch_of(item.key)) is None:
            continue
        epochs[epoch][0].add(item)
        if item.key.startswith(layout.SEGMENTS):
            epochs[epoch][1].add(item)
        use[_use(item.key, sound.keys, adoptable, garbage)].add(item)
    return {
        "store": place.address,
        "snapshot": sound.snapshot.id,
        "total": Pile(len(listed), sum(item.nbytes for item in listed)).as_json(),
        "kinds": [{"kind": kind, **pile.as_json()} for kind, pile in sorted(kinds.items(), key=_by_size)],
        "epochs": [
            {"epoch": epoch, **whole.as_json(), "segments": part.objects, "segment_nbytes": part.nbytes}
            for epoch, (whole, part) in sorted(epochs.items())
        ],
        "use": {name: pile.as_json() for name, pile in use.items()},
        "tokens": token_figures(sound.ledger),
        "calls": call_figures(sound.ledger),
        "snapshots": _snapshots(found),
        "unfinished": found.leftovers.unfinished,
        "notes": [*problem_notes(found, place.address), *([] if sound is None else older_notes(found, sound))],
    }


def problem_notes(found: Verification, address: str) -> list[str]:
    if not found.findings:
        return []
    return [f"{count_text(len(found.findings), 'problem')} found: snapshot-inspect verify {shlex.quote(address)}"]


def older_notes(found: Verification, sound: Sound) -> list[str]:
    """Said where the figures are not those of the newest snapshot."""
    newer = [state.id for state in found.snapshots if state.id > sound.snapshot.id]
    if not newer:
        return []
    return [
        f"the figures are those of snapshot {sound.snapshot.id}, the newest sound one: "
        f"{count_text(len(newer), 'newer snapshot')} ({', '.join(map(str, newer[-4:]))}) cannot be used"
    ]


def _use(key: str, newest: Collection[str], adoptable: Collection[str], garbage: Collection[str]) -> str:
    if key in newest:
        return "newest"
    if key in adoptable:
        return "adoptable"
    return "garbage" if key in garbage else "older"


def _by_size(item: tuple[str, Pile]) -> tuple[int, str]:
    return -item[1].nbytes, item[0]


def token_figures(ledger: Ledger) -> Document:
    counts = ledger.counts()
    raw = counts.tokens * RAW_TOKEN_BYTES
    ratio = round(raw / counts.nbytes, 3) if counts.tokens and counts.nbytes else None
    return {"tokens": counts.tokens, "raw_nbytes": raw, "stored_nbytes": counts.nbytes, "ratio": ratio}


def _segments(entry: Entry) -> set[str]:
    return {entry.identity.opened.segment, *(chunk.at.segment for chunk in entry.chunks)}


def _thrown_away(entries: Iterable[Entry]) -> Iterator[int]:
    for entry in entries:
        yield from (event.at for event in entry.history if isinstance(event, Restarted))


def call_figures(ledger: Ledger) -> Document:
    counts = ledger.counts()
    spread = [len(_segments(entry)) for entry in ledger if entry.state == OPEN]
    return {
        "calls": counts.calls,
        "open": counts.open,
        "ended": counts.ended,
        "chunks": counts.chunks,
        "tokens_per_chunk": _mean(counts.tokens, counts.chunks),
        "segments": counts.segments,
        "segments_per_open_call": _mean(sum(spread), len(spread)),
        "segments_per_open_call_max": max(spread, default=0),
        "restored": sum(bool(entry.history) for entry in ledger),
        "tokens_thrown_away": sum(_thrown_away(ledger)),
    }


def _mean(total: int, n: int) -> float | None:
    return round(total / n, 2) if n else None


def _snapshots(found: Verification) -> Document:
    statuses = [status.status for status in found.snapshots]
    known = {name: statuses.count(name) for name in ("sound", "collected", "forgotten")}
    return {"readable": len(statuses), **known, "damaged": len(statuses) - sum(known.values())}


# ---- for people ----------------------------------------------------------------------------------------------------


def shown(screen: Screen, document: Document) -> None:
    right = frozenset({"objects", "size", "epoch", "segments", "in segments", "share"})
    total = document["total"]
    rows = [[k["kind"], str(k["objects"]), nbytes_text(k["nbytes"]), _share(k, total)] for k in document["kinds"]]
    screen.rows(("kind", "objects", "size", "share"), rows, right)
    screen.line()
    rows = [
        [
            str(e["epoch"]),
            str(e["objects"]),
            nbytes_text(e["nbytes"]),
            str(e["segments"]),
            nbytes_text(e["segment_nbytes"]),
        ]
        for e in document["epochs"]
    ]
    screen.rows(("epoch", "objects", "size", "segments", "in segments"), rows, right)
    screen.line()
    use = [(name, document["use"][name]) for name in USES]
    facts = [
        ("total", f"{count_text(total['objects'], 'object')}, {nbytes_text(total['nbytes'])}"),
        ("needed by", ", ".join(f"{name} {p['objects']} ({nbytes_text(p['nbytes'])})" for name, p in use)),
        *_call_facts(document),
    ]
    if document["unfinished"]:
        facts.append(("unfinished", f"{count_text(document['unfinished'], 'file')} in .tmp"))
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)


def _call_facts(document: Document) -> list[tuple[str, str]]:
    tokens, calls, snapshots = document["tokens"], document["calls"], document["snapshots"]
    ratio = "" if tokens["ratio"] is None else f": {tokens['ratio']:.2f} raw bytes a stored byte"
    raw = f"{nbytes_text(tokens['raw_nbytes'])} raw, {nbytes_text(tokens['stored_nbytes'])} stored{ratio}"
    return [
        ("snapshots", ", ".join(f"{snapshots[name]} {name}" for name in _STATES)),
        ("calls", f"{calls['calls']} ({calls['open']} open, {calls['ended']} ended), {calls['restored']} restored"),
        ("tokens", f"{tokens['tokens']} in snapshot {document['snapshot']}, {raw}"),
        ("thrown away", f"{count_text(calls['tokens_thrown_away'], 'token')} of calls that began again"),
        ("chunks", f"{calls['chunks']}, {_number(calls['tokens_per_chunk'])} tokens each"),
        (
            "segments",
            f"{calls['segments']}; an open call lies in {_number(calls['segments_per_open_call'])} "
            f"(at most {calls['segments_per_open_call_max']})",
        ),
    ]


def _number(value: float | None) -> str:
    return "no" if value is None else f"{value:g}"


def _share(pile: dict[str, Any], total: Document) -> str:
    return f"{100 * pile['nbytes'] / max(1, total['nbytes']):.1f} %"
