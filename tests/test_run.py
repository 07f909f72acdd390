"""`prefix-recovery run` as anybody runs it: real processes, a real engine, real kills, and the rows that come out.

The reference rows come from the session's engine, uncaptured. Every test starts as few engines as it can; each start
takes some seconds.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from prefix_recovery.interrupted import JobFigures
from prefix_recovery.tiny import make_tiny_llama
from recovery.log_reading import find_tail, walk_back
from storage_backends import open_store
from tests.conftest import OnLoop
from tests.engine_runs import read_back
from tests.job_files import Saved, assert_whole, lines, noted_children, rows_of, saved_in, write_job, write_lines
from tests.job_here import reference_rows, run_here
from tests.job_processes import JobProcess, kill_at_rest, run, running, wait_until

DOCS = Path(__file__).parent.parent / "docs"
BOUND = 128
"""Tokens per flush where what a kill costs is asserted."""

Reference = Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]


@pytest.fixture
def reference(engine: Any, on_loop: OnLoop[Any]) -> Reference:
    """The rows of a job as the bare engine would give them; `samples` of each line."""
    return lambda rows, samples=1: on_loop(reference_rows(engine, rows, samples))  # type: ignore[misc]


def causes(store: Path) -> list[str]:
    """Why the snapshots of a store were taken, newest first."""
    backend = open_store(str(store))
    slots = [read.slot for read in walk_back(backend, find_tail(backend)) if not isinstance(read, Exception)]
    return [str(slot.body["cause"]) for slot in slots if slot.kind == "snapshot"]


def assert_scraped(job: JobProcess, rows: Sequence[Mapping[str, Any]]) -> None:
    """What docs/metrics.md lists of a process and of a job is served while a continued job decodes."""
    (url,) = re.findall(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", job.text)
    scraped = {
        family.name: family for family in text_string_to_metric_families(urlopen(url, timeout=240).read().decode())
    }
    listed = set(re.findall(r"^\| `(prefix_recovery_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    missing = {name for name in listed if "_rollout_" not in name and name.removesuffix("_total") not in scraped}
    assert not missing
    value = {name: family.samples[0].value for name, family in scraped.items()}
    assert value["prefix_recovery_tokens_captured"] >= 200 and value["prefix_recovery_tokens_reused"] > 0
    assert value["prefix_recovery_epoch"] == 2 and value["prefix_recovery_session_failed"] == 0
    assert value["prefix_recovery_results_wanted"] == len(rows) > value["prefix_recovery_results"]


FLUSHED = 3 * BOUND // 4
"""A call that has so many tokens more than are stored, or fewer, makes a flush begin."""


def held(saved: Saved, rows: Sequence[Mapping[str, Any]], samples: int = 1) -> npt.NDArray[np.int64]:
    """Tokens of each sample that are in the store."""
    names = [f"{row['id']}#{index}" for row in rows for index in range(samples)]
    return np.array([saved.tokens.get(name, 0) for name in names])


def flushed(rows: Sequence[Mapping[str, Any]], samples: int = 1) -> Callable[[Saved, npt.NDArray[np.int64]], bool]:
    """Whether no call has more than a flush of tokens that are not in the store, and an unfinished one has some."""

    def holds(saved: Saved, counts: npt.NDArray[np.int64]) -> bool:
        lost = (counts[0] + counts[1] - held(saved, rows, samples)) * (counts[2] == 0)
        return bool(saved.in_mid_decode) and lost.max() <= FLUSHED

    return holds


# ---- kills ---------------------------------------------------------------------------------------------------------


def test_w2_w3_killed_again_and_again(
    tiny_model: Path, quick_path: Path, rng: random.Random, reference: Reference
) -> None:
    """W2, W3, W4: three SIGKILLs of the whole group at random token counts, then to the end.

    Finished, half finished, queued and never sent: no prompt is lost, doubled or different; the mean length is the
    reference's. A kill costs what was not in the store, to the token, and nothing else.

    Two of the three kills come wherever they were drawn, also before anything was stored: a flush begins when one of
    the eight calls that decode has BOUND / 2 tokens, which may be after 8 * 64 = 512; and how much is decoded while it
    is stored depends on the machine. The third, drawn too, waits with its engine stopped until the store has all but
    a flush of each call, and tokens of one that has not ended; so every draw has something to resume. No run ends
    before its kill, and each has unfinished calls with tokens at it: it comes when at most 1/4, 1/3 and 1/2 of what was
    left is decoded.
    """
    rows = lines(12, least=200, step=20)
    config = write_job(quick_path, tiny_model, rows, flush=BOUND)
    total = sum(row["sampling"]["max_tokens"] for row in rows)
    figures, stored, path = JobFigures(), [], str(quick_path / "store")
    done, waits = 0, rng.randrange(3)
    for number in range(3):
        most = max(2, (total - done) // (4 - number))
        at = rng.randint(min(8 * BOUND, most) // 2, most)
        with running(config, f"run-{number}") as job:
            job.after(at)
            if number == waits:
                kill_at_rest(job, flushed(rows), "all but a flush in the store", path)
            else:
                job.kill_group()
            stored.append(held(saved_in(open_store(path)), rows))
            figures.runs.append(job.figures())
        counts = figures.counted[-1]
        done = int(counts[0].sum() + counts[1].sum())
        print(f"kill {number} after {at} tokens of the run, {done} of {total} in all")
    last = run(config, "run-last")
    assert last.wait() == 0, last.text
    figures.runs.append(last.figures())
    assert len(figures.counted) == 4
    for number, (after, kept, twice) in enumerate(
        zip(figures.counted[1:], stored, figures.twice_after_kills(), strict=True)
    ):
        print(f"kill {number}: at most {twice.max()} tokens of a call twice")
        unfinished = after[2] == 0
        assert (after[0][unfinished] == kept[unfinished]).all() and (twice >= 0).all()
        assert number != waits or twice.max() <= FLUSHED
    found, wanted = rows_of(quick_path), reference(rows)
    assert_whole(found, wanted)
    assert sum(len(row["token_ids"]) for row in found) == total
    assert all(resume["at"] > 0 for row in found for resume in row["resumes"])
    resumed = {row["id"] for row in found if row["resumes"]}
    carried = [((after[0] > 0) & (after[2] == 0)).nonzero()[0] for after in figures.counted[1:]]
    assert resumed == {rows[k]["id"] for numbers in carried for k in numbers}
    assert len(resumed) >= 1
    assert not any(row["restarts"] for row in found)
    assert {resume["exactness"] for row in found for resume in row["resumes"]} <= {"bitwise", "token"}


def test_w9_adoption_alone_with_shuffled_siblings(
    tiny_model: Path, quick_path: Path, rng: random.Random, reference: Reference
) -> None:
    """W9: four samples of each prompt, two of which are equal; a kill when no snapshot but the first was ever taken,
    the lines in another order afterwards, and the output gone. What was flushed is adopted; each row finds its place.
    """
    rows = lines(4, least=400, step=20)
    rows[2] = {**rows[1], "id": "equal to p-1", "sampling": {"max_tokens": 77}}
    block = {"snapshot_interval_s": 3600}
    config = write_job(quick_path, tiny_model, rows, samples_per_prompt=4, flush=BOUND, block=block)
    total = 4 * sum(row["sampling"]["max_tokens"] for row in rows)
    with running(config, "run-0") as job:
        job.after(rng.randint(total // 3, 2 * total // 3))
        kill_at_rest(job, flushed(rows, 4), "all but a flush in the store", str(quick_path / "store"))
        before = job.counts()
    assert causes(quick_path / "store") == ["adoption"]
    (quick_path / "results.jsonl").unlink()
    order = rng.sample(range(4), 4)
    write_lines(quick_path / "prompts.jsonl", [rows[number] for number in order])
    last = run(config, "run-1")
    assert last.wait() == 0, last.text
    assert "later segment" in last.text
    after = last.counts()
    assert before is not None and after is not None
    places = [4 * order.index(number) + index for number in range(4) for index in range(4)]
    twice = before[0] + before[1] - after[0][places]
    assert (twice >= 0).all() and twice.max() <= FLUSHED, twice
    assert after[0].sum() > 0
    assert_whole(rows_of(quick_path), reference(rows, 4))  # type: ignore[call-arg]


def test_w1_w6_w14_signals_then_the_end_then_nothing_to_do(
    tiny_model: Path, tmp_path: Path, reference: Reference
) -> None:
    """W1, W14: SIGTERM, then SIGINT to the whole group as a terminal sends it: each ends in a snapshot, nothing is
    generated twice. W6: run again when all is done, no engine is started and the file stays; with the output gone it
    is made again from the store and nothing is decoded. The second run is scraped while it decodes.
    """
    rows = lines(10, least=200, step=10)
    config = write_job(tmp_path, tiny_model, rows, block={"snapshot_interval_s": 3600})
    figures = JobFigures()
    for name, number, code in (("term", signal.SIGTERM, 143), ("int", signal.SIGINT, 130)):
        with running(config, name, "--metrics", "0") as job:
            job.after(200).stop_decoding()
            if number is signal.SIGINT:
                assert_scraped(job, rows)
            job.decode_again()
            if number is signal.SIGTERM:
                job.process.send_signal(number)
            else:
                job.signal_group(number)
            assert job.wait() == code, job.text
            assert re.search(
                rf"stopped by {number.name}; the last snapshot was taken \([0-9]+\); run the same", job.text
            )
            assert causes(tmp_path / "store")[0] == "final"
            figures.runs.append(job.figures())
    last = run(config, "last")
    assert last.wait() == 0, last.text
    figures.runs.append(last.figures())
    assert [int(twice.sum()) for twice in figures.twice_after_kills()] == [0, 0]
    wanted = reference(rows)
    assert_whole(rows_of(tmp_path), wanted)
    output = tmp_path / "results.jsonl"
    data, stamp = output.read_bytes(), output.stat().st_mtime_ns
    again = run(config, "again")
    assert again.wait() == 0 and "engine ready" not in again.text
    assert (output.read_bytes(), output.stat().st_mtime_ns) == (data, stamp)
    output.unlink()
    rewritten = run(config, "rewritten")
    assert rewritten.wait() == 0 and rewritten.decoded == 0, rewritten.text
    assert "written without an engine" in rewritten.text and "engine ready" not in rewritten.text
    assert sorted(output.read_bytes().splitlines()) == sorted(data.splitlines())


DYING = """
import json, os, signal, sys
from prefix_recovery import results
from prefix_recovery.cli import main
where = sys.argv.pop(1)
append = results.Results.append
def dying(self, rows):
    rows = list(rows)
    if where == "torn":
        os.write(self._fd, json.dumps(rows[0]).encode()[:-20])
    if where == "after":
        append(self, rows)
    os.killpg(0, signal.SIGKILL)
