"""A job's loop on the session's engine, in this process: what is compared, refused, delivered, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.engine_requests import Requests
from prefix_recovery.prompts import Prompt
from recovery.errors import FingerprintMismatch, RecoveryError, StoreFull
from storage_backends import open_store
from storage_backends.testing.faults import PASS, FaultyStore, RaiseBefore, Step, Verb
from tests.conftest import OnLoop
from tests.engine_runs import ask, greedy, standing, until
from tests.job_files import lines, rows_of, write_job, write_lines
from tests.job_here import job, run_here


@pytest.fixture
def half_done(engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path) -> Path:
    """The config of a job of which some rows are there and some calls have a saved prefix."""
    rows = [*lines(3, least=12), *lines(3, least=900, seed=1)]
    for number, row in enumerate(rows):
        row["id"] = f"p-{number}"
    config = write_job(tmp_path, tiny_model, rows, flush=16, block={"snapshot_interval_s": 3600})
    on_loop(run_here(engine, config, stop_at=(200, 1)))
    assert not {row["id"] for row in rows_of(tmp_path)} & {"p-3", "p-4", "p-5"}
    return config


def change_line(config: Path, number: int, **fields: Any) -> None:
    path = config.with_name("prompts.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[number].update(fields)
    write_lines(path, rows)


Change = Callable[[Path], None]

CHANGES: list[tuple[str, Change, str]] = [
    ("prompt", lambda c: change_line(c, 4, prompt_token_ids=[7, 8, 9]), r"prompt 'p-4' \(line 5\)"),
    ("own sampling", lambda c: change_line(c, 3, sampling={"max_tokens": 301}), r"prompt 'p-3' \(line 4\)"),
    ("kind", lambda c: change_line(c, 5, prompt_token_ids=None, prompt="hello"), r"prompt 'p-5' \(line 6\)"),
    (
        "job sampling",
        lambda c: c.write_text(c.read_text().replace("ignore_eos: true", "ignore_eos: false")) and None,
        r"prompt 'p-0' \(line 1\) is sampled otherwise .*: sampling.ignore_eos: true in the store, the default here",
    ),
    (
        "samples",
        lambda c: c.write_text(c.read_text() + "samples_per_prompt: 2\n") and None,
        "job.samples_per_prompt: 1 in the store, 2 here",
    ),
    (
        "a line is gone",
        lambda c: write_lines(c.with_name("prompts.jsonl"), c.with_name("prompts.jsonl").read_text().split("\n")[:4]),
        "unfinished call 'p-4#0' that the prompts file no longer asks for",
    ),
]


@pytest.mark.parametrize(("change", "said"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_changed_job_is_refused_by_name(
    engine: Any, on_loop: OnLoop[Any], half_done: Path, change: Change, said: str
) -> None:
    """What was begun must be the same, or the store is another job's: exit 15, the line or field named."""
    change(half_done)
    before = half_done.with_name("results.jsonl").read_bytes()
    with pytest.raises(FingerprintMismatch, match=said) as caught:
        on_loop(run_here(engine, half_done))
    assert caught.value.exit_code == 15
    assert half_done.with_name("results.jsonl").read_bytes() == before


