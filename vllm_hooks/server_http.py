"""The layer of the OpenAI server through which every HTTP request passes, inside authentication and around the routes.

Owns: one captured request from its body to its last byte, and the routes under /v1/recovery.
Does not know: vLLM's handlers, the engine. Plain ASGI, on the event loop.

Invariants:
1. A request that wants nothing of us is handed on as it came.
2. The handler of a captured request runs in a task of its own: it ends when a newer connection of its attempt comes,
   and nothing it sends afterwards reaches its client.
3. What a client is answered with by us is in the form of the server's own errors.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol
from urllib.parse import unquote

from recovery.errors import InputError, RecoveryError
from recovery.reconnection import Claim
from vllm_hooks import server_claims as claims
from vllm_hooks.server_asgi import App, Message, Receive, Scope, Send, answer, body_of, refuse, replayed
from vllm_hooks.server_attempts import Attempts, Connection
from vllm_hooks.server_claims import Refused, Uncaptured
from vllm_hooks.server_engine import SERVING, Server, Serving

_FAREWELL_S = 5.0
"""A client that takes nothing any more is not waited for."""


class Recovery(Server, Protocol):
    """What the layer needs: it is there before the server serves, but not yet when the layer is put in."""

    attempts: Attempts

    async def start(self, layer: RecoveryLayer) -> None: ...

    async def stop(self) -> None: ...


class RecoveryLayer:
    """ASGI middleware around `app`."""

    def __init__(self, app: App, recovery: Recovery) -> None:
        self._app = app
        self._recovery = recovery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._recovery.start(self)
            await self._app(scope, receive, self._stopping(send))
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        elif claims.is_generating(scope):
            await self._generate(scope, receive, send)
        elif claims.is_about_attempts(scope):
            await self._tell(scope, send)
        else:
            await self._app(scope, receive, send)

    def _stopping(self, send: Send) -> Send:
        async def passed(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self._recovery.stop()
            await send(message)

        return passed

    # ---- requests that generate -------------------------------------------------------------------------------------

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await body_of(receive)
        if raw is None:
            return
        wanted, again = claims.wanted_of(scope, raw), replayed(raw, receive)
        match wanted:
            case None:
                await self._app(scope, again, send)
            case Refused():
                await refuse(send, wanted)
            case Uncaptured():
                await self._pass_through(wanted, scope, again, send)
            case Claim():
                await self._serve(wanted, scope, again, send)

    async def _pass_through(self, wanted: Uncaptured, scope: Scope, receive: Receive, send: Send) -> None:
        """A request with an attempt id of which nothing can be stored."""
        try:
            self._recovery.session.unresumable.pass_through(wanted.attempt, wanted.kind)
        except InputError as error:
            await refuse(send, Refused(400, "attempt_not_captured", str(error)))
            return

        async def said(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), wanted.header]}
            await send(message)

        await self._app(scope, receive, said)

    async def _serve(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._stopped(send):
            return
        serving, response = Serving(claim.attempt, claim.record), _Response(send, claim.attempt)
        async with self._recovery.attempts.connection(claim, serving) as connection:
            if not isinstance(connection, Connection):
                await refuse(send, claims.refused(connection))
                return
            if await _first(connection.ended, connection.begun) is connection.begun:
                await self._handle(serving, connection, _named(scope, claim.attempt), receive, response)
        if connection.ended.is_set():
            last = claims.STOPPING if self._recovery.stopping else claims.TAKEN_OVER
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(response.end_with(last), _FAREWELL_S)

    async def _stopped(self, send: Send) -> bool:
        """Whether nothing can be stored any more; it has been said then."""
        if self._recovery.stopping:
            await refuse(send, claims.STOPPING)
            return True
        try:
            self._recovery.session.raise_if_failed()
        except RecoveryError as error:
            await refuse(send, Refused(503, "recovery_stopped", str(error)))
            return True
        return False

    async def _handle(
        self, serving: Serving, connection: Connection, scope: Scope, receive: Receive, response: _Response
    ) -> None:
        token = SERVING.set(serving)
        handler = asyncio.ensure_future(self._app(scope, receive, response.send))
        SERVING.reset(token)
        ended = asyncio.ensure_future(connection.ended.wait())
        try:
            await asyncio.wait((handler, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            response.open = handler.done()
            handler.cancel()
            await asyncio.wait((handler,))
        if not handler.cancelled() and (error := handler.exception()) is not None and response.open:
            raise error

    # ---- what is known -----------------------------------------------------------------------------------------

    async def _tell(self, scope: Scope, send: Send) -> None:
        attempts, path = self._recovery.attempts, claims.path_of(scope)
        if path == claims.STATUS:
            await answer(send, 200, attempts.status())
            return
        attempt = unquote(path[len(claims.ATTEMPT) :])
        known = attempts.describe(attempt)
        if known is None:
            await refuse(send, Refused(404, "attempt_unknown", f"there is no attempt {attempt!r}"))
        elif not attempts.is_owned(attempt, claims.key_of(scope)):
            await refuse(send, Refused(403, "attempt_of_another_key", "this attempt id belongs to another API key"))
        elif scope["method"] == "GET":
            await answer(send, 200, known)
        elif await self._stopped(send):
            return
        elif attempts.forget(attempt):
            await answer(send, 200, {"attempt": attempt, "forgotten": True})
        else:
            await refuse(send, Refused(409, "attempt_connected", f"attempt {attempt!r} has a connection"))


class _Response:
    """What is sent to one client. `open`: the handler's word still counts."""

    def __init__(self, send: Send, attempt: str) -> None:
        self._send = send
        self._attempt = attempt.encode()
        self._is_stream = self._started = self._over = False
        self.open = True

    async def send(self, message: Message) -> None:
        if not self.open:
            return
        if message["type"] == "http.response.start":
            self._started = True
            headers = list(message.get("headers", ()))
            kinds = [value for name, value in headers if name.lower() == b"content-type"]
            self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            message = {**message, "headers": [*headers, (claims.HEADER.encode(), self._attempt)]}
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def end_with(self, last: Refused) -> None:
        """The last word, unless everything was said. A response that has begun and is no stream is broken off."""
        if not self._started:
            await refuse(self._send, last)
        elif self._is_stream and not self._over:
            event = b"data: " + last.body + b"\n\n"
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """The first of them that is set; of several, the first that is named."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return next(event for event in events if event.is_set())


def _named(scope: Scope, attempt: str) -> Scope:
    """The response's id follows from the attempt, unless the client names it itself."""
    if claims.header_of(scope, "x-request-id"):
        return scope
    return {**scope, "headers": [*scope["headers"], (b"x-request-id", attempt.encode())]}
