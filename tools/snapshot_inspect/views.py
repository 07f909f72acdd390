"""The documents as people read them: facts and rows.

Owns: which fields of a document are shown, in which order and words.
Does not know: terminals (render.py), how the documents came to be.

Invariants:
1. Everything shown is in the document; nothing else is read.
2. What is wrong stands after what was found, so that it is what is left on the screen.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from snapshot_inspect.arrays import column_words
from snapshot_inspect.documents import Document
from snapshot_inspect.render import Fact, Screen
from snapshot_inspect.texts import age_text, count_text, nbytes_text, origin_text, time_text

NUMBERS = frozenset({"id", "epoch", "calls", "open", "ended", "tokens", "segments", "size", "turn", "attempt"})
"""Columns that are aligned on the right."""

_FIGURES = ("calls", "open", "ended", "tokens", "segments")
_MOST = 12
"""Names of one kind that are listed before `and n more`."""


_MOST_APART = 10
"""So many re-scored calls are shown, those furthest apart."""


def snapshots(screen: Screen, rows: Sequence[Document]) -> None:
    heads = (
        "id",
        "taken (UTC)",
        "age",
        "cause",
        "epoch",
        "calls",
        "open",
        "ended",
        "tokens",
        "segments",
        "size",
        "note",
    )
    screen.rows(heads, [_snapshot_row(row) for row in rows], NUMBERS)


def _snapshot_row(row: Document) -> list[str]:
    if row["row"] == "unreadable":
        word = "damaged" if row["understood"] else "not understood"
        return [str(row["id"]), *[""] * 10, f"{word}: {row['reason']}"]
    counts = row["counts"]
    marks = {"pinned": row["pinned"], "forgotten": row["forgotten"], "its ledger is gone": not row["ledger_present"]}
    note = ", ".join(text for text, true in marks.items() if true)
    return [
        str(row["id"]),
        _utc(row),
        age_text(row["age_s"]),
        row["cause"] or "",
        str(row["epoch"]),
        *(_number(counts[name]) for name in _FIGURES),
        _size(counts["nbytes"]),
        note,
    ]


def stores(screen: Screen, rows: Sequence[Document]) -> None:
    heads = ("store", "latest", "taken (UTC)", "age", "epoch", *_FIGURES, "size", "note")
    screen.rows(heads, [_store_row(row) for row in rows], NUMBERS | {"latest"})


def _store_row(row: Document) -> list[str]:
    counts = row["counts"] or {}
    return [
        row["name"],
        "" if row["latest"] is None else str(row["latest"]),
        _utc(row) if row["latest"] is not None else "",
        age_text(row["age_s"]) if row["latest"] is not None else "",
        "" if row["epoch"] is None else str(row["epoch"]),
        *("" if row["counts"] is None else _number(counts[name]) for name in _FIGURES),
        "" if row["counts"] is None else _size(counts["nbytes"]),
        row["error"] or "",
    ]


def latest(screen: Screen, document: Document) -> None:
    facts = _snapshot_facts(document)
    if document["forgotten"]:
        facts.append(("forgotten", f"{_ids(document['forgotten'])}, and what was flushed after this snapshot"))
    if (since := document["unpublished"]) and since["segments"]:
        facts.append(("since then", _since(since, checked=document["checked"])))
    if document["newer"]:
        facts.append(("newer slots", ", ".join(f"{slot['seq']} {slot['kind']}" for slot in document["newer"][:_MOST])))
    if document["checked"]:
        facts.append(("checked", "ledger, states, segments and the tokens of open calls, as a restore does"))
    else:
        facts.append(("checked", "the log, and that ledger and states are there (--check verifies as a restore would)"))
    facts += [("not checked", what) for what in document["unchecked"]]
    if document["checked"]:
        facts += _adoption_facts(document["adoption"])
    facts += [("note", note) for note in document["notes"]]
    facts += [("passed over", f"{item['what']}: {item['reason']}") for item in document["passed_over"]]
    facts += [("problem", problem) for problem in document["problems"]]
    screen.facts(facts)


def _since(since: Document, *, checked: bool) -> str:
    what = f"{count_text(since['segments'], 'segment')} ({_size(since['nbytes'])}) flushed and not yet published"
    return what if checked else f"{what}; a restore takes over what fits (--check counts its tokens)"


def _snapshot_facts(document: Document) -> list[Fact]:
    counts = document["counts"]
    calls = f"{count_text(counts['calls'], 'call')} ({_number(counts['open'])} open, {_number(counts['ended'])} ended)"
    sizes = f"{count_text(counts['segments'], 'segment')} ({_size(counts['nbytes'])})"
    facts = [
        ("snapshot", str(document["id"])),
        ("taken", time_text(document["utc"], document["age_s"])),
        ("cause", _cause(document)),
        ("epoch", f"{document['epoch']}, {document['owner'] or 'owner unknown'}"),
        ("calls", calls),
        ("tokens", f"{_number(counts['tokens'])} in {count_text(counts['chunks'], 'chunk')}, {sizes}"),
    ]
    if document["pinned"]:
        facts.append(("pinned", "it is not collected, whatever is published after it"))
    return facts


def _cause(document: Document) -> str:
    cause = document["cause"] or "unknown"
    if document["origin"] is not None:
        return f"{cause} ({origin_text(document['origin'])})"
    return cause if document["restored_from"] is None else f"{cause} (restored from {document['restored_from']})"


def _adoption_facts(adoption: Document) -> list[Fact]:
    segments = adoption["segments"]
    facts = []
    if segments:
        what = f"{count_text(len(segments), 'unpublished segment')} with {count_text(adoption['tokens'], 'token')}"
        facts.append(("would adopt", what))
    facts += [("cannot adopt", f"{item['object']}: {item['reason']}") for item in adoption["passed_over"][:_MOST]]
    return facts


def show(screen: Screen, document: Document) -> None:
    facts = _snapshot_facts(document)
    facts[0] = ("snapshot", f"{document['id']} ({_place_in_log(document)})")
    if (since := document["since_previous"]) is not None:
        change = ", ".join(f"{_signed(since[name])} {name}" for name in ("calls", "ended", "tokens", "segments"))
        facts.append(("change", f"{change} since snapshot {document['previous']}"))
    ledger = document["ledger"]
    before = f", and {_number(document['depth'])} objects before it" if document["depth"] else ""
    facts.append(("ledger", f"{ledger['key']}, {_size(ledger['nbytes'])}{before}"))
    facts += [("state", f"{s['name']}: {s['key']}, {_size(s['nbytes'])}") for s in document["states"]]
    facts.append(("written", _size(document["bytes_written"])))
    facts.append(("fingerprint", document["fingerprint"] or "none"))
    job = document["job"] or {"must": {}, "recorded": {}}
    facts += [("must match", f"{name} = {value}") for name, value in sorted(job["must"].items())]
    facts += [("recorded", f"{name} = {value}") for name, value in sorted(job["recorded"].items())]
    facts += [("problem", problem) for problem in document["problems"]]
    screen.facts(facts)


def _place_in_log(document: Document) -> str:
    if document["forgotten"]:
        return f"forgotten; the latest is {document['latest']}"
    return "the latest" if document["id"] == document["latest"] else f"the latest is {document['latest']}"


def verification(screen: Screen, document: Document) -> None:
    checked = document["checked"]
    facts = [
        ("store", f"format {document['format']['version']}, written by {document['format']['writer'] or 'unknown'}"),
        ("log", f"{count_text(checked['slots'], 'slot')}, the newest is {document['tail']}"),
    ]
    for status in ("sound", "collected", "forgotten", "damaged", "not_understood"):
        ids = [item["id"] for item in document["snapshots"] if item["status"] == status]
        if ids:
            facts.append((status.replace("_", " "), _ids(ids)))
    facts.append(("checked", _checked(checked, document["read_data"])))
    if document["restore_from"] is not None:
        facts.append(("newest sound", f"snapshot {document['restore_from']}"))
    facts += _adoption_facts(document["adoption"])
    facts += _kinds("unreferenced", [item["object"] for item in document["unreferenced"]], "object", "for a later run")
    facts += _kinds("foreign", document["foreign"], "file", "not part of the store")
    if document["unfinished"]:
        facts.append(("unfinished", f"{count_text(document['unfinished'], 'file')} in .tmp"))
    facts += [("note", note) for note in document["notes"]]
    facts += _rescored(document.get("rescored"))
    screen.facts(facts)
    for problem in document["problems"]:
        screen.line()
        screen.facts(_problem(problem))
    screen.line()
    n = len(document["problems"])
    if n:
        store = shlex.quote(document["store"])
        screen.line(f"What a restore takes now, and why: snapshot-inspect latest --check {store}")
        screen.line(f"What could be mended of the newest one: snapshot-inspect repair {store}")
    screen.line(f"{count_text(n, 'problem')} found" if n else "no problem found", "bold red" if n else "bold green")


def _rescored(rescored: Document | None) -> list[Fact]:
    if rescored is None:
        return []
    scored = [call for call in rescored["calls"] if call["largest"] is not None]
    left = len(rescored["calls"]) - len(scored)
    facts = [("rescored", f"{count_text(len(scored), 'call')} of snapshot {rescored['snapshot']}, {left} left out")]
    facts += [(call["rollout"], f"{call['largest']:.3g} apart at token {call['at']}") for call in scored[:_MOST_APART]]
    whys = sorted({call["skipped"] for call in rescored["calls"] if call["skipped"]})
    return facts + [("left out", why) for why in whys]


def _checked(checked: dict[str, int], read_data: bool) -> str:
    structure = f"{count_text(checked['ledger_objects'], 'ledger object')}, {count_text(checked['states'], 'state')}"
    segments = count_text(checked["segments"], "segment")
    if not read_data:
        return f"{structure}; {segments} by name and size (--read-data reads them)"
    data = f"{checked['tokens']} tokens in {count_text(checked['chunks'], 'chunk')}"
    requests = count_text(checked["requests"], "request")
    return f"{structure}; {segments} byte by byte ({_size(checked['nbytes'])}): {data}, {requests}"


def _kinds(name: str, objects: list[str], what: str, remark: str) -> list[Fact]:
    return [(name, f"{count_text(len(objects), what)}, {remark}: {_names(objects)}")] if objects else []


def _problem(problem: Document) -> list[Fact]:
    facts = [("problem", problem["message"])]
    if problem["affected"]:
        facts.append(("affects", _names([_affected(item) for item in problem["affected"]], "; ")))
    if problem["snapshots"]:
        facts.append(("in", f"snapshot {_ids(problem['snapshots'])}"))
    if problem["hint"]:
        facts.append(("hint", problem["hint"]))
    return facts


def _affected(item: Document) -> str:
    what = "the request" if item["start"] is None else f"tokens {item['start']} to {item['stop']}"
    return f"{what} of {item['rollout']} ({item['call_id']})"


def calls(screen: Screen, rows: Sequence[Document]) -> None:
    heads = ("call", "rollout", "turn", "state", "tokens", "chunks", "attempt", "ended by", "restores", "restart only")
    screen.rows(heads, [_call_row(row) for row in rows], NUMBERS | {"chunks"})


def _call_row(row: Document) -> list[str]:
    return [
        row["call_id"],
        row["rollout"],
        str(row["turn"]),
        row["state"],
        str(row["n_tokens"]),
        str(row["n_chunks"]),
        str(row["attempt"]),
        _ended_by(row),
        " ".join(f"{item['kind']}@{item['at']}" for item in row["history"]),
        row["restart_only"],
    ]


def _ended_by(row: Document) -> str:
    reason = row["finish_reason"] or ""
    return reason if row["stop_reason"] is None else f"{reason} ({row['stop_reason']})"


def cat(screen: Screen, document: Document, pieces: Sequence[str] | None) -> None:
    """`pieces`: the text of each token, if a tokenizer was given."""
    facts = [
        ("call", document["call_id"]),
        ("rollout", f"{document['rollout']}, turn {document['turn']}, attempt {document['attempt']}"),
        ("snapshot", str(document["snapshot"])),
        ("state", " ".join(filter(None, (document["state"], _ended_by(document))))),
        ("prompt", count_text(len(document["prompt_token_ids"]), "token")),
        ("tokens", str(document["n_tokens"])),
        ("sampling", ", ".join(f"{k}={v}" for k, v in sorted(document["sampling"].items())) or "defaults"),
    ]
    if document["restart_only"]:
        facts.append(("restart only", document["restart_only"]))
    facts += [("restore", _event(item)) for item in document["history"]]
    facts += [("column", column_words(column)) for column in document["columns"]]
    if document["text"] is not None:
        facts += [("prompt text", document["prompt_text"]), ("text", document["text"])]
    screen.facts(facts)
    screen.line()
    heads = ("position", "token", "logprob", "version", *(() if pieces is None else ("text",)))
    screen.rows(heads, list(_token_rows(document, pieces)), frozenset({"position", "token", "logprob"}))


def _event(item: Document) -> str:
    if item["kind"] == "resume":
        return f"carried on at {item['at']} by snapshot {item['snapshot']}, {item['exactness']}"
    return f"begun again by snapshot {item['snapshot']}, {item['at']} tokens thrown away: {item['reason']}"


def _token_rows(document: Document, pieces: Sequence[str] | None) -> list[list[str]]:
    versions = [f"{lineage}/{n}" for start, end, lineage, n in document["version_spans"] for _ in range(start, end)]
    rows = []
    for i, (token, logprob) in enumerate(zip(document["token_ids"], document["logprobs"], strict=True)):
        shown = logprob if isinstance(logprob, str) else f"{logprob:.6f}"
        rows.append([str(i), str(token), shown, versions[i], *(() if pieces is None else (repr(pieces[i]),))])
    return rows


# ---- words ---------------------------------------------------------------------------------------------------------


def _number(value: Any) -> str:
    return "?" if value is None else str(value)


def _signed(value: int | None) -> str:
    return "?" if value is None else f"{value:+d}"


def _size(value: int | None) -> str:
    return "?" if value is None else nbytes_text(value)


def _utc(row: Document) -> str:
    return "unknown" if row["utc"] is None else f"{row['utc'][:10]} {row['utc'][11:19]}"


def _names(names: Sequence[str], separator: str = ", ") -> str:
    more = len(names) - _MOST
    return separator.join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _ids(ids: Sequence[int]) -> str:
    """`2, 4, 9`, or `2 … 900 (450)` for many."""
    return ", ".join(map(str, ids)) if len(ids) <= _MOST else f"{ids[0]} … {ids[-1]} ({len(ids)})"
