"""Plain ASGI: its types, bodies read and given again, and answers of our own.

Owns: what every layer of ours needs of ASGI.
Does not know: what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from vllm_hooks.server_claims import Refused

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def body_of(receive: Receive) -> bytes | None:
    """The whole body, None if the client left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(raw: bytes, receive: Receive) -> Receive:
    """The body in one piece, then whatever comes."""
    waiting = [raw]

    async def replayed() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replayed


async def refuse(send: Send, refused: Refused) -> None:
    await send({"type": "http.response.start", "status": refused.status, "headers": refused.headers})
    await send({"type": "http.response.body", "body": refused.body, "more_body": False})


async def answer(send: Send, status: int, document: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(document).encode(), "more_body": False})
