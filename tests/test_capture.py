"""Capture and resume on the real engine: what callers see, what is stored, what is carried on.

The reference is always the bare engine. Cuts are put at exact places by letting a session capture the reference's own
tokens; real aborts come where they come.
"""

from __future__ import annotations

import asyncio
import copy
import random
import shutil
from array import array
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_recovery.rows import text_of
from prefix_recovery.tiny import byte_tokens
from recovery import resume
from recovery.errors import InputError
from recovery.model import ENDED, OPEN
from recovery.protocol import Verdict
from tests.conftest import OnLoop
from tests.engine_runs import (
    abort_after,
    answer_of,
    ask,
    assert_same,
    block,
    call_id_of,
    cancel_after,
    capturing,
    greedy,
    open_session,
    prompts,
    put_cut,
    read_back,
    request_of,
    store_with_cut,
    take_snapshot,
    tokens_of,
    until,
)
from vllm_hooks import RecoverableEngine, surface
from vllm_hooks.capture import drain
from vllm_hooks.outputs import Assembly

KINDS = ("DELTA", "CUMULATIVE", "FINAL_ONLY", "PULLED")
"""What callers ask for; PULLED: FINAL_ONLY, with the session reading the engine's front end instead of streaming."""
PROMPT = [0, 262, 278, 198, 185, 506, 103, 35]


