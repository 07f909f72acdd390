"""A proxy before a real S3 server that fails on purpose.

Owns: passing requests on, the faults, and plans that say which request meets which fault.
Does not know: the store under test, what the server behind it is.

Invariants:
1. With the plan `pass_on` it changes nothing: the client's own Host header and signature reach the server.
2. Each request takes exactly one step of the plan, in the order in which requests arrive; all are in `seen`.
3. A fault before the server applies nothing; one after it lets the server do everything and keeps the answer back.
4. `close` ends everything that hangs.
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_OF_ONE_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "te", "upgrade"})


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived. `path` is decoded; header names are in small letters."""

    number: int
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]

    @property
    def operation(self) -> str:
        if self.method == "GET":
            return "ListObjectsV2" if "list-type" in self.query else "GetObject"
        return {"PUT": "PutObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}.get(self.method, self.method)


@dataclass(frozen=True, slots=True)
class PassOn:
    """To the server and back, without the headers `without`, after `delay_s`."""

    without: tuple[str, ...] = ()
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the server's place, as S3 does. `more`: further elements of the error; `document`: another than one."""

    status: int
    code: str
    message: str = "said by the proxy"
    headers: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, str] = field(default_factory=dict)
    document: str = ""


@dataclass(frozen=True, slots=True)
class Instead:
    """Let the server do it, without the headers `without`; where it answers `status`, give `answer`."""

    status: int
    answer: Answer
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DropBefore:
    """Close the connection; the server never sees the request."""


@dataclass(frozen=True, slots=True)
class DropAfter:
    """Let the server do it, then reset the connection."""


@dataclass(frozen=True, slots=True)
class CutShort:
    """Let the server do it and promise its whole answer, but close the connection after `nbytes` of it."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Trickle:
    """Give the server's answer in so many pieces, with a pause before each."""

    pieces: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Garble:
    """Flip one bit of the body on its way to the server."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Neither pass on nor answer until `event` is set or the proxy is closed; then close the connection."""

    event: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep a request until `event` is set: before the server sees it, or with its answer ready (`answered`).

    `reached` is set as soon as it is kept. A closed proxy lets it go.
    """

    answered: bool
    event: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


Fault = PassOn | Answer | Instead | DropBefore | DropAfter | CutShort | Trickle | Garble | Hang | Hold
Plan = Callable[[Seen], Fault]

PASS_ON = PassOn()
SLOW_DOWN = Answer(503, "SlowDown", "Please reduce your request rate.")


# ---- plans -----------------------------------------------------------------------------------------------------------


def pass_on(seen: Seen) -> Fault:
    return PASS_ON


def sometimes(share: float, fault: Fault, seed: object) -> Plan:
    """`fault` for this share of requests, the same ones for the same seed."""
    chance = random.Random(str(seed))
    return lambda seen: fault if chance.random() < share else PASS_ON


def when(applies: Callable[[Seen], bool], *faults: Fault, ever_after: Fault = PASS_ON) -> Plan:
    """One fault after the other for the requests of a kind; then `ever_after`. All other requests pass."""
    left = iter(faults)
    return lambda seen: next(left, ever_after) if applies(seen) else PASS_ON


def of(*operations: str, key: str = "") -> Callable[[Seen], bool]:
    """Requests of these operations whose path contains `key`."""
    return lambda seen: seen.operation in operations and key in seen.path


def ignoring_conditions(seen: Seen) -> Fault:
    """A server that has never heard of conditional create, and says nothing."""
    return PassOn(without=("if-none-match",))


def refusing_conditions(seen: Seen) -> Fault:
    """A server that has never heard of conditional create, and says so."""
    if "if-none-match" in seen.headers:
        return Answer(501, "NotImplemented", "A header you provided implies functionality that is not implemented.")
    return PASS_ON


def unlisted(seen: Seen) -> Fault:
    """A policy without s3:ListBucket: no list, and 403 for what is not there."""
    refused = Answer(403, "AccessDenied", "Access Denied.")
    return refused if seen.operation == "ListObjectsV2" else Instead(404, refused)


def expiring(token: str, after: int) -> Plan:
    """A session token that is good for so many requests; others are good for ever."""
    used = 0

    def plan(seen: Seen) -> Fault:
        nonlocal used
        if seen.headers.get("x-amz-security-token") != token:
            return PASS_ON
        used += 1
        return PASS_ON if used <= after else Answer(400, "ExpiredToken", "The provided token has expired.")

    return plan


def skewed(ahead_s: float) -> Answer:
    """What a server answers to a client whose clock is ahead of its own."""
    now = datetime.now(UTC)
    server = now - timedelta(seconds=ahead_s)
    more = {
        "RequestTime": now.strftime("%Y%m%dT%H%M%SZ"),
        "ServerTime": server.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "MaxAllowedSkewMilliseconds": "900000",
    }
    message = "The difference between the request time and the current time is too large."
    return Answer(403, "RequestTimeTooSkewed", message, more=more)


# ---- the proxy -------------------------------------------------------------------------------------------------------


class FaultProxy:
    """Listens on loopback, passes on to the server at `upstream`. `plan` may be changed at any time.

    `port`: 0 for any, or that of a proxy that was closed, which is then back.
    """

    def __init__(self, upstream: str, plan: Plan = pass_on, port: int = 0) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.plan = plan
        self.seen: list[Seen] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Exchange(_Exchange):
            owner = proxy

        self._server = _Listener(("127.0.0.1", port), Exchange)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="s3-proxy", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Gone: connections are refused from here on, and those that are open end with their next request."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def count(self, *operations: str) -> int:
        """How many requests of these operations came; of all without an argument."""
        return sum(not operations or seen.operation in operations for seen in self.seen)

    def step(self, method: str, target: str, headers: Mapping[str, str]) -> Fault:
        parts = urlsplit(target)
        with self._lock:
            query = parse_qs(parts.query, keep_blank_values=True)
            seen = Seen(len(self.seen) + 1, method, unquote(parts.path), query, headers)
            self.seen.append(seen)
            return self.plan(seen)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is none of ours."""


