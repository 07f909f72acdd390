"""Whether a store can be used from here: permissions, clock, format; with a probe, what the place guarantees.

Owns: the checks, what each means and what to do about it.
Does not know: how scratch objects are used (probe.py), whether what is stored is sound (verify.py).

Invariants:
1. Without a probe nothing is written. What can only be known by writing is said to be not known.
2. `ok` is false only if something that a job needs is missing.
3. What stops the look itself (no store, no permission, no answer) is raised, with its exit code.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from recovery.errors import FormatNotUnderstood, NoStore
from recovery.log import PREFIX
from recovery.ports import ObjectStore
from snapshot_inspect.documents import Document
from snapshot_inspect.places import local_root, open_any, open_place
from snapshot_inspect.probe import Answer, Puts, Scratch
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import Unreadable, position, walk
from snapshot_inspect.texts import count_text, nbytes_text, seconds_text

SLOW_PUT_S = 1.0
CLOCK_SLACK_S = 30.0
LITTLE_SPACE = 1 << 30
_ATOMIC = "a coordinator that was replaced could overwrite what its heir published: use another server (docs/s3.md)"
_FIX = {
    "create": _ATOMIC,
    "race": _ATOMIC,
    "overwrite": "the hint may be old; it is only advice, and the log is found without it",
    "range": "reads fetch whole objects: slower, not wrong",
    "list-after-write": "a restore could miss the newest segments: use a system that lists what it has acknowledged",
    "delete": "garbage would stay; look at the permission to delete, and at versioning of the bucket",
}
_NEEDED = frozenset({"create", "race", "list-after-write"})


@dataclass(frozen=True, slots=True)
class Check:
    """`level` is ok, warn or fail; `hint` says what to do about what is not ok."""

    check: str
    level: str
    message: str
    hint: str = ""


def doctor(address: str, *, probe: bool, now: Callable[[], float] = time.time) -> Document:
    """Raises NoStore (unless a probe was asked for), CredentialsRefused, StoreUnavailable and their kin."""
    mark: Mapping[str, Any] | None = None
    try:
        place = open_place(address)
        store, mark = place.store, place.mark
    except NoStore:
        if not probe:
            raise
        store = open_any(address)
    checks = [*_look(address, store, mark, probe, now())]
    puts, ahead_s = None, None
    if probe:
        found, puts, ahead_s = _probe(store, now)
        checks += found
    return {
        "store": address,
        "ok": all(check.level != "fail" for check in checks),
        "probed": probe,
        "checks": [asdict(check) for check in checks],
        "puts": None if puts is None else asdict(puts),
        "clock_ahead_s": ahead_s,
    }


def _look(address: str, store: ObjectStore, mark: Mapping[str, Any] | None, probe: bool, now: float) -> Iterator[Check]:
    listed = store.list(PREFIX)
    yield Check("reach", "ok", f"{address} answers")
    if mark is None:
        yield Check("format", "ok", "no store here yet", "`prefix-recovery run CONFIG` makes one")
    else:
        yield Check("format", "ok", f"format {mark['version']}, written by {mark.get('writer', 'unknown')}")
    yield Check("list", "ok", f"objects can be listed: {count_text(len(listed), 'log entry', 'log entries')}")
    if listed:
        yield from _log(store, now)
    yield from _disk(store, probe)


def _log(store: ObjectStore, now: float) -> Iterator[Check]:
    newest = next(walk(store, position(store).top), None)
    if newest is None:
        return
    if isinstance(newest, Unreadable):
        if isinstance(newest.error, FormatNotUnderstood):
            raise newest.error
        yield Check("read", "fail", newest.error.message, "look: snapshot-inspect verify STORE")
        return
    yield Check("read", "ok", f"objects can be read: slot {newest.slot.seq}")
    ahead = newest.slot.utc - now
    if ahead > CLOCK_SLACK_S:
        said = f"the newest entry of the log was written {seconds_text(ahead)} ahead of this machine's clock"
        yield Check("clock", "warn", said, "set the clocks (NTP); times are for people, nothing is decided by them")
    else:
        yield Check("clock", "ok", "the newest entry of the log is not ahead of this machine's clock")


def _disk(store: ObjectStore, probe: bool) -> Iterator[Check]:
    root = local_root(store)
    if not root:
        if not probe:
            yield Check("write", "warn", "whether objects can be written is not known", "try it: --probe")
        return
    if not os.access(root, os.W_OK | os.X_OK):
        yield Check("write", "warn", f"{root} cannot be written by this user", "a job needs it; reading does not")
    elif not probe:
        yield Check("write", "ok", f"{root} can be written by this user (--probe tries it)")
    free = shutil.disk_usage(root).free
    if free < LITTLE_SPACE:
        yield Check("space", "warn", f"{nbytes_text(free)} free", "make room: a full disk stops snapshots")
    else:
        yield Check("space", "ok", f"{nbytes_text(free)} free")


def _probe(store: ObjectStore, now: Callable[[], float]) -> tuple[list[Check], Puts, float | None]:
    scratch = Scratch(store)
    try:
        answers = scratch.guarantees()
        ahead_s = _clock(store, scratch, now)
        puts = scratch.small_puts()
    finally:
        scratch.remove()
        if root := local_root(store):
            for folder in (scratch.prefix, "probe"):
                with suppress(OSError):  # somebody else's probe may be in it
                    os.rmdir(os.path.join(root, folder))
    checks = [_judged(answer) for answer in answers]
    if ahead_s is not None:
        checks.append(_clock_check(ahead_s))
    checks.append(_speed(puts))
    if scratch.left:
        said = f"{count_text(len(scratch.left), 'scratch object')} could not be removed, under {scratch.prefix}"
        checks.append(Check("delete", "warn", said, "remove them by hand; they belong to no store"))
    return checks, puts, ahead_s


def _judged(answer: Answer) -> Check:
    if answer.fine:
        return Check(answer.check, "ok", answer.message)
    return Check(answer.check, "fail" if answer.check in _NEEDED else "warn", answer.message, _FIX[answer.check])


def _clock(store: ObjectStore, scratch: Scratch, now: Callable[[], float]) -> float | None:
    """The storage's clock less this one, by what it says of an object that was just written."""
    modified_utc = getattr(store, "modified_utc", None)
    if modified_utc is None:
        return None
    before = now()
    scratch.create("clock", b"")
    after, said = now(), modified_utc(scratch.key("clock"))
    if before - 1 <= said <= after + 1:  # as exact as an answer in whole seconds can be
        return 0.0
    return round(float(said) - (before + after) / 2, 3)


