"""Which attempt id belongs to whom and to which request, and which of its connections is served now.

Owns: the claims on attempt ids, the connections that hold one, and which idle ones are forgotten.
Does not know: HTTP, calls, the engine, the store. Events in, effects out; a connection is a number.

An attempt id is what a client sends so that its request can be carried on by another connection.

Invariants:
1. An attempt id is its first claimant's for as long as it is known: another owner, and another request, are refused,
   and a refusal changes nothing.
2. The newest connection of an attempt is the one that is served: the earlier ones are told to end, each once.
3. A connection begins when no earlier one of its attempt is left, so that at most one is being served.
4. A claim under which nothing was kept is gone with its last connection.
5. Only idle attempts are forgotten, the one that was idle longest first, when there are more than `keep`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIELDS_MAX = 64
"""Members of a request of which a short digest is kept, to name what differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a connection says: `owner` and `body` are digests, `fields` short ones of the members of the body."""

    attempt: str
    owner: str
    body: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, attempt: str, key: str, route: str, body: Mapping[str, Any]) -> Claim:
        """`key`: the secret that its sender showed, empty if none; it is kept as a digest that no other attempt has."""
        owner = cls.owner_of(attempt, key)
        fields = {name: _digest(body[name])[:8] for name in sorted(body)[:FIELDS_MAX]}
        return cls(attempt=attempt, owner=owner, body=_digest([route, dict(body)])[:32], fields=fields)

    @staticmethod
    def owner_of(attempt: str, key: str) -> str:
        return _digest([attempt, key])[:32] if key else ""

    @property
    def record(self) -> str:
        """What is stored with each call of the attempt."""
        return json.dumps({"owner": self.owner, "body": self.body, "fields": dict(self.fields)}, sort_keys=True)

    @classmethod
    def from_record(cls, attempt: str, record: str) -> Claim:
        """Raises ValueError for what `record` never gave."""
        try:
            found = json.loads(record)
            return cls(
                attempt=attempt, owner=str(found["owner"]), body=str(found["body"]), fields=dict(found["fields"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"attempt {attempt!r} has no claim in its record: {error}") from error

    def differing(self, other: Claim) -> list[str]:
        """Names of the members that differ; empty if what differs has no digest of its own."""
        names = sorted({*self.fields, *other.fields})
        return [name for name in names if self.fields.get(name) != other.fields.get(name)]


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Begin:
    """Serve this connection now."""

    connection: int


@dataclass(frozen=True, slots=True)
class End:
    """Stop serving this connection: a newer one of its attempt is there."""

    connection: int


@dataclass(frozen=True, slots=True)
class OtherOwner:
    """Refused: the attempt id belongs to somebody else."""


@dataclass(frozen=True, slots=True)
class OtherRequest:
    """Refused: the attempt id belongs to another request; `fields` of it differ, as far as they can be named."""

    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JustForgotten:
    """Refused: what the store has of this attempt goes with the next snapshot, and is nobody's until then."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody is expected to ask for this attempt again."""

    attempt: str


Refusal = OtherOwner | OtherRequest | JustForgotten
Effect = Begin | End | Forget


@dataclass(slots=True)
class _Attempt:
    claim: Claim
    kept: bool
    present: list[int] = field(default_factory=list)
    told: set[int] = field(default_factory=set)


class Reconnection:
    """The attempts of one server. `keep`: how many idle ones are remembered."""

    def __init__(self, keep: int) -> None:
        assert keep >= 1
        self._keep = keep
        self._attempts: dict[str, _Attempt] = {}
        self._idle: dict[str, None] = {}
        self._of: dict[int, str] = {}

    def restore(self, claims: Iterable[Claim]) -> list[Effect]:
        """What a store has, oldest first; before the first connection."""
        assert not self._of
        for claim in claims:
            self._attempts.setdefault(claim.attempt, _Attempt(claim, kept=True))
            self._idle.setdefault(claim.attempt)
        return self._shrink()

    def check(self, claim: Claim) -> Refusal | None:
        """What stands between a claim and its attempt id, if anything."""
        known = self._attempts.get(claim.attempt)
        if known is None:
            return None
        if claim.owner != known.claim.owner:
            return OtherOwner()
        if claim.body != known.claim.body:
            return OtherRequest(tuple(claim.differing(known.claim)))
        return None

    def arrive(self, claim: Claim, connection: int) -> Refusal | list[Effect]:
        """A new connection. If it is not refused, it is there until `left`."""
        assert connection not in self._of
        refusal = self.check(claim)
        if refusal is not None:
            return refusal
        attempt = self._attempts.setdefault(claim.attempt, _Attempt(claim, kept=False))
        self._idle.pop(claim.attempt, None)
        self._of[connection] = claim.attempt
        earlier = list(attempt.present)
        attempt.present.append(connection)
        if not earlier:
            return [Begin(connection)]
        ends: list[Effect] = [End(one) for one in earlier if one not in attempt.told]
        attempt.told.update(earlier)
        return ends

    def kept(self, attempt: str) -> None:
        """Something of this attempt is captured from now on."""
        self._attempts[attempt].kept = True

    def left(self, connection: int) -> list[Effect]:
        """Nothing is done for this connection any more."""
        name = self._of.pop(connection)
        attempt = self._attempts[name]
        was_first = attempt.present[0] == connection
        attempt.present.remove(connection)
        attempt.told.discard(connection)
        if attempt.present:
            # The next may have been waiting for this one alone; an earlier one that is still there keeps it waiting.
            return [Begin(attempt.present[0])] if was_first and len(attempt.present) == 1 else []
        if not attempt.kept:
            del self._attempts[name]
            return []
        self._idle[name] = None
        return self._shrink()

    def forget(self, attempt: str) -> list[Effect]:
        """Its owner does not need it any more. Nothing happens if it is unknown or has a connection."""
        if attempt not in self._idle:
            return []
        del self._idle[attempt], self._attempts[attempt]
        return [Forget(attempt)]

    def is_known(self, attempt: str) -> bool:
        return attempt in self._attempts

    def owner(self, attempt: str) -> str:
        return self._attempts[attempt].claim.owner

    def is_live(self, attempt: str) -> bool:
        return attempt in self._attempts and attempt not in self._idle

    def counts(self) -> tuple[int, int]:
        """Attempts with a connection, and idle ones."""
        return len(self._attempts) - len(self._idle), len(self._idle)

    def _shrink(self) -> list[Effect]:
        surplus = list(self._idle)[: max(0, len(self._idle) - self._keep)]
        return [effect for name in surplus for effect in self.forget(name)]
