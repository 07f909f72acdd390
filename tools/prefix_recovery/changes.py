"""In what the stored calls of a job, its rows and its prompts file differ: for run, doctor, explain and plan alike.

Owns: which calls and rows are compared, and how a difference is told: the prompt, or which field of the sampling.
Does not know: where the ledger and the requests come from, what follows from a difference.

Invariants:
1. A call of which nothing was saved is not compared: a line that was refused may be mended or removed. Nor is an ended
   call whose line is gone: its row stands.
2. Digests alone decide. What was asked is read only to say in which words the answer differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefix_recovery.prompts import Sample, source_digest
from prefix_recovery.results import Results
from recovery.codec import canonical_json
from recovery.errors import FingerprintMismatch, InputError
from recovery.ledger import Entry
from recovery.model import Request
from snapshot_inspect.texts import count_text

if TYPE_CHECKING:
    from prefix_recovery.engine_requests import Requests

DESCRIBED = 4
"""Changed calls of which one refusal tells what changed."""

_ELSE = (
    "give the changed job a store and an output of its own: "
    "--set rollout_checkpointing.store=OTHER --set output=OTHER.jsonl"
)


@dataclass(slots=True)
class Compared:
    """`same` is a number; `changed` are calls whose line asks for something else by now, `missing` unfinished calls
    that no line asks for."""

    same: int = 0
    changed: list[Entry] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowsHere:
    """`others`: rows that no line asks for; `unknown`: rows of this job that do not say what they answer."""

    others: int
    unknown: int

    def sentences(self, path: Path) -> Iterator[str]:
        if self.others:
            yield f"{path} has {count_text(self.others, 'row')} that no line of the prompts file asks for; they stay"
        if self.unknown:
            yield f"{count_text(self.unknown, 'row')} of {path} do not say what they answer, and were found by id alone"


@dataclass(frozen=True, slots=True)
class Difference:
    """`what`: prompt, sampling or wording; `own`: the field is in the line's own sampling, not in the job's."""

    rollout: str
    id: str
    line: int
    what: str
    field: str | None = None
    stored: Any = None
    present: Any = None
    own: bool = False


def compared(entries: Iterable[Entry], digests: Mapping[str, str]) -> Compared:
    """`digests`: of every sample that is asked for now, by its name, in the order in which changes are told."""
    found = Compared()
    for entry in entries:
        name = entry.identity.rollout
        if entry.ended is None and not entry.n_tokens:
            continue
        if name not in digests:
            if entry.ended is None:
                found.missing.append(name)
        elif digests[name] == entry.identity.source_digest:
            found.same += 1
        else:
            found.changed.append(entry)
    if found.changed:
        order = {name: number for number, name in enumerate(digests)}
        found.changed.sort(key=lambda entry: order[entry.identity.rollout])
    found.missing.sort()
    return found


def refuse_rows(results: Results, samples: Iterable[Sample], sampling: Mapping[str, Any]) -> RowsHere:
    """Raise FingerprintMismatch if a row answers something else than what its sample asks for now.

    Ids like 1, 2, 3 are those of many jobs: without this a row of another one would pass for this one's result.
    """
    wanted, unknown = 0, 0
    for sample in samples:
        row = results.done.get((sample.prompt.id, sample.index))
        if row is None:
            continue
        wanted, unknown = wanted + 1, unknown + (row.source is None)
        if row.source not in (None, source_digest(sample.prompt, sampling)):
            raise FingerprintMismatch(
                f"{results.path} line {row.line}: this result of {sample.prompt.id!r} answers another prompt than line "
                f"{sample.prompt.line} of the prompts file, or was sampled otherwise than it asks",
                hint="give this job an output of its own: --set output=OTHER.jsonl; or, if it is this job's, put the "
                "prompt's line and the config's `sampling` back as they were",
            )
    return RowsHere(len(results.done) - wanted, unknown)


def differences(entry: Entry, stored: Request | None, sample: Sample, requests: Requests) -> list[Difference]:
    """In what a changed call differs; `stored` is what was asked then, None if it cannot be read."""
    prompt = sample.prompt
    found = partial(Difference, entry.identity.rollout, prompt.id, prompt.line)
    if stored is None:
        return [found("wording")]
    try:
        then = stored.prompt_token_ids.tolist()
        if (now := requests.token_ids(prompt)) != then:
            pairs = enumerate(zip(then, now, strict=False))
            same = next((n for n, (a, b) in pairs if a != b), min(len(then), len(now)))
            said = [f"{len(ids)} tokens" for ids in (then, now)]
            return [found("prompt", field=f"token {same}", stored=said[0], present=said[1])]
        asked = requests.sampling_of(prompt, sample.index)
    except InputError as error:
        return [found("prompt", present=error.message)]
    fields = [
        found("sampling", field=name, stored=before, present=after, own=name in prompt.sampling)
        for name in sorted({*stored.sampling, *asked})
        if canonical_json([before := stored.sampling.get(name)]) != canonical_json([after := asked.get(name)])
    ]
    return fields or [found("wording")]


def refuse_changed(
    found: Compared,
    samples: Mapping[str, Sample],
    requests: Requests,
    stored: Callable[[Entry], Request | None],
) -> None:
    """Raise FingerprintMismatch if a call was changed or is no longer asked for, saying which and in what."""
    if found.changed:
        entry = found.changed[0]
        told = differences(entry, stored(entry), samples[entry.identity.rollout], requests)
        more = len(found.changed) - 1
        others = f" (and {more} more stored call{'s' * (more > 1)})" if more else ""
        raise FingerprintMismatch(f"{sentence(told)}{others}", hint=remedy(told))
    if found.missing:
        name, more = found.missing[0], len(found.missing) - 1
        others = f" (and {more} more)" if more else ""
        raise FingerprintMismatch(
            f"the store holds an unfinished call {name!r} that the prompts file no longer asks for{others}",
            hint=f"put the line with id {name.rpartition('#')[0]!r} back, or {_ELSE}",
        )


def sentence(told: list[Difference]) -> str:
    """What changed of one call, in one line."""
    first = told[0]
    who = f"prompt {first.id!r} (line {first.line})"
    match first.what:
        case "prompt" if first.field is None:
            return f"{who} was changed since the store was made, to one that cannot be asked for: {first.present}"
        case "prompt":
            what = f"{first.stored} in the store, {first.present} here, the first other one is {first.field}"
            return f"{who} was changed since the store was made: its prompt ({what})"
        case "sampling":
            each = (f"sampling.{d.field}: {value(d.stored)} in the store, {value(d.present)} here" for d in told)
            fields = "; ".join(each)
            return f"{who} is sampled otherwise than when the store was made: {fields}"
    return f"{who} or the job's `sampling` is written otherwise than when the store was made, and may ask for the same"


def remedy(told: list[Difference]) -> str:
    """What to do or type about a changed call."""
    first = told[0]
    undo = f"put line {first.line} of the prompts file back as it was"
    if first.what == "sampling" and not first.own:
        undo = f"set `sampling.{first.field}` back to {value(first.stored)} in the config"
    elif first.what == "wording":
        undo += ", and `sampling` in the config"
    return f"{undo}, or {_ELSE}"


def value(stated: Any) -> str:
    return "the default" if stated is None else canonical_json(stated).decode()