results.Results.append = dying
sys.exit(main())
"""


def test_w16_killed_around_the_row(
    tiny_model: Path, tmp_path: Path, reference: Reference, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """W16: a kill before a row is written, in the middle of it, and after it but before anything knows: each once."""
    rows = lines(6, least=20, step=6)
    config = write_job(tmp_path, tiny_model, rows)
    kept = []
    for where in ("before", "torn", "after"):
        with running(config, where, program=("-c", DYING, where)) as job:
            assert job.wait() == -signal.SIGKILL, job.text
        kept.append((tmp_path / "results.jsonl").read_bytes())
    assert kept[0] == b"" and kept[1] != b"" and not kept[1].endswith(b"\n") and kept[2].endswith(b"\n")
    on_loop(run_here(engine, config))
    assert (tmp_path / "results.jsonl").read_bytes().startswith(kept[2])
    assert_whole(rows_of(tmp_path), reference(rows))


HANGING = """
import sys, threading
from prefix_recovery.cli import command
from storage_backends import open_store
from storage_backends.testing.faults import PASS, FaultyStore, Hang
import vllm_hooks.opening as opening
never = threading.Event()
n = 0
def plan(verb, key):
    global n
    n += verb == "put_new" and key.startswith("seg/")
    return Hang(never) if n > 1 else PASS
