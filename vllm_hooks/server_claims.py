"""What a request of the OpenAI server says about its attempt: read from its headers and body, and how it is refused.

Owns: the names that clients send, which routes are captured, the errors that they get.
Does not know: connections, the engine.

Invariants:
1. A request without an attempt id is left alone, also one that cannot be read.
2. What is only about delivery (streamed or not) is not part of the request: a stream may be asked for again whole.
3. The key of a client is used for a digest and kept nowhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from recovery.reconnection import Claim, JustForgotten, OtherOwner, OtherRequest, Refusal

HEADER = "x-attempt-id"
XARG = "attempt_id"
"""In `vllm_xargs`."""

STATUS = "/v1/recovery"
ATTEMPT = "/v1/recovery/attempts/"
CAPTURED = ("/v1/chat/completions", "/v1/completions")
GENERATING = ("/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/inference/v1/generate")
"""Routes that generate, but whose requests are not captured."""

_TRUE = frozenset(("true", "1", "1.0", "t", "yes", "y", "on"))
"""What vLLM's own model of a request reads as true."""
_DELIVERY = ("stream", "stream_options", "request_id")
_ATTEMPT = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,200}")
_RETRY_MAY_HELP = frozenset((503,))


@dataclass(frozen=True, slots=True)
class Refused:
    """In the server's own form of errors. The official client repeats 409 and 5xx unless it is told not to."""

    status: int
    code: str
    message: str

    @property
    def body(self) -> bytes:
        return json.dumps(self.document).encode()

    @property
    def document(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": "prefix_recovery", "param": None, "code": self.code}}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        retry = b"true" if self.status in _RETRY_MAY_HELP else b"false"
        return [(b"content-type", b"application/json"), (b"x-should-retry", retry)]


TAKEN_OVER = Refused(
    409, "attempt_taken_over", "another connection with the same attempt id came, and is served instead of this one"
)
STARTING = Refused(503, "recovery_starting", "the API server process that captures is not up yet; ask again")


def header_of(scope: Any, name: str) -> str:
    """Empty if it is not there."""
    wanted = name.encode()
    values = (value for key, value in scope["headers"] if key.lower() == wanted)
    return next(values, b"").decode("latin-1").strip()


def path_of(scope: Any) -> str:
    """The route that is asked for, as the server's own middleware reads it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_captured_route(scope: Any) -> bool:
    return scope["method"] == "POST" and path_of(scope) in CAPTURED


def is_uncaptured(scope: Any) -> bool:
    """A request for an attempt that cannot be captured."""
    return scope["method"] == "POST" and path_of(scope) in GENERATING and bool(header_of(scope, HEADER))


def is_about_attempts(scope: Any) -> bool:
    path, method = path_of(scope), scope["method"]
    return (path == STATUS and method == "GET") or (path.startswith(ATTEMPT) and method in ("GET", "DELETE"))


def may_be_ours(scope: Any) -> bool:
    """Whether a request may want something of us; its body decides."""
    return is_captured_route(scope) or is_uncaptured(scope) or is_about_attempts(scope)


def key_of(scope: Any) -> str:
    """What the sender shows for itself: the bearer token."""
    return header_of(scope, "authorization").partition(" ")[2].strip()


def attempt_of(header: str, body: Any) -> str | Refused | None:
    """The attempt id of a request, None if it has none."""
    arguments = body.get("vllm_xargs") if isinstance(body, dict) else None
    in_body = arguments.get(XARG) if isinstance(arguments, dict) else None
    given = [one for one in (header, in_body) if one not in ("", None)]
    if not given:
        return None
    for one in given:
        if not isinstance(one, str) or not _ATTEMPT.fullmatch(one):
            what = f"an attempt id is 1 to 200 of A-Z a-z 0-9 . _ : @ / + = ~ -, not {one!r:.80}"
            return Refused(400, "attempt_id_malformed", what)
    if len(set(given)) > 1:
        return Refused(400, "attempt_id_twice", f"header {HEADER} and vllm_xargs.{XARG} name different attempts")
    return str(given[0])


def claim_of(scope: Any, raw: bytes) -> Claim | Refused | None:
    """What a request claims; None if it wants nothing of us."""
    header = header_of(scope, HEADER)
    if not header and XARG.encode() not in raw:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None  # the server says what is wrong with it
    if not isinstance(body, dict):
        return None
    attempt = attempt_of(header, body)
    if not isinstance(attempt, str):
        return attempt
    return Claim.of(attempt, key_of(scope), path_of(scope), asked_of(body))


def asked_of(body: dict[str, Any]) -> dict[str, Any]:
    """The members of a body that say what is generated."""
    asked = {name: value for name, value in body.items() if name not in _DELIVERY}
    arguments = asked.get("vllm_xargs")
    if isinstance(arguments, dict) and XARG in arguments:
        rest = {name: value for name, value in arguments.items() if name != XARG}
        asked.pop("vllm_xargs")
        if rest:
            asked["vllm_xargs"] = rest
    return asked


def is_beam_search(raw: bytes) -> bool:
    """Many short requests of the engine, which are no calls that could be carried on."""
    if b"use_beam_search" not in raw:
        return False
    return str(json.loads(raw).get("use_beam_search")).strip().lower() in _TRUE


def refused(refusal: Refusal) -> Refused:
    """In words."""
    match refusal:
        case OtherOwner():
            return Refused(403, "attempt_of_another_key", "this attempt id belongs to another API key")
        case JustForgotten():
            return Refused(
                409,
                "attempt_just_forgotten",
                "this attempt id was forgotten a moment ago and is free again after the next snapshot; "
                "ask again then, or send an attempt id of its own",
            )
        case OtherRequest(fields=fields):
            what = f": {_listed(fields)}" if fields else ""
            return Refused(
                422,
                "attempt_of_another_request",
                f"this attempt id belongs to another request, which differs in what it asks for{what}; "
                "send a new request with an attempt id of its own",
            )


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
