"""A client of the OpenAI server whose messages go on where they broke off: `python -m examples.openai_client "Why?"`.

Kill the server while it answers, start it again, and the answer goes on in the same line.

Owns: reconnecting under one attempt id, and dropping what was received before the connection broke.
Does not know: how the server keeps what it generated (docs/openai-server.md).

Invariants:
1. The server sends the whole message on every connection; what was given to the caller already is compared with it and
   not given again. A difference is an error, never a silent seam.
2. Logprobs are one for each token, and those that the caller has are counted off: computed again, they may differ in
   their last digits.
3. A stream that ends without its last chunk is a broken one.
"""

from __future__ import annotations

import argparse
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai

HEADER = "X-Attempt-Id"

LOGPROBS = ("content", "refusal", "tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Of a chat, and of a text completion: lists with something for each token."""


class Diverged(Exception):
    """The server's second telling of a message is not the first one."""


class Unfinished(Exception):
    """The server ends the message's streams in good order, again and again, before the message has its end."""


class _Seen:
    """What of a message the caller has: text and lists by where in the message they are."""

    def __init__(self) -> None:
        self._given: dict[tuple[object, ...], Any] = {}
        self._told: dict[tuple[object, ...], int] = {}

    def again(self) -> None:
        """The message is told from its start."""
        self._told = {}

    def fresh(self, where: tuple[object, ...], piece: Any) -> Any:
        """The part of the next piece that the caller does not have; `piece` is a str or a list."""
        given = self._given.get(where, piece[:0])
        start = self._told.get(where, 0)
        end = self._told[where] = start + len(piece)
        known = given[start:end]
        if piece[: len(known)] != known:
            raise Diverged(f"at {where}: the message was {known!r} and is told now as {piece[: len(known)]!r}")
        self._given[where] = given + piece[len(known) :]
        return piece[len(known) :]

    def counted_off(self, where: tuple[object, ...], piece: list[Any]) -> list[Any]:
        """As `fresh`, without comparing."""
        n_given, start = self._given.get(where, 0), self._told.get(where, 0)
        end = self._told[where] = start + len(piece)
        self._given[where] = max(n_given, end)
        return piece[max(0, n_given - start) :]


def stream_whole(
    create: Callable[..., Any], attempt: str, *, patience_s: float = 600.0, **request: Any
) -> Iterator[Any]:
    """The chunks of one streamed message, as if its connection had never broken.

    Args:
        create: `client.chat.completions.create` or `client.completions.create` of the official client.
        attempt: a name for this message that no other one has, the same in every process that asks for it.
        patience_s: how long nothing new may come before what the server raises is raised; Unfinished if it raises
            nothing.
        request: as for `create`, without `stream`.
    """
    seen, lost_at, wait_s = _Seen(), time.monotonic(), 0.1
    headers = {**request.pop("extra_headers", {}), HEADER: attempt}
    n_choices, finished = _n_choices(request), set[int]()
    while True:
        seen.again()
        try:
            for chunk in create(**request, stream=True, extra_headers=headers):
                if _has_news(chunk, seen, finished):
                    lost_at, wait_s = time.monotonic(), 0.1
                    yield chunk
            if len(finished) >= n_choices:
                return
            if time.monotonic() - lost_at > patience_s:
                raise Unfinished(f"{attempt}: {len(finished)} of {n_choices} choices have ended, and nothing new comes")
        except openai.APIError as error:
            if not _is_broken(error) or time.monotonic() - lost_at > patience_s:
                raise
        except httpx.TransportError:
            if time.monotonic() - lost_at > patience_s:
                raise
        time.sleep(wait_s)
        wait_s = min(2.0, 2 * wait_s)


def _is_broken(error: openai.APIError) -> bool:
    """Whether the server went away, or is not there yet.

    What ends in mid-stream is told as an event of the stream, an APIError: an engine with a status in its code, and a
    server that is being stopped by name.
    """
    if isinstance(error, openai.APIConnectionError | openai.InternalServerError):
        return True
    code = str(error.code or "")
    return not isinstance(error, openai.APIStatusError) and (code.startswith("5") or code == "recovery_stopping")


def _n_choices(request: dict[str, Any]) -> int:
    prompts = request.get("prompt")
    n_prompts = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return int(request.get("n") or 1) * n_prompts


def _has_news(chunk: Any, seen: _Seen, finished: set[int]) -> bool:
    """Leave in the chunk what is new. False: nothing is."""
    news = not chunk.choices  # usage comes last
    for choice in chunk.choices:
        delta = getattr(choice, "delta", choice)
        told = ((delta, "role"), (delta, "content"), (delta, "reasoning"), (delta, "text"), (choice, "token_ids"))
        for holder, name in told:
            if (piece := getattr(holder, name, None)) is not None:
                setattr(holder, name, seen.fresh((choice.index, name), piece))
                news |= bool(getattr(holder, name))
        logprobs = getattr(choice, "logprobs", None)
        for name in LOGPROBS:
            if (values := getattr(logprobs, name, None)) is not None:
                setattr(logprobs, name, seen.counted_off((choice.index, "logprobs", name), values))
                news |= bool(getattr(logprobs, name))
        for call in getattr(delta, "tool_calls", None) or ():
            news |= _tool_call_has_news(choice.index, call, seen)
        if choice.finish_reason is not None:
            news |= choice.index not in finished
            finished.add(choice.index)
    return news


def _tool_call_has_news(choice: int, call: Any, seen: _Seen) -> bool:
    function, where = call.function, (choice, "tool", call.index)
    news = False
    if function is not None and function.name is not None:
        # Its id is made anew each time it is told: the first one stands.
        news = bool(seen.fresh((*where, "name"), function.name))
        if not news:
            call.id = function.name = None
    if function is not None and function.arguments is not None:
        function.arguments = seen.fresh((*where, "arguments"), function.arguments)
        news |= bool(function.arguments)
    return news


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server with prefix recovery; kill it meanwhile, if you like.")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--model", default=None, help="default: the first one that the server has")
    parser.add_argument("--attempt", default=f"example-{uuid.uuid4().hex}", help="to go on after this program died too")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=arguments.url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = arguments.model or client.models.list().data[0].id
    messages = [{"role": "user", "content": arguments.question}]
    for chunk in stream_whole(
        client.chat.completions.create, arguments.attempt, model=model, messages=messages, temperature=0, max_tokens=400
    ):
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print(f"\nattempt {arguments.attempt}")


if __name__ == "__main__":
    main()
