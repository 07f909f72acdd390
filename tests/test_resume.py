"""recovery.resume: the budget is asked for once, and nothing is resumed on hope."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import resume
from recovery.resume import Finish, Restart, Resume, StopRules
from recovery.resume_table import REDRAW, TRUE_SPLIT, why
from tests.fakes import request

STOP = StopRules(eos_token_ids=(2, 7), max_model_len=4096)
GREEDY: dict[str, Any] = {"temperature": 0.0}


def plan(n_prefix: int, last: int | None = 50, stop: StopRules = STOP, **sampling: Any) -> resume.ResumePlan:
    one = request(prompt=range(8), sampling={**GREEDY, **sampling})
    return resume.plan(one, n_prefix, last if n_prefix else None, stop)


# ---- the budget ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 20, 31, 32])
def test_b1_prompt_8_max_tokens_32_gives_exactly_32_in_all(cut: int) -> None:
    decided = plan(cut, max_tokens=32)
    if cut == 0:
        assert decided == Restart("no token was saved")
    elif cut == 32:
        assert decided == Finish("length", None)
    else:
        assert decided == Resume(n_prefix=cut, max_tokens=32 - cut, min_tokens=0)


def test_b1_the_case_as_reported() -> None:
    assert plan(20, max_tokens=32) == Resume(n_prefix=20, max_tokens=12, min_tokens=0)


def run(cuts: list[int], max_tokens: int) -> int:
    """Interrupt a call at each cut, resume it, and let the last part run to its end; tokens in all."""
    n = 0
    for cut in cuts:
        left = asked(n, max_tokens)
        assert left == max_tokens - n
        n = min(cut, n + left)
    return n + asked(n, max_tokens)


def asked(n: int, max_tokens: int) -> int:
    """How many tokens the engine is asked for, with n of them saved."""
    match plan(n, max_tokens=max_tokens):
        case Resume(max_tokens=int(left)):
            return left
        case Restart():
            return max_tokens
    return 0


def test_b2_three_resumes_of_one_request_sum_to_its_budget() -> None:
    """V8: counted over all attempts."""
    assert run([5, 11, 17], 40) == 40


@given(cuts=st.lists(st.integers(1, 100), min_size=1, max_size=8).map(sorted), max_tokens=st.integers(1, 100))
def test_b4_however_often_it_is_cut_the_total_is_the_cap(cuts: list[int], max_tokens: int) -> None:
    assert run([min(cut, max_tokens) for cut in cuts], max_tokens) == max_tokens


@given(n=st.integers(0, 200), max_tokens=st.integers(1, 100), max_model_len=st.integers(9, 120))
def test_a_plan_never_asks_for_more_than_is_left(n: int, max_tokens: int, max_model_len: int) -> None:
    decided = plan(n, stop=StopRules((), max_model_len), max_tokens=max_tokens)
    room = max_model_len - 8 - n
    if isinstance(decided, Resume):
        assert 1 <= (decided.max_tokens or 0) == max_tokens - n and room >= 1
    elif isinstance(decided, Finish):
        assert n >= max_tokens or room <= 0
    else:
        assert n == 0


def test_without_max_tokens_vllm_generates_sixteen() -> None:
    assert plan(10) == Resume(n_prefix=10, max_tokens=6, min_tokens=0)
    assert plan(16) == Finish("length", None)


def test_max_tokens_none_goes_up_to_the_context_length() -> None:
    stop = StopRules((2,), max_model_len=100)
    assert plan(91, stop=stop, max_tokens=None) == Resume(n_prefix=91, max_tokens=None, min_tokens=0)
    assert plan(92, stop=stop, max_tokens=None) == Finish("length", None)
    assert plan(92, stop=stop, max_tokens=1000) == Finish("length", None)


@pytest.mark.parametrize(("n", "left"), [(15, 5), (19, 1), (20, 0), (25, 0)])
def test_g6_min_tokens_is_reduced_by_the_prefix(n: int, left: int) -> None:
    decided = plan(n, max_tokens=64, min_tokens=20)
    assert isinstance(decided, Resume) and decided.min_tokens == left


# ---- a prefix that already is an answer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "sampling", "expected"),
    [
        (2, {}, Finish("stop", None)),  # the model's primary end token has no reason
        (7, {}, Finish("stop", 7)),
        (9, {"stop_token_ids": [9, 11]}, Finish("stop", 9)),
        (2, {"stop_token_ids": [2]}, Finish("stop", None)),
        (2, {"ignore_eos": True}, None),
        (7, {"ignore_eos": True}, None),
        (7, {"ignore_eos": True, "stop_token_ids": [7]}, Finish("stop", 7)),
        (50, {"stop_token_ids": None}, None),
        (50, {"stop_token_ids": []}, None),
    ],
)
def test_an_end_token_at_the_end_of_the_prefix_finishes(last: int, sampling: dict, expected: Finish | None) -> None:
    decided = plan(10, last, max_tokens=64, **sampling)
    assert decided == (expected or Resume(n_prefix=10, max_tokens=54, min_tokens=0))


def test_the_end_token_is_looked_at_before_the_budget() -> None:
    assert plan(32, 2, max_tokens=32) == Finish("stop", None)


def test_an_engine_without_end_tokens() -> None:
    assert isinstance(plan(10, 2, StopRules((), 100), max_tokens=64), Resume)


def test_a_whole_answer_of_a_restart_only_call_is_not_thrown_away() -> None:
    one = request(prompt=range(8), sampling={"temperature": 1.0, "max_tokens": 32}, restart_only="temperature")
    assert resume.plan(one, 32, 50, STOP) == Finish("length", None)
    assert resume.plan(one, 10, 2, STOP) == Finish("stop", None)
    assert resume.plan(one, 10, 50, STOP) == Restart(f"temperature: {why('temperature')}")


# ---- what an engine and a policy decide ---------------------------------------------------------------------------


def able(*names: str, blocked_by: str = "") -> StopRules:
    return dataclasses.replace(STOP, abilities=frozenset(names), blocked_by=blocked_by)


def test_the_same_call_goes_on_where_the_engine_can_and_begins_again_where_not() -> None:
    asked = {"max_tokens": 64, "presence_penalty": 0.5}
    assert isinstance(plan(10, stop=able(TRUE_SPLIT), **asked), Resume)
    decided = plan(10, stop=able(), **asked)
    assert isinstance(decided, Restart) and decided.reason.startswith("presence_penalty: it counts generated tokens")


@pytest.mark.parametrize(
    ("noted", "begins_again"),
    [("presence_penalty", False), ("lora_path", True), ("a_field_of_next_year", True), ("", False)],
)
def test_what_admission_noted_stands_unless_it_was_the_engines_lack(noted: str, begins_again: bool) -> None:
    sampling = {**GREEDY, "max_tokens": 64, "presence_penalty": 0.5}
    one = request(prompt=range(8), sampling=sampling, restart_only=noted)
    decided = resume.plan(one, 10, 50, able(TRUE_SPLIT))
    assert isinstance(decided, Restart if begins_again else Resume)
    assert not begins_again or decided.reason.startswith(f"{noted}: ")  # type: ignore[union-attr]


def test_what_an_engine_does_to_every_request_blocks_every_call() -> None:
    decided = plan(10, stop=able(TRUE_SPLIT, blocked_by="logits_processors"), max_tokens=64)
    assert isinstance(decided, Restart) and decided.reason.startswith("logits_processors: the engine has custom")


def test_v15_where_a_router_s_experts_are_wanted_a_call_begins_again() -> None:
    replay = "enable_return_routed_experts"
    for decided in (
        plan(10, stop=able(TRUE_SPLIT, blocked_by=replay), max_tokens=64),
        plan(10, stop=able(TRUE_SPLIT), max_tokens=64, routed_experts_prompt_start=4),
    ):
        assert isinstance(decided, Restart) and "experts" in decided.reason and "not kept" in decided.reason


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"temperature": 0.7, "seed": 3}])
def test_another_draw_is_a_stated_difference_and_only_if_asked_for(sampling: dict[str, Any]) -> None:
    one = request(prompt=range(8), sampling={"max_tokens": 64, **sampling}, restart_only="temperature")
    decided = resume.plan(one, 10, 50, able(REDRAW))
    assert isinstance(decided, Resume) and decided.difference == "another draw from the same distribution"
    assert isinstance(resume.plan(one, 10, 50, able()), Restart)


def test_a_greedy_call_has_no_difference() -> None:
    decided = plan(10, stop=able(REDRAW), max_tokens=64)
    assert isinstance(decided, Resume) and decided.difference == ""


def test_g5_a_cut_inside_the_marker_that_ends_thinking_begins_again() -> None:
    stop = dataclasses.replace(STOP, thinking_end=(40, 41, 42))
    for last, begins_again in ((40, True), (41, True), (42, False), (50, False)):
        decided = plan(10, last, stop, max_tokens=64, thinking_token_budget=5)
        assert isinstance(decided, Restart if begins_again else Resume)
    assert isinstance(plan(10, 40, stop, max_tokens=64), Resume)


def test_a_full_prefix_with_stop_strings_is_for_its_text_to_finish() -> None:
    assert plan(32, max_tokens=32, stop=STOP) == Finish("length", None)
    one = request(prompt=range(8), sampling={**GREEDY, "max_tokens": 32, "stop": ["x"]})
    assert resume.plan(one, 32, 50, STOP) == Resume(n_prefix=32, max_tokens=0, min_tokens=0)
    assert resume.plan(one, 32, 2, STOP) == Finish("stop", None)


def test_b9_a_plan_changes_nothing_that_siblings_share() -> None:
    sampling = {**GREEDY, "max_tokens": 32, "min_tokens": 4}
    shared = request(prompt=range(8), sampling=sampling)
    siblings = [dataclasses.replace(shared, rollout=f"r#{i}") for i in range(4)]
    plans = [resume.plan(sibling, cut, 50, STOP) for sibling, cut in zip(siblings, (3, 8, 20, 31), strict=True)]
    assert [p.max_tokens for p in plans if isinstance(p, Resume)] == [29, 24, 12, 1]
    assert sampling == {"temperature": 0.0, "max_tokens": 32, "min_tokens": 4}