def _clock_check(ahead_s: float) -> Check:
    if abs(ahead_s) <= CLOCK_SLACK_S:
        return Check("clock", "ok", f"the storage's clock is within {CLOCK_SLACK_S:g} s of this machine's")
    way = "ahead of" if ahead_s > 0 else "behind"
    said = f"the storage's clock is {seconds_text(ahead_s)} {way} this machine's"
    return Check("clock", "warn", said, "set the clocks (NTP); S3 refuses requests that are 15 minutes off")


def _speed(puts: Puts) -> Check:
    said = (
        f"a create of {puts.nbytes} bytes takes {1000 * puts.median_s:.1f} ms (slowest of {puts.n}: "
        f"{1000 * puts.slowest_s:.1f} ms), {puts.per_second:.0f} a second with {puts.at_once} at once"
    )
    if puts.median_s <= SLOW_PUT_S:
        return Check("speed", "ok", said)
    return Check("speed", "warn", said, "raise gym.generation_chunk_flush_tokens: each flush is one create")


# ---- for people ----------------------------------------------------------------------------------------------------

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def shown(screen: Screen, document: Document) -> None:
    for check in document["checks"]:
        screen.line(f"{check['level']:<4}  {check['check']:<16}  {check['message']}", _STYLES[check["level"]])
        if check["hint"]:
            screen.line(f"{'':<24}{check['hint']}")
    screen.line()
    if document["ok"]:
        what = "this place does what a store needs" if document["probed"] else "nothing that was looked at is wrong"
        screen.line(what, "bold green")
    else:
        screen.line("a job should not use this place", "bold red")
