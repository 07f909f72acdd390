"""vllm_hooks.draws: the noise is what it should be, its draws are the engine's own distribution, rows keep their own.

The oracles: the hash once more in numpy's unsigned integers, the distribution functions, vLLM's own sampler.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402

from vllm_hooks.draws import PositionDraws, draw, gumbel, keys  # noqa: E402
from vllm_hooks.marks import mark  # noqa: E402

LONG = 1 << 17


def words(pairs: list[tuple[int, int]]) -> Any:
    return torch.tensor([keys(*pair) for pair in pairs], dtype=torch.int32).T


def hashed(low: int, high: int, n: int) -> np.ndarray:
    """The 31 bits of each token, in unsigned arithmetic."""
    with np.errstate(over="ignore"):
        x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(low & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x *= np.uint32(-2048144789 & 0xFFFFFFFF)
        x ^= x >> np.uint32(13)
        x *= np.uint32(-1028477387 & 0xFFFFFFFF)
        x ^= x >> np.uint32(16)
        x += np.uint32(high & 0xFFFFFFFF)
        x ^= x >> np.uint32(15)
        x *= np.uint32(739982445)
        x ^= x >> np.uint32(12)
        x *= np.uint32(695872825)
        x ^= x >> np.uint32(15)
    return x & np.uint32(0x7FFFFFFF)


@pytest.mark.parametrize("pair", [(0, 0), (7, 20), ((1 << 48) - 1, 131072), (-3, 5)])
def test_the_noise_is_the_written_function(pair: tuple[int, int]) -> None:
    """V16: of seed and position alone, so that a resumed call draws what it would have drawn."""
    low, high = keys(*pair)
    tail = np.minimum((hashed(low, high, 4096) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-tail))
    got = gumbel(*words([pair]), 4096)[0].numpy()
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-4) and np.isfinite(got).all()


def kolmogorov_p(values: np.ndarray) -> float:
    """P value of the largest distance of sorted uniform values from the diagonal."""
    n = len(values)
    values = np.sort(values)
    distance = max(np.abs(values - np.arange(n) / n).max(), np.abs(values - np.arange(1, n + 1) / n).max())
    t = distance * math.sqrt(n)
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 100)))


def chi_square_p(statistic: float, freedom: int) -> float:
    """P value by Wilson and Hilferty's approximation, good for what is tested here."""
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def uniform(noise: Any) -> np.ndarray:
    return np.exp(-np.exp(-noise.numpy().astype(np.float64)))


def test_the_noise_is_gumbel_along_tokens_positions_and_seeds() -> None:
    """Kolmogorov-Smirnov over each of the three things that the noise is a function of; fixed seeds."""
    assert kolmogorov_p(uniform(gumbel(*words([(3, 17)]), LONG)[0])) > 1e-3
    assert kolmogorov_p(uniform(gumbel(*words([(3, at) for at in range(20000)]), 8)[:, 5])) > 1e-3
    assert kolmogorov_p(uniform(gumbel(*words([(seed, 17) for seed in range(20000)]), 8)[:, 5])) > 1e-3


def test_neighbours_are_not_alike() -> None:
    """Seeds, positions and tokens one apart: correlation within what chance allows (five sigma)."""
    seeds = uniform(gumbel(*words([(seed, 9) for seed in range(200)]), 512))
    places = uniform(gumbel(*words([(9, at) for at in range(200)]), 512))
    for grid in (seeds, places):
        for one, other in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:]), (grid[1:, :-1], grid[:-1, 1:])):
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / math.sqrt(one.size)


def counts_of(chosen: Any, n_tokens: int) -> np.ndarray:
    return np.bincount(np.asarray(chosen), minlength=n_tokens).astype(np.float64)


