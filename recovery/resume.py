"""How a call goes on from a saved prefix, or why it cannot: pure decisions over request and prefix.

Owns: the table of sampling fields (which resume exactly, which make a call restart-only) and the ResumePlan.
Does not know: vLLM's classes; the sampling is the plain mapping of a Request.

Invariants:
1. prefix + what the plan asks for never exceeds the original budget, however often a call is resumed (B1, B2, B4).
2. A prefix that already is a whole answer is finished, not sent again.
3. A field that the table does not name makes the call restart-only, by that field's name; nothing is resumed on
   the hope that an unknown field does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recovery.model import Request

EXACT_AS_IS = frozenset(
    {
        "allowed_token_ids",
        "detokenize",
        "flat_logprobs",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "output_kind",
        "repetition_penalty",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop_token_ids",
        "stream_interval",
        "top_k",
        "top_p",
    }
)
"""Stateless fields, those about delivery only, and the two budgets that the plan reduces. repetition_penalty counts
prompt and output alike, so a prefix that moved into the prompt changes nothing."""

_GREEDY_BELOW = 1e-5
"""vLLM's own bound: below it the most likely token is taken and nothing is drawn."""

WHY_RESTART_ONLY = {
    "temperature": "sampling above temperature 0 draws anew after a crash",
    "seed": "the engine's generator would begin again at the first token",
    "presence_penalty": "it counts generated tokens only, and a prefix would be counted as prompt",
    "frequency_penalty": "it counts generated tokens only, and a prefix would be counted as prompt",
    "stop": "a stop string that straddles the cut would be missed",
    "bad_words": "a word that straddles the cut would not be seen",
    "logprobs": "only the sampled token's logprob of the prefix is kept",
    "prompt_logprobs": "a resumed prompt contains the prefix",
    "structured_outputs": "the grammar would begin again at its root",
    "n": "the samples of one request cannot be told apart; send them as calls of their own",
    "thinking_token_budget": "the budget used by the prefix is not restored",
    "repetition_detection": "it looks at generated tokens only",
}
"""Reasons for people; a field that is not here gets a general one."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends a call in this engine. `eos_token_ids` are those of the model, the primary one first."""

    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The prefix is the whole answer."""

    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True, slots=True)
class Resume:
    """Prefill prompt + prefix and generate at most `max_tokens` more (None: up to the context length)."""

    n_prefix: int
    max_tokens: int | None
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Begin again from the prompt; `reason` says why the prefix is of no use."""

    reason: str


ResumePlan = Finish | Resume | Restart


def restart_only(sampling: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """The name of the first field because of which a call is never resumed in the middle, or "".

    `sampling` holds the fields that differ from vLLM's defaults (temperature: 1.0); `extra` the other arguments of
    the request that change its distribution (LoRA, multimodal data and the like).
    """
    temperature = sampling.get("temperature")
    if temperature is None or float(temperature) >= _GREEDY_BELOW:
        return "seed" if sampling.get("seed") is not None else "temperature"
    for name in sorted(sampling):
        if name in ("temperature", "seed") or name in EXACT_AS_IS:
            continue
        if name == "logprobs" and sampling[name] in (None, 0):
            continue
        return name
    return next(iter(sorted(extra)), "")


def why(field: str) -> str:
    """One sentence for people about a restart-only field."""
    return WHY_RESTART_ONLY.get(field, "it is not known to resume exactly")


def plan(request: Request, n_prefix: int, last_token_id: int | None, stop: StopRules) -> ResumePlan:
    """What to do with an open call of which `n_prefix` tokens are saved, the last of them `last_token_id`.

    Follows the order of vLLM's own check after each token: end-of-sequence, stop ids, then the budgets.
    """
    if n_prefix == 0:
        return Restart("no token was saved")
    sampling = request.sampling
    ended = _ended_by(sampling, last_token_id, stop)
    if ended is not None:
        return ended
    budget = sampling.get("max_tokens", 16)
    room = stop.max_model_len - len(request.prompt_token_ids) - n_prefix
    left = room if budget is None else min(room, int(budget) - n_prefix)
    if left <= 0:
        return Finish("length", None)
    if request.restart_only:
        return Restart(f"{request.restart_only}: {why(request.restart_only)}")
    return Resume(
        n_prefix=n_prefix,
        max_tokens=None if budget is None else int(budget) - n_prefix,
        min_tokens=max(0, int(sampling.get("min_tokens", 0)) - n_prefix),
    )


def _ended_by(sampling: Mapping[str, Any], last_token_id: int | None, stop: StopRules) -> Finish | None:
    if last_token_id is None:
        return None
    if not sampling.get("ignore_eos", False):
        if stop.eos_token_ids and last_token_id == stop.eos_token_ids[0]:
            return Finish("stop", None)
        if last_token_id in stop.eos_token_ids[1:]:
            return Finish("stop", last_token_id)
    if last_token_id in (sampling.get("stop_token_ids") or ()):
        return Finish("stop", last_token_id)
    return None