opening.open_store = lambda url, **options: FaultyStore(open_store(url, **options), plan)
command()
"""


def test_w1_w5_a_store_that_hangs_while_the_job_is_stopped(
    tiny_model: Path, tmp_path: Path, reference: Reference, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """W1, W5: after its first segment the store hangs, SIGTERM comes: the run ends within its grace, says that nothing
    was published, and what was stored before is where the next run goes on.
    """
    rows = lines(4, least=300, step=20)
    config = write_job(tmp_path, tiny_model, rows, flush=16, block={"snapshot_interval_s": 3600, "grace_s": 1})
    with running(config, "hangs", program=("-c", HANGING)) as job:
        job.after(300)
        store = open_store(str(tmp_path / "store"))
        wait_until(lambda: saved_in(store).in_mid_decode != set(), "the first segment")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 1, job.text
        assert "the last snapshot was not published" in job.text
    _, counters = on_loop(run_here(engine, config))
    assert counters.tokens_reused > 0
    assert_whole(rows_of(tmp_path), reference(rows))


# ---- who dies with whom --------------------------------------------------------------------------------------------


def test_a_killed_client_leaves_no_engine(tiny_model: Path, tmp_path: Path, reference: Reference) -> None:
    """SIGKILL of the client alone: its engine follows it; where the plug-in was not loaded, the next run ends it."""
    rows = lines(4, least=300)
    config = write_job(tmp_path, tiny_model, rows)
    with running(config, "by itself") as job:
        core = job.after(40).engine_core()
        children = noted_children(tmp_path)
        assert core in children, "it was noted with what else the run had started"
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not any(child.alive() for child in children), "the engine died")
    with running(config, "left over", environment={"VLLM_PLUGINS": "none"}) as job:
        core = job.after(20).engine_core()
        job.process.kill()
        job.process.wait()
        assert core.alive()
        last = run(config, "last")
        assert last.wait() == 0, last.text
        assert f"ended process {core.pid}, left over from a run that died" in last.text
        assert not core.alive()
    assert_whole(rows_of(tmp_path), reference(rows))


def damage(path: Path) -> None:
    """Change one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def test_w12_w13_a_dead_engine_and_a_damaged_ledger(tiny_model: Path, tmp_path: Path, reference: Reference) -> None:
    """W12: the engine core is killed: exit 1, what to do is said, nothing is published from a dead engine.
    W13: the newest ledger is damaged: `strict` refuses, `auto` passes over it by name and goes on from the one before.
    """
    rows = lines(8, least=400, step=20)
    config = write_job(tmp_path, tiny_model, rows, block={"snapshot_interval_s": 0.5})
    with running(config, "dies") as job:
        job.after(300).stop_decoding()
        wait_until(lambda: len(causes(tmp_path / "store")) >= 2, "a second snapshot")
        os.kill(job.engine_core().pid, signal.SIGKILL)
        assert job.wait() == 1, job.text
        assert "the engine died" in job.text and "run the same command again" in job.text
        first = job.counts()
    assert "final" not in causes(tmp_path / "store")
    newest = read_back(tmp_path / "store").snapshot
    backend = open_store(str(tmp_path / "store"))
    (slot,) = (r.slot for r in walk_back(backend, newest) if not isinstance(r, Exception) and r.slot.seq == newest)
    damage(tmp_path / "store" / slot.body["ledger"]["key"])
    strict = run(config, "strict", "--rollout-checkpointing-restore", "strict")
    assert strict.wait() == 1, strict.text
    assert slot.body["ledger"]["key"] in strict.text
    last = run(config, "last", passes_over=True)
    assert last.wait() == 0, last.text
    assert f"passed over snapshot {newest}: " in last.text and "sha256" in last.text
    after = last.counts()
    assert first is not None and after is not None and after[0].sum() > 0
    assert_whole(rows_of(tmp_path), reference(rows))


