"""What drawing by position costs, beside the CPU build's own sampler, on logits of a real model's shape.

    python -m tests.bench_draws [ROWS VOCABULARY]

Owns: the measurement.
Does not know: an engine; the batch is made of random logits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from vllm_hooks.draws import PositionDraws
from vllm_hooks.marks import mark


def best_ms(work: Callable[[], Any], rounds: int = 7) -> float:
    """The fastest of some rounds, after one to warm up."""
    work()
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return 1000 * min(took)


def processor_of(n_rows: int, top_k: int, top_p: float) -> PositionDraws:
    """A processor that draws for each row of a batch."""
    processor = PositionDraws(None, torch.device("cpu"), False)
    added: list[Any] = []
    for row in range(n_rows):
        params = SamplingParams()
        mark(params, draws=[row, top_k, top_p])
        added.append((row, params, [1, 2, 3], []))
    processor.update_state(BatchUpdate(batch_size=n_rows, removed=[], added=added, moved=[]))
    return processor


def measure(n_rows: int, n_tokens: int, top_k: int, top_p: float) -> tuple[float, float]:
    """Milliseconds a step: the engine's sampler, and ours with it. Without a row of ours: `bench exact`."""
    logits = torch.randn(n_rows, n_tokens, generator=torch.Generator().manual_seed(0)) * 3
    sampler = TopKTopPSampler()
    k = torch.full((n_rows,), top_k, dtype=torch.int32) if top_k else None
    p = torch.full((n_rows,), top_p) if top_p < 1 else None
    ours = processor_of(n_rows, top_k, top_p)
    return (
        best_ms(lambda: sampler(logits.clone(), {}, k, p)),
        best_ms(lambda: sampler(ours.apply(logits.clone()), {}, None, None)),
    )


def main() -> None:
    n_rows, n_tokens = [int(one) for one in sys.argv[1:3]] or [32, 49152]
    current_platform.import_kernels()
    torch.set_num_threads(1)
    for top_k, top_p in ((0, 1.0), (0, 0.95), (50, 0.95)):
        engine, position = measure(n_rows, n_tokens, top_k, top_p)
        print(
            f"{n_rows} rows of {n_tokens}, top_k {top_k}, top_p {top_p}: engine {engine:.2f} ms, by position "
            f"{position:.2f} ms"
        )


if __name__ == "__main__":
    main()
