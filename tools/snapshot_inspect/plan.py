"""What a restore would do, call by call, without doing it.

Owns: the dry run: choose, adopt, plan, on a ledger in memory.
Does not know: how a restore publishes, what the values of a job are (prefix_recovery.job_here).

Invariants:
1. The parts are those of a restore (recovery.restore.choose, recovery.adoption, recovery.resume); the tests run a real
   restore on a copy and compare.
2. Nothing is claimed and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from recovery import resume
from recovery.errors import Damaged
from recovery.gathering import Transcripts
from recovery.ledger import Ledger
from recovery.log_reading import Read, walk_back
from recovery.model import ENDED, OPEN
from recovery.reading import read_transcripts
from recovery.restore import Choice, Chosen, choose
from recovery.restored import RestoredCall, planned
from recovery.resume import StopRules
from recovery.snapshots import Snapshot
from snapshot_inspect import documents
from snapshot_inspect.calls import in_order
from snapshot_inspect.documents import Document
from snapshot_inspect.explain import participants_note
from snapshot_inspect.newest import Adopted, Codecs, would_adopt
from snapshot_inspect.places import Place
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import nothing_published
from snapshot_inspect.texts import count_text

UNKNOWN_STOP = StopRules((), 1 << 30)
_NO_CONFIG = (
    "without --config the job is taken to be the store's own, its prompts are not counted, and an end of sequence as "
    "the last saved token is not recognised"
)


@dataclass(frozen=True, slots=True)
class Job:
    """For whom a restore is planned. `samples`: the names of the prompts' samples, None if they are not known;
    `refuse_changed`: raises FingerprintMismatch for a ledger whose calls are not what the job asks for now."""

    must: Mapping[str, Any]
    stop: StopRules
    samples: Collection[str] | None = None
    refuse_changed: Callable[[Ledger], object] = id


def own_job(place: Place, tail: int) -> Job:
    """The job that the newest readable snapshot belongs to. Raises NothingPublished, or what is wrong with the log."""
    wrong: Damaged | None = None
    for read in walk_back(place.store, tail):
        try:
            if not isinstance(read, Read):
                raise read
            if read.slot.kind == "snapshot":
                snapshot = Snapshot.from_slot(read.slot)
                record, problems = documents.job_record(place.store, snapshot)
                if record is not None:
                    return Job(record["must"], UNKNOWN_STOP)
                raise Damaged(problems[0] if problems else f"snapshot {snapshot.id} has no record of its job")
        except Damaged as error:
            wrong = wrong or error
    raise wrong or nothing_published(place.store)


def plan(place: Place, codecs: Codecs, tail: int, choice: Choice, job: Job, config: str | None) -> Document:
    """Raises what a restore raises: FingerprintMismatch, NothingPublished, Damaged and their kin."""
    store, (segments, ledgers) = place.store, codecs
    chosen = choose(store, segments, ledgers, tail, choice, job.must)
    if chosen.loaded is None:
        raise nothing_published(place.store)
    adopted, transcripts = _adopt(place, codecs, chosen, choice)
    ledger = chosen.loaded.ledger
    job.refuse_changed(ledger)
    planned_calls = {call.entry.call_id: call for call in planned(transcripts, job.stop)}
    calls = [_call(planned_calls[entry.call_id]) for entry in in_order(ledger) if entry.state == OPEN]
    known = {entry.identity.rollout for entry in ledger}
    not_begun = None if job.samples is None else len(set(job.samples) - known)
    return {
        "store": place.address,
        "snapshot": chosen.loaded.snapshot.id,
        "config": config,
        "passed_over": [
            *({"what": item.what, "reason": item.reason} for item in chosen.passed_over),
            *({"what": f"segment {key}", "reason": reason} for key, reason in adopted.unreadable),
        ],
        "adoption": documents.adoption(adopted),
        "calls": [call for call, _ in calls],
        "totals": _totals(calls, sum(entry.state == ENDED for entry in ledger), not_begun),
        "notes": [*([] if config is not None else [_NO_CONFIG]), *participants_note(chosen.loaded.snapshot)],
    }


def _adopt(place: Place, codecs: Codecs, chosen: Chosen, choice: Choice) -> tuple[Adopted, Transcripts]:
    """As recovery.restore.restore does: an explicit id adopts nothing, nor does who cannot read what garbage is."""
    loaded = chosen.loaded
    assert loaded is not None
    if isinstance(choice, int) or not chosen.adopts:
        return Adopted(), chosen.transcripts
    epoch, flushed = loaded.snapshot.slot.epoch, loaded.flushed
    store, segments, ledger = place.store, codecs[0], loaded.ledger
    adopted = would_adopt(store, segments, ledger, epoch=epoch, flushed=flushed, collected=chosen.collected)
    if not adopted.segments:
        return adopted, chosen.transcripts
    return adopted, read_transcripts(store, segments, ledger, (entry for entry in ledger if entry.state == OPEN))


def _call(call: RestoredCall) -> tuple[Document, int]:
    """What becomes of an open call, and how many tokens its prompt has."""
    entry, found = call.entry, call.plan
    verdict, left, finish_reason, reason = "reuse", None, None, ""
    match found:
        case resume.Resume():
            left = found.max_tokens
        case resume.Finish():
            verdict, finish_reason = "finished", found.finish_reason
        case resume.Restart():
            verdict, reason = "redo", found.reason
    document = {
        "call_id": entry.call_id.hex(),
        "rollout": entry.identity.rollout,
        "turn": entry.identity.turn,
        "verdict": verdict,
        "n_tokens": call.n_tokens,
        "max_tokens_left": left,
        "finish_reason": finish_reason,
        "reason": reason,
    }
    return document, len(call.transcript.request.prompt_token_ids)


def _totals(calls: list[tuple[Document, int]], n_ended: int, not_begun: int | None) -> Document:
    n = {verdict: sum(call["verdict"] == verdict for call, _ in calls) for verdict in ("reuse", "redo", "finished")}
    kept = [(call["n_tokens"], n_prompt) for call, n_prompt in calls if call["verdict"] == "reuse"]
    return {
        **n,
        "ended": n_ended,
        "not_begun": not_begun,
        "calls_to_make": n["reuse"] + n["redo"] + (not_begun or 0),
        "tokens_reused": sum(call["n_tokens"] for call, _ in calls if call["verdict"] != "redo"),
        "tokens_redone": sum(call["n_tokens"] for call, _ in calls if call["verdict"] == "redo"),
        "tokens_prefilled": sum(n_tokens + n_prompt for n_tokens, n_prompt in kept),
    }


def read_choice(text: str, snapshot_id: int) -> Choice:
    """`latest` is what a run does by itself; anything else is a restore of exactly that snapshot."""
    return "auto" if text == "latest" else snapshot_id


# ---- for people ----------------------------------------------------------------------------------------------------


def shown(screen: Screen, document: Document) -> None:
    totals = document["totals"]
    if document["calls"]:
        screen.rows(
            ("call", "rollout", "turn", "verdict", "tokens", "left", "why"),
            [_row(call) for call in document["calls"]],
            frozenset({"turn", "tokens", "left"}),
        )
        screen.line()
    facts = [("snapshot", str(document["snapshot"]))]
    facts += [("passed over", f"{item['what']}: {item['reason']}") for item in document["passed_over"]]
    if (adoption := document["adoption"])["segments"]:
        what = count_text(len(adoption["segments"]), "segment")
        facts.append(("would adopt", f"{what} with {count_text(adoption['tokens'], 'token')}"))
    begun = "" if totals["not_begun"] is None else f", {totals['not_begun']} not begun yet"
    facts += [
        (
            "calls",
            f"{totals['reuse']} reuse, {totals['redo']} redo, {totals['finished']} finished, "
            f"{totals['ended']} ended before{begun}",
        ),
        ("to make", f"{count_text(totals['calls_to_make'], 'request')} to the engine"),
        (
            "tokens",
            f"{totals['tokens_reused']} saved, {totals['tokens_redone']} thrown away, "
            f"{totals['tokens_prefilled']} to prefill",
        ),
    ]
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)


def _row(call: Document) -> list[str]:
    left = "" if call["max_tokens_left"] is None else str(call["max_tokens_left"])
    why = call["reason"] or (call["finish_reason"] or "")
    return [call["call_id"], call["rollout"], str(call["turn"]), call["verdict"], str(call["n_tokens"]), left, why]
