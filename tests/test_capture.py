"""What callers of a capturing engine see, what is stored, and the cut, on the real engine.

The reference is always the bare engine.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recovery.errors import InputError
from recovery.model import ENDED
from recovery.protocol import Verdict
from tests.conftest import OnLoop
from tests.engine_runs import (
    KINDS,
    PROMPT,
    abort_after,
    answer_of,
    ask,
    assert_same,
    block,
    call_id_of,
    capturing,
    greedy,
    open_session,
    prompts,
    read_back,
    request_of,
    standing,
    store_with_cut,
    take_snapshot,
    tokens_of,
    until,
)
from vllm_hooks import RecoverableEngine, surface

# ---- the caller's view -----------------------------------------------------------------------------------------------


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


def test_what_is_asked_for_is_plain_or_refused_by_name_and_costs_no_call(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path
) -> None:
    plain = greedy(6, logit_bias={5: 1.5})
    same = greedy(6, logit_bias={np.int64(5): np.float32(1.5)})
    wrong = [
        (greedy(6, extra_args={"a": {"b": [float("nan")]}}), PROMPT, "sampling.extra_args.a.b.0 is nan"),
        (greedy(6, extra_args={"a": b"x"}), PROMPT, "sampling.extra_args.a is bytes"),
        (greedy(6, stop=["\ud800"]), PROMPT, "sampling.stop.0 is .*surrogate"),
        (plain, [1, 2.5], "prompt_token_ids.1 is 2.5"),
        (plain, "a\ud800", "prompt is .*surrogate"),
    ]

    async def scenario() -> None:
        async with capturing(engine, tmp_path) as (wrapped, session):
            await abort_after(wrapped, PROMPT, greedy(6, "DELTA", logit_bias={5: 1.5}), "r", 2)
            for params, prompt, why in wrong:
                with pytest.raises(InputError, match=why):
                    await ask(wrapped, prompt, params, "r")
            got, n_captured = await ask(wrapped, PROMPT, same, "r"), session.counters.tokens_captured
            assert_same(got, await ask(engine, PROMPT, plain, "bare"))
            assert n_captured == 6 and type(same.logit_bias[5]) is np.float32
        with pytest.raises(InputError, match="rollout"):
            async with capturing(engine, tmp_path) as (wrapped, _):
                await ask(wrapped, PROMPT, plain, "r\ud800")

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
            assert session.unresumable.uncaptured == {}

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


# ---- what is stored --------------------------------------------------------------------------------------------------


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


# ---- the cut ---------------------------------------------------------------------------------------------------------


def test_a_cut_hands_over_the_captured_tokens_themselves(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """A cut swaps: what it hands over lies where it was captured, and nothing is awaited in between."""

    async def scenario() -> None:
        async with capturing(engine, tmp_path, flush=0) as (_, session):
            call = await session.admit(request_of("r", PROMPT, greedy(8)), surface.stop_rules(engine))
            session.captured(call, [5, 6], [-0.5, -0.25])
            run = call._buffer._runs[0]
            session.captured(call, [7], [-0.125])
            opened, frozen = session.table.freeze()
            assert opened.call_id == frozen.call_id == call.call_id
            assert frozen is run and run.of_ids is call.transcript_ids and run.of_logprobs is call.transcript_logprobs
            session.captured(call, [8], [-1.0])
            assert run.token_ids.tolist() == [5, 6, 7] and run.logprobs.tolist() == [-0.5, -0.25, -0.125]
            assert session.table.freeze()[0].token_ids.tolist() == [8]
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

    async def cut(session: Any, wanted: list[Any]) -> None:
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

    async def scenario() -> None:
        wanted = [await ask(engine, prompt, params, f"bare-{i}") for i, prompt in enumerate(asked)]
        async with capturing(engine, tmp_path, keep_latest_k=1, flush=16, pulls=pulls) as (wrapped, session):
            work = asyncio.gather(*(ask(wrapped, asked[i], params, f"r{i}") for i in range(8)))
            for at in sorted(rng.sample(range(1, 400), 3)):  # of 960 tokens: none has ended, however slow a snapshot is
                await until(lambda at=at: tokens_of(session) >= at)
                async with standing(engine):
                    await cut(session, wanted)
            while not work.done():
                await cut(session, wanted)
                await asyncio.sleep(rng.uniform(0, 0.03))
            for got, whole in zip(await work, wanted, strict=True):
                assert_same(got, whole, tolerance=2e-5)
        assert all(any(0 < size < 120 for size in sizes.values()) for sizes in seen[:3])

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