# ---- the caller's view ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_l4_outputs_equal_the_bare_engines(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, kind: str, logprobs: int | None
) -> None:
    """L4: capture takes what it needs; the caller gets what it asked for, no more and no less."""
    params = greedy(40, kind, logprobs=logprobs)

    async def scenario() -> None:
        wanted = [await ask(engine, p, params, f"bare-{i}") for i, p in enumerate(prompts(3))]
        async with capturing(engine, tmp_path, pulls=kind == "PULLED") as (wrapped, session):
            got = await asyncio.gather(*(ask(wrapped, p, params, f"r{i}") for i, p in enumerate(prompts(3))))
            for one, other in zip(got, wanted, strict=True):
                assert_same(one, other)
                assert (one.logprobs is None) == (logprobs is None)
                if kind in ("FINAL_ONLY", "PULLED"):
                    assert one.n_outputs == 1
            assert session.counters.tokens_captured == 120

    on_loop(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_flat_and_prompt_logprobs_reach_their_caller(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, kind: str
) -> None:
    """Capture streams deltas whatever was asked for; what the engine gives only once must not be lost by that."""
    params = greedy(12, kind, prompt_logprobs=1, logprobs=2, flat_logprobs=True)

    async def scenario() -> None:
        wanted = await ask(engine, PROMPT, params, "bare")
        async with capturing(engine, tmp_path, pulls=kind == "PULLED") as (wrapped, _):
            got = await ask(wrapped, PROMPT, params, "r")
        assert wanted.prompt_logprobs is not None and len(wanted.prompt_logprobs) == len(PROMPT)
        assert got.prompt_logprobs == wanted.prompt_logprobs
        assert_same(got, wanted)

    on_loop(scenario())


def test_b9_params_and_prompt_objects_are_unchanged(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """B9: four calls share one params object and one prompt object; both are what they were, all budgets are right."""
    params = greedy(24, "CUMULATIVE", logprobs=None, stop_token_ids=[5], min_tokens=3)
    prompt = surface.token_prompt(PROMPT)
    before, prompt_before = repr(params), copy.deepcopy(prompt)

    async def scenario() -> None:
        async with capturing(engine, tmp_path) as (wrapped, session):
            names = [f"r{i}" for i in range(4)]
            for name in names:
                await abort_after(wrapped, prompt, params, name, 7)
            answers = await asyncio.gather(*(ask(wrapped, prompt, params, name) for name in names))
            assert [len(answer.token_ids) for answer in answers] == [24] * 4
            assert session.counters.tokens_captured == 4 * 24
        assert repr(params) == before
        assert prompt == prompt_before

    on_loop(scenario())


def test_text_prompts_and_engine_arguments(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """Text, text with arguments of its rendering, and a dict with text: the ids are those of the bare engine."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("hello wörld 🙂", {}),
        ("hello", {"tokenization_kwargs": {"add_special_tokens": False}}),
        ({"prompt": "hello there"}, {}),
        ({"prompt_token_ids": PROMPT}, {}),
        ({"prompt_token_ids": PROMPT, "cache_salt": "s"}, {}),
        (PROMPT, {"priority": 0}),
    ]
    params = greedy(10)

    async def scenario() -> None:
        async with capturing(engine, tmp_path) as (wrapped, session):
            for number, (prompt, arguments) in enumerate(cases):
                wanted = await ask(engine, prompt, params, f"bare-{number}", **arguments)
                assert_same(await ask(wrapped, prompt, params, f"r{number}", **arguments), wanted)
            assert session.counters.uncaptured == {}

    on_loop(scenario())


def test_a_slow_consumer_loses_nothing(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """The engine merges outputs that wait; the call that is read slowly gets everything, and so does the store."""
    params = greedy(60, "DELTA")
    done = asyncio.Event()
    sizes: list[int] = []

    async def slow(wrapped: Any) -> Any:
        stream = wrapped.generate(PROMPT, params, "slow")
        first = True

        async def held() -> Any:
            nonlocal first
            async for output in stream:
                sizes.append(len(output.outputs[0].token_ids))
                if first:
                    first = False
                    await done.wait()
                yield output

        return await answer_of(held(), delta=True)

    async def other(wrapped: Any) -> None:
        await ask(wrapped, prompts(1)[0], greedy(60), "other")
        done.set()

    async def scenario() -> None:
        wanted = await ask(engine, PROMPT, params, "bare")
        async with capturing(engine, tmp_path) as (wrapped, _):
            got, _ = await asyncio.gather(slow(wrapped), other(wrapped))
            assert_same(got, wanted)
        assert max(sizes) > 1
        assert read_back(tmp_path).transcripts["slow"].token_ids.tolist() == wanted.token_ids

    on_loop(scenario())


def test_b24_mode_off_is_not_in_the_path(engine: Any, tmp_path: Path) -> None:
    """B24: without the mode nothing is captured, and the wrapper is the engine itself."""
    for config in (block(tmp_path / "s", mode="off"), block(tmp_path / "s", enabled=False)):
        session = open_session(engine, config)
        assert RecoverableEngine(engine, session) is engine
        assert not (tmp_path / "s").exists()


# ---- what is stored ------------------------------------------------------------------------------------------------


def test_captured_yielded_and_stored_are_the_same(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """Eight calls; what the callers were given is, token for token and bit for bit, what the snapshot holds."""
    asked = prompts(8)
    params = [greedy(20 + 5 * i, KINDS[i % 3]) for i in range(8)]  # every third is FINAL_ONLY, and pulled

    async def scenario() -> None:
        async with capturing(engine, tmp_path, pulls=True) as (wrapped, session):
            answers = await asyncio.gather(*(ask(wrapped, asked[i], params[i], f"r{i}") for i in range(8)))
            assert session.counters.tokens_captured == sum(len(answer.token_ids) for answer in answers)
        stored = read_back(tmp_path)
        assert set(stored.entries) == {f"r{i}" for i in range(8)}
        for i, answer in enumerate(answers):
            transcript, entry = stored.transcripts[f"r{i}"], stored.entries[f"r{i}"]
            assert transcript.token_ids.tolist() == answer.token_ids
            assert transcript.logprobs.tolist() == answer.sampled
            assert transcript.request.prompt_token_ids.tolist() == asked[i]
            assert (entry.state, entry.ended) == (ENDED, ("length", None))
            assert entry.call_id == call_id_of(f"r{i}", asked[i], params[i])

    on_loop(scenario())


def test_k1_ids_are_stored_and_not_their_text(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """K1: a prompt and an answer whose text encodes to other ids come back as the ids they were."""
    tokenizer = surface.tokenizer_of(engine)
    hel, lo = tokenizer.convert_tokens_to_ids(["hel", "lo"])
    assert tokenizer.encode("hello", add_special_tokens=False) != [hel, lo]
    prompt = [0, hel, lo, hel, lo]
    params = greedy(16, allowed_token_ids=[hel, lo])

    async def scenario() -> None:
        whole = await ask(engine, prompt, params, "bare")
        assert tokenizer.encode(tokenizer.decode(whole.token_ids), add_special_tokens=False) != whole.token_ids
        await store_with_cut(engine, tmp_path, "r", params, whole, 9)
        async with capturing(engine, tmp_path) as (wrapped, session):
            assert session.counters.tokens_reused == 9
            got = await ask(wrapped, prompt, params, "r")
        assert_same(got, whole)
        stored = read_back(tmp_path).transcripts["r"]
        assert stored.token_ids.tolist() == whole.token_ids
        assert stored.request.prompt_token_ids.tolist() == prompt

    on_loop(scenario())


def test_k2_a_resumed_text_prompt_has_one_bos(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """K2: the tokenizer puts <bos> before a text; neither capture nor resume puts a second one."""
    params = greedy(20)

    async def scenario() -> None:
        whole = await ask(engine, "hello", params, "bare")
        assert whole.prompt_token_ids.count(0) == 1
        await store_with_cut(engine, tmp_path, "r", params, whole, 6)
        async with capturing(engine, tmp_path) as (wrapped, session):
            got = await ask(wrapped, "hello", params, "r")
            assert session.counters.tokens_captured == 14
        assert_same(got, whole)

    on_loop(scenario())


# ---- aborts and resumes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_b4_aborted_five_times_and_carried_on(engine: Any, on_loop: OnLoop[Any], tmp_path: Path, kind: str) -> None:
    """B4: five aborts in a row; each attempt begins with all of the last, the total is that of one call."""
    params = greedy(48, kind)

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        async with capturing(engine, tmp_path, pulls=kind == "PULLED") as (wrapped, session):
            for at in (3, 9, 17, 26, 40):
                if kind == "PULLED":
                    n = await cancel_after(wrapped, session, PROMPT, params, "r", at)
                else:
                    n = len(await abort_after(wrapped, PROMPT, params, "r", at))
                assert at <= n <= session.counters.tokens_captured <= 48
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 48
        entry = read_back(tmp_path).entries["r"]
        assert (entry.n_tokens, entry.state) == (48, ENDED)

    on_loop(scenario())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 20, 31, 32])
def test_b1_the_budget_is_the_original_one(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, cut: int, kind: str
) -> None:
    """B1: prompt 8, max_tokens 32; the restore asks for exactly what is left and ends `length` at 32."""
    params = greedy(32, kind)

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        await store_with_cut(engine, tmp_path, "r", params, whole, cut)
        async with capturing(engine, tmp_path, pulls=kind == "PULLED") as (wrapped, session):
            got = await ask(wrapped, PROMPT, params, "r")
            assert session.counters.tokens_captured == 32 - cut
            history = session.history(call_id_of("r", PROMPT, params))
            assert [event.at for event in history] == ([cut] if cut not in (0, 32) else [])
        assert_same(got, whole)
        assert (got.finish_reason, len(got.token_ids)) == ("length", 32)

    on_loop(scenario())


def test_b2_three_restores_of_one_request(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """B2: cuts at 5, 11 and 17 of 40 in three processes' worth of sessions: 40 tokens in all, none reduced twice."""
    params = greedy(40, "DELTA")

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        before = 0
        for cut in (5, 11, 17):
            async with capturing(engine, tmp_path) as (_, session):
                await put_cut(session, engine, "r", params, whole, before, cut)
            before = cut
        async with capturing(engine, tmp_path) as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 23
        entry = read_back(tmp_path).entries["r"]
        assert [event.at for event in entry.history] == [5, 11, 17]
        assert (entry.n_tokens, entry.attempt) == (40, 3)

    on_loop(scenario())


def test_an_abort_by_id_is_a_cut(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """`abort` ends the stream as the bare engine's does; the call is open in the snapshot, with what it had."""
    params = greedy(200, "DELTA")

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        async with capturing(engine, tmp_path) as (wrapped, session):
            aborted = asyncio.Event()

            def each(output: Any) -> None:
                if not aborted.is_set() and session.counters.tokens_captured >= 20:
                    aborted.set()
                    tasks.append(asyncio.ensure_future(wrapped.abort("r")))

            tasks: list[asyncio.Future[None]] = []
            got = await answer_of(wrapped.generate(PROMPT, params, "r"), delta=True, each=each)
            await asyncio.gather(*tasks)
            assert got.finish_reason == "abort" and got.finished
            n = len(got.token_ids)
            assert 20 <= n < 200 and got.token_ids == whole.token_ids[:n]
            session.want_snapshot()
        entry = read_back(tmp_path).entries["r"]
        assert (entry.state, entry.n_tokens) == (OPEN, n)
        async with capturing(engine, tmp_path) as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 200 - n

    on_loop(scenario())


def test_the_same_id_twice_at_a_time_is_refused(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """Two callers of one id would mix their tokens; the second is told, the first goes on."""
    params = greedy(40)

    async def scenario() -> None:
        async with capturing(engine, tmp_path) as (wrapped, _):
            first, second = await asyncio.gather(
                ask(wrapped, PROMPT, params, "r"), ask(wrapped, PROMPT, params, "r"), return_exceptions=True
            )
            assert len(first.token_ids) == 40
            assert isinstance(second, InputError) and "running already" in second.message

    on_loop(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_an_ended_call_asked_for_again_gives_its_answer(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, kind: str
) -> None:
    """As often as it is asked for, in this session and in the next: the engine is not asked again."""
    params = greedy(24, kind)

    async def scenario() -> None:
        async with capturing(engine, tmp_path, pulls=kind == "PULLED") as (wrapped, session):
            whole = await ask(wrapped, PROMPT, params, "r")
            for _ in range(2):
                assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 24
        async with capturing(engine, tmp_path) as (wrapped, session):
            for _ in range(2):
                assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 0

    on_loop(scenario())


@pytest.mark.parametrize("fields", [{"stop_token_ids": True}, {"stop": True}, {"ignore_eos": False}])
@pytest.mark.parametrize("include", [False, True])
def test_an_answer_from_the_store_ends_where_the_engine_ended_it(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, fields: dict[str, Any], include: bool
) -> None:
    """What stopped a call is not part of its text, unless asked for: also when the answer comes from the store."""

    async def scenario() -> None:
        free = await ask(engine, PROMPT, greedy(60), "free")
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = [free.token_ids[20]]
        if "stop" in fields:
            fields["stop"] = [free.text[30:33]]
        params = greedy(60, include_stop_str_in_output=include, **fields)
        whole = await ask(engine, PROMPT, params, "bare")
        assert (whole.finish_reason == "stop") == ("ignore_eos" not in fields)
        async with capturing(engine, tmp_path) as (wrapped, _):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
        async with capturing(engine, tmp_path) as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 0

    on_loop(scenario())


@pytest.mark.parametrize("pulls", [False, True])
def test_b13_b23_a_cut_of_preempted_and_waiting_calls(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, pulls: bool
) -> None:
    """B13, B23: the scheduler is stopped and its two running calls are preempted, two more wait: four records.

    The two that ran have their tokens, the two that wait are empty; all four end right, from the store and here.
    """
    asked = prompts(4)
    params = greedy(150)

    async def scenario() -> None:
        wanted = [await ask(engine, prompt, params, f"bare-{i}") for i, prompt in enumerate(asked)]
        async with capturing(engine, tmp_path / "a", pulls=pulls) as (wrapped, session):
            running = [asyncio.ensure_future(ask(wrapped, asked[i], params, f"r{i}")) for i in range(2)]
            await until(lambda: tokens_of(session) >= 40)
            await engine.pause_generation(mode="keep", clear_cache=True)
            try:
                waiting = [asyncio.ensure_future(ask(wrapped, asked[i], params, f"r{i}")) for i in range(2, 4)]
                await until(lambda: len(session.table) == 4)
                attempt = await take_snapshot(session)
            finally:
                await engine.resume_generation()
            assert attempt.verdict is Verdict.PUBLISHED
            stored = read_back(tmp_path / "a")
            shutil.copytree(tmp_path / "a", tmp_path / "b")  # as a crash would leave it
            for got, whole in zip(await asyncio.gather(*running, *waiting), wanted, strict=True):
                assert_same(got, whole)
        assert set(stored.entries) == {"r0", "r1", "r2", "r3"}
        assert all(entry.state == OPEN for entry in stored.entries.values())
        sizes = [stored.entries[f"r{i}"].n_tokens for i in range(4)]
        assert min(sizes[:2]) >= 1 and sum(sizes[:2]) >= 40 and sizes[2:] == [0, 0]
        for i in range(4):
            assert stored.transcripts[f"r{i}"].token_ids.tolist() == wanted[i].token_ids[: sizes[i]]
        async with capturing(engine, tmp_path / "b") as (wrapped, session):
            again = await asyncio.gather(*(ask(wrapped, asked[i], params, f"r{i}") for i in range(4)))
            for got, whole in zip(again, wanted, strict=True):
                assert_same(got, whole, tolerance=2e-5)
            assert session.counters.tokens_captured == 600 - sum(sizes)

    on_loop(scenario())


# ---- text across the joint -----------------------------------------------------------------------------------------

EMOJI_BYTES = [byte_tokens()[byte] for byte in "🙂".encode()]


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_k4_text_is_whole_at_every_cut(engine: Any, on_loop: OnLoop[Any], tmp_path: Path, kind: str) -> None:
    """K4: a call of byte tokens, cut at each of its positions: the text is the uninterrupted one."""
    tokenizer = surface.tokenizer_of(engine)
    allowed = tokenizer.convert_tokens_to_ids([*EMOJI_BYTES, "Ã", "©", "a", "Ġ"])
    assert None not in allowed
    params = greedy(32, kind, allowed_token_ids=allowed)
    prompt = [*PROMPT, *tokenizer.encode("naïve 🙂", add_special_tokens=False)[:-1]]

    async def scenario() -> None:
        whole = await ask(engine, prompt, params, "bare")
        assert len(whole.text) > 4
        async with capturing(engine, tmp_path) as (wrapped, session):
            for cut in range(33):
                await put_cut(session, engine, f"r{cut}", params, whole, 0, cut)
            answers = await asyncio.gather(*(ask(wrapped, prompt, params, f"r{cut}") for cut in range(33)))
            assert session.counters.tokens_captured == 33 * 32
        for got in answers:
            assert_same(got, whole, tolerance=2e-5)

    on_loop(scenario())


@pytest.mark.parametrize("text", ["🙂", "é🙂東京", "naïve — ½ 🙂🏽 東", "\u200b\u0301x"])
def test_k4_characters_of_several_bytes_at_every_byte(engine: Any, text: str) -> None:
    """K4: tokens of one byte, cut at each: prefix and suffix together are the text, no U+FFFD, nothing twice."""
    tokenizer = surface.tokenizer_of(engine)
    ids = tokenizer.convert_tokens_to_ids([byte_tokens()[byte] for byte in text.encode()])
    for kind in ("DELTA", "CUMULATIVE", "FINAL_ONLY"):
        for cut in range(1, len(ids) + 1):
            params = greedy(len(ids), kind, logprobs=None)
            prefix = array("i", ids[:cut]), array("f", [0.0] * cut)
            assembly = Assembly(params, "r", PROMPT, None, tokenizer, *prefix)
            if cut == len(ids):
                assert assembly.finished("length", None).outputs[0].text == text
                continue
            got = ""
            for at in range(cut, len(ids)):
                shaped = assembly.add(delta_of(ids[at], last=at == len(ids) - 1))
                if shaped is not None:
                    part = shaped.outputs[0].text
                    got = got + part if kind == "DELTA" else part
                    assert text.startswith(got) and "\ufffd" not in got
            assert got == text


def delta_of(token: int, *, last: bool) -> Any:
    """What the engine delivers for one token of a resumed call: no text, that is ours to make."""
    from vllm.outputs import CompletionOutput, RequestOutput

    completion = CompletionOutput(0, "", [token], None, None, finish_reason="length" if last else None)
    return RequestOutput("r", None, PROMPT, None, [completion], finished=last)


@pytest.mark.parametrize("fields", [{}, {"stop": True}, {"stop_token_ids": True}, {"skip_special_tokens": False}])
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stored_answer_is_the_engines(
    engine: Any, on_loop: OnLoop[Any], fields: dict[str, Any], include: bool
) -> None:
    """A row that is made from the store has, to the last character, the text that the engine delivered."""
    tokenizer = surface.tokenizer_of(engine)

    async def one(number: int, prompt: list[int]) -> None:
        chosen = dict(fields)
        free = await ask(engine, prompt, greedy(60 + 3 * number), f"free-{number}")
        if "stop" in chosen:
            chosen["stop"] = [free.text[20:22], free.text[30:34]]
        if "stop_token_ids" in chosen:
            chosen["stop_token_ids"] = [free.token_ids[30]]
        params = greedy(60 + 3 * number, include_stop_str_in_output=include, **chosen)
        whole = await ask(engine, prompt, params, f"whole-{number}")
        ended = (str(whole.finish_reason), whole.stop_reason)
        assert text_of(tokenizer, request_of("r", prompt, params), whole.token_ids, *ended) == whole.text

    async def scenario() -> None:
        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts(12))))

    on_loop(scenario())


# ---- what resumes exactly, and what starts again -------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"min_tokens": 20, "stop_token_ids": "later"},
        {"stop_token_ids": "later"},
        {"logit_bias": {7: 3.5, 300: -50.0, 6: 2.0}},
        {"ignore_eos": False, "min_tokens": 10},
        {"detokenize": False},
        {"skip_special_tokens": False},
        {"max_tokens": None},
        {"min_p": 0.0, "top_p": 1.0},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_what_resumes_is_exact(engine: Any, on_loop: OnLoop[Any], tmp_path: Path, fields: dict[str, Any]) -> None:
    """Stateless fields and reduced budgets: cut in several places, the answer is the uninterrupted one."""
    prompt = PROMPT if fields.get("max_tokens", 0) is not None else prompts(1, 980)[0]

    async def scenario() -> None:
        chosen = dict(fields)
        if chosen.get("stop_token_ids") == "later":
            free = await ask(engine, prompt, greedy(48), "free")
            # A token of the first half: with min_tokens it has to be passed over there and stop the call later.
            chosen["stop_token_ids"] = [free.token_ids[12], free.token_ids[40]]
        params = greedy(**{"max_tokens": 48, **chosen})
        whole = await ask(engine, prompt, params, "bare")
        n = len(whole.token_ids)
        cuts = sorted({1, n // 3, n // 2, n - 1, n} - {0})
        async with capturing(engine, tmp_path) as (wrapped, session):
            for cut in cuts:
                await put_cut(session, engine, f"r{cut}", params, whole, 0, cut)
            for cut in cuts:
                assert_same(await ask(wrapped, prompt, params, f"r{cut}"), whole, tolerance=2e-5)
            assert session.counters.tokens_captured == n * len(cuts)

    on_loop(scenario())


RESTART_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 0.7}),
    ("seed", {"temperature": 0.7, "seed": 3}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("stop", {"stop": ["ing", "hel"]}),
    ("bad_words", {"bad_words": ["the"]}),
    ("logprobs", {"logprobs": 2}),
    ("prompt_logprobs", {"prompt_logprobs": 0}),
    ("structured_outputs", {}),
    ("extra_args", {"extra_args": {"x": 1}}),
]


@pytest.mark.parametrize(("name", "fields"), RESTART_ONLY, ids=[name for name, _ in RESTART_ONLY])
def test_restart_only_kinds_begin_again_by_their_name(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """After a crash such a call starts from its prompt, says why, and its answer is a right one."""
    if name == "structured_outputs":
        from vllm.sampling_params import StructuredOutputsParams

        fields = {"structured_outputs": StructuredOutputsParams(choice=["hello there", "no"])}
    params = greedy(30, **fields)

    async def scenario() -> None:
        with pytest.warns(UserWarning, match=f"a request with {name} starts again after a crash"):
            async with capturing(engine, tmp_path, flush=4) as (wrapped, session):
                got = await abort_after(wrapped, PROMPT, params, "r", 6 if name != "structured_outputs" else 1)
        cut = read_back(tmp_path).entries["r"].n_tokens
        assert cut >= len(got) > 0
        async with capturing(engine, tmp_path) as (wrapped, session):
            with pytest.warns(UserWarning, match=name):
                answer = await ask(wrapped, PROMPT, params, "r")
            (event,) = session.history(call_id_of("r", PROMPT, params))
            assert (event.at, event.reason.partition(":")[0]) == (cut, name)
            assert event.reason.partition(": ")[2] == resume.why(name)
            assert session.counters.restart_only == {name: 1}
            assert session.counters.tokens_captured == len(answer.token_ids)
        if "temperature" not in fields or "seed" in fields:
            whole = await ask(engine, PROMPT, params, "bare")
            assert_same(answer, whole, tolerance=2e-5)
        stored = read_back(tmp_path)
        assert stored.transcripts["r"].token_ids.tolist() == answer.token_ids
        assert stored.entries["r"].attempt == 1

    on_loop(scenario())


def test_restart_only_calls_begin_again_after_an_abort_too(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """Within one session: the tokens of the aborted attempt are replaced, in the table and in the store."""
    params = greedy(30, presence_penalty=0.5)

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        with pytest.warns(UserWarning, match="presence_penalty"):
            async with capturing(engine, tmp_path, flush=4) as (wrapped, _):
                for _ in range(2):
                    await abort_after(wrapped, PROMPT, params, "r", 10)
                assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
        stored = read_back(tmp_path)
        assert stored.transcripts["r"].token_ids.tolist() == whole.token_ids
        assert stored.entries["r"].attempt == 2

    on_loop(scenario())


@pytest.mark.parametrize(("name", "fields"), [*RESTART_ONLY[:8], ("n", {"n": 2, "temperature": 1.0})])
def test_unresumable_refuse_names_the_field(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """With `refuse` the request is turned away at admission; nothing of it is in the store."""
    params = greedy(8, **fields)

    async def scenario() -> None:
        async with capturing(engine, tmp_path, unresumable="refuse") as (wrapped, _):
            with pytest.raises(InputError, match=f"because of {name}:"):
                await ask(wrapped, PROMPT, params, "r")
            assert len((await ask(wrapped, PROMPT, greedy(8), "fine")).token_ids) == 8
        assert set(read_back(tmp_path).entries) == {"fine"}

    on_loop(scenario())


def test_several_samples_of_one_request_pass_through(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """n > 1: the caller gets what the engine gives, nothing is captured, one warning for the kind."""
    params = greedy(8, n=2, temperature=1.0, seed=5)

    async def last(stream: Any) -> list[list[int]]:
        return [list(completion.token_ids) for completion in (await drain(stream)).outputs]

    async def scenario() -> None:
        wanted = await last(engine.generate(PROMPT, params, "bare"))
        async with capturing(engine, tmp_path) as (wrapped, session):
            for i in range(3):
                assert await last(wrapped.generate(PROMPT, params, f"r{i}")) == wanted
            assert session.counters.uncaptured == {"n": 3}
            assert session.counters.tokens_captured == 0
        assert [w for w in recwarn if "a request with n is not captured" in str(w.message)].__len__() == 1

    on_loop(scenario())


def test_prompts_that_are_no_prompts(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """What the bare engine refuses is refused, and no token of it is captured."""
    bad: list[Any] = [{"foo": 1}, {"prompt_token_ids": []}, 17, None, ["a"], [[1, 2], [3]], [9999], {"prompt": 3}]

    async def error_of(engine: Any, prompt: Any, name: str) -> Exception | None:
        try:
            await ask(engine, prompt, greedy(4), name)
        except Exception as error:
            return error
        return None

    async def scenario() -> None:
        async with capturing(engine, tmp_path) as (wrapped, session):
            for number, prompt in enumerate(bad):
                wanted = await error_of(engine, prompt, f"bare-{number}")
                got = await error_of(wrapped, prompt, f"r{number}")
                assert got is not None and wanted is not None, (prompt, got, wanted)
            assert session.counters.tokens_captured == 0

    on_loop(scenario())


# ---- the cut -------------------------------------------------------------------------------------------------------


def test_a_cut_hands_over_the_captured_lists(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """A cut swaps: what it hands over is the very list that was filled, and nothing is awaited in between."""

    async def scenario() -> None:
        async with capturing(engine, tmp_path, flush=0) as (_, session):
            call = await session.admit(request_of("r", PROMPT, greedy(8)), surface.stop_rules(engine))
            session.captured(call, [5, 6], [-0.5, -0.25])
            run = call._buffer._runs[0]
            ids, logprobs = run.token_ids, run.logprobs
            session.captured(call, [7], [-0.125])
            opened, frozen = session.table.freeze()
            assert opened.call_id == frozen.call_id == call.call_id
            assert frozen is run and frozen.token_ids is ids and frozen.logprobs is logprobs
            assert (ids, logprobs) == ([5, 6, 7], [-0.5, -0.25, -0.125])
            session.captured(call, [8], [-1.0])
            assert ids == [5, 6, 7] and session.table.freeze()[0].token_ids == [8]
            assert not asyncio.iscoroutinefunction(session.table.freeze)
            session.left(call)

    on_loop(scenario())


@pytest.mark.parametrize("pulls", [False, True])
def test_every_cut_of_a_running_engine_is_a_prefix(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, rng: random.Random, pulls: bool
) -> None:
    """Snapshots all the time while eight calls decode: in each, every call is an exact prefix, with its logprobs."""
    asked = prompts(8)
    params = greedy(120)
    seen: list[dict[str, int]] = []

    async def scenario() -> None:
        wanted = [await ask(engine, prompt, params, f"bare-{i}") for i, prompt in enumerate(asked)]
        async with capturing(engine, tmp_path, keep_latest_k=1, flush=16, pulls=pulls) as (wrapped, session):
            work = asyncio.gather(*(ask(wrapped, asked[i], params, f"r{i}") for i in range(8)))
            while not work.done():
                attempt = await take_snapshot(session)
                assert attempt.verdict is Verdict.PUBLISHED, attempt
                stored = await asyncio.to_thread(read_back, tmp_path)
                seen.append({name: entry.n_tokens for name, entry in stored.entries.items()})
                for i, whole in enumerate(wanted):
                    if f"r{i}" in stored.transcripts:
                        transcript = stored.transcripts[f"r{i}"]
                        n = len(transcript.token_ids)
                        assert transcript.token_ids.tolist() == whole.token_ids[:n]
                        assert np.allclose(transcript.logprobs, whole.sampled[:n], rtol=0, atol=2e-5)
                await asyncio.sleep(rng.uniform(0, 0.03))
            for got, whole in zip(await work, wanted, strict=True):
                assert_same(got, whole, tolerance=2e-5)
        assert len(seen) >= 3
        assert any(0 < size < 120 for sizes in seen for size in sizes.values())

    on_loop(scenario())


def test_requests_during_and_after_the_end_of_a_session(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """A session that has stopped takes no more requests, and says so instead of waiting for ever."""

    async def scenario() -> None:
        async with capturing(engine, tmp_path) as (wrapped, _):
            await ask(wrapped, PROMPT, greedy(4), "r")
        request: Coroutine[Any, Any, Any] = ask(wrapped, PROMPT, greedy(4), "late")
        with pytest.raises(InputError, match="stopped"):
            await request

    on_loop(scenario())
