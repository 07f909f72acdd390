"""What a request may ask for and still be carried on exactly, as kinds of calls for the parity suite.

Owns: for every row of the resume table that is exact, a kind of call that has it, or the test that covers it elsewhere.
Does not know: engines, cuts, how answers are compared (parity.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.engine_runs import Answer

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """`fields` of a request; `made` makes more of them from the same call without them, and the tokenizer.

    `prompt`: what the prompt has beside its ids; `arguments`: of `generate`.
    """

    name: str
    fields: Fields
    made: Callable[[Answer, Any], Fields] = lambda free, tokenizer: {}
    prompt: Fields = ()  # type: ignore[assignment]
    arguments: Fields = ()  # type: ignore[assignment]
    also: tuple[str, ...] = ()

    @property
    def rows(self) -> set[str]:
        return {*self.fields, *dict(self.prompt), *dict(self.arguments), *self.also}


def _stop(free: Answer, tokenizer: Any) -> Fields:
    """A string that spans several tokens of the second half, and comes late."""
    half = len(free.token_ids) // 2
    late = [tokenizer.decode(free.token_ids[at : at + 3]) for at in range(half, len(free.token_ids) - 3)]
    whole = tokenizer.decode(free.token_ids)
    wanted = [word for word in late if len(word) > 2 and "�" not in word and whole.find(word) > len(whole) // 3]
    return {"stop": wanted[:1] or ["e"]}


def _stop_ids(free: Answer, tokenizer: Any) -> Fields:
    first = {token: at for at, token in reversed(list(enumerate(free.token_ids)))}
    return {"stop_token_ids": [max(first, key=lambda token: first[token])]}


def _bad_words(free: Answer, tokenizer: Any) -> Fields:
    words = []
    for at in range(2, len(free.token_ids) - 3):
        ids = free.token_ids[at : at + 3]
        word = tokenizer.decode(ids)
        if word.strip() and tokenizer.encode(word, add_special_tokens=False) == ids:
            words.append(word)
    return {"bad_words": words[:5] or ["e", "th"]}


def _repeating(free: Answer, tokenizer: Any) -> Fields:
    """Pushed towards a few tokens, so that some pattern comes up twice."""
    from vllm.sampling_params import RepetitionDetectionParams

    few = dict.fromkeys(sorted(set(free.token_ids))[:3], 60.0)
    return {"logit_bias": few, "repetition_detection": RepetitionDetectionParams(max_pattern_size=6, min_count=3)}


def _structured(**asked: Any) -> Callable[[Answer, Any], Fields]:
    def made(free: Answer, tokenizer: Any) -> Fields:
        from vllm.sampling_params import StructuredOutputsParams

        return {"structured_outputs": StructuredOutputsParams(**asked), "ignore_eos": False}

    return made


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "string", "maxLength": 12}},
    "required": ["a", "b"],
    "additionalProperties": False,
}

KINDS = (
    Kind("plain", {}, also=("max_tokens", "ignore_eos", "temperature", "seed", "draws", "sampling_params")),
    Kind("text prompt", {}, also=("prompt", "request_id", "output_kind", "skip_clone", "output_text_buffer_length")),
    Kind("end of sequence", {"min_tokens": 15, "logit_bias": {1: 14.0}, "ignore_eos": False}),
    Kind("stop string", {}, _stop, also=("stop",)),
    Kind("stop string, kept", {"include_stop_str_in_output": True}, _stop),
    Kind("stop token", {}, _stop_ids, also=("stop_token_ids",)),
    Kind("bias", {"logit_bias": {7: 3.5, 300: -50.0, 6: 2.0}}),
    Kind("allowed tokens", {"allowed_token_ids": list(range(40, 90))}),
    Kind("repetition penalty", {"repetition_penalty": 1.7}),
    Kind("presence penalty", {"presence_penalty": 1.5}),
    Kind("frequency penalty", {"frequency_penalty": 2.0}),
    Kind(
        "all penalties",
        {"frequency_penalty": 0.7, "presence_penalty": -0.3, "repetition_penalty": 1.2, "bad_words": ["e", "th"]},
    ),
    Kind("bad words", {}, _bad_words, also=("bad_words",)),
    Kind("JSON schema", {}, _structured(json=SCHEMA, disable_any_whitespace=True), also=("structured_outputs",)),
    Kind("regular expression", {}, _structured(regex="[a-z]{12}(, [0-9]{2}){4}")),
    Kind("grammar", {}, _structured(grammar='root ::= "(" inner ")"\ninner ::= [a-c]{2,6} | root root')),
    Kind("top k and p", {"top_k": 20, "top_p": 0.9}),
    Kind("min p", {"min_p": 0.02}),
    Kind("best tokens", {"logprobs": 5}),
    Kind("best tokens, flat", {"logprobs": 3, "flat_logprobs": True}),
    Kind("prompt logprobs", {"prompt_logprobs": 2}),
    Kind("ids only", {"detokenize": False}),
    Kind("special tokens shown", {"skip_special_tokens": False, "spaces_between_special_tokens": False}),
    Kind("repeating itself", {}, _repeating, also=("repetition_detection",)),
    Kind("no cached prefix", {"skip_reading_prefix_cache": True}),
    Kind("every third output", {"stream_interval": 3}),
    Kind("extra arguments", {"extra_args": {"mine": [1, "x"]}}, also=("logits_processors",)),
    Kind("cache salt", {}, prompt={"cache_salt": "salt"}),
    Kind("session", {}, arguments={"session_id": "s"}),
)

ELSEWHERE = {
    "n": "test_siblings.py",
    "thinking_token_budget": "test_exact_engines.py",
    "priority": "test_exact_engines.py",
    "lora_request": "test_exact_engines.py",
    "prompt_text": "test_capture_kinds.py",
    "tokenization_kwargs": "test_capture_kinds.py",
    "lineage": "test_agents_engine.py",
    "trace_headers": "about tracing alone; needs a collector",
    "data_parallel_rank": "about scheduling alone; the CPU build has one rank",
    "kv_hints": "about caching alone; needs a connector",
}
"""Rows of which the calls are made by another test, or cannot be made on the CPU build."""
