"""What `repair` found and did, as its document and as people read it.

Owns: every field of that document, and the words.
Does not know: how anything was found or mended (repair.py).

Invariants:
1. Every loss is named: which call, which of its tokens or its request, and whether it had ended.
2. The store is looked into once more only where something cannot be mended: for what a restore takes instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from recovery.errors import CannotRestore, Damaged
from recovery.ledger import Counts
from recovery.log import Slot, slot_key
from recovery.snapshots import Loaded, Snapshot
from snapshot_inspect import documents
from snapshot_inspect.documents import Document
from snapshot_inspect.newest import Adopted, PassedOver, newest
from snapshot_inspect.places import Place, ledger_codec, segment_codec
from snapshot_inspect.render import Fact, Screen
from snapshot_inspect.soundness import Damage, Loss, to_move
from snapshot_inspect.survey import Position
from snapshot_inspect.texts import count_text
from snapshot_inspect.writing import WILL_FENCE

MEND = frozenset({"dangling", "garbage"})
"""States of a hint that is written anew. One that is absent is nothing wrong, nor one behind slots that followed the
newest snapshot: it is written when a snapshot was published."""


@dataclass(slots=True)
class Findings:
    """What was found at one look. `loaded`: the newest snapshot, with what a restore would adopt in its ledger."""

    at: Position
    snapshot: Snapshot | None = None
    loaded: Loaded | None = None
    adopted: Adopted = field(default_factory=Adopted)
    counts: Counts | None = None
    damaged: list[Damage] = field(default_factory=list)
    lost: list[Loss] = field(default_factory=list)
    problems: list[PassedOver] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """Tokens of the snapshot before anything was cut."""
        return 0 if self.counts is None else self.counts.tokens

    @property
    def mend_hint(self) -> bool:
        hint = self.at.hint
        stale = hint.tail is not None and self.snapshot is not None and hint.tail < self.snapshot.id
        return hint.state in MEND or stale

    @property
    def mend_snapshot(self) -> bool:
        return bool(self.damaged)

    @property
    def needed(self) -> bool:
        return self.mend_hint or self.mend_snapshot


def document_of(place: Place, found: Findings, published: Slot | None, *, applied: bool, claimed: bool) -> Document:
    """`claimed`: a job that ran was fenced for it."""
    problems = [] if published is not None else found.problems
    lost = {item.call_id: item for item in found.lost}
    return {
        "store": place.address,
        "applied": applied,
        "needed": found.needed,
        "snapshot": None if found.snapshot is None else found.snapshot.id,
        "published": None if published is None else published.seq,
        "hint": {"state": found.at.hint.state, "mend": found.mend_hint},
        "damaged": [
            {
                "object": damage.info.key,
                "message": damage.reason,
                "moved": len(to_move(damage, lost)),
                "lost": len(damage.lost),
            }
            for damage in found.damaged
        ],
        "lost": [_lost(item) for item in found.lost],
        "tokens_lost": sum(item.n_lost for item in found.lost),
        "tokens_kept": found.n_tokens - sum(item.n_lost for item in found.lost),
        "adoption": None if found.loaded is None else documents.adoption(found.adopted),
        "problems": [
            {"object": slot_key(item.seq), "what": item.what, "reason": item.error.message} for item in problems
        ],
        "fallback": _fallback(place, found) if problems else None,
        "notes": list(_notes(found, published, applied=applied, claimed=claimed)),
    }


def _lost(item: Loss) -> Document:
    return {
        "rollout": item.rollout,
        "call_id": item.call_id.hex(),
        "start": item.start,
        "stop": item.n_tokens,
        "was": "ended" if item.ended else "open",
    }


def _fallback(place: Place, found: Findings) -> int | None:
    """What a restore takes although something cannot be mended."""
    try:
        return newest(place.store, found.at, (segment_codec(), ledger_codec())).snapshot.id
    except (Damaged, CannotRestore):
        return None


def _notes(found: Findings, published: Slot | None, *, applied: bool, claimed: bool) -> Iterator[str]:
    if found.snapshot is None and not found.problems:
        yield "no snapshot was published yet"
    if found.mend_snapshot and not applied:
        yield WILL_FENCE
    if claimed and published is None:
        yield "the job went on until it was fenced, and its newest snapshot needs no repair"
    if published is not None:
        yield "a job that ran on this store is fenced; run it again, and it goes on from the new snapshot"
        yield from (f"{item.what} stays as it is, and nothing needs it any more" for item in found.problems)
    yield from (f"flushed after the snapshot, and not readable: {key}: {why}" for key, why in found.adopted.unreadable)


def shown(screen: Screen, document: Document) -> None:
    facts: list[Fact] = [("snapshot", _snapshot(document))]
    if document["hint"]["mend"]:
        facts.append(("hint", f"{document['hint']['state']}: {'written anew' if document['applied'] else 'stale'}"))
    for damage in document["damaged"]:
        kept = f"{count_text(damage['moved'], 'record')} of it kept, {damage['lost']} lost"
        facts.append(("damaged", f"{damage['message']} ({kept})"))
    for item in document["lost"]:
        what = "the request" if item["start"] is None else f"tokens {item['start']} to {item['stop']}"
        ended = ", which had ended" if item["was"] == "ended" else ""
        facts.append(("lost", f"{what} of {item['rollout']} ({item['call_id']}){ended}"))
    if document["damaged"]:
        facts.append(("kept", f"{document['tokens_kept']} tokens; {document['tokens_lost']} lost"))
    if document["adoption"] is not None and document["adoption"]["segments"] and document["damaged"]:
        facts.append(("adopted", f"{document['adoption']['tokens']} tokens that no snapshot named"))
    facts += [("problem", f"{item['what']}: {item['reason']}") for item in document["problems"]]
    if document["problems"]:
        taken = "nothing" if document["fallback"] is None else f"snapshot {document['fallback']}"
        facts.append(("fallback", f"this cannot be mended; a restore takes {taken}"))
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)
    screen.line()
    screen.line(*_verdict(document))


def _snapshot(document: Document) -> str:
    if document["published"] is not None:
        return f"{document['published']}, published in the place of {document['snapshot']}"
    return "none" if document["snapshot"] is None else str(document["snapshot"])


def _verdict(document: Document) -> tuple[str, str]:
    if document["problems"]:
        return "not repaired", "bold red"
    if not document["needed"]:
        return "nothing to repair", "bold green"
    return ("repaired", "bold green") if document["applied"] else ("not written: add --apply", "bold yellow")
