"""Everything this package asks of vLLM, in one place: the surface that a new version may move.

Owns: reading SamplingParams, prompts and outputs; building a resumed request; what ends a call in an engine.
Does not know: calls, buffers, stores.

Checked on vLLM 0.32 (CPU build); by source on 0.30 to 0.33. Fields are found by introspection, never by version.

Invariants:
1. The caller's SamplingParams and prompt objects are never changed (case B9): what is changed is a clone.
2. A field of SamplingParams that differs from its default is always reported, also one this module has never heard of.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from recovery.asked import plain, prompt_ids
from recovery.errors import InputError
from recovery.model import Int32Array, PolicyVersion
from recovery.resume import Resume, StopRules
from recovery.resume_table import PREFIX_SAFE, UNCAPTURED
from vllm_hooks.abilities import abilities_of
from vllm_hooks.marks import mark

_DELIVERY = frozenset({"output_kind", "stream_interval", "skip_clone", "flat_logprobs", "detokenize"})
"""How outputs reach the caller; not part of what the call is."""


def sampling_fields(params: Any) -> dict[str, Any]:
    """The public fields of a SamplingParams that differ from their defaults, as plain JSON values.

    `temperature` is always there. Delivery fields are left out. Raises InputError that names the field (`sampling.…`)
    for a value that JSON does not have.
    """
    fresh = type(params)()
    found: dict[str, Any] = {}
    for name in params.__struct_fields__:
        if name.startswith("_") or name in _DELIVERY or name == "output_text_buffer_length":
            continue
        given = getattr(params, name)
        if given is (default := getattr(fresh, name)):
            continue
        value = plain(given, ("sampling", name))
        if value != default and value not in ([], {}, ""):
            found[name] = value
    if found.get("skip_reading_prefix_cache") is False:
        del found["skip_reading_prefix_cache"]  # what __post_init__ makes of None
    temperature = plain(params.temperature, ("sampling", "temperature"))
    if not isinstance(temperature, int | float):
        raise InputError(f"sampling.temperature is {temperature!r:.80}", hint="give it a number, 0 or above")
    found["temperature"] = float(temperature)
    return found


def native(params: Any) -> Any:
    """The same with Python's own numbers for numpy's, which do not get as far as the engine; itself if it has none."""
    clone = params
    for name in params.__struct_fields__:
        given = getattr(params, name)
        if (value := _native(given)) is not given:
            clone = copy.copy(params) if clone is params else clone
            setattr(clone, name, value)
    return clone


def _native(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if not value or not isinstance(value, list | tuple | set | dict):
        return value
    items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    made = [_native(item) for item in items]
    if all(one is other for one, other in zip(items, made, strict=True)):
        return value
    n = len(value)
    return dict(zip(made[:n], made[n:], strict=True)) if isinstance(value, dict) else type(value)(made)


def sampling_params(fields: Mapping[str, Any]) -> Any:
    """A SamplingParams of JSON values, checked field by field: a wrong type can otherwise end the whole engine.

    Raises ValueError that names the field, or one of vLLM's own errors (see is_refusal).
    """
    from vllm import SamplingParams

    known = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"there is no field {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return msgspec.convert(dict(fields), SamplingParams, str_keys=True)


def stop_rules(engine: Any) -> StopRules:
    """What ends a call in this engine besides the request's own fields."""
    config = engine.vllm_config.model_config
    primary = getattr(tokenizer_of(engine), "eos_token_id", None)
    listed = (config.try_get_generation_config() or {}).get("eos_token_id")
    others = [listed] if isinstance(listed, int) else list(listed or ())
    ids = ([primary] if primary is not None else []) + [other for other in others if other != primary]
    if primary is None and ids:
        ids.insert(0, -1)  # the first place is the engine's own end-of-sequence id, and it has none
    abilities = abilities_of(engine)
    blocked = "" if PREFIX_SAFE in abilities else "logits_processors"
    if getattr(getattr(engine.vllm_config, "aux_output_config", None), "enable_return_routed_experts", False):
        blocked = "enable_return_routed_experts"
    reasoning = getattr(engine.vllm_config, "reasoning_config", None)
    thinking_end = tuple(getattr(reasoning, "reasoning_end_token_ids", None) or ())
    return StopRules(tuple(ids), int(config.max_model_len), abilities, blocked, thinking_end)


def reasons(engine: Any) -> bool:
    """Whether its grammars begin where reasoning ends, also for those who say nothing of it."""
    return bool(engine.vllm_config.structured_outputs_config.reasoning_parser)


def tokenizer_of(engine: Any) -> Any | None:
    """The engine's tokenizer, None with skip_tokenizer_init."""
    if engine.vllm_config.model_config.skip_tokenizer_init:
        return None
    return engine.get_tokenizer()


