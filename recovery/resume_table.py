"""The resume table: for every field of a request, what becomes of it when the call goes on from saved tokens.

Owns: one row for each field of vLLM's SamplingParams and for each argument of its `generate`; the names of what an
engine can be given to make more of them exact. docs/resume-table.md is generated from here.
Does not know: vLLM. tests/test_resume_table.py compares the rows with the fields of the installed version.

Invariants:
1. A field without a row is restart-only by its name; nothing is resumed on the hope that it does not matter.
2. EXACT and PLUGIN rows are covered by tests that cut a call and compare it with the uninterrupted one.
3. A row that is not exact on every engine says what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from recovery.lineage import LINEAGE

GREEDY_BELOW = 1e-5
"""vLLM's own bound: below it the most likely token is taken and nothing is drawn."""

TOP_LOGPROBS_MAX = 4096
"""So many best tokens of a position can be kept (a row of a wide column)."""

TRUE_SPLIT = "true_split"
PREFIX_SAFE = "prefix_safe"
POSITION_DRAWS = "position_draws"
GENERATOR_DRAWS = "generator_draws"
GRAMMAR = "grammar"
REDRAW = "redraw"

ABILITIES = {
    TRUE_SPLIT: "the logits processor `vllm_hooks.logits:TrueSplit` is the last of the engine's `logits_processors` "
    "(`vllm_hooks.engine_arguments(...)` puts it there; so does `prefix-recovery run` on the CPU build)",
    POSITION_DRAWS: "`vllm_hooks.draws:PositionDraws` is among them, `rollout_checkpointing.draws` is `position`, and "
    "the engine reports raw logprobs",
    GENERATOR_DRAWS: "the same with `draws: engine`, on the CPU build",
    PREFIX_SAFE: "every custom logits processor of the engine derives from `vllm_hooks.logits.PrefixSafe`, or there is "
    "none",
    GRAMMAR: "the engine's `scheduler_cls` is `vllm_hooks.scheduling.PrefixScheduler` (`engine_arguments` sets it on "
    "the CPU build), and it has no reasoning parser",
    REDRAW: "`rollout_checkpointing.unresumable: redraw`",
}
"""What an engine or a configuration may add, and how it is had."""


