"""vLLM's own chat handler with a reasoning parser, over captured calls: across every cut, the message told as ever.

In process, on the session's engine: a reasoning parser is a flag of a whole server. `make soak` kills a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import OnLoop
from tests.engine_runs import PROMPT, Answer, ask, capturing, greedy, put_cut
from vllm_hooks import RecoverableEngine, RecoverySession
from vllm_hooks.server_engine import SERVING, AttemptEngine, Serving

N_TOKENS = 60
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_completion_tokens": N_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": True,
    "return_token_ids": True,
}
WHERE = "reasoning_parser_kwargs"
"""What tells the engine where a grammar begins."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@dataclass
class Told:
    """One message as a client has it in the end."""

    reasoning: str = ""
    content: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    usage: Any = None

    def take(self, document: dict[str, Any]) -> None:
        """A chunk of a stream, or a whole answer."""
        assert "choices" in document, document
        self.usage = document.get("usage") or self.usage
        for choice in document["choices"]:
            said = choice["delta"] if "delta" in choice else choice["message"]
            self.reasoning += said.get("reasoning") or ""
            self.content += said.get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.logprobs += [round(one["logprob"], 4) for one in (choice.get("logprobs") or {}).get("content") or ()]
            self.finish_reason += choice["finish_reason"] or ""


class Asked:
    """A captured engine that notes what the handler asks it for."""

    def __init__(self, captured: Any) -> None:
        self._captured = captured
        self.calls: list[tuple[Any, Any]] = []

    def generate(self, prompt: Any, params: Any, name: str, **arguments: Any) -> Any:
        self.calls.append((prompt, params.clone()))
        return self._captured.generate(prompt, params, name, **arguments)


@dataclass
class Chat:
    """vLLM's handler on a capturing engine, as the plug-in puts them together."""

    handler: Any
    session: RecoverySession
    asked: Asked

    async def ask(self, attempt: str, *, stream: bool, **more: Any) -> Told:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        delivery = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        SERVING.set(Serving(attempt, ""))  # of this task alone
        answer = await self.handler.create_chat_completion(ChatCompletionRequest(**{**CHAT, **delivery, **more}))
        told = Told()
        if not stream:
            told.take(answer.model_dump())
            return told
        async for event in answer:
            data = event.removeprefix("data: ").strip()
            if data != "[DONE]":
                told.take(json.loads(data))
        return told

    async def ask_all(self, attempts: dict[str, bool]) -> dict[str, Told]:
        """By attempt; its value says whether it is streamed."""
        tasks = {one: asyncio.create_task(self.ask(one, stream=stream)) for one, stream in attempts.items()}
        return {one: await task for one, task in tasks.items()}


@asynccontextmanager
async def chatting(engine: Any, store: Path, parser: str) -> AsyncIterator[Chat]:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.renderers.online_renderer import OnlineRenderer

    shared = {"request_logger": None, "chat_template": None, "chat_template_content_format": "auto"}
    async with capturing(engine, store) as (_, session):
        asked = Asked(RecoverableEngine(engine, session, replays=True))
        server = SimpleNamespace(session=session, stopping=False)
        handler = OpenAIServingChat(
            engine_client=AttemptEngine(engine, asked, server, {}),
            models=OpenAIServingModels(engine, [BaseModelPath(name="tiny", model_path="tiny")]),
            response_role="assistant",
            online_renderer=OnlineRenderer(engine.model_config, engine.renderer, reasoning_parser=parser, **shared),
            reasoning_parser=parser,
            **shared,
        )
        yield Chat(handler, session, asked)


