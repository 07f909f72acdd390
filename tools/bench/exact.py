"""`bench exact`: what the settings cost that make an engine bit-exact, and what the plug-in costs who does not use it.

Owns: which engines are alive together, what each is asked, round by round, and which of them are compared.
Does not know: how a round is run (engine_process.py), how parts are taken out (switch.py), how figures are shown.

Two engine processes that are alike in everything differ by some percent, each for its whole life, so that a pair of
them cannot show that something costs less: their control says so. The parts of one engine, taken out and put back, can.

Invariants:
1. A ratio is of two ways that did the same work in one round, each twice: there and back, in an order drawn anew.
2. What is said of the plug-in has a control beside it: two ways that are the same, in the same rounds. None is
   measurable where the two intervals meet; how wide they are is what could have been seen.
3. What this machine cannot measure (batch invariance needs a GPU) is named and not guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np

from bench import engines, exact_step
from bench.measuring import Interval, there_and_back
from bench.report import Report

SPLIT = "VLLM_CPU_ATTN_SPLIT_KV"


@dataclass(frozen=True, slots=True)
class Side:
    """One engine."""

    plug_in: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Way:
    """What is asked of which of the engines; `parts`: with the plug-in's parts in it, if it has any."""

    engine: int = 0
    parts: bool = True
    sampled: bool = True
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """Way `over` over the mean of `under`; `control`: the ratio, by name, of two ways that are the same."""

    name: str
    over: int
    under: tuple[int, ...]
    control: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Engines that are alive together, the ways on them, which are run in the same rounds, and which are compared."""

    sides: tuple[Side, ...]
    ways: tuple[Way, ...]
    ratios: tuple[Ratio, ...]
    model: str = "tiny"
    tokens: int = 32
    rounds: int = 12


_SPLIT_ON = {SPLIT: "1"}
_BARE = Side(plug_in=False)
_REAL = Side(dtype="bfloat16", arguments={"kv_cache_memory_bytes": 1 << 30})
_IN_AND_OUT = tuple(Way(parts=on) for on in (True, False, False))


def _parts(model: str) -> tuple[Ratio, ...]:
    control = f"its parts out / out, same engine, {model} model"
    return Ratio(f"its parts in / out, same engine, {model} model", 0, (1, 2), control), Ratio(control, 2, (1,))


GROUPS = {
    "parts": Group((Side(),), _IN_AND_OUT, _parts("tiny"), rounds=75),
    "parts-real": Group((_REAL,), _IN_AND_OUT, _parts("real"), model="real", tokens=12),
    "engines": Group(
        (Side(), _BARE, _BARE, Side(environment=_SPLIT_ON)),
        (*(Way(number) for number in range(4)), Way(0, drawn=True)),
        (
            Ratio("plug-in that nothing uses / no plug-in", 0, (1, 2), "no plug-in / no plug-in"),
            Ratio("no plug-in / no plug-in", 2, (1,)),
            Ratio("drawn by position / by the engine", 4, (1, 2)),
            Ratio("split KV off / on, float32", 0, (3,)),
        ),
        rounds=15,
    ),
    "bfloat16": Group(
        (Side(dtype="bfloat16"), Side(dtype="bfloat16", environment=_SPLIT_ON)),
        (Way(0), Way(1)),
        (Ratio("split KV off / on, bfloat16", 0, (1,)),),
    ),
}
ON_A_GPU = {
    "invariance": Group(
        tuple(Side(environment={"VLLM_BATCH_INVARIANT": on}) for on in ("1", "0")),
        (Way(0), Way(1)),
        (Ratio("batch invariance on / off", 0, (1,)),),
    )
}
ABOUT = "cost of the settings that make an engine bit-exact, and of the plug-in"
PARTS = ("step", *GROUPS, *ON_A_GPU)
QUICK = ("step", "parts")
CALLS = 8
PLUG_IN_MAX = 1.01
"""With the parts over without them, where nothing uses them: what is still called nothing."""
_OFF = "the control's far end"


def run(report: Report, parts: tuple[str, ...], folder: Path | None) -> None:
    """One group after the other."""
    from prefix_recovery.engine import is_cpu_build

    here = GROUPS if is_cpu_build() else ON_A_GPU
    parts = tuple(part for part in parts if part in QUICK) if report.quick else parts
    if "step" in parts:
        exact_step.measure(report)
    rng = np.random.default_rng(report.seed)
    report.title(f"{CALLS} calls at a time: medians of the rounds' ratios, and where they lie 19 times of 20")
    rows = []
    for key, group in here.items():
        if key in parts:
            rows += _compared(report, key, group, folder, rng)
    report.table(("", "wall seconds", "the engine's processor seconds", "rounds", "same tokens"), rows)
    if is_cpu_build():
        report.note("batch invariance (VLLM_BATCH_INVARIANT=1): not measured, it needs a GPU")


def _compared(
    report: Report, key: str, group: Group, folder: Path | None, rng: np.random.Generator
) -> list[tuple[object, ...]]:
    rounds = 2 if report.quick else report.rounds or group.rounds
    measured, sums, running = _measured(group, rounds, 8 if report.quick else group.tokens, folder, rng)
    report.figure("by way and round", key, {what: values.tolist() for what, values in measured.items()})
    check_parts(group, running)
    found: dict[str, dict[str, Interval]] = {}
    rows: list[tuple[object, ...]] = []
    for ratio in group.ratios:
        under = list(ratio.under)
        of = {what: Interval.of(each[ratio.over] / each[under].mean(axis=0), rng) for what, each in measured.items()}
        same = all(sums[ratio.over] == sums[at] for at in under)
        told = {"same_tokens": same, "logits_processors": [running[at] for at in (ratio.over, *under)]}
        report.figure("exact", ratio.name, {**{what: one.as_json() for what, one in of.items()}, **told})
        rows.append((ratio.name, *(one.text() for one in of.values()), rounds, "yes" if same else "no"))
        found[ratio.name] = of
    for ratio in group.ratios if not report.quick else ():
        if ratio.control:
            for what, one in found[ratio.name].items():
                report.bound(f"{ratio.name}, {what}: low end, at most {_OFF}", one.low, found[ratio.control][what].off)
            if ratio.control.startswith("its parts"):
                report.bound(f"{ratio.name}, core: high end", found[ratio.name]["core"].high, PLUG_IN_MAX)
    return rows


def check_parts(group: Group, running: list[int]) -> None:
    """Raises RuntimeError if ways with the plug-in's parts ran no more processors than those without: of nothing."""
    there: dict[bool, list[int]] = {True: [], False: []}
    for way, n in zip(group.ways, running, strict=True):
        there[group.sides[way.engine].plug_in and way.parts].append(n)
    if there[True] and there[False] and min(there[True]) <= max(there[False]):
        raise RuntimeError(f"the plug-in's parts were not in, or not out: {running} processors ran, by way")


