"""The Python of README.md, docs/library.md, docs/rollouts.md and docs/metrics.md runs as it stands, on a real engine.

Owns: what each block finds in scope, and that it does what the page says of it.
Does not know: blocks without an engine (test_docs.py, test_segment_docs.py, test_inspect_docs.py).
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.admission import FullyAsyncRollout
from recovery.admission.limits import Exhausted
from recovery.admission.replay import ReplaySource
from recovery.admission.rows import JsonlRows
from recovery.admission.samples import Sample
from recovery.config import CheckpointingConfig, RolloutConfig, load_loop_config
from recovery.model import PolicyVersion
from tests.conftest import OnLoop
from tests.engine_runs import greedy
from vllm_hooks import open_session
from vllm_hooks.opening import SystemClock, SystemEntropy

ROOT = Path(__file__).parent.parent
LOOP = """
rollout_checkpointing: {enabled: true, store: loop-store}
rollout: {max_executing_groups: 3, completed_prefetch_groups: 16}
"""


def block(page: str, has: str) -> str:
    """The one block of Python on a page that has this text."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (text,) = (text for text in found if has in text)
    return str(text)


async def run(text: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run it, awaits at its top level too. Returns the names that it leaves."""
    code = compile(text, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    made = eval(code, names)
    if inspect.isawaitable(made):
        await made
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages take for given: a model, prompts, the file of a loop."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models/smollm2").symlink_to(tiny_model)
    rows = [{"id": f"p{number}", "prompt": f"number {number}"} for number in range(32)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("loop.yaml").write_text(LOOP)
    return tmp_path


class Trainer:
    """What the pages call a trainer, of a model that does not change."""

    def __init__(self) -> None:
        self.trained: list[Sample] = []
        self.saved: list[tuple[int, PolicyVersion]] = []

    async def train(self, batch: Any) -> None:
        await self.step(batch.groups)

    async def step(self, groups: Any) -> int:
        self.trained += [sample for group in groups for sample in group]
        return len(self.trained)

    async def push(self, *_: Any) -> None:
        pass

    async def save(self, rollout: int, version: PolicyVersion) -> None:
        self.saved.append((rollout, version))

    def assert_each_once(self, samples: int) -> None:
        found = sorted((sample.row_id, sample.sample_index) for sample in self.trained)
        assert found == sorted((f"p{number}", index) for number in range(32) for index in range(samples))


# ---- a loop of one's own ---------------------------------------------------------------------------------------------


def test_the_readme_captures_and_goes_on(engine: Any, on_loop: OnLoop[Any], folder: Path) -> None:
    prompt = {"prompt_token_ids": [3, 5, 8, 13]}

    async def scenario() -> None:
        outputs = []
        for life in range(2):
            names = {"llm": engine, "prompt": prompt, "params": greedy(24)}
            outputs.append((await run(block("README.md", "RecoverableEngine"), names))["output"].outputs[0])
            assert names["session"].counters.tokens_captured == (0 if life else 24), "answered from the store"
        assert outputs[0].token_ids == outputs[1].token_ids and len(outputs[0].token_ids) == 24

    on_loop(scenario())
    assert any((folder / "run-1").rglob("*.arrow"))


def test_the_program_of_the_library_page_runs(folder: Path) -> None:
    Path("program.py").write_text(block("docs/library.md", "asyncio.run(main())"))
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run([sys.executable, "program.py"], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "restored: 0 unfinished calls, 0 tokens" in done.stdout
    assert any((folder / "run-1").rglob("*.arrow"))


def test_the_arguments_and_the_processor_of_the_library_page() -> None:
    made: list[Any] = []

    class AsyncEngineArgs(SimpleNamespace):
        pass

    names = {"AsyncEngineArgs": AsyncEngineArgs, "AsyncLLM": SimpleNamespace(from_engine_args=made.append)}
    asyncio.run(run(block("docs/library.md", "engine_arguments"), names))
    assert made[0].model == "models/smollm2" and made[0].logits_processors
    names = asyncio.run(run(block("docs/library.md", "PrefixSafe"), {}))
    assert issubclass(names["Mine"], names["LogitsProcessor"])


# ---- rollouts --------------------------------------------------------------------------------------------------------


class Echo:
    """An engine of the first program: it answers at once."""

    async def generate(self, sample: Sample) -> Sample:
        await asyncio.sleep(0)
        sample.token_ids, sample.reward = [1], 1.0
        return sample


def test_the_first_rollout_trains_every_sample_once() -> None:
    trainer = Trainer()
    names = asyncio.run(run(block("docs/rollouts.md", "class Entropy"), {}))
    asyncio.run(names["main"]([Echo()], trainer))
    trainer.assert_each_once(8)


def test_a_hold_of_ones_own_stops_and_lets_go() -> None:
    async def scenario() -> None:
        rollout = FullyAsyncRollout(
            ReplaySource(JsonlRows("prompts.jsonl"), samples_per_prompt=2),
            [Echo()],
            RolloutConfig(max_executing_groups=2, completed_prefetch_groups=4),
            batch_groups=4,
            clock=SystemClock(),
            entropy=SystemEntropy(),
        )
        rollout.start()
        names = await run(block("docs/rollouts.md", "HoldKind.DRAIN"), {"rollout": rollout})
        assert names["hold"] is not None
        rollout.commit(await rollout.next_batch(timeout_s=100))  # type: ignore[arg-type]
        await rollout.close()

    asyncio.run(scenario())


def names_of(engine: Any, trainer: Trainer) -> dict[str, Any]:
    """What the whole program takes for given, at a trainer without a checkpoint."""
    return {
        "FullyAsyncRollout": FullyAsyncRollout,
        "llm": engine,
        "loop": load_loop_config("loop.yaml"),
        "params": greedy(8),
        "source": ReplaySource(JsonlRows("prompts.jsonl"), samples_per_prompt=1),
        "trainer": trainer,
        "at": 0,
        "version": 0,
    }


def test_the_whole_program_trains_every_sample_once(engine: Any, on_loop: OnLoop[Any]) -> None:
    trainer = Trainer()
    on_loop(run(block("docs/rollouts.md", "train_all"), names_of(engine, trainer)))
    trainer.assert_each_once(1)
    assert trainer.saved[-1][0] == 2


def test_a_loop_of_ones_own_saves_what_a_snapshot_covers(engine: Any, on_loop: OnLoop[Any]) -> None:
    """The head and the end of the whole program around the other loop of the page."""
    head, end = re.split(r"^await train_all.*\n", block("docs/rollouts.md", "train_all"), flags=re.MULTILINE)
    trainer = Trainer()
    saved: list[int] = []

    async def scenario() -> None:
        names = await run(head, names_of(engine, trainer))
        names |= {"train": trainer.step, "push": trainer.push}
        names["save_checkpoint"] = lambda rollout, version: saved.append(rollout)
        while not isinstance(batch := await names["rollout"].next_batch(), Exhausted):
            await run(block("docs/rollouts.md", "save_checkpoint"), {**names, "batch": batch})
        await run(end, names)

    on_loop(scenario())
    trainer.assert_each_once(1)
    assert saved == [1, 2]


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_the_metrics_of_a_session_are_in_the_registry(engine: Any, on_loop: OnLoop[Any]) -> None:
    async def scenario() -> None:
        names = await run(block("docs/metrics.md", "SessionMetrics"), {})
        session = await open_session(engine, CheckpointingConfig(enabled=True, store="metrics-store"))
        names["watch"](session)
        assert names["registry"].get_sample_value("prefix_recovery_epoch") == 1
        await session.stop()

    on_loop(scenario())
