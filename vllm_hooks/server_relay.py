"""Captured requests on their way from the API server process that was asked to the one that captures.

Owns: the socket between the API server processes of one launcher, and one exchange on it.
Does not know: what is asked, who may ask: the process that was asked has checked the key.

With `--api-server-count` above 1 vLLM starts several processes, and a client reaches any of them, the next time
another. The first one has the session; the others hand on to it what has an attempt id, and serve the rest themselves.

Invariants:
1. An exchange is what it would have been: the same messages in the same order, and a client that leaves is seen.
2. Only processes of this user reach the socket, and its name is known to the children of one launcher alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from recovery.errors import ConfigError
from vllm_hooks import server_claims as claims
from vllm_hooks.server_asgi import App, Receive, Scope, Send, body_of, refuse, replayed

_LENGTH_NBYTES = 4
_HANDED_ON = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
)  # fmt: skip
_PATH_NBYTES_MAX = 100
"""A unix socket's path may have 107."""


def socket_path() -> Path:
    """The same in all children of one launcher; its folder is made if it is not there. Raises ConfigError."""
    folder = Path(tempfile.gettempdir()) / f"prefix-recovery-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{folder} is not a folder of this user alone", hint="set TMPDIR to one that is")
    secret = bytes(multiprocessing.current_process().authkey)
    path = folder / f"{hashlib.sha256(b'prefix-recovery relay' + secret).hexdigest()[:24]}.sock"
    if len(os.fsencode(path)) > _PATH_NBYTES_MAX:
        raise ConfigError(f"{path} is too long for a socket", hint="set TMPDIR to a shorter path")
    return path


class RelayServer:
    """In the process that captures: every exchange is handed to `app`, whose scopes get `own` members."""

    def __init__(self, app: App, own: Scope) -> None:
        self._app = app
        self._own = own
        self._server: asyncio.AbstractServer | None = None

    async def start(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._exchange, path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read(reader)
            if request is None:
                return
            body: list[bytes] = [request["body"]]
            leaving = asyncio.ensure_future(_end_of(reader))

            async def receive() -> dict[str, Any]:
                if body:
                    return {"type": "http.request", "body": body.pop(), "more_body": False}
                await asyncio.wait((leaving,))  # by several at once: vLLM's handlers listen, and their responses too
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                await _write(writer, message)

            scope = {**request["scope"], **self._own, "headers": [tuple(pair) for pair in request["scope"]["headers"]]}
            try:
                await self._app(scope, receive, send)
            finally:
                leaving.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever handed it on is gone, and its client with it
        finally:
            writer.close()


class RelayLayer:
    """ASGI middleware around `app`, in a process that does not capture."""

    def __init__(self, app: App, path: Path) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (claims.is_generating(scope) or claims.is_about_attempts(scope)):
            await self._app(scope, receive, send)
            return
        raw = await body_of(receive)
        if raw is None:
            return
        if claims.is_generating(scope) and claims.wanted_of(scope, raw) is None:
            await self._app(scope, replayed(raw, receive), send)
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            await refuse(send, claims.STARTING)
            return
        await _hand_on(reader, writer, scope, raw, receive, send)


async def _hand_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """Raises ConnectionError if the answer broke off, and IncompleteReadError inside a message."""
    try:
        await _write(writer, {"scope": {name: scope[name] for name in _HANDED_ON if name in scope}, "body": body})
        answer = asyncio.ensure_future(_answer(reader, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answer.done():
                answer.cancel()
        if answer.done():
            answer.result()
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, send: Send) -> None:
    over = False
    while (message := await _read(reader)) is not None:
        if message["type"] == "http.response.start":
            message["headers"] = [tuple(pair) for pair in message["headers"]]
        over = message["type"] == "http.response.body" and not message.get("more_body", False)
        await send(message)
    if not over:
        raise ConnectionError("the API server process that captures broke off its answer")


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Nothing more is sent: it ends when the other side leaves."""
    with contextlib.suppress(ConnectionError):
        await reader.read()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(reader: asyncio.StreamReader) -> Any:
    """The next message, None at the end."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_NBYTES), "big")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    return msgspec.msgpack.decode(await reader.readexactly(length))


async def _write(writer: asyncio.StreamWriter, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(_LENGTH_NBYTES, "big") + data)
    await writer.drain()
