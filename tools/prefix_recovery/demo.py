"""`prefix-recovery demo`: the main job, on a real model, with real kills, compared with the run that never died.

Owns: the demo's job, what it prints, and the conditions under which it fails.
Does not know: how a job runs; it starts `prefix-recovery run` as anybody would.

Invariants:
1. Exit 0 only if no prompt was lost or doubled, no call differs, every kill left tokens to reuse, no call had more
   than `FLUSH` tokens generated twice by one kill or began with tokens that nobody had generated, and no run passed
   over anything that was stored.
2. The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from prefix_recovery.interrupted import JobFigures, compare, read_rows, run_once
from prefix_recovery.smollm2 import make_smollm2
from recovery.errors import ConfigError, RecoveryError
from snapshot_inspect import render

FLUSH = 16
MIN_TOKENS = 200

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "How does bread rise?",
    "Describe the water cycle to a ten-year-old.",
    "What are the main causes of the seasons?",
    "Give me a recipe for a simple vegetable soup.",
    "Why is the sky blue?",
    "Tell me about the history of the printing press.",
    "How do I plant a small herb garden?",
    "What is the difference between a virus and a bacterium?",
    "Write a letter to a friend about a mountain hike.",
    "Explain what a prime number is, with examples.",
    "How do bees make honey?",
    "What should I pack for a week at the sea?",
    "Describe how a steam engine works.",
    "What makes a good night's sleep?",
    "How are rainbows formed?",
    "Explain supply and demand with an example.",
    "Write a poem about the first snow.",
)


class DemoFailed(RecoveryError):
    """A figure of the demo is not what this project promises."""


def run_demo(folder: Path | None, *, seed: int | None, kills: int, calls: int) -> int:
    """Run the demo in `folder` (default: a temporary one, removed at the end). Returns the exit code."""
    if kills < 1 or calls < 1:
        raise ConfigError("the demo needs at least one kill and one call", hint="prefix-recovery demo --help")
    if folder is not None and any((folder / name).exists() for name in ("whole", "broken")):
        raise ConfigError(f"{folder} holds an earlier demo", hint="give --dir another folder, or remove that one")
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    console = render.console(highlight=False)
    place = Path(tempfile.mkdtemp(prefix="prefix-recovery-demo-")) if folder is None else folder
    place.mkdir(parents=True, exist_ok=True)
    try:
        figures, problems = _Demo(place, seed, kills, calls, console).run()
    except DemoFailed as error:
        figures, problems = {"seed": seed, "failed": error.message}, [str(error)]
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    for problem in problems:
        console.print(f"FAILED: {problem}", style="bold red")
    print(json.dumps(figures), flush=True)
    return 1 if problems else 0


class _Demo:
    def __init__(self, folder: Path, seed: int, kills: int, calls: int, console: Console) -> None:
        self._folder = folder
        self._seed = seed
        self._kills = kills
        self._calls = calls
        self._console = console

    def run(self) -> tuple[dict[str, Any], list[str]]:
        say = self._console.print
        say(f"prefix-recovery demo: {self._calls} calls, {self._kills} kills, seed {self._seed}, in {self._folder}")
        make_smollm2(self._folder / "smollm2-135m", dtype="float32")
        say("1. an uninterrupted run, for comparison and to know how many tokens there are")
        whole = JobFigures([self._once("whole", None)])
        reference = read_rows(self._folder / "whole" / "results.jsonl")
        total = sum(len(row["token_ids"]) for row in reference)
        say(f"   {total} tokens in {whole.wall_s:.0f} s, engine start included")
        say("2. the same job, killed with SIGKILL in mid-decode")
        broken = self._interrupt(random.Random(self._seed), total)
        rows = read_rows(self._folder / "broken" / "results.jsonl")
        return self._report(whole, broken, rows, reference)

    def _interrupt(self, rng: random.Random, total: int) -> JobFigures:
        broken = JobFigures()
        done = 0
        for number in range(self._kills):
            # Somewhere in what is left, but with every call past its first flush and something left for later kills.
            least = min(self._calls * FLUSH * 2, (total - done) // 4)
            most = max(least + 1, (total - done) // (self._kills - number + 1))
            at = rng.randint(least, most)
            run = self._once("broken", at, number)
            broken.runs.append(run)
            if not run.killed:
                raise DemoFailed(
                    f"run {number} ended with code {run.exit_code} before its kill",
                    hint=f"its log is {self._folder / 'broken' / f'run-{number}.log'}; keep it with --dir DIR",
                )
            counts = broken.counted[-1]
            done = int(counts[0].sum() + counts[1].sum())
            self._console.print(
                f"   kill {number + 1} after {at} tokens of this run ({run.wall_s:.0f} s after its start)"
            )
        broken.runs.append(self._once("broken", None, self._kills))
        return broken

    def _once(self, name: str, kill_at: int | None, number: int = 0) -> Any:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        config = folder / "job.yaml"
        if not config.exists():
            self._write_job(folder, config)
        run = run_once(config, folder, f"run-{number}", kill_at_tokens=kill_at)
        if kill_at is None and run.exit_code != 0:
            log = (folder / f"run-{number}.log").read_text(errors="replace")[-4000:]
            raise DemoFailed(f"the run ended with code {run.exit_code}; its log ends:\n{log}", hint="see above")
        return run

    def _write_job(self, folder: Path, config: Path) -> None:
        with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for number in range(self._calls):
                question = QUESTIONS[number % len(QUESTIONS)]
                sampling = {"max_tokens": MIN_TOKENS + 24 + 13 * (number * 7 % 16), "min_tokens": MIN_TOKENS}
                row = {"id": f"q-{number}", "messages": [{"role": "user", "content": question}], "sampling": sampling}
                file.write(json.dumps(row) + "\n")
        job = {
            "model": str(self._folder / "smollm2-135m"),
            "engine": {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30},
            "prompts": "prompts.jsonl",
            "output": "results.jsonl",
            "sampling": {"temperature": 0.0, "repetition_penalty": 1.1},
            "max_concurrent_calls": 16,
            "rollout_checkpointing": {
                "enabled": True,
                "store": "store",
                "snapshot_interval_s": 10,
                "gym": {"mode": "prefix_recovery", "generation_chunk_flush_tokens": FLUSH},
            },
        }
        config.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")

    def _report(
        self, whole: JobFigures, broken: JobFigures, rows: list[dict[str, Any]], reference: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[str]]:
        comparison = compare(rows, reference)
        reused, twice = broken.reused_after_kills(), broken.twice_after_kills()
        shortest = min(len(row["token_ids"]) for row in reference)
        saved = sum(reused)
        figures = {
            "calls": len(reference),
            "kills": sum(run.killed for run in broken.runs),
            "tokens_generated": broken.tokens_generated,
            "tokens_reused": saved,
            "tokens_generated_twice": int(sum(t.sum() for t in twice)),
            "mismatched_calls": comparison.mismatched,
            "prompts_lost": comparison.lost,
            "prompts_duplicated": comparison.duplicated,
            "wall_s_interrupted": round(broken.wall_s, 1),
            "wall_s_uninterrupted": round(whole.wall_s, 1),
            "tokens_reused_after_each_kill": reused,
            "tokens_generated_twice_per_call_max": int(max((t.max() for t in twice), default=0)),
            "largest_logprob_gap": comparison.largest_logprob_gap,
            "exactness": sorted({r["exactness"] for row in rows for r in row["resumes"]}),
            "shortest_call_tokens": shortest,
            "flush_tokens": FLUSH,
            "seed": self._seed,
        }
        self._table(figures, twice)
        problems = _problems(figures, self._kills)
        problems += [line for run in broken.runs for line in run.passed_over]
        if min((int(t.min()) for t in twice), default=0) < 0:
            problems.append("a call began with tokens that nobody had generated")
        return figures, problems

    def _table(self, figures: dict[str, Any], twice: list[Any]) -> None:
        table = Table("after kill", "tokens reused", "generated again", "most per call", title="what the kills cost")
        for number, (reused, again) in enumerate(zip(figures["tokens_reused_after_each_kill"], twice, strict=True), 1):
            table.add_row(str(number), str(reused), str(int(again.sum())), f"{int(again.max())} (bound {FLUSH})")
        self._console.print(table)
        self._console.print(
            f"saved: {figures['tokens_reused']} tokens that starting unfinished calls again would generate twice; "
            f"{figures['mismatched_calls']} of {figures['calls']} calls differ from the uninterrupted run"
        )


def _problems(figures: dict[str, Any], kills: int) -> list[str]:
    """The conditions that do not hold, in words."""
    found = [name for name in ("mismatched_calls", "prompts_lost", "prompts_duplicated") if figures[name] != 0]
    if figures["kills"] != kills:
        found.append(f"only {figures['kills']} of {kills} kills happened")
    if len(figures["tokens_reused_after_each_kill"]) != kills or min(figures["tokens_reused_after_each_kill"]) <= 0:
        found.append("a kill left nothing to reuse")
    if figures["tokens_generated_twice_per_call_max"] > FLUSH:
        found.append(f"a call had more than {FLUSH} tokens generated twice by one kill")
    if figures["shortest_call_tokens"] < MIN_TOKENS:
        found.append(f"a call has fewer than {MIN_TOKENS} tokens")
    return found