def test_c8_a_zombie_appends_nothing(
    tiny_model: Path, tmp_path: Path, reference: Reference, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """A run is stopped with SIGSTOP, another one with an output of its own takes the store over and ends; woken up, the
    first one exits 11 and its output is what it was.
    """
    rows = lines(8, least=400, step=20)
    config = write_job(tmp_path, tiny_model, rows)
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "output": "other.jsonl"}))
    with running(config, "zombie") as zombie:
        zombie.after(200).signal_group(signal.SIGSTOP)
        on_loop(run_here(engine, other))
        before = (tmp_path / "results.jsonl").read_bytes()
        newest = read_back(tmp_path / "store").snapshot
        zombie.signal_group(signal.SIGCONT)
        assert zombie.wait() == 11, zombie.text
        assert "another run took over this store" in zombie.text
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert read_back(tmp_path / "store").snapshot == newest
    found = [json.loads(line) for line in (tmp_path / "other.jsonl").read_text().splitlines()]
    assert_whole(found, reference(rows))


# ---- input and settings --------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_run_cost_themselves(
    tiny_model: Path, tmp_path: Path, reference: Reference, engine: Any, on_loop: OnLoop[Any]
) -> None:
    """Malformed lines, requests that vLLM refuses, fields of a wrong type: each named on stderr and in the errors file,
    exit 3, all others have their rows. Mended, the next run makes the missing ones.
    """
    good = lines(3, least=10)
    text = {"id": "text", "prompt": "naïve 🙂 hello", "sampling": {"max_tokens": 31, "logit_bias": {"7": 2.5}}}
    bad: dict[str, dict[str, Any]] = {
        "vocabulary": {"prompt_token_ids": [1, 99999]},
        "too-long": {"prompt_token_ids": [5] * 2000},
        "full": {"prompt_token_ids": [5] * 1024},
        "no-field": {"prompt": "a", "sampling": {"temprature": 0}},
        "private": {"prompt": "a", "sampling": {"_eos_token_id": 5}},
        "text-number": {"prompt": "a", "sampling": {"max_tokens": "5"}},
        "half-token": {"prompt": "a", "sampling": {"max_tokens": 5.5}},
        "none": {"prompt": "a", "sampling": {"max_tokens": 0}},
        "nan": {"prompt": "a", "sampling": {"temperature": float("nan")}},
        "big-seed": {"prompt": "a", "sampling": {"seed": 2**70, "temperature": 1}},
        "bias": {"prompt": "a", "sampling": {"logit_bias": {"x": 1}}},
        "bad-word": {"prompt": "a", "sampling": {"bad_words": [3]}},
        "regex": {"prompt": "a", "sampling": {"structured_outputs": {"regex": "["}}},
        "many": {"prompt": "a", "sampling": {"logprobs": 50}},
        "no-content": {"messages": [{"role": "user"}]},
        "no-message": {"messages": []},
    }
    rows: list[Any] = [good[0], "nonsense", text, *({"id": name, **fields} for name, fields in bad.items()), *good[1:]]
    config = write_job(tmp_path, tiny_model, rows)
    first = run(config, "first")
    assert first.wait() == 3, first.text
    assert_whole(rows_of(tmp_path), reference([*good, text]))
    errors = [json.loads(line) for line in (tmp_path / "results.jsonl.errors.jsonl").read_text().splitlines()]
    assert {error["id"]: error["line"] for error in errors} == {
        "": 2,
        **{name: number for number, name in enumerate(bad, 4)},
    }
    for error in errors:
        assert error["error"], error
        assert (f"no result for {error['id']}#0: " if error["id"] else "prompts.jsonl line 2: ") in first.text
    said = {error["id"]: error["error"] for error in errors}
    assert "did you mean temperature?" in said["no-field"] and "max_tokens" in said["text-number"]
    mended = [good[0], text, *({"id": name, "prompt": "a", "sampling": {"max_tokens": 3}} for name in bad), *good[1:]]
    write_lines(tmp_path / "prompts.jsonl", mended)
    outcome, _ = on_loop(run_here(engine, config))
    assert outcome.bad == []
    assert_whole(rows_of(tmp_path), reference(mended))


