"""Every kind of request that resumes, cut at every position on the real engine: B10, B21, G2, G6, K7 and their kin.

The reference is always the bare engine's uninterrupted call; a resumed one must equal it in everything a caller sees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OnLoop
from tests.engine_runs import PROMPT, ask, assert_same, capturing, cut_everywhere, greedy, prompts, put_cut

KINDS = ["DELTA", "CUMULATIVE", "FINAL_ONLY"]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_k7_a_stop_string_that_straddles_the_cut(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, kind: str, include: bool
) -> None:
    """K7: a stop string of several tokens, cut at each position before, inside and after it: same end, same text."""

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(40), "free")
        for number, (start, end) in enumerate([(34, 41), (29, 31)]):
            params = greedy(40, kind, stop=["never there", free.text[start:end]], include_stop_str_in_output=include)
            whole = await cut_everywhere(engine, quick_path / str(number), PROMPT, params)
            assert whole.finish_reason == "stop" and whole.stop_reason == free.text[start:end]
            assert 3 < len(whole.token_ids) < 40

    on_loop(scenario())


def test_k7_a_stop_string_below_min_tokens_does_not_stop(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """K7, G6: an occurrence before min_tokens is passed over, whichever side of the cut it lies on."""

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(40), "free")
        stop = next(letter for letter in free.text[8:20] if free.text.count(letter) > 1 and letter.isalpha())
        last = free.text.rindex(stop)
        early = await ask(engine, PROMPT, greedy(40, stop=[stop]), "early")
        minimum = len(early.token_ids) + 4
        whole = await cut_everywhere(engine, quick_path, PROMPT, greedy(40, "DELTA", stop=[stop], min_tokens=minimum))
        assert len(whole.token_ids) >= minimum and last >= 0

    on_loop(scenario())


def test_k7_a_stop_string_completed_by_the_last_token(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """The cut comes after the token that completes it, with the budget used up as well: `stop`, not `length`."""

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(20), "free")
        params = greedy(20, stop=[free.text[-4:]])
        whole = await cut_everywhere(engine, quick_path, PROMPT, params, cuts=[10, 18, 19, 20])
        assert (whole.finish_reason, len(whole.token_ids)) == ("stop", 20)

    on_loop(scenario())


def test_a_repetition_that_begins_before_the_cut(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """repetition_detection looks at all tokens of the call: same end at every cut."""
    from vllm.sampling_params import RepetitionDetectionParams

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(12), "free")
        pair = free.token_ids[:2]
        repetition = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=4)
        for number, kind in enumerate(KINDS):
            params = greedy(40, kind, allowed_token_ids=pair, repetition_detection=repetition)
            whole = await cut_everywhere(engine, quick_path / str(number), PROMPT, params)
            assert (whole.finish_reason, whole.stop_reason) == ("repetition", "repetition_detected")

    on_loop(scenario())


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 20, "stop_token_ids": True},
        {"min_tokens": 20, "ignore_eos": False, "logit_bias": {1: 60.0}, "max_tokens": None},
        {"logit_bias": {7: 3.5, 300: -50.0, 6: 2.0}},
        {"allowed_token_ids": list(range(40, 90))},
        {"ignore_eos": False, "logit_bias": {1: 14.0}},
        {"repetition_penalty": 1.7},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"seed": 7, "top_k": 5, "top_p": 0.5},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_stateless_fields_and_budgets(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, fields: dict[str, Any]
) -> None:
    """G6 and rows of the table that are exact as is, at every cut."""

    async def scenario() -> None:
        chosen = dict(fields)
        if "stop_token_ids" in chosen:
            passed_over = (await ask(engine, PROMPT, greedy(32), "free")).token_ids[12]
            banned = greedy(32, min_tokens=31, stop_token_ids=[passed_over])
            later = (await ask(engine, PROMPT, banned, "later")).token_ids
            chosen["stop_token_ids"] = [passed_over, next(token for token in later[22:] if token not in later[:22])]
        whole = await cut_everywhere(engine, quick_path, PROMPT, greedy(**{"max_tokens": 32, **chosen}))
        if "min_tokens" in chosen:
            assert whole.finish_reason == "stop" and 20 < len(whole.token_ids) < 32

    on_loop(scenario())


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7, "presence_penalty": -0.3, "repetition_penalty": 1.2},
        {"presence_penalty": 2.0, "logit_bias": {7: 3.5}, "bad_words": ["e"], "min_tokens": 30, "ignore_eos": False},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_g2_penalties_keep_prompt_and_prefix_apart(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, fields: dict[str, Any]
) -> None:
    """G2, B21: the prompt holds what is generated several times over; penalties count what was generated, and once."""

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(12), "free")
        prompt = [*PROMPT, *free.token_ids * 3]
        whole = await cut_everywhere(engine, quick_path, prompt, greedy(40, **fields))
        plain = await ask(engine, prompt, greedy(40), "plain")
        assert whole.token_ids != plain.token_ids, "the penalty decided nothing"

    on_loop(scenario())


def test_bad_words_across_the_cut(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """A banned word of several tokens, cut between them: its last token is not generated (and would have been)."""

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(40), "free")
        tokenizer = engine.get_tokenizer()
        banned = []
        for at in range(2, 30):
            word = tokenizer.decode(free.token_ids[at : at + 3])
            if word.strip() and tokenizer.encode(word, add_special_tokens=False) == free.token_ids[at : at + 3]:
                banned.append(word)
        params = greedy(40, bad_words=banned[:6])
        assert banned, "no word of three tokens"
        whole = await cut_everywhere(engine, quick_path, PROMPT, params)
        assert whole.token_ids != free.token_ids, "nothing was banned"

    on_loop(scenario())


def test_penalised_calls_in_one_batch_with_others(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """Rows of a batch come, go and move: each resumed call keeps its own penalties, the others have none."""
    import asyncio

    asked = prompts(12, 20)
    kinds: list[dict[str, Any]] = [{}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0, "repetition_penalty": 1.1}]
    params = [greedy(12 + 5 * i, **kinds[i % 3]) for i in range(12)]

    async def scenario() -> None:
        wanted = [await ask(engine, asked[i], params[i], f"bare-{i}") for i in range(12)]
        async with capturing(engine, quick_path) as (wrapped, session):
            for i in range(12):
                await put_cut(session, engine, f"r{i}", params[i], wanted[i], 0, (i * 5) % 12)
            got = await asyncio.gather(*(ask(wrapped, asked[i], params[i], f"r{i}") for i in range(12)))
        for one, whole in zip(got, wanted, strict=True):
            assert_same(one, whole, tolerance=2e-5)

    on_loop(scenario())


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"regex": "[a-z]{12}(, [0-9]{2}){3}"},
    {"choice": ["hello there, you", "hello world, you too", "no"]},
    {"grammar": 'root ::= "(" inner ")"\ninner ::= [a-c]{2,6} | root root'},
]


@pytest.mark.parametrize("asked", GRAMMARS, ids=lambda asked: next(iter(asked)))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_g1_structured_output_goes_on_at_the_saved_state(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, asked: dict[str, Any], temperature: float
) -> None:
    """G1: cut at every token: one valid document, its keys once; tokens and logprobs are the uninterrupted call's."""
    import json
    import re

    from vllm.sampling_params import StructuredOutputsParams

    structured = StructuredOutputsParams(**asked)
    params = greedy(90, temperature=temperature, seed=5, ignore_eos=False, structured_outputs=structured)

    async def scenario() -> None:
        whole = await cut_everywhere(engine, quick_path / "s", PROMPT, params)
        if "json" in asked and whole.finish_reason == "stop":
            # Not strict: the engine's grammar lets a control character into a string, cut or uncut.
            pairs = json.loads(whole.text, object_pairs_hook=list, strict=False)
            assert [key for key, _ in pairs] == ["a", "b"]
        if "regex" in asked:
            assert re.fullmatch(asked["regex"], whole.text) and whole.finish_reason == "stop"
        if "choice" in asked:
            assert whole.text in asked["choice"]

    on_loop(scenario())


