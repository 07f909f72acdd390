"""What is different between two snapshots, of one store or of two.

Owns: which change a call has gone through between two ledgers.
Does not know: tokens (digests of chunks tell what is the same), which snapshots are meant.

Invariants:
1. A call is one row at most, with the most telling of its changes: restarted, then ended, then grown.
2. Tokens are the same only if their chunks are: position, version and digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recovery.ledger import Entry, Ledger
from recovery.model import ENDED, ChunkRef, PolicyVersion
from recovery.snapshots import Snapshot
from snapshot_inspect import documents
from snapshot_inspect.calls import in_order
from snapshot_inspect.documents import Document
from snapshot_inspect.places import Place
from snapshot_inspect.render import Screen
from snapshot_inspect.texts import count_text, nbytes_text, time_text

CHANGES = ("added", "dropped", "ended", "grown", "restarted")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    place: Place
    snapshot: Snapshot
    ledger: Ledger


def diff(a: Side, b: Side, now: float) -> Document:
    rows, unchanged, new, gone = [], 0, 0, 0
    entries = {entry.call_id: entry for entry in (*in_order(a.ledger), *in_order(b.ledger))}
    for call_id in entries:
        before, after = a.ledger.get(call_id), b.ledger.get(call_id)
        row = _row(before, after)
        new += (after.n_tokens if after else 0) - row["tokens_kept"]
        gone += (before.n_tokens if before else 0) - row["tokens_kept"]
        if row["change"]:
            rows.append(row)
        else:
            unchanged += 1
    changes = Counter(row["change"] for row in rows)
    job, notes = _job(a, b)
    in_a, in_b = _segments(a.ledger), _segments(b.ledger)
    return {
        "a": _side(a, now),
        "b": _side(b, now),
        "calls": rows,
        "totals": {**{change: changes[change] for change in CHANGES}, "unchanged": unchanged},
        "tokens": {"new": new, "gone": gone},
        "bytes": {
            "new": sum(nbytes for key, nbytes in in_b.items() if key not in in_a),
            "gone": sum(nbytes for key, nbytes in in_a.items() if key not in in_b),
        },
        "job": job,
        "notes": notes,
    }


def _segments(ledger: Ledger) -> Mapping[str, int]:
    return {key: ledger.segment(key).nbytes for key in ledger.segments_in_use()}


def _row(before: Entry | None, after: Entry | None) -> Document:
    either = after or before
    assert either is not None
    kept = 0 if before is None or after is None else _kept(before, after)
    return {
        "call_id": either.call_id.hex(),
        "rollout": either.identity.rollout,
        "turn": either.identity.turn,
        "change": _change(before, after, kept),
        "state_a": _state(before),
        "state_b": _state(after),
        "tokens_a": None if before is None else before.n_tokens,
        "tokens_b": None if after is None else after.n_tokens,
        "tokens_kept": kept,
    }


def _change(before: Entry | None, after: Entry | None, kept: int) -> str:
    if before is None:
        return "added"
    if after is None:
        return "dropped"
    if kept < before.n_tokens:
        return "restarted"
    if before.state != ENDED and after.state == ENDED:
        return "ended"
    return "grown" if after.n_tokens > before.n_tokens else ""


def _kept(before: Entry, after: Entry) -> int:
    kept = 0
    for one, other in zip(before.chunks, after.chunks, strict=False):
        if _content(one) != _content(other):
            break
        kept = one.stop
    return kept


def _content(chunk: ChunkRef) -> tuple[int, int, bytes, PolicyVersion]:
    return chunk.start, chunk.n_tokens, chunk.digest, chunk.version


def _state(entry: Entry | None) -> str | None:
    return None if entry is None else "ended" if entry.state == ENDED else "open"


def _side(side: Side, now: float) -> Document:
    counts = side.ledger.counts()
    slot = documents.snapshot_fields(side.snapshot.slot, now)
    return {
        "store": side.place.address,
        **{name: slot[name] for name in ("id", "utc", "age_s", "epoch", "fingerprint")},
        **{name: getattr(counts, name) for name in ("tokens", "calls", "segments", "nbytes", "chunks")},
    }


def _job(a: Side, b: Side) -> tuple[list[Document], list[str]]:
    (one, wrong_a), (other, wrong_b) = (documents.job_record(side.place.store, side.snapshot) for side in (a, b))
    if one is None or other is None:
        return [], [*wrong_a, *wrong_b] or ["the jobs are not compared: not both snapshots have a record of it"]
    rows: list[Document] = []
    for kind in ("must", "recorded"):
        first: Mapping[str, Any] = one[kind]
        second: Mapping[str, Any] = other[kind]
        names = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
        rows += [{"field": name, "kind": kind, "a": first.get(name), "b": second.get(name)} for name in names]
    return rows, []


# ---- for people ----------------------------------------------------------------------------------------------------


def shown(screen: Screen, document: Document) -> None:
    if document["calls"]:
        heads = ("call", "rollout", "turn", "change", "state", "tokens before", "after", "kept")
        numbers = frozenset({"turn", "tokens before", "after", "kept"})
        screen.rows(heads, [_cells(row) for row in document["calls"]], numbers)
        screen.line()
    totals, tokens, nbytes = document["totals"], document["tokens"], document["bytes"]
    sizes = f"+{nbytes_text(nbytes['new'])}, -{nbytes_text(nbytes['gone'])} of segments"
    facts = [
        ("a", _which(document["a"])),
        ("b", _which(document["b"])),
        ("calls", ", ".join(f"{totals[name]} {name}" for name in (*CHANGES, "unchanged"))),
        ("tokens", f"+{tokens['new']}, -{tokens['gone']}"),
        ("bytes", sizes),
    ]
    facts += [("job", f"{item['field']}: {item['a']} in a, {item['b']} in b") for item in document["job"]]
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)


def _which(side: Document) -> str:
    figures = f"{count_text(side['calls'], 'call')}, {count_text(side['tokens'], 'token')}"
    return f"snapshot {side['id']} of {side['store']}, {time_text(side['utc'], side['age_s'])}: {figures}"


def _cells(row: Document) -> list[str]:
    states = [state for state in (row["state_a"], row["state_b"]) if state is not None]
    state = states[0] if len(set(states)) == 1 else " -> ".join(states)
    numbers = ["" if row[name] is None else str(row[name]) for name in ("tokens_a", "tokens_b")]
    return [row["call_id"], row["rollout"], str(row["turn"]), row["change"], state, *numbers, str(row["tokens_kept"])]
