"""The verbs that look at a store from the side of a job: explain, plan, diff, stats, holds, report, doctor.

Owns: which parts each verb reads, and what its exit code says about what was found.
Does not know: the command line's grammar, how errors are printed.

Invariants:
1. As in verbs.py: a verb reads first and answers when it is done.
2. The engine's configuration is read only where `--config` names a job.
"""

from __future__ import annotations

import re
from argparse import Namespace
from functools import partial

from recovery.errors import ConfigError, Damaged, FingerprintMismatch
from snapshot_inspect import calls, diff, doctor, explain, holds, page, plan, report, stats
from snapshot_inspect.places import Place, is_config, ledger_codec, naming, open_place, segment_codec
from snapshot_inspect.survey import Choice, choose, is_forgotten, position
from snapshot_inspect.verbs import Answer, notes_of, worst
from snapshot_inspect.verify import structure


def explain_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    choice = choose(place.store, position(place.store), args.id)
    snapshot = choice.snapshot
    here = explain.machine_here()
    config = _config(args)
    if config is not None:
        from prefix_recovery.job_here import job_here

        ledger = calls.read_ledger(place.store, ledger_codec(), snapshot)
        here = explain.with_config(job_here(config), place, segment_codec(), ledger)
    document = explain.explain(place, snapshot, here, config)
    refused = None
    if document["restorable"] is False:
        what = f"snapshot {snapshot.id} belongs to another job than {config or 'this one'}"
        refused = FingerprintMismatch(what, hint="which fields differ is listed above; a run refuses it")
    code = 0 if refused is None else refused.exit_code
    show = partial(explain.shown, document=document)
    return Answer(code, [document], show, notes_of(choice), error=refused)


def plan_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    tail = position(place.store).tail
    choice = plan.read_choice(args.id, 0 if args.id == "latest" else choose_id(place, args.id))
    config = _config(args)
    if config is None:
        job = plan.own_job(place, tail)
    else:
        from prefix_recovery.job_here import job_here
        from prefix_recovery.stored_job import refuse_changed

        here = job_here(config)
        refuse = partial(refuse_changed, place.store, segment_codec(), here=here)
        job = plan.Job(here.must, here.stop, here.samples, refuse)
    document = plan.plan(place, (segment_codec(), ledger_codec()), tail, choice, job, config)
    code = Damaged.exit_code if document["passed_over"] else 0
    return Answer(code, [document], lambda screen: plan.shown(screen, document))


def _config(args: Namespace) -> str | None:
    """The job's file: the one that was named, or the one that the store was found by."""
    named: str | None = args.config
    return named or (args.store if is_config(args.store) else None)


def choose_id(place: Place, text: str) -> int:
    return choose(place.store, position(place.store), text).snapshot.id


def diff_(args: Namespace, now: float) -> Answer:
    """`STORE A B`, `STORE A` (with the latest) or `STORE STORE2` (the latest of both)."""
    place = open_place(args.store)
    if args.b is None and not _is_id(args.a):
        sides = [_side(place, "latest")]
        with naming(args.a):
            sides.append(_side(open_place(args.a), "latest"))
    elif not _is_id(args.a):
        raise ConfigError(f"{args.a!r} is no snapshot", hint="diff STORE A B, diff STORE A, or diff STORE STORE2")
    else:
        sides = [_side(place, args.a), _side(place, args.b or "latest")]
    (a, notes_a), (b, notes_b) = sides
    document = diff.diff(a, b, now)
    return Answer(0, [document], lambda screen: diff.shown(screen, document), tuple(dict.fromkeys(notes_a + notes_b)))


def _is_id(text: str) -> bool:
    return text == "latest" or re.fullmatch("[0-9]+", text) is not None


def _side(place: Place, text: str) -> tuple[diff.Side, tuple[str, ...]]:
    at = position(place.store)
    choice: Choice = choose(place.store, at, text)
    ledger = calls.read_ledger(place.store, ledger_codec(), choice.snapshot)
    notes = notes_of(choice)
    if is_forgotten(place.store, at.top, choice.snapshot.id):
        notes += (f"snapshot {choice.snapshot.id} of {place.address} was forgotten: no restore takes it",)
    return diff.Side(place, choice.snapshot, ledger), notes


def stats_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    found, sound = structure(place, segment_codec(), ledger_codec())
    document = stats.stats(place, found, sound)
    show = partial(stats.shown, document=document)
    return Answer(found.exit_code, [document], show, error=found.not_understood)


def holds_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    at = position(place.store)
    owners, unreadable = holds.owners_of(place.store, at)
    document = holds.holds(place, at, owners, unreadable, now)
    error = worst([item.error for item in unreadable])
    code = 0 if error is None else error.exit_code
    return Answer(code, [document], lambda screen: holds.shown(screen, document), error=error)


def report_(args: Namespace, now: float) -> Answer:
    place = open_place(args.store)
    found, sound = structure(place, segment_codec(), ledger_codec())
    owners, _ = holds.owners_of(place.store, position(place.store))
    document = report.report(place, found, sound, owners, now)
    notes: tuple[str, ...] = ()
    if args.html is not None:
        page.write(args.html, document)
        notes = (f"the page is {args.html}; open it in a browser, no network is needed",)
    show = partial(report.shown, document=document)
    return Answer(found.exit_code, [document], show, notes, error=found.not_understood)


def doctor_(args: Namespace, now: float) -> Answer:
    document = doctor.doctor(args.store, probe=args.probe)
    return Answer(0 if document["ok"] else 1, [document], lambda screen: doctor.shown(screen, document))
