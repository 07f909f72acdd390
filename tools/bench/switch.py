"""Beside vLLM's worker: takes the plug-in's parts out of a living engine and puts them back, and tells what it worked.

Owns: which logits processors the batch of this worker runs, whether it keeps output ids for them; its processor time.
Does not know: who measures. For benchmarks alone: it reaches into vLLM, as nothing in the product does.

The same engine with and without is the only fair pair: two engine processes alike in everything differ by some percent,
each for its whole life. What is not taken out: the scheduler's class, which is asked once a request and not by step.
"""

from __future__ import annotations

import time
from typing import Any

OURS = "vllm_hooks."


class Switch:
    """Given to an engine as `worker_extension_cls`, told by `collective_rpc`."""

    model_runner: Any

    def switch_parts(self, on: bool) -> int:
        """Only between requests. How many processors run from now on."""
        batch: Any = getattr(self.model_runner, "input_batch", None)
        running = getattr(batch, "logitsprocs", None)
        if running is None:  # a V2 runner: none of this kind, and none of ours
            return 0
        if not hasattr(self, "_whole"):
            self._whole = [list(running.argmax_invariant), list(running.non_argmax_invariant)]
            self._keeps_ids = batch.logitsprocs_need_output_token_ids
        kept = [[one for one in whole if on or not type(one).__module__.startswith(OURS)] for whole in self._whole]
        running.argmax_invariant, running.non_argmax_invariant = kept
        batch.logitsprocs_need_output_token_ids = on and self._keeps_ids
        return sum(map(len, kept))

    def processor_seconds(self) -> float:
        """Of the process that the worker lives in: on the CPU build the engine's core, with scheduler and sampler."""
        return time.process_time()