async def prompt_token_ids(
    engine: Any, prompt: Any, tokenization: Mapping[str, Any] | None = None
) -> tuple[Int32Array | None, Any, str]:
    """The prompt's ids as the engine will see them, the input to hand on, and what stands in the way of capture.

    Text goes through the engine's own renderer, once, so that special tokens are added exactly as the engine would
    (case K2); so do ids when `tokenization` (generate's `tokenization_kwargs`) could change them. The last item names
    the kind of prompt if it is one that cannot be captured, else "". Raises InputError for what is no text and no ids.
    """
    if isinstance(prompt, list | tuple) and not tokenization:
        return prompt_ids(prompt), token_prompt(prompt), ""
    if not isinstance(prompt, str | Mapping | list | tuple):
        return None, prompt, type(prompt).__name__
    if isinstance(prompt, Mapping):
        for kind in UNCAPTURED:
            if prompt.get(kind):
                return None, prompt, kind
    has_ids = isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None
    if isinstance(prompt, Mapping) and has_ids and ("type" in prompt or not tokenization):
        return prompt_ids(prompt["prompt_token_ids"]), prompt, ""
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    plain(prompt.get("prompt") if isinstance(prompt, Mapping) else prompt, ("prompt",))
    parsed = parse_model_prompt(engine.model_config, prompt)
    how = engine.renderer.default_cmpl_tok_params.with_kwargs(**(tokenization or {}))
    (rendered,) = await engine.renderer.render_cmpl_async([parsed], how)
    return prompt_ids(rendered["prompt_token_ids"]), rendered, ""


def token_prompt(token_ids: Sequence[int], like: Any = None) -> dict[str, Any]:
    """A prompt of token ids in the engine's own form; its text and `cache_salt` are kept from `like`."""
    from vllm.inputs import tokens_input

    salt = like.get("cache_salt") if isinstance(like, Mapping) else None
    ids = [int(token) for token in token_ids]
    prompt: dict[str, Any] = tokens_input(ids, prompt=prompt_text(like), cache_salt=salt)
    return prompt


def salted(engine_input: Any, version: PolicyVersion) -> Any:
    """The same prompt, kept apart in the prefix cache from what other weights than the first ones made of it."""
    if version == PolicyVersion() or not isinstance(engine_input, Mapping):
        return engine_input
    own = engine_input.get("cache_salt") or ""
    return {**engine_input, "cache_salt": f"{own}|{version.lineage}.{version.number}"}


def prompt_text(engine_input: Any) -> str | None:
    """The text that a prompt was made from, if it is known: what the engine's outputs repeat as `prompt`."""
    return engine_input.get("prompt") if isinstance(engine_input, Mapping) else None


def capturing_params(params: Any) -> Any:
    """A clone that streams deltas and carries the sampled token's logprob, whatever the caller asked for."""
    from vllm.sampling_params import RequestOutputKind

    clone = params.clone()
    clone.skip_clone = False
    clone.output_kind = RequestOutputKind.DELTA
    if clone.logprobs is None and getattr(clone, "logprob_token_ids", None) is None:
        clone.logprobs = 0
        clone.flat_logprobs = False
    return clone


def pulled_params(params: Any) -> Any:
    """A clone that stays FINAL_ONLY and carries the sampled token's logprob in the cheapest form."""
    clone = params.clone()
    clone.skip_clone = False
    if clone.logprobs is None and getattr(clone, "logprob_token_ids", None) is None:
        clone.logprobs = 0
        clone.flat_logprobs = True
    return clone


def is_final_only(params: Any) -> bool:
    """Whether the caller wants one output, at the end."""
    from vllm.sampling_params import RequestOutputKind

    return bool(params.output_kind == RequestOutputKind.FINAL_ONLY)


def is_delta(params: Any) -> bool:
    """Whether the caller wants each output without what it got before."""
    from vllm.sampling_params import RequestOutputKind

    return bool(params.output_kind == RequestOutputKind.DELTA)


