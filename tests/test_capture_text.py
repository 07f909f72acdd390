"""Text on the real engine: whole across every cut, and the same from the store as from the engine (K4)."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.rows import text_of
from prefix_recovery.tiny import byte_tokens
from tests.conftest import OnLoop
from tests.engine_runs import (
    PROMPT,
    ask,
    assert_same,
    capturing,
    greedy,
    prompts,
    put_cut,
    request_of,
)
from vllm_hooks import surface
from vllm_hooks.outputs import Assembly

EMOJI_BYTES = [byte_tokens()[byte] for byte in "🙂".encode()]


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_k4_text_is_whole_at_every_cut(engine: Any, on_loop: OnLoop[Any], tmp_path: Path, kind: str) -> None:
    """K4: a call of byte tokens, cut at each of its positions: the text is the uninterrupted one."""
    tokenizer = surface.tokenizer_of(engine)
    allowed = tokenizer.convert_tokens_to_ids([*EMOJI_BYTES, "Ã", "©", "a", "Ġ"])
    assert None not in allowed
    params = greedy(32, kind, allowed_token_ids=allowed)
    prompt = [*PROMPT, *tokenizer.encode("naïve 🙂", add_special_tokens=False)[:-1]]

    async def scenario() -> None:
        whole = await ask(engine, prompt, params, "bare")
        assert any(ord(letter) > 127 and letter != "\ufffd" for letter in whole.text)
        async with capturing(engine, tmp_path) as (wrapped, session):
            for cut in range(33):
                await put_cut(session, engine, f"r{cut}", params, whole, 0, cut)
            answers = await asyncio.gather(*(ask(wrapped, prompt, params, f"r{cut}") for cut in range(33)))
            assert session.counters.tokens_captured == 33 * 32
        for got in answers:
            assert_same(got, whole, tolerance=2e-5)

    on_loop(scenario())


@pytest.mark.parametrize("text", ["🙂", "é🙂東京", "naïve — ½ 🙂🏽 東", "\u200b\u0301x", " a \n\n b "])
def test_k4_characters_of_several_bytes_at_every_byte(engine: Any, text: str) -> None:
    """K4: tokens of one byte, cut at each: prefix and suffix together are the text, no U+FFFD, nothing twice.

    K3: also after a space or a newline: ids are carried on, no template is asked.
    """
    tokenizer = surface.tokenizer_of(engine)
    ids = tokenizer.convert_tokens_to_ids([byte_tokens()[byte] for byte in text.encode()])
    for kind in ("DELTA", "CUMULATIVE", "FINAL_ONLY"):
        for cut in range(1, len(ids) + 1):
            params = greedy(len(ids), kind, logprobs=None)
            prefix = array("i", ids[:cut]), array("f", [0.0] * cut)
            assembly = Assembly(params, "r", PROMPT, None, tokenizer, *prefix, {})
            if cut == len(ids):
                assert assembly.finished("length", None).outputs[0].text == text
                continue
            got = ""
            for at in range(cut, len(ids)):
                delta = delta_of(ids[at], last=at == len(ids) - 1)
                assert not assembly.settle(delta)
                shaped = assembly.add(delta)
                if shaped is not None:
                    part = shaped.outputs[0].text
                    got = got + part if kind == "DELTA" else part
                    assert text.startswith(got) and "\ufffd" not in got
            assert got == text


def delta_of(token: int, *, last: bool) -> Any:
    """What the engine delivers for one token of a resumed call: no text, that is ours to make."""
    from vllm.outputs import CompletionOutput, RequestOutput

    completion = CompletionOutput(0, "", [token], None, None, finish_reason="length" if last else None)
    return RequestOutput("r", None, PROMPT, None, [completion], finished=last)


@pytest.mark.parametrize("fields", [{}, {"stop": True}, {"stop_token_ids": True}, {"skip_special_tokens": False}])
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stored_answer_is_the_engines(
    engine: Any, on_loop: OnLoop[Any], fields: dict[str, Any], include: bool
) -> None:
    """A row that is made from the store has, to the last character, the text that the engine delivered."""
    tokenizer = surface.tokenizer_of(engine)

    async def one(number: int, prompt: list[int]) -> None:
        chosen = dict(fields)
        free = await ask(engine, prompt, greedy(60 + 3 * number), f"free-{number}")
        if "stop" in chosen:
            chosen["stop"] = [free.text[20:22], free.text[30:34]]
        if "stop_token_ids" in chosen:
            chosen["stop_token_ids"] = [free.token_ids[30]]
        params = greedy(60 + 3 * number, include_stop_str_in_output=include, **chosen)
        whole = await ask(engine, prompt, params, f"whole-{number}")
        ended = (str(whole.finish_reason), whole.stop_reason)
        assert text_of(tokenizer, request_of("r", prompt, params), whole.token_ids, *ended) == whole.text

    async def scenario() -> None:
        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts(12))))

    on_loop(scenario())
