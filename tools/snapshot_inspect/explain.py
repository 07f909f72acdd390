"""Whether a snapshot can be restored here: what a restore compares, field by field.

Owns: the verdict on each field, and what all of them mean together.
Does not know: how the values here are found out (prefix_recovery.job_here), whether the snapshot is sound (verify.py).

Invariants:
1. `restorable` is what recovery.restore.check_fingerprint says of the same values; the tests compare the two.
2. What was not compared is never called the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recovery.codec import canonical_json
from recovery.ledger import Ledger
from recovery.ports import SegmentCodec
from recovery.snapshots import Snapshot
from snapshot_inspect.calls import in_order
from snapshot_inspect.documents import Document, job_record, text_or_none
from snapshot_inspect.places import Place
from snapshot_inspect.render import Screen
from snapshot_inspect.texts import count_text

if TYPE_CHECKING:
    from prefix_recovery.changes import Compared, Difference
    from prefix_recovery.job_here import JobHere

_MOST = 12


@dataclass(frozen=True, slots=True)
class Here:
    """What is known of this machine.

    `complete`: everything that decides is known. `compared`: the stored calls with the prompts file, `told`: in what
    those differ that were looked at.
    """

    must: Mapping[str, Any]
    recorded: Mapping[str, Any]
    complete: bool
    compared: Compared | None = None
    told: list[Difference] = field(default_factory=list)


def machine_here() -> Here:
    """Without a job file: what is installed."""
    from prefix_recovery.engine import set_environment
    from vllm_hooks.fingerprint import machine_fields

    set_environment()
    return Here({}, machine_fields(), complete=False)


def with_config(job: JobHere, place: Place, codec: SegmentCodec, ledger: Ledger) -> Here:
    """The job as it is here, compared with the calls of `ledger`."""
    from prefix_recovery import changes, stored_job

    found = changes.compared(in_order(ledger), job.source_digests)
    told = [
        difference
        for entry in found.changed[: changes.DESCRIBED]
        for difference in changes.differences(
            entry,
            stored_job.asked(place.store, codec, ledger, entry),
            job.samples[entry.identity.rollout],
            job.requests,
        )
    ]
    return Here(job.must, job.recorded, complete=True, compared=found, told=told)


def explain(place: Place, snapshot: Snapshot, here: Here, config: str | None) -> Document:
    record, notes = job_record(place.store, snapshot)
    stored = record or {"must": {}, "recorded": {}}
    fields = [
        *_fields("must", stored["must"], here.must, here.complete),
        *_fields("recorded", stored["recorded"], here.recorded, here.complete),
    ]
    prompts = None if here.compared is None else _prompts(here.compared, here.told)
    if record is None and not notes:
        notes = [f"snapshot {snapshot.id} has no record of its job: there is nothing to compare"]
    notes += participants_note(snapshot)
    restorable = _restorable(fields, record is not None, prompts)
    return {
        "store": place.address,
        "snapshot": snapshot.id,
        "config": config,
        "fingerprint": text_or_none(snapshot.slot.body.get("fingerprint")),
        "fields": fields,
        "prompts": prompts,
        "restorable": restorable,
        "grade": _grade(fields, restorable),
        "notes": notes,
    }


def participants_note(snapshot: Snapshot) -> list[str]:
    """What only a running loop can compare: the states of participants other than the job's record."""
    names = sorted({*snapshot.states} - {"job"})
    if not names:
        return []
    return [
        f"what the participants say of their states is not asked ({', '.join(names)}): one may refuse this snapshot"
    ]


def _fields(kind: str, stored: Mapping[str, Any], here: Mapping[str, Any], complete: bool) -> list[Document]:
    here = json.loads(canonical_json(dict(here)))  # as it would be stored: a tuple is a list
    rows = []
    for name in sorted({*stored, *(here if complete else ())}):
        if name not in here and not complete:
            verdict, effect = "not_compared", "unknown"
        elif name in stored and name in here and canonical_json(stored[name]) == canonical_json(here[name]):
            verdict, effect = "same", "none"
        else:
            verdict, effect = "differs", "refuses" if kind == "must" else "lowers"
        rows.append(
            {
                "field": name,
                "kind": kind,
                "stored": stored.get(name),
                "present": here.get(name),
                "verdict": verdict,
                "effect": effect,
            }
        )
    return rows


def _prompts(compared: Compared, told: list[Difference]) -> Document:
    """As a run compares them."""
    return {
        "same": compared.same,
        "changed": [entry.identity.rollout for entry in compared.changed],
        "missing": compared.missing,
        "differences": [dataclasses.asdict(one) for one in told],
    }


def _restorable(fields: list[Document], has_record: bool, prompts: Document | None) -> bool | None:
    if any(field["effect"] == "refuses" for field in fields):
        return False
    if prompts is not None and (prompts["changed"] or prompts["missing"]):
        return False
    decided = all(field["verdict"] != "not_compared" for field in fields if field["kind"] == "must")
    return True if has_record and decided and prompts is not None else None


def _grade(fields: list[Document], restorable: bool | None) -> str:
    if restorable is False:
        return "refused"
    if any(field["effect"] == "lowers" for field in fields):
        return "statistical"
    return "self_test" if restorable else "unknown"


# ---- for people ----------------------------------------------------------------------------------------------------

_EFFECTS = {"refuses": "differs: refuses", "lowers": "differs: lowers the grade", "none": "same", "unknown": "-"}
_GRADES = {
    "self_test": "what the engine's self-test shows",
    "statistical": "no more than statistical: the engine is not the one that the tokens are of",
    "refused": "nothing: a restore refuses",
    "unknown": "not known",
}


def shown(screen: Screen, document: Document) -> None:
    heads = ("field", "kind", "in the store", "here", "verdict")
    rows = [
        [f["field"], f["kind"], _value(f["stored"]), _value(f["present"]), _EFFECTS[f["effect"]]]
        for f in document["fields"]
    ]
    screen.rows(heads, rows)
    screen.line()
    facts = [("snapshot", str(document["snapshot"]))]
    if (prompts := document["prompts"]) is not None:
        facts.append(("prompts", f"{count_text(prompts['same'], 'stored call')} with the same line"))
        facts += _named("changed", prompts["changed"]) + _named("not asked for", prompts["missing"])
        facts += [("what", line) for line in _told(prompts["differences"])]
    facts += [("resumes claim", _GRADES[document["grade"]])]
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)
    screen.line()
    match document["restorable"]:
        case True:
            screen.line("it can be restored here", "bold green")
        case False:
            screen.line("it cannot be restored here", "bold red")
        case None:
            screen.line("what decides was not compared; name the job file: --config FILE", "bold yellow")


def _told(differences: list[Document]) -> list[str]:
    from prefix_recovery import changes

    calls: dict[str, list[changes.Difference]] = {}
    for stated in differences:
        calls.setdefault(stated["rollout"], []).append(changes.Difference(**stated))
    return [f"{changes.sentence(told)}; {changes.remedy(told)}" for told in calls.values()]


def _value(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 48 else f"{text[:47]}…"


def _named(name: str, calls: list[str]) -> list[tuple[str, str]]:
    more = f" and {len(calls) - _MOST} more" if len(calls) > _MOST else ""
    return [(name, ", ".join(calls[:_MOST]) + more)] if calls else []
