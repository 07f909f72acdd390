"""vLLM's own streaming parsers, fed with what a resumed call delivers: reasoning and tool calls across every cut."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.tiny import byte_tokens
from tests.engine_runs import PROMPT, greedy
from tests.test_capture_text import delta_of
from vllm_hooks.outputs import Assembly

ARGUMENTS = {"city": "東京 🙂", "days": [1, 2]}
ANSWER = (
    f"café — 🙂<tool_call>{json.dumps({'name': 'weather', 'arguments': ARGUMENTS}, ensure_ascii=False)}</tool_call>"
)
THOUGHT = "naïve? 東 🙂🏽 "


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """The tiny model's, with the words that parsers look for as tokens of their own; they are not special ones."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tiny_model)
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return made


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """One token for each byte, so that a cut hits every one of them, and one for each word of a parser."""
    ids: list[int] = []
    while text:
        word = next((w for w in ("<think>", "</think>", "<tool_call>", "</tool_call>") if text.startswith(w)), text[0])
        tokens = [word] if len(word) > 1 else [byte_tokens()[byte] for byte in word.encode()]
        ids += tokenizer.convert_tokens_to_ids(tokens)
        text = text[len(word) :]
    return ids


def outputs_of(tokenizer: Any, ids: list[int], cut: int) -> Iterator[tuple[list[int], str]]:
    """Ids and text of each delta that the caller of a call with `cut` saved tokens is given."""
    params = greedy(len(ids), "DELTA", logprobs=None)
    assembly = Assembly(params, "r", PROMPT, None, tokenizer, array("i", ids[:cut]), array("f", [0.0] * cut), {})
    if cut == len(ids):
        completion = assembly.finished("length", None).outputs[0]
        yield list(completion.token_ids), completion.text
    for at in range(cut, len(ids)):
        delta = delta_of(ids[at], last=at == len(ids) - 1)
        assert not assembly.settle(delta)
        completion = assembly.add(delta).outputs[0]
        yield list(completion.token_ids), completion.text


def parsed(parser: Any, deltas: Iterator[tuple[list[int], str]], **more: Any) -> list[Any]:
    """What a parser's streaming method makes of them."""
    text, ids, found = "", [], []  # type: str, list[int], list[Any]
    for delta_ids, delta in deltas:
        before, before_ids = text, ids
        text, ids = text + delta, ids + delta_ids
        found.append(parser(before, text, delta, before_ids, ids, delta_ids, **more))
    return [message for message in found if message is not None]


def test_reasoning_is_told_from_content_at_every_cut(tokenizer: Any) -> None:
    """Cut inside the thought, inside a character of it, at the mark, inside the answer: nothing moves between them.

    The thought is begun by the prompt, as chat templates do: vLLM's parser leaves `<think>` in the text of any delta
    that holds more than that one token.
    """
    from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

    ids = ids_of(tokenizer, f"{THOUGHT}</think>{ANSWER}")
    for cut in range(1, len(ids) + 1):
        parser = DeepSeekR1ReasoningParser(tokenizer)
        messages = parsed(parser.extract_reasoning_streaming, outputs_of(tokenizer, ids, cut))
        assert "".join(message.reasoning or "" for message in messages) == THOUGHT, cut
        assert "".join(message.content or "" for message in messages) == ANSWER, cut


def test_a_tool_call_is_made_once_at_every_cut(tokenizer: Any) -> None:
    """Cut inside its name, its arguments, a character of them, its marks: one call, its arguments whole."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    ids = ids_of(tokenizer, ANSWER)
    request = ChatCompletionRequest(messages=[], model="m")
    for cut in range(1, len(ids) + 1):
        parser = Hermes2ProToolParser(tokenizer)
        messages = parsed(parser.extract_tool_calls_streaming, outputs_of(tokenizer, ids, cut), request=request)
        calls = [call for message in messages for call in message.tool_calls or ()]
        assert {call.index for call in calls} == {0}, cut
        assert [call.function.name for call in calls if call.function.name] == ["weather"], cut
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == ARGUMENTS, cut
        assert "".join(message.content or "" for message in messages) == "café — 🙂", cut


def test_the_suffix_alone_would_be_misread(tokenizer: Any) -> None:
    """What makes the tests above more than a formality: parsers that are given only what is new take it for content."""
    from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

    ids = ids_of(tokenizer, f"{THOUGHT}</think>{ANSWER}")
    deltas = list(outputs_of(tokenizer, ids, len(ids) - 20))[1:]
    parser = DeepSeekR1ReasoningParser(tokenizer)
    messages = parsed(parser.extract_reasoning_streaming, iter(deltas))
    assert "".join(message.reasoning or "" for message in messages) != ""
