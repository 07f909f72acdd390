"""Which sampling fields resume exactly, which begin again by their name, which are refused or passed through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recovery import resume_table
from recovery.errors import InputError
from tests.conftest import OnLoop
from tests.engine_runs import (
    PROMPT,
    abort_after,
    ask,
    assert_same,
    call_id_of,
    capturing,
    greedy,
    prompts,
    put_cut,
    read_back,
)


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
    ("routed_experts_prompt_start", {"routed_experts_prompt_start": 1}),
]


@pytest.mark.parametrize(("name", "fields"), RESTART_ONLY, ids=[name for name, _ in RESTART_ONLY])
def test_restart_only_kinds_begin_again_by_their_name(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """After a crash such a call starts from its prompt, says why, and its answer is a right one."""
    params = greedy(240, **fields)

    async def scenario() -> None:
        with pytest.warns(UserWarning, match=f"a request with {name} starts again after a crash"):
            async with capturing(engine, tmp_path, flush=4, draws="engine") as (wrapped, session):
                got = await abort_after(wrapped, PROMPT, params, "r", 6)
        cut = read_back(tmp_path).entries["r"].n_tokens
        assert cut >= len(got) > 0
        async with capturing(engine, tmp_path, draws="engine") as (wrapped, session):
            with pytest.warns(UserWarning, match=name):
                answer = await ask(wrapped, PROMPT, params, "r")
            (event,) = session.stored.history(call_id_of("r", PROMPT, params))
            assert (event.at, event.reason.partition(":")[0]) == (cut, name)
            assert event.reason.partition(": ")[2] == resume_table.why(name)
            assert session.unresumable.restart_only == {name: 1}
            assert session.counters.tokens_captured == len(answer.token_ids)
        if "temperature" not in fields or "seed" in fields:
            whole = await ask(engine, PROMPT, params, "bare")
            assert_same(answer, whole, tolerance=2e-5)
        stored = read_back(tmp_path)
        assert stored.transcripts["r"].token_ids.tolist() == answer.token_ids
        assert stored.entries["r"].attempt == 1

    on_loop(scenario())


def test_v15_on_an_engine_that_reports_experts_a_call_begins_again_by_that_name(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the request: the engine's own configuration says so. (It does not start here with it: decision 0026.)"""
    from vllm.config.aux_output import AuxOutputConfig

    name, params = "enable_return_routed_experts", greedy(240)
    monkeypatch.setattr(engine.vllm_config, "aux_output_config", AuxOutputConfig(**{name: True}))

    async def scenario() -> None:
        with pytest.warns(UserWarning, match=f"a request with {name} starts again after a crash"):
            async with capturing(engine, tmp_path, flush=4) as (wrapped, session):
                got = await abort_after(wrapped, PROMPT, params, "r", 6)
        assert got
        async with capturing(engine, tmp_path) as (wrapped, session):
            with pytest.warns(UserWarning, match=name):
                answer = await ask(wrapped, PROMPT, params, "r")
            (event,) = session.stored.history(call_id_of("r", PROMPT, params))
            assert event.reason == f"{name}: {resume_table.why(name)}"
        assert_same(answer, await ask(engine, PROMPT, params, "bare"), tolerance=2e-5)

    on_loop(scenario())


def test_restart_only_calls_begin_again_after_an_abort_too(engine: Any, on_loop: OnLoop[Any], tmp_path: Path) -> None:
    """Within one session: the tokens of the aborted attempt are replaced, in the table and in the store."""
    params = greedy(240, routed_experts_prompt_start=1)

    async def scenario() -> None:
        whole = await ask(engine, PROMPT, params, "bare")
        with pytest.warns(UserWarning, match="routed_experts_prompt_start"):
            async with capturing(engine, tmp_path, flush=4, draws="engine") as (wrapped, _):
                for _ in range(2):
                    await abort_after(wrapped, PROMPT, params, "r", 10)
                assert_same(await ask(wrapped, PROMPT, params, "r"), whole)
        stored = read_back(tmp_path)
        assert stored.transcripts["r"].token_ids.tolist() == whole.token_ids
        assert stored.entries["r"].attempt == 2

    on_loop(scenario())


@pytest.mark.parametrize(("name", "fields"), RESTART_ONLY)
def test_unresumable_refuse_names_the_field(
    engine: Any, on_loop: OnLoop[Any], tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    """With `refuse` the request is turned away at admission; nothing of it is in the store."""
    params = greedy(8, **fields)

    async def scenario() -> None:
        async with capturing(engine, tmp_path, unresumable="refuse", draws="engine") as (wrapped, _):
            with pytest.raises(InputError, match=f"because of {name}:"):
                await ask(wrapped, PROMPT, params, "r")
            assert len((await ask(wrapped, PROMPT, greedy(8), "fine")).token_ids) == 8
        assert set(read_back(tmp_path).entries) == {"fine"}

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
