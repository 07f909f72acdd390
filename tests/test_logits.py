"""vllm_hooks.logits and abilities: the true split, what an engine is found to have (B21), what costs who uses nothing.

The penalties' oracle is arithmetic written out here; on the engine they are compared in test_exact_kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor  # noqa: E402

from recovery.resume_table import (  # noqa: E402
    GENERATOR_DRAWS,
    GRAMMAR,
    POSITION_DRAWS,
    PREFIX_SAFE,
    TRUE_SPLIT,
    hindrance,
)
from vllm_hooks import engine_arguments, surface  # noqa: E402
from vllm_hooks.abilities import DRAWS_CLASS, SCHEDULER_CLASS, TRUE_SPLIT_CLASS, abilities_of  # noqa: E402
from vllm_hooks.draws import PositionDraws  # noqa: E402
from vllm_hooks.logits import Joined, PrefixSafe, TrueSplit, true_split  # noqa: E402
from vllm_hooks.marks import mark, mark_of  # noqa: E402

IDS = st.lists(st.integers(0, 30), max_size=8)


@given(saved=IDS, live=IDS, at=st.integers(-20, 20), stop=st.integers(-20, 20), n=st.integers(0, 20))
def test_joined_reads_like_the_list(saved: list[int], live: list[int], at: int, stop: int, n: int) -> None:
    joined, whole = Joined(saved, live), saved + live
    assert len(joined) == len(whole) and list(joined) == whole and joined == whole
    assert joined[at:stop] == whole[at:stop] and joined[at:] == whole[at:]
    assert joined.last(n) == whole[max(0, len(whole) - n) :]
    if -len(whole) <= at < len(whole):
        assert joined[at] == whole[at]
    else:
        with pytest.raises(IndexError):
            joined[at]
    live.append(31)
    assert joined[-1] == 31 and joined.last(1) == [31]


def resumed(n_prefix: int, **facts: Any) -> SamplingParams:
    params = SamplingParams(extra_args={"mine": 1})
    mark(params, prefix=n_prefix, **facts)
    return params


def update(*added: Any) -> BatchUpdate:
    return BatchUpdate(batch_size=len(added), removed=[], added=list(added), moved=[])


def test_a_mark_keeps_what_was_there() -> None:
    params = resumed(3, penalties=[1.0, 0.0, 1.0])
    assert params.extra_args is not None and params.extra_args["mine"] == 1
    assert mark_of(params) == {"prefix": 3, "penalties": [1.0, 0.0, 1.0]}
    assert mark_of(SamplingParams()) == {}


def test_b21_a_custom_processor_sees_prompt_and_output_apart() -> None:
    """B21: one of its own state, and one of vLLM's adapter for functions of single requests."""
    seen: list[tuple[list[int], list[int]]] = []

    class Own(PrefixSafe, LogitsProcessor):
        def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None: ...

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            super().update_state(batch_update)

        def apply(self, logits: Any) -> Any:
            return logits

    class ByRequest(PrefixSafe, AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            def look(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
                seen.append((list(prompt_ids), list(output_ids)))
                return logits

            return look

    live: list[int] = []
    processor = ByRequest(SimpleNamespace(), torch.device("cpu"), False)  # type: ignore[arg-type]
    processor.update_state(update((0, resumed(2), [1, 2, 3, 4], live), (1, SamplingParams(), [5], [])))
    processor.apply(torch.zeros(2, 8))
    live.append(7)
    processor.update_state(None)
    processor.apply(torch.zeros(2, 8))
    assert seen == [([1, 2], [3, 4]), ([5], []), ([1, 2], [3, 4, 7]), ([5], [])]
    assert issubclass(Own, PrefixSafe)


def test_penalties_over_the_true_split() -> None:
    """Written out: repetition over prompt and output, frequency and presence over the output alone."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    processor = TrueSplit(None, torch.device("cpu"), False)
    live = [4]
    processor.update_state(
        update((0, SamplingParams(), [1, 2], [3]), (1, resumed(3, penalties=[0.5, 0.25, 2.0]), [1, 2, 3, 3, 5], live))
    )
    logits = torch.arange(-4.0, 12.0).reshape(2, 8)
    got = processor.apply(logits.clone())
    wanted = logits.clone()
    for token in (1, 2, 3, 4, 5):
        wanted[1, token] = wanted[1, token] / 2 if wanted[1, token] > 0 else wanted[1, token] * 2
    for token, count in ((3, 2), (5, 1), (4, 1)):
        wanted[1, token] -= 0.25 * count + 0.5
    assert torch.equal(got, wanted)
    processor.update_state(BatchUpdate(batch_size=1, removed=[1], added=[], moved=[]))
    assert processor.apply(logits) is logits


class Unread:
    """Parameters of which nothing but `extra_args` may be looked at."""

    __slots__ = ("extra_args",)

    def __init__(self, extra_args: dict[str, Any] | None) -> None:
        self.extra_args = extra_args


def strangers(n_rows: int) -> BatchUpdate:
    """Rows without a mark; their prompts and outputs are no lists, so that reading them fails."""
    added: Any = [(at, Unread({"theirs": 1} if at % 2 else None), object(), object()) for at in range(n_rows)]
    return BatchUpdate(batch_size=n_rows, removed=[], added=added, moved=[])


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions, of Python and of C, are called meanwhile."""
    seen: list[str] = []

    def note(frame: Any, event: str, called: Any) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return sum(event in ("call", "c_call") for event in seen) - 1  # the last one puts `before` back


@pytest.mark.parametrize("kind", [PositionDraws, TrueSplit])
def test_who_uses_nothing_pays_for_nothing(kind: Any) -> None:
    """The very same tensor comes back, no row is kept or read, a step calls nothing, and no call is made for a row."""
    joining = set()
    for n_rows in (1, 64):
        processor = kind(None, torch.device("cpu"), False)
        processor._device = None  # nothing is put there
        joined, logits = strangers(n_rows), torch.zeros(n_rows, 4)
        joining.add(calls_of(partial(processor.update_state, joined)))
        assert calls_of(partial(processor.update_state, None)) == 1
        assert calls_of(partial(processor.apply, logits)) == 1
        assert processor.apply(logits) is logits and logits._version == 0  # not written to either
        assert not any(held for name, held in vars(processor).items() if name != "_device")
        assert true_split(joined) is joined
    assert len(joining) == 1


@pytest.mark.parametrize("kind", [PositionDraws, TrueSplit])
def test_rows_of_ours_follow_a_batch_in_which_others_use_nothing(kind: Any) -> None:
    processor = kind(None, torch.device("cpu"), False)
    asks = resumed(1, penalties=[1.0, 0.0, 1.0], draws=[3, 0, 1.0])
    processor.update_state(update((0, asks, [1, 2], []), (1, SamplingParams(), [5], [])))
    held = processor._drawn if kind is PositionDraws else processor._rows
    assert list(held) == [0]
    processor.update_state(strangers(1))  # one takes its place
    assert not held


class Safe(PrefixSafe, TrueSplit):
    """A custom processor that says it is safe."""


class Unknown(TrueSplit):
    """One that says nothing."""


def engine_with(*processors: Any, **fields: Any) -> Any:
    model = SimpleNamespace(logits_processors=list(processors), logprobs_mode=fields.get("mode", "raw_logprobs"))
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=model,
            use_v2_model_runner=fields.get("v2", False),
            speculative_config=fields.get("speculative"),
            scheduler_config=SimpleNamespace(scheduler_cls=fields.get("scheduler")),
            structured_outputs_config=SimpleNamespace(reasoning_parser=fields.get("reasoning", "")),
        )
    )


