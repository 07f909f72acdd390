"""Clients of the OpenAI server for tests: what they ask for, and what they have of an answer in the end.

Owns: the requests of every kind, one answer in a form that can be compared, and clients that wait out a dead server.
Does not know: how a server is started, what is right.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai

from examples.openai_client import HEADER, stream_whole
from prefix_recovery.tiny import PAD_ID, tokens_and_merges
from tests.server_process import MODEL, ServerProcess

N_TOKENS = 280
_LONGEST_S = 400.0

IDS = {"ignore_eos": True, "return_token_ids": True}
HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": N_TOKENS, "extra_body": IDS, "temperature": 0}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": N_TOKENS, "extra_body": IDS}
DAYS = {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "minItems": 60, "maxItems": 60}
PARAMETERS = {"type": "object", "properties": {"days": DAYS}, "required": ["days"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}
CHOSEN = {"type": "function", "function": {"name": "weather"}}

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {**CHAT, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}},
    "sampled": {**CHAT, "temperature": 0.9, "seed": 5},
    "unseeded": {**CHAT, "temperature": 1.0},
    "samples": {**TEXT, "temperature": 1.0, "seed": 9, "n": 2, "presence_penalty": 0.5},
    "tool": {**CHAT, "tools": [TOOL], "tool_choice": CHOSEN},
    "json": {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "days", "schema": PARAMETERS}}},
    "whole": {**CHAT, "messages": [{"role": "user", "content": "why?"}]},
    "stopped": {
        **{**TEXT, "temperature": 0.8, "seed": 11, "frequency_penalty": 0.3, "stop": list("aei ")},
        "extra_body": {**IDS, "min_tokens": 180, "repetition_penalty": 1.05, "include_stop_str_in_output": True},
    },
    "prompts": {**TEXT, "temperature": 0.7, "prompt": [[5, 77, 300, 12], [9, 8, 7]], "n": 2, "seed": 3},
}

_LETTERS = [at for at, token in enumerate(tokens_and_merges(512)[0]) if at > PAD_ID and token.isascii()]
_THINKS: dict[str, Any] = {
    **{**CHAT, "messages": [{"role": "user", "content": "why?"}]},
    "extra_body": {**IDS, "allowed_token_ids": _LETTERS, "thinking_token_budget": 120},
}
REASONING: dict[str, dict[str, Any]] = {
    "thought": {**_THINKS, "stream_options": {"include_usage": True}},
    "thought sampled": {**_THINKS, "temperature": 0.9, "seed": 6},
    "thought whole": _THINKS,
}
"""For a server with tests/spoken_reasoning.py.

All of whole characters: what vLLM's parser makes of an unfinished one before the mark depends on what its deltas hold.
"""
STREAMED = (
    "greedy", "sampled", "unseeded", "samples", "tool", "json", "stopped", "thought", "thought sampled",
)  # fmt: skip


def in_arguments(request: dict[str, Any], attempt: str) -> dict[str, Any]:
    """The same request with its attempt id in the body instead of a header."""
    return {**request, "extra_body": {**request["extra_body"], "vllm_xargs": {"attempt_id": attempt}}}


def client_of(server: ServerProcess, key: str, retries: int = 0) -> openai.OpenAI:
    """Of this server and of every later life of it."""
    return openai.OpenAI(api_key=key, base_url="http://server/v1", http_client=server.client(), max_retries=retries)


def create_of(client: openai.OpenAI, request: dict[str, Any]) -> Any:
    return client.chat.completions.create if "messages" in request else client.completions.create


@dataclass(eq=False)
class Message:
    """One answer, by choice."""

    text: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    arguments: dict[int, str] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[str]] = field(default_factory=list)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)

    @property
    def n_tokens(self) -> int:
        """Of the choice that has fewest; each token is told with its id."""
        return min((len(ids) for ids in self.token_ids.values()), default=0)

    def take(self, chunk: Any) -> None:
        """A chunk of a stream, or a whole answer."""
        self.ids.add(chunk.id)
        if chunk.usage is not None:
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            self.usage = {name: getattr(chunk.usage, name) for name in names}
        self.prompt_ids += getattr(chunk, "prompt_token_ids", None) or []
        for choice in chunk.choices:
            at = choice.index
            said = getattr(choice, "delta", None) or getattr(choice, "message", choice)
            text = getattr(said, "content", None) or getattr(said, "text", None) or ""
            self.text[at] = self.text.get(at, "") + text
            self.reasoning[at] = self.reasoning.get(at, "") + (getattr(said, "reasoning", None) or "")
            self.token_ids.setdefault(at, []).extend(getattr(choice, "token_ids", None) or [])
            for call in getattr(said, "tool_calls", None) or []:
                self.tools += [call.function.name] if call.function.name else []
                self.arguments[at] = self.arguments.get(at, "") + (call.function.arguments or "")
            for one in getattr(getattr(choice, "logprobs", None), "content", None) or []:
                self.logprobs.append(one.logprob)
                self.tops.append([one.token, *(top.token for top in one.top_logprobs)])
            if choice.finish_reason:
                assert at not in self.finish, f"choice {at} ended twice"
                self.finish[at] = choice.finish_reason

    def said(self) -> tuple[Any, ...]:
        """All of it that a caller can compare with another telling."""
        rounded = [round(one, 4) for one in self.logprobs]
        parts = self.text, self.reasoning, self.token_ids, self.arguments, self.tools
        return *parts, self.tops, rounded, self.finish


def ask(client: openai.OpenAI, request: dict[str, Any], attempt: str = "", *, stream: bool) -> Message:
    """Once, on one connection."""
    message, headers = Message(), {HEADER: attempt} if attempt else {}
    if stream:
        for chunk in create_of(client, request)(**request, stream=True, extra_headers=headers):
            message.take(chunk)
    else:
        message.take(create_of(client, request)(**request, extra_headers=headers))
    return message


def ask_all(
    client: openai.OpenAI, attempts: dict[str, str], requests: dict[str, dict[str, Any]] = REQUESTS
) -> dict[str, Message]:
    """Every kind at once, each under its attempt id if there is one for it."""
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = {
            kind: pool.submit(ask, client, request, attempts.get(kind, ""), stream=kind in STREAMED)
            for kind, request in requests.items()
        }
        return {kind: answer.result() for kind, answer in asked.items()}


class Asking(threading.Thread):
    """A client that wants one message however often its server dies."""

    def __init__(self, client: openai.OpenAI, request: dict[str, Any], attempt: str, *, stream: bool) -> None:
        super().__init__(daemon=True, name=attempt)
        self.message, self.error = Message(), None  # type: Message, BaseException | None
        self._client, self._request, self._stream = client, request, stream

    def run(self) -> None:
        try:
            if not self._stream:
                self.message = ask(self._client, self._request, self.name, stream=False)
                return
            create = create_of(self._client, self._request)
            for chunk in stream_whole(create, self.name, patience_s=_LONGEST_S, **self._request):
                self.message.take(chunk)
        except BaseException as error:
            self.error = error

    def whole(self, server: ServerProcess) -> Message:
        """Its message, once it has all of it."""
        self.join(_LONGEST_S)
        assert not self.is_alive(), f"{self.name} has no whole message:\n{server.text[-4000:]}"
        if self.error is not None:
            raise AssertionError(f"{self.name}: {self.error!r}\n{server.text[-4000:]}") from self.error
        return self.message
