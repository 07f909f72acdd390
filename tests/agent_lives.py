"""One process-life of the workplace agent on the real session and store; its tokens are a function of the context.

Owns: the token source, the steps at which a life may be ended, what a finished job has to show, and the processes that
live such lives (`Lives`; run as a program, this module makes them).
Does not know: vLLM.

Invariant:
1. A life that is not killed goes through the same steps every time: after each token, and before each model call, it
   waits for what other threads are about. Only the order of steps of different threads may differ.
2. Between two steps at most one thing changes that a restart could see.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from examples.agents.mailbox import Mailbox
from examples.agents.workplace import Workplace
from recovery import resume
from recovery.config import CheckpointingConfig, GymConfig
from recovery.coordinator import Attempt
from recovery.membership import State
from recovery.model import Request
from recovery.ports import ObjectStore, Put
from recovery.protocol import Verdict
from recovery.resume import StopRules
from recovery.trajectory_tokens import TrajectoryTokens
from tests.fake_engine import logprob, next_token
from vllm_hooks.position import Position
from vllm_hooks.session import RecoverySession

ModeName = Literal["turn", "prefix_recovery"]
Settling = Callable[[], Coroutine[Any, Any, None]]

TASK = (5, 9, 17)
TURNS, TOKENS = int(os.environ.get("AGENT_TURNS", "2")), 3
PATIENCE_S = 120.0


class Steps:
    """What a life does, by name, in order. `die_at`: SIGKILL there; None: only note it."""

    def __init__(self, die_at: str | None = None) -> None:
        self.seen: list[str] = []
        self._die_at = die_at

    def __call__(self, what: str) -> None:
        n = sum(seen.rpartition("#")[0] == what for seen in self.seen)
        self.seen.append(f"{what}#{n}")
        if self.seen[-1] == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)


class SteppingStore:
    """A store whose conditional creates are steps; slots of the log also when they are there."""

    def __init__(self, inner: ObjectStore, step: Callable[[str], None]) -> None:
        self._inner, self._step = inner, step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put_new(self, key: str, data: bytes) -> Put:
        kind = key.partition("/")[0]
        self._step(f"before {kind}")
        put = self._inner.put_new(key, data)
        if kind == "log":
            self._step("published")
        return put


class TokenSource:
    """Has the `generate` of a RecoverableEngine, for calls of trajectories; a greedy engine without the engine."""

    def __init__(self, session: RecoverySession, step: Callable[[str], None], mode: str, snapshot: Settling) -> None:
        self._session, self._step, self._settled = session, step, snapshot
        self._stop = StopRules((), 4096, whole_calls=mode == "turn")
        self.generated = 0

    async def generate(
        self, prompt: Any, n_tokens: int, request_id: str, *, position: Position
    ) -> AsyncGenerator[Any, None]:
        sampling = {"temperature": 0.0, "max_tokens": n_tokens}
        request = Request(rollout=request_id, prompt_token_ids=np.asarray(prompt, np.int32), sampling=sampling)
        session = self._session
        await self._settled()
        call = await session.admit(position.request(request), self._stop, placed=True)
        position.call = call
        try:
            tokens = list(call.transcript_ids)
            last = tokens[-1] if tokens else None
            if call.ended is None and isinstance(
                resume.plan(call.request, len(tokens), last, self._stop), resume.Finish
            ):
                await session.terminal(call, "length", None)
            while call.ended is None:
                tokens.append(next_token(list(prompt), tokens))
                session.captured(call, [tokens[-1]], [logprob(tokens[-1], len(tokens) - 1)])
                self.generated += 1
                self._step(f"token {position.place.turn}.{len(tokens)}")
                await self._settled()
                if len(tokens) == n_tokens:
                    await session.terminal(call, "length", None)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="length")])
        finally:
            session.left(call, placed=True)


@dataclass
class Job:
    """Where it lies, how it is saved, and which steps a life of it went through."""

    folder: Path
    mode: ModeName
    restore: Any = "auto"
    turns: int = TURNS
    steps: Steps = field(default_factory=Steps)
    reused: int = 0
    generated: int = 0
    diverged: int = 0
    tokens: TrajectoryTokens | None = None

    @property
    def config(self) -> CheckpointingConfig:
        gym = GymConfig(mode=self.mode, generation_chunk_flush_tokens=2)
        store = str(self.folder / "store")
        return CheckpointingConfig(
            enabled=True, store=store, gym=gym, snapshot_interval_s=3600.0, snapshot_timeout_s=PATIENCE_S,
            restore=self.restore, keep_latest_k=9,
        )  # fmt: skip

    def live(self, task: tuple[int, ...] = TASK) -> list[int]:
        """One life, to the end of the job."""
        return asyncio.run(self._live(task))

    async def _live(self, task: tuple[int, ...]) -> list[int]:
        session = await asyncio.to_thread(RecoverySession.open, self.config)
        assert session.opened is not None
        self.reused = session.counters.tokens_reused
        steps = self.steps
        self._step_at_the_store(session)
        session.start()
        wanted, taken = 0, 0

        def count(attempt: Attempt) -> None:
            nonlocal taken
            assert attempt.verdict is Verdict.PUBLISHED, attempt.error
            taken += 1

        def step(what: str) -> None:
            nonlocal wanted
            steps(what)
            if what.startswith("turn"):
                wanted += 1
                session.want_snapshot()

        def busy() -> bool:
            told = all(one.state is State.IDLE for one in session.participants._joined.values())
            return taken < wanted or not told or session.stager.busy or session.flushing._scheduled

        async def settled() -> None:
            due = time.monotonic() + PATIENCE_S
            await asyncio.sleep(0)
            while busy():
                assert time.monotonic() < due, f"waited for snapshot {wanted} of {taken} or a flush; seen: {steps.seen}"
                await asyncio.sleep(0.0005)

        session.on_attempt = count
        mailbox = Mailbox(self.folder / "mailbox.sqlite", step=steps)
        source = TokenSource(session, steps, self.mode, settled)
        agent = Workplace(source, session, "r", task, mailbox, turns=self.turns, params=TOKENS, step=step)
        for one in (mailbox, agent):
            await asyncio.to_thread(session.participants.join, one, PATIENCE_S)
        context = await asyncio.wait_for(agent.run(), PATIENCE_S)
        self.tokens = await agent.trajectory.tokens()
        await settled()
        await session.stop(timeout_s=PATIENCE_S)
        self.generated, self.diverged = source.generated, session.counters.calls_diverged
        return context

    def _step_at_the_store(self, session: RecoverySession) -> None:
        """From here on every object that is created is a step."""
        assert session.opened is not None
        store = SteppingStore(session.opened.store, self.steps)
        for part in (session.opened.publication, session.opened.publication.log, session.stager):
            part._store = store  # type: ignore[union-attr,assignment]

    def outcome(self, context: list[int]) -> str:
        """All that may not depend on crashes, as text."""
        assert self.tokens is not None
        tokens = {
            name: values if isinstance(values, tuple) else values.tolist()
            for one in dataclasses.fields(self.tokens)
            for name, values in [(one.name, getattr(self.tokens, one.name))]
        }
        mailbox = Mailbox(self.folder / "mailbox.sqlite").contents()
        return json.dumps({"context": context, "tokens": tokens, **mailbox}, indent=1)


class Lives:
    """A process without threads of its own that forks one for each life, and says how it ended."""

    def __init__(self) -> None:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.agent_lives"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def live(self, job: Job, die_at: str | None = None) -> int:
        """The exit code, negative for a signal. What it found out is in outcome.json of the job's folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(job.folder), job.mode, die_at]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(PATIENCE_S)


def one_life(folder: str, mode: ModeName, die_at: str | None) -> None:
    """In a process of its own."""
    job = Job(Path(folder), mode, steps=Steps(die_at))
    outcome = job.outcome(job.live())
    said = {"outcome": outcome, "generated": job.generated, "steps": job.steps.seen}
    Path(folder, "outcome.json").write_text(json.dumps(said))


def serve() -> None:
    with tempfile.TemporaryDirectory() as folder:  # what is slow the first time is not so in the lives to come
        Job(Path(folder), "turn").live()
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                one_life(*json.loads(line))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        due = time.monotonic() + PATIENCE_S
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > due:
                os.kill(pid, signal.SIGABRT)
            time.sleep(0.001)
        print(os.waitstatus_to_exitcode(ended[1]), flush=True)


if __name__ == "__main__":
    serve()