@pytest.mark.parametrize("seed", range(2))
def test_draws_are_of_the_softmax(seed: int) -> None:
    """Chi-square against the exact probabilities, over the positions of one call."""
    logits = torch.from_numpy(np.random.RandomState(seed).standard_normal(64).astype(np.float32) * 1.5)
    n = 20000
    chosen = draw(logits.expand(n, 64), *words([(seed, at) for at in range(n)]))
    expected = n * torch.softmax(logits.double(), 0).numpy()
    statistic = float(((counts_of(chosen, 64) - expected) ** 2 / expected).sum())
    assert chi_square_p(statistic, 63) > 1e-3


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (0, 0.8), (30, 0.9)])
def test_draws_are_distributed_as_the_engines_own(top_k: int, top_p: float) -> None:
    """Chi-square of two samples: ours over the processor, vLLM's over its own sampler, same logits, fixed seeds."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    n, n_tokens = 20000, 64
    logits = torch.from_numpy(np.random.RandomState(5).standard_normal(n_tokens).astype(np.float32) * 1.5)
    batch = logits.expand(n, n_tokens).clone()
    k = torch.full((n,), top_k, dtype=torch.int32) if top_k else None
    p = torch.full((n,), top_p) if top_p < 1 else None
    torch.manual_seed(11)
    theirs = counts_of(TopKTopPSampler()(batch.clone(), {}, k, p)[0], n_tokens)
    processor = PositionDraws(None, torch.device("cpu"), False)
    added = [(at, drawn(at, top_k, top_p), [1, 2, 3], []) for at in range(n)]
    processor.update_state(BatchUpdate(batch_size=n, removed=[], added=added, moved=[]))
    left = processor.apply(batch.clone())
    assert (torch.isfinite(left).sum(dim=-1) == 1).all()
    ours = counts_of(left.argmax(dim=-1), n_tokens)
    assert set(np.flatnonzero(ours)) <= set(np.flatnonzero(theirs)) | set(np.flatnonzero(ours < 5))
    both = ours + theirs > 10
    statistic = float(((ours - theirs)[both] ** 2 / (ours + theirs)[both]).sum())
    assert chi_square_p(statistic, int(both.sum()) - 1) > 1e-3


def drawn(seed: int, top_k: int = 0, top_p: float = 1.0) -> SamplingParams:
    params = SamplingParams()
    mark(params, draws=[seed, top_k, top_p])
    return params


def test_rows_keep_their_own_draws_however_the_batch_changes() -> None:
    """Rows are added, removed, moved and swapped at random; each draws as it does alone, rows without a mark stay."""
    rng = random.Random(3)
    n_tokens = 97
    processor = PositionDraws(None, torch.device("cpu"), False)
    rows: dict[int, tuple[int | None, list[int], list[int], int, float]] = {}

    def params_of(seed: int | None, top_k: int, top_p: float) -> SamplingParams:
        return SamplingParams() if seed is None else drawn(seed, top_k, top_p)

    for _step in range(150):
        removed = [index for index in list(rows) if rng.random() < 0.15]
        for index in removed:
            del rows[index]
        added = []
        for index in range(8):
            if index not in rows and rng.random() < 0.4:
                row = (rng.choice([None, rng.randrange(1 << 40)]), [1] * rng.randrange(1, 9), [], 0, 1.0)
                if rng.random() < 0.5:
                    row = (*row[:3], rng.choice([0, 7]), rng.choice([1.0, 0.7]))
                rows[index] = row
                added.append((index, params_of(row[0], row[3], row[4]), row[1], row[2]))
        moved = []
        if len(rows) > 1 and rng.random() < 0.5:
            one, other = rng.sample(range(8), 2)
            if one in rows:
                direction = MoveDirectionality.SWAP if other in rows else MoveDirectionality.UNIDIRECTIONAL
                moved.append((one, other, direction))
                rows[one], rows[other] = rows.get(other), rows[one]  # type: ignore[assignment]
                rows = {index: row for index, row in rows.items() if row is not None}
        changed = BatchUpdate(batch_size=len(rows), removed=removed, added=added, moved=moved)
        processor.update_state(changed if removed or added or moved else None)
        if not rows:
            continue
        size = max(rows) + 1
        logits = torch.from_numpy(np.random.RandomState(_step).standard_normal((size, n_tokens)).astype(np.float32))
        got = processor.apply(logits.clone())
        for index, (seed, prompt, output, top_k, top_p) in rows.items():
            if seed is None:
                assert torch.equal(got[index], logits[index])
                continue
            alone = PositionDraws(None, torch.device("cpu"), False)
            alone.update_state(
                BatchUpdate(
                    batch_size=1, removed=[], added=[(0, params_of(seed, top_k, top_p), prompt, output)], moved=[]
                )
            )
            assert torch.equal(got[index], alone.apply(logits[index : index + 1].clone())[0])
            output.append(int(got[index].argmax()))
