"""vllm_hooks.parity_cache: a good grade is not tested for again on an engine that is alike; anything else is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import OnLoop
from tests.test_notes import GARBAGE
from vllm_hooks import parity_cache
from vllm_hooks.parity import Divergence, Parity
from vllm_hooks.start import graded

GOOD = Parity("token", 4, 0, 2e-6, True)


def engine_like(**changed: Any) -> Any:
    said = {"compute": "c", "tokens": 64, "seqs": 8, "policy": "fcfs", "block_size": 16, **changed}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            compute_hash=lambda: said["compute"],
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=said["tokens"], max_num_seqs=said["seqs"], policy=said["policy"]
            ),
            cache_config=SimpleNamespace(block_size=said["block_size"]),
        )
    )


@pytest.mark.parametrize(
    "changed", [{"compute": "d"}, {"tokens": 65}, {"seqs": 9}, {"policy": "priority"}, {"block_size": 32}]
)
def test_another_engine_has_another_key(changed: dict[str, Any]) -> None:
    fields = {"model.weights": "a"}
    key = parity_cache.key_of(engine_like(), fields)
    assert key == parity_cache.key_of(engine_like(), dict(fields))
    assert key != parity_cache.key_of(engine_like(**changed), fields)


def test_other_weights_and_another_environment_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = parity_cache.key_of(engine_like(), {"model.weights": "a"})
    assert key != parity_cache.key_of(engine_like(), {"model.weights": "b"})
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "17")
    assert key != parity_cache.key_of(engine_like(), {"model.weights": "a"})


def test_a_good_grade_comes_back_as_an_earlier_one(tmp_path: Path) -> None:
    where = tmp_path / "made" / "when needed"
    parity_cache.store("k", GOOD, where)
    assert parity_cache.load("k", where) == Parity("token", 4, 0, 2e-6, True, earlier=True)
    assert parity_cache.load("other", where) is None and [path.name for path in where.iterdir()] == ["parity-k.json"]


@pytest.mark.parametrize(
    "bad",
    [
        Parity("statistical", 4, 1, 0.0, True, (Divergence(3, 0.01),)),
        Parity("bitwise", 4, 0, 0.0, False),
        Parity("statistical", 0, 0, 0.0, False),
    ],
)
def test_what_found_something_amiss_is_tested_again(tmp_path: Path, bad: Parity) -> None:
    parity_cache.store("k", bad, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "note",
    [*GARBAGE, b'{"grade": "bitwise"}', b'{"grade": "perfect", "n_calls": 4, "largest_gap": 0.0}'],
    ids=range(len(GARBAGE) + 2),
)
def test_a_file_that_is_no_grade_counts_for_nothing(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "parity-k.json").write_bytes(note)
    assert parity_cache.load("k", tmp_path) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n_calls", value) for value in (0, -1, 4.0, True, "4", None, float("inf"))),
        *(("largest_gap", value) for value in (float("inf"), float("nan"), -1.0, "NaN", None, True)),
        *(("grade", value) for value in ("statistical", None, 7, ["bitwise"])),
    ],
)
def test_a_grade_with_a_mangled_member_counts_for_nothing(tmp_path: Path, name: str, value: Any) -> None:
    found = {"grade": "bitwise", "n_calls": 4, "largest_gap": 0.0}
    (tmp_path / "parity-k.json").write_text(json.dumps(found))
    assert parity_cache.load("k", tmp_path) is not None
    (tmp_path / "parity-k.json").write_text(json.dumps({**found, name: value}))
    assert parity_cache.load("k", tmp_path) is None


def test_without_a_place_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    parity_cache.store("k", GOOD, tmp_path / "file")
    parity_cache.store("k", GOOD, None)
    assert parity_cache.load("k", tmp_path / "file") is None and parity_cache.load("k", None) is None
    monkeypatch.setenv(parity_cache.VARIABLE, "")
    assert parity_cache.folder() is None
    monkeypatch.delenv(parity_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parity_cache.folder() == tmp_path / "prefix-recovery"


def test_an_engine_is_tested_once(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start of an engine that is alike runs nothing, and says so; one with other weights is tested."""
    monkeypatch.setenv(parity_cache.VARIABLE, str(tmp_path))

    async def scenario() -> None:
        first = await graded(engine, {"model.weights": "a"})
        assert first.grade == "bitwise" and first.pull_agrees and not first.earlier
        generate = engine.generate
        monkeypatch.setattr(engine, "generate", None)
        second = await graded(engine, {"model.weights": "a"})
        assert (second.grade, second.earlier, second.n_calls) == ("bitwise", True, first.n_calls)
        monkeypatch.setattr(engine, "generate", generate)
        assert not (await graded(engine, {"model.weights": "b"})).earlier

    on_loop(scenario())
