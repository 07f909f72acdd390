"""What the whole test session shares: the seed, a tiny model, one event loop, one engine on it.

Owns: the fixtures that are costly to make, and ending what they started.
Does not know: what is tested. A test that asks for none of these starts none of them.

Invariants:
1. There is one engine per session, started by the first test that asks for it, and its processes end with the session.
2. After the engine's start the environment is what it was before: processes that tests start see a user's environment.
3. Every random choice comes from `rng`, which is a function of the printed seed and the test's name, or from
   hypothesis, for which no time is too long.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from prefix_recovery.processes import descendants
from tests.job_processes import is_engine

pytest_plugins = ["tests.two_workers"]

T = TypeVar("T")
OnLoop = Callable[[Coroutine[Any, Any, T]], T]

ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 192 << 20}
"""Engine arguments of the session's engine, and of the jobs that tests run."""

_LONGEST_S = 500.0

settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
"""How fast a machine is, and how many draws a filter happens to refuse, is no property of the code."""
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of random kills and cuts (default: random, printed)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = int.from_bytes(os.urandom(4), "little")
    os.environ["PREFIX_RECOVERY_CACHE"] = ""  # every start tests its engine, and the user's cache is not touched


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (give it with --seed)"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of one test; the same for the same --seed, whichever other tests run."""
    seed = request.config.getoption("--seed")
    print(f"--seed {seed}")
    return random.Random(f"{seed} {request.node.nodeid}")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one, else tmp_path.

    What a kill costs is bounded by the flush as long as a segment is stored faster than it is decoded. The tiny model
    decodes some hundred tokens in the time for which a busy disk may hold up one fsync.
    """
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK | os.X_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="prefix-recovery-test-", dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with a byte-level tokenizer."""
    from prefix_recovery.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def on_loop() -> Iterator[OnLoop[Any]]:
    """Runs a coroutine to its end on the session's one event loop, which stands still between two calls."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    def run(work: Coroutine[Any, Any, T]) -> T:
        return loop.run_until_complete(asyncio.wait_for(work, _LONGEST_S))

    yield run
    pending = asyncio.all_tasks(loop)
    for task in pending:
        task.cancel()
    if pending:
        loop.run_until_complete(asyncio.wait(pending))
    loop.run_until_complete(loop.shutdown_default_executor())
    asyncio.set_event_loop(None)
    loop.close()


@contextmanager
def engine_of(model: Path, arguments: Mapping[str, Any], on_loop: OnLoop[Any]) -> Iterator[Any]:
    """An AsyncLLM, started as a job starts one. What that sets in this process's environment is taken back."""
    from prefix_recovery.engine import Engine

    before = dict(os.environ)
    started = Engine(str(model), arguments)
    os.environ.clear()
    os.environ.update(before)
    tempfile.tempdir = None

    async def close() -> None:
        started.close()

    try:
        yield started.llm
    finally:
        on_loop(close())


@pytest.fixture(scope="session")
def session_engine(tiny_model: Path, on_loop: OnLoop[Any]) -> Iterator[Any]:
    """The session's AsyncLLM, with the settings that a job gets."""
    others = descendants(os.getpid())
    with engine_of(tiny_model, ENGINE, on_loop) as llm:
        new = (child for child in descendants(os.getpid()) if child not in others)
        ours = [child for child in new if is_engine(child.pid)]
        assert ours
        # A full collection of what vLLM has loaded stops the loop for some hundred tokens of the engine.
        gc.collect()
        gc.freeze()
        yield llm
    left = [identity for identity in ours if identity.alive()]
    assert not left, f"the engine left processes behind: {left}"


@pytest.fixture
def engine(session_engine: Any, on_loop: OnLoop[Any]) -> Any:
    """The session's AsyncLLM, with no cached prefix of an earlier test."""
    on_loop(session_engine.reset_prefix_cache())
    return session_engine
