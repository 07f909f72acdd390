"""From an ended call to the row of the output file: one way, for fresh and for restored calls.

Owns: the fields of a row (docs/run.md) and how its text is made from its token ids.
Does not know: files, sessions.

Invariants:
1. A row is a function of the call's stored state and the tokenizer: made before or after a crash it is the same.
2. Text is the engine's: of a call that ran here it is what the engine delivered, of a stored one it comes from the
   engine's own detokenizer over all ids, begun after the prompt. Decoding the ids alone would differ in a first space
   (SentencePiece) and in a character that the last token leaves unfinished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from recovery.model import PolicyVersion, Request, Restarted, Restore, Resumed
from vllm_hooks import surface


def make_row(
    *,
    id: str,
    sample_index: int,
    source: str,
    request: Request,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    version_spans: Sequence[tuple[int, int, PolicyVersion]],
    history: Sequence[Restore],
    finish_reason: str,
    stop_reason: int | str | None,
    text: str,
) -> dict[str, Any]:
    """One output row, JSON-able. Non-finite logprobs become the strings NaN, Infinity, -Infinity.

    `source`: prompts.source_digest.
    """
    return {
        "id": id,
        "sample_index": sample_index,
        "source": source,
        "prompt_token_ids": [int(token) for token in request.prompt_token_ids],
        "token_ids": [int(token) for token in token_ids],
        "logprobs": [json_number(value) for value in logprobs],
        "text": text,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "version_spans": [[start, end, v.lineage, v.number] for start, end, v in version_spans],
        "resumes": [
            {"at": event.at, "snapshot": event.snapshot, "exactness": event.exactness}
            for event in history
            if isinstance(event, Resumed)
        ],
        "restarts": [
            {"at": event.at, "snapshot": event.snapshot, "reason": event.reason}
            for event in history
            if isinstance(event, Restarted)
        ],
    }


def json_number(value: float) -> float | str:
    """`value` itself, or its name if JSON has no number for it."""
    if math.isfinite(value):
        return float(value)
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def text_of(
    tokenizer: Any | None, request: Request, token_ids: Sequence[int], finish_reason: str, stop_reason: int | str | None
) -> str:
    """The text of a stored answer, as the engine gave it or would have given it."""
    if tokenizer is None:
        return ""
    asked = request.sampling
    params = SimpleNamespace(
        detokenize=True,
        stop=asked.get("stop") or [],
        min_tokens=int(asked.get("min_tokens", 0)),
        include_stop_str_in_output=bool(asked.get("include_stop_str_in_output", False)),
        skip_special_tokens=bool(asked.get("skip_special_tokens", True)),
        spaces_between_special_tokens=bool(asked.get("spaces_between_special_tokens", True)),
    )
    prompt_ids = [int(token) for token in request.prompt_token_ids]
    decoder = surface.detokenizer(tokenizer, params, prompt_ids, request.rollout)
    decoder.update([int(token) for token in token_ids], finish_reason == "stop" and not isinstance(stop_reason, str))
    text: str = decoder.get_next_output_text(True, False)
    return text