class _Exchange(BaseHTTPRequestHandler):
    """The requests of one connection."""

    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `seen` has it."""

    def handle_expect_100(self) -> bool:
        """Ask for the body at once: a client waits with it until it is asked."""
        proceed = super().handle_expect_100()
        self.wfile.flush()
        return proceed

    def _exchange(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        if self.owner.closing.is_set():
            self._reset()
            return
        match self.owner.step(self.command, self.path, headers):
            case PassOn(without, delay_s):
                self.owner.closing.wait(delay_s)
                self._give(*self._ask(body, without))
            case Answer() as answer:
                self._say(answer)
            case Instead(status, answer, without):
                answered = self._ask(body, without)
                if answered[0] == status:
                    self._say(answer)
                else:
                    self._give(*answered)
            case DropBefore():
                self._reset()
            case DropAfter():
                self._ask(body)
                self._reset()
            case CutShort(nbytes):
                self._give(*self._ask(body), most=nbytes)
            case Trickle(pieces, pause_s):
                self._give(*self._ask(body), pieces=pieces, pause_s=pause_s)
            case Garble():
                self._give(*self._ask(bytes([body[0] ^ 1]) + body[1:]))
            case Hang(event):
                self._wait_for(event)
                self._reset()
            case Hold(answered, event, reached):
                early = self._ask(body) if answered else None
                reached.set()
                self._wait_for(event)
                self._give(*(self._ask(body) if early is None else early))

    def _wait_for(self, event: threading.Event) -> None:
        while not event.wait(0.02) and not self.owner.closing.is_set():
            pass

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _exchange

    def _ask(self, body: bytes, without: tuple[str, ...] = ()) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer: status, headers, body."""
        connection = http.client.HTTPConnection(*self.owner.upstream, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in without and name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _give(
        self,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        most: int | None = None,
        pieces: int = 1,
        pause_s: float = 0.0,
    ) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in _OF_ONE_HOP:
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        step = -(-len(body) // pieces) or 1
        for start in range(0, len(body) or 1, step):
            self.owner.closing.wait(pause_s)
            self.wfile.write(body[start : start + step][:most])
            self.wfile.flush()
        if most is not None:
            self._reset()

    def _say(self, answer: Answer) -> None:
        more = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in answer.more.items())
        text = (
            answer.document
            or f"<Error><Code>{answer.code}</Code><Message>{escape(answer.message)}</Message>{more}</Error>"
        )
        body = b"" if self.command == "HEAD" else f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
        self._give(answer.status, [("Content-Type", "application/xml"), *answer.headers.items()], body)

    def _reset(self) -> None:
        """End the connection with a reset: nothing more is sent, and the other side notices at once."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
