"""The logprobs of a snapshot's calls, scored once more by an engine: by how much do they differ from what was stored?

Owns: which calls can be scored so, and the largest difference of each.
Does not know: how an engine is made (prefix_recovery.engine), what a difference means for a job.

Invariants:
1. A call of which the stored logprobs are of something else than the plain model (a grammar, an adapter) or of other
   kinds of values is named and left out; its difference would say nothing.
2. Nothing is written, and no score replaces what was stored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recovery.errors import ConfigError
from recovery.ledger import Entry, Ledger
from recovery.model import CallId
from recovery.ports import ObjectStore, SegmentCodec
from recovery.reading import read_transcripts
from recovery.transcripts import Transcript

AT_A_TIME = 16
_OTHER = {"structured_outputs": "a grammar is in its logprobs", "lora_request": "an adapter is in its logprobs"}


@dataclass(frozen=True, slots=True)
class Rescored:
    """One call. `largest`: |stored - scored|, None where nothing was scored; `skipped` says why then."""

    call_id: str
    rollout: str
    n_tokens: int
    largest: float | None
    at: int | None
    skipped: str = ""


def rescore(
    store: ObjectStore, codec: SegmentCodec, ledger: Ledger, record: Mapping[str, Any] | None, model: str
) -> list[Rescored]:
    """Every call of `ledger` that has tokens, by the engine of `model`. `record`: the job's compatibility record.

    Raises ConfigError if the job's values are of another kind, or the engine does not start.
    """
    from prefix_recovery.engine import Engine

    must, recorded = (record or {}).get("must", {}), (record or {}).get("recorded", {})
    kind = must.get("logprobs.kind", "raw_logprobs")
    if kind != "raw_logprobs":
        raise ConfigError(
            f"this job's logprobs are {kind}, and an engine scores a prompt in raw_logprobs",
            hint="leave out --rescore",
        )
    entries = [entry for entry in ledger if entry.n_tokens]
    found = read_transcripts(store, codec, ledger, entries, columns=False)
    arguments = {"dtype": str(recorded.get("engine.dtype", "auto")).removeprefix("torch.")}
    if isinstance(recorded.get("engine.max_model_len"), int):
        arguments["max_model_len"] = recorded["engine.max_model_len"]

    async def run() -> list[Rescored]:
        engine = Engine(model, arguments)
        try:
            return await rescore_on(engine.llm, entries, found)
        finally:
            engine.close()

    return asyncio.run(run())


def record_of(state: bytes | None) -> Mapping[str, Any] | None:
    """The compatibility record of a job, if there is a readable one."""
    try:
        found = json.loads(state or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


async def rescore_on(
    engine: Any, entries: Iterable[Entry], found: Mapping[CallId, Transcript], at_a_time: int = AT_A_TIME
) -> list[Rescored]:
    """On a started engine, some calls at a time, in the order of `entries`."""
    gate = asyncio.Semaphore(at_a_time)

    async def one(entry: Entry) -> Rescored:
        async with gate:
            return await _one(engine, entry, found[entry.call_id])

    return list(await asyncio.gather(*(one(entry) for entry in entries)))


async def _one(engine: Any, entry: Entry, transcript: Transcript) -> Rescored:
    said = entry.call_id.hex(), entry.identity.rollout, len(transcript.token_ids)
    request = transcript.request
    for name, why in _OTHER.items():
        if name in request.sampling or name in request.extra:
            return Rescored(*said, None, None, why)
    prompt = request.prompt_token_ids.tolist()
    room = int(engine.vllm_config.model_config.max_model_len) - 1  # one token is generated, and thrown away
    tokens = transcript.token_ids.tolist()[: max(0, room - len(prompt))]
    known = ~np.isnan(transcript.logprobs[: len(tokens)])
    if not known.any():
        return Rescored(*said, None, None, "it has no logprobs")
    scored = await _score(engine, [*prompt, *tokens], f"rescore-{said[0]}")
    again = np.array([row[token] for row, token in zip(scored[len(prompt) :], tokens, strict=True)])
    stored = transcript.logprobs[: len(tokens)].astype(np.float64)
    gaps = np.where(known & (stored != again), np.abs(stored - again), 0.0)  # equal infinities are equal
    at = int(np.argmax(gaps))
    return Rescored(*said, float(gaps[at]), at)


async def _score(engine: Any, token_ids: list[int], name: str) -> list[Mapping[int, float]]:
    """The logprob of each token given those before it, by position."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_hooks import surface
    from vllm_hooks.capture import drain

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,
    )
    output = await drain(engine.generate(surface.token_prompt(token_ids), params, name))
    return [{} if row is None else {t: float(v.logprob) for t, v in row.items()} for row in output.prompt_logprobs]
