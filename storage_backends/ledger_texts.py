"""The JSON texts inside a ledger object: its header, and end and history of a call.

Owns: their fields, to text and back with every type checked (docs/format.md, section 8).
Does not know: columns, files.

Invariants:
1. What is read back equals what was written; unknown fields are ignored.
2. A text that is not of this form is Damaged, naming the call and the field.
3. A key is checked before anyone asks a store for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from recovery.errors import Damaged
from recovery.model import FINISH_REASONS, Restarted, Restore, Resumed, are_batches
from storage_backends.keys import is_key
from storage_backends.strict_json import Where, dump, parse, parse_list, take, take_number, take_stop_reason

Ended = tuple[str, int | str | None]


def check_header(header: dict[str, Any], what: str) -> None:
    """The parts of a header that this package does not use itself but everyone relies on."""
    parent, flushed = header.get("parent"), header.get("flushed", {})
    if parent is not None and not isinstance(parent, dict):
        raise Damaged(f"{what}: parent is no object reference")
    if not isinstance(flushed, dict) or not all(type(n) is int and n >= 0 for n in flushed.values()):
        raise Damaged(f"{what}: flushed is no map of numbers")
    numbered = take_number(header, "numbered", what, limit=1 << 32)
    segments = header.get("segments", [])
    if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
        raise Damaged(f"{what}: segments are no list of descriptions")
    for segment in segments:
        name = f"{what}: segment {take(segment, 'key', str, what):.200}"
        if not is_key(segment["key"]):
            raise Damaged(f"{name} is no key")
        take_number(segment, "number", name, limit=numbered)
        take_number(segment, "nbytes", name)
        take_number(segment, "crc32c", name, limit=1 << 32)
        wide = segment.get("wide", [])
        if not isinstance(wide, list) or not all(isinstance(type_, str) for type_ in wide):
            raise Damaged(f"{name}: wide is no list of types")
        if not are_batches(take(segment, "batches", list, name)):
            raise Damaged(f"{name}: a batch is not [offset, length, crc32c, n_records]")
    if any(len({segment[name] for segment in segments}) != len(segments) for name in ("key", "number")):
        raise Damaged(f"{what}: a segment is described twice")


@lru_cache(maxsize=1024)
def ended_text(ended: Ended | None) -> str | None:
    return None if ended is None else dump({"finish_reason": ended[0], "stop_reason": ended[1]})


def read_ended(text: str, where: Where) -> Ended:
    where = f"{where}, ended"
    record = parse(text, where)
    reason = take(record, "finish_reason", str, where)
    if reason not in FINISH_REASONS:
        raise Damaged(f"{where}: {reason!r:.60} does not end a call")
    return reason, take_stop_reason(record, where)


def history_text(history: tuple[Restore, ...] | None) -> str | None:
    if not history:
        return None if history is None else "[]"
    return f"[{','.join(map(_event_text, history))}]"


@lru_cache(maxsize=4096)
def _event_text(restore: Restore) -> str:
    match restore:
        case Resumed(at, snapshot, exactness):
            return dump({"kind": "resume", "at": at, "snapshot": snapshot, "exactness": exactness})
        case Restarted(at, snapshot, reason):
            return dump({"kind": "restart", "at": at, "snapshot": snapshot, "reason": reason})


def read_history(text: str, where: Where) -> tuple[Restore, ...]:
    if text == "[]":
        return ()
    where = f"{where}, history"
    return tuple(_read_event(item, where) for item in parse_list(text, where))


def _read_event(item: Any, where: Where) -> Restore:
    if not isinstance(item, dict):
        raise Damaged(f"{where}: an entry is no JSON object")
    at, snapshot = take_number(item, "at", where), take_number(item, "snapshot", where)
    match item.get("kind"):
        case "resume":
            return Resumed(at, snapshot, take(item, "exactness", str, where))
        case "restart":
            return Restarted(at, snapshot, take(item, "reason", str, where))
    raise Damaged(f"{where}: an entry is neither a resume nor a restart")