def _measured(
    group: Group, rounds: int, tokens: int, folder: Path | None, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], list[set[float]], list[int]]:
    """Wall and processor seconds by way and round; by way what the answers add up to, and how many processors ran."""
    ways = group.ways
    found = {"seconds": np.zeros((len(ways), rounds)), "core": np.zeros((len(ways), rounds))}
    sums: list[set[float]] = [set() for _ in ways]
    running = [0 for _ in ways]
    make = engines.tiny_model if group.model == "tiny" else engines.real_model
    with ExitStack() as stack:
        model = stack.enter_context(make(folder))
        processes = [stack.enter_context(_started(model, side)) for side in group.sides]
        for number in range(-1, rounds):  # the first one is not counted
            for at in there_and_back(len(ways), rng):
                asked = asdict(ways[at])
                answer = engines.ask(processes[asked.pop("engine")], do="decode", calls=CALLS, tokens=tokens, **asked)
                sums[at].add(answer["sum"])
                running[at] = answer["logits_processors"]
                for quantity, values in found.items():
                    if number >= 0:
                        values[at, number] += answer[quantity]
    return found, sums, running


def _started(model: str, side: Side) -> Any:
    """An engine without the plug-in loads nothing of it: not its processors, its scheduler, nor its entry points."""
    environment = dict(side.environment)
    if not side.plug_in:
        vllms = [group for group in entry_points().groups if group.startswith("vllm.")]
        entries = [entry for group in vllms for entry in entry_points(group=group)]
        others = {entry.name for entry in entries if not entry.value.startswith("vllm_hooks.")}
        environment["VLLM_PLUGINS"] = ",".join(sorted(others))
    arguments = {"worker_extension_cls": "bench.switch.Switch", "dtype": side.dtype, **side.arguments}
    return engines.started(model, plug_in=side.plug_in, environment=environment, **arguments)
