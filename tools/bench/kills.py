"""`bench kills`: what kills cost a job, by method: time, tokens decoded twice, and which lengths come out.

Owns: when kills come, the figures of each method, the job of a real engine that is killed.
Does not know: how a method recovers (kills_paced.py; `prefix-recovery run`).

Effective time ratio: the time of the job without a kill over its time with kills, restarts included. Kills come at
random (exponential), at the same moments for every method. Time to finish: one kill at a random moment of the job,
then what is left, from the kill to the last row; beside it the least that any method could take, which is what was
left without the kill, and a start of the engine. Length bias: what has finished when the time is up, out of rows
without end, over the mean of the same rows if nobody is killed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from bench import engines
from bench.kills_paced import FLUSH, RESTART_S, Drop, Method, Ours, Redo, drive, lengths
from bench.measuring import Spread, ratios
from bench.report import Law, Report

ABOUT = "time, tokens decoded twice and length bias under kills, beside redoing or dropping unfinished rows"
PARTS = ("ratio", "finish", "bias", "engine")

METHODS: dict[str, Callable[[], Method]] = {"this project": Ours, "redo rows": Redo, "drop rows": Drop}
BETWEEN_S = (150.0, 300.0, 600.0, 1200.0, 2400.0)
ROWS, JOBS, KILLED, HOURS = 512, 5, 15, 2.0
ROWS_QUICK, JOBS_QUICK, KILLED_QUICK, HOURS_QUICK = 70, 1, 2, 0.05
FINISH_MAX, LOSS_OF_REDO = 0.5, 0.2
_WRONG = "restored calls that are not what was decoded, and ended ones that are not"


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    rng = np.random.default_rng(report.seed)
    if "ratio" in parts:
        _ratio(report, rng)
    if "finish" in parts:
        _finish(report, rng)
    if "bias" in parts:
        _bias(report, rng)
    if "engine" in parts and not report.quick:
        _engine(report, folder, rng)


def _kills(rng: np.random.Generator, between_s: float, until_s: float) -> list[float]:
    n = int(3 * until_s / between_s) + 20
    return np.cumsum(rng.exponential(between_s, n)).tolist()  # type: ignore[no-any-return]


def _ratio(report: Report, rng: np.random.Generator) -> None:
    n_rows, jobs = (ROWS_QUICK, JOBS_QUICK) if report.quick else (ROWS, report.rounds or JOBS)
    report.title(f"effective time ratio of {jobs} jobs of {n_rows} rows, kills at random, {RESTART_S:.0f} s a restart")
    rows: list[list[object]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    twice: list[int] = []
    wrong = 0
    for between in BETWEEN_S:
        found: dict[str, list[float]] = {"this project": [], "redo rows": []}
        kills: list[int] = []
        for _ in range(jobs):
            these = lengths(rng, n_rows)
            ideal = drive(Redo(), these, [])
            moments = _kills(rng, between, 40 * ideal.seconds)
            for name in found:
                method = METHODS[name]()
                outcome = drive(method, these, moments, until=40 * ideal.seconds)
                found[name].append(ideal.seconds / outcome.seconds if len(outcome.results) == n_rows else 0.0)
                if isinstance(method, Ours):
                    method.close()
                    twice += method.lost_tokens
                    wrong += method.wrong
                    kills.append(outcome.kills)
        for name, values in found.items():
            spread = Spread.of(values)
            report.figure("ratio", f"{name}, a kill every {between:.0f} s", {**spread.as_json(), "kills": kills})
            series.setdefault(name, []).append((between, spread.median))
            rows.append([f"{between:,.0f} s", name, spread.text(3), f"{fmean(kills):.1f}"])
    report.table(("a kill every", "method", "time without kills over with", "kills"), rows)
    figure = {"mean": fmean(twice), "most": max(twice), "calls": len(twice)} if twice else {}
    report.figure("ratio", "tokens decoded twice, a call and kill", figure)
    report.figure("ratio", "restored calls that are not what was decoded", wrong)
    report.bound(f"{_WRONG}, killed often", wrong, 0)
    if twice:
        report.bound("tokens decoded twice, a call and kill, at most", max(twice), FLUSH)
        report.note(f"decoded twice: {fmean(twice):.0f} tokens a live call and kill, at most {max(twice)}")
    if not report.quick:
        costly = [at for at, ratio in series["redo rows"] if ratio <= 1 - LOSS_OF_REDO]
        for at in costly[-1:]:
            redo, ours = (1 - dict(series[name])[at] for name in ("redo rows", "this project"))
            report.figure("ratio", "losses where redo loses a fifth or more", {"s": at, "redo": redo, "ours": ours})
            report.note(f"a kill every {at:,.0f} s: redoing rows loses {redo:.0%} of the time, this project {ours:.0%}")
    report.law(Law("time without kills over with kills", "s between kills", series))


def _finish(report: Report, rng: np.random.Generator) -> None:
    n_rows, jobs = (ROWS_QUICK, KILLED_QUICK) if report.quick else (ROWS, report.rounds or KILLED)
    report.title(f"time to finish after one kill at a random moment, {jobs} jobs of {n_rows} rows")
    left: dict[str, list[float]] = {"this project": [], "redo rows": []}
    twice: dict[str, list[int]] = {"this project": [], "redo rows": []}
    late: list[bool] = []
    least: list[float] = []
    wrong = 0
    for _ in range(jobs):
        these = lengths(rng, n_rows)
        ideal = drive(Redo(), these, [])
        share = float(rng.uniform(0.05, 0.95))
        at = share * ideal.seconds
        late.append(share > 0.5)
        least.append(ideal.seconds - at + RESTART_S)
        for name in left:
            method = METHODS[name]()
            outcome = drive(method, these, [at])
            if outcome.kills != 1 or len(outcome.results) != n_rows:
                raise RuntimeError(f"{name}: {outcome.kills} kills, {len(outcome.results)} of {n_rows} rows")
            left[name].append(outcome.seconds - at)
            twice[name].append(outcome.decoded - ideal.decoded)
            if isinstance(method, Ours):
                method.close()
                wrong += method.wrong
    report.bound(f"{_WRONG}, killed once", wrong, 0)
    over = ratios(left["this project"], left["redo rows"])
    report.figure("finish", "seconds", {name: Spread.of(values).as_json() for name, values in left.items()})
    report.figure(
        "finish", "tokens decoded twice", {name: Spread.of(values).as_json() for name, values in twice.items()}
    )
    report.figure("finish", "over redo rows", over.as_json())
    report.table(
        ("method", "s to finish", "tokens decoded twice"),
        [[name, Spread.of(left[name]).text(0), Spread.of(twice[name]).text(0)] for name in left],
    )
    report.note(f"over redo rows: {over.text(2)}")
    limit = ratios(least, left["redo rows"])
    report.figure("finish", "the least over redo rows", limit.as_json())
    report.figure("finish", "this project over the least", ratios(left["this project"], least).as_json())
    report.note(
        f"what was left without the kill and a start of the engine over redo rows: {limit.text(2)}; "
        f"this project over that: {ratios(left['this project'], least).text(3)}"
    )
    for half in (False, True):
        own = [left["this project"][n] / left["redo rows"][n] for n in range(jobs) if late[n] is half]
        if own:
            name = f"killed in the {'second' if half else 'first'} half"
            report.figure("finish", name, Spread.of(own).as_json())
            report.note(f"{name} of the job: {Spread.of(own).text(2)}")
    if not report.quick:
        report.bound("time to finish after a kill over redo rows, median", over.median, FINISH_MAX)


def _bias(report: Report, rng: np.random.Generator) -> None:
    hours, between = (HOURS_QUICK if report.quick else HOURS), BETWEEN_S[0]
    report.title(f"which lengths come out in {hours:g} hours, a kill every {between:.0f} s")
    these = lengths(rng, int(hours * 3600 * 4) + 200)
    until = hours * 3600
    at = _kills(rng, between, until)
    truth = drive(Redo(), these, [], until=until)
    of_truth = fmean(these[row] for _, row in truth.results)
    rows: list[list[object]] = []
    for name, make in {"no kill": Redo, **METHODS}.items():
        method = make()
        outcome = drive(method, these, [] if name == "no kill" else at, until=until)
        mean = fmean(these[row] for _, row in outcome.results)
        if isinstance(method, Ours):
            method.close()
            report.bound(f"{_WRONG}, when the time is up", method.wrong, 0)
        figure = {"mean_length": mean, "rows": len(outcome.results), "over_truth": mean / of_truth}
        report.figure("bias", name, figure)
        rows.append([name, len(outcome.results), f"{mean:.0f}", f"{mean / of_truth:.3f}"])
    report.table(("method", "rows finished", "mean tokens", "over no kill"), rows)


def _engine(report: Report, folder: Path | None, rng: np.random.Generator) -> None:
    """The tiny model: a job is killed when six tenths are decoded, and goes on; redo is a job of what is unfinished."""
    from prefix_recovery.interrupted import compare, read_rows, run_once

    drawn = np.minimum(rng.lognormal(5.0, 1.1, 48), 1900).astype(int) + 1
    prompts = [
        {"id": f"r{n}", "prompt_token_ids": [3 + (7 * n + at) % 500 for at in range(32)], "sampling": {"max_tokens": m}}
        for n, m in enumerate(drawn.tolist())
    ]
    report.title(f"a real engine (tiny model): {len(prompts)} rows of {drawn.sum():,} tokens, killed at six tenths")
    with engines.tiny_model(folder) as model, tempfile.TemporaryDirectory(prefix="bench-kills-", dir=folder) as name:
        root = Path(name)
        whole = _job(root / "whole", model, prompts)
        first = run_once(whole, root, "whole")
        job = _job(root / "killed", model, prompts)
        killed = run_once(job, root, "first", kill_at_tokens=int(0.6 * drawn.sum()))
        done = {row["id"] for row in read_rows(root / "killed" / "out.jsonl")}
        second = run_once(job, root, "second")
        again = [prompt for prompt in prompts if prompt["id"] not in done]
        redo = run_once(_job(root / "redo", model, again), root, "redo")
        found = compare(read_rows(root / "killed" / "out.jsonl"), read_rows(root / "whole" / "out.jsonl"))
    assert killed.killed and second.counts is not None and redo.counts is not None
    if failed := [run for run in (first, second, redo) if run.exit_code or run.passed_over]:
        raise RuntimeError(f"a run failed, or did not use what was stored: {failed}")
    decoded = [int(run.counts[1].sum()) for run in (second, redo) if run.counts is not None]
    figure = {
        "rows": len(prompts), "tokens": int(drawn.sum()), "unfinished_rows": len(again), "seconds_whole": first.wall_s,
        "seconds_to_finish": second.wall_s, "seconds_to_redo": redo.wall_s, "tokens_to_finish": decoded[0],
        "tokens_to_redo": decoded[1], "lost": found.lost, "doubled": found.duplicated, "differing": found.mismatched,
    }  # fmt: skip
    report.figure("engine", "tiny", figure)
    report.table(
        ("", "seconds, engine start included", "tokens"),
        [["goes on", f"{second.wall_s:.1f}", decoded[0]], ["redo rows", f"{redo.wall_s:.1f}", decoded[1]]],
    )
    report.bound("rows lost, doubled or different, tiny model", found.lost + found.duplicated + found.mismatched, 0)
    report.bound("tokens decoded after the kill over redo rows, tiny model", decoded[0] / decoded[1], FINISH_MAX)
    report.bound("seconds to finish over redo rows, tiny model", second.wall_s / redo.wall_s, FINISH_MAX)


def _job(folder: Path, model: str, prompts: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    config = {
        "model": model,
        "engine": {"dtype": "float32", "max_model_len": 2048, "kv_cache_memory_bytes": 256 << 20},
        "prompts": "prompts.jsonl",
        "output": "out.jsonl",
        "sampling": {"temperature": 0, "ignore_eos": True},
        "rollout_checkpointing": {"enabled": True, "store": "store"},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
