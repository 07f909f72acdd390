"""What was found, as the JSON documents of docs/schemas/.

Owns: every field of every document but those about calls (call_documents.py).
Does not know: files, terminals; how anything was found.

Invariants:
1. A document validates against its schema; fields are only ever added.
2. What a log entry states is passed on only if it has the right type; else it is null.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from recovery import pins
from recovery.errors import CredentialsRefused, Damaged, FormatNotUnderstood, RecoveryError
from recovery.ledger import Counts
from recovery.log import Slot, slot_key
from recovery.origin import origin_of
from recovery.ports import ObjectStore
from recovery.snapshots import Snapshot, get_object
from snapshot_inspect.findings import Finding
from snapshot_inspect.newest import Adopted, Newest
from snapshot_inspect.places import Place
from snapshot_inspect.survey import Unreadable
from snapshot_inspect.texts import utc_text
from snapshot_inspect.unpublished import flushed_since
from snapshot_inspect.verify import Verification

Document = dict[str, Any]
COUNTS = ("calls", "open", "ended", "tokens", "chunks", "segments", "nbytes")


def dump(document: Document) -> str:
    """One line of JSON."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


# ---- parts ---------------------------------------------------------------------------------------------------------


def _int(value: Any) -> int | None:
    return value if type(value) is int else None


def text_or_none(value: Any) -> str | None:
    """What a log entry states as text, if it is text (invariant 2)."""
    return value if isinstance(value, str) else None


def moment(utc: float, now: float) -> Document:
    text = utc_text(utc)
    return {"utc": text, "age_s": None if text is None else round(now - utc, 3)}


def counts(found: Counts) -> Document:
    """Figures that were counted."""
    return asdict(found)


def counts_of(slot: Slot) -> Document:
    """Figures as a log entry states them."""
    stated = slot.body.get("counts")
    return {name: _int(stated.get(name)) if isinstance(stated, dict) else None for name in COUNTS}


def snapshot_fields(slot: Slot, now: float) -> Document:
    body = slot.body
    return {
        "id": slot.seq,
        **moment(slot.utc, now),
        "epoch": slot.epoch,
        "owner": slot.owner,
        "cause": text_or_none(body.get("cause")),
        "restored_from": _int(body.get("restored_from")),
        "origin": None if (taken := origin_of(slot)) is None else origin(taken),
        "fingerprint": text_or_none(body.get("fingerprint")),
        "depth": _int(body.get("depth")),
        "bytes_written": _int(body.get("bytes_written")),
        "counts": counts_of(slot),
    }


def origin(taken: Mapping[str, Any]) -> Document:
    """Where a snapshot was taken."""
    return {**taken, "utc": utc_text(taken["utc"])}


def _slot(slot: Slot, now: float) -> Document:
    at = moment(slot.utc, now)
    return {"seq": slot.seq, "kind": slot.kind, "epoch": slot.epoch, "owner": slot.owner, **at}


def adoption(adopted: Adopted) -> Document:
    return {
        "segments": adopted.segments,
        "tokens": adopted.tokens,
        "rejected": [{"reason": reason, "records": n} for reason, n in sorted(adopted.rejected.items())],
        "passed_over": [{"object": key, "reason": reason} for key, reason in adopted.unreadable],
    }


# ---- documents -----------------------------------------------------------------------------------------------------


def list_row(
    place: Place,
    found: Snapshot | Unreadable,
    ledger_keys: set[str],
    now: float,
    *,
    pinned: Container[int],
    forgotten: Container[int],
) -> Document:
    if isinstance(found, Unreadable):
        return {
            "row": "unreadable",
            "store": place.address,
            "id": found.seq,
            "object": slot_key(found.seq),
            "understood": not isinstance(found.error, FormatNotUnderstood),
            "reason": found.error.message,
        }
    present = found.ledger.key in ledger_keys
    return {
        "row": "snapshot",
        "store": place.address,
        **snapshot_fields(found.slot, now),
        "ledger_present": present,
        "pinned": found.id in pinned,
        "forgotten": found.id in forgotten,
    }


def store_row(name: str, address: str, found: Newest | RecoveryError, now: float) -> Document:
    row = {"row": "store", "store": address, "name": name}
    if isinstance(found, Newest):
        shown = snapshot_fields(found.snapshot.slot, now)
        fields = {key: shown[key] for key in ("utc", "age_s", "epoch", "counts")}
        wrong = [f"{item.what}: {item.error.message}" for item in found.passed_over] + found.problems
        error = wrong[0] if wrong else None
        return {**row, "latest": found.snapshot.id, **fields, "error": error, "exit_code": found.exit_code}
    nothing = {"latest": None, "utc": None, "age_s": None, "epoch": None, "counts": None}
    return {**row, **nothing, "error": found.message, "exit_code": found.exit_code}


def _is_pinned(place: Place, snapshot: int) -> bool | None:
    """None: whoever asks may read, but not list (case S6), and only a list tells."""
    try:
        return snapshot in pins.listed(place.store)
    except CredentialsRefused:
        return None


