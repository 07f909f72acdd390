"""Whether a server keeps its word on conditional create, found out by trying.

Owns: the probe, and the refusal of a server on which two writers could both believe that they published.
Does not know: the verbs' requests, single-writer mode (that skips this).

Invariants:
1. A probe writes only keys of its own, random and under `probe/`, and removes them however it ends.
2. A server is never taken at its word: the second create has to be refused and the first one's bytes still be there.
"""

from __future__ import annotations

import enum
import secrets
from contextlib import suppress
from dataclasses import dataclass

from recovery.errors import ConfigError, RecoveryError
from recovery.ports import Put
from storage_backends.s3 import S3Store
from storage_backends.s3_failures import Kind
from storage_backends.s3_retry import Failed


class Guarantee(enum.Enum):
    """What a server does with a create of what exists."""

    HONOURED = "refuses it"
    IGNORED = "silently ignores the condition of a create and overwrites what exists"
    REFUSED = "refuses conditional create altogether"


@dataclass(frozen=True, slots=True)
class Probed:
    """What was found, and the answer that showed it."""

    guarantee: Guarantee
    answer: str


_NOT_KNOWN = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest"})


def probe_conditional_create(store: S3Store) -> Probed:
    """Create a random key twice. Raises the store's errors: no bucket, no permission, no answer."""
    key = f"probe/{secrets.token_hex(16)}"
    try:
        found = _probe(store, key)
    except RecoveryError:
        with suppress(RecoveryError):
            store.delete(key)
        raise
    store.delete(key)
    return found


def _probe(store: S3Store, key: str) -> Probed:
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    outcomes = []
    for data in (first, second):
        outcome = store.try_create(key, data)
        if isinstance(outcome, Failed):
            failure = outcome.failure
            if failure.kind is Kind.NOT_IMPLEMENTED or failure.code in _NOT_KNOWN:
                return Probed(Guarantee.REFUSED, failure.answer)
            raise store.error(outcome, "PutObject", key, maybe_done=outcome.lost)
        outcomes.append(outcome)
    kept = store.get(key) == first
    if outcomes[1] is Put.EXISTS and kept:
        return Probed(Guarantee.HONOURED, "412 to the second of two creates")
    said = "success" if outcomes[1] is Put.CREATED else "412"
    return Probed(Guarantee.IGNORED, f"{said} to the second of two creates, and {'kept' if kept else 'lost'} the first")


def require_conditional_create(store: S3Store) -> None:
    """Raises ConfigError, naming server and guarantee, unless the store may have two writers without harm."""
    found = probe_conditional_create(store)
    if found.guarantee is Guarantee.HONOURED:
        return
    raise ConfigError(
        f"{store.url}: {store.endpoint} {found.guarantee.value} (If-None-Match: *; it answered {found.answer}). "
        "Missing is atomic create: without it a coordinator that was replaced can overwrite what its heir published",
        hint="use a server that has it (docs/s3.md); or, where nothing else ever writes, store_options.exclusive "
        "(exclusive=True), which fences nobody",
    )