def test_what_may_change(engine: Any, on_loop: OnLoop[Any], half_done: Path) -> None:
    """More prompts, a finished one removed, another order, other flush and interval: the job goes on."""
    path = half_done.with_name("prompts.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    finished = rows_of(half_done.parent)[0]["id"]
    rows = [row for row in rows[::-1] if row["id"] != finished]
    write_lines(path, [{"id": "new", "prompt": "hello", "sampling": {"max_tokens": 5}}, *rows])
    half_done.write_text(half_done.read_text().replace("snapshot_interval_s: 3600", "snapshot_interval_s: 7"))
    outcome, _ = on_loop(run_here(engine, half_done))
    assert outcome.bad == []
    assert sorted(row["id"] for row in rows_of(half_done.parent)) == sorted([*(f"p-{n}" for n in range(6)), "new"])


def test_a_refused_line_may_be_mended(engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path) -> None:
    """Nothing of it was generated, so that the store has nothing against its change."""
    rows = [*lines(1, least=10), {"id": "x", "prompt_token_ids": [1, 99999]}]
    config = write_job(tmp_path, tiny_model, rows)
    outcome, _ = on_loop(run_here(engine, config))
    assert [(bad.line, bad.id) for bad in outcome.bad] == [(2, "x")]
    change_line(config, 1, prompt_token_ids=[1, 9])
    outcome, _ = on_loop(run_here(engine, config))
    assert outcome.bad == []
    assert sorted(row["id"] for row in rows_of(tmp_path)) == ["p-0", "x"]


@pytest.mark.parametrize("name", ["temperature", "routed_experts_prompt_start"])
def test_refuse_costs_the_sample_and_names_the_field(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path, name: str
) -> None:
    odd = {"temperature": 0.5} if name == "temperature" else {name: 1}
    rows = [*lines(2, least=10), {"id": "odd", "prompt": "hello", "sampling": odd}]
    config = write_job(tmp_path, tiny_model, rows, block={"unresumable": "refuse", "draws": "engine"})
    outcome, _ = on_loop(run_here(engine, config))
    (bad,) = outcome.bad
    assert (bad.line, bad.id) == (3, "odd") and f"because of {name}:" in bad.error
    assert sorted(row["id"] for row in rows_of(tmp_path)) == ["p-0", "p-1"]


def test_flushes_at_cuts_only_still_end(engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path) -> None:
    """With flush 0 and a long interval nothing becomes durable by itself: the end of the job asks for a cut."""
    config = write_job(tmp_path, tiny_model, lines(4, least=20), flush=0, block={"snapshot_interval_s": 3600})
    on_loop(run_here(engine, config))
    assert len(rows_of(tmp_path)) == 4


def test_at_most_so_many_calls_at_a_time(engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path) -> None:
    """And those that have a saved prefix come first."""
    config = write_job(tmp_path, tiny_model, lines(9, least=20), max_concurrent_calls=3)
    most = 0

    async def scenario() -> None:
        nonlocal most
        async with job(engine, config) as (dispatch, session):
            real = dispatch._generate

            async def counted(*arguments: Any) -> Any:
                nonlocal most
                running.add(arguments[0].name)
                most = max(most, len(running))
                try:
                    return await real(*arguments)
                finally:
                    running.discard(arguments[0].name)

            running: set[str] = set()
            dispatch._generate = counted  # type: ignore[method-assign]
            await dispatch.run(await dispatch.matched(), asyncio.Event())
            assert session.counters.tokens_captured == sum(20 + 9 * n for n in range(9))

    on_loop(scenario())
    assert most == 3


def test_f1_a_store_without_room_is_told_and_outlived(
    engine: Any,
    on_loop: OnLoop[Any],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F1: while no segment can be written the job decodes on, says what is wrong and appends no row; then all rows."""
    full = True

    def plan(verb: Verb, key: str) -> Step:
        return RaiseBefore(StoreFull("no space left on device")) if full and key.startswith("seg/") else PASS

    monkeypatch.setattr(
        "vllm_hooks.opening.open_store", lambda url, **options: FaultyStore(open_store(url, **options), plan)
    )
    config = write_job(tmp_path, tiny_model, lines(4, least=20), block={"snapshot_interval_s": 0.2})

    async def scenario() -> None:
        nonlocal full
        async with job(engine, config) as (dispatch, session):
            work = asyncio.ensure_future(dispatch.run(await dispatch.matched(), asyncio.Event()))
            total = sum(20 + 9 * n for n in range(4))
            await until(lambda: session.counters.tokens_captured == total and session.counters.snapshots_abandoned >= 2)
            (tokens, snapshots) = session.troubles
            assert tokens.tries + snapshots.tries >= 3 and tokens.waiting > 0
            assert "no space left on device" in tokens.error.message and dispatch.trouble is None
            assert rows_of(tmp_path) == [] and not work.done()
            full = False
            await work
            assert session.counters.tokens_captured == total

    on_loop(scenario())
    assert len(rows_of(tmp_path)) == 4


def test_a_failed_session_ends_the_loop_at_once(
    engine: Any, on_loop: OnLoop[Any], tiny_model: Path, tmp_path: Path
) -> None:
    """C8: fenced by a newer coordinator, the loop does not decode to the end first."""
    config = write_job(tmp_path, tiny_model, lines(4, least=900), block={"snapshot_interval_s": 3600})

    async def scenario() -> None:
        async with job(engine, config) as (dispatch, session):
            work = asyncio.ensure_future(dispatch.run(await dispatch.matched(), asyncio.Event()))
            await until(lambda: session.counters.tokens_captured >= 20)
            async with standing(engine), job(engine, config):
                session.want_snapshot()
                with pytest.raises(RecoveryError) as caught:
                    await work  # the engine stands: a loop that waits for its calls' ends would wait for ever
            assert caught.value.exit_code == 11
            assert session.counters.tokens_captured < 4 * 900

    on_loop(scenario())
    assert rows_of(tmp_path) == []


def test_k2_text_and_messages_get_one_bos(engine: Any, on_loop: OnLoop[Any]) -> None:
    """K2: a text that begins with <bos>, one that does not, and a chat whose template writes it: one each."""
    requests = Requests(engine, {})
    bare = requests.token_ids(Prompt("a", 1, "prompt", "hello", {}, ""))
    assert bare[0] == 0 and bare.count(0) == 1
    assert requests.token_ids(Prompt("a", 1, "prompt", "<bos>hello", {}, "")) == bare
    chat = [{"role": "user", "content": "hello"}]
    ids = requests.token_ids(Prompt("a", 1, "messages", chat, {}, ""))
    assert ids[0] == 0 and ids.count(0) == 1

    async def scenario() -> None:
        answer = await ask(engine, "hello", greedy(3), "r")
        assert answer.prompt_token_ids == bare

    on_loop(scenario())
