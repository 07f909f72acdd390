"""From an ended call to the row of the output file: one way, for fresh and for restored calls.

Owns: the fields of a row (design, section 7) and how its text is made from its token ids.
Does not know: files, sessions.

Invariants:
1. A row is a function of the call's stored state and the tokenizer: made before or after a crash it is the same.
2. Text comes from decoding all output ids at once, never from joining decoded parts (case K1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from recovery.model import PolicyVersion, Request, Restarted, Restore, Resumed


def make_row(
    *,
    id: str,
    sample_index: int,
    request: Request,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    version_spans: Sequence[tuple[int, int, PolicyVersion]],
    history: Sequence[Restore],
    finish_reason: str,
    stop_reason: int | str | None,
    tokenizer: Any | None,
) -> dict[str, Any]:
    """One output row, JSON-able. Non-finite logprobs become the strings NaN, Infinity, -Infinity."""
    return {
        "id": id,
        "sample_index": sample_index,
        "prompt_token_ids": [int(token) for token in request.prompt_token_ids],
        "token_ids": [int(token) for token in token_ids],
        "logprobs": [json_number(value) for value in logprobs],
        "text": text_of(tokenizer, token_ids, request.sampling, finish_reason, stop_reason),
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
    tokenizer: Any | None,
    token_ids: Sequence[int],
    sampling: Mapping[str, Any],
    finish_reason: str,
    stop_reason: int | str | None,
) -> str:
    """The text of an answer as vLLM gives it: without the token or string that stopped it, unless asked for."""
    if tokenizer is None or sampling.get("detokenize") is False:
        return ""
    keep_stop = bool(sampling.get("include_stop_str_in_output", False))
    ids = [int(token) for token in token_ids]
    if finish_reason == "stop" and not isinstance(stop_reason, str) and not keep_stop:
        ids = ids[:-1]
    text: str = tokenizer.decode(
        ids,
        skip_special_tokens=bool(sampling.get("skip_special_tokens", True)),
        spaces_between_special_tokens=bool(sampling.get("spaces_between_special_tokens", True)),
    )
    if isinstance(stop_reason, str) and finish_reason == "stop":
        at = text.rfind(stop_reason)
        if at >= 0:
            text = text[: at + len(stop_reason)] if keep_stop else text[:at]
    return text