def prompt_only_params(params: Any) -> Any:
    """For the logprobs of the prompt alone, of a call with saved tokens: one token is generated and thrown away."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=params.prompt_logprobs,
        flat_logprobs=params.flat_logprobs,
        detokenize=params.detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def resuming_params(clone: Any, plan: Resume) -> Any:
    """For the rest of a call: budgets reduced, text and penalties left to us.

    A resumed detokenizer would start wrong, and the engine would take the prefix for prompt.

    `clone` comes from capturing_params or pulled_params and is changed in place.
    """
    mark(clone, prefix=plan.n_prefix)
    if clone.presence_penalty or clone.frequency_penalty:
        # All three together: the engine applies repetition first, and would apply it to what we already lowered.
        mark(clone, penalties=[clone.presence_penalty, clone.frequency_penalty, clone.repetition_penalty])
        clone.presence_penalty, clone.frequency_penalty, clone.repetition_penalty = 0.0, 0.0, 1.0
    clone.max_tokens = plan.max_tokens
    clone.min_tokens = plan.min_tokens
    clone.detokenize = False
    clone.stop = []
    clone.prompt_logprobs = None
    clone.output_text_buffer_length = 0
    return clone


def drawing_params(clone: Any, seed: int) -> Any:
    """Let vllm_hooks.draws draw, with the top-k and top-p of `clone`, which is changed in place."""
    mark(clone, draws=[seed, clone.top_k, clone.top_p])
    clone.seed, clone.top_k, clone.top_p = None, 0, 1.0
    return clone


def winding_params(clone: Any, n_prefix: int) -> Any:
    """Let vllm_hooks.draws draw on where the engine's generator of this seed was; `clone` is changed in place."""
    mark(clone, generator=[clone.seed, n_prefix, clone.top_k, clone.top_p])
    clone.seed, clone.top_k, clone.top_p = None, 0, 1.0
    return clone


def trim(output: Any, keep: int) -> None:
    """Cut the delta of an engine output down to its first `keep` tokens, as if no more had come."""
    completion = output.outputs[0]
    dropped = sampled_logprobs(completion.token_ids[keep:], completion.logprobs and completion.logprobs[keep:])
    if completion.cumulative_logprob is not None:
        completion.cumulative_logprob -= sum(dropped or ())
    completion.token_ids = completion.token_ids[:keep]
    if completion.logprobs is not None:
        completion.logprobs = completion.logprobs[:keep]


def repeats(token_ids: Sequence[int], params: Any) -> bool:
    """vLLM's own look at the end of an answer, for `repetition_detection`."""
    from vllm.v1.core.sched.utils import check_sequence_repetition

    return bool(check_sequence_repetition(token_ids, params))


def sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float] | None:
    """The logprob of each sampled token, looked up by its id: the first entry need not be it (case L1)."""
    if logprobs is None:
        return None
    return [float(position[token].logprob) for token, position in zip(token_ids, logprobs, strict=True)]


def sampled_logprobs_from(logprobs: Any, token_ids: Sequence[int], start: int) -> list[float]:
    """The sampled logprobs of `token_ids`, which lie from position `start` on in `logprobs` (either container).

    Empty where the engine has none. vLLM puts the sampled token first at each position of the flat container.
    """
    if logprobs is None:
        return []
    end = start + len(token_ids)
    if hasattr(logprobs, "start_indices"):
        values, at = logprobs.logprobs, logprobs.start_indices[start:end]
        if at and at[-1] - at[0] == end - start - 1:  # one for each token
            return list(map(float, values[at[0] : at[-1] + 1]))
        return [float(values[one]) for one in at]
    return sampled_logprobs(token_ids, logprobs[start:end]) or []


def detokenizer(tokenizer: Any | None, params: Any, prompt_ids: Sequence[int], request_id: str) -> Any:
    """vLLM's own incremental detokenizer, primed with the ORIGINAL prompt (spec: text across the joint)."""
    from types import SimpleNamespace

    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    request = SimpleNamespace(
        request_id=request_id,
        sampling_params=params,
        prompt_token_ids=list(prompt_ids),
        prompt_embeds=None,
        prompt_is_token_ids=None,
    )
    return IncrementalDetokenizer.from_new_request(tokenizer if params.detokenize else None, request)


def api_process(engine: Any) -> tuple[int, int]:
    """Which of how many API server processes of one launcher this is; the first, of one, where there is no launcher."""
    config = engine.vllm_config.parallel_config
    return getattr(config, "_api_process_rank", 0), getattr(config, "_api_process_count", 1)


def is_engine_dead(error: BaseException) -> bool:
    """Whether an exception of `generate` means that the engine process is gone for good."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def is_refusal(error: BaseException) -> bool:
    """Whether an exception of `generate` is about this one request (too long, a bad field) and not about the engine."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineGenerateError

    if isinstance(error, EngineGenerateError):  # what vLLM makes of any error of its checks that it did not foresee
        return isinstance(error.__cause__, TypeError | ValueError | OverflowError)
    return isinstance(error, VLLMClientError)


def refusal_text(error: BaseException) -> str:
    """What a refusal says; vLLM's wrapper around unforeseen errors says nothing itself."""
    return str(error) or str(error.__cause__ or repr(error))
