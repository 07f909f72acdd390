"""Aborts, restores and answers from the store on the real engine: B1, B2, B4, B13, B23 and their kin.

The reference is always the bare engine. Cuts are put at exact places by letting a session capture the reference's own
tokens; real aborts come where they come.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from recovery.errors import InputError
from recovery.model import ENDED, OPEN
from recovery.protocol import Verdict
from tests.conftest import OnLoop
from tests.engine_runs import (
    KINDS,
    PROMPT,
    abort_after,
    answer_of,
    ask,
    assert_same,
    call_id_of,
    cancel_after,
    capturing,
    greedy,
    prompts,
    put_cut,
    read_back,
    store_with_cut,
    take_snapshot,
    tokens_of,
    until,
)


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
            history = session.stored.history(call_id_of("r", PROMPT, params))
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


def test_b11_an_abort_by_id_is_a_cut(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """B11: the engine has ids of its own; `abort` by the caller's ends the stream, and the call is in the snapshot."""
    params = greedy(400, "DELTA")

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
            assert 20 <= n < 400 and got.token_ids == whole.token_ids[:n]
            session.want_snapshot()
        entry = read_back(tmp_path).entries["r"]
        assert (entry.state, entry.n_tokens) == (OPEN, n)
        async with capturing(engine, tmp_path) as (wrapped, session):
            assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
            assert session.counters.tokens_captured == 400 - n

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
