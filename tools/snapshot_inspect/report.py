"""The life of a job in one document: epochs, snapshots, policy versions, and every call's time.

Owns: the figures of a report and its summary on a terminal.
Does not know: the page (page.py), how times are estimated (timeline.py).

Invariants:
1. Figures that `stats` has too are made by the same code from the same ledger.
2. Times are seconds since the first claim; what is estimated is said to be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from recovery.errors import Damaged
from recovery.ledger import Entry, Ledger
from recovery.model import ENDED, PolicyVersion, Restarted
from snapshot_inspect.calls import in_order
from snapshot_inspect.documents import COUNTS, Document, snapshot_fields
from snapshot_inspect.holds import Owner
from snapshot_inspect.places import Place
from snapshot_inspect.render import Screen
from snapshot_inspect.stats import call_figures, older_notes, problem_notes, token_figures
from snapshot_inspect.survey import nothing_published
from snapshot_inspect.texts import count_text, nbytes_text, seconds_text, utc_text
from snapshot_inspect.timeline import REGENERATED, REUSED, FlushTimes, Life, Span, life_of
from snapshot_inspect.verify import Sound, Verification

_ESTIMATED = (
    "times between two snapshots are estimated: a store holds no time but those of its log, and flushes are taken to "
    "have come evenly"
)

_UNKNOWN = (
    "tokens that were decoded and not flushed when a run ended are in no store: how many of those were generated again "
    "is not known"
)


def report(place: Place, found: Verification, sound: Sound | None, owners: list[Owner], now: float) -> Document:
    """Raises NothingPublished, or Damaged if no snapshot is sound."""
    if sound is None:
        if not found.snapshots and not found.findings:
            raise nothing_published(place.store)
        raise Damaged("no snapshot of this store is sound", hint="look: snapshot-inspect verify STORE")
    begin = min(slot.utc for owner in owners for slot in owner.slots)
    spans = _spans(owners, begin)
    times = FlushTimes(
        spans,
        ((epoch, utc - begin, flushed) for epoch, utc, flushed in sound.accounted),
        sound.ledger.segments_in_use(),
    )
    lives = {entry.call_id: life_of(entry, times) for entry in sound.ledger}
    versions = _versions(lives.values())
    epochs = _epochs(owners, spans, lives.values())
    end = max(epoch["end_s"] for epoch in epochs)
    calls = [_call(entry, lives[entry.call_id], versions) for entry in in_order(sound.ledger)]
    return {
        "store": place.address,
        "snapshot": sound.snapshot.id,
        "begin_utc": utc_text(begin),
        "end_utc": utc_text(begin + end),
        "duration_s": _s(end),
        "figures": _figures(sound.ledger, lives, owners, epochs, len(versions)),
        "epochs": epochs,
        "snapshots": _snapshots(owners, begin, now),
        "versions": list(versions.values()),
        "calls": calls,
        "notes": [_ESTIMATED, _UNKNOWN, *problem_notes(found, place.address), *older_notes(found, sound)],
    }


def _s(seconds: float) -> float:
    return round(seconds, 3)


def _spans(owners: list[Owner], begin: float) -> dict[int, Span]:
    """Of every epoch, whatever the clocks of the writers said in between."""
    claims = [owner.slots[0].utc - begin for owner in owners]
    limits = [*claims[1:], math.inf]
    return {
        owner.epoch: Span(claim, max(slot.utc - begin for slot in owner.slots), max(claim, limit))
        for owner, claim, limit in zip(owners, claims, limits, strict=True)
    }


def _epochs(owners: list[Owner], spans: Mapping[int, Span], lives: Iterable[Life]) -> list[Document]:
    """An epoch lasted to its last entry in the log, or to its last flush."""
    ends = {epoch: span.end for epoch, span in spans.items()}
    for run in (run for life in lives for run in life.runs):
        ends[run.epoch] = max(run.end, ends.get(run.epoch, 0.0))
    return [
        {
            "epoch": owner.epoch,
            "owner": owner.slots[0].owner,
            "begin_s": _s(spans[owner.epoch].begin),
            "end_s": _s(ends[owner.epoch]),
            "killed": owner is not owners[-1] and not owner.ended,
            "at_most_s": None if spans[owner.epoch].limit == math.inf else _s(spans[owner.epoch].limit),
            "snapshots": sum(slot.kind == "snapshot" for slot in owner.slots),
        }
        for owner in owners
    ]


def _snapshots(owners: list[Owner], begin: float, now: float) -> list[Document]:
    rows = []
    for slot in (slot for owner in owners for slot in owner.slots if slot.kind == "snapshot"):
        stated = snapshot_fields(slot, now)
        counts = {name: stated["counts"][name] for name in COUNTS if name in ("tokens", "calls", "ended", "nbytes")}
        rows.append(
            {"id": slot.seq, "epoch": slot.epoch, "cause": stated["cause"], "at_s": _s(slot.utc - begin), **counts}
        )
    return rows


def _versions(lives: Any) -> dict[PolicyVersion, Document]:
    """Every version that tokens are of, in order; `lag` is how many numbers of its lineage are newer."""
    seen: dict[PolicyVersion, list[Any]] = defaultdict(list)
    for life in lives:
        for run in life.runs:
            seen[run.version].append(run)
    newest: dict[str, int] = defaultdict(int)
    for version in seen:
        newest[version.lineage] = max(newest[version.lineage], version.number)
    return {
        version: {
            "lineage": version.lineage,
            "number": version.number,
            "tokens": sum(run.n_tokens for run in seen[version]),
            "begin_s": _s(min(run.begin for run in seen[version])),
            "end_s": _s(max(run.end for run in seen[version])),
            "lag": newest[version.lineage] - version.number,
        }
        for version in sorted(seen)
    }


def _call(entry: Entry, life: Life, versions: dict[PolicyVersion, Document]) -> Document:
    numbers = {version: index for index, version in enumerate(versions)}
    return {
        "call_id": entry.call_id.hex(),
        "rollout": entry.identity.rollout,
        "turn": entry.identity.turn,
        "state": "ended" if entry.state == ENDED else "open",
        "finish_reason": None if entry.ended is None else entry.ended[0],
        "tokens": entry.n_tokens,
        "attempt": entry.attempt,
        "reused": life.count(REUSED),
        "regenerated": life.count(REGENERATED),
        "thrown_away": sum(event.at for event in entry.history if isinstance(event, Restarted)),
        "lag": max((versions[run.version]["lag"] for run in life.runs), default=0),
        "begin_s": _s(life.begin),
        "end_s": _s(life.end),
        "runs": [[_s(r.begin), _s(r.end), r.n_tokens, r.kind, numbers[r.version]] for r in life.runs],
    }


def _figures(
    ledger: Ledger, lives: Mapping[Any, Life], owners: list[Owner], epochs: list[Document], n_versions: int
) -> Document:
    tokens, calls = token_figures(ledger), call_figures(ledger)
    return {
        **{name: calls[name] for name in ("calls", "open", "ended")},
        "tokens": tokens["tokens"],
        **{name: calls[name] for name in ("chunks", "segments")},
        **{name: tokens[name] for name in ("stored_nbytes", "raw_nbytes")},
        "tokens_reused": sum(life.count(REUSED) for life in lives.values()),
        "tokens_regenerated": sum(life.count(REGENERATED) for life in lives.values()),
        **{name: calls[name] for name in ("tokens_thrown_away", "restored")},
        "snapshots": sum(epoch["snapshots"] for epoch in epochs),
        "kills": sum(epoch["killed"] for epoch in epochs),
        "epochs": len(owners),
        "versions": n_versions,
    }


# ---- for people ----------------------------------------------------------------------------------------------------


def shown(screen: Screen, document: Document) -> None:
    figures = document["figures"]
    heads = ("epoch", "owner", "began", "lasted", "snapshots", "ended by")
    rows = [
        [
            str(epoch["epoch"]),
            epoch["owner"] or "unknown",
            f"+{seconds_text(epoch['begin_s'])}",
            _lasted(epoch),
            str(epoch["snapshots"]),
            "killed or fenced" if epoch["killed"] else "itself" if epoch is not document["epochs"][-1] else "",
        ]
        for epoch in document["epochs"]
    ]
    screen.rows(heads, rows, frozenset({"epoch", "snapshots", "began", "lasted"}))
    screen.line()
    versions = [
        [
            f"{version['lineage']}/{version['number']}",
            str(version["tokens"]),
            f"+{seconds_text(version['begin_s'])}",
            f"+{seconds_text(version['end_s'])}",
            str(version["lag"]),
        ]
        for version in document["versions"]
    ]
    screen.rows(("version", "tokens", "from", "to", "lag"), versions, frozenset({"tokens", "from", "to", "lag"}))
    screen.line()
    screen.facts(_facts(document, figures))


def _lasted(epoch: Document) -> str:
    """Who left no flush that a snapshot names is only known to have ended before the next one began."""
    lasted = epoch["end_s"] - epoch["begin_s"]
    if lasted >= 1 or not epoch["killed"]:
        return seconds_text(lasted)
    return f"< {seconds_text(max(1, epoch['at_most_s'] - epoch['begin_s']))}"


def _facts(document: Document, figures: Document) -> list[tuple[str, str]]:
    sizes = f"{nbytes_text(figures['raw_nbytes'])} raw, {nbytes_text(figures['stored_nbytes'])} stored"
    life = f"{seconds_text(document['duration_s'])} since {document['begin_utc']}"
    return [
        (
            "job",
            f"{life}; {count_text(figures['snapshots'], 'snapshot')}; "
            f"{count_text(figures['kills'], 'epoch')} of {figures['epochs']} ended without a last one",
        ),
        ("figures of", f"snapshot {document['snapshot']}"),
        (
            "calls",
            f"{figures['calls']} ({figures['open']} open, {figures['ended']} ended), {figures['restored']} restored",
        ),
        ("tokens", f"{figures['tokens']} in {count_text(figures['chunks'], 'chunk')}; {sizes}"),
        ("reused", f"{count_text(figures['tokens_reused'], 'token')} carried over from one epoch to a later one"),
        (
            "regenerated",
            f"{count_text(figures['tokens_regenerated'], 'token')} of calls that began again, for "
            f"{figures['tokens_thrown_away']} that restores threw away",
        ),
        *(("note", note) for note in document["notes"]),
    ]
