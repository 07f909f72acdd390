"""vllm_hooks.weights on the session's engine: other weights in, and back. The judge is the Llama in numpy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.tiny import make_tiny_llama
from recovery.codec import fingerprint
from recovery.errors import InputError
from tests.conftest import OnLoop
from tests.engine_runs import PROMPT, ask, greedy
from tests.numpy_llama import NumpyLlama
from vllm_hooks import surface
from vllm_hooks.fingerprint import engine_fields
from vllm_hooks.weights import reload_weights, weight_names

LONG = [0, *[5 + (i * 37) % 500 for i in range(299)]]
"""More than two blocks of the prefix cache."""


def test_v14_weights_are_reloaded_in_place_and_no_cached_prefix_outlives_them(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path
) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=5)
    wanted = {folder: NumpyLlama(folder).greedy(LONG, 8) for folder in (tiny_model, other)}
    assert wanted[tiny_model] != wanted[other]

    async def tokens(name: str) -> list[int]:
        return (await ask(engine, {"prompt_token_ids": LONG}, greedy(8), name)).token_ids

    async def scenario() -> None:
        assert await tokens("before") == wanted[tiny_model]
        # What vLLM's own call leaves behind: blocks that the old weights made are used for the new ones.
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        assert await tokens("stale") != wanted[other]
        for folder in (other, tiny_model):
            await reload_weights(engine, folder, weight_names(tiny_model))
            assert await tokens(f"with {folder.name}") == wanted[folder]

    on_loop(scenario())


def test_a_folder_that_lacks_weights_never_reaches_the_engine(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path
) -> None:
    empty, half = tmp_path / "empty", tmp_path / "half"
    empty.mkdir()
    shutil.copytree(make_tiny_llama(tmp_path / "small", layers=2), half)

    async def scenario() -> None:
        before = (await ask(engine, {"prompt_token_ids": PROMPT}, greedy(8), "one")).token_ids
        with pytest.raises(InputError, match="no weights"):
            await reload_weights(engine, empty)
        with pytest.raises(InputError, match="weights are missing"):
            await reload_weights(engine, half, weight_names(tiny_model))
        assert (await ask(engine, {"prompt_token_ids": PROMPT}, greedy(8), "two")).token_ids == before

    on_loop(scenario())


def test_v6_another_kind_of_logprobs_is_another_fingerprint(engine: Any) -> None:
    must, _ = engine_fields(engine, surface.stop_rules(engine))
    assert must["logprobs.kind"] == "raw_logprobs"
    assert fingerprint(must) != fingerprint({**must, "logprobs.kind": "processed_logprobs"})
