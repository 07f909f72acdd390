"""Sampling without a generator to save: what is drawn for a token is a function of a seed and of its position.

Owns: the noise (the function that marks.SCHEME names), and the logits processor of the engine's V1 runner that draws
with it.
Does not know: sessions, stores, who chose the seed. Runs in the engine's worker.

Invariants:
1. The draw of a call at a position depends on its seed, the position in prompt and answer together, and the logits;
   not on the batch, on what was drawn before, or on how often the engine pre-empted the call.
2. The token that the engine samples is distributed as its own: temperature, min_p and penalties are the engine's, top-k
   and top-p are vLLM's own function, and the most likely token plus Gumbel noise is a draw of the softmax.
3. A seeded call that the engine's own generator drew for is drawn on from that generator, wound on to the cut: one
   number of it seeds vLLM's kernel for each token (CPU build).
4. Rows without a mark are left to the engine. The raw logprobs it reports were taken before and are not touched.

After this processor a row has one finite logit, so that whatever the engine's generator does, it takes that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from vllm_hooks.logits import follow
from vllm_hooks.marks import mark_of, marked

_BLOCK = 1 << 18
"""Logits worked on at a time: what fits a core's cache."""

_GOLDEN = 0x9E3779B97F4A7C15


def keys(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit words that stand for a seed and a position (SplitMix64 over both)."""
    mask = (1 << 64) - 1
    x = (seed + (position + 1) * _GOLDEN) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    x ^= x >> 31
    low, high = np.array([x & 0xFFFFFFFF, x >> 32], dtype=np.uint32).view(np.int32)
    return int(low), int(high)


def gumbel(low: torch.Tensor, high: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """Gumbel noise of shape (rows, n_tokens); `low`, `high`: the rows' keys as int32.

    A 32-bit hash of (key, token id), 31 bits of which are the tail that makes a token win: its smallest value is
    2^-32, so that a token of probability 1e-9 still has its chance.
    """
    x = torch.arange(n_tokens, dtype=torch.int32, device=low.device) * -1640531535
    x = x.unsqueeze(0) + low.unsqueeze(1)
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    x ^= (x >> 16) & 0xFFFF
    x += high.unsqueeze(1)
    x ^= (x >> 15) & 0x1FFFF
    x *= 739982445
    x ^= (x >> 12) & 0xFFFFF
    x *= 695872825
    x ^= (x >> 15) & 0x1FFFF
    x &= 0x7FFFFFFF
    tail = x.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return tail.neg_().log1p_().neg_().log_().neg_()


def draw(logits: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """One token id a row, of the softmax of `logits` (float32; -inf where a token may not be)."""
    n_rows, n_tokens = logits.shape
    step = max(1, _BLOCK // n_tokens)
    chosen = [
        (gumbel(low[at : at + step], high[at : at + step], n_tokens).add_(logits[at : at + step])).argmax(dim=-1)
        for at in range(0, n_rows, step)
    ]
    return torch.cat(chosen)


@dataclass(slots=True)
class _Drawn:
    seed: int
    before: int
    output_ids: list[int]
    top_k: int
    top_p: float


@dataclass(slots=True)
class _Wound:
    """As _Drawn, with the engine's generator of a seed; `saved` tokens were drawn with it before."""

    generator: torch.Generator
    saved: int
    output_ids: list[int]
    top_k: int
    top_p: float
    drawn: int = 0
    last: int = 0

    def kernel_seed(self) -> int:
        """What the engine would give its kernel for the next token."""
        wanted = self.saved + len(self.output_ids) + 1
        if wanted > self.drawn:  # the same position may be asked for twice: a part of a prefill is sampled, too
            numbers = torch.randint(0, 2**31, (wanted - self.drawn,), generator=self.generator, dtype=torch.long)
            self.drawn, self.last = wanted, int(numbers[-1])
        return self.last


Marked = TypeVar("Marked", _Drawn, _Wound)


class PositionDraws(LogitsProcessor):
    """Draws for requests whose mark has `draws` (seed, top_k, top_p) or `generator` (seed, saved, top_k, top_p)."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._drawn: dict[int, _Drawn] = {}
        self._wound: dict[int, _Wound] = {}

    def is_argmax_invariant(self) -> bool:
        return True  # greedy requests are never drawn; this is where the engine applies top-k and top-p, too

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        asking = marked(batch_update.added)
        if not (asking or self._drawn or self._wound):
            return
        drawn: dict[int, _Drawn] = {}
        wound: dict[int, _Wound] = {}
        for index, params, prompt_ids, output_ids in asking:
            asked = mark_of(params)
            if "draws" in asked:
                seed, top_k, top_p = asked["draws"]
                drawn[index] = _Drawn(seed, len(prompt_ids or ()), output_ids, top_k, top_p)
            elif "generator" in asked:
                seed, saved, top_k, top_p = asked["generator"]
                wound[index] = _Wound(torch.Generator().manual_seed(seed), saved, output_ids, top_k, top_p)
        follow(self._drawn, batch_update, drawn)
        follow(self._wound, batch_update, wound)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._drawn:
            at, mine, rows = self._of(self._drawn, logits)
            words = np.array([keys(row.seed, row.before + len(row.output_ids)) for row in rows], dtype=np.int32)
            low, high = torch.from_numpy(words.T.copy()).to(self._device)
            self._leave(logits, at, draw(mine, low, high))
        if self._wound:
            at, mine, wound = self._of(self._wound, logits)
            seeds = torch.tensor([row.kernel_seed() for row in wound], dtype=torch.long)
            self._leave(logits, at, torch.ops._C.fused_gumbel_argmax(mine, seeds))
        return logits

    def _of(self, marked: dict[int, Marked], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[Marked]]:
        """Where the marked rows are, their logits without what top-k and top-p leave out, and the rows."""
        indices = sorted(marked)
        rows = [marked[index] for index in indices]
        at = torch.tensor(indices, device=self._device)
        mine = logits if len(rows) == logits.shape[0] else logits[at]
        return at, self._filtered(mine, rows), rows

    @staticmethod
    def _leave(logits: torch.Tensor, at: torch.Tensor, chosen: torch.Tensor) -> None:
        """Nothing but the chosen token in each of these rows."""
        logits[at] = -torch.inf
        logits[at, chosen] = 0.0

    def _filtered(self, logits: torch.Tensor, rows: Sequence[_Drawn | _Wound]) -> torch.Tensor:
        """Without what top-k and top-p leave out; may write into `logits`."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        vocabulary = logits.shape[1]
        ks = [row.top_k if 0 < row.top_k < vocabulary else vocabulary for row in rows]
        ps = [row.top_p for row in rows]
        k = torch.tensor(ks, dtype=torch.int32, device=self._device) if min(ks) < vocabulary else None
        p = torch.tensor(ps, dtype=torch.float32, device=self._device) if min(ps) < 1.0 else None
        return apply_top_k_top_p(logits, k, p)