def test_a_prefix_outside_its_grammar_is_an_error(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """Saved tokens that the grammar does not take end the request by an error: it is never begun at the root."""
    from vllm.sampling_params import StructuredOutputsParams

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(8), "free")
        params = greedy(40, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[a-z]{30}"))
        async with capturing(engine, quick_path) as (wrapped, session):
            await put_cut(session, engine, "r", params, free, 0, 8)
            got = await ask(wrapped, PROMPT, params, "r")
            assert got.finish_reason == "error" and len(got.token_ids) == 8
        assert (await ask(engine, PROMPT, greedy(8), "alive")).token_ids == free.token_ids

    on_loop(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_b10_prompt_logprobs_are_of_the_prompt_alone(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, kind: str
) -> None:
    """B10: asked for on the original request; a resumed and a stored answer have them for the true prompt."""

    async def scenario() -> None:
        params = greedy(12, kind, prompt_logprobs=2)
        whole = await cut_everywhere(engine, quick_path, PROMPT, params)
        async with capturing(engine, quick_path) as (wrapped, session):
            again = [await ask(wrapped, PROMPT, params, f"r{cut}") for cut in (5, 12)]
            assert session.counters.tokens_captured == 0
        assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs) == len(PROMPT)
        for got in again:
            assert_same(got, whole, tolerance=2e-5)

    on_loop(scenario())


def test_b24_another_draw_only_when_asked_for(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """B24: `unresumable: redraw` carries a sampled call on, keeps its prefix, and calls the result statistical."""
    from tests.engine_runs import call_id_of, read_back

    params = greedy(30, temperature=1.0)

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        async with capturing(engine, quick_path, unresumable="redraw") as (_, session):
            await put_cut(session, engine, "r", params, whole, 0, 11)
        async with capturing(engine, quick_path, unresumable="redraw", exactness="bitwise") as (wrapped, session):
            got = await ask(wrapped, PROMPT, params, "r")
            (event,) = session.stored.history(call_id_of("r", PROMPT, params))
            assert (event.at, event.exactness) == (11, "statistical")
            assert session.counters.tokens_captured == 19
        assert got.token_ids[:11] == whole.token_ids[:11] and len(got.token_ids) == 30
        assert read_back(quick_path).transcripts["r"].token_ids.tolist() == got.token_ids

    on_loop(scenario())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_l6_stored_logprobs_agree_with_scoring_the_answer(
    engine: Any, on_loop: OnLoop[Any], quick_path: Path, temperature: float
) -> None:
    """L6: cut, carried on, read back: token i and logprob i are those that a prefill of prompt and answer gives."""
    from tests.engine_runs import read_back

    params = greedy(40, temperature=temperature, seed=2)

    async def scenario() -> None:
        whole = await cut_everywhere(engine, quick_path / "s", PROMPT, params, cuts=[13, 29])
        scored = await ask(engine, [*PROMPT, *whole.token_ids], greedy(1, prompt_logprobs=0), "score")
        assert scored.prompt_logprobs is not None
        rows = scored.prompt_logprobs[len(PROMPT) :]
        values = [dict(row)[token] for token, row in zip(whole.token_ids, rows, strict=True)]
        for name in ("r13", "r29"):
            stored = read_back(quick_path / "s").transcripts[name]
            assert stored.logprobs.tolist() == pytest.approx(values, abs=2e-5)

    on_loop(scenario())


def test_l1_the_stored_logprob_is_the_sampled_tokens(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """L1: with the best three asked for and a token drawn that is none of them, its own logprob is stored."""
    from tests.engine_runs import read_back

    params = greedy(40, temperature=1.8, seed=6, logprobs=3)

    async def scenario() -> None:
        async with capturing(engine, quick_path) as (wrapped, _):
            got = await ask(wrapped, PROMPT, params, "r")
        assert got.logprobs is not None
        best = [max(value for _, value in entry) for entry in got.logprobs]
        stored = read_back(quick_path).transcripts["r"].logprobs.tolist()
        assert stored == pytest.approx(got.sampled, abs=1e-6)
        assert sum(one < other for one, other in zip(stored, best, strict=True)) > 10

    on_loop(scenario())