DRAWS = {POSITION_DRAWS, GENERATOR_DRAWS}


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        (engine_with(), {PREFIX_SAFE}),
        (engine_with(TRUE_SPLIT_CLASS), {PREFIX_SAFE, TRUE_SPLIT}),
        (engine_with(DRAWS_CLASS, TRUE_SPLIT_CLASS), {PREFIX_SAFE, TRUE_SPLIT, *DRAWS}),
        (engine_with(Safe, DRAWS_CLASS, TRUE_SPLIT_CLASS), {PREFIX_SAFE, TRUE_SPLIT, *DRAWS}),
        (engine_with(DRAWS_CLASS, TRUE_SPLIT_CLASS, Safe), {PREFIX_SAFE, *DRAWS}),
        (engine_with(Unknown, DRAWS_CLASS, TRUE_SPLIT_CLASS), set()),
        (engine_with(DRAWS_CLASS, TRUE_SPLIT_CLASS, mode="processed_logprobs"), {PREFIX_SAFE, TRUE_SPLIT}),
        (engine_with(DRAWS_CLASS, TRUE_SPLIT_CLASS, v2=True), {PREFIX_SAFE}),
        (engine_with(speculative=object()), {PREFIX_SAFE}),
        (engine_with(scheduler=SCHEDULER_CLASS), {PREFIX_SAFE, GRAMMAR}),
        (engine_with(scheduler=SCHEDULER_CLASS, reasoning="qwen3"), {PREFIX_SAFE}),
        (engine_with(scheduler="somebody.elses.Scheduler"), {PREFIX_SAFE}),
    ],
)
def test_what_an_engine_is_found_to_have(engine: Any, found: set[str]) -> None:
    assert abilities_of(engine) == found


def test_g9_a_speculative_engine_is_not_trusted_with_what_it_ignores() -> None:
    """G9: no logits processor runs beside speculation, so that penalties, bad words and draws are refused by name."""
    found = abilities_of(engine_with(speculative=object()))
    for name, value in (("presence_penalty", 1.0), ("frequency_penalty", 1.0), ("bad_words", ["x"])):
        assert hindrance({"temperature": 0.0, name: value}, (), found) == name
    assert hindrance({"temperature": 1.0, "seed": 5}, (), found) == "seed"
    assert hindrance({"temperature": 0.0, "repetition_penalty": 1.1}, (), found) == ""


def test_the_arguments_of_an_engine_keep_what_was_given() -> None:
    given = engine_arguments(model="m", logits_processors=["a:B"])
    assert given["logits_processors"] == ["a:B", DRAWS_CLASS, TRUE_SPLIT_CLASS] and given["model"] == "m"
    assert given["scheduler_cls"] == SCHEDULER_CLASS
    assert engine_arguments(**given) == given
    assert engine_arguments(scheduler_cls="their.own")["scheduler_cls"] == "their.own"
    speculative = engine_arguments(speculative_config={"method": "ngram"})
    assert "logits_processors" not in speculative


def test_b9_params_of_a_resume_are_a_clone() -> None:
    """B9: what siblings share is not changed."""
    from recovery.resume import Resume

    shared = SamplingParams(presence_penalty=1.0, seed=3, top_k=5, temperature=1.0, max_tokens=9, stop=["x"])
    before = repr(shared)
    clone = surface.resuming_params(surface.capturing_params(shared), Resume(n_prefix=4, max_tokens=5, min_tokens=0))
    surface.drawing_params(clone, 3)
    assert repr(shared) == before and shared.extra_args is None
    assert mark_of(clone) == {"prefix": 4, "penalties": [1.0, 0.0, 1.0], "draws": [3, 5, 1.0]}
    assert (clone.presence_penalty, clone.seed, clone.top_k, clone.max_tokens, clone.stop) == (0.0, None, 0, 5, [])
