"""Is a resumed call the call that would have been, on this engine, now? A few calls are run, cut, resumed, compared.

Owns: the grade of an engine: `bitwise`, `token` or `statistical`.
Does not know: sessions, stores. Nothing of the test is captured.

Invariants:
1. The grade is what was seen: `bitwise` if every resumed token and logprob equals the uninterrupted one's bits, `token`
   if every token does, `statistical` otherwise. No setting's reputation enters.
2. The test proves nothing beyond its own batch shapes and lengths; it can only lower what a restore claims.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recovery.resume_table import POSITION_DRAWS
from vllm_hooks import surface
from vllm_hooks.pull import PullReader


@dataclass(frozen=True, slots=True)
class Divergence:
    """A resumed call that went another way: its first different token, counted from the first one of the call.

    `best_gap`: how far apart the two best logits were there, None if that is not known.
    """

    at: int
    best_gap: float | None


@dataclass(frozen=True, slots=True)
class Parity:
    """What the self-test saw. `largest_gap`: largest |logprob difference| over tokens that agree.

    `pull_agrees`: at every delta, what pull.py reads began with what had been delivered, logprobs included.
    `earlier`: seen at an earlier start of an engine like this one.
    """

    grade: str
    n_calls: int
    n_different: int
    largest_gap: float
    pull_agrees: bool
    divergences: tuple[Divergence, ...] = ()
    earlier: bool = False


NOT_TESTED = Parity("statistical", 0, 0, 0.0, False)
"""What may be claimed without a test."""


async def self_test(engine: Any, *, n_calls: int = 4, n_tokens: int = 24, prompt_tokens: int = 24) -> Parity:
    """Grade an engine. Runs `n_calls` calls twice, the second time from cuts; on the engine's own loop.

    Every second call is sampled, where the engine has vllm_hooks.draws.
    """
    drawn = POSITION_DRAWS in surface.stop_rules(engine).abilities
    seeds = [call if drawn and call % 2 else None for call in range(n_calls)]
    room = int(engine.vllm_config.model_config.max_model_len)
    if prompt_tokens + 7 * n_calls + n_tokens > room:
        prompt_tokens, n_tokens = room // 4, room // 4
    vocabulary = int(engine.vllm_config.model_config.get_vocab_size())
    rng = random.Random(0)
    lengths = [min(prompt_tokens + 7 * call, room // 2) for call in range(n_calls)]
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]
    watch = PullWatch(engine)
    whole = await asyncio.gather(
        *(_run(engine, f"parity-{i}", p, n_tokens, watch, seeds[i]) for i, p in enumerate(prompts))
    )
    cuts = [1 + (call * 5 + 3) % (n_tokens - 1) for call in range(n_calls)]
    rest = await asyncio.gather(
        *(
            _run(
                engine, f"parity-{i}-resumed", [*prompt, *whole[i][0][:cut]], n_tokens - cut, watch, seeds[i], flat=True
            )
            for i, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))
        )
    )
    apart: list[Divergence] = []
    gap, exact = 0.0, True
    for (ids, logprobs, best), (resumed_ids, resumed_logprobs, _), cut in zip(whole, rest, cuts, strict=True):
        if ids[cut:] != resumed_ids:
            same = [one == other for one, other in zip(ids[cut:], resumed_ids, strict=False)]
            at = cut + (same.index(False) if False in same else len(same))
            apart.append(Divergence(at, best[at] if at < len(best) else None))
            continue
        gaps = [abs(a - b) for a, b in zip(logprobs[cut:], resumed_logprobs, strict=True)]
        gap = max(gap, *gaps)
        exact = exact and logprobs[cut:] == resumed_logprobs
    grade = "statistical" if apart else ("bitwise" if exact else "token")
    return Parity(grade, n_calls, len(apart), gap, watch.agrees, tuple(apart))


class PullWatch:
    """Compares what pull.py would read with what was delivered."""

    def __init__(self, engine: Any) -> None:
        self._reader = PullReader(engine)
        self._n_compared = self._n_wrong = 0

    def compare(self, name: str, ids: list[int], logprobs: list[float]) -> None:
        if not self._reader.readable:
            return
        read_ids, read_logprobs, _ = self._reader.read(name, 0)
        if read_ids:  # a request that has finished is not there any more, and that is fine
            self._n_compared += 1
            n = len(ids)
            self._n_wrong += read_ids[:n] != ids or read_logprobs[:n] != logprobs or len(read_ids) != len(read_logprobs)

    @property
    def agrees(self) -> bool:
        """Compared at least once, never found different."""
        return self._n_compared > 0 and self._n_wrong == 0


async def _run(
    engine: Any,
    name: str,
    prompt: Sequence[int],
    n_tokens: int,
    watch: PullWatch,
    seed: int | None,
    *,
    flat: bool = False,
) -> tuple[list[int], list[float], list[float | None]]:
    """One call, streamed, greedy without a seed: ids, sampled logprobs, and how far apart the two best ones were.

    `flat` chooses vLLM's other container of logprobs; both are compared that way.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    most = int(engine.vllm_config.model_config.max_logprobs)
    n_best = 2 if most < 0 else min(2, most)
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        max_tokens=n_tokens,
        ignore_eos=True,
        logprobs=n_best,
        flat_logprobs=flat,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_reading_prefix_cache=True,
    )
    if seed is not None:
        surface.drawing_params(params, seed)
    ids: list[int] = []
    logprobs: list[float] = []
    best: list[float | None] = []
    async for output in engine.generate(surface.token_prompt(prompt), params, name):
        delta = output.outputs[0]
        ids += delta.token_ids
        logprobs += surface.sampled_logprobs(delta.token_ids, delta.logprobs) or []
        for position in delta.logprobs:
            values = sorted((value.logprob for value in position.values()), reverse=True)
            best.append(values[0] - values[1] if n_best == 2 else None)
        watch.compare(name, ids, logprobs)
    return ids, logprobs, best
