"""The model that is trained, with torch on one thread of the CPU.

Owns: the weights, the optimizer, the loss.
Does not know: engines, rollouts, where files go.

Invariants:
1. (V4) The ratio of the loss is against the logprob that a token had when it was sampled, under whichever version.
2. (V11) Only tokens of the loss mask count.
3. One thread: the engine's own threads need the other cores, and a pool of threads does not survive a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from examples.rl.reward import reward
from recovery.admission.samples import Sample

CLIP = 0.2
_OPTIMIZER = "optimizer.pt"


class Policy:
    """A causal language model and its AdamW, from a model folder; with the optimizer's state if that is there too."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0)
        if (folder / _OPTIMIZER).exists():
            self._optimizer.load_state_dict(torch.load(folder / _OPTIMIZER, weights_only=True))

    def step(self, groups: Sequence[Sequence[Sample]], prompt_ids: Sequence[Sequence[Sequence[int]]]) -> float:
        """One clipped policy-gradient step; a group's mean reward is its baseline. Returns the mean reward."""
        self._optimizer.zero_grad()
        rewards = [[reward(sample.text) for sample in group] for group in groups]
        n_tokens = sum(sum(sample.loss_mask) for group in groups for sample in group)
        for group, prompts, values in zip(groups, prompt_ids, rewards, strict=True):
            baseline = sum(values) / len(values)
            for sample, prompt, value in zip(group, prompts, values, strict=True):
                if value != baseline and n_tokens:
                    (self._loss(sample, prompt, value - baseline) / n_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        flat = [value for values in rewards for value in values]
        return sum(flat) / len(flat)

    def _loss(self, sample: Sample, prompt: Sequence[int], advantage: float) -> torch.Tensor:
        ids = torch.tensor([*prompt, *sample.token_ids])
        logits = self._model(ids[None, :-1]).logits[0, len(prompt) - 1 :]
        now = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])[:, 0]
        ratio = torch.exp(now - torch.tensor(sample.logprobs))
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        return -(gain * torch.tensor(sample.loss_mask, dtype=torch.float32)).sum()

    @property
    def weight_names(self) -> frozenset[str]:
        """Names that a saved folder has to hold; of weights that are tied, one."""
        seen: dict[int, str] = {}
        for name, weight in self._model.state_dict().items():
            seen.setdefault(weight.data_ptr(), name)
        return frozenset(seen.values())

    def save_weights(self, folder: Path) -> None:
        """As a model folder that transformers and vLLM load."""
        self._model.save_pretrained(folder)

    def save_optimizer(self, folder: Path) -> None:
        torch.save(self._optimizer.state_dict(), folder / _OPTIMIZER)