SINGLE_WRITER = "written in single-writer mode: nothing keeps a second run away from this store (docs/s3.md)"


def latest(place: Place, found: Newest, now: float) -> Document:
    pinned = _is_pinned(place, found.snapshot.id)
    single_writer = found.snapshot.slot.single_writer
    notes = [found.position.hint.note, SINGLE_WRITER if single_writer else ""]
    return {
        "store": place.address,
        **snapshot_fields(found.snapshot.slot, now),
        **({} if found.counts is None else {"counts": counts(found.counts)}),
        "tail": found.position.tail,
        "newer": [_slot(slot, now) for slot in found.newer],
        "passed_over": [
            {"object": slot_key(item.seq), "what": item.what, "reason": item.error.message}
            for item in found.passed_over
        ],
        "checked": found.adoption is not None,
        "vouched": found.vouched,
        "problems": found.problems,
        "unchecked": list(_unchecked(found)),
        "unpublished": unpublished(place, found),
        "adoption": None if found.adoption is None else adoption(found.adoption),
        "single_writer": single_writer,
        "pinned": pinned,
        "forgotten": sorted(found.forgotten),
        "notes": [note for note in notes if note],
    }


def unpublished(place: Place, found: Newest) -> Document | None:
    """What was flushed after the newest snapshot, by the names that are listed; None if that cannot be told."""
    if found.forgotten:  # then a restore adopts nothing
        return None
    listed = flushed_since(place.store, found.snapshot.slot)
    if listed is None:
        return None
    return {"segments": len(listed), "nbytes": sum(item.nbytes for item in listed)}


def _unchecked(found: Newest) -> Iterator[str]:
    """What a forged or damaged store could still hide behind this answer."""
    if found.counts is None:
        if not found.vouched:
            yield "the figures and words of the newest log entry, which nothing but itself vouches for"
        yield "the bytes of ledger and states, every segment"
        return
    if not found.vouched:
        yield "time, owner and cause of the newest log entry, which nothing but itself vouches for"
    yield "the tokens of ended calls"


def show(
    place: Place,
    snapshot: Snapshot,
    newest_id: int,
    previous: Snapshot | None,
    now: float,
    *,
    forgotten: bool | None,
) -> Document:
    job, problems = job_record(place.store, snapshot)
    document = snapshot_fields(snapshot.slot, now)
    return {
        "store": place.address,
        **document,
        "latest": newest_id,
        "previous": None if previous is None else previous.id,
        "since_previous": None if previous is None else _difference(document["counts"], counts_of(previous.slot)),
        "slot": {"key": slot_key(snapshot.id), "nonce": snapshot.slot.nonce, "prev": snapshot.slot.prev},
        "ledger": snapshot.ledger.as_json(),
        "states": [{"name": name, **ref.as_json()} for name, ref in sorted(snapshot.states.items())],
        "job": job,
        "pinned": _is_pinned(place, snapshot.id),
        "forgotten": forgotten,
        "problems": problems,
    }


def _difference(now: Document, before: Document) -> Document:
    names = ("calls", "ended", "tokens", "segments")
    return {name: None if None in (now[name], before[name]) else now[name] - before[name] for name in names}


def job_record(store: ObjectStore, snapshot: Snapshot) -> tuple[Document | None, list[str]]:
    """The compatibility record, and what is wrong with it."""
    ref = snapshot.states.get("job")
    if ref is None:
        return None, []
    try:
        record = json.loads(get_object(store, ref))
        return {"must": dict(record["must"]), "recorded": dict(record.get("recorded", {}))}, []
    except Damaged as error:
        return None, [error.message]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return None, [f"{ref.key} is no compatibility record: {error}"]


def verification(place: Place, found: Verification) -> Document:
    mark, hint, around = place.mark, found.position.hint, found.leftovers
    notes = [hint.note] if hint.note else []
    if not found.snapshots and not found.findings:
        notes.append("no snapshot was published yet")
    return {
        "store": place.address,
        "ok": found.exit_code == 0,
        "read_data": found.read_data,
        "format": {
            "version": mark["version"],
            "store_id": text_or_none(mark.get("store_id")),
            "writer": text_or_none(mark.get("writer")),
        },
        "tail": found.position.top,
        "hint": {"state": hint.state, "tail": hint.tail},
        "checked": asdict(found.tally),
        "snapshots": [asdict(status) for status in found.snapshots],
        "problems": [_finding(finding) for finding in found.findings],
        "restore_from": found.restore_from,
        "adoption": adoption(around.adoption),
        "unreferenced": [{"object": item.key, "nbytes": item.nbytes, "why": item.why} for item in around.unreferenced],
        "foreign": around.foreign,
        "unfinished": around.unfinished,
        "notes": notes,
    }


def _finding(finding: Finding) -> Document:
    problem = finding.problem
    return {
        "object": problem.object,
        "kind": problem.kind,
        "message": problem.message,
        "hint": problem.hint,
        "snapshots": finding.snapshots,
        "affected": [asdict(item) for item in problem.affected],
    }
