"""A stream that is carried on with its saved tokens one by one: delta for delta the stream that was never cut."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.engine_runs import PROMPT, greedy
from tests.test_capture_text import delta_of
from tests.test_parsers_across_the_cut import ANSWER, THOUGHT, ids_of, parsed, tokenizer  # noqa: F401
from vllm_hooks import surface
from vllm_hooks.outputs import Assembly

Delta = tuple[list[int], str]


def uncut(tokenizer: Any, ids: list[int], params: Any) -> list[Delta]:  # noqa: F811
    """What vLLM's own detokenizer gives for one token after the other."""
    own = surface.detokenizer(tokenizer, params, PROMPT, "r")
    deltas = []
    for at, token in enumerate(ids, start=1):
        own.update([token], False)
        deltas.append(([token], own.get_next_output_text(at == len(ids), True)))
    return deltas


def carried_on(tokenizer: Any, ids: list[int], cut: int, params: Any) -> list[Any]:  # noqa: F811
    """The completions of a call with `cut` saved tokens; of all of them: of one that ended."""
    assembly = Assembly(params, "r", PROMPT, None, tokenizer, array("i", ids[:cut]), array("f", [-0.5] * cut), {})
    assembly.begin()
    outputs = list(assembly.replay(min(cut, len(ids) - 1)))
    if cut == len(ids):
        outputs.append(assembly.finished("length", None))
    for at in range(cut, len(ids)):
        delta = delta_of(ids[at], last=at == len(ids) - 1)
        assert not assembly.settle(delta)
        outputs.append(assembly.add(delta))
    assert [output.finished for output in outputs] == [False] * (len(ids) - 1) + [True]
    return [output.outputs[0] for output in outputs]


@pytest.mark.parametrize("stop", [None, ["never there", "x"]])
def test_every_delta_is_the_uncut_ones(tokenizer: Any, stop: list[str] | None) -> None:  # noqa: F811
    """B18: also where text is held back for a stop string, and inside a character of several bytes."""
    ids = ids_of(tokenizer, f"{THOUGHT}</think>{ANSWER}")
    params = greedy(len(ids), "DELTA", logprobs=None, stop=stop)
    wanted = uncut(tokenizer, ids, params)
    for cut in range(1, len(ids) + 1):
        found = [(list(one.token_ids), one.text) for one in carried_on(tokenizer, ids, cut, params)]
        assert found == wanted, cut


def test_every_delta_has_its_own_logprobs(tokenizer: Any) -> None:  # noqa: F811
    ids = ids_of(tokenizer, ANSWER)
    params = greedy(len(ids), "DELTA", logprobs=0)
    for one, token in zip(carried_on(tokenizer, ids, len(ids), params), ids, strict=True):
        (position,) = one.logprobs
        assert position[token].logprob == -0.5
    assert one.cumulative_logprob == -0.5 * len(ids)


def test_a_parser_that_expects_one_token_a_delta_is_not_misled(tokenizer: Any) -> None:  # noqa: F811
    """The mark that begins a thought, among the saved tokens: vLLM's parser knows it alone in its delta only."""
    from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

    ids = ids_of(tokenizer, f"<think>{THOUGHT}</think>{ANSWER}")
    params = greedy(len(ids), "DELTA", logprobs=None)
    for cut in range(1, len(ids) + 1):
        deltas = [(list(one.token_ids), one.text) for one in carried_on(tokenizer, ids, cut, params)]
        messages = parsed(DeepSeekR1ReasoningParser(tokenizer).extract_reasoning_streaming, iter(deltas))
        assert "".join(message.reasoning or "" for message in messages) == THOUGHT, cut
        assert "".join(message.content or "" for message in messages) == ANSWER, cut


def test_a_call_without_saved_tokens_replays_nothing() -> None:
    params = greedy(4, "DELTA", logprobs=None)
    assert not list(Assembly(params, "r", PROMPT, None, None, array("i"), array("f"), {}).replay(0))
