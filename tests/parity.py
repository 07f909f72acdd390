"""`python -m tests.parity --pairs N`: calls of every kind, cut, carried on, and compared with the uninterrupted ones.

A pair is a kind of request and where it was cut, once or three times. Both halves of the kinds are greedy and seeded in
turn; prompts, kinds of output and cuts are drawn from the seed.

Owns: how a batch of such calls is run on one engine, and what is said of each.
Does not know: which kinds there are (parity_kinds.py). Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recovery.model import Resumed
from tests.engine_runs import Answer, ask, assert_same, capturing, greedy, put_cut, read_back
from tests.parity_kinds import KINDS, Kind

TOLERANCE = 1e-5
LENGTH = 48
_OUTPUTS = ("DELTA", "CUMULATIVE", "FINAL_ONLY")


@dataclass(slots=True)
class Pair:
    """One call that is cut at `cuts`. After the run: what was different, and from which token on.

    `tied`: only best tokens of one and the same logprob changed places.
    `best_gap`: between the two best logprobs of the uninterrupted call where the tokens part.
    """

    name: str
    kind: Kind
    sampled: bool
    prompt: Any
    params: Any
    n_cuts: int
    cuts: list[int] = field(default_factory=list)
    different: str = ""
    parts_at: int | None = None
    best_gap: float | None = None
    logprob_gap: float = 0.0
    tied: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.kind.arguments)


async def pairs_of(
    engine: Any, kinds: Sequence[tuple[Kind, bool, int]], rng: random.Random, label: str, length: int
) -> list[Pair]:
    """Requests of (kind, sampled or greedy, number of cuts). What depends on the free answer is looked up in it."""
    tokenizer = engine.get_tokenizer()
    pairs: list[Pair] = []
    basics: list[tuple[list[int], dict[str, Any]]] = []
    for number, (kind, sampled, n_cuts) in enumerate(kinds):
        ids = [rng.randrange(3, 512) for _ in range(rng.randint(4, 40))]
        drawn = {"temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(1 << 31)} if sampled else {}
        basics.append((ids, drawn))
        pairs.append(Pair(f"{label}-{number}", kind, sampled, ids, None, n_cuts))
    free = await asyncio.gather(
        *(
            ask(engine, ids, greedy(length, **drawn), f"{pair.name}-free")
            for pair, (ids, drawn) in zip(pairs, basics, strict=True)
        )
    )
    for pair, (ids, drawn), answer in zip(pairs, basics, free, strict=True):
        fields = {**drawn, **pair.kind.fields, **pair.kind.made(answer, tokenizer)}
        pair.params = greedy(length, rng.choice(_OUTPUTS), **fields)
        if pair.kind.name == "text prompt":
            pair.prompt = "hello, " * rng.randint(1, 4)
        elif pair.kind.prompt:
            pair.prompt = {"prompt_token_ids": ids, **pair.kind.prompt}
    return pairs


async def run_pairs(engine: Any, folder: Path, pairs: Sequence[Pair], rng: random.Random) -> None:
    """Whole, cut, carried on, compared. What was not carried on where it was cut is an error and not a difference."""
    async with capturing(engine, folder / "whole") as (wrapped, _):
        wholes = await asyncio.gather(
            *(ask(wrapped, pair.prompt, pair.params, pair.name, **pair.arguments) for pair in pairs)
        )
    for pair, whole in zip(pairs, wholes, strict=True):
        n = len(whole.token_ids)
        pair.cuts = sorted(rng.sample(range(1, n), min(pair.n_cuts, n - 1))) if n > 1 else [1]
    for number in range(max(len(pair.cuts) for pair in pairs)):
        async with capturing(engine, folder / "cut") as (_, session):
            for pair, whole in zip(pairs, wholes, strict=True):
                if number < len(pair.cuts):
                    before = pair.cuts[number - 1] if number else 0
                    await put_cut(session, engine, pair.name, pair.params, whole, before, pair.cuts[number])
    async with capturing(engine, folder / "cut") as (wrapped, session):
        got = await asyncio.gather(
            *(ask(wrapped, pair.prompt, pair.params, pair.name, **pair.arguments) for pair in pairs)
        )
    entries = read_back(folder / "cut").entries
    for pair, one, whole in zip(pairs, got, wholes, strict=True):
        last = entries[pair.name].history[-1]
        assert isinstance(last, Resumed) and last.at == pair.cuts[-1], (pair.kind.name, pair.cuts, last)
        judge(pair, one, whole)


def judge(pair: Pair, got: Answer, whole: Answer) -> None:
    """Note what is different."""
    same = [a == b for a, b in zip(got.token_ids, whole.token_ids, strict=False)]
    if got.token_ids != whole.token_ids:
        pair.parts_at = same.index(False) if False in same else len(same)
        if whole.logprobs is not None and pair.parts_at < len(whole.logprobs):
            best = sorted((value for _, value in whole.logprobs[pair.parts_at]), reverse=True)
            pair.best_gap = best[0] - best[1] if len(best) > 1 else None
    elif got.logprobs is not None and whole.logprobs is not None:
        pair.logprob_gap = max((abs(a - b) for a, b in zip(got.sampled, whole.sampled, strict=True)), default=0.0)
    try:
        assert_same(got, whole, TOLERANCE)
    except AssertionError as error:
        pair.different = str(error).partition("\n")[0] or "logprobs"
        untied = dataclasses.replace(got), dataclasses.replace(whole)
        for answer in untied:
            untie(answer)
        with contextlib.suppress(AssertionError):
            assert_same(*untied, TOLERANCE)
            pair.different, pair.tied = "", True


def untie(answer: Answer) -> None:
    """Among best tokens of one logprob, the engine's order and choice are by who else is in the batch: leave them out.

    Its top-k runs with the largest k of the batch. In float32 there are hardly any; bfloat16 has many.
    """
    if answer.logprobs is None or answer.named is None:
        return
    rows, names = [], []
    for sampled, row, named in zip(answer.token_ids, answer.logprobs, answer.named, strict=True):
        values = [value for _, value in row]
        kept = [
            at
            for at, (token, value) in enumerate(row)
            if token == sampled or (values.count(value) == 1 and value != min(values))
        ]
        rows.append([row[at] for at in kept])
        names.append([(None, named[at][1]) for at in kept])
    answer.logprobs, answer.named = rows, names


def every_kind(n: int, rng: random.Random) -> list[tuple[Kind, bool, int]]:
    """`n` of them: all kinds once, then all again the other way (sampled, cut three times), and so on."""
    chosen = []
    ways = [(False, 1), (True, 3), (True, 1), (False, 3)]
    for number in range(n):
        turn, at = divmod(number, len(KINDS))
        sampled, n_cuts = ways[(turn + at) % len(ways)]
        chosen.append((KINDS[at], sampled, n_cuts))
    return chosen


async def suite(
    engine: Any, folder: Path, n: int, seed: int, *, length: int = LENGTH, deadline: float | None = None
) -> list[Pair]:
    """In batches of two rounds of all kinds."""
    rng = random.Random(seed)
    todo, done = every_kind(n, rng), []
    size = 2 * len(KINDS)
    for number, first in enumerate(range(0, n, size)):
        if deadline is not None and time.monotonic() > deadline:
            break
        pairs = await pairs_of(engine, todo[first : first + size], rng, f"b{number}", length)
        await run_pairs(engine, folder / str(number), pairs, rng)
        done += pairs
    return done


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """What can be said of them all."""
    wrong = [pair for pair in pairs if pair.different]
    return {
        "pairs": len(pairs),
        "exact": len(pairs) - len(wrong),
        "kinds": len({pair.kind.name for pair in pairs}),
        "cut_thrice": sum(len(pair.cuts) == 3 for pair in pairs),
        "sampled": sum(pair.sampled for pair in pairs),
        "tied": sum(pair.tied for pair in pairs),
        "largest_logprob_gap": max((pair.logprob_gap for pair in pairs), default=0.0),
        "different": [
            {
                "kind": pair.kind.name,
                "cuts": pair.cuts,
                "sampled": pair.sampled,
                "what": pair.different,
                "parts_at": pair.parts_at,
                "best_gap": pair.best_gap,
            }
            for pair in wrong
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=len(KINDS) * 8)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a call (at most 400)")
    parser.add_argument("--seconds", type=float, default=None)
    options = parser.parse_args()
    from prefix_recovery.engine import Engine, set_environment
    from prefix_recovery.tiny import make_tiny_llama

    set_environment()
    seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    arguments = {"dtype": options.dtype, "max_model_len": 512, "kv_cache_memory_bytes": 192 << 20}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        async def run() -> list[Pair]:
            started = Engine(str(make_tiny_llama(folder / "model")), arguments)
            try:
                return await suite(started.llm, folder, options.pairs, seed, length=options.length, deadline=deadline)
            finally:
                started.close()

        found = figures(asyncio.run(run()))
    split = os.environ.get("VLLM_CPU_ATTN_SPLIT_KV", "")
    print(json.dumps({"seed": seed, "dtype": options.dtype, "split_kv": split, **found}), flush=True)
    return 0 if found["exact"] == found["pairs"] else 1


if __name__ == "__main__":
    sys.exit(main())