def word_for(tokenizer: Any, prompt: list[int], said: list[int]) -> tuple[int, str]:
    """Where in a message a word is, and the word: one token, said there first, that can stand for `</think>`.

    Not behind an unfinished character: whether a stream tells of that depends on what its deltas happen to hold.
    """
    whole = tokenizer.decode(said)
    for at in range(N_TOKENS // 4, N_TOKENS - N_TOKENS // 4):
        word, before = tokenizer.decode([said[at]]), tokenizer.decode(said[:at])
        one_token = word.isascii() and word.isprintable() and tokenizer.get_vocab().get(word) == said[at]
        first = said[at] not in (*said[:at], *prompt) and whole.find(word) == len(before)
        if one_token and first and not before.endswith("\N{REPLACEMENT CHARACTER}"):
            return at, word
    raise AssertionError(f"the tiny model says no word for the first time in {whole!r}")


def cut_of(attempt: str) -> int:
    return int(attempt.rpartition("-")[2])


@pytest.fixture(scope="module")
def plain(session_engine: Any, on_loop: OnLoop[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Answer]:
    """What the handler asks the engine for, and the answer when nobody cuts it."""

    async def scenario() -> tuple[Any, Answer]:
        async with chatting(session_engine, tmp_path_factory.mktemp("plain") / "s", "") as chat:
            await chat.ask("plain", stream=False)
            ((prompt, params),) = chat.asked.calls
        return params, await ask(session_engine, prompt, params, "plain")

    return on_loop(scenario())


def test_b18_a_reasoning_is_told_from_its_answer_across_every_cut(
    plain: tuple[Any, Answer], engine: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """B18: cut in mid-reasoning, at the word that ends it, in mid-answer, and at the end; streamed and not.

    Whole messages, and deltas put together, are the uncut ones; no token is made twice.
    """
    from tests.spoken_reasoning import NAME, SpokenReasoning

    params, whole = plain
    at, SpokenReasoning.ends = word_for(engine.get_tokenizer(), whole.prompt_token_ids, whole.token_ids)
    cuts = sorted({*range(1, N_TOKENS, 4), *range(at - 2, at + 3), N_TOKENS - 1, N_TOKENS})
    attempts = {f"streamed-{cut}": True for cut in cuts}
    attempts |= {f"at-once-{cut}": False for cut in (at // 2, at, at + 1, (at + N_TOKENS) // 2, N_TOKENS)}

    async def scenario() -> tuple[dict[str, Told], dict[str, Told], int]:
        async with chatting(engine, quick_path / "uncut", NAME) as chat:
            uncut = await chat.ask_all({"streamed": True, "at-once": False})
        async with chatting(engine, quick_path / "cut", NAME) as chat:
            for attempt in attempts:
                await put_cut(chat.session, engine, f"attempt-{attempt}-0", params, whole, 0, cut_of(attempt))
        async with chatting(engine, quick_path / "cut", NAME) as chat:
            return uncut, await chat.ask_all(attempts), chat.session.counters.tokens_captured

    uncut, told, captured = on_loop(scenario())
    decode = engine.get_tokenizer().decode
    for one in uncut.values():
        assert one.reasoning == decode(whole.token_ids[:at]) != ""
        assert decode(whole.token_ids[at + 1 :]).startswith(one.content) and one.content
        assert one.token_ids == whole.token_ids
    for attempt, one in told.items():
        assert one == uncut[attempt.rpartition("-")[0]], attempt
    assert captured == sum(N_TOKENS - cut_of(attempt) for attempt in attempts)


def test_a_grammar_behind_a_reasoning_is_begun_again_by_name(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """Where the grammar begins is not kept: the saved tokens are left, the reason is counted, the message is whole."""
    from tests.spoken_reasoning import NAME

    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    asked = {"stream": False, "ignore_eos": False, **wanted}

    async def scenario() -> None:
        async with chatting(engine, quick_path / "uncut", NAME) as chat:
            uncut = await chat.ask("uncut", **asked)
            ((prompt, params),) = chat.asked.calls
        whole = await ask(engine, prompt, params, "uncut")
        assert whole.token_ids == uncut.token_ids
        async with chatting(engine, quick_path / "cut", NAME) as chat:
            await put_cut(chat.session, engine, "attempt-cut-0", params, whole, 0, 5, arguments=[WHERE])
        async with chatting(engine, quick_path / "cut", NAME) as chat:
            assert await chat.ask("cut", **asked) == uncut
            assert chat.session.unresumable.restart_only == {WHERE: 1}
            assert chat.session.counters.tokens_captured == len(uncut.token_ids)

    on_loop(scenario())


def test_a_grammar_on_an_engine_that_reasons_is_begun_again_whoever_asks(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text completion says nothing of reasoning, and the engine looks for its end all the same.

    That is written down with the call: the next engine may have no reasoning parser, and could go on with the grammar.
    """
    from vllm.sampling_params import StructuredOutputsParams

    async def scenario() -> None:
        async with capturing(engine, quick_path / "s") as (captured, session):
            await ask(captured, PROMPT, greedy(8, structured_outputs=StructuredOutputsParams(regex="[a-z]{8}")), "r")
            assert session.unresumable.restart_only == {WHERE: 1}
            await ask(captured, PROMPT, greedy(8), "free")
            assert session.unresumable.restart_only == {WHERE: 1}

    monkeypatch.setattr(engine.vllm_config.structured_outputs_config, "reasoning_parser", "qwen3")
    on_loop(scenario())