class Kind(Enum):
    """What happens to a call that has the field set, after a crash."""

    EXACT = "exact as is"
    PLUGIN = "exact through the plug-in"
    DRAWN = "exact through the plug-in; without it with a stated difference, if asked for"
    RESTART = "restart-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field. `how`: what makes it exact; `why`: what stands in the way without one of `needs`; `do`: advice.

    `harmless` are values with which the field asks for nothing. `limit`: the largest number for which a row is exact;
    more, or less than 0, is restart-only because of `why`.
    """

    kind: Kind
    how: str = ""
    needs: tuple[str, ...] = ()
    why: str = ""
    do: str = ""
    harmless: tuple[Any, ...] = ()
    limit: int | None = None


def _exact(how: str) -> Row:
    return Row(kind=Kind.EXACT, how=how)


def _restart(why: str, do: str, harmless: tuple[Any, ...] = ()) -> Row:
    return Row(kind=Kind.RESTART, why=why, do=do, harmless=harmless)


_STATELESS = "looks at one position only"
_DELIVERY = "about how outputs reach the caller"
_PROMPT_ONLY = "asked for once more with the true prompt alone; the rows of the saved tokens are never in it"
_COUNTED = Row(
    kind=Kind.PLUGIN,
    needs=(TRUE_SPLIT,),
    how="counted over the saved and the new tokens by our logits processor, in the engine's own arithmetic",
    why="it counts generated tokens only, and a prefix would be counted as prompt",
    do="start the engine with `vllm_hooks.engine_arguments(...)`",
)
_LEAVE_OUT = "leave it out"

SAMPLING: Mapping[str, Row] = {
    "n": _exact("each sample is a call of its own, named `INDEX_REQUEST-ID`; its seed is the request's plus its index"),
    "presence_penalty": _COUNTED,
    "frequency_penalty": _COUNTED,
    "repetition_penalty": _exact("counts prompt and output alike"),
    "temperature": Row(
        kind=Kind.DRAWN,
        needs=(POSITION_DRAWS, REDRAW),
        how="drawn with noise that is a function of the call's seed and the position; with `redraw` alone: another "
        "draw from the same distribution, labelled `statistical`",
        why="the engine's generator is not saved, and would draw anew",
        do="start the engine with `vllm_hooks.engine_arguments(...)`, or set `unresumable: redraw`",
    ),
    "watermarking": _restart("its memory of what was generated is not restored", _LEAVE_OUT),
    "top_p": _exact(_STATELESS),
    "top_k": _exact(_STATELESS),
    "min_p": _exact(_STATELESS),
    "seed": Row(
        kind=Kind.DRAWN,
        needs=(POSITION_DRAWS, GENERATOR_DRAWS, REDRAW),
        how="as `temperature`, from this seed; with `draws: engine` the engine's own generator is wound on to the cut",
        why="the engine's generator would begin again at the first token",
        do="as `temperature`",
    ),
    "stop": _exact("looked for in the text of the whole call, also across the cut"),
    "stop_token_ids": _exact("looks at the last token only; a prefix that ends with one is a whole answer"),
    "ignore_eos": _exact("looks at the last token only"),
    "max_tokens": _exact("reduced by what is saved"),
    "min_tokens": _exact("reduced by what is saved"),
    "logprobs": Row(
        kind=Kind.EXACT,
        how="the best tokens of each saved position, their logprobs and the sampled token's rank are kept with it",
        why="so many values for each token are not kept",
        do="ask for fewer",
        harmless=(None, 0),
        limit=TOP_LOGPROBS_MAX,
    ),
    "prompt_logprobs": _exact(_PROMPT_ONLY),
    "prompt_logprob_token_ids": _restart("it needs the V2 runner, on which it was not tested", "use prompt_logprobs"),
    "prompt_logprob_start": _restart("it needs the V2 runner, on which it was not tested", "use prompt_logprobs"),
    "logprob_token_ids": _restart("the logprobs of these tokens are not kept for the prefix", _LEAVE_OUT),
    "flat_logprobs": _exact(_DELIVERY),
    "detokenize": _exact("text is made of all tokens, begun after the true prompt"),
    "skip_special_tokens": _exact("as `detokenize`"),
    "spaces_between_special_tokens": _exact("as `detokenize`"),
    "include_stop_str_in_output": _exact("as `stop`"),
    "output_kind": _exact(_DELIVERY),
    "stream_interval": _exact(_DELIVERY),
    "skip_clone": _exact(_DELIVERY),
    "output_text_buffer_length": _exact("follows from `stop`"),
    "structured_outputs": Row(
        kind=Kind.PLUGIN,
        needs=(GRAMMAR,),
        how="the grammar is advanced over the saved tokens before it is used",
        why="the grammar would begin again at its root",
        do="start the engine with `vllm_hooks.engine_arguments(...)`",
    ),
    "logit_bias": _exact(_STATELESS),
    "allowed_token_ids": _exact(_STATELESS),
    "extra_args": Row(
        kind=Kind.PLUGIN,
        needs=(PREFIX_SAFE,),
        how="handed on; custom logits processors see prompt and output apart",
        why="custom logits processors may read it, and what they make of a prefix in the prompt is not known",
        do="derive the processor from `vllm_hooks.logits.PrefixSafe`",
    ),
    "bad_words": Row(
        kind=Kind.PLUGIN,
        needs=(TRUE_SPLIT,),
        how="matched against the saved and the new tokens by our logits processor",
        why="a word that straddles the cut would not be seen",
        do="start the engine with `vllm_hooks.engine_arguments(...)`",
    ),
    "skip_reading_prefix_cache": _exact("changes no value"),
    "thinking_token_budget": _exact(
        "the engine looks for the markers in prompt and output alike; a call cut inside the marker that ends thinking "
        "begins again"
    ),
    "repetition_detection": _exact("looked for in the tokens of the whole call, also across the cut"),
    "routed_experts_prompt_start": _restart("the experts chosen for the prefix are not kept", _LEAVE_OUT),
    "trace_decode_token_ids": _restart("the request ends with its trace", _LEAVE_OUT),
}
"""Public fields of SamplingParams."""

_GRAMMAR_BEGINS = "with structured outputs, where their grammar begins is not kept; without them nothing looks at it"
_ENGINE_ONLY = "about scheduling, caching or tracing; changes no value"

DRAWS = "draws"
"""Key of a request's `extra`: its seed, and by which function of seed and position it is drawn."""