def test_another_model_is_refused_by_name(tiny_model: Path, tmp_path: Path, engine: Any, on_loop: OnLoop[Any]) -> None:
    """The store of one model and the folder of another: exit 15, the field is named, nothing was changed."""
    rows = lines(2, least=30)
    config = write_job(tmp_path, tiny_model, rows)
    on_loop(run_here(engine, config))
    other = make_tiny_llama(tmp_path / "other", seed=1)
    write_lines(tmp_path / "prompts.jsonl", lines(3, least=30))
    output = (tmp_path / "results.jsonl").read_bytes()
    second = run(config, "second", "--set", f"model={other}")
    assert second.wait() == 15, second.text
    assert "model.weights" in second.text and "model.config" not in second.text
    assert (tmp_path / "results.jsonl").read_bytes() == output


def test_b24_switched_off_nothing_is_in_the_way(tiny_model: Path, tmp_path: Path, reference: Reference) -> None:
    """B24: `enabled: false`: the same rows, no store, and a second run that goes on from the rows alone."""
    rows = lines(6, least=40, step=150)
    config = write_job(tmp_path, tiny_model, rows, block={"enabled": False})
    with running(config, "first") as job:
        wait_until(lambda: (tmp_path / "results.jsonl").exists() and len(rows_of(tmp_path)) >= 1, "a row")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.text
    kept = len(rows_of(tmp_path))
    last = run(config, "last")
    assert last.wait() == 0, last.text
    assert 1 <= kept < 6
    assert_whole(rows_of(tmp_path), reference(rows))
    assert not (tmp_path / "store").exists()
    assert not any(row["resumes"] or row["restarts"] for row in rows_of(tmp_path))


def test_engine_arguments_that_do_not_exist(tiny_model: Path, tmp_path: Path) -> None:
    """Named with the nearest one before anything is loaded; a model that is not there is named too. Exit 2."""
    config = write_job(tmp_path, tiny_model, lines(1))
    wrong = run(config, "wrong", "--set", "engine.dtpye=float32")
    assert wrong.wait() == 2 and "engine.dtpye: this vLLM has no such argument; did you mean dtype?" in wrong.text
    assert f"no store at {tmp_path / 'store'} yet: the run makes one and begins anew" in wrong.text
    missing: JobProcess = run(config, "missing", "--set", f"model={tmp_path / 'nowhere'}")
    assert missing.wait() == 2, missing.text
    assert f"there is no model folder {tmp_path / 'nowhere'}" in missing.text and "Traceback" not in missing.text
    assert "starting the engine" not in missing.text
