"""The tokens of a whole trajectory as a trainer sees them: the answers, and what tools and environment put between.

Owns: which token was generated and which was only read, and where in the whole each answer and its versions lie.
Does not know: agents, text, where the calls come from (vllm_hooks.trajectory).

Invariants:
1. (B6) `token_ids`, `loss_mask` and `logprobs` are of one length. The mask is 1 for exactly what was generated and
   counts: what stands between two answers is 0, wherever a restore cut the trajectory.
2. Nothing is encoded or decoded: a later prompt must begin with the ids of everything before it, bit for bit.
3. Version spans cover exactly generated tokens, in order. Putting together is associative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from recovery.errors import InputError
from recovery.model import BoolArray, Float32Array, Int32Array, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryTokens:
    """`token_ids` followed `prompt_token_ids`; a single model call is one of these, with a mask of ones.

    `logprobs`: as sampled, 0 for what was not generated, NaN where the engine gave none. `version_spans`: (start, end,
    lineage, number) within `token_ids`. Names and meaning are those of recovery.admission.samples.Sample.
    """

    prompt_token_ids: Int32Array
    token_ids: Int32Array
    loss_mask: BoolArray
    logprobs: Float32Array
    version_spans: tuple[tuple[int, int, str, int], ...]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask) == len(self.logprobs)

    @property
    def context(self) -> Int32Array:
        """All of it, from the first token of the first prompt."""
        return np.concatenate((self.prompt_token_ids, self.token_ids))

    def then(self, later: TrajectoryTokens) -> TrajectoryTokens:
        """This, what `later` was prompted with beyond it, and `later`. Raises InputError if it does not go on here."""
        context, prompt = self.context, later.prompt_token_ids
        if len(prompt) < len(context) or not np.array_equal(prompt[: len(context)], context):
            n = min(len(prompt), len(context))
            differ = np.flatnonzero(prompt[:n] != context[:n])
            raise InputError(
                f"a prompt of {len(prompt)} tokens does not go on from the {len(context)} before it: they part at "
                f"position {int(differ[0]) if len(differ) else n}",
                hint="make prompts of the token ids of the answers, not of their text; "
                "train on the calls one by one where the context was shortened or rewritten",
            )
        between = prompt[len(context) :]
        at = len(self.token_ids) + len(between)
        return TrajectoryTokens(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=np.concatenate((self.token_ids, between, later.token_ids)),
            loss_mask=np.concatenate((self.loss_mask, np.zeros(len(between), np.bool_), later.loss_mask)),
            logprobs=np.concatenate((self.logprobs, np.zeros(len(between), np.float32), later.logprobs)),
            version_spans=(
                *self.version_spans,
                *((start + at, end + at, lineage, number) for start, end, lineage, number in later.version_spans),
            ),
        )


def spans_of(spans: Iterable[tuple[int, int, PolicyVersion]]) -> tuple[tuple[int, int, str, int], ...]:
    """The spans of one call, as a sample has them."""
    return tuple((start, end, version.lineage, version.number) for start, end, version in spans)


def whole(calls: Iterable[TrajectoryTokens]) -> TrajectoryTokens:
    """The calls of one trajectory in their order. Raises InputError for none, and for one that does not go on."""
    made = list(calls)
    if not made:
        raise InputError("a trajectory without a model call has no tokens", hint="ask for them after the first answer")
    return reduce(TrajectoryTokens.then, made)
