"""What a request of the OpenAI server says about its attempt: read from its headers and body, and how it is refused.

Owns: the names that clients send, which routes are captured, the errors that they get.
Does not know: connections, the engine.

Invariants:
1. A request without an attempt id is left alone, also one that cannot be read. An empty id is one that is malformed.
2. What is only about delivery (streamed or not) is not part of the request: a stream may be asked for again whole.
3. The key of a client is used for a digest and kept nowhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recovery.reconnection import Claim, JustForgotten, OtherOwner, OtherRequest, Refusal

HEADER = "x-attempt-id"
NOT_CAPTURED = "x-attempt-not-captured"
"""Header of an answer of which nothing was stored although its request has an attempt id: because of what."""
XARG = "attempt_id"
"""In `vllm_xargs`."""

STATUS = "/v1/recovery"
ATTEMPT = "/v1/recovery/attempts/"
CAPTURED = ("/v1/chat/completions", "/v1/completions")
GENERATING = (
    "/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/cohere/v2/chat",
    "/invocations", "/generative_scoring", "/v1/systemone", "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
"""Routes that ask the engine for tokens, but whose requests are not captured."""

_TRUE = frozenset(("true", "1", "1.0", "t", "yes", "y", "on"))
"""What vLLM's own model of a request reads as true."""
_DELIVERY = ("stream", "stream_options", "request_id")
_ATTEMPT = re.compile(r"[A-Za-z0-9._:@/+=~-]{1,200}")
_JUST_FORGOTTEN = "attempt_just_forgotten"


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
        passes = self.status == 503 or self.code == _JUST_FORGOTTEN  # by itself, and the same request is served then
        return [(b"content-type", b"application/json"), (b"x-should-retry", b"true" if passes else b"false")]


@dataclass(frozen=True, slots=True)
class Uncaptured:
    """A request for an attempt of which nothing can be stored, because of its route or of a field: `kind`."""

    attempt: str
    kind: str

    @property
    def header(self) -> tuple[bytes, bytes]:
        """Of the answer."""
        return NOT_CAPTURED.encode(), self.kind.encode()


TAKEN_OVER = Refused(
    409, "attempt_taken_over", "another connection with the same attempt id came, and is served instead of this one"
)
STOPPING = Refused(
    503,
    "recovery_stopping",
    "the server is being stopped and keeps what it has of this message; ask again under the same id",
)
STARTING = Refused(503, "recovery_starting", "the API server process that captures is not up yet; ask again")


def headers_of(scope: Any, name: str) -> list[str]:
    """All of that name."""
    wanted = name.encode()
    return [value.decode("latin-1").strip(" \t") for key, value in scope["headers"] if key.lower() == wanted]


def header_of(scope: Any, name: str) -> str:
    """Empty if it is not there."""
    return next(iter(headers_of(scope, name)), "")


def path_of(scope: Any) -> str:
    """The route that is asked for, as the server's own middleware reads it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_generating(scope: Any) -> bool:
    """Whether a request may be for an attempt; its body decides."""
    return scope["method"] == "POST" and path_of(scope) in (*CAPTURED, *GENERATING)


def is_about_attempts(scope: Any) -> bool:
    path, method = path_of(scope), scope["method"]
    return (path == STATUS and method == "GET") or (path.startswith(ATTEMPT) and method in ("GET", "DELETE"))


def key_of(scope: Any) -> str:
    """What the sender shows for itself: the bearer token."""
    return header_of(scope, "authorization").partition(" ")[2].strip()


def attempt_of(headers: Sequence[str], body: dict[str, Any]) -> str | Refused | None:
    """The attempt id of a request, None if it has none."""
    arguments = body.get("vllm_xargs")
    in_body = arguments.get(XARG) if isinstance(arguments, dict) else None
    given: list[Any] = [*headers, *([] if in_body is None else [in_body])]
    for one in given:
        if not isinstance(one, str) or not _ATTEMPT.fullmatch(one):
            what = f"an attempt id is 1 to 200 of A-Z a-z 0-9 . _ : @ / + = ~ -, not {one!r:.80}"
            return Refused(400, "attempt_id_malformed", what)
    if len(headers) > 1:
        return Refused(400, "attempt_id_twice", f"header {HEADER} is there {len(headers)} times; send it once")
    if len(set(given)) > 1:
        return Refused(400, "attempt_id_twice", f"header {HEADER} and vllm_xargs.{XARG} name different attempts")
    return str(given[0]) if given else None


def wanted_of(scope: Any, raw: bytes) -> Claim | Uncaptured | Refused | None:
    """What a request of a generating route wants of us; None if it is nothing."""
    route, headers = path_of(scope), headers_of(scope, HEADER)
    if not headers and not _may_name_one(raw):
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        if route in CAPTURED:
            return None  # the server says what is wrong with it
        body = {}  # a form, say
    attempt = attempt_of(headers, body)
    if not isinstance(attempt, str):
        return attempt
    if route not in CAPTURED:
        return Uncaptured(attempt, route.lstrip("/"))
    if str(body.get("use_beam_search")).strip().lower() in _TRUE:
        return Uncaptured(attempt, "use_beam_search")  # many short requests of the engine, no calls to be carried on
    return Claim.of(attempt, key_of(scope), route, asked_of(body))


def _may_name_one(raw: bytes) -> bool:
    """Whether the argument may be in a body: as it is, with letters escaped, or in an encoding of JSON with zeros."""
    return XARG.encode() in raw or b"\\u00" in raw or b"\0" in raw[:4]


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


def refused(refusal: Refusal) -> Refused:
    """In words."""
    match refusal:
        case OtherOwner():
            return Refused(403, "attempt_of_another_key", "this attempt id belongs to another API key")
        case JustForgotten():
            return Refused(
                409,
                _JUST_FORGOTTEN,
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