REQUEST: Mapping[str, Row] = {
    "prompt": _exact("kept as token ids; the saved tokens follow it"),
    "sampling_params": _exact("see its fields"),
    "request_id": _exact("the name of the call in every process"),
    "prompt_text": _exact(_DELIVERY),
    "tokenization_kwargs": _exact("used once, on the first prompt"),
    "trace_headers": _exact(_ENGINE_ONLY),
    "priority": _exact(_ENGINE_ONLY),
    "data_parallel_rank": _exact(_ENGINE_ONLY),
    "session_id": _exact(_ENGINE_ONLY),
    "kv_hints": _exact(_ENGINE_ONLY),
    DRAWS: _exact("the seed that was given to the call at admission, and stored with it"),
    LINEAGE: _exact("which model call of its turn it is, and after whose answer; stored with it"),
    "cache_salt": _exact(
        "kept with the prompt, and joined with the policy version after a weight update; changes no value"
    ),
    "logits_processors": Row(
        kind=Kind.PLUGIN,
        needs=(PREFIX_SAFE,),
        how="custom logits processors see prompt and output apart",
        why="the engine has custom logits processors, and what they make of a prefix in the prompt is not known",
        do="derive them from `vllm_hooks.logits.PrefixSafe`",
    ),
    "enable_return_routed_experts": _restart(
        "the engine returns the experts of every token, and those of the prefix are not kept", "start it without"
    ),
    "kv_transfer_params": _restart("the cache is another engine's", _LEAVE_OUT),
    "ec_transfer_params": _restart("the cache is another engine's", _LEAVE_OUT),
    "lora_request": _exact("the adapter's name and the digest of its files are part of the request"),
    "lora_path": _restart(
        "the adapter is no folder here, and what it holds is not known", "load it from a local folder"
    ),
    "reasoning_ended": _restart(_GRAMMAR_BEGINS, _LEAVE_OUT),
    "reasoning_parser_kwargs": _restart(_GRAMMAR_BEGINS, _LEAVE_OUT),
}
"""Arguments of `generate`, what a prompt or `extra_args` may carry, and what an engine adds to every request."""

UNCAPTURED: Mapping[str, str] = {
    "multi_modal_data": "processed features are not stored",
    "mm_kwargs": "processed features are not stored",
    "mm_processor_kwargs": "processed features are not stored",
    "prompt_embeds": "embeddings are not stored",
    "encoder_prompt": "encoder and decoder prompts are not stored",
}
"""Requests that are passed through: the engine serves them, and nothing of them is stored."""

_UNKNOWN = _restart("it is not known to resume exactly", "leave it out until a version that knows it")


def row(name: str) -> Row:
    """The row of a field or argument; an unknown one is restart-only."""
    return SAMPLING.get(name) or REQUEST.get(name) or _UNKNOWN


def hindrance(sampling: Mapping[str, Any], arguments: Iterable[str], abilities: frozenset[str]) -> str:
    """The name of the first field because of which a call cannot be resumed in the middle, or "".

    Args:
        sampling: the fields that differ from vLLM's defaults; `temperature` is always there.
        arguments: names of the other arguments of the request that are set.
        abilities: what this engine and configuration add (keys of ABILITIES).
    """
    if not is_greedy(sampling) and not drawn_alike(sampling, arguments, abilities) and REDRAW not in abilities:
        return "seed" if sampling.get("seed") is not None else "temperature"
    lacking = [name for name in sampling if name not in _APART and _lacks(name, sampling[name], abilities)]
    lacking += [name for name in arguments if _in_the_way(name, abilities)]
    return min(lacking, default="")


_APART = frozenset(("temperature", "seed"))


def _lacks(name: str, value: Any, abilities: frozenset[str]) -> bool:
    of = row(name)
    return (_in_the_way(name, abilities) or not _within(of, value)) and value not in of.harmless


@lru_cache(maxsize=1024)
def _in_the_way(name: str, abilities: frozenset[str]) -> bool:
    of = row(name)
    return of.kind is Kind.RESTART or (of.kind is not Kind.EXACT and not abilities.intersection(of.needs))


def _within(of: Row, value: Any) -> bool:
    return of.limit is None or (isinstance(value, int) and 0 <= value <= of.limit)


def drawn_alike(sampling: Mapping[str, Any], arguments: Iterable[str], abilities: frozenset[str]) -> bool:
    """Whether a sampled call draws after a cut what it would have drawn without one."""
    if DRAWS in arguments:
        return POSITION_DRAWS in abilities
    return GENERATOR_DRAWS in abilities and sampling.get("seed") is not None


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    """Whether nothing is drawn."""
    temperature = sampling.get("temperature")
    return temperature is not None and float(temperature) < GREEDY_BELOW


def why(name: str) -> str:
    """One sentence for people about what stands in the way of a field."""
    return UNCAPTURED.get(name) or row(name).why
